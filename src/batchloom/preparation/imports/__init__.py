"""``import``: stores of files of token ids, linked or copied.

Read `token_import.py` and `import_run.py` first.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
