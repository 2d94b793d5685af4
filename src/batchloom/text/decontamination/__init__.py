"""Removal of documents that overlap with evaluation sets, by n-grams of words.

Read `overlap.py` first.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
