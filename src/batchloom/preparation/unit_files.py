"""The temporary files of a unit: tokens by subset, a row a document, bad records."""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Self, TypeVar, final

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from batchloom.core.document import BadRecord
from batchloom.dedup.exact import write_keys
from batchloom.store.format import SUBSETS
from batchloom.store.pairs import BAD
from batchloom.store.writer import writing
from batchloom.tokens import Tokenizer

_T = TypeVar("_T", bound=np.generic)

ROWS_NAME = "documents.rows"
BAD_NAME = "bad.jsonl"
FACTS_NAME = "unit.json"
KEPT_NAME = "kept.json"
DROPPED_NAME = "dropped.rows"
SHARDS_NAME = "shards.json"
_STRETCH = 1 << 20
# Keys of one file: they are sorted in memory.
_MOST_KEYS = 1 << 20

# One document; `part` counts inside the unit, `side` is 0 where it is no preference.
ROW = np.dtype(
    [
        ("hash", "<u8", (2,)),
        ("record", "<u8"),
        ("offset", "<u8"),
        ("part", "<u4"),
        ("length", "<u4"),
        ("side", "u1"),
    ]
)


_WAITING = np.dtype([("hash", "<u8", (2,)), ("number", "<u4"), ("part", "<u4")])
# Two answers of one text with other labels are no duplicates: the lesser label is folded into the key.
_BAD_LABEL = np.uint64(0x9E3779B97F4A7C15)


def first_of_records(rows: NDArray[np.void], before: tuple[int, int]) -> NDArray[np.bool_]:
    """Whether each row is the first document of its record.

    Args:
        rows: documents in order.
        before: part and record of the document before them.
    """
    parts = np.concatenate([[before[0]], rows["part"].astype(np.int64)])
    records = np.concatenate([[before[1]], rows["record"].astype(np.int64)])
    return np.not_equal(parts[1:], parts[:-1]) | np.not_equal(records[1:], records[:-1])


def keys_of(rows: NDArray[np.void]) -> NDArray[np.uint64]:
    """What duplicates share: the hash of the content, with the label of a labelled answer, uint64 [D, 2]."""
    keys = rows["hash"].copy()
    keys[rows["side"] == BAD, 0] ^= _BAD_LABEL
    return keys


def hash_texts(texts: list[str]) -> NDArray[np.uint64]:
    """XXH3-128 of each text's UTF-8 as (low, high) halves, uint64 [D, 2]."""
    digests = b"".join([xxhash.xxh3_128_digest(text.encode()) for text in texts])
    # A digest is big-endian, its high half first.
    return np.frombuffer(digests, ">u8").reshape(-1, 2)[:, ::-1].astype(np.uint64)


def with_control(
    ids: NDArray[np.generic], bounds: NDArray[np.int64], tokenizer: Tokenizer
) -> NDArray[np.generic]:
    """Documents' ids back to back, each with its end token and, where models expect it, BOS.

    Args:
        ids: ids of all documents [tokens].
        bounds: where each begins, and the end [documents + 1].
        tokenizer: names the control tokens.
    """
    if tokenizer.bos_id is None:
        return np.insert(ids, bounds[1:], tokenizer.end_id)
    places = np.repeat(bounds, 2)[1:-1]
    return np.insert(ids, places, np.tile([tokenizer.bos_id, tokenizer.end_id], len(bounds) - 1))


def gather(tokens: NDArray[_T], starts: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[_T]:
    """Stretches [starts, stops) of ``tokens`` back to back; neighbours are taken in one piece."""
    apart = starts[1:] != stops[:-1]
    begins = starts[np.concatenate([[True], apart])]
    ends = stops[np.concatenate([apart, [True]])]
    pieces = [tokens[a:b] for a, b in zip(begins.tolist(), ends.tolist(), strict=True)]
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def tokens_name(subset: str) -> str:
    """Name of the file with a unit's tokens of one subset, as the shares of the subsets say."""
    return f"tokens.{subset}.bin"


def keys_name(number: int) -> str:
    """Name of a unit's file of keys: hash and number of each document, sorted."""
    return f"keys.{number:04d}"


def trained_name(subset: str) -> str:
    """Name of the file that says of each token of a unit's subset whether it is trained, a byte each.

    It is there only where some token is not.
    """
    return f"trained.{subset}.bool"


@final
class UnitFiles:
    """The temporary files of a unit while they are written.

    Args:
        folder: where they go.
        keyed: whether keys are written, by which duplicates are found.

    Attributes:
        keys: files of keys so far.
    """

    def __init__(self, folder: Path, *, keyed: bool) -> None:
        self._folder, self._keyed = folder, keyed
        self.keys = 0
        self._waiting: list[NDArray[np.void]] = []
        self._waiting_keys = self._rows = 0
        self._last = (-1, -1)
        self._open: dict[str, IO[bytes]] = {}
        self._hashes = {name: xxhash.xxh3_128() for name in SUBSETS}
        self._tokens = dict.fromkeys(SUBSETS, 0)
        for name in (ROWS_NAME, BAD_NAME, *map(tokens_name, SUBSETS)):
            with writing(folder):
                self._open[name] = (folder / name).open("wb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for file in self._open.values():
            # What could not be written has been told already; closing would only tell it again.
            with contextlib.suppress(OSError):
                file.close()

    def add(
        self,
        tokens: NDArray[np.generic],
        rows: NDArray[np.void],
        codes: NDArray[np.uint8],
        trained: NDArray[np.bool_] | None = None,
    ) -> None:
        """Append documents: their tokens back to back, their rows and their subset codes.

        ``trained`` says of each token whether it is trained; None: every one.
        """
        stops = np.cumsum(rows["length"], dtype=np.int64)
        starts = stops - rows["length"]
        for code, name in enumerate(SUBSETS):
            mine = codes == code
            if mine.any():
                taken = gather(tokens, starts[mine], stops[mine])
                self._hashes[name].update(taken.data)
                with writing(self._folder):
                    self._open[tokens_name(name)].write(taken.data)
                    if trained is not None or trained_name(name) in self._open:
                        flags = np.ones(len(tokens), bool) if trained is None else trained
                        self._flag(name, gather(flags, starts[mine], stops[mine]))
                self._tokens[name] += taken.size
        with writing(self._folder):
            self._open[ROWS_NAME].write(rows.tobytes())
        if self._keyed and len(rows):
            self._key(rows)

    def _key(self, rows: NDArray[np.void]) -> None:
        """Keep the keys of documents: one of each record, whose documents stay or go together."""
        fresh = first_of_records(rows, self._last)
        self._last = int(rows["part"][-1]), int(rows["record"][-1])
        found = np.empty(int(fresh.sum()), _WAITING)
        found["hash"], found["part"] = keys_of(rows[fresh]), rows["part"][fresh]
        found["number"] = self._rows + np.flatnonzero(fresh)
        self._rows += len(rows)
        self._waiting.append(found)
        self._waiting_keys += len(found)
        if self._waiting_keys >= _MOST_KEYS:
            self._write_keys()

    def _write_keys(self) -> None:
        waiting, self._waiting, self._waiting_keys = np.concatenate(self._waiting), [], 0
        path = self._folder / keys_name(self.keys)
        with writing(path):
            write_keys(path, waiting["hash"], waiting["number"], waiting["part"])
        self.keys += 1

    def _flag(self, subset: str, flags: NDArray[np.generic]) -> None:
        """Append flags of tokens; what came before the first of them is trained."""
        name = trained_name(subset)
        if name not in self._open:
            self._open[name] = (self._folder / name).open("wb")
            for start in range(0, self._tokens[subset], _STRETCH):
                size = min(_STRETCH, self._tokens[subset] - start)
                self._open[name].write(np.ones(size, bool).data)
        self._open[name].write(flags.data)

    def add_bad(self, part: int, found: Sequence[BadRecord]) -> None:
        """Append bad records."""
        with writing(self._folder):
            for bad in found:
                self._open[BAD_NAME].write(msgspec.json.encode((part, bad)) + b"\n")

    def sync(self) -> None:
        """Write what waits, and make what was written outlast a power cut."""
        if self._waiting:
            self._write_keys()
        for file in self._open.values():
            with writing(self._folder):
                file.flush()
                os.fsync(file.fileno())

    def checksums(self) -> dict[str, str]:
        """The XXH3-128 of each token file."""
        return {name: value.hexdigest() for name, value in self._hashes.items()}
