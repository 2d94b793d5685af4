"""`doctor` and `check`: contents and faults of inputs, and how to prepare them.

Read `diagnosis.py` and `examination.py` first.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
