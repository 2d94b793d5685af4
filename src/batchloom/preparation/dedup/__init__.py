"""Duplicate search in bounded memory: sorted keys, line dedup, MinHash signatures.

Read `sorted_keys.py` and `duplicate_search.py` first.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
