"""Media of batches: threads read and process them ahead.

Read `batch_media.py` first.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
