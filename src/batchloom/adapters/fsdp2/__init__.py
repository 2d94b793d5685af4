"""FSDP2: sharding, checkpoints, and `FSDP2SFTTrainer`.

Read `fsdp2_state.py` first.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
