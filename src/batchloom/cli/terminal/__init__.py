"""Terminal helpers of the commands: console, previews, and shared options.

Read `console.py` first.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
