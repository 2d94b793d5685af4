"""Input files: find them, cut them into parts, read the parts as records.

`files/` gives access to bytes, `formats/` turns bytes into records. Read `listing.py` and `part_reader.py` first.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
