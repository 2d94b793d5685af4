"""Readers of file formats as records, one module per format.

Read `format_registry.py` first.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
