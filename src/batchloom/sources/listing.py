"""Finding the input files: files, folders and globs, in an order that is always the same."""

import glob
import os
import stat
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from batchloom.core.errors import InputError, InputMissingError
from batchloom.core.spec import nearest
from batchloom.sources.hub import (
    HubName,
    hub_name,
    keep_copies,
    list_hub,
    pin,
    revision_of,
    unpinned,
)
from batchloom.sources.kinds import (
    SNIFF_BYTES,
    Verdict,
    compression_by_name,
    kind_by_content,
    kind_by_name,
)
from batchloom.sources.places import (
    STANDARD_INPUT,
    has_wildcard,
    is_far,
    is_url,
    labels_of,
    local_path,
    shown,
)
from batchloom.sources.presets import preset_names
from batchloom.sources.remote import has_ranges, remote_files, remote_glob, remote_status
from batchloom.sources.rules import Source
from batchloom.sources.spool import Spool
from batchloom.sources.streams import PartStream

# A folder with this file is a store, which is no text.
STORE_MARK = "dataset_metadata.json"
_FIRST_LINE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Listing:
    """The input files in the order they are read, and sentences about what was left out."""

    sources: tuple[Source, ...]
    notes: tuple[str, ...]

    @property
    def bytes(self) -> int:
        """Bytes of all files as they lie on disk."""
        return sum(source.size for source in self.sources)


def list_sources(
    inputs: Sequence[str],
    *,
    exclude: Path | None = None,
    spool: Spool | None = None,
    streaming: bool | None = None,
) -> Listing:
    """List the files of ``inputs`` in the order given, inside a folder sorted by path.

    Hidden files, ``__pycache__``, stores, empty files, and what is no text, code or JSONL are
    left out of folders and globs, and counted in the notes. A file named twice is listed once.

    Args:
        inputs: files, folders and globs, also behind URLs, and ``-`` for standard input.
        exclude: a folder that is left out wherever it lies (the output).
        spool: keeps what can be read only once; without it such inputs are errors.
        streaming: whether data sets of the Hub are read where they lie rather than downloaded
            first; None: those above 10 GB are.

    Raises:
        InputMissingError: an input does not exist, is empty or holds no usable file.
        InputError: a file named by itself cannot be used, or something cannot be read.
    """
    lister = _Lister(exclude, spool, streaming=streaming)
    labels = input_labels(inputs)
    for given, label in zip(inputs, labels, strict=True):
        lister.add(os.path.expanduser(local_path(given)), label)  # noqa: PTH111 - a string stays a string
    return Listing(tuple(lister.sources), tuple(lister.notes))


def input_labels(inputs: Sequence[str]) -> list[str]:
    """What the inputs are called where no absolute path may stand.

    A relative input as it was given; of an absolute one the last part of its path (of a glob,
    from the first part with a wildcard), with the parts before it where two would be alike. A URL
    without credentials and query.
    """
    far = iter(labels_of([given for given in inputs if is_far(given)]))
    near = [local_path(given) for given in inputs if not is_far(given)]
    plain = [os.path.normpath(os.path.expanduser(given)) for given in near]  # noqa: PTH111
    names = iter([_label(path, {other for other in plain if other != path}) for path in plain])
    return [next(far) if is_far(given) else next(names) for given in inputs]


def _label(path: str, others: set[str]) -> str:
    if not os.path.isabs(path):  # noqa: PTH117
        return path
    parts = path.strip("/").split("/")
    first = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts) - 1)
    for start in range(first, 0, -1):
        tail = "/".join(parts[start:])
        if not any(other == tail or other.endswith(f"/{tail}") for other in others):
            return tail
    return "/".join(parts)


@final
class _Lister:
    def __init__(
        self, exclude: Path | None, spool: Spool | None, *, streaming: bool | None
    ) -> None:
        self._spool, self._streaming = spool, streaming
        self.sources: list[Source] = []
        self.notes: list[str] = []
        self._exclude = _identity(exclude) if exclude else None
        self._files: set[tuple[int, int]] = set()
        self._folders: set[tuple[int, int]] = set()
        self._left: Counter[str] = Counter()
        self._twice: list[str] = []

    def add(self, given: str, label: str) -> None:
        self._left, self._twice = Counter(), []
        self._folders = set()
        before = len(self.sources)
        if given == STANDARD_INPUT:
            given = self._spooled().standard_input()
            self.notes.append(
                "Standard input is kept until the job ends; to go on after a stop, give the same bytes again."
            )
        far = hub_name(given)
        if far is None:
            given = pin(given)
        found = None if far and is_url(given) else self._stat(given)
        if far and found is None:
            self._add_hub(far)
        elif is_url(given):
            self._add_far(given, label, found)
        elif found is None and glob.has_magic(given):
            self._add_glob(given, label)
        elif found is None:
            raise InputMissingError(
                f"There is no file or folder {given}{nearest(given, preset_names())}."
            )
        elif stat.S_ISDIR(found.st_mode):
            if os.path.exists(f"{given}/{STORE_MARK}"):  # noqa: PTH110
                raise InputError(f"{given} is a store already; name the text files it was made of.")
            self._add_folder(given, label, found)
        else:
            self._add_named(given, label, found)
        self._tell(label)
        if len(self.sources) == before and not self._twice:
            raise InputMissingError(self._nothing_in(given))

    def _add_hub(self, name: HubName) -> None:
        """The data files of a data set of the Hub, downloaded first or not."""
        files, note = list_hub(name)
        self.notes.append(note)
        if left := keep_copies(files, streaming=self._streaming):
            self.notes.append(left)
        for file in files:
            self._add_file(file.url, file.name, file.status)

    def _add_far(self, url: str, label: str, found: os.stat_result | None) -> None:
        """A file, a folder or a glob behind a URL."""
        if found is not None and not stat.S_ISDIR(found.st_mode):
            if has_ranges(url):
                self._add_named(url, label, found)
            else:
                path = self._spooled().web_file(url)
                self._add_named(path, label, os.stat(path))  # noqa: PTH116
        elif found is None and has_wildcard(url):
            wanted = url.rpartition("/")[2].startswith(".")
            for place, status in remote_glob(url):
                if shown(place).rpartition("/")[2].startswith(".") and not wanted:
                    self._left["hidden"] += 1
                else:
                    self._add_file(place, unpinned(shown(place)), status)
        elif found is None:
            raise InputMissingError(f"There is no file or folder {label}.")
        else:
            self._add_far_folder(url, label)

    def _add_far_folder(self, url: str, label: str) -> None:
        files = remote_files(url)
        stores = {
            inside.rpartition("/")[0] for _, inside, _ in files if inside.endswith(STORE_MARK)
        }
        for place, inside, status in files:
            parts = inside.split("/")
            above = {"/".join(parts[:count]) for count in range(len(parts))}
            if any(part.startswith(".") for part in parts):
                self._left["hidden"] += 1
            elif "__pycache__" in parts:
                self._left["__pycache__"] += 1
            elif above & stores:
                self._left["files of stores"] += 1
            else:
                self._add_file(place, f"{label.rstrip('/')}/{inside}", status)

    def _tell(self, label: str) -> None:
        if self._left:
            counts = ", ".join(f"{count:,} {what}" for what, count in sorted(self._left.items()))
            self.notes.append(f"Left out of {label}: {counts}.")
        if self._twice:
            more = f" and {len(self._twice) - 1:,} more" if len(self._twice) > 1 else ""
            self.notes.append(f"Named more than once, read once: {self._twice[0]}{more}.")

    def _nothing_in(self, place: str) -> str:
        counts = ", ".join(f"{count:,} {what}" for what, count in sorted(self._left.items()))
        given = unpinned(shown(place))
        if self._stat(place) is None:
            there = (
                f"Nothing matches {given}"
                if not counts
                else f"{given} matches no usable file, only {counts}"
            )
        else:
            there = (
                f"{given} holds no usable file, only {counts}"
                if counts
                else f"{given} holds no files"
            )
        return f"{there}; wanted are text, code or JSON Lines (.txt, .md, .py, .jsonl, ..., also .gz and .zst)."

    def _add_glob(self, pattern: str, label: str) -> None:
        matches = sorted(glob.glob(pattern, recursive=True), key=lambda path: path.split("/"))  # noqa: PTH207
        # Names under an absolute pattern begin where its first wildcard stands, as its label does.
        cut = len(os.path.normpath(pattern)) - len(label)
        for path in matches:
            name = os.path.normpath(path)[cut:]
            found = self._stat(path)
            if found is None:
                self._left["broken links"] += 1
            elif stat.S_ISDIR(found.st_mode):
                # After ** the files below come as matches of their own.
                if not pattern.endswith(("**", "**/", "**/*")):
                    self._add_folder(path, name, found)
            else:
                self._add_file(path, name, found)

    def _add_folder(self, folder: str, name: str, found: os.stat_result) -> None:
        """Everything below a folder; an explicit stack, since folders may be deeper than calls."""
        stack = [(folder, name, found)]
        while stack:
            path, label, status = stack.pop()
            if stat.S_ISDIR(status.st_mode):
                if not self._entered(path, status):
                    stack += reversed(self._entries(path, label))
            else:
                self._add_file(path, label, status)

    def _entered(self, path: str, status: os.stat_result) -> bool:
        """Whether a folder is not to be walked: seen on the way here, the output, or a store."""
        identity = (status.st_dev, status.st_ino)
        if identity in self._folders:
            self._left["folders linked twice"] += 1
            return True
        self._folders.add(identity)
        if identity == self._exclude or os.path.exists(f"{path}/{STORE_MARK}"):  # noqa: PTH110
            self._left["stores"] += 1
            return True
        return False

    def _entries(self, folder: str, label: str) -> list[tuple[str, str, os.stat_result]]:
        prefix = "" if label in ("", ".") else f"{label}/"
        entries = []
        try:
            with os.scandir(folder) as scan:
                for entry in sorted(scan, key=lambda entry: entry.name):
                    if entry.name.startswith("."):
                        self._left["hidden"] += 1
                    elif entry.name == "__pycache__":
                        self._left["__pycache__"] += 1
                    elif (status := self._stat(entry.path)) is None:
                        self._left["broken links"] += 1
                    else:
                        entries.append((entry.path, prefix + entry.name, status))
        except OSError as error:
            raise InputError(
                f"Folder {folder} cannot be read: {(error.strerror or '').lower()}."
            ) from error
        return entries

    def _add_file(self, path: str, name: str, found: os.stat_result) -> None:
        """A file found in a folder or by a glob: left out, and counted, where it is of no use."""
        if not stat.S_ISREG(found.st_mode):
            self._left["special files"] += 1
        elif found.st_size == 0:
            self._left["empty"] += 1
        else:
            verdict = self._verdict(path, name, found)
            if verdict.kind is None:
                self._left[verdict.label] += 1
            else:
                self._append(path, name, found, verdict)

    def _add_named(self, path: str, name: str, found: os.stat_result) -> None:
        """A file named by itself: an error where it is of no use."""
        place = name if self._spool and self._spool.holds(path) else unpinned(shown(path))
        if not stat.S_ISREG(found.st_mode):
            raise InputError(
                f"{place} is neither a file nor a folder; write what it gives into a file first."
            )
        if found.st_size == 0:
            raise InputMissingError(f"{place} is empty: it has 0 bytes.")
        verdict = self._verdict(path, name, found)
        if verdict.kind is None:
            raise InputError(f"{place} is not read yet ({verdict.label}): {verdict.remedy}.")
        self._append(path, name, found, verdict)

    def _spooled(self) -> Spool:
        if self._spool is None:
            raise InputError("An input that can be read only once is of no use here; name a file.")
        return self._spool

    def _append(self, path: str, name: str, found: os.stat_result, verdict: Verdict) -> None:
        if verdict.kind is None:
            raise AssertionError("only files of a kind that is read are listed")
        name = _printable(name)
        identity = (found.st_dev, found.st_ino)
        if identity in self._files:
            self._twice.append(name)
            return
        self._files.add(identity)
        self.sources.append(
            Source(
                name,
                path,
                verdict.kind,
                verdict.compression,
                found.st_size,
                found.st_mtime_ns,
                revision_of(path),
            )
        )

    def _verdict(self, path: str, name: str, found: os.stat_result) -> Verdict:
        verdict = kind_by_name(shown(path))
        if verdict is not None:
            return verdict
        look = Source(
            _printable(name),
            path,
            "text",
            compression_by_name(shown(path)),
            found.st_size,
            found.st_mtime_ns,
        )
        with PartStream(look) as stream:
            start = stream.read_up_to(SNIFF_BYTES)
            if start.startswith(b"{") and b"\n" not in start:
                start += stream.read_up_to(_FIRST_LINE_BYTES)
        return kind_by_content(shown(path), start)

    def _stat(self, path: str) -> os.stat_result | None:
        if is_url(path):
            return remote_status(path)
        try:
            return os.stat(path)  # noqa: PTH116 - a Path a file costs more than the call
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            # A link that leads back to itself is as good as a broken one.
            if os.path.islink(path):  # noqa: PTH114
                return None
            raise InputError(f"{path} cannot be read: {(error.strerror or '').lower()}.") from error


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _printable(name: str) -> str:
    """The name with bytes that are no UTF-8 replaced, since the manifest is JSON."""
    return os.fsencode(name).decode("utf-8", "replace")
