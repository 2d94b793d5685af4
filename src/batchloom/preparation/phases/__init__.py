"""The phases of a job: tokenize units, resolve duplicates, write shards.

`../prepare_run.py` calls them in this order: `sample_phase.py`, `tokenize_phase.py` (with `tokenize_unit.py` in the
workers), `shard_phase.py` (with `find_duplicates.py`, `duplicate_resolution.py`, `subset_decision.py` and
`unit_shards.py`), `finish.py`. `prepare_notes.py` words what they report.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
