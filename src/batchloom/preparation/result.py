"""What ``prepare`` gives back."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from batchloom.store.manifest import Counts, Manifest, SubsetEntry


@dataclass(frozen=True, slots=True)
class SubsetResult:
    """Documents, tokens and shards of one subset."""

    documents: int
    tokens: int
    shards: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareResult:
    """A finished store, and what became of the input.

    Where a store was appended to, ``counts``, ``subsets`` and ``input_*`` are of what was added.

    Attributes:
        path: the store's folder; its URL where it lies elsewhere.
        counts: records read, documents and tokens kept, records quarantined, documents dropped
            by reason.
        subsets: what each subset holds, by name.
        input_files: number of input files.
        input_bytes: their bytes on disk.
        dtype: of a token on disk.
        tokenizer: name of the tokenizer.
        engine: what encoded, its version, and why it was not the fast one where it was not.
        seconds: how long this call took.
        already_done: the store was finished before, by the same recipe over the same inputs.
        resumed_units: units of work that an earlier, unfinished run had done.
        notes: what was announced on the way.
        generation: the newest of the store; 1 for one that was made and never changed.
        in_all: documents and tokens of the store, all generations together, without removed ones.
    """

    path: Path | str
    counts: Counts
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


def result_of(
    out: Path | str,
    manifest: Manifest,
    *,
    base: Manifest | None = None,
    engine_note: str = "",
    seconds: float,
    already_done: bool = False,
    resumed_units: int = 0,
    notes: tuple[str, ...] = (),
) -> PrepareResult:
    """The result that a manifest describes; of a store that was appended to, what it has beyond ``base``."""
    counts, subsets, sources = manifest.counts, manifest.subsets, manifest.sources
    if base is not None:
        counts, sources = _beyond(counts, base.counts), sources[len(base.sources) :]
    old = base.subsets if base is not None else {}
    engine = f"{manifest.tokenizer.engine} {manifest.tokenizer.engine_version}".strip()
    return PrepareResult(
        path=out,
        counts=counts,
        subsets={
            name: _subset(entry, old.get(name))
            for name, entry in subsets.items()
            if entry != old.get(name)
        },
        input_files=len(sources),
        input_bytes=sum(source.bytes for source in sources),
        dtype=manifest.dtype,
        tokenizer=manifest.tokenizer.name,
        engine=f"{engine} ({engine_note})" if engine_note else engine,
        seconds=seconds,
        already_done=already_done,
        resumed_units=resumed_units,
        notes=notes,
        generation=manifest.generation,
        in_all=(
            sum(entry.kept[0] for entry in subsets.values()),
            sum(entry.kept[1] for entry in subsets.values()),
        ),
    )


def _subset(entry: SubsetEntry, old: SubsetEntry | None) -> SubsetResult:
    if old is None:
        return SubsetResult(entry.documents, entry.tokens, len(entry.shards))
    return SubsetResult(
        entry.documents - old.documents,
        entry.tokens - old.tokens,
        len(entry.shards) - len(old.shards),
    )


def _beyond(counts: Counts, old: Counts) -> Counts:
    return Counts(
        records=counts.records - old.records,
        documents=counts.documents - old.documents,
        tokens=counts.tokens - old.tokens,
        quarantined=counts.quarantined - old.quarantined,
        dropped=dict(Counter(counts.dropped) - Counter(old.dropped)),
        further=counts.further - old.further,
    )
