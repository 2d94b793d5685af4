"""Writers of stores: every file gets a temporary name, is synced, and renamed.

Read `store_writer.py` first.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
