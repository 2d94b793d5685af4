"""``convert``: rows of any input as one file, without documents or tokens.

Read `row_conversion.py` first.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
