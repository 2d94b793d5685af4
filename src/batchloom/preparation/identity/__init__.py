"""Identity of a recipe: its plain form, and the contents of the files it names.

Read `recipe_identity.py` first.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
