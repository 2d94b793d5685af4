"""Pages on which people look at stores, mixtures and runs in a browser.

Read `server.py` first, then `pages.py`, which has one method per page.
"""

import lazy_loader

from batchloom.adapters.requirements import STARLETTE, UVICORN, require_installed

require_installed(STARLETTE, UVICORN)

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
