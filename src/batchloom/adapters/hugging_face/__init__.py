"""Hugging Face `Trainer` and TRL `SFTTrainer`: dataset, collator, callback, loss.

Read `trainer_objects.py` first.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
