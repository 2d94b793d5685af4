"""Units of work: their temporary files, tasks, reports and the work folder.

Read `units.py` and `work_folder.py` first.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
