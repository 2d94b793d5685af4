"""From records to token ids and loss masks.

Read `record_parsers.py` and `encode_documents.py` first.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
