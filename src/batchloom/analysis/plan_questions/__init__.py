"""Lookups shared by the commands that report on plans.

Read `plan_lookup.py` first.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
