"""Images, audio and video: their headers, their length in tokens, and the features a model is given.

Read `processor.py` first.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
