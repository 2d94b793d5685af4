"""Text cleaning: pure functions from a document's text to the text to tokenize.

`registry.py` lists every step; a new step is one module and one entry there.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
