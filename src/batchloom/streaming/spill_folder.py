"""The folder of what a stream lays aside: what a process that was killed left is deleted by the next stream."""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO

_FOLDER_PREFIX, _OWNER_FILE = "batchloom-stream-", "owner"


def make_spill_folder() -> tuple[Path, IO[bytes]]:
    """A folder among those for temporary files, and the open file by which others see that it is in use.

    The file is locked for as long as it is open in any process: a lock goes with its holder, however that ends, and is
    seen by whoever sees the file, also from another container.
    """
    _remove_orphaned_folders(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX))
    file = (folder / f"{_OWNER_FILE}.new").open("wb")
    fcntl.flock(file, fcntl.LOCK_EX)
    # Under its name it is locked already.
    (folder / f"{_OWNER_FILE}.new").rename(folder / _OWNER_FILE)
    return folder, file


def _remove_orphaned_folders(home: Path) -> None:
    """Delete the folders of this user whose owners are gone."""
    for owner_file in home.glob(f"{_FOLDER_PREFIX}*/{_OWNER_FILE}"):
        # What is locked, or cannot be looked at, is somebody's.
        with suppress(OSError), owner_file.open("rb") as file:
            if owner_file.lstat().st_uid == os.getuid():
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(owner_file.parent, ignore_errors=True)
