"""Published quality rules for web text: C4, Gopher, FineWeb, boilerplate.

Read `gopher.py` first.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
