"""Data of a training run: stores, mixtures, raw inputs, and synthetic fallbacks.

Read `dataset_run.py` first.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
