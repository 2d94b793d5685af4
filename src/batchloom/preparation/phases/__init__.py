"""The phases of a job: tokenize units, resolve duplicates, write shards.

Read `phase_runner.py` first, then `tokenize_unit.py`, `duplicate_resolution.py` and `unit_shards.py`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
