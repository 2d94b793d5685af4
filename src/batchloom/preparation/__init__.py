"""Preparing: from input files to a store, in units and phases that can stop and go on."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
