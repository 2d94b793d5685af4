"""Images, audio and video: headers, token counts, and features for models.

Read `processor.py` first.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
