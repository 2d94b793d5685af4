"""The loader: selection of a process's rows, and sources of their tokens.

Read `loader.py` first.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
