"""Finding duplicates in bounded memory: keys are sorted and kept in files."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
