"""Plan of a run: positions, timeline, edits and state.

Read `plan.py` first.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
