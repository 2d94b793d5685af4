"""What ``prepare`` gives back."""

from dataclasses import dataclass
from pathlib import Path

from batchloom.store.manifest import Counts, Manifest


@dataclass(frozen=True, slots=True)
class SubsetResult:
    """Documents, tokens and shards of one subset."""

    documents: int
    tokens: int
    shards: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareResult:
    """A finished store, and what became of the input.

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


def result_of(
    out: Path | str,
    manifest: Manifest,
    *,
    engine_note: str = "",
    seconds: float,
    already_done: bool = False,
    resumed_units: int = 0,
    notes: tuple[str, ...] = (),
) -> PrepareResult:
    """The result that a manifest describes."""
    engine = f"{manifest.tokenizer.engine} {manifest.tokenizer.engine_version}".strip()
    return PrepareResult(
        path=out,
        counts=manifest.counts,
        subsets={
            name: SubsetResult(entry.documents, entry.tokens, len(entry.shards))
            for name, entry in manifest.subsets.items()
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
    )
