"""Models of the reference trainer: a small GPT, and Hugging Face language models.

Read `gpt_model.py` first.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
