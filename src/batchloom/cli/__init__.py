"""The command line: options and printing; other packages do the work.

One module a command. Read `main.py` and `commands.py` first.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
