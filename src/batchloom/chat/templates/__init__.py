"""Chat templates: rendering in a bounded sandbox, and which parts of the text are trained.

Read `chat_template.py` and `rendering.py` first.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
