"""Batches: the rows of a plan as arrays and tensors.

`loading/` holds the loader, `assembly/` fills the arrays, `media/` adds images, audio and video.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
