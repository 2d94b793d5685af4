"""Answers to questions about inputs, stores, plans and runs.

One module or folder per command: doctor, check, inspect, explain, when, forecast and compare.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
