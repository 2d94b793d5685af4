"""The store: Megatron shards with a manifest, a tokenizer and the origin of each document."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
