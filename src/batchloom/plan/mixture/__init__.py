"""Mixtures: named sources, their weights, and the schedule that realizes them.

Read `mixture_spec.py` first.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
