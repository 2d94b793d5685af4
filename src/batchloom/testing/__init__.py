"""What tests of batchloom's users (and its own) are written with."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
