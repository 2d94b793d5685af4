"""Whether trainers are given the same batches: what reached the model, told by hooks, and compared."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
