"""The phases of a job: tokenize units, resolve duplicates, write shards.

`../prepare_run.py` calls them in this order: `tokenize_phase.py` (with `tokenize_unit.py` in the workers),
`find_duplicates.py`, `duplicate_resolution.py`, `unit_shards.py`, `finish.py`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
