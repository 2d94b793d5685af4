"""The store: Megatron shards with manifest, tokenizer and provenance.

`format/` defines the files, `read/` opens them, `write/` makes them, `maintain/` changes and verifies stores,
`export_targets.py` converts them. docs/reference/format.md is the normative specification.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
