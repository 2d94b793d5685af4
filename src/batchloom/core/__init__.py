"""Foundations shared by all other packages.

Errors, settings, documents, fingerprints, locks and small text helpers. Other packages import from its modules
(`batchloom.core.errors` and so on). Read `errors.py` and `document.py` first.
"""
