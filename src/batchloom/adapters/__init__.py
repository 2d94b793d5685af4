"""Trainer adapters: translation only, one module or folder per framework.

Each module is public: import from `batchloom.adapters.lightning` and so on. Read `pytorch.py` first.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
