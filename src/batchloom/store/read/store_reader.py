"""Reading what a plan names: the documents of an open store, a bare Megatron prefix or synthetic data."""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.addresses import shown as address
from batchloom.core.errors import InputError, StoreError
from batchloom.core.files import read_regular
from batchloom.core.settings import shown, whole
from batchloom.store.format import (
    SMALL_FILE_LIMIT,
    Manifest,
    Mask,
    Origin,
    Origins,
    Preferences,
    Sides,
    StoreLengths,
    are_removed,
    beyond,
    checksum,
    chosen_fingerprint,
    generation_with,
    known_parts,
    map_mask,
    map_origins,
    map_removed,
    map_sides,
    places_of,
    read_manifest,
    recorded_weights,
    subset_fingerprint,
)
from batchloom.store.read.filtered_lengths import ChosenLengths, trained_among
from batchloom.store.read.first_read_check import FirstRead
from batchloom.store.read.mapped_shards import (
    Place,
    Shard,
    map_shard,
    mapped_limit,
    masked_shards,
    prefix_fingerprint,
)
from batchloom.store.read.remote_lengths import FarLengths
from batchloom.store.read.remote_store import FarSubset, read_far_manifest
from batchloom.store.read.stored_document import StoredDocument
from batchloom.store.read.stored_tokenizer import stored_tokenizer
from batchloom.store.read.synthetic_store import Generated, SyntheticLengths, is_synthetic
from batchloom.tokens import Tokenizer


@final
class Store:
    """One subset of a store (or a bare prefix, or synthetic data), open for reading. Use :func:`batchloom.open_store`.

    Files are mapped when a document of theirs is first read; a bounded number stays mapped.
    Safe to share between threads and to use after a fork.

    Attributes:
        path: the store's folder, or the prefix; of what does not lie on this machine its name.
        split: name of the subset; ``""`` for a bare prefix.
        manifest: the store's manifest; None for a bare prefix.
        dtype: dtype of a token on disk.
        lengths: lengths of the subset's documents.
        fingerprint: 32 hex digits that name the content.
        tokens: tokens in the subset.
        place: the folder, prefix or URL (without credentials), or the name of synthetic data.
        media: what documents hold that are read alone (``open_store``), others being of length 0; empty for all.
        removed: numbers of the documents that were removed, ascending, int64: they read as end tokens
            that are not trained, so that lengths and plans survive.
    """

    def __init__(
        self,
        path: Path,
        split: str,
        manifest: Manifest | None,
        lengths: StoreLengths | SyntheticLengths | FarLengths | ChosenLengths,
        places: list[Place],
        dtype: np.dtype[np.generic],
        way: Generated | FarSubset | FirstRead | None = None,
    ) -> None:
        self.path, self.split, self.manifest = path, split, manifest
        self.dtype, self.lengths = dtype, lengths
        chosen = self._chosen = lengths if isinstance(lengths, ChosenLengths) else None
        self.media = chosen.media if chosen else ""
        # Made up, from elsewhere, or checked as it is read; else files are mapped as they are.
        generated = self._generated = way if isinstance(way, Generated) else None
        far = self._far = way if isinstance(way, FarSubset) else None
        self._checks = way if isinstance(way, FirstRead) else None
        self._places = places
        self.place = str(path) if far is None else address(far.url)
        self._firsts = [0, *np.cumsum([place.documents for place in places]).tolist()]
        self._starts = np.array(self._firsts[:-1], np.int64)
        self._bounds = self._starts[1:]
        on_disk = sum(place.bytes for place in places) // dtype.itemsize
        self.tokens = generated.tokens if generated else chosen.tokens if chosen else on_disk
        self._shift = dtype.itemsize.bit_length() - 1
        self._open = [place.mapped for place in places]
        self._mapped: deque[int] = deque()
        entry = manifest.subsets.get(split) if manifest else None
        self.removed = (
            (far.removed() if far else map_removed(path / split, entry))
            if entry
            else np.empty(0, np.int64)
        )
        self._masked = masked_shards(manifest, split, places)
        self._masks: dict[int, Mask] = {}
        files = 2 + bool(self._masked) + 2 * (self._checks is not None)
        self._most = mapped_limit(len(places), files)
        if self._checks is not None:
            self._checks.most = self._most
        self._opens = 0

    def __len__(self) -> int:
        return self.lengths.size

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        # Opening makes stores; this is the one way back. What is open stays of its generation.
        from batchloom.store.read.store_opening import open_store  # noqa: PLC0415

        return partial(open_store, **self.opened_with), (self.address, self.split)

    @property
    def address(self) -> str:
        """What ``open_store`` was given: the folder or prefix, or the URL with all it holds, credentials too."""
        return str(self.path) if self._far is None else self._far.url

    @property
    def opened_with(self) -> dict[str, Any]:
        """What to give ``open_store`` beside place and subset to open the same: plain JSON values."""
        found: dict[str, Any] = {}
        if self.generation is not None:
            found["generation"] = self.generation
        if self.media:
            found["media"] = self.media
        if self._far is not None:
            settings = self._far.settings
            cache = None if settings.cache is None else str(settings.cache)
            found |= {"cache": cache, "cache_limit": settings.limit, "verify": settings.verify}
        elif self._checks is not None:
            found["verify"] = "full" if self._checks.always else "first-read"
        return found

    def subset(self, split: str) -> "Store":
        """Another subset of the same generation.

        Raises:
            InputError: there is none of that name, or it is empty.
        """
        found: Store = self.__reduce__()[0](self.address, split)
        return found

    def with_lengths(self, lengths: ChosenLengths) -> "Store":
        """The same store, opened anew under other lengths."""
        way = self._generated or self._far or self._checks
        return Store(self.path, self.split, self.manifest, lengths, self._places, self.dtype, way)

    def manifest_of(self, generation: int | None = None) -> Manifest:
        """The manifest of a generation as it lies there now, None for the newest; raises as ``open_store``."""
        if self._far is not None:
            return read_far_manifest(self._far.url, generation)
        return read_manifest(self.path, generation)

    def __repr__(self) -> str:
        split = f", split={self.split!r}" if self.split else ""
        split += f", media={self.media!r}" if self.media else ""
        counts = f"{len(self):,} documents, {self.tokens:,} tokens"
        return f"open_store({self.place!r}{split})  # {counts}"

    @cached_property
    def fingerprint(self) -> str:
        """Names the content: counts and checksums, or a prefix's sizes and its edges."""
        if self._generated is not None:
            return self._generated.fingerprint
        if self.manifest is None:
            return prefix_fingerprint(self._places[0].stem, self.dtype, masked=self.masked)
        return chosen_fingerprint(subset_fingerprint(self.manifest, self.split), self.media)

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
        found = self.manifest
        return generation_with(found, self.split, fingerprint, self.media) if found else None

    @property
    def shards(self) -> int:
        """Number of shards of the subset."""
        return len(self._places)

    @property
    def is_far(self) -> bool:
        """Whether the store lies elsewhere."""
        return self._far is not None

    @property
    def fetched_bytes(self) -> int:
        """Bytes that this process fetched of a store that lies elsewhere; 0 of any other."""
        return 0 if self._far is None else self._far.fetched_bytes

    @property
    def cache_limit(self) -> int:
        """Bytes that are kept at most of what lies elsewhere; 0 where nothing is."""
        return 0 if self._far is None else self._far.settings.limit

    @property
    def far(self) -> FarSubset | None:
        """What reads a store that lies elsewhere; None of any other."""
        return self._far

    @property
    def stems(self) -> tuple[Path, ...]:
        """Path of each shard without ending.

        Raises:
            InputError: the store lies elsewhere.
        """
        if self._far is not None:
            raise InputError(
                f"{self.place} lies elsewhere, and its shards are no files here: copy it here first."
            )
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
        return recorded_weights(self.manifest)

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
        if self._chosen:
            return trained_among(self.mask, self._chosen)
        trained = sum(s.tokens if s.trained is None else s.trained for s in entry.shards)
        return trained - (entry.removed.trained if entry.removed else 0)

    @property
    def kept(self) -> tuple[int, int]:
        """Documents and tokens of the subset without what is removed."""
        entry = self.manifest.subsets.get(self.split) if self.manifest else None
        gone = entry.removed if entry else None
        documents, tokens = (gone.documents, gone.tokens) if gone else (0, 0)
        if self._chosen:
            lengths = self._chosen.take(self.removed)
            documents, tokens = int((lengths > 0).sum()), int(lengths.sum(dtype=np.int64))
        return (
            self._chosen.chosen if self._chosen else len(self)
        ) - documents, self.tokens - tokens

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
        return stored_tokenizer(self.file, self.place, self.manifest.tokenizer)

    def file(self, name: str) -> bytes:
        """A small file of the store; raises OSError where it cannot be read, FileNotFoundError where there is none."""
        if self._far is not None:
            return self._far.file(name)
        return read_regular(self.path / name, SMALL_FILE_LIMIT)

    def __getitem__(self, number: int) -> StoredDocument:
        number = self._checked(number)
        length = int(self.lengths.slice(number, number + 1)[0])
        if self._generated is not None or self._far is not None or self._checks is not None:
            span = (np.array([number]), np.zeros(1, np.int64), np.array([length]))
            return StoredDocument(number, self.read(*span)[0], self)
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
            InputError: a store elsewhere cannot be reached.
        """
        if self._far is not None:
            return self._without_removed(documents, self._far.read(documents, starts, lengths))
        stops = starts + lengths
        over = stops > self.lengths.take(documents)
        if over.any():
            at = int(over.argmax())
            tokens = int(self.lengths.take(documents[at : at + 1])[0])
            raise beyond(self.path, int(documents[at]), tokens, int(stops[at]))
        if self._generated is not None:
            return self._generated.read(documents, starts, lengths)
        opened, shift = self._open, self._shift
        shards = self._bounds.searchsorted(documents, side="right")
        locals_ = documents - self._starts[shards]
        views: list[NDArray[np.generic]] = []
        mapped, checks = self._opens, self._checks
        begins: list[int] = []
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
            if checks is not None:
                begins.append(begin)
            views.append(tokens[begin + start : begin + stop])
        if checks is not None and begins:
            places = (np.array(begins) + starts) << shift
            checks.spans(shards, places, lengths << shift)
        return self._without_removed(documents, views)

    def fetch(self, documents: NDArray[np.int64], block: int = 1) -> None:
        """Have documents of a store elsewhere here, in few requests; of any other there is nothing to do.

        Args:
            documents: their numbers, ascending [N].
            block: how many neighbours are used together: all of a block are fetched.

        Raises:
            StoreError, InputError: as :meth:`read`.
        """
        if self._far is not None:
            self._far.fetch(documents, block, are_removed(self.removed, documents))

    @property
    def is_here(self) -> bool:
        """Whether there is nothing to fetch: all tokens and held media are on this machine, and known to be right."""
        return self._far is None or self._far.here

    def _without_removed(
        self, documents: NDArray[np.int64], views: list[NDArray[np.generic]]
    ) -> list[NDArray[np.generic]]:
        for gone in self._removed_among(documents):
            views[gone] = np.full(views[gone].size, self.end_id, self.dtype)
        return views

    @property
    def direct(self) -> list[Shard | None] | None:
        """The shards that are mapped now, None for others (:meth:`shard` maps one), in a list that is kept up to date.

        None where spans are not as they lie in the shards: then :meth:`read` gives them.
        """
        apart = self._generated is not None or self._far is not None or self._checks is not None
        return None if apart or self.removed.size else self._open

    def shard(self, number: int) -> Shard:
        """A mapped shard.

        Raises:
            StoreError: it is missing, damaged, or contradicts the lengths.
        """
        return self._open[number] or self._shard(number)

    def keep_mapped(self, shards: int) -> None:
        """Keep so many shards mapped at most, where other stores need descriptors, too."""
        self._most = min(self._most, shards)
        if self._checks is not None:
            self._checks.most = self._most

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
        found: list[NDArray[np.bool_]] = []
        for shard, begin, length in zip(
            shards.tolist(),
            (self._begins(documents, shards) + starts).tolist(),
            lengths.tolist(),
            strict=True,
        ):
            if shard not in self._masked:
                found.append(np.ones(length, bool))
                continue
            found.append(self._mask_of(shard).slice(begin, begin + length))
        for gone in self._removed_among(documents):
            found[gone] = np.zeros(found[gone].size, bool)
        return found

    def _begins(self, documents: NDArray[np.int64], shards: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where documents begin in their shards, in tokens; 0 in shards whose tokens are all trained."""
        if self._far is not None:
            return self._far.begins(documents)
        found = np.zeros(len(documents), np.int64)
        locals_ = documents - self._starts[shards]
        for at, (shard, local) in enumerate(zip(shards.tolist(), locals_.tolist(), strict=True)):
            if shard in self._masked:
                pointers, _ = self._open[shard] or self._shard(shard)
                found[at] = pointers[local] >> self._shift
        return found

    def shard_of(self, document: int) -> str:
        """The shard that holds a document, as errors name it."""
        if not self._places:
            return self.place
        return f"{self.place}/{self.split}/{self._places[self._place(document)[0]].stem.name}.bin"

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
            if self._checks is not None:
                self._checks.mask(shard)
            tokens = place.bytes // self.dtype.itemsize
            mask = map_mask(path, tokens) if self._far is None else self._far.mask(shard)
            self._masks[shard] = mask
        return mask

    def origin(self, number: int) -> Origin:
        """Where a document came from.

        Raises:
            StoreError: the store does not say (a bare prefix), or its ``.docs`` is missing or damaged.
            IndexError: there is no such document.
        """
        if self.manifest is None:
            raise StoreError(
                f"{self.path} is a bare Megatron prefix: it does not say where documents came from."
            )
        if self._generated is not None:
            ids = self[number].ids.astype("<u4")
            return Origin(str(self.path), self._checked(number), 0, None, checksum(ids.data))
        shard, row = self._place(self._checked(number))
        found = self.some_origins(shard, np.array([row]))
        return places_of(self.manifest.sources).named(found)[0]

    def some_origins(self, shard: int, rows: NDArray[np.int64]) -> Origins:
        """Rows of the ``.docs`` of a shard, as :meth:`shard_origins` gives all; from elsewhere they come alone."""
        if self._far is not None:
            return self._known(self._far.some_origins(shard, rows))
        return self._known(self._origins(shard).take(rows))

    def shard_origins(self, shard: int) -> Origins:
        """The ``.docs`` of a shard: hashes, records, offsets and parts; StoreError where it is missing or damaged."""
        return self._known(self._origins(shard))

    def _known(self, found: Origins) -> Origins:
        return known_parts(found, self.manifest.sources if self.manifest else (), self.path)

    def _origins(self, shard: int) -> Origins:
        stem, documents = self._places[shard][:2]
        path = stem.with_name(stem.name + ".docs")
        origins = map_origins(path) if self._far is None else self._far.origins(shard)
        if len(origins) != documents:
            raise StoreError(
                f"{stem}.docs has {len(origins)} documents, the manifest says {documents}. The store is damaged: "
                "run batchloom check on it."
            )
        return origins

    def shard_sides(self, shard: int) -> Sides:
        """The ``.pairs`` of a shard of preferences; StoreError where it is missing or damaged."""
        stem, documents = self._places[shard][:2]
        if self._far is not None:
            return self._far.sides(shard)
        return map_sides(stem.with_name(stem.name + ".pairs"), documents, self.preferences)

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
            whole = self._chosen.whole if self._chosen else self.lengths
            lengths = whole.slice(first, first + place.documents)
            opened = map_shard(place, self.dtype, lengths)
            self._open[number] = opened
            self._opens += 1
            self._mapped.append(number)
            if len(self._mapped) > self._most:
                self._open[self._mapped.popleft()] = None
        return opened
