"""Synthetic documents, computed from their settings, number and token position.

Any token of any document is computed independently, without state. This module alone generates
tokens; all data made from it is labelled ``source=synthetic``.
"""

from dataclasses import dataclass, fields
from typing import Any, Literal, final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import SettingsError
from batchloom.core.fingerprint import derive_key
from batchloom.core.keyed_hashing import GOLDEN, hash_indices, mix_in_place
from batchloom.core.settings import as_int, coerce_int_fields, quote_value, raise_problems, suggest, to_plain

SyntheticContent = Literal["random", "text"]
# The first gives the same batch on every rank, the second a share for each.
DUMMY = "dummy"
DISTRIBUTED_DUMMY = "distributed_dummy"
SYNTHETIC_NAMES = (DUMMY, DISTRIBUTED_DUMMY)
# Label in manifests, log lines and batches.
SYNTHETIC = "synthetic"
# Version of lengths and ids; docs/reference/seeded-choices.md describes each version.
SYNTHETIC_VERSION = 1

_MAX_SEED = (1 << 128) - 1
_MAX_LENGTH = 1 << 24
_BOUNDS = {
    "documents": (1, 10**8),
    "vocab": (2, (1 << 31) - 1),
    "seed": (-_MAX_SEED, _MAX_SEED),
}
_CONTENTS = ("random", "text")
# A run of text restarts at each multiple of _RUN_PERIOD, and at one in _RESTART_PERIOD other positions (powers
# of 2).
_RUN_PERIOD = 16
_RESTART_PERIOD = 8
_STEP = np.uint64(GOLDEN)
_U3 = np.uint64(3)
_U29 = np.uint64(29)
_U32 = np.uint64(32)
_CHUNK_DOCUMENTS = 1 << 20

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticSpec:
    """Settings of synthetic data; equal settings give equal documents on any machine.

    Attributes:
        name: ``dummy`` (every rank reads rank 0's share) or ``distributed_dummy`` (each its own).
        documents: number of documents, at most 10**8.
        vocab: exclusive upper bound of the ids; the highest id ends documents and occurs nowhere else.
        lengths: tokens of the shortest and of the longest document, including the end; lengths are
            uniform.
        seed: any integer of at most 128 bits.
        kind: ``random`` (uniform ids) or ``text`` (ids that follow each other by
            rules a model can learn).
    """

    name: str = DUMMY
    documents: int = 100_000
    vocab: int = 50_257
    lengths: tuple[int, int] = (100, 2000)
    seed: int = 0
    kind: SyntheticContent = "random"

    def __post_init__(self) -> None:
        problems = coerce_int_fields(self, _BOUNDS)
        for name, choices in (("name", SYNTHETIC_NAMES), ("kind", _CONTENTS)):
            value = getattr(self, name)
            if value not in choices:
                hint = suggest(str(value), choices)
                problems.append(f"{name}: {quote_value(value)} is not one of {', '.join(choices)}{hint}")
        try:
            shortest, longest = (as_int(length) or 0 for length in self.lengths)
        except (TypeError, ValueError):
            shortest = longest = 0
        if not 1 <= shortest <= longest <= _MAX_LENGTH:
            problems.append(
                f"lengths: {quote_value(self.lengths)} is not a shortest and a longest length: two whole numbers "
                f"from 1 to {_MAX_LENGTH}, such as 100-2000"
            )
        raise_problems(problems)
        object.__setattr__(self, "lengths", (shortest, longest))

    @property
    def spec_string(self) -> str:
        """All settings as one word, which :func:`parse_synthetic_spec` takes."""
        shortest, longest = self.lengths
        return (
            f"{self.name}:documents={self.documents},vocab={self.vocab},lengths={shortest}-{longest},"
            f"seed={self.seed},kind={self.kind}"
        )

    @property
    def identity(self) -> dict[str, Any]:
        """All settings that decide a document, as plain values."""
        return {"source": SYNTHETIC, "version": SYNTHETIC_VERSION, **to_plain(self)}


def parse_synthetic_spec(text: str) -> SyntheticSpec | None:
    """Parse ``dummy:documents=1000,kind=text``; None if it names no synthetic data.

    Raises:
        SettingsError: settings that are unknown, repeated or out of bounds; all at once.
    """
    name, _, options = text.partition(":")
    if name not in SYNTHETIC_NAMES:
        return None
    field_names = [field.name for field in fields(SyntheticSpec)][1:]
    problems: list[str] = []
    values: dict[str, Any] = {}
    for word in options.split(",") if options else ():
        key, equals, value = word.partition("=")
        if key not in field_names or not equals:
            problems.append(
                f"{name}: {quote_value(word)} is not a setting; write NAME=VALUE with a name of "
                f"{', '.join(field_names)}{suggest(key, field_names)}"
            )
        elif key in values:
            problems.append(f"{name}: {key} is given twice")
        else:
            values[key] = _parse_value(key, value)
    try:
        spec = SyntheticSpec(name=name, **values)
    except SettingsError as error:
        problems += [f"{name}.{problem}" for problem in error.problems]
    raise_problems(problems)
    return spec


def _parse_value(key: str, text: str) -> Any:
    """Parse a setting by its type; leave an invalid number for the spec to reject."""
    try:
        if key == "lengths":
            shortest, dash, longest = text.partition("-")
            return int(shortest), int(longest if dash else shortest)
        return text if key == "kind" else int(text)
    except ValueError:
        return text


@final
class SyntheticDocuments:
    """Documents of a spec.

    Args:
        spec: their settings.
    """

    def __init__(self, spec: SyntheticSpec) -> None:
        self.spec = spec
        self._length_key = derive_key(spec.seed, SYNTHETIC, "lengths")
        self._id_key = derive_key(spec.seed, SYNTHETIC, "ids")

    @property
    def end_id(self) -> int:
        """Id that ends every document."""
        return self.spec.vocab - 1

    @property
    def tokens(self) -> int:
        """Tokens of all documents, the sum of their lengths."""
        count, (shortest, longest) = self.spec.documents, self.spec.lengths
        if shortest == longest:
            return count * shortest
        return sum(
            int(self.lengths(np.arange(at, min(at + _CHUNK_DOCUMENTS, count))).sum(dtype=np.int64))
            for at in range(0, count, _CHUNK_DOCUMENTS)
        )

    def lengths(self, documents: Ids) -> NDArray[np.uint32]:
        """Return the tokens of these documents, uint32 [N]."""
        shortest, longest = self.spec.lengths
        offsets = _scale_below(hash_indices(documents, self._length_key) >> _U32, longest - shortest + 1)
        return (offsets + np.uint64(shortest)).astype(np.uint32)

    def ids(self, documents: Ids, starts: Ids, lengths: Ids) -> Ids:
        """Return the ids of document spans, concatenated.

        Args:
            documents: document number of each span [N].
            starts: first token of each span in its document [N].
            lengths: tokens of each span [N]; a span must be inside its document.
        """
        streams = hash_indices(documents, self._id_key)
        if self.spec.kind == "random":
            ids = _scale_below(_hash_tokens(streams, starts, lengths) >> _U32, self.spec.vocab - 1)
        else:
            ids = self._text(streams, starts, lengths)
        ended = starts + lengths == self.lengths(documents)
        ids[(np.cumsum(lengths) - 1)[ended & (lengths > 0)]] = self.end_id
        return ids.view(np.int64)

    def _text(self, streams: NDArray[np.uint64], starts: Ids, lengths: Ids) -> NDArray[np.uint64]:
        """Return words by Zipf's law, each followed by its successor until a run restarts.

        A span is generated from the multiple of the longest run before it, and cut.
        """
        words = self.spec.vocab - 1
        early = starts % _RUN_PERIOD
        longer = lengths + early
        hashes = _hash_tokens(streams, starts - early, longer)
        before = np.cumsum(longer) - longer
        positions = np.arange(hashes.size) + np.repeat((starts - early) - before, longer)
        fresh = (positions & (_RUN_PERIOD - 1) == 0) | (hashes & np.uint64(_RESTART_PERIOD - 1) == 0)
        begins = np.flatnonzero(fresh)
        runs = np.cumsum(fresh) - 1
        # The position of a word in its run is added to the first word of the run.
        firsts = _sample_zipf(hashes[begins], words) - begins.astype(np.uint64)
        ids: NDArray[np.uint64] = firsts[runs] + np.arange(hashes.size, dtype=np.uint64)
        if words > _RUN_PERIOD:
            ids -= np.where(ids >= np.uint64(words), np.uint64(words), np.uint64(0))
        else:
            ids %= np.uint64(words)
        if early.any():
            ids = ids[np.arange(int(lengths.sum())) + np.repeat(np.cumsum(early), lengths)]
        return ids


def _hash_tokens(streams: NDArray[np.uint64], starts: Ids, lengths: Ids) -> NDArray[np.uint64]:
    """Return 64 random bits for each span token: SplitMix64's output at its position."""
    before = np.cumsum(lengths) - lengths
    states = streams + (starts - before).astype(np.uint64) * _STEP
    return mix_in_place(np.repeat(states, lengths) + np.arange(int(lengths.sum()), dtype=np.uint64) * _STEP)


def _scale_below(bits: NDArray[np.uint64], bound: int) -> NDArray[np.uint64]:
    """Return numbers below ``bound`` (at most 2**32) from 32 random bits each."""
    numbers: NDArray[np.uint64] = bits * np.uint64(bound)
    numbers >>= _U32
    return numbers


def _sample_zipf(hashes: NDArray[np.uint64], words: int) -> NDArray[np.uint64]:
    """Sample numbers below ``words``, with equal probability for each octave.

    Octaves hold 1, 2, 4, 8, ... numbers. The arithmetic is integer only: float powers differ between machines in
    their last bit.
    """
    one = np.uint64(1)
    octave = _scale_below(hashes >> _U32, words.bit_length())
    first = (one << octave) - one
    size = np.minimum(one << octave, np.uint64(words) - first)
    inside: NDArray[np.uint64] = (hashes >> _U3) & np.uint64((1 << 29) - 1)
    inside *= size
    inside >>= _U29
    return inside + first
