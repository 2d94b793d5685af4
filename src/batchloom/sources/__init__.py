"""Sources: finding input files, cutting them into parts, reading parts as documents."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
