"""Reading what a plan names: the documents of an open store, a bare Megatron prefix or synthetic data."""

import json
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import NoReturn, final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import StoreError, TokenizerError
from batchloom.core.files import because, read_regular
from batchloom.core.fingerprint import fingerprint
from batchloom.core.spec import shown, whole
from batchloom.store.format import (
    TOKENIZER_NAME,
    checksum,
)
from batchloom.store.index import map_file
from batchloom.store.lengths import StoreLengths
from batchloom.store.manifest import Manifest, SourceEntry, generation_with, subset_fingerprint
from batchloom.store.mask import Mask, map_mask
from batchloom.store.origins import Origins, map_origins
from batchloom.store.pairs import Preferences, Sides, map_sides
from batchloom.store.removed import are_removed, map_removed
from batchloom.store.shards import Place, Shard, map_shard, mapped_limit
from batchloom.store.synthetic import Generated, SyntheticLengths, is_synthetic
from batchloom.tokens import Tokenizer, tokenizer_from_state

_EDGE = 1 << 20
_RESTORE = "restore it from where the store was made"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a document came from.

    Attributes:
        source: name of the input file under the inputs.
        record: 0-based number of the record in that file.
        offset: byte offset of the record in that file, after decompression.
        line: 1-based line, for files whose records are lines; else None.
        hash: XXH3-128 of the document's UTF-8 text, 32 hex digits.
    """

    source: str
    record: int
    offset: int
    line: int | None
    hash: str


@dataclass(frozen=True, slots=True)
class StoredDocument:
    """A document of a store: its number, its ids (in the store's dtype) and the store."""

    number: int
    ids: NDArray[np.generic]
    _store: "Store"

    @property
    def text(self) -> str:
        """The decoded text, control tokens spelled out."""
        return self._store.tokenizer.decode(self.ids)

    @property
    def origin(self) -> Origin:
        """Where the document came from."""
        return self._store.origin(self.number)


@final
class Store:
    """One subset of a store (or a bare prefix, or synthetic data), open for reading. Use :func:`batchloom.open_store`.

    Files are mapped when a document of theirs is first read; a bounded number stays mapped.
    Safe to share between threads and to use after a fork.

    Attributes:
        path: the store's folder, or the prefix; of synthetic data its name, which is no place.
        split: name of the subset; ``""`` for a bare prefix.
        manifest: the store's manifest; None for a bare prefix.
        dtype: dtype of a token on disk.
        lengths: lengths of the subset's documents.
        fingerprint: 32 hex digits that name the content.
        tokens: tokens in the subset.
        removed: numbers of the documents that were removed, ascending, int64: they read as end tokens
            that are not trained, so that lengths and plans survive.
    """

    def __init__(
        self,
        path: Path,
        split: str,
        manifest: Manifest | None,
        lengths: StoreLengths | SyntheticLengths,
        places: list[Place],
        dtype: np.dtype[np.generic],
        generated: Generated | None = None,
    ) -> None:
        self.path, self.split, self.manifest = path, split, manifest
        self.dtype, self.lengths = dtype, lengths
        self._places, self._generated = places, generated
        self._firsts = [0, *np.cumsum([place.documents for place in places]).tolist()]
        self._starts = np.array(self._firsts[:-1], np.int64)
        self._bounds = self._starts[1:]
        on_disk = sum(place.bytes for place in places) // dtype.itemsize
        self.tokens = generated.tokens if generated else on_disk
        self._shift = dtype.itemsize.bit_length() - 1
        self._open = [place.mapped for place in places]
        self._mapped: deque[int] = deque()
        entry = manifest.subsets.get(split) if manifest else None
        self.removed = map_removed(path / split, entry) if entry else np.empty(0, np.int64)
        self._masked = _masked_shards(manifest, split, places)
        self._masks: dict[int, Mask] = {}
        self._most = mapped_limit(len(places), 3 if self._masked else 2)
        self._opens = 0

    def __len__(self) -> int:
        return self.lengths.size

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        # Opening makes stores; this is the one way back. What is open stays of its generation.
        from batchloom.store.opening import open_store  # noqa: PLC0415

        opened = (
            open_store
            if self.generation is None
            else partial(open_store, generation=self.generation)
        )
        return opened, (str(self.path), self.split)

    def __repr__(self) -> str:
        split = f", split={self.split!r}" if self.split else ""
        return f"open_store({str(self.path)!r}{split})  # {len(self):,} documents, {self.tokens:,} tokens"

    @cached_property
    def fingerprint(self) -> str:
        """Names the content: counts and checksums, or a prefix's sizes and its edges."""
        if self._generated is not None:
            return self._generated.fingerprint
        if self.manifest is None:
            return _prefix_fingerprint(self._places[0].stem, self.dtype, masked=self.masked)
        return subset_fingerprint(self.manifest, self.split)

    @property
    def tokenizer_fingerprint(self) -> str | None:
        """Names the tokenizer of the ids; None for a bare prefix, which does not say."""
        return self.manifest.tokenizer.fingerprint if self.manifest else None

    @property
    def generation(self) -> int | None:
        """Number of the generation that is open; None for what has none."""
        return self.manifest.generation if self.manifest and self.on_disk else None

    def generation_with(self, fingerprint: str) -> int | None:
        """The first generation up to this in which the subset had a fingerprint; None where it never had."""
        return generation_with(self.manifest, self.split, fingerprint) if self.manifest else None

    @property
    def shards(self) -> int:
        """Number of shards of the subset."""
        return len(self._places)

    @property
    def stems(self) -> tuple[Path, ...]:
        """Path of each shard without ending."""
        return tuple(place.stem for place in self._places)

    @property
    def bounds(self) -> tuple[int, ...]:
        """Number of the first document of each shard, and of documents at the end."""
        return tuple(self._firsts)

    @property
    def subsets(self) -> tuple[str, ...]:
        """Names of the subsets that hold documents."""
        if self.manifest is None:
            return ()
        return tuple(name for name, entry in self.manifest.subsets.items() if entry.documents)

    @property
    def conversations(self) -> bool:
        """Whether every document of the store is a conversation."""
        sources = self.manifest.sources if self.manifest else ()
        return bool(sources) and all(source.conversations for source in sources)

    @cached_property
    def synthetic(self) -> bool:
        """Whether the documents, or some of them, were made up: the manifest says so."""
        return is_synthetic(self.manifest)

    @property
    def on_disk(self) -> bool:
        """Whether there are files to read; synthetic data opened by its name has none."""
        return self._generated is None

    @property
    def replicated(self) -> bool:
        """Whether every rank is to read rank 0's share: synthetic data opened as ``dummy``."""
        return self._generated is not None and self._generated.replicated

    @property
    def weights(self) -> tuple[tuple[str, float], ...]:
        """The inputs that were given weights, each with its weight; recorded, and applied by nothing."""
        sources = self.manifest.sources if self.manifest else ()
        found = {
            (source.dataset or source.name): source.weight
            for source in sources
            if source.weight is not None
        }
        return tuple(found.items())

    @property
    def preferences(self) -> Preferences:
        """``pairs`` or ``labels`` where the documents are preferences, else empty.

        ``store.preferences.Pairs`` and ``Labels`` read them.
        """
        return self.manifest.preferences if self.manifest else ""

    @property
    def mixed(self) -> bool:
        """Whether the store holds conversations and other documents."""
        sources = self.manifest.sources if self.manifest else ()
        return any(source.conversations for source in sources) and not self.conversations

    @property
    def masked(self) -> bool:
        """Whether some tokens of the subset are not trained; then :meth:`mask` says which."""
        return bool(self._masked) or bool(self.removed.size)

    @property
    def trained_tokens(self) -> int:
        """Tokens of the subset that are trained."""
        if self.manifest is None:
            return self._mask_of(0).count() if self._masked else self.tokens
        if self._generated is not None:
            return self.tokens
        entry = self.manifest.subsets[self.split]
        trained = sum(s.tokens if s.trained is None else s.trained for s in entry.shards)
        return trained - (entry.removed.trained if entry.removed else 0)

    @property
    def kept(self) -> tuple[int, int]:
        """Documents and tokens of the subset without what is removed."""
        entry = self.manifest.subsets.get(self.split) if self.manifest else None
        gone = entry.removed if entry else None
        return (
            len(self) - (gone.documents if gone else 0),
            self.tokens - (gone.tokens if gone else 0),
        )

    def first(self, count: int) -> list[int]:
        """Numbers of the first ``count`` documents that are not removed."""
        numbers = np.arange(min(len(self), count + self.removed.size))
        kept: list[int] = numbers[~are_removed(self.removed, numbers)][:count].tolist()
        return kept

    @property
    def end_id(self) -> int:
        """The end-of-document id, which also fills padding; 0 for a bare prefix."""
        return self.manifest.tokenizer.end_id if self.manifest else 0

    @property
    def vocab_size(self) -> int | None:
        """Every id is below this; None for a bare prefix, which does not say."""
        return self.manifest.tokenizer.vocab_size if self.manifest else None

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that lies in the store.

        Raises:
            StoreError: there is none (a bare prefix), or it is not the manifest's.
            TokenizerError: what lies there is no state of a tokenizer, or is damaged.
        """
        if self._generated is not None:
            return self._generated.tokenizer
        if self.manifest is None:
            raise StoreError(
                f"{self.path} is a bare Megatron prefix: it does not say which tokenizer made it."
            )
        path = self.path / TOKENIZER_NAME
        try:
            state = json.loads(read_regular(path))
        except OSError as error:
            raise StoreError(f"{path} cannot be read: {because(error)}; {_RESTORE}.") from error
        except (ValueError, RecursionError) as error:
            raise StoreError(f"{path} cannot be read: {error}; {_RESTORE}.") from error
        try:
            tokenizer = tokenizer_from_state(state)
        except TokenizerError as error:
            raise TokenizerError(f"{path}: {error}") from error
        entry = self.manifest.tokenizer
        if (tokenizer.vocab_size, tokenizer.end_id, tokenizer.bos_id) != (
            entry.vocab_size,
            entry.end_id,
            entry.bos_id,
        ):
            raise StoreError(
                f"{path} has {tokenizer.vocab_size} ids, end {tokenizer.end_id} and BOS {tokenizer.bos_id}; the "
                f"manifest says {entry.vocab_size}, {entry.end_id} and {entry.bos_id}: it is another tokenizer."
            )
        if tokenizer.fingerprint != self.manifest.tokenizer.fingerprint:
            raise StoreError(
                f"{path} has fingerprint {tokenizer.fingerprint}, the manifest says "
                f"{self.manifest.tokenizer.fingerprint}: it is another tokenizer."
            )
        return tokenizer

    def __getitem__(self, number: int) -> StoredDocument:
        number = self._checked(number)
        length = int(self.lengths.slice(number, number + 1)[0])
        if self._generated is not None:
            span = (np.array([number]), np.zeros(1, np.int64), np.array([length]))
            return StoredDocument(number, self._generated.read(*span)[0], self)
        shard, local = self._place(number)
        pointers, tokens = self._open[shard] or self._shard(shard)
        begin = pointers[local] >> self._shift
        ids = tokens[begin : begin + length]
        if are_removed(self.removed, np.array([number]))[0]:
            ids = np.full(length, self.end_id, self.dtype)
        return StoredDocument(number, ids, self)

    def read(
        self,
        documents: NDArray[np.int64],
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
    ) -> list[NDArray[np.generic]]:
        """The ids of spans of documents, as views of the mapped shards in the store's dtype.

        Args:
            documents: number of each span's document [N].
            starts: first token of each span inside its document [N].
            lengths: tokens of each span [N].

        Raises:
            StoreError: a shard is missing, damaged, or contradicts the lengths; or a span does
                not lie in its document.
        """
        stops = starts + lengths
        beyond = stops > self.lengths.take(documents)
        if beyond.any():
            self._refuse(int(documents[beyond][0]), int(stops[beyond][0]))
        if self._generated is not None:
            return self._generated.read(documents, starts, lengths)
        opened, shift = self._open, self._shift
        shards = self._bounds.searchsorted(documents, side="right")
        locals_ = documents - self._starts[shards]
        views: list[NDArray[np.generic]] = []
        mapped = self._opens
        for shard, local, start, stop in zip(
            shards.tolist(), locals_.tolist(), starts.tolist(), stops.tolist(), strict=True
        ):
            found = opened[shard]
            if found is None:
                if self._opens - mapped > self._most // 2:
                    # A view keeps its shard's file open after the shard was given up.
                    views, mapped = [view.copy() for view in views], self._opens
                found = self._shard(shard)
            pointers, tokens = found
            begin = pointers[local] >> shift
            views.append(tokens[begin + start : begin + stop])
        for gone in self._removed_among(documents):
            views[gone] = np.full(views[gone].size, self.end_id, self.dtype)
        return views

    @property
    def direct(self) -> list[Shard | None] | None:
        """The shards that are mapped now, None for others (:meth:`shard` maps one), in a list that is kept up to date.

        None where spans are not as they lie in the shards: then :meth:`read` gives them.
        """
        return None if self._generated is not None or self.removed.size else self._open

    def shard(self, number: int) -> Shard:
        """A mapped shard.

        Raises:
            StoreError: it is missing, damaged, or contradicts the lengths.
        """
        return self._open[number] or self._shard(number)

    def keep_mapped(self, shards: int) -> None:
        """Keep so many shards mapped at most, where other stores need descriptors, too."""
        self._most = min(self._most, shards)

    def mask(
        self,
        documents: NDArray[np.int64],
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
    ) -> list[NDArray[np.bool_]]:
        """For the tokens of spans of documents whether each is trained; arguments as of :meth:`read`.

        Raises:
            StoreError: a shard or its mask is missing, damaged, or contradicts the manifest.
        """
        if not self.masked:
            return [np.ones(length, bool) for length in lengths.tolist()]
        shards = self._bounds.searchsorted(documents, side="right")
        locals_ = documents - self._starts[shards]
        found: list[NDArray[np.bool_]] = []
        for shard, local, start, length in zip(
            shards.tolist(), locals_.tolist(), starts.tolist(), lengths.tolist(), strict=True
        ):
            if shard not in self._masked:
                found.append(np.ones(length, bool))
                continue
            pointers, _ = self._open[shard] or self._shard(shard)
            begin = (pointers[local] >> self._shift) + start
            found.append(self._mask_of(shard).slice(begin, begin + length))
        for gone in self._removed_among(documents):
            found[gone] = np.zeros(found[gone].size, bool)
        return found

    def _removed_among(self, documents: NDArray[np.int64]) -> list[int]:
        """Places of the removed documents among these."""
        if not self.removed.size:
            return []
        return np.flatnonzero(are_removed(self.removed, documents)).tolist()

    def _mask_of(self, shard: int) -> Mask:
        mask = self._masks.get(shard)
        if mask is None:
            if len(self._masks) >= self._most:
                self._masks.clear()
            place = self._places[shard]
            path = place.stem.with_name(place.stem.name + ".mask")
            mask = map_mask(path, place.bytes // self.dtype.itemsize)
            self._masks[shard] = mask
        return mask

    def _refuse(self, document: int, stop: int) -> NoReturn:
        raise StoreError(
            f"Document {document} of {self.path} has {self.lengths.slice(document, document + 1)[0]} tokens, and a "
            f"span of it ends at {stop}: the plan belongs to another store, or the store was changed. Open it anew."
        )

    def origin(self, number: int) -> Origin:
        """Where a document came from.

        Raises:
            StoreError: the store does not say (a bare prefix), or its ``.docs`` is damaged.
            IndexError: there is no such document.
        """
        if self.manifest is None:
            raise StoreError(
                f"{self.path} is a bare Megatron prefix: it does not say where documents came from."
            )
        if self._generated is not None:
            ids = self[number].ids.astype("<u4")
            return Origin(str(self.path), self._checked(number), 0, None, checksum(ids.data))
        shard, local = self._place(self._checked(number))
        origins = self.shard_origins(shard)
        source, earlier = self._part(int(origins.parts[local]))
        record = earlier + int(origins.records[local])
        low, high = (int(half) for half in origins.hashes[local])
        return Origin(
            source=source.name,
            record=record,
            offset=int(origins.offsets[local]),
            line=record + 1 if source.kind == "jsonl" else None,
            hash=f"{(high << 64) | low:032x}",
        )

    def shard_origins(self, shard: int) -> Origins:
        """The ``.docs`` of a shard: its documents' hashes, records, offsets and parts.

        Raises:
            StoreError: it is missing or damaged.
        """
        stem, documents = self._places[shard][:2]
        origins = map_origins(stem.with_name(stem.name + ".docs"))
        if len(origins) != documents:
            raise StoreError(
                f"{stem}.docs has {len(origins)} documents, the manifest says {documents}. The store is damaged: "
                "run batchloom check on it."
            )
        return origins

    def shard_sides(self, shard: int) -> Sides:
        """The ``.pairs`` of a shard of a store of preferences: pair and side of its documents.

        Raises:
            StoreError: it is missing or damaged.
        """
        stem, documents = self._places[shard][:2]
        return map_sides(stem.with_name(stem.name + ".pairs"), documents, self.preferences)

    def _part(self, number: int) -> tuple[SourceEntry, int]:
        """The source of a part, and the records of the source before it."""
        if self.manifest is None:
            raise AssertionError("parts are asked of stores with a manifest only")
        for source in self.manifest.sources:
            if number < len(source.parts):
                return source, sum(part.records for part in source.parts[:number])
            number -= len(source.parts)
        raise StoreError(
            f"{self.path}: a document names a part of its sources that the manifest does not list."
        )

    def _checked(self, asked: object) -> int:
        number = whole(asked)
        if number is None:
            raise TypeError(
                f"Documents are taken one by one, by a whole number, not by {shown(asked)}: "
                "[store[n] for n in range(2)]"
            )
        if not -len(self) <= number < len(self):
            raise IndexError(
                f"There is no document {number}: there are {len(self):,}, numbered from 0."
            )
        return number % len(self)

    def _place(self, number: int) -> tuple[int, int]:
        shard = bisect_right(self._firsts, number) - 1
        return shard, number - self._firsts[shard]

    def _shard(self, number: int) -> Shard:
        opened = self._open[number]
        if opened is None:
            place, first = self._places[number], self._firsts[number]
            lengths = self.lengths.slice(first, first + place.documents)
            opened = map_shard(place, self.dtype, lengths)
            self._open[number] = opened
            self._opens += 1
            self._mapped.append(number)
            if len(self._mapped) > self._most:
                self._open[self._mapped.popleft()] = None
        return opened


def _prefix_fingerprint(stem: Path, dtype: np.dtype[np.generic], *, masked: bool) -> str:
    """Sizes, counts and the first and last MiB of each file."""
    edges = {}
    for suffix in (".bin", ".idx", *([".mask"] if masked else [])):
        view = map_file(stem.with_name(stem.name + suffix))
        edges[suffix] = [len(view), checksum(view[:_EDGE]), checksum(view[-_EDGE:])]
    return fingerprint({"prefix": edges, "dtype": dtype.name})


def _masked_shards(manifest: Manifest | None, split: str, places: list[Place]) -> frozenset[int]:
    """Numbers of the shards with a ``.mask``."""
    if manifest is None:
        stem = places[0].stem
        return frozenset([0] if stem.with_name(stem.name + ".mask").is_file() else [])
    shards = manifest.subsets[split].shards
    return frozenset(number for number, shard in enumerate(shards) if shard.mask is not None)
