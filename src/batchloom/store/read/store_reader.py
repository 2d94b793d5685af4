"""An open store: the documents of one subset, of a bare Megatron prefix or of synthetic data.

:class:`Store` has what most users need. Rarely used groups are members of it: ``location``, ``contents``,
``provenance``, ``shards`` and ``reader``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import InputError, StoreError
from batchloom.core.settings import as_int, quote_value
from batchloom.store.format import (
    DocumentProvenance,
    Manifest,
    PairIndex,
    PreferenceKind,
    ProvenanceTable,
    compute_filtered_fingerprint,
    find_generation,
    make_part_table,
    mask_removed,
    read_recorded_weights,
)
from batchloom.store.read.filtered_lengths import FilteredLengths, count_trained_tokens
from batchloom.store.read.mapped_shards import MappedShard
from batchloom.store.read.subset_reader import LengthReader, SubsetReader
from batchloom.store.read.synthetic_store import is_synthetic
from batchloom.tokens import Tokenizer


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLocation:
    """Place of an open store, and how to open it again.

    Attributes:
        address: first argument of ``open_store``: a folder, a prefix, a name of synthetic data, or a URL with all
            it holds, credentials too.
        name: the same without credentials, for messages.
        options: further arguments of ``open_store``, as plain JSON values.
        open: ``open_store`` itself.
        is_remote: whether the store lies behind a URL.
        on_disk: whether there are files to read; synthetic data opened by its name has none.
        replicated: whether every rank is to read rank 0's share: synthetic data opened as ``dummy``.
    """

    address: str
    name: str
    options: Mapping[str, Any]
    open: Callable[..., Any] = field(repr=False)
    is_remote: bool = False
    on_disk: bool = True
    replicated: bool = False

    @property
    def generation(self) -> int | None:
        """Number of the generation that is open; None for a bare prefix and synthetic data."""
        number: int | None = self.options.get("generation")
        return number


@final
class StoreContents:
    """Facts about the documents of an open store.

    Attributes:
        media: media that the documents hold which are read alone (``open_store(media=...)``), others having
            length 0; ``""`` for all documents.
        removed: numbers of the removed documents, ascending, int64. They read as end tokens that are not
            trained, so that lengths and plans survive.
    """

    def __init__(self, manifest: Manifest | None, split: str, reader: SubsetReader, lengths: LengthReader) -> None:
        self._manifest, self._split, self._reader = manifest, split, reader
        self._sources = manifest.sources if manifest else ()
        self._size = lengths.size
        filtered_lengths = self._filtered_lengths = lengths if isinstance(lengths, FilteredLengths) else None
        self.media = filtered_lengths.media if filtered_lengths else ""
        self.removed = reader.removed

    @cached_property
    def synthetic(self) -> bool:
        """Whether the documents, or some of them, are synthetic, by the manifest."""
        return is_synthetic(self._manifest)

    @property
    def preferences(self) -> PreferenceKind:
        """``pairs`` or ``labels`` if the documents are preferences, else empty.

        ``batchloom.store.PreferencePairs`` and ``Labels`` read them.
        """
        return self._manifest.preferences if self._manifest else ""

    @property
    def conversations(self) -> bool:
        """Whether every document of the store is a conversation."""
        return bool(self._sources) and all(source.conversations for source in self._sources)

    @property
    def mixed(self) -> bool:
        """Whether the store holds conversations and other documents."""
        return any(source.conversations for source in self._sources) and not self.conversations

    @property
    def weights(self) -> tuple[tuple[str, float], ...]:
        """Inputs with a weight, each with its weight. They are recorded; nothing applies them."""
        return read_recorded_weights(self._manifest)

    @property
    def trained_tokens(self) -> int:
        """Number of tokens that are trained."""
        if self._filtered_lengths:
            return count_trained_tokens(self._reader.mask, self._filtered_lengths)
        return self._reader.trained_tokens

    @property
    def remaining_counts(self) -> tuple[int, int]:
        """Number of documents and of tokens that are not removed."""
        if self._filtered_lengths:
            removed = self._filtered_lengths.take(self.removed)
            documents = self._filtered_lengths.document_count - int((removed > 0).sum())
            return documents, self._filtered_lengths.tokens - int(removed.sum(dtype=np.int64))
        entry = self._manifest.subsets.get(self._split) if self._manifest else None
        removed_entry = entry.removed if entry else None
        documents, tokens = (removed_entry.documents, removed_entry.tokens) if removed_entry else (0, 0)
        return self._size - documents, self._reader.tokens - tokens

    def list_first(self, count: int) -> list[int]:
        """Return the numbers of the first ``count`` documents that are not removed."""
        numbers = np.arange(min(self._size, count + self.removed.size))
        document_numbers: list[int] = numbers[~mask_removed(self.removed, numbers)][:count].tolist()
        return document_numbers

    def find_generation(self, fingerprint: str) -> int | None:
        """Return the first generation, up to the open one, whose subset had a fingerprint; None if there is none."""
        if self._manifest is None:
            return None
        return find_generation(self._manifest, self._split, fingerprint, self.media)


@final
class StoreProvenance:
    """Provenance of the documents of an open store."""

    def __init__(self, manifest: Manifest | None, path: Path, reader: SubsetReader, documents: int) -> None:
        self._manifest, self._path = manifest, path
        self._reader, self._documents = reader, documents

    def of(self, document: int) -> DocumentProvenance:
        """Return the provenance of a document.

        Raises:
            StoreError: the store does not say (a bare prefix), or its ``.docs`` is missing or damaged.
            IndexError: there is no such document.
        """
        if self._manifest is None:
            raise StoreError(f"{self._path} is a bare Megatron prefix: it does not say where documents came from.")
        shard, row = self._reader.table.find(_as_document(document, self._documents))
        return make_part_table(self._manifest.sources).resolve_provenance(self.rows(shard, np.array([row])))[0]

    def rows(self, shard: int, rows: NDArray[np.int64]) -> ProvenanceTable:
        """Return the provenance of documents of a shard; of a remote store, only theirs is fetched.

        Raises:
            StoreError: the ``.docs`` of the shard is missing or damaged.
        """
        return self._reader.files.provenance(shard, rows)

    def shard(self, shard: int) -> ProvenanceTable:
        """Return the provenance of all documents of a shard: hashes, records, offsets and parts.

        Raises:
            StoreError: the ``.docs`` of the shard is missing or damaged.
        """
        return self._reader.files.provenance(shard)


@final
class StoreShards:
    """Shards of the subset of an open store; ``len`` is their number, 0 of synthetic data."""

    def __init__(self, location: StoreLocation, split: str, reader: SubsetReader) -> None:
        self._location, self._split, self._reader = location, split, reader

    def __len__(self) -> int:
        return len(self._reader.table.locations)

    @property
    def bounds(self) -> tuple[int, ...]:
        """Number of the first document of each shard, and the number of documents."""
        return self._reader.table.bounds

    @property
    def stems(self) -> tuple[Path, ...]:
        """Path of each shard without ending.

        Raises:
            InputError: the store is remote.
        """
        if self._location.is_remote:
            raise InputError(
                f"{self._location.name} lies elsewhere, and its shards are no files here: copy it here first."
            )
        return tuple(location.stem for location in self._reader.table.locations)

    @property
    def mapped(self) -> list[MappedShard | None] | None:
        """The shards that are mapped now, None for others, in a list that is kept up to date.

        None if documents are not read exactly as they lie in the shards: then use :meth:`Store.read`.
        """
        mapped = self._reader.mapped
        return None if mapped is None else mapped.opened

    def map(self, shard: int) -> MappedShard:
        """Return a mapped shard, one of those that ``mapped`` is a list of.

        Raises:
            StoreError: it is missing, damaged, or contradicts the lengths.
            InputError: documents are not read as they lie in shards, so that ``mapped`` is None.
        """
        mapped = self._reader.mapped
        if mapped is None:
            raise InputError(f"{self._location.name} is not read from mapped shards: use Store.read.")
        return mapped.opened[shard] or mapped.map(shard)

    def limit_mapped(self, shards: int) -> None:
        """Keep at most so many shards mapped, if other stores need file descriptors, too."""
        self._reader.limit_mapped(shards)

    def sides(self, shard: int) -> PairIndex:
        """Return the ``.pairs`` of a shard of preferences.

        Raises:
            StoreError: it is missing or damaged.
        """
        return self._reader.files.sides(shard)

    def name_of(self, document: int) -> str:
        """Return the shard that holds a document, as errors name it."""
        table = self._reader.table
        if not table.locations:
            return self._location.name
        stem = table.locations[table.find(document)[0]].stem
        return f"{self._location.name}/{self._split}/{stem.name}.bin"


@final
class Store:
    """One subset of a store (or a bare prefix, or synthetic data), open for reading. Use :func:`batchloom.open_store`.

    ``len(store)`` is its number of documents, ``store[n]`` one of them.
    Files are mapped when a document in them is first read; a bounded number stays mapped.
    Safe to share between threads and to use after a fork. A pickled store is opened anew.

    Attributes:
        path: the store's folder, or the prefix; the name of what does not lie on this machine.
        split: name of the subset; ``""`` for a bare prefix.
        manifest: the store's manifest; None for a bare prefix.
        lengths: lengths of the subset's documents.
        tokens: number of tokens in the subset.
        dtype: dtype of a token on disk.
        location: place of the store, and how to open it again.
        contents: facts about the documents: kinds, counts, removed ones.
        provenance: where documents came from.
        shards: the files that hold the subset.
        reader: gives the content of the subset; fetches from a remote store.
    """

    def __init__(
        self,
        path: Path,
        split: str,
        manifest: Manifest | None,
        location: StoreLocation,
        reader: SubsetReader,
        lengths: LengthReader | None = None,
    ) -> None:
        self.path, self.split, self.manifest = path, split, manifest
        self.location, self.reader = location, reader
        self.lengths = lengths = reader.lengths if lengths is None else lengths
        self.tokens = lengths.tokens if isinstance(lengths, FilteredLengths) else reader.tokens
        self.dtype = reader.dtype
        self.contents = StoreContents(manifest, split, reader, lengths)
        self.provenance = StoreProvenance(manifest, path, reader, lengths.size)
        self.shards = StoreShards(location, split, reader)

    def __len__(self) -> int:
        return self.lengths.size

    def __getitem__(self, number: int) -> "StoredDocument":
        number = _as_document(number, len(self))
        length = int(self.lengths.slice(number, number + 1)[0])
        return StoredDocument(number, self.reader.document(number, length), self)

    def __repr__(self) -> str:
        split = f", split={self.split!r}" if self.split else ""
        media = self.contents.media
        split += f", media={media!r}" if media else ""
        counts = f"{len(self):,} documents, {self.tokens:,} tokens"
        return f"open_store({self.location.name!r}{split})  # {counts}"

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        # What is open stays of its generation.
        return partial(self.location.open, **self.location.options), (
            self.location.address,
            self.split,
        )

    def read(
        self,
        documents: NDArray[np.int64],
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
    ) -> list[NDArray[np.generic]]:
        """Read token ranges of documents, as views of the mapped shards in the store's dtype.

        Args:
            documents: number of each range's document [N].
            starts: first token of each range inside its document [N].
            lengths: tokens of each range [N].

        Raises:
            StoreError: a shard is missing, damaged, or contradicts the lengths; or a range does
                not lie in its document.
            InputError: a remote store cannot be reached.
        """
        return self.reader.read(documents, starts, lengths)

    def mask(
        self,
        documents: NDArray[np.int64],
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
    ) -> list[NDArray[np.bool_]]:
        """Read the loss masks of token ranges: for each token whether it is trained; arguments as of :meth:`read`.

        Raises:
            StoreError: a shard or its mask is missing, damaged, or contradicts the manifest.
        """
        return self.reader.mask(documents, starts, lengths)

    @property
    def masked(self) -> bool:
        """Whether some tokens of the subset are not trained; then :meth:`mask` says which."""
        return self.reader.masked

    @property
    def subsets(self) -> tuple[str, ...]:
        """Names of the subsets that hold documents."""
        if self.manifest is None:
            return ()
        return tuple(name for name, entry in self.manifest.subsets.items() if entry.documents)

    def subset(self, split: str) -> "Store":
        """Open another subset of the same generation.

        Raises:
            InputError: there is none of that name, or it is empty.
        """
        location = self.location
        store: Store = location.open(location.address, split, **location.options)
        return store

    @cached_property
    def fingerprint(self) -> str:
        """Name of the content: counts and checksums, or a prefix's sizes and its edges; 32 hex digits."""
        return compute_filtered_fingerprint(self.reader.fingerprint, self.contents.media)

    @property
    def end_id(self) -> int:
        """The end-of-document id, which also fills padding; 0 for a bare prefix."""
        return self.reader.end_id

    @property
    def vocab_size(self) -> int | None:
        """Number that every id is below; None for a bare prefix, which does not say."""
        return self.manifest.tokenizer.vocab_size if self.manifest else None

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that lies in the store.

        Raises:
            StoreError: there is none (a bare prefix), or it is not the manifest's.
            TokenizerError: what lies there is no state of a tokenizer, or is damaged.
        """
        return self.reader.files.read_tokenizer()


@final
@dataclass(frozen=True, slots=True)
class StoredDocument:
    """A document of a store: its number, its ids (in the store's dtype) and the store."""

    number: int
    ids: NDArray[np.generic]
    _store: Store = field(repr=False)

    @property
    def text(self) -> str:
        """The decoded text, control tokens spelled out."""
        return self._store.tokenizer.decode(self.ids)

    @property
    def mask(self) -> NDArray[np.bool_]:
        """Whether each token is trained, bool [tokens]."""
        if not self._store.masked:
            return np.ones(len(self.ids), bool)
        token_range = (np.array([self.number]), np.zeros(1, np.int64), np.array([len(self.ids)]))
        return self._store.mask(*token_range)[0]

    @property
    def trained_text(self) -> str:
        """The decoded text of the trained tokens, control tokens spelled out."""
        return self._store.tokenizer.decode(self.ids[self.mask])

    @property
    def provenance(self) -> DocumentProvenance:
        """Where the document came from."""
        return self._store.provenance.of(self.number)


def _as_document(index: object, documents: int) -> int:
    """Return a document number, counted from the end if negative."""
    number = as_int(index)
    if number is None:
        raise TypeError(
            f"Documents are taken one by one, by a whole number, not by {quote_value(index)}: "
            "[store[n] for n in range(2)]"
        )
    if not -documents <= number < documents:
        raise IndexError(f"There is no document {number}: there are {documents:,}, numbered from 0.")
    return number % documents
