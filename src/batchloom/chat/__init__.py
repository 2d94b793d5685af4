"""Conversations: from the columns of a record to turns, and from turns to the text of a template.

`schema/` reads records, `templates/` renders them.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
