"""Preparation: from input files to a store, in units and phases that can stop and resume.

`prepare_job.py` is the entry; `prepare_run.py` runs the phases of `phases/` over the units of `units/`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
