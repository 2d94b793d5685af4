"""Synthetic data as the reader of a store sees it: lengths, ids and a manifest, all in memory."""

from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.fingerprint import fingerprint
from batchloom.core.synthetic_data import DUMMY, SYNTHETIC, Synthetic, SyntheticSpec
from batchloom.store.format import (
    FORMAT_VERSION,
    Counts,
    Manifest,
    PartEntry,
    SourceEntry,
    SubsetEntry,
    token_dtype,
    tokenizer_entry,
)
from batchloom.tokens import NoTokenizer

Ids = NDArray[np.int64]
# What the in-memory face has instead of the subsets of a folder.
SUBSET = "train"


@final
class SyntheticLengths:
    """The lengths of synthetic documents, as :class:`~batchloom.store.StoreLengths` has them."""

    __slots__ = ("_data",)

    def __init__(self, data: Synthetic) -> None:
        self._data = data

    @property
    def size(self) -> int:
        """Number of documents."""
        return self._data.spec.documents

    def take(self, documents: Ids) -> NDArray[np.uint32]:
        """Lengths of these documents in tokens, uint32 of the same length."""
        return self._data.lengths(documents)

    def slice(self, start: int, stop: int) -> NDArray[np.uint32]:
        """Lengths of documents ``start`` to ``stop - 1``."""
        return self._data.lengths(np.arange(start, min(stop, self.size)))


@final
class Generated:
    """What an open store reads in place of shards.

    Attributes:
        spec: what the documents are made of.
        lengths: their lengths.
        tokens: the sum of these.
        tokenizer: the vocabulary, of ids without text.
        dtype: dtype of a token.
        manifest: what a store of them would say of itself, without shards.
    """

    def __init__(self, spec: SyntheticSpec) -> None:
        self.spec, self._data = spec, Synthetic(spec)
        self.lengths = SyntheticLengths(self._data)
        self.tokens = self._data.tokens
        self.tokenizer = synthetic_tokenizer(self._data)
        name = token_dtype("auto", spec.vocab)
        self.dtype = np.dtype(name).newbyteorder("<")
        self.manifest = synthetic_manifest(
            spec,
            dtype=name,
            recipe=spec.identity,
            tokens=self.tokens,
            subsets={SUBSET: SubsetEntry(spec.documents, self.tokens, "", ())},
        )

    @property
    def fingerprint(self) -> str:
        """Names the content: everything that decides it."""
        return fingerprint(self.spec.identity)

    @property
    def replicated(self) -> bool:
        """Whether every rank is to read the same."""
        return self.spec.name == DUMMY

    def read(self, documents: Ids, starts: Ids, lengths: Ids) -> list[NDArray[np.generic]]:
        """The ids of spans of documents; arguments as of ``Store.read``."""
        ids = self._data.ids(documents, starts, lengths).astype(self.dtype)
        stops = np.cumsum(lengths).tolist()
        return [ids[a:b] for a, b in zip([0, *stops], stops, strict=False)]


def synthetic_tokenizer(data: Synthetic) -> NoTokenizer:
    """The vocabulary of synthetic ids, which stand for no text."""
    return NoTokenizer(data.spec.vocab, data.end_id)


def synthetic_manifest(
    spec: SyntheticSpec,
    *,
    dtype: str,
    recipe: dict[str, Any],
    tokens: int,
    subsets: dict[str, SubsetEntry],
    subset_overrides: dict[str, str] | None = None,
) -> Manifest:
    """The manifest of all documents of a spec, which names their source as synthetic."""
    count = spec.documents
    entry = SourceEntry(
        name=spec.place,
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
        tokenizer=tokenizer_entry(synthetic_tokenizer(Synthetic(spec))),
        recipe=recipe,
        recipe_fingerprint=fingerprint(recipe),
        counts=Counts(count, count, tokens, 0, {}),
        subsets=subsets,
        subset_overrides=subset_overrides or {},
        sources=(entry,),
    )


def is_synthetic(manifest: Manifest | None) -> bool:
    """Whether a manifest says that its documents, or some of them, were made up."""
    return manifest is not None and any(one.kind == SYNTHETIC for one in manifest.sources)
