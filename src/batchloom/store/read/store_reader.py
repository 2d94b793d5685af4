"""An open store: one subset, a bare Megatron prefix or synthetic data.

:class:`Store` has what most users need. Rarely used groups are members of it: ``location``, ``contents``,
``provenance``, ``shards`` and ``reader``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, final, overload

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import InputError, StoreError
from batchloom.core.loss_weights import LossFlags
from batchloom.core.report_output import make_notebook_html
from batchloom.core.settings import check_index
from batchloom.store.format.manifest import compute_filtered_fingerprint, find_generation
from batchloom.store.format.objectives import ObjectiveName
from batchloom.store.format.shard_sidecars import DocumentFields, DocumentProvenance, PairIndex, ProvenanceTable
from batchloom.store.format.store_lengths import mask_removed
from batchloom.store.read.mapped_shards import MappedShard
from batchloom.store.read.subset_files import Ids
from batchloom.store.read.subset_reader import FilteredLengths, LengthReader, SubsetReader, count_trained_tokens
from batchloom.store.read.synthetic_store import is_synthetic
from batchloom.tokens import Tokenizer

if TYPE_CHECKING:
    import pyarrow as pa

# A token repeated at least this often in a row, such as an image placeholder, is written once.
_MIN_RUN = 8
_MAX_DECODED = 1 << 24


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLocation:
    """Address of an open store and the options to reopen it.

    Attributes:
        address: first argument of ``open_store``: a folder, a prefix, a name of synthetic data, or a URL including
            its credentials.
        name: the address without credentials, for messages.
        options: further arguments of ``open_store``, as plain JSON values.
        is_chosen: whether the generation was given, not taken as the newest.
        open: the function ``open_store``.
        is_remote: whether the store is behind a URL.
        on_disk: whether the data are in files; False for synthetic data opened by its name.
        replicated: whether every rank reads rank 0's share: synthetic data opened as ``dummy``.
    """

    address: str
    name: str
    options: Mapping[str, Any]
    open: Callable[..., Any] = field(repr=False)
    is_remote: bool = False
    on_disk: bool = True
    replicated: bool = False
    is_chosen: bool = False

    @property
    def generation(self) -> int | None:
        """Number of the open generation; None for a bare prefix and synthetic data."""
        number: int | None = self.options.get("generation")
        return number


@final
class StoreContents:
    """Facts about the documents of an open store.

    Attributes:
        media: media filter of the store (``open_store(media=...)``): documents that do not match it have
            length 0; ``""`` for all documents.
        removed: numbers of the removed documents, ascending, int64. They read as untrained end tokens,
            so that lengths and plans survive.
    """

    def __init__(self, reader: SubsetReader, lengths: LengthReader) -> None:
        self._manifest = reader.manifest
        self._reader = reader
        self._lengths = lengths
        self._sources = reader.manifest.sources if reader.manifest else ()
        self.media = lengths.media if isinstance(lengths, FilteredLengths) else ""
        self.removed = reader.removed

    @cached_property
    def synthetic(self) -> bool:
        """True if the manifest lists a synthetic source."""
        return is_synthetic(self._manifest)

    @property
    def objective(self) -> ObjectiveName:
        """``pairs``, ``labels`` or ``prompts``; empty for other documents.

        ``batchloom.store.PreferencePairs``, ``LabelledAnswers`` and ``StoredPrompts`` read them.
        """
        return self._manifest.objective if self._manifest else ""

    @property
    def conversations(self) -> bool:
        """True if every document of the store is a conversation."""
        return bool(self._sources) and all(source.conversations for source in self._sources)

    @property
    def mixed(self) -> bool:
        """True if the store holds both conversations and other documents."""
        return any(source.conversations for source in self._sources) and not self.conversations

    @property
    def weights(self) -> tuple[tuple[str, float], ...]:
        """Pairs of input name and recorded weight. Nothing applies the weights."""
        weights = {(s.dataset or s.name): s.weight for s in self._sources if s.weight is not None}
        return tuple(weights.items())

    @property
    def trained_tokens(self) -> int:
        """Number of trained tokens."""
        if isinstance(self._lengths, FilteredLengths):
            return count_trained_tokens(self._reader.flags, self._lengths, np.arange(self._lengths.size))
        return self._reader.trained_tokens

    @property
    def remaining_counts(self) -> tuple[int, int]:
        """Number of documents and of tokens that are not removed."""
        if isinstance(self._lengths, FilteredLengths):
            removed = self._lengths.take(self.removed)
            documents = self._lengths.document_count - int((removed > 0).sum())
            return documents, self._lengths.tokens - int(removed.sum(dtype=np.int64))
        if self._manifest is None:
            return self._lengths.size, self._reader.tokens
        documents, tokens = self._manifest.subsets[self._reader.split].remaining_counts
        later = self._lengths.take(self._reader.removed_later)
        return documents - later.size, tokens - int(later.sum(dtype=np.int64))

    def list_first(self, count: int) -> list[int]:
        """Return the numbers of the first ``count`` documents that are not removed."""
        numbers = np.arange(min(self._lengths.size, count + self.removed.size))
        document_numbers: list[int] = numbers[~mask_removed(self.removed, numbers)][:count].tolist()
        return document_numbers

    def find_generation(self, fingerprint: str) -> int | None:
        """Return the first generation whose subset had a fingerprint; None if none had.

        Generations after the open one are not searched.
        """
        if self._manifest is None:
            return None
        return find_generation(self._manifest, self._reader.split, fingerprint, self.media)


@final
class StoreProvenance:
    """Provenance of the documents of an open store."""

    def __init__(self, location: StoreLocation, reader: SubsetReader, shards: "StoreShards") -> None:
        self._location = location
        self._reader = reader
        self._shards = shards

    def of(self, document: int) -> DocumentProvenance:
        """Return the provenance of a document."""
        if self._reader.manifest is None:
            raise StoreError(
                f"{self._reader.name} is a bare Megatron prefix: it does not say where documents came from."
            )
        shard, row = self._reader.table.find(check_index(document, self._reader.lengths.size, "document"))
        return self.rows(shard, np.array([row]))[0]

    def rows(self, shard: int, rows: Ids) -> list[DocumentProvenance]:
        """Return the provenance of rows of a shard, int64 [n]."""
        documents = self._reader.part_table.resolve_provenance(self._reader.provenance(shard, rows))
        table = None if self._location.is_remote else self._shards.columns(shard, rows)
        if table is None:
            return documents
        return [
            replace(document, columns={name: value for name, value in row.items() if value is not None})
            for document, row in zip(documents, table.to_pylist(), strict=True)
        ]

    def shard(self, shard: int) -> ProvenanceTable:
        """Return the provenance of all documents of a shard."""
        return self._reader.provenance(shard)


@final
class StoreShards:
    """Shards of an open subset; ``len`` is their number, 0 for synthetic data."""

    def __init__(self, location: StoreLocation, reader: SubsetReader) -> None:
        self._location = location
        self._reader = reader

    def __len__(self) -> int:
        return len(self._reader.table.locations)

    @property
    def bounds(self) -> tuple[int, ...]:
        """Number of the first document of each shard, and the number of documents."""
        return self._reader.table.bounds

    @property
    def stems(self) -> tuple[Path, ...]:
        """Path of each shard without suffix."""
        if self._location.is_remote:
            raise InputError(
                f"{self._location.name} is remote, and its shards are not local files: copy it here first."
            )
        return tuple(location.stem for location in self._reader.table.locations)

    @property
    def mapped(self) -> list[MappedShard | None] | None:
        """Live list of the mapped shards, None for unmapped ones.

        None if documents are not read exactly as stored in the shards: then use :meth:`Store.read`.
        """
        mapped = self._reader.mapped
        return None if mapped is None else mapped.opened

    def map(self, shard: int) -> MappedShard:
        """Return a mapped shard, mapping it if ``mapped`` does not hold it yet."""
        mapped = self._reader.mapped
        if mapped is None:
            raise InputError(f"{self._location.name} is not read from mapped shards: use Store.read.")
        return mapped.map(shard)

    def sides(self, shard: int) -> PairIndex:
        """Return the pairs and sides of a shard of a store with an objective."""
        return self._reader.sides(shard)

    def fields(self, shard: int) -> DocumentFields | None:
        """Return the columns that the documents of a shard carry; None if they carry none."""
        manifest = self._reader.manifest
        if manifest is None or manifest.subsets[self._reader.split].shards[shard].fields is None:
            return None
        return self._reader.fields(shard)

    def columns(self, shard: int, rows: Ids | None = None) -> "pa.Table | None":
        """Return the columns of rows of a shard, of all by default; None if it has none."""
        manifest = self._reader.manifest
        # Synthetic data has no shards.
        if manifest is None or not self._location.on_disk:
            return None
        if manifest.subsets[self._reader.split].shards[shard].parquet is None:
            return None
        return self._reader.columns(shard, rows)

    def name_of(self, document: int) -> str:
        """Return the name of the shard that holds a document, for error messages."""
        table = self._reader.table
        if not table.locations:
            return self._location.name
        stem = table.locations[table.find(document)[0]].stem
        return f"{self._location.name}/{self._reader.split}/{stem.name}.bin"


@final
class Store:
    """One open subset of a store, bare prefix or synthetic data.

    Use :func:`batchloom.open_store` to open it. ``len(store)`` is its number of documents, ``store[n]`` one of them.
    Files are mapped when a document in them is first read; a bounded number stays mapped.
    Safe to share between threads and to use after a fork. Unpickling reopens the store.

    Attributes:
        path: the store's folder or the prefix; the address without credentials if there is no local path.
        split: name of the subset; ``""`` for a bare prefix.
        manifest: the store's manifest; None for a bare prefix.
        lengths: lengths of the subset's documents.
        tokens: number of tokens in the subset.
        dtype: dtype of a token on disk.
        location: address of the store and the options to reopen it.
        contents: facts about the documents: kinds, counts, removed ones.
        provenance: source records of the documents.
        shards: shards of the subset.
        reader: reader of the subset's content; it fetches from a remote store.
    """

    def __init__(
        self, path: Path, reader: SubsetReader, location: StoreLocation, lengths: LengthReader | None = None
    ) -> None:
        self.path = path
        self.split = reader.split
        self.manifest = reader.manifest
        self.location = location
        self.reader = reader
        self.lengths = reader.lengths if lengths is None else lengths
        self.tokens = lengths.tokens if isinstance(lengths, FilteredLengths) else reader.tokens
        self.dtype = reader.dtype
        self.contents = StoreContents(reader, self.lengths)
        self.shards = StoreShards(location, reader)
        self.provenance = StoreProvenance(location, reader, self.shards)

    def __len__(self) -> int:
        return self.lengths.size

    @overload
    def __getitem__(self, number: int) -> "StoredDocument": ...

    @overload
    def __getitem__(self, number: slice) -> "list[StoredDocument]": ...

    def __getitem__(self, number: int | slice) -> "StoredDocument | list[StoredDocument]":
        if isinstance(number, slice):
            return [self[index] for index in range(*number.indices(len(self)))]
        number = check_index(number, len(self), "document")
        length = int(self.lengths.slice(number, number + 1)[0])
        return StoredDocument(number, self.reader.document(number, length), self)

    def __repr__(self) -> str:
        split = f", split={self.split!r}" if self.split else ""
        media = self.contents.media
        split += f", media={media!r}" if media else ""
        counts = f"{len(self):,} documents, {self.tokens:,} tokens"
        return f"open_store({self.location.name!r}{split})  # {counts}"

    def _repr_html_(self) -> str | None:
        return make_notebook_html(self)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        # The options hold the generation number, so that unpickling opens the same generation.
        return partial(self.location.open, **self.location.options), (self.location.address, self.split)

    def read(
        self, documents: NDArray[np.int64], starts: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> list[NDArray[np.generic]]:
        """Read token ranges of documents, as views of the mapped shards where possible.

        Args:
            documents: document number of each range, int64 [N].
            starts: first token of each range inside its document, int64 [N].
            lengths: number of tokens of each range, int64 [N].

        Raises:
            StoreError: a shard is missing, damaged, or contradicts the lengths; or a range ends
                beyond its document.
            InputError: a remote store cannot be reached.
        """
        return self.reader.read(documents, starts, lengths)

    def mask(
        self, documents: NDArray[np.int64], starts: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> list[NDArray[np.bool_]]:
        """Read the trained flags of token ranges; arguments as of :meth:`read`.

        Raises:
            StoreError: a shard or its mask is missing, damaged, or contradicts the manifest.
        """
        return [flags.trained for flags in self.reader.flags(documents, starts, lengths)]

    @property
    def masked(self) -> bool:
        """True if some tokens of the subset are not trained; see :meth:`mask`."""
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
            InputError: the subset does not exist or is empty.
        """
        location = self.location
        store: Store = location.open(location.address, split, **location.options)
        return store

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the content, 32 hex digits.

        It covers counts and checksums; for a prefix, the sizes and edges of its files.
        """
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        # Pyright takes no cached property for one that a plan reads.
        return compute_filtered_fingerprint(self.reader.fingerprint, self.contents.media)

    @property
    def end_id(self) -> int:
        """End-of-document id, which also fills padding; 0 for a bare prefix."""
        return self.reader.end_id

    @property
    def vocab_size(self) -> int | None:
        """Exclusive upper bound of the ids; None for a bare prefix, where it is unknown."""
        return self.manifest.tokenizer.vocab_size if self.manifest else None

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer saved in the store.

        Raises:
            StoreError: the store is a bare prefix, or the tokenizer is not the manifest's.
            TokenizerError: the tokenizer state is invalid or damaged.
        """
        return self.reader.read_tokenizer()


@final
@dataclass(frozen=True, slots=True)
class StoredDocument:
    """A document of a store: its number, its ids (in the store's dtype) and the store."""

    number: int
    ids: NDArray[np.generic]
    _store: Store = field(repr=False)

    @property
    def text(self) -> str:
        """Decoded text with control tokens spelled out."""
        return self._store.tokenizer.decode(self.ids)

    @property
    def mask(self) -> NDArray[np.bool_]:
        """Trained flag of each token, bool [tokens]."""
        return self._read_flags().trained

    @property
    def loss_weights(self) -> NDArray[np.float32]:
        """Loss weight of each token, float32 [tokens]: 0 if it is not trained."""
        return self._read_flags().weights

    def _read_flags(self) -> LossFlags:
        token_range = (np.array([self.number]), np.zeros(1, np.int64), np.array([len(self.ids)]))
        return self._store.reader.flags(*token_range)[0]

    @property
    def trained_text(self) -> str:
        """Decoded text of the trained tokens with control tokens spelled out."""
        return self._store.tokenizer.decode(self.ids[self.mask])

    @property
    def provenance(self) -> DocumentProvenance:
        """Source record of the document."""
        return self._store.provenance.of(self.number)


def decode_beginning(tokenizer: Tokenizer, ids: NDArray[np.generic], max_tokens: int) -> str:
    """Decode the first tokens of a document; long runs appear as ``TOKEN[x64]``.

    Args:
        tokenizer: tokenizer of the document.
        ids: token ids of the document [N].
        max_tokens: maximum number of decoded tokens; a long run counts as one.
    """
    ids = ids[:_MAX_DECODED]
    if not len(ids):
        return ""
    firsts = np.flatnonzero(np.concatenate(([True], ids[1:] != ids[:-1])))
    sizes = np.diff(np.append(firsts, len(ids)))
    long_runs = np.flatnonzero(sizes >= _MIN_RUN)
    texts = []
    position = 0
    remaining_tokens = max_tokens
    for run in long_runs.tolist():
        first = int(firsts[run])
        size = int(sizes[run])
        texts.append(tokenizer.decode(ids[position : min(first, position + remaining_tokens)]))
        remaining_tokens -= first - position
        if remaining_tokens <= 0:
            return "".join(texts)
        texts.append(f"{tokenizer.decode(ids[first : first + 1])}[x{size}]")
        position = first + size
        remaining_tokens = remaining_tokens - 1
    return "".join([*texts, tokenizer.decode(ids[position : position + remaining_tokens])])
