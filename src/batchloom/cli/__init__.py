"""The command line: options and printing; the work is done by the functions it calls."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
