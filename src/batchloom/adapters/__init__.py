"""Frameworks' own faces over the loader: translation only, one file a framework."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
