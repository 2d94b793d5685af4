"""Choice of the files of an input by patterns."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import final

from batchloom.core.addresses import redact_url
from batchloom.core.files import decode_file_name

# Count of files that patterns leave out, in the notes of a listing.
NOT_SELECTED = "by --include or --exclude"
_MAX_DOUBLE_STARS = 6


@final
class FileChoice:
    """Choice of the files of inputs by patterns.

    A pattern without a slash matches the name of a file, or of a folder and all files below it. A pattern with a slash
    matches the end of a path, in which the name of the input may stand first. A pattern that begins with a slash
    matches from the root of the input. ``*`` also matches slashes, and ``**/`` any number of folders.

    Attributes:
        root: label of the input whose files are chosen.
        left_out: first file of that input that is not read; empty if there is none.
        unmatched: (option, pattern) of those that have matched no file yet.
    """

    def __init__(self) -> None:
        self.root = ""
        self.left_out = ""
        self.unmatched: set[tuple[str, str]] = set()
        self._matched: set[tuple[str, str]] = set()

    def begin_input(self, label: str) -> None:
        """Begin the choice among the files of an input."""
        self.root = label
        self.left_out = ""

    def selects(self, name: str, include: Sequence[str], exclude: Sequence[str]) -> bool:
        """Return whether a file is read; ``name`` begins with the root, but for a glob."""
        if not (include or exclude):
            return True
        name = redact_url(name)
        included = self._find_matches(name, "--include", include)
        excluded = self._find_matches(name, "--exclude", exclude)
        is_read = (included or not include) and not excluded
        if not is_read:
            self.left_out = self.left_out or name
        return is_read

    def _find_matches(self, name: str, option: str, patterns: Sequence[str]) -> bool:
        path = name.removeprefix(f"{self.root}/")
        matches = {(option, pattern) for pattern in patterns if _matches(path, name, pattern)}
        self._matched |= matches
        self.unmatched |= {(option, pattern) for pattern in patterns}
        self.unmatched -= self._matched
        return bool(matches)


def describe_patterns(include: Sequence[str], exclude: Sequence[str]) -> str:
    """Return the options that give these patterns; empty without any."""
    options = (("--include", include), ("--exclude", exclude))
    return " ".join(f"{option} {','.join(patterns)!r}" for option, patterns in options if patterns)


def describe_nothing_chosen(name: str, example: str, include: Sequence[str], exclude: Sequence[str]) -> str:
    """Describe an input without a file that the patterns choose.

    ``example`` is one that they leave out.
    """
    patterns = describe_patterns(include, exclude)
    # A shell replaces a pattern without quotes by the files of its folder.
    is_expanded = include and not any(character in "".join(include) for character in "*?[")
    remedy = " Quote patterns, so that the shell leaves them as they are." if is_expanded else ""
    return f"{patterns} leaves no file of {name} to read, although {decode_file_name(example)} is there.{remedy}"


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
