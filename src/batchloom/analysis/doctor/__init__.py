"""`doctor`: contents and faults of inputs, and the command that prepares them.

Read `diagnosis.py` and `examination.py` first.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
