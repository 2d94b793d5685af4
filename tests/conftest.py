import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real inputs, where there is one."""
    folder = os.environ.get("BATCHLOOM_REAL_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("BATCHLOOM_REAL_DATA names no folder: real inputs are not here")
    return Path(folder)
