"""Facts of the overview page: counts, lengths, preparation and bad records."""

import heapq
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from batchloom.analysis import iter_quarantine
from batchloom.core.wording import format_size
from batchloom.preparation import PrepareReport, read_report
from batchloom.store import REPORT_NAME, Store
from batchloom.store.format import OBJECTIVES, SIDE_NAMES, GenerationEntry, SourceEntry, format_generation_file_name

# Larger stores are sampled: 4 million lengths take 50 ms.
_LENGTHS_PER_STEP = 1 << 16
_MAX_LENGTH_STEPS = 64
# A length has at most 32 binary digits.
_MAX_DIGITS = 32
_MAX_SOURCES = 50
_MAX_QUARANTINED = 50
_MAX_GENERATIONS = 50
# More lines of a quarantine are neither parsed nor counted.
_MAX_QUARANTINE_LINES = 10_000


@dataclass(slots=True)
class QuarantineList:
    """First bad records of a store.

    Attributes:
        records: file, position and reason of the first ones.
        more: number of further ones among the lines that were read.
        damaged: ``file:line`` of the lines that are no records.
        is_complete: whether every line was read.
    """

    records: list[tuple[str, str, str]] = field(default_factory=list)
    more: int = 0
    damaged: list[str] = field(default_factory=list)
    is_complete: bool = True


@dataclass(frozen=True, slots=True)
class StoreOverview:
    """Content of the overview page of a store.

    Attributes:
        facts: pairs of name and value.
        lengths: histogram of document lengths: lowest and highest number of tokens, and documents; bounds double.
        estimated: whether the histogram is of a sample.
        sources: the input files with the most tokens, of all subsets and with removed documents.
        more_sources: number of further input files.
        source_tokens: tokens of all input files.
        report: report of the newest generation that read inputs; None without one.
        has_damaged_report: whether there is such a report and it cannot be read.
        quarantine: the first bad records.
        generations: the last generations up to the open one, newest first; empty for a store that has one.
    """

    facts: list[tuple[str, str]]
    lengths: list[tuple[int, int, int]]
    estimated: bool
    sources: list[SourceEntry]
    more_sources: int
    source_tokens: int
    report: PrepareReport | None
    has_damaged_report: bool
    quarantine: QuarantineList
    generations: list[GenerationEntry]


def make_overview(store: Store) -> StoreOverview:
    """Collect the facts of a store from its manifest, report and lengths.

    Raises:
        StoreError: a file of the store is damaged.
    """
    lengths, estimated = _count_lengths(store)
    sources = store.manifest.sources if store.manifest else ()
    report, has_damaged_report = _read_newest_report(store)
    return StoreOverview(
        facts=_list_facts(store),
        lengths=lengths,
        estimated=estimated,
        sources=heapq.nlargest(_MAX_SOURCES, sources, key=lambda source: source.tokens),
        more_sources=max(len(sources) - _MAX_SOURCES, 0),
        source_tokens=sum(source.tokens for source in sources),
        report=report,
        has_damaged_report=has_damaged_report,
        quarantine=_read_quarantine(store),
        generations=_list_generations(store),
    )


def _list_facts(store: Store) -> list[tuple[str, str]]:
    facts = [
        ("documents", f"{len(store):,}"),
        ("tokens", f"{store.tokens:,}"),
        ("on disk", f"{format_size(store.tokens * store.dtype.itemsize)} of {store.dtype.name} ids"),
        ("shards", f"{len(store.shards):,}"),
        ("fingerprint", store.fingerprint),
    ]
    contents = store.contents
    if store.manifest is None:
        return [*facts, ("kind", "a bare Megatron prefix: texts, sources and masks are not recorded")]
    facts.insert(2, ("tokenizer", f"{store.manifest.tokenizer.name} ({store.manifest.tokenizer.vocab_size:,} ids)"))
    if contents.objective:
        facts.append(("kind", OBJECTIVES[contents.objective].contents))
    if store.masked:
        facts.append(("trained", f"{contents.trained_tokens / max(store.tokens, 1):.1%} of the tokens"))
    if contents.removed.size:
        facts.append(("removed", f"{contents.removed.size:,} documents, until batchloom compact"))
    if (store.location.generation or 1) > 1:
        facts.append(("generation", str(store.location.generation)))
    return facts


def _list_generations(store: Store) -> list[GenerationEntry]:
    history = store.manifest.all_history if store.manifest else ()
    return list(reversed(history[-_MAX_GENERATIONS:])) if len(history) > 1 else []


def list_sides(store: Store) -> list[str]:
    """Return the sides that documents of the store can have."""
    objective = store.contents.objective
    return [SIDE_NAMES[side] for side in OBJECTIVES[objective].sides] if objective else []


def _count_lengths(store: Store) -> tuple[list[tuple[int, int, int]], bool]:
    """Return a histogram, and whether it is estimated.

    A large store is estimated from evenly spaced ranges of its documents.
    """
    documents = len(store)
    starts = np.arange(0, documents, _LENGTHS_PER_STEP)
    is_sample = len(starts) > _MAX_LENGTH_STEPS
    if is_sample:
        starts = np.linspace(0, documents - _LENGTHS_PER_STEP, _MAX_LENGTH_STEPS).astype(np.int64)
    counts = np.zeros(_MAX_DIGITS + 1, np.int64)
    for start in starts.tolist():
        lengths = store.lengths.slice(start, min(start + _LENGTHS_PER_STEP, documents))
        # frexp gives the number of binary digits.
        counts += np.bincount(np.frexp(lengths.astype(np.float64))[1], minlength=_MAX_DIGITS + 1)
    filled = np.flatnonzero(counts)
    if not len(filled):
        return [], False
    scale = documents / int(counts.sum())
    bars = [
        (1 << (digit - 1) if digit else 0, (1 << digit) - 1, round(int(counts[digit]) * scale))
        for digit in range(int(filled[0]), int(filled[-1]) + 1)
    ]
    return bars, is_sample


def _read_newest_report(store: Store) -> tuple[PrepareReport | None, bool]:
    """Return the report of the newest generation that read inputs.

    Also return whether it is damaged.
    """
    if store.manifest is None or store.location.is_remote:
        return None, False
    numbers = [entry.number for entry in store.manifest.all_history if entry.has_inputs]
    if not numbers:
        return None, False
    report = read_report(store.path, numbers[-1])
    return report, report is None and (store.path / format_generation_file_name(REPORT_NAME, numbers[-1])).exists()


def _read_quarantine(store: Store) -> QuarantineList:
    quarantine = QuarantineList()
    entries = iter_quarantine(store)
    for location, entry in islice(entries, _MAX_QUARANTINE_LINES):
        if entry is None:
            quarantine.damaged.append(location)
        elif len(quarantine.records) < _MAX_QUARANTINED:
            position = f"line {entry['line']}" if "line" in entry else f"row {entry.get('row', '?')}"
            quarantine.records.append((str(entry["source"]), position, str(entry["reason"])))
        else:
            quarantine.more += 1
    quarantine.is_complete = next(entries, None) is None
    return quarantine
