"""Text: pure functions from a document's text to the text that is tokenized."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
