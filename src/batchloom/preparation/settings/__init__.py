"""Settings of a preparation: the recipe and the groups of options in it.

Read `recipe.py` first.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
