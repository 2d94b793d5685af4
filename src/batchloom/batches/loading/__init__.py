"""The loader: which rows a process reads, and where their tokens come from.

Read `loader.py` first.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
