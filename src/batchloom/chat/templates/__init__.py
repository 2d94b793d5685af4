"""Chat templates: sandboxed rendering, and the trained parts of the text.

Read `chat_template.py` and `rendering.py` first.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
