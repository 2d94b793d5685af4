"""Results of all phases, and the manifest that they make."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import msgspec

from batchloom.preparation.documents.record_parsers import RecordParsers
from batchloom.preparation.identity.processors import get_processor_state
from batchloom.preparation.identity.recipe_identity import compute_recipe_fingerprint, recipe_to_plain
from batchloom.preparation.report.report import ReportContent
from batchloom.preparation.settings.recipe import Recipe
from batchloom.preparation.units.units import combine_part_hashes
from batchloom.preparation.units.work_folder import (
    Decision,
    PartCounts,
    PartDedupCounts,
    TokenizedUnit,
    UnitDedupCounts,
)
from batchloom.sources.files import Source
from batchloom.store import Manifest, PartEntry, ShardEntry
from batchloom.store.format import (
    FORMAT_VERSION,
    ProcessorEntry,
    SourceEntry,
    StoreCounts,
    SubsetEntry,
    compute_checksum,
    make_tokenizer_entry,
)
from batchloom.tokens import Tokenizer


@dataclass(frozen=True, slots=True)
class JobResults:
    """Results of all phases, from which the store is finished."""

    recipe: Recipe
    record_parsers: RecordParsers
    sources: Sequence[Source]
    # Newest generation of the store that is appended to.
    base: Manifest | None
    tokenizer: Tokenizer
    dtype: str
    units: Sequence[TokenizedUnit]
    dedup_counts: Sequence[UnitDedupCounts]
    decision: Decision
    # Of each unit by subset; empty for a dry run.
    shards: Sequence[dict[str, list[ShardEntry]]]
    content: ReportContent

    @property
    def generation(self) -> int:
        return 1 + (self.base.generation if self.base else 0)


def read_processor_state(recipe: Recipe) -> bytes | None:
    """Return the encoded processor state of a recipe; None without media."""
    media = recipe.reading.media
    return None if media is None else msgspec.json.encode(get_processor_state(media, recipe.tokenizer))


def _iter_parts(results: JobResults) -> Iterator[tuple[Source, PartCounts, PartDedupCounts]]:
    for tokenized_unit, unit_dedup_counts in zip(results.units, results.dedup_counts, strict=True):
        for part, counts, part_dedup_counts in zip(
            tokenized_unit.unit.parts, tokenized_unit.facts.parts, unit_dedup_counts.parts, strict=True
        ):
            yield part.source, counts, part_dedup_counts


def make_manifest(results: JobResults, subsets: dict[str, SubsetEntry]) -> Manifest:
    """Make the manifest of a job; of a dry run (no subsets) only the counts are valid."""
    dropped: Counter[str] = Counter()
    for _, part, dedup_counts in _iter_parts(results):
        dropped.update(part.dropped)
        dropped.update(dedup_counts.dropped)
        dropped["empty"] += part.empty
    tokenizer = results.tokenizer
    processor = None
    if (data := read_processor_state(results.recipe)) is not None:
        state = msgspec.json.decode(data)
        processor = ProcessorEntry(state["name"], state["fingerprint"], compute_checksum(data))
    return Manifest(
        format_version=FORMAT_VERSION,
        generation=1,
        dtype=results.dtype,
        tokenizer=make_tokenizer_entry(tokenizer),
        recipe=recipe_to_plain(results.recipe),
        recipe_fingerprint=compute_recipe_fingerprint(results.recipe),
        counts=StoreCounts(
            records=sum(part.records for _, part, _ in _iter_parts(results)),
            documents=sum(unit_dedup_counts.documents for unit_dedup_counts in results.dedup_counts),
            tokens=sum(dedup_counts.tokens for dedup_counts in results.dedup_counts),
            quarantined=sum(part.bad for _, part, _ in _iter_parts(results)),
            dropped={reason: count for reason, count in sorted(dropped.items()) if count},
            further=sum(part.further for _, part, _ in _iter_parts(results)),
            truncated=sum(part.truncated for _, part, _ in _iter_parts(results)),
        ),
        subsets=subsets,
        subset_overrides=results.decision.overrides,
        sources=_make_source_entries(results),
        processor=processor,
    )


def _make_source_entries(results: JobResults) -> tuple[SourceEntry, ...]:
    added = "absent" if results.tokenizer.bos_id is None else "added"
    entries = []
    for source, parts in _group_parts(results):
        record_parser = results.record_parsers.get_parser(source)
        settings = results.recipe.source(source.input)
        entries.append(
            SourceEntry(
                name=source.name,
                kind=source.kind,
                bytes=source.size,
                hash=combine_part_hashes([counts.hash for counts, _ in parts]),
                documents=sum(dedup_counts.documents for _, dedup_counts in parts),
                tokens=sum(dedup_counts.tokens for _, dedup_counts in parts),
                bos=added if record_parser.ended else "present",
                end="added" if record_parser.ended else "present",
                parts=tuple(PartEntry(counts.start, counts.stop, counts.records) for counts, _ in parts),
                detected=record_parser.detected,
                conversations=record_parser.templated,
                preferences=record_parser.objective,
                revision=source.revision,
                dataset=settings.name or "",
                weight=None if settings.weight is None else float(settings.weight),
                damage=next((counts.damage for counts, _ in parts if counts.damage), ""),
            )
        )
    return tuple(entries)


def _group_parts(results: JobResults) -> Iterator[tuple[Source, list[tuple[PartCounts, PartDedupCounts]]]]:
    """Yield every source with its parts; the units hold them in the same order."""
    groups = groupby(_iter_parts(results), key=lambda part: part[0].path)
    path, group = next(groups, ("", iter(())))
    for source in results.sources:
        parts = []
        # A source without bytes has no parts.
        if source.path == path:
            parts = [(counts, dedup_counts) for _, counts, dedup_counts in group]
            path, group = next(groups, ("", iter(())))
        yield source, parts
    if path:
        raise AssertionError(f"the parts of {path} are out of order")
