"""Result of ``prepare``."""

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from batchloom.store import Manifest
from batchloom.store.format import StoreCounts, SubsetEntry


@dataclass(frozen=True, slots=True)
class SubsetResult:
    """Documents, tokens and shards of one subset."""

    documents: int
    tokens: int
    shards: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareResult:
    """A finished store and the counts of its input.

    After an append, ``counts``, ``subsets`` and ``input_*`` cover only the added data.

    Attributes:
        path: folder of the store, or the URL of a remote store.
        counts: records read, documents and tokens in the store, records quarantined, documents
            dropped by reason.
        subsets: result of each subset, by name.
        input_files: number of input files.
        input_bytes: size of the input files on disk, in bytes.
        dtype: dtype of a token on disk.
        tokenizer: name of the tokenizer.
        engine: tokenizer engine, its version, and the reason if it is not the fast one.
        seconds: duration of this call in seconds.
        already_done: whether the same recipe over the same inputs had finished the store before.
        resumed_units: number of units that an earlier, unfinished run had done.
        notes: notes that were reported during the run.
        generation: newest generation of the store; 1 for a store that never changed.
        in_all: documents and tokens of all generations of the store, without removed documents.
    """

    path: Path | str
    counts: StoreCounts
    subsets: dict[str, SubsetResult]
    input_files: int
    input_bytes: int
    dtype: str
    tokenizer: str
    engine: str
    seconds: float
    already_done: bool
    resumed_units: int
    notes: tuple[str, ...]
    generation: int = 1
    in_all: tuple[int, int] = (0, 0)


def make_result(
    out: Path | str,
    manifest: Manifest,
    *,
    engine_note: str = "",
    seconds: float,
    already_done: bool = False,
    resumed_units: int = 0,
    notes: tuple[str, ...] = (),
) -> PrepareResult:
    """Return the result of a finished store from its manifest."""
    engine = f"{manifest.tokenizer.engine} {manifest.tokenizer.engine_version}".strip()
    subsets = manifest.subsets
    return PrepareResult(
        path=out,
        counts=manifest.counts,
        subsets={
            name: SubsetResult(entry.documents, entry.tokens, len(entry.shards)) for name, entry in subsets.items()
        },
        input_files=len(manifest.sources),
        input_bytes=sum(source.bytes for source in manifest.sources),
        dtype=manifest.dtype,
        tokenizer=manifest.tokenizer.name,
        engine=f"{engine} ({engine_note})" if engine_note else engine,
        seconds=seconds,
        already_done=already_done,
        resumed_units=resumed_units,
        notes=notes,
        generation=manifest.generation,
        in_all=(
            sum(entry.remaining_counts[0] for entry in subsets.values()),
            sum(entry.remaining_counts[1] for entry in subsets.values()),
        ),
    )


def subtract_base(result: PrepareResult, base: Manifest) -> PrepareResult:
    """Return the result of an append, without the counts of the previous generation.

    Args:
        result: result of :func:`make_result`.
        base: manifest of the previous generation.
    """
    counts, base_counts = result.counts, base.counts
    subsets = {name: _subtract_subset(subset, base.subsets.get(name)) for name, subset in result.subsets.items()}
    return replace(
        result,
        counts=StoreCounts(
            records=counts.records - base_counts.records,
            documents=counts.documents - base_counts.documents,
            tokens=counts.tokens - base_counts.tokens,
            quarantined=counts.quarantined - base_counts.quarantined,
            dropped=dict(Counter(counts.dropped) - Counter(base_counts.dropped)),
            further=counts.further - base_counts.further,
        ),
        subsets={name: subset for name, subset in subsets.items() if subset.documents},
        input_files=result.input_files - len(base.sources),
        input_bytes=result.input_bytes - sum(source.bytes for source in base.sources),
    )


def _subtract_subset(subset: SubsetResult, base_subset: SubsetEntry | None) -> SubsetResult:
    if base_subset is None:
        return subset
    return SubsetResult(
        subset.documents - base_subset.documents,
        subset.tokens - base_subset.tokens,
        subset.shards - len(base_subset.shards),
    )
