"""Choice of the files of folders and archives by patterns."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import final

from batchloom.core.addresses import redact_url

# Count of files that patterns leave out, in the notes of a listing.
NOT_SELECTED = "by --include or --exclude"
_MAX_DOUBLE_STARS = 6


@final
class FileChoice:
    """Choice of the files of folders and archives by patterns.

    A pattern without a slash matches the name of a file, or of a folder and all files below it. A pattern with a slash
    matches the end of a path, in which the name of the input may stand first. A pattern that begins with a slash
    matches from the root of the input. ``*`` also matches slashes, and ``**/`` any number of folders.

    Attributes:
        root: label of the input whose files are chosen.
        unmatched: (option, pattern) of those that have matched no file yet.
    """

    def __init__(self) -> None:
        self.root = ""
        self.unmatched: set[tuple[str, str]] = set()
        self._matched: set[tuple[str, str]] = set()

    def selects(self, name: str, include: Sequence[str], exclude: Sequence[str]) -> bool:
        """Return whether a file is read; ``name`` begins with the root, but for a glob."""
        if not (include or exclude):
            return True
        name = redact_url(name)
        included = self._find_matches(name, "--include", include)
        excluded = self._find_matches(name, "--exclude", exclude)
        return (included or not include) and not excluded

    def _find_matches(self, name: str, option: str, patterns: Sequence[str]) -> bool:
        path = name.removeprefix(f"{self.root}/")
        matches = {(option, pattern) for pattern in patterns if _matches(path, name, pattern)}
        self._matched |= matches
        self.unmatched |= {(option, pattern) for pattern in patterns}
        self.unmatched -= self._matched
        return bool(matches)


def _matches(path: str, name: str, pattern: str) -> bool:
    pattern = pattern.removeprefix("./").rstrip("/")
    if "/" not in pattern:
        return any(fnmatchcase(part, pattern) for part in path.split("/"))
    subject = f"/{path}" if pattern.startswith("/") else f"/{name}"
    # Each ``**/`` may stand for no folder.
    first, *parts = pattern.split("**/")
    forms = [first]
    for number, part in enumerate(parts):
        choices = ("", "*/") if number < _MAX_DOUBLE_STARS else ("*/",)
        forms = [form + folders + part for form in forms for folders in choices]
    forms = [form if form.startswith("/") else f"*/{form}" for form in forms]
    return any(fnmatchcase(subject, form) or fnmatchcase(subject, f"{form}/*") for form in forms)
