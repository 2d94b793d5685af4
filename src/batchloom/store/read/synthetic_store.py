"""Reader of synthetic data: lengths, ids and a manifest, all in memory."""

from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.fingerprint import fingerprint
from batchloom.core.synthetic_data import SYNTHETIC, SyntheticDocuments, SyntheticSpec
from batchloom.store.format.layout import (
    FORMAT_VERSION,
    TOKEN_DTYPES,
    choose_token_dtype,
    compute_checksum,
    make_missing_store_error,
)
from batchloom.store.format.manifest import (
    Manifest,
    PartEntry,
    SourceEntry,
    StoreCounts,
    SubsetEntry,
    make_tokenizer_entry,
)
from batchloom.store.format.shard_sidecars import ProvenanceTable
from batchloom.store.read.mapped_shards import ShardTable
from batchloom.store.read.subset_files import Ids
from batchloom.store.read.subset_reader import SubsetReader, refuse_ranges_beyond
from batchloom.tokens import UnknownTokenizer

# Name of the only subset of synthetic data that is not written to a store.
SUBSET = "train"


@final
class SyntheticLengths:
    """Document lengths of synthetic data, as :class:`~batchloom.store.StoreLengths`."""

    def __init__(self, data: SyntheticDocuments) -> None:
        self._data = data
        self.size = data.spec.documents
        self.layers = (self.size,)

    def take(self, documents: Ids) -> NDArray[np.uint32]:
        return self._data.lengths(documents)

    def slice(self, start: int, stop: int) -> NDArray[np.uint32]:
        return self._data.lengths(np.arange(start, min(stop, self.size)))


@final
class SyntheticReader(SubsetReader):
    """Reader of synthetic data, which is computed as it is read and has no shards."""

    def __init__(self, spec: SyntheticSpec) -> None:
        self.spec = spec
        self._data = SyntheticDocuments(spec)
        dtype = choose_token_dtype("auto", spec.vocab)
        tokens = self._data.tokens
        manifest = make_synthetic_manifest(
            spec,
            dtype=dtype,
            recipe=spec.identity,
            tokens=tokens,
            subsets={SUBSET: SubsetEntry(documents=spec.documents, tokens=tokens, lengths="", shards=(), sums="")},
        )
        super().__init__(
            spec.spec_string,
            manifest,
            SUBSET,
            ShardTable(()),
            TOKEN_DTYPES[dtype],
            lengths=SyntheticLengths(self._data),
            removed=np.empty(0, np.int64),
        )
        self.tokens = tokens

    @property
    def trained_tokens(self) -> int:
        return self.tokens

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.spec.identity)

    def read(self, documents: Ids, starts: Ids, lengths: Ids) -> list[NDArray[np.generic]]:
        refuse_ranges_beyond(self.lengths, documents, starts + lengths, self.name)
        ids = self._data.ids(documents, starts, lengths).astype(self.dtype)
        stops = np.cumsum(lengths).tolist()
        return [ids[a:b] for a, b in zip([0, *stops], stops, strict=False)]

    def provenance(self, shard: int, rows: Ids | None = None) -> ProvenanceTable:
        numbers = np.arange(self.spec.documents) if rows is None else rows
        names = [
            compute_checksum(self.document(number, length).astype("<u4").data)
            for number, length in zip(numbers.tolist(), self.lengths.take(numbers).tolist(), strict=True)
        ]
        halves = [[int(name[16:], 16), int(name[:16], 16)] for name in names]
        hashes = np.array(halves, np.uint64).reshape(-1, 2)
        offsets = np.zeros(len(numbers), np.uint64)
        parts = np.zeros(len(numbers), np.uint32)
        return ProvenanceTable(hashes, numbers.astype(np.uint64), offsets, parts)

    def file(self, name: str) -> bytes:
        raise FileNotFoundError(name)

    def read_tokenizer(self) -> UnknownTokenizer:
        return make_synthetic_tokenizer(self._data)

    def read_manifest(self, generation: int | None = None) -> Manifest:
        raise make_missing_store_error(Path(self.name))


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
    return manifest is not None and any(source.kind == SYNTHETIC for source in manifest.sources)
