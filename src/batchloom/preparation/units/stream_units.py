"""Units made of the cached batches of a stream, without reading inputs again.

If all batches of a unit are cached, its temporary files are byte-identical to those of the tokenization phase.
"""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from batchloom.core.document import BadRecord
from batchloom.preparation.documents.record_parsers import RecordParsers
from batchloom.preparation.documents.subsets import SubsetRule
from batchloom.preparation.settings.recipe import DedupRecipe, Recipe
from batchloom.preparation.units.stream_batches import (
    STREAM_BATCHES_FOLDER,
    StreamBatchFacts,
    iter_stream_documents,
    read_stream_batches,
)
from batchloom.preparation.units.unit_columns import read_unit_columns
from batchloom.preparation.units.unit_files import UnitFiles
from batchloom.preparation.units.unit_report import UnitReportMerger
from batchloom.preparation.units.units import Unit
from batchloom.preparation.units.work_folder import (
    BAD_NAME,
    FACTS_NAME,
    Alteration,
    PartCounts,
    UnitFacts,
    WorkFolder,
    attempt_folder,
    move_into_place,
    translate_read_errors,
)
from batchloom.sources import PartReader, RecordBounds, SourcePart
from batchloom.store import write_file
from batchloom.store.write import make_folder, sync_folder


def adopt_units(
    units: Sequence[Unit],
    work: WorkFolder,
    folders: Sequence[Path],
    record_parsers: RecordParsers,
    recipe: Recipe,
) -> int:
    """Make missing temporary files of units from stream batches; count them."""
    # Stream batches hold nothing that the search for duplicates needs.
    if recipe.dedup.mode != "none" or not (work.path / STREAM_BATCHES_FOLDER).is_dir():
        return 0
    membership = SubsetRule(recipe.val_fraction, recipe.test_fraction)
    count = 0
    for unit, folder in zip(units, folders, strict=True):
        batches_folder = work.path / STREAM_BATCHES_FOLDER / folder.name
        if not folder.exists() and (stream_batches := read_stream_batches(batches_folder)) is not None:
            _adopt_unit(unit, stream_batches, batches_folder, folder, work.attempt, record_parsers, membership)
            count += 1
    return count


def _adopt_unit(
    unit: Unit,
    stream_batches: Sequence[StreamBatchFacts],
    batches_folder: Path,
    folder: Path,
    attempt: str,
    record_parsers: RecordParsers,
    membership: SubsetRule,
) -> None:
    partial_folder = attempt_folder(folder, attempt)
    make_folder(partial_folder)
    records_before = [0] * len(unit.parts)
    with UnitFiles(partial_folder, DedupRecipe(mode="none")) as files:
        for number, stream_batch in enumerate(stream_batches):
            _copy_stream_batch(batches_folder / f"{number:06d}", stream_batch, files, records_before, membership)
        files.sync()
    facts = _merge_unit_facts(unit, stream_batches, record_parsers, files.checksums())
    write_file(partial_folder / FACTS_NAME, msgspec.json.encode(facts))
    sync_folder(partial_folder)
    move_into_place(partial_folder, folder)
    shutil.rmtree(batches_folder, ignore_errors=True)


def _copy_stream_batch(
    folder: Path, stream_batch: StreamBatchFacts, files: UnitFiles, records_before: list[int], membership: SubsetRule
) -> None:
    """Copy a batch with the numbering of its unit.

    ``records_before`` counts the records of each part so far, and is updated.
    """
    parts = np.array([part for part, _ in stream_batch.parts], np.uint32)
    shift = np.array([records_before[part] for part, _ in stream_batch.parts], np.uint64)
    for batch, rows in iter_stream_documents(folder, stream_batch):
        rows["record"] += shift[rows["part"]]
        rows["part"] = parts[rows["part"]]
        files.add(batch, rows, membership.codes(rows))
    with translate_read_errors(folder / BAD_NAME):
        if (columns := read_unit_columns(folder)) is not None:
            files.move_columns(columns, parts, shift)
        for line in (folder / BAD_NAME).read_bytes().splitlines():
            local_part, bad = msgspec.json.decode(line, type=tuple[int, BadRecord])
            moved = replace(bad, record=bad.record + int(shift[local_part]))
            files.add_bad(int(parts[local_part]), [moved])
    for (part, _), counts in zip(stream_batch.parts, stream_batch.facts.parts, strict=True):
        records_before[part] += counts.records


def _merge_unit_facts(
    unit: Unit, stream_batches: Sequence[StreamBatchFacts], record_parsers: RecordParsers, checksums: dict[str, str]
) -> UnitFacts:
    counts: list[PartCounts | None] = [None] * len(unit.parts)
    first: tuple[int, BadRecord] | None = None
    altered: dict[str, Alteration] = {}
    reports = UnitReportMerger()
    for number, stream_batch in enumerate(stream_batches):
        unit_parts = [part for part, _ in stream_batch.parts]
        shifts = [part_counts.records if (part_counts := counts[part]) else 0 for part in unit_parts]
        if first is None and stream_batch.facts.first_bad is not None:
            local_part, bad = stream_batch.facts.first_bad
            first = unit_parts[local_part], replace(bad, record=bad.record + shifts[local_part])
        for change, alteration in stream_batch.facts.altered.items():
            part = unit_parts[alteration.part]
            record = alteration.record + shifts[alteration.part]
            moved = msgspec.structs.replace(alteration, part=part, record=record)
            altered[change] = altered[change].add(moved) if change in altered else moved
        for (part, complete), piece_counts in zip(stream_batch.parts, stream_batch.facts.parts, strict=True):
            previous_counts = counts[part]
            counts[part] = (
                piece_counts if complete or previous_counts is None else _add_part_counts(previous_counts, piece_counts)
            )
        reports.add(number, stream_batch.facts.report)
    merged_counts = [
        part_counts if part_counts.hash else _rehash_part(unit.parts[number], part_counts, record_parsers)
        for number, part_counts in enumerate(counts)
        if part_counts is not None
    ]
    return UnitFacts(
        parts=merged_counts,
        documents=sum(part_counts.documents for part_counts in merged_counts),
        tokens=sum(part_counts.tokens for part_counts in merged_counts),
        first_bad=first,
        checksums=checksums,
        altered=altered,
        report=reports.report(),
    )


def _rehash_part(part: SourcePart, counts: PartCounts, record_parsers: RecordParsers) -> PartCounts:
    """Add the hash of all bytes to the counts of a part that was read in sections."""
    rules = record_parsers.get_parser(part.source).rules
    with PartReader(part, rules, RecordBounds(rules)) as reader:
        digest = reader.finish()
        start = reader.start
        stop = reader.stop
    return msgspec.structs.replace(counts, start=start, stop=stop, hash=digest.hex())


def _add_part_counts(first: PartCounts, second: PartCounts) -> PartCounts:
    part_sum = PartCounts(
        start=first.start,
        stop=second.stop,
        records=first.records + second.records,
        documents=first.documents + second.documents,
        tokens=first.tokens + second.tokens,
        empty=first.empty + second.empty,
        bad=first.bad + second.bad,
        further=first.further + second.further,
        truncated=first.truncated + second.truncated,
        dropped=dict(first.dropped),
    )
    for reason, count in second.dropped.items():
        part_sum.count_dropped(reason, count)
    return part_sum
