"""End of a job: lengths, tokenizer, quarantine, report and, last, the manifest."""

import os
from pathlib import Path

from batchloom.core.files import PARTIAL_SUFFIX, read_regular_file
from batchloom.preparation.phases.job_report import make_job_report
from batchloom.preparation.phases.job_results import JobResults, make_manifest, read_processor_state
from batchloom.preparation.phases.prepare_notes import describe_dry_run
from batchloom.preparation.report.progress import PrepareLog
from batchloom.preparation.report.report import encode_report, write_report_page
from batchloom.preparation.settings.run_settings import RunSettings
from batchloom.preparation.units.unit_report import encode_quarantine_line
from batchloom.preparation.units.work_folder import WorkFolder, move_files, read_bad_records
from batchloom.store import (
    MANIFEST_NAME,
    PAGE_NAME,
    REPORT_NAME,
    Manifest,
    ShardEntry,
    encode_manifest,
    extend_manifest,
    wrap_write_errors,
    write_file,
)
from batchloom.store.format import (
    PROCESSOR_NAME,
    QUARANTINE_NAME,
    SUBSETS,
    TOKENIZER_NAME,
    SubsetEntry,
    format_generation_file_name,
    map_index,
    seal_manifest,
)
from batchloom.store.write import LengthsWriter, make_folder, sync_folder


def finish_store(
    work: WorkFolder, results: JobResults, settings: RunSettings, log: PrepareLog, *, workers: int, resumed_units: int
) -> Manifest:
    """Complete the store in the work folder, the manifest last; return that."""
    with log.time("finish"):
        subsets = _collect_store(work, results)
    report = make_job_report(results, work.out, settings, log, workers=workers, resumed_units=resumed_units)
    write_file(work.store / format_generation_file_name(REPORT_NAME, results.generation), encode_report(report))
    write_report_page(report, work.store / format_generation_file_name(PAGE_NAME, results.generation))
    manifest = make_manifest(results, subsets)
    manifest = seal_manifest(manifest) if results.base is None else extend_manifest(results.base, manifest)
    write_file(work.store / MANIFEST_NAME, encode_manifest(manifest))
    return manifest


def finish_dry_run(
    work: WorkFolder, results: JobResults, settings: RunSettings, log: PrepareLog, *, workers: int, resumed_units: int
) -> Manifest:
    """Report what would be left out; return a manifest with valid counts only."""
    report = make_job_report(results, work.out, settings, log, workers=workers, resumed_units=resumed_units)
    write_file(work.path / REPORT_NAME, encode_report(report))
    write_report_page(report, work.path / PAGE_NAME)
    log.report([describe_dry_run(work.path / PAGE_NAME)])
    manifest = make_manifest(results, {})
    return manifest if results.base is None else extend_manifest(results.base, manifest)


def _collect_store(work: WorkFolder, results: JobResults) -> dict[str, SubsetEntry]:
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
    if (processor := read_processor_state(results.recipe)) is not None:
        write_file(work.store / PROCESSOR_NAME, processor)
    _write_quarantine(work, results)
    return subsets


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
