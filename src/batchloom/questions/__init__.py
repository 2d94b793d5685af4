"""Questions about a run, answered offline from store and plan, or from a checkpoint."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
