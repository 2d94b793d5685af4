"""Document packing into sequences, and permutations of documents and sequences.

Read `strategies.py` and `pools.py` first.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
