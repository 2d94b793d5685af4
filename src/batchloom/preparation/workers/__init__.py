"""Executors of tasks: this process, a pool of processes, or a Ray cluster.

Read `protocols.py` first.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
