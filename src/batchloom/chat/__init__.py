"""Conversations: records parsed into turns, and turns rendered with a template.

`schema/` reads records, `templates/` renders them.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
