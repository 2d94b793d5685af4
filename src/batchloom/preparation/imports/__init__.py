"""Import of files of token ids as a store, without tokenizing.

Read `token_import.py` first.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
