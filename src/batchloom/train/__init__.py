"""Reference trainer: a small GPT or a pretrained model on the batches of a loader.

Read `loop.py`: `start_training` is the command train, `iter_training` its loop. `run_data.py` opens the data of a run,
`run.py` sets it up, `model/` builds its model, `run_folder.py` holds its files.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
