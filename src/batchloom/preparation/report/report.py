r"""``report.json`` and ``report.html``: the fate of a store's input, and timings.

They may hold times, paths and worker counts, so they are not part of the store's identity. The size of
``report.json`` is bounded except for the lists of inputs that were read, which a later run compares to detect changes,
and of files that were left out. ``report.html`` is self-contained and without scripts. Names, samples and reasons come
from untrusted data: the page escapes all of it, and shows unprintable characters as ``\x1b``. A title and a description
state the content of each chart in words.
"""

import posixpath
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from batchloom.core.addresses import is_url
from batchloom.core.files import JSON_DECODE_ERRORS, read_regular_file
from batchloom.core.report_output import render_page
from batchloom.core.wording import escape_unprintable, format_count, format_duration, format_size
from batchloom.preparation.units.unit_report import DropCounts, SourceCounts, StageTime, StepFlow, UnitReport
from batchloom.sources import LeftOutFile
from batchloom.sources.files import Compression
from batchloom.store import MANIFEST_NAME, REPORT_NAME, WORK_NAME, read_manifest, write_file
from batchloom.store.format import StoreCounts, format_generation_file_name

# Maximum rows of sources, reasons, pairs and languages. The other rows are only counted.
MAX_ROWS = 50


class ReportedSource(msgspec.Struct, frozen=True, gc=False):
    """An input file: location, size, modification time and detected format.

    ``compression`` is empty for an uncompressed file, and ``encoding`` for one in UTF-8.
    """

    name: str
    path: str
    bytes: int
    mtime_ns: int
    kind: str = ""
    compression: Literal[Compression, ""] = ""
    encoding: str = ""


class SourceRow(msgspec.Struct, frozen=True):
    """One row of the source list."""

    name: str
    counts: SourceCounts


class SourceTotals(msgspec.Struct, frozen=True):
    """The sources of a folder, or with an ending, and their counts."""

    name: str
    sources: int
    counts: SourceCounts


class DuplicateExample(msgspec.Struct, frozen=True):
    """A dropped duplicate and the kept copy: record and file of each, and first words.

    The file of a copy that an earlier generation of the store has is empty.
    """

    dropped_record: int
    kept_record: int
    words: str = ""
    dropped_file: str = ""
    kept_file: str = ""


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
        folders: sources by folder, two levels deep; empty if there is one only.
        endings: sources by the ending of their names; empty if there is one only.
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
    folders: tuple[SourceTotals, ...] = ()
    endings: tuple[SourceTotals, ...] = ()
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
        left_out: input files with data that were not read, each with the reason.
        workers: number of workers.
        executor: kind: ``in-process``, ``pool`` or ``ray``.
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
    left_out: tuple[LeftOutFile, ...] = ()
    workers: int = 1
    executor: str = "in-process"
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
        duplicates: pairs of sources, from ``DuplicatePairCounter.list_pairs`` of ``duplicate_pairs.py``.
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
        folders=_group_sources(units.sources, _find_folder),
        endings=_group_sources(units.sources, _find_ending),
        stages={
            name: StageTime(round(stage_time.seconds, 3), stage_time.bytes, stage_time.documents)
            for name, stage_time in units.stages.items()
        },
    )


def _group_sources(sources: Mapping[str, SourceCounts], name_group: Callable[[str], str]) -> tuple[SourceTotals, ...]:
    """Return the groups with most documents; the others are one group.

    There are none if all sources are in one.
    """
    # Sources, documents, bytes and tokens of each group: a job may have a million sources.
    totals: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for name, counts in sources.items():
        total = totals[name_group(name)]
        total[0] += 1
        total[1] += counts.documents
        total[2] += counts.bytes
        total[3] += counts.tokens
    if len(totals) < 2:
        return ()
    names, _ = _select_largest({name: total[1] for name, total in totals.items()})
    groups = [(name, totals.pop(name)) for name in names]
    if totals:
        others = [sum(counts) for counts in zip(*totals.values(), strict=True)]
        groups.append((format_count(len(totals), "other"), others))
    return tuple(SourceTotals(name, count, SourceCounts(*counts)) for name, (count, *counts) in groups)


def _find_folder(name: str) -> str:
    """Return the folder of a source, at most two levels deep."""
    scheme, separator, path = name.rpartition("://")
    return scheme + separator + "/".join(path.split("/")[:-1][:2]) or "."


def _find_ending(name: str) -> str:
    """Return the ending of a name, that of a compressed file with the one before."""
    stem, ending = posixpath.splitext(name)
    if ending in (".gz", ".zst", ".bz2", ".xz", ".lz4"):
        ending = posixpath.splitext(stem)[1] + ending
    return ending or "(none)"


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


_TEMPLATE = Path(__file__).with_name("report.html.j2")
_MAX_BARS = 20
_MAX_NOTES = 100
_MAX_LEFT_OUT = 1000
# The recipe settings that matter most to a reader of the summary.
_SUMMARY_SETTINGS = ("tokenizer", "clean", "fim", "dedup", "split_on", "val_fraction", "test_fraction", "template")
_WIDTH = 760
_ROW = 22
_LABEL = 230
_VALUE = 130
_HEIGHT = 180
_FOOT = 40
_LABEL_CHARACTERS = 34
_MAX_DESCRIBED_BARS = 8


class Bar(NamedTuple):
    """One bar: its name, its size, and the size in words."""

    label: str
    size: float
    words: str


def draw_horizontal_bars(name: str, title: str, bars: Sequence[Bar]) -> str:
    """Draw horizontal bars, each between its name and its size in words.

    ``name`` is the id of the chart, unique on the page, letters only.
    """
    most = max((bar.size for bar in bars), default=0) or 1
    room = _WIDTH - _LABEL - _VALUE
    elements = []
    for number, bar in enumerate(bars):
        y = number * _ROW
        width = _bar_fraction(bar.size, most) * room
        elements.append(
            f'<text class="label" x="{_LABEL - 8}" y="{y + 15}">{escape_text(shorten_label(bar.label))}</text>'
            f'<rect class="bar" x="{_LABEL}" y="{y + 3}" width="{width:.1f}" height="{_ROW - 6}" rx="2"/>'
            f'<text x="{_LABEL + width + 6:.1f}" y="{y + 15}">{escape_text(bar.words)}</text>'
        )
    return _make_svg(name, title, bars, len(bars) * _ROW, elements)


def draw_vertical_bars(name: str, title: str, bars: Sequence[Bar]) -> str:
    """Draw a histogram of vertical bars with their names below.

    ``name`` is the id of the chart, unique on the page, letters only. Bar names must be short.
    """
    most = max((bar.size for bar in bars), default=0) or 1
    step = _WIDTH / max(len(bars), 1)
    wide = min(step * 0.8, 60.0)
    room = _HEIGHT - _FOOT - 16
    elements = []
    for number, bar in enumerate(bars):
        middle = (number + 0.5) * step
        height = _bar_fraction(bar.size, most) * room
        top = _HEIGHT - _FOOT - height
        elements.append(
            f'<rect class="bar" x="{middle - wide / 2:.1f}" y="{top:.1f}" width="{wide:.1f}" '
            f'height="{height:.1f}" rx="2">'
            f"<title>{escape_text(f'{bar.label}: {bar.words}')}</title></rect>"
            f'<text class="below" x="{middle:.1f}" y="{_HEIGHT - _FOOT + 16}">{escape_text(bar.label)}</text>'
        )
    return _make_svg(name, title, bars, _HEIGHT, elements)


def shorten_label(label: str) -> str:
    """Shorten a label to its end, as the end of a path says more than its beginning."""
    if len(label) <= _LABEL_CHARACTERS:
        return label
    return f"…{label[1 - _LABEL_CHARACTERS :]}"


def escape_text(text: str) -> str:
    """Escape text for the page, with every character visible and none of them markup."""
    return escape(escape_unprintable(text))


def _bar_fraction(size: float, most: float) -> float:
    """Return the width share of a bar; any size above 0 stays visible."""
    return max(size / most, 0.004) if size > 0 else 0.0


def _make_svg(name: str, title: str, bars: Sequence[Bar], height: int, elements: list[str]) -> str:
    description = "; ".join(f"{bar.label}: {bar.words}" for bar in bars[:_MAX_DESCRIBED_BARS])
    more = f"; and {len(bars) - _MAX_DESCRIBED_BARS} more" if len(bars) > _MAX_DESCRIBED_BARS else ""
    return (
        f'<svg role="img" aria-labelledby="{name}-title {name}-words" viewBox="0 0 {_WIDTH} {max(height, 1)}">'
        f'<title id="{name}-title">{escape_text(title)}</title>'
        f'<desc id="{name}-words">{escape_text(description + more)}</desc>'
        f"{''.join(elements)}</svg>"
    )


def write_report_page(report: PrepareReport, path: Path) -> None:
    """Write the page atomically.

    Args:
        report: content of ``report.json``.
        path: path of ``report.html``.

    Raises:
        OutputError: the page cannot be written.
    """
    write_file(path, render_report_page(report).encode("utf-8", "replace"))


def render_report_page(report: PrepareReport) -> str:
    from markupsafe import Markup

    filters: dict[str, Callable[..., object]] = {
        "count_or_none": lambda number: f"{number:,}" if number else "-",
        "counted": lambda noun, number: format_count(number, noun),
        "documents": partial(format_count, noun="document"),
        "size": format_size,
        "size_or_none": lambda size: format_size(size) if size else "-",
        "density": _format_density,
        "rate": _format_rate,
    }
    content = report.content
    sources = [(row.name, row.counts) for row in content.sources]
    if content.sources_rest.rows:
        sources.append((f"{format_count(content.sources_rest.rows, 'other')}", content.sources_others))
    lengths = make_length_bars(content.lengths)
    values = {
        "title": report.out,
        "report": report,
        "content": content,
        "facts": _list_summary(report),
        "sources": sources,
        "lengths": lengths,
        # The charts escape their own text.
        "pictures": {name: Markup(svg) for name, svg in _draw_charts(content, lengths).items()},  # noqa: S704
        "notes": report.notes[:_MAX_NOTES],
        "left_out": report.left_out[:_MAX_LEFT_OUT],
        "more_left_out": max(len(report.left_out) - _MAX_LEFT_OUT, 0),
        "more_notes": max(len(report.notes) - _MAX_NOTES, 0),
    }
    return render_page(_TEMPLATE, values, filters)


def make_length_bars(lengths: tuple[int, ...]) -> list[Bar]:
    """Return the length histogram from its first filled bin to its last."""
    filled = [digits for digits, count in enumerate(lengths) if count]
    if not filled:
        return []
    return [
        Bar(_format_length_bin(digits), lengths[digits], f"{lengths[digits]:,}")
        for digits in range(filled[0], filled[-1] + 1)
    ]


def _format_length_bin(digits: int) -> str:
    """Format the lengths of so many binary digits: ``0``, ``1``, ``2-3``, ``1k-2k``."""
    if digits < 2:
        return str(digits)
    low = 1 << (digits - 1)
    high = (1 << digits) - 1
    if digits <= 10:
        return f"{low}-{high}"
    unit, shift = ("k", 10) if digits <= 20 else ("M", 20) if digits <= 30 else ("G", 30)
    return f"{low >> shift}{unit}-{(high + 1) >> shift}{unit}"


def _list_summary(report: PrepareReport) -> list[tuple[str, str]]:
    """Return the (name, value) pairs of the page's summary."""
    size = sum(source.bytes for source in report.sources)
    facts = [("dry run", "nothing was written" if report.dry_run else "")]
    facts.append(("input", f"{format_count(len(report.sources), 'file')}, {format_size(size)}"))
    if flows := report.content.flows:
        last = flows[-1]
        facts.append(("store", f"{format_count(last.documents_out, 'document')}, {last.tokens_out:,} tokens"))
    counts = report.counts
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in counts.dropped.items())
    facts += [
        ("records read", f"{counts.records:,}" if counts.records else ""),
        ("left out", dropped),
        ("truncated to max_tokens", f"{counts.truncated:,}" if counts.truncated else ""),
        ("quarantined", f"{counts.quarantined:,}" if counts.quarantined else ""),
        *((name, _format_setting(value)) for name, value in report.settings.items() if name in _SUMMARY_SETTINGS),
        ("started", report.started),
        ("took", f"{format_duration(report.seconds)} ({format_size(report.bytes_per_second)}/s)"),
        ("workers", f"{report.workers:,} ({report.executor})"),
        ("units of work", _format_units(report)),
        ("peak memory", format_size(report.peak_memory_bytes)),
        ("fingerprint of the recipe", report.recipe_fingerprint),
    ]
    if report.engine_note:
        facts.append(("tokenizer engine", report.engine_note))
    return [(name, value) for name, value in facts if value]


def _format_setting(value: object) -> str:
    """Format a setting briefly: a cleaning step by its name and options."""
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_format_setting(item)}" for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return "; ".join(map(_format_setting, value))
    return str(value)


def _format_units(report: PrepareReport) -> str:
    earlier = f", {report.resumed_units:,} of them done by earlier runs"
    return f"{report.units:,}{earlier if report.resumed_units else ''}"


def _draw_charts(content: ReportContent, lengths: list[Bar]) -> dict[str, str]:
    """Return the chart of each name as SVG, "" for an empty length histogram."""
    flows = [Bar(flow.step, flow.documents_out, f"{flow.documents_out:,}") for flow in content.flows]
    drops = {reason: drop.count for reason, drop in content.drops.items()}
    dense = [
        Bar(row.name, row.counts.tokens / row.counts.bytes, _format_density(row.counts))
        for row in content.sources[:_MAX_BARS]
        if row.counts.bytes
    ]
    stages = [
        Bar(name, stage_time.seconds, f"{stage_time.seconds:,.2f} s") for name, stage_time in content.stages.items()
    ]
    charts = {
        "flows": draw_horizontal_bars("flows", "Documents after each step", flows),
        "drops": draw_horizontal_bars("drops", "Documents left out by reason", _make_bars(drops)),
        "languages": draw_horizontal_bars("languages", "Documents by language", _make_bars(content.languages)),
        "sources": draw_horizontal_bars("sources", "Tokens per byte by source", dense),
        "stages": draw_horizontal_bars("stages", "Seconds by stage", stages),
    }
    if lengths:
        charts["lengths"] = draw_vertical_bars("lengths", "Documents by length in tokens", lengths)
    return {"lengths": "", **charts}


def _make_bars(counts: Mapping[str, int]) -> list[Bar]:
    return [Bar(name, count, f"{count:,}") for name, count in list(counts.items())[:_MAX_BARS]]


def _format_density(counts: SourceCounts) -> str:
    return f"{counts.tokens / counts.bytes:.3f}" if counts.bytes else "-"


def _format_rate(stage_time: StageTime, quantity: str, unit: int) -> str:
    amount = stage_time.bytes if quantity == "bytes" else stage_time.documents
    if not amount or not stage_time.seconds:
        return "-"
    speed = amount / unit / stage_time.seconds
    return f"{speed:,.1f}" if speed < 100 else f"{speed:,.0f}"
