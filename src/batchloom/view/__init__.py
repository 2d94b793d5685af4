"""Web pages of stores, mixtures, runs and raw inputs.

Read `server.py` first, then `pages.py`, which has one method per page.
"""

import lazy_loader

from batchloom.adapters.requirements import Requirement, require_installed

require_installed(Requirement("starlette", "0.46", "view"), Requirement("uvicorn", "0.34", "view"))

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
