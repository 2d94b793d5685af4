"""`compare`: batches and losses of several trainers, or of finished runs.

Read `comparison.py` first.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
