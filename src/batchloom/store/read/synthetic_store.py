"""Reader of synthetic data: lengths, ids and a manifest, all in memory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import StoreError
from batchloom.core.fingerprint import fingerprint
from batchloom.core.synthetic_data import DUMMY, SYNTHETIC, SyntheticDocuments, SyntheticSpec
from batchloom.store.format.layout import FORMAT_VERSION, choose_token_dtype, compute_checksum, make_missing_store_error
from batchloom.store.format.manifest import (
    Manifest,
    PartEntry,
    SourceEntry,
    StoreCounts,
    SubsetEntry,
    make_tokenizer_entry,
)
from batchloom.store.format.media_index import MediaRows
from batchloom.store.format.provenance import ProvenanceTable
from batchloom.store.format.shard_sidecars import PairIndex
from batchloom.store.read.mapped_shards import MappedShards, ShardTable
from batchloom.store.read.subset_reader import FilteredLengths, all_trained, refuse_ranges_beyond
from batchloom.tokens import UnknownTokenizer

Ids = NDArray[np.int64]
# Name of the only subset of synthetic data that is not written to a store.
SUBSET = "train"


@final
class SyntheticLengths:
    """Document lengths of synthetic data, as :class:`~batchloom.store.StoreLengths`."""

    __slots__ = ("_data",)

    def __init__(self, data: SyntheticDocuments) -> None:
        self._data = data

    @property
    def size(self) -> int:
        return self._data.spec.documents

    def take(self, documents: Ids) -> NDArray[np.uint32]:
        return self._data.lengths(documents)

    def slice(self, start: int, stop: int) -> NDArray[np.uint32]:
        return self._data.lengths(np.arange(start, min(stop, self.size)))


@final
class SyntheticFiles:
    """``StoreFiles`` of synthetic data: it has provenance and a tokenizer only."""

    def __init__(
        self,
        spec: SyntheticSpec,
        read: Callable[[int, int], NDArray[np.generic]],
        lengths: SyntheticLengths,
        tokenizer: UnknownTokenizer,
    ) -> None:
        self.spec, self._read, self._lengths, self._tokenizer = spec, read, lengths, tokenizer

    def provenance(self, shard: int, rows: Ids | None = None) -> ProvenanceTable:  # noqa: ARG002 - there are no shards
        numbers = np.arange(self.spec.documents) if rows is None else rows
        names = [
            compute_checksum(self._read(number, length).astype("<u4").data)
            for number, length in zip(numbers.tolist(), self._lengths.take(numbers).tolist(), strict=True)
        ]
        halves = [[int(name[16:], 16), int(name[:16], 16)] for name in names]
        hashes = np.array(halves, np.uint64).reshape(-1, 2)
        offsets, parts = np.zeros(len(numbers), np.uint64), np.zeros(len(numbers), np.uint32)
        return ProvenanceTable(hashes, numbers.astype(np.uint64), offsets, parts)

    def sides(self, shard: int) -> PairIndex:
        """Raise StoreError: synthetic documents are not preferences."""
        raise self._make_missing_error("pairs", shard)

    def media(self, shard: int) -> MediaRows:
        """Raise StoreError: synthetic documents hold no media."""
        raise self._make_missing_error("media", shard)

    def blob(self, shard: int, begin: int, size: int) -> bytes:  # noqa: ARG002 - there are none
        """Raise StoreError: synthetic documents hold no media."""
        raise self._make_missing_error("media", shard)

    def _make_missing_error(self, content: str, shard: int) -> StoreError:
        return StoreError(f"{self.spec.spec_string} is synthetic data: it has no shard {shard} with {content}.")

    def file(self, name: str) -> bytes:
        """Raise FileNotFoundError: synthetic data has no files."""
        raise FileNotFoundError(name)

    def read_tokenizer(self) -> UnknownTokenizer:
        return self._tokenizer

    def read_manifest(self, generation: int | None = None) -> Manifest:  # noqa: ARG002 - there is none
        """Raise StoreMissingError: synthetic data has no manifest file."""
        raise make_missing_store_error(Path(self.spec.spec_string))


@final
class SyntheticReader:
    """``SubsetReader`` of synthetic data, which is computed as it is read."""

    is_fully_cached, masked, fetched_bytes = True, False, 0
    mapped: MappedShards | None = None
    table = ShardTable(())

    def __init__(self, spec: SyntheticSpec) -> None:
        self.spec, self._data = spec, SyntheticDocuments(spec)
        self.lengths = SyntheticLengths(self._data)
        self.tokens = self._data.tokens
        self.trained_tokens = self.tokens
        self.removed: Ids = np.empty(0, np.int64)
        self.tokenizer = make_synthetic_tokenizer(self._data)
        self.end_id = self.tokenizer.end_id
        self.files = SyntheticFiles(spec, self.document, self.lengths, self.tokenizer)
        name = choose_token_dtype("auto", spec.vocab)
        self.dtype = np.dtype(name).newbyteorder("<")
        self.manifest = make_synthetic_manifest(
            spec,
            dtype=name,
            recipe=spec.identity,
            tokens=self.tokens,
            subsets={SUBSET: SubsetEntry(spec.documents, self.tokens, "", ())},
        )

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.spec.identity)

    @property
    def replicated(self) -> bool:
        """True if every rank reads the same documents."""
        return self.spec.name == DUMMY

    def read(self, documents: Ids, starts: Ids, lengths: Ids) -> list[NDArray[np.generic]]:
        refuse_ranges_beyond(self.lengths, documents, starts + lengths, Path(self.spec.spec_string))
        ids = self._data.ids(documents, starts, lengths).astype(self.dtype)
        stops = np.cumsum(lengths).tolist()
        return [ids[a:b] for a, b in zip([0, *stops], stops, strict=False)]

    def document(self, number: int, length: int) -> NDArray[np.generic]:
        return self.read(np.array([number]), np.zeros(1, np.int64), np.array([length]))[0]

    def mask(self, documents: Ids, starts: Ids, lengths: Ids) -> list[NDArray[np.bool_]]:  # noqa: ARG002 - see below
        return all_trained(lengths)

    def fetch(self, documents: Ids, block: int = 1) -> None:
        """Do nothing: there is nothing to fetch."""

    def limit_mapped(self, shards: int) -> None:
        """Do nothing: there are no files."""

    def for_lengths(self, lengths: FilteredLengths) -> "SyntheticReader":  # noqa: ARG002 - it holds no media
        return self


def make_synthetic_tokenizer(data: SyntheticDocuments) -> UnknownTokenizer:
    """Build the tokenizer of synthetic ids, which represent no text."""
    return UnknownTokenizer(data.spec.vocab, data.end_id)


def make_synthetic_manifest(
    spec: SyntheticSpec,
    *,
    dtype: str,
    recipe: dict[str, Any],
    tokens: int,
    subsets: dict[str, SubsetEntry],
    subset_overrides: dict[str, str] | None = None,
) -> Manifest:
    """Build the manifest of all documents of a spec, with one synthetic source."""
    count = spec.documents
    entry = SourceEntry(
        name=spec.spec_string,
        kind=SYNTHETIC,
        bytes=0,
        hash=fingerprint(spec.identity),
        documents=count,
        tokens=tokens,
        bos="absent",
        end="added",
        parts=(PartEntry(0, 0, count),),
    )
    return Manifest(
        format_version=FORMAT_VERSION,
        generation=1,
        dtype=dtype,
        tokenizer=make_tokenizer_entry(make_synthetic_tokenizer(SyntheticDocuments(spec))),
        recipe=recipe,
        recipe_fingerprint=fingerprint(recipe),
        counts=StoreCounts(count, count, tokens, 0, {}),
        subsets=subsets,
        subset_overrides=subset_overrides or {},
        sources=(entry,),
    )


def is_synthetic(manifest: Manifest | None) -> bool:
    """Return whether some source of a manifest is synthetic."""
    return manifest is not None and any(source.kind == SYNTHETIC for source in manifest.sources)
