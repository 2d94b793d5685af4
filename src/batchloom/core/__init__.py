"""Foundations shared by all other packages.

Errors, settings, documents, fingerprints, locks and small text helpers. Other packages import from its modules
(`batchloom.core.errors` and so on). Read `errors.py` and `document.py` first.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
