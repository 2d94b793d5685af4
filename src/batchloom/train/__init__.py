"""The reference trainer: a small GPT on the batches of a loader, and the demo."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
