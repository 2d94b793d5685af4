"""The files of a store: layout, dtypes, headers and the manifest.

docs/reference/format.md is the normative specification. Read `layout.py` and `manifest.py` first.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
