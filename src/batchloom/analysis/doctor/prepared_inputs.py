"""What is told of inputs that are prepared already: stores and bare Megatron prefixes."""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from batchloom.analysis.doctor.preview import DocumentPreview, split_preview_segments
from batchloom.analysis.inspection import Inspection, inspect
from batchloom.analysis.path_check import check
from batchloom.core.addresses import has_wildcard, is_url, redact_url as address
from batchloom.core.errors import (
    BatchloomError,
    InputError,
    NoRangesError,
    StoreError,
    StoreMissingError,
)
from batchloom.store import MANIFEST_NAME, open_store
from batchloom.store.read import open_remote_manifest

_FLAT_SUFFIXES, _NPY_MAGIC = (".bin", ".npy"), b"\x93NUMPY"
_MAX_CHECKED_IDS = 8192


@dataclass(frozen=True, slots=True)
class PreparedFacts:
    """A store, a prefix, or a flat file of ids.

    Attributes:
        path: where it lies.
        kind: ``store``, ``prefix`` or ``ids``.
        inspection: what :func:`batchloom.inspect` says of it; None where it cannot be opened, and
            of a flat file, which does not say where its documents end.
        checked: whether every byte of it was verified (``full``).
        faults: what is wrong with it.
        preview: the first documents; of a store only, for a prefix does not name its tokenizer.
    """

    path: str
    kind: str
    inspection: Inspection | None
    checked: bool
    faults: tuple[str, ...]
    preview: tuple[DocumentPreview, ...]


def detect_prepared_kind(location: str) -> str:
    """What an input is that holds tokens: ``store`` (also behind a URL), ``prefix``, ``ids``; empty for all others."""
    if is_url(location):
        return "store" if _is_remote_store(location) else ""
    path = Path(os.path.expanduser(location))  # noqa: PTH111 - Path.expanduser raises for ~nobody
    if (path / MANIFEST_NAME).is_file():
        return "store"
    stem = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    if stem.name and not path.is_dir() and stem.with_name(f"{stem.name}.idx").is_file():
        return "prefix"
    if path.suffix in _FLAT_SUFFIXES and path.is_file():
        with path.open("rb") as file:
            start = file.read(_MAX_CHECKED_IDS)
        # A file of text may have any name; ids have high halves that are zero.
        return "ids" if start.startswith(_NPY_MAGIC) or b"\0" in start else ""
    return ""


def _is_remote_store(url: str) -> bool:
    """Whether a store lies at a URL; what has an ending is a file, what cannot be reached is told by who reads it."""
    if has_wildcard(url) or Path(address(url)).suffix:
        return False
    try:
        open_remote_manifest(url)
    except StoreMissingError:
        return False
    except (StoreError, NoRangesError):
        return True  # A damaged one, or on a server from where it is not read: its own error says so.
    except InputError:
        return False
    return True


def examine_prepared(location: str, seq_len: int, preview: int, *, full: bool) -> PreparedFacts:
    """Open a store or prefix, and verify it where everything is to be read."""
    kind = detect_prepared_kind(location)
    expanded_location = location if is_url(location) else os.path.expanduser(location)  # noqa: PTH111
    faults: list[str] = []
    inspection: Inspection | None = None
    previews: tuple[DocumentPreview, ...] = ()
    try:
        if kind != "ids":
            inspection = inspect(expanded_location, seq_len=seq_len, first=0)
            faults += check(expanded_location).faults if full else []
        if kind == "store":
            previews = _preview_store(expanded_location, preview)
    except BatchloomError as error:
        faults.append(str(error))
    return PreparedFacts(location, kind, inspection, full and kind != "ids", tuple(faults), previews)


def _preview_store(location: str, count: int) -> tuple[DocumentPreview, ...]:
    store = open_store(location)
    previews = []
    for number in store.contents.list_first(count):
        ids = store[number].ids.astype(np.int64)
        span = (np.array([number]), np.zeros(1, np.int64), np.array([ids.size]))
        trained = store.mask(*span)[0] if store.masked else np.ones(ids.size, bool)
        origin, segments = (
            store.provenance.of(number),
            tuple(split_preview_segments(store.tokenizer, ids, trained)),
        )
        row = None if origin.line else origin.record + 1
        previews.append(DocumentPreview(origin.source, origin.line, row, ids.size, int(trained.sum()), segments))
    return tuple(previews)
