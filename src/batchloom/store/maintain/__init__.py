"""Maintenance of stores: generations, removal, compaction and verification.

Read `generations.py` first.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
