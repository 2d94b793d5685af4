"""Batch arrays: layout, labels, augmentation, collation and the move to a device.

Read `batch_assembly.py` first.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
