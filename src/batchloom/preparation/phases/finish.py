"""End of a job: lengths, quarantine, tokenizer, report, manifest."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import msgspec

from batchloom.core.files import PARTIAL_SUFFIX, read_regular_file
from batchloom.preparation.documents.record_parsers import RecordParsers
from batchloom.preparation.report.report import PrepareReport, ReportContent, encode_report, write_report_page
from batchloom.preparation.settings.media_recipe import get_processor_state
from batchloom.preparation.settings.recipe import Recipe, compute_recipe_fingerprint, recipe_to_plain
from batchloom.preparation.units.unit_report import encode_quarantine_line
from batchloom.preparation.units.units import combine_part_hashes
from batchloom.preparation.units.work_folder import (
    Decision,
    PartCounts,
    PartDedupCounts,
    TokenizedUnit,
    UnitDedupCounts,
    WorkFolder,
    move_files,
    read_bad_records,
)
from batchloom.sources.files import Source
from batchloom.store import (
    MANIFEST_NAME,
    PAGE_NAME,
    REPORT_NAME,
    Manifest,
    PartEntry,
    ShardEntry,
    encode_manifest,
    extend_manifest,
    wrap_write_errors,
    write_file,
)
from batchloom.store.format import (
    FORMAT_VERSION,
    PROCESSOR_NAME,
    QUARANTINE_NAME,
    SUBSETS,
    TOKENIZER_NAME,
    ProcessorEntry,
    SourceEntry,
    StoreCounts,
    SubsetEntry,
    compute_checksum,
    format_generation_file_name,
    make_tokenizer_entry,
    map_index,
    seal_manifest,
)
from batchloom.store.write import LengthsWriter, make_folder, sync_folder
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


def collect_store(work: WorkFolder, results: JobResults) -> dict[str, SubsetEntry]:
    """Fill the work store with all files but the report and the manifest."""
    make_folder(work.store)
    # Safe to repeat after a kill.
    for unit, shards in zip(results.units, results.shards, strict=True):
        for name in [name for name, entries in shards.items() if entries]:
            make_folder(work.store / name)
            if (folder := work.shards(unit.unit.number) / name).is_dir():
                move_files(folder, work.store / name)
    subsets = {}
    for name in SUBSETS:
        entries = [entry for unit in results.shards for entry in unit[name]]
        if entries:
            subsets[name] = make_subset_entry(work.store / name, entries, results.generation)
    write_file(work.store / TOKENIZER_NAME, read_regular_file(work.tokenizer_path))
    if (processor := _read_processor_state(results.recipe)) is not None:
        write_file(work.store / PROCESSOR_NAME, processor)
    _write_quarantine(work, results)
    return subsets


def finish_store(
    work: WorkFolder, results: JobResults, subsets: dict[str, SubsetEntry], report: PrepareReport
) -> Manifest:
    """Write the report into the work store and, last, the manifest; return that."""
    write_file(work.store / format_generation_file_name(REPORT_NAME, results.generation), encode_report(report))
    write_report_page(report, work.store / format_generation_file_name(PAGE_NAME, results.generation))
    manifest = make_manifest(results, subsets)
    manifest = seal_manifest(manifest) if results.base is None else extend_manifest(results.base, manifest)
    write_file(work.store / MANIFEST_NAME, encode_manifest(manifest))
    return manifest


def _read_processor_state(recipe: Recipe) -> bytes | None:
    """Return the encoded processor state of a recipe; None without media."""
    media = recipe.reading.media
    return None if media is None else msgspec.json.encode(get_processor_state(media, recipe.tokenizer))


def make_subset_entry(folder: Path, entries: list[ShardEntry], generation: int = 1) -> SubsetEntry:
    """Make the entry of a subset, and write its lengths file from the shard indexes."""
    lengths = LengthsWriter(folder, generation)
    try:
        for entry in entries:
            lengths.append(map_index((folder / entry.name).with_suffix(".idx")).lengths.view("<u4"))
        checksum, header_checksum = lengths.finish()
    finally:
        lengths.abandon()
    sync_folder(folder)
    return SubsetEntry(
        documents=sum(entry.documents for entry in entries),
        tokens=sum(entry.tokens for entry in entries),
        lengths=checksum,
        shards=tuple(entries),
        sums=header_checksum,
    )


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
    tokenizer, processor = results.tokenizer, None
    if (data := _read_processor_state(results.recipe)) is not None:
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
        record_parser, settings = results.record_parsers.get_parser(source), results.recipe.source(source.input)
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


def _write_quarantine(work: WorkFolder, results: JobResults) -> None:
    """Write all bad records in input order, with source names and line numbers."""
    path = work.store / format_generation_file_name(QUARANTINE_NAME, results.generation)
    partial_path = path.with_name(path.name + PARTIAL_SUFFIX)
    records_before: dict[str, int] = {}
    with wrap_write_errors(path):
        with partial_path.open("wb") as file:
            for tokenized_unit in results.units:
                starts = []
                for part, counts in zip(tokenized_unit.unit.parts, tokenized_unit.facts.parts, strict=True):
                    starts.append(records_before.get(part.source.path, 0))
                    records_before[part.source.path] = starts[-1] + counts.records
                for number, record in read_bad_records(tokenized_unit.folder):
                    source = tokenized_unit.unit.parts[number].source
                    file.write(encode_quarantine_line(source, results.record_parsers.rules, starts[number], record))
            file.flush()
            os.fsync(file.fileno())
        partial_path.replace(path)
