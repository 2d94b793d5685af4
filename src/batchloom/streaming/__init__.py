"""Streaming: training on raw inputs without a prepared store.

Read `raw_stream.py` and `lane.py` first.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
