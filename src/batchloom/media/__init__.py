"""Images, audio and video: what they are, how long they are in tokens, and what a model is given of them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
