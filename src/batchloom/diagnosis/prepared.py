"""What is told of inputs that are prepared already: stores and bare Megatron prefixes."""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from batchloom.batches.inspect import Inspection, inspect
from batchloom.core.errors import BatchloomError
from batchloom.preparation.check import check
from batchloom.preparation.preview import Preview, cut_pieces
from batchloom.store.format import MANIFEST_NAME
from batchloom.store.reader import open_store


@dataclass(frozen=True, slots=True)
class PreparedFacts:
    """A store or a prefix.

    Attributes:
        path: where it lies.
        kind: ``store`` or ``prefix``.
        inspection: what :func:`batchloom.inspect` says of it; None where it cannot be opened.
        checked: whether every byte of it was verified (``full``).
        faults: what is wrong with it.
        preview: the first documents; of a store only, for a prefix does not name its tokenizer.
    """

    path: str
    kind: str
    inspection: Inspection | None
    checked: bool
    faults: tuple[str, ...]
    preview: tuple[Preview, ...]


def is_prepared(given: str) -> bool:
    """Whether an input is a store, or a Megatron prefix that is not a file of another kind."""
    place = Path(os.path.expanduser(given))  # noqa: PTH111 - Path.expanduser raises for ~nobody
    if (place / MANIFEST_NAME).is_file():
        return True
    stem = place.with_suffix("") if place.suffix in (".bin", ".idx") else place
    return bool(stem.name) and not place.is_dir() and stem.with_name(f"{stem.name}.idx").is_file()


def prepared_facts(given: str, seq_len: int, preview: int, *, full: bool) -> PreparedFacts:
    """Open a store or prefix, and verify it where everything is to be read."""
    place = Path(os.path.expanduser(given))  # noqa: PTH111
    kind = "store" if (place / MANIFEST_NAME).is_file() else "prefix"
    faults: list[str] = []
    found: Inspection | None = None
    shown: tuple[Preview, ...] = ()
    try:
        found = inspect(place, seq_len=seq_len, first=0)
        shown = _preview(place, preview) if kind == "store" else ()
        faults += check(place).faults if full else []
    except BatchloomError as error:
        faults.append(str(error))
    return PreparedFacts(given, kind, found, full, tuple(faults), shown)


def _preview(place: Path, count: int) -> tuple[Preview, ...]:
    store = open_store(place)
    shown = []
    for number in range(min(count, len(store))):
        ids = store[number].ids.astype(np.int64)
        span = (np.array([number]), np.zeros(1, np.int64), np.array([ids.size]))
        trained = store.mask(*span)[0] if store.masked else np.ones(ids.size, bool)
        origin, pieces = store.origin(number), tuple(cut_pieces(store.tokenizer, ids, trained))
        row = None if origin.line else origin.record + 1
        shown.append(Preview(origin.source, origin.line, row, ids.size, int(trained.sum()), pieces))
    return tuple(shown)
