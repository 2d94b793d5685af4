"""Removal of documents that overlap with evaluation sets, by n-grams of words."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
