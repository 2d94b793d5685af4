"""Symbolic links that lead out of a folder."""

import os
from typing import final


@final
class LinkBounds:
    """Detector of paths that leave a folder through a symbolic link; caches folders."""

    def __init__(self) -> None:
        self._real: dict[str, str] = {}

    def resolve(self, path: str) -> str:
        """Return the absolute path without links."""
        folder, name = os.path.split(os.path.abspath(path))  # noqa: PTH100 - many paths
        if folder not in self._real:
            self._real[folder] = os.path.realpath(folder)
        full = f"{self._real[folder].rstrip('/')}/{name}"
        return os.path.realpath(full) if os.path.islink(full) else full  # noqa: PTH114

    def find_outside_link(self, top: str, path: str) -> str | None:
        """Return the first link by which a path leaves a folder; None if it stays inside.

        Args:
            top: the folder, which may be a link itself.
            path: an existing path below it.
        """
        if is_inside(self.resolve(path), self.resolve(top)):
            return None
        # Every file below a linked folder leaves by the same link.
        folder = os.path.dirname(path)  # noqa: PTH120 - as above
        above = None if folder in ("", "/", top) else self.find_outside_link(top, folder)
        return above or path


def is_inside(path: str, folder: str) -> bool:
    """Return whether an absolute path is a folder or is below it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")
