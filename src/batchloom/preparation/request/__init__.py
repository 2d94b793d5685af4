"""From a call, a recipe file or a store to the recipe and inputs of a job.

Read `recipe_choice.py` first.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
