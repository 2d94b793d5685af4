"""Access to everything behind a network: object stores, web servers and the Hub.

Retries, errors, range requests, uploads and the block cache of remote stores. Read `client.py` first.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
