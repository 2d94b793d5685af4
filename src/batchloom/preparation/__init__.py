"""Preparation of stores from input files, in resumable units and phases.

`prepare_job.py` is the entry, and `resumable_job.py` orders the steps of every job. `prepare_run.py` runs the phases of
`phases/` over the units of `units/`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
