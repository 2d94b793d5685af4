"""Tokenizers: text to ids and back, with a fingerprint of all that determines ids.

Read `tokenizer.py` (the protocol) and `tokenizer_lookup.py` first.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
