"""Listing of the files that a recipe reads.

Read `input_listing.py` first.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
