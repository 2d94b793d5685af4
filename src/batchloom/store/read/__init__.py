"""Reading stores: local, remote and synthetic ones.

`subset_reader.py` is the base class of the readers in `local_reader.py`, `remote_store.py` and `synthetic_store.py`.
Read `store_opening.py` and `store_reader.py` first.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
