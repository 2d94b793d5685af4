"""``report.json``: the sidecar of a store with the fate of its input and timings.

It may hold times, paths and worker counts, so it is not part of the store's identity. Its size is
bounded except for the list of inputs, which a later run compares to detect changes.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from batchloom.core.addresses import is_url
from batchloom.core.files import JSON_DECODE_ERRORS, read_regular_file
from batchloom.preparation.units.unit_report import DropCounts, SourceCounts, StageTime, StepFlow, UnitReport
from batchloom.sources.files import Compression
from batchloom.store import MANIFEST_NAME, REPORT_NAME, WORK_NAME, read_manifest
from batchloom.store.format import StoreCounts, format_generation_file_name

# Maximum rows of sources, reasons, pairs and languages. The other rows are only counted.
MAX_ROWS = 50


class ReportedSource(msgspec.Struct, frozen=True, gc=False):
    """An input file: location, size, modification time and detected format.

    ``compression`` is empty for an uncompressed file.
    """

    name: str
    path: str
    bytes: int
    mtime_ns: int
    kind: str = ""
    compression: Literal[Compression, ""] = ""


class SourceRow(msgspec.Struct, frozen=True):
    """One row of the source list."""

    name: str
    counts: SourceCounts


class DuplicateExample(msgspec.Struct, frozen=True):
    """A dropped duplicate: its record, the kept copy's record, and its first words."""

    dropped_record: int
    kept_record: int
    words: str = ""


class DuplicatePair(msgspec.Struct, frozen=True, kw_only=True):
    """Number of duplicates dropped from one source because another keeps them.

    Both may be the same source.

    Attributes:
        dropped_from: source, or group of sources, of the dropped documents.
        kept_in: source, or group of sources, of the kept copies.
        count: number of documents.
        examples: first of the documents in input order.
    """

    dropped_from: str
    kept_in: str
    count: int
    examples: tuple[DuplicateExample, ...] = ()


class OmittedRows(msgspec.Struct, frozen=True):
    """Number of rows that a list omits, and their documents."""

    rows: int = 0
    documents: int = 0


class ReportContent(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of the input; lists have the ``MAX_ROWS`` rows with most documents.

    Attributes:
        flows: input and output counts of each step.
        drops: dropped documents by reason.
        drops_rest: totals of unlisted reasons.
        duplicates: duplicates by pair of sources.
        duplicates_rest: totals of unlisted pairs.
        lengths: number of documents whose length in tokens has b binary digits, at index b.
        languages: documents by language.
        languages_rest: totals of unlisted languages.
        sources: documents, bytes of text and tokens by source.
        sources_rest: totals of unlisted sources.
        sources_others: summed counts of unlisted sources.
        stages: time spent per stage.
    """

    flows: tuple[StepFlow, ...] = ()
    drops: dict[str, DropCounts] = {}
    drops_rest: OmittedRows = OmittedRows()
    duplicates: tuple[DuplicatePair, ...] = ()
    duplicates_rest: OmittedRows = OmittedRows()
    lengths: tuple[int, ...] = ()
    languages: dict[str, int] = {}
    languages_rest: OmittedRows = OmittedRows()
    sources: tuple[SourceRow, ...] = ()
    sources_rest: OmittedRows = OmittedRows()
    sources_others: SourceCounts = SourceCounts()
    stages: dict[str, StageTime] = {}


class PrepareReport(msgspec.Struct, frozen=True, kw_only=True):
    """Content of ``report.json``.

    Attributes:
        sources: all input files, in order.
        inputs: input arguments.
        folder: working directory of the run.
        engine_note: reason for not using the fast tokenizer engine, or "".
        out: absolute path of the store.
        recipe_fingerprint: fingerprint of the recipe.
        started: start time in UTC, ISO 8601.
        seconds: duration of this run.
        seconds_by_phase: wall-clock seconds of each phase.
        bytes_per_second: listed input bytes per second.
        peak_memory_bytes: peak memory of the main process.
        units: number of units.
        resumed_units: number of units that earlier runs did.
        notes: notes that were reported.
        workers: number of workers.
        crew: kind of executor: ``in-process``, ``pool`` or ``ray``.
        dry_run: whether nothing was written.
        settings: settings of the recipe, as in a recipe file.
        counts: counts of these documents alone, as in a manifest.
        content: statistics of the input.
        media: base location of media paths, by source.
    """

    sources: list[ReportedSource] = []
    inputs: list[str] = []
    folder: str = ""
    engine_note: str = ""
    out: str = ""
    recipe_fingerprint: str = ""
    started: str = ""
    seconds: float = 0.0
    seconds_by_phase: dict[str, float] = {}
    bytes_per_second: int = 0
    peak_memory_bytes: int = 0
    units: int = 0
    resumed_units: int = 0
    notes: list[str] = []
    workers: int = 1
    crew: str = "in-process"
    dry_run: bool = False
    settings: dict[str, Any] = {}
    counts: StoreCounts = StoreCounts(0, 0, 0, 0, {})
    content: ReportContent = ReportContent()
    media: dict[str, str] = {}


def build_content(
    units: UnitReport,
    *,
    after: Iterable[StepFlow] = (),
    duplicates: Sequence[DuplicatePair] = (),
    duplicates_rest: OmittedRows | None = None,
) -> ReportContent:
    """Return the bounded part of a report.

    Args:
        units: merged report of all units.
        after: steps after those of the units, in order (``dedup``, ``write``).
        duplicates: pairs of sources, from :meth:`DuplicatePairCounter.list_pairs`.
        duplicates_rest: totals of pairs that are already omitted.
    """
    reasons, drops_rest = _select_largest({name: drop.count for name, drop in units.drops.items()})
    languages, languages_rest = _select_largest(units.languages)
    names, sources_rest = _select_largest(
        {name: source_counts.documents for name, source_counts in units.sources.items()}
    )
    sorted_pairs = sorted(duplicates, key=lambda pair: -pair.count)
    unlisted_pairs = sorted_pairs[MAX_ROWS:]
    omitted_pairs = duplicates_rest or OmittedRows()
    listed_names = set(names)
    omitted_counts = SourceCounts()
    for name, counts in units.sources.items():
        if name not in listed_names:
            omitted_counts += counts
    return ReportContent(
        flows=(*_merge_flows(units.flows), *after),
        drops={name: units.drops[name] for name in reasons},
        drops_rest=drops_rest,
        duplicates=tuple(sorted_pairs[:MAX_ROWS]),
        duplicates_rest=OmittedRows(
            omitted_pairs.rows + len(unlisted_pairs),
            omitted_pairs.documents + sum(pair.count for pair in unlisted_pairs),
        ),
        lengths=units.lengths,
        languages={name: units.languages[name] for name in languages},
        languages_rest=languages_rest,
        sources=tuple(SourceRow(name, units.sources[name]) for name in names),
        sources_rest=sources_rest,
        sources_others=omitted_counts,
        stages={
            name: StageTime(round(stage_time.seconds, 3), stage_time.bytes, stage_time.documents)
            for name, stage_time in units.stages.items()
        },
    )


def _merge_flows(flows: Sequence[StepFlow]) -> list[StepFlow]:
    """Return the steps of units; ``read`` outputs the text bytes of the next step."""
    merged_flows = list(flows)
    if len(merged_flows) > 1 and merged_flows[0].step == "read":
        merged_flows[0] = replace(merged_flows[0], bytes_out=merged_flows[1].bytes_in)
    return merged_flows


def _select_largest(counts: Mapping[str, int]) -> tuple[list[str], OmittedRows]:
    """Return the names with the highest counts, and totals of the others.

    Names with equal counts keep their order.
    """
    names = sorted(counts, key=lambda name: -counts[name])
    omitted_names = names[MAX_ROWS:]
    return names[:MAX_ROWS], OmittedRows(len(omitted_names), sum(counts[name] for name in omitted_names))


def encode_report(report: PrepareReport) -> bytes:
    """Return the bytes of ``report.json``."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"


def parse_report(data: bytes) -> PrepareReport | None:
    """Return the report encoded in ``data``, or None if it is not a report."""
    try:
        return msgspec.json.decode(data, type=PrepareReport)
    except JSON_DECODE_ERRORS:
        return None


def read_report(out: Path, generation: int = 1) -> PrepareReport | None:
    """Return the report of a store generation, or None if it is missing or invalid."""
    try:
        return parse_report(read_regular_file(out / format_generation_file_name(REPORT_NAME, generation)))
    except OSError:
        return None


def read_last_report(out: str) -> PrepareReport | None:
    """Return the report of the last job, including dry runs; None if not readable.

    URLs always give None.
    """
    folder = Path(out)
    if is_url(out):
        return None
    if not (folder / MANIFEST_NAME).exists():
        return read_report(folder / WORK_NAME)
    last = max(entry.number for entry in read_manifest(folder).all_history if entry.has_inputs)
    return read_report(folder, last)
