"""Record schemas: detection, columns, mapping, turns, preferences and media.

Read `schemas.py` and `detection.py` first.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
