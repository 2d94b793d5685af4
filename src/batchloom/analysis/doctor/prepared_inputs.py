"""Facts about prepared inputs: stores, Megatron prefixes and flat id files."""

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
    """A store, a Megatron prefix, or a flat file of ids.

    Attributes:
        path: path or URL, as it was given.
        kind: ``store``, ``prefix`` or ``ids``.
        inspection: result of :func:`batchloom.inspect`; None if it cannot be opened, and for a flat
            file, which does not record document boundaries.
        checked: whether every byte was verified (``full``).
        faults: errors found in it.
        preview: the first documents of a store; empty for a prefix, which does not name its tokenizer.
    """

    path: str
    kind: str
    inspection: Inspection | None
    checked: bool
    faults: tuple[str, ...]
    preview: tuple[DocumentPreview, ...]


def detect_prepared_kind(location: str) -> str:
    """Return ``store`` (also at a URL), ``prefix``, ``ids``, or an empty string."""
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
        # A text file may have the same suffix; binary ids contain zero bytes, since their high bytes are mostly zero.
        return "ids" if start.startswith(_NPY_MAGIC) or b"\0" in start else ""
    return ""


def _is_remote_store(url: str) -> bool:
    """Return whether a URL is a store.

    A path with a suffix is a file. An unreachable server is reported when the input is read.
    """
    if has_wildcard(url) or Path(address(url)).suffix:
        return False
    try:
        open_remote_manifest(url)
    except StoreMissingError:
        return False
    except (StoreError, NoRangesError):
        return True  # It is damaged, or its server lacks range requests; opening it reports the error.
    except InputError:
        return False
    return True


def examine_prepared(location: str, seq_len: int, preview: int, *, full: bool) -> PreparedFacts:
    """Open a store or prefix; with ``full``, verify it."""
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
