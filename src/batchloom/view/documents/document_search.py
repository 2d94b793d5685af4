"""Documents of a store that match a filter or a text, found within a bounded time."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from batchloom.core.errors import InputError
from batchloom.core.medium import MEDIUM_KINDS
from batchloom.store import Store, StoreMedia
from batchloom.store.format import SIDE_NAMES, mask_removed

Ints = NDArray[np.int64]
_DOCUMENTS_PER_STEP = 1 << 16
# Texts are decoded in smaller steps, so that the limit of time is kept.
_TEXTS_PER_STEP = 256
_TOKENS_PER_STEP = 1 << 16
MAX_SEARCHED_TOKENS = 1 << 20
_TOKENS_PER_WINDOW = 1 << 10
_BYTES_BEFORE = 60
_BYTES_AFTER = 240


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentFilter:
    """Conditions on documents; all that are given must hold.

    Attributes:
        file: name of an input file, or of the data set of several files.
        least, most: bounds of the length in tokens, both included.
        side: side of a pair or label, such as ``chosen``.
        media: ``image``, ``audio`` or ``video``: the document holds at least one.
        text: text that the decoded document contains.
        regex: whether ``text`` is a regular expression, in the syntax of RE2.
    """

    file: str = ""
    least: int | None = None
    most: int | None = None
    side: str = ""
    media: str = ""
    text: str = ""
    regex: bool = False


@dataclass(frozen=True, slots=True)
class Excerpt:
    """Text around the first match in a document.

    Attributes:
        before: the text before it.
        match: the match; empty for a regular expression.
        after: the text from there on.
    """

    before: str
    match: str
    after: str


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Matching documents of a part of a store.

    Attributes:
        documents: numbers of the matching documents, ascending.
        next_document: where the search continues; None if the store was searched to its end.
        excerpts: the matches of a text, by document.
    """

    documents: list[int]
    next_document: int | None
    excerpts: Mapping[int, Excerpt] = field(default_factory=dict)


def search_documents(
    store: Store, conditions: DocumentFilter, start: int = 0, *, most: int = 50, seconds: float = 0.15
) -> SearchResult:
    """Search a store from a document on.

    Args:
        store: the searched store.
        conditions: what documents must fulfil.
        start: first searched document.
        most: number of matches that ends the search.
        seconds: time after which the search ends at the next step.

    Raises:
        InputError: a condition cannot be met by any document of the store, or the expression is invalid.
        StoreError: a shard is missing or damaged.
    """
    deadline = time.monotonic() + seconds
    matches: list[int] = []
    excerpts: dict[int, Excerpt] = {}
    for first, stop, candidates in _iter_candidates(store, conditions, start):
        if not conditions.text:
            matches += candidates.tolist()
            position = stop
        else:
            position = first
            for part in _cut_by_tokens(store, candidates):
                excerpts |= _match_texts(store, part, conditions)
                matches = list(excerpts)
                position = int(part[-1]) + 1
                if len(matches) >= most or time.monotonic() > deadline:
                    break
            else:
                position = stop
        if len(matches) > most:
            # The next search begins with the first match that is left out.
            kept = matches[:most]
            return SearchResult(
                kept, matches[most], {number: excerpts[number] for number in kept if number in excerpts}
            )
        if position < len(store) and (len(matches) == most or time.monotonic() > deadline):
            return SearchResult(matches, position, excerpts)
    return SearchResult(matches, None, excerpts)


def _iter_candidates(store: Store, conditions: DocumentFilter, start: int) -> Iterator[tuple[int, int, Ints]]:
    """Yield ranges of documents, and their documents that pass the cheap conditions."""
    tests = [*_make_tests(store, conditions)]
    bounds = store.shards.bounds if len(store.shards) else (0, len(store))
    for shard, (first, end) in enumerate(pairwise(bounds)):
        for begin in range(max(first, start), end, _DOCUMENTS_PER_STEP):
            stop = min(begin + _DOCUMENTS_PER_STEP, end)
            documents = np.arange(begin, stop)
            for test in tests:
                documents = documents[test(shard, documents)]
            yield begin, stop, documents


def _make_tests(store: Store, conditions: DocumentFilter) -> Iterator[Callable[[int, Ints], NDArray[np.bool_]]]:
    """Yield one test per given condition; each takes a shard and documents of it."""
    removed = store.contents.removed
    bounds = store.shards.bounds
    if conditions.text and removed.size:
        yield lambda _, documents: ~mask_removed(removed, documents)
    if conditions.least is not None or conditions.most is not None:
        least = conditions.least or 0
        most = conditions.most if conditions.most is not None else 1 << 32

        def has_length(_: int, documents: Ints) -> NDArray[np.bool_]:
            if not len(documents):
                return np.zeros(0, bool)
            first = int(documents[0])
            lengths = store.lengths.slice(first, int(documents[-1]) + 1)[documents - first]
            return np.asarray((lengths >= least) & (lengths <= most), bool)

        yield has_length
    if conditions.file:
        if store.manifest is None:
            raise InputError("This data does not record the files of its documents.")
        wanted = np.array([conditions.file in (source.name, source.dataset) for source in store.manifest.sources])
        if not wanted.any():
            raise InputError(f"There is no input file or data set {conditions.file!r}.")
        yield lambda shard, documents: wanted[
            store.reader.part_table.numbers[store.provenance.shard(shard).parts[documents - bounds[shard]]]
        ]
    if conditions.side:
        if not store.contents.objective or conditions.side not in SIDE_NAMES:
            raise InputError(f"There are no documents of side {conditions.side!r}.")
        side = SIDE_NAMES.index(conditions.side)
        yield lambda shard, documents: store.shards.sides(shard).sides[documents - bounds[shard]] == side
    if conditions.media:
        if conditions.media not in MEDIUM_KINDS:
            raise InputError(f"There are no media of kind {conditions.media!r}.")
        media = StoreMedia(store)
        bit = 1 << MEDIUM_KINDS.index(conditions.media)
        yield lambda _, documents: (media.list_kinds(documents) & bit) > 0


def _cut_by_tokens(store: Store, documents: Ints) -> Iterator[Ints]:
    """Cut documents into parts that are decoded at once."""
    while len(documents):
        ends = np.cumsum(store.lengths.take(documents[:_TEXTS_PER_STEP]), dtype=np.int64)
        count = max(1, int(ends.searchsorted(_TOKENS_PER_STEP, side="right")))
        yield documents[:count]
        documents = documents[count:]


def _match_texts(store: Store, documents: Ints, conditions: DocumentFilter) -> dict[int, Excerpt]:
    """Return the first match in each of the documents that has one."""
    lengths = np.minimum(store.lengths.take(documents).astype(np.int64), MAX_SEARCHED_TOKENS)
    views = store.read(documents, np.zeros(len(documents), np.int64), lengths)
    texts = [store.tokenizer.decode(view).encode() for view in views]
    length = 0 if conditions.regex else len(conditions.text.encode())
    return {
        number: _cut_excerpt(text, offset, offset + length)
        for number, text, offset in zip(documents.tolist(), texts, _find_offsets(texts, conditions), strict=True)
        if offset >= 0
    }


def _find_offsets(texts: Sequence[bytes], conditions: DocumentFilter) -> list[int]:
    """Return the byte offset of the first match in each text; -1 without one."""
    # pa.array and Array.to_numpy import pandas: a quarter of a second and 20 MB.
    ends = np.cumsum([0, *map(len, texts)])
    array = pa.LargeStringArray.from_buffers(len(texts), pa.py_buffer(ends), pa.py_buffer(b"".join(texts)))
    # RE2 takes linear time, whatever the expression.
    find = pc.find_substring_regex if conditions.regex else pc.find_substring
    try:
        offsets: list[int] = find(array, conditions.text, ignore_case=True).to_pylist()
    except pa.ArrowInvalid as error:
        raise InputError(f"The expression is invalid: {error}") from error
    return offsets


def _cut_excerpt(text: bytes, start: int, stop: int) -> Excerpt:
    parts = text[max(start - _BYTES_BEFORE, 0) : start], text[start:stop], text[stop : start + _BYTES_AFTER]
    return Excerpt(*(part.decode(errors="ignore") for part in parts))


def find_text(store: Store, document: int, conditions: DocumentFilter) -> int:
    """Return a token shortly before the first match; 0 without one."""
    tokens = int(store.lengths.slice(document, document + 1)[0])
    for start in range(0, min(tokens, MAX_SEARCHED_TOKENS), _TOKENS_PER_WINDOW):
        # Windows overlap, so that a match on a bound is found. An anchor of an expression may match where one starts.
        length = min(2 * _TOKENS_PER_WINDOW, tokens - start)
        ids = store.read(np.array([document]), np.array([start]), np.array([length]))[0]
        if _find_offsets([store.tokenizer.decode(ids).encode()], conditions)[0] >= 0:
            return start
    return 0


def find_by_hash(store: Store, digest: str, start: int = 0, *, most: int = 50, seconds: float = 0.2) -> SearchResult:
    """Search for documents whose text has a hash, within a bounded time.

    Args:
        store: the searched store.
        digest: XXH3-128 of the text, 32 hex digits.
        start: first searched document.
        most: number of matches that ends the search.
        seconds: time after which the search ends with the shard.

    Raises:
        InputError: it is not a hash, or the store records none.
    """
    try:
        value = int(digest, 16)
    except ValueError:
        value = -1
    if not 0 <= value < 1 << 128 or len(digest) != 32:
        raise InputError(f"{digest!r} is not a hash: those of documents have 32 hex digits.")
    if store.manifest is None or not store.location.on_disk:
        # Synthetic data would compute them, which takes minutes.
        raise InputError("This data does not record the hashes of its documents.")
    low = np.uint64(value & ((1 << 64) - 1))
    high = np.uint64(value >> 64)
    deadline = time.monotonic() + seconds
    matches: list[int] = []
    for shard, (first, end) in enumerate(pairwise(store.shards.bounds)):
        if end <= start:
            continue
        hashes = store.provenance.shard(shard).hashes
        numbers = first + np.flatnonzero((hashes[:, 0] == low) & (hashes[:, 1] == high))
        matches += numbers[numbers >= start].tolist()
        if len(matches) > most:
            return SearchResult(matches[:most], matches[most])
        if end < len(store) and time.monotonic() > deadline:
            return SearchResult(matches, end)
    return SearchResult(matches, None)
