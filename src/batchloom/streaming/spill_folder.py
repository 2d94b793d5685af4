"""Spill folder of a stream; the next stream deletes those of killed processes."""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO

_FOLDER_PREFIX, _OWNER_FILE = "batchloom-stream-", "owner"


def make_spill_folder() -> tuple[Path, IO[bytes]]:
    """Create a temporary folder and the open, locked file that marks it as in use.

    The lock lasts while the file is open in any process, ends with its holder, and is
    visible to every process that sees the file, also from another container.
    """
    _remove_orphaned_folders(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX))
    file = (folder / f"{_OWNER_FILE}.new").open("wb")
    fcntl.flock(file, fcntl.LOCK_EX)
    # The rename makes the file visible only after it is locked.
    (folder / f"{_OWNER_FILE}.new").rename(folder / _OWNER_FILE)
    return folder, file


def _remove_orphaned_folders(home: Path) -> None:
    """Delete this user's folders whose owners have ended."""
    for owner_file in home.glob(f"{_FOLDER_PREFIX}*/{_OWNER_FILE}"):
        # A folder that is locked or unreadable has an owner.
        with suppress(OSError), owner_file.open("rb") as file:
            if owner_file.lstat().st_uid == os.getuid():
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(owner_file.parent, ignore_errors=True)
