"""Media of batches: read and processed by threads ahead of need.

Read `batch_media.py` first.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
