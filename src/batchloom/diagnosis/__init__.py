"""Where the facts of inputs meet the plan, before there is a store."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
