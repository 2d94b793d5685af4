"""``report.json``: the sidecar of a store that says what became of the input, and how fast.

It may hold times, paths and numbers of workers: it is no part of the store's identity, and is
bounded but for the list of inputs, by which a later run tells whether they changed.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from batchloom.core.addresses import is_url
from batchloom.core.files import JSON_DECODE_ERRORS, read_regular_file
from batchloom.preparation.report.report_pairs import MAX_ROWS, DuplicatePair, OmittedRows
from batchloom.preparation.units import DropCounts, SourceCounts, StageTime, StepFlow, UnitReport
from batchloom.sources.files import Compression, FileKind
from batchloom.store import MANIFEST_NAME, REPORT_NAME, WORK_NAME, read_manifest
from batchloom.store.format import StoreCounts, format_generation_file_name


class ReportedSource(msgspec.Struct, frozen=True, gc=False):
    """An input: where it lay, its size and time when it was read, and what it was found to be.

    ``compression`` is empty for a plain file.
    """

    name: str
    path: str
    bytes: int
    mtime_ns: int
    kind: Literal[FileKind, ""] = ""
    compression: Literal[Compression, ""] = ""


class SourceRow(msgspec.Struct, frozen=True):
    """One source in the list of sources."""

    name: str
    counts: SourceCounts


class ReportContent(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the input; lists have at most ``MAX_ROWS`` rows, those with most documents.

    Attributes:
        flows: what came to each step, and left it.
        drops: by reason.
        drops_rest: of reasons that are not listed.
        duplicates: by pair of sources.
        duplicates_rest: of pairs that are not listed.
        lengths: how many documents have a length in tokens of b binary digits, at place b.
        languages: documents by language.
        languages_rest: of languages that are not listed.
        sources: documents, bytes of text and tokens by source.
        sources_rest: of sources that are not listed.
        sources_others: the counts of these together.
        stages: where the time went.
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
    """What ``report.json`` holds.

    Attributes:
        sources: all inputs, in order.
        inputs: what was given to be read.
        folder: the folder it was given in.
        engine_note: why the tokenizer's engine is not the fast one.
        out: absolute path of the store.
        recipe_fingerprint: of the recipe.
        started: time in UTC, ISO 8601.
        seconds: of this run.
        seconds_by_phase: of its phases, by the clock.
        bytes_per_second: of listed input.
        peak_memory_bytes: of the process that led the run.
        units: units of work.
        resumed_units: units that earlier runs did.
        notes: what was announced.
        workers: how many there were.
        crew: what they were: ``in-process``, ``pool`` or ``ray``.
        dry_run: whether nothing was written.
        settings: of the recipe, as a recipe file has them.
        counts: as the manifest of these documents alone would have them.
        content: what became of the input.
        media: where paths of media begin, by the source that names them.
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
    """The bounded part of a report.

    Args:
        units: all units, merged.
        after: the steps behind those of the units, in order (``dedup``, ``write``).
        duplicates: pairs of sources, as :meth:`PairTally.pairs` gives them.
        duplicates_rest: pairs that are not among them already.
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
    """The steps of units; the bytes of text that reading gave are those that the next step was given."""
    merged_flows = list(flows)
    if len(merged_flows) > 1 and merged_flows[0].step == "read":
        merged_flows[0] = replace(merged_flows[0], bytes_out=merged_flows[1].bytes_in)
    return merged_flows


def _select_largest(counts: Mapping[str, int]) -> tuple[list[str], OmittedRows]:
    """The names with the highest counts, and what is said of the others; of equals the first stays first."""
    names = sorted(counts, key=lambda name: -counts[name])
    omitted_names = names[MAX_ROWS:]
    return names[:MAX_ROWS], OmittedRows(len(omitted_names), sum(counts[name] for name in omitted_names))


def encode_report(report: PrepareReport) -> bytes:
    """The bytes of ``report.json``."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"


def parse_report(data: bytes) -> PrepareReport | None:
    """The report that the bytes of a file are; None where they are no such thing."""
    try:
        return msgspec.json.decode(data, type=PrepareReport)
    except JSON_DECODE_ERRORS:
        return None


def read_report(out: Path, generation: int = 1) -> PrepareReport | None:
    """The report of a generation of a finished store; None where it is missing, or is no such thing."""
    try:
        return parse_report(read_regular_file(out / format_generation_file_name(REPORT_NAME, generation)))
    except OSError:
        return None


def read_last_report(out: str) -> PrepareReport | None:
    """The report of the job that was carried out last, also of a dry run; None where it cannot be read here."""
    folder = Path(out)
    if is_url(out):
        return None
    if not (folder / MANIFEST_NAME).exists():
        return read_report(folder / WORK_NAME)
    last = max(entry.number for entry in read_manifest(folder).all_history if entry.has_inputs)
    return read_report(folder, last)
