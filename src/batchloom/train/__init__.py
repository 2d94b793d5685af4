"""Reference trainer: a small GPT or a pretrained model on the batches of a loader.

Read `iter_training` in `loop.py`. `run_data.py` opens the data of a run, `model/` builds its model.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
