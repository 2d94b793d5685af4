"""Report of one run: values that may differ between two runs of the same store."""

import os
from pathlib import Path

import msgspec

from batchloom.core.addresses import is_url, redact_url
from batchloom.core.files import decode_file_name
from batchloom.core.process_state import measure_peak_memory
from batchloom.preparation.identity.recipe_identity import compute_recipe_fingerprint
from batchloom.preparation.phases.job_results import JobResults, make_manifest
from batchloom.preparation.report.progress import PrepareLog
from batchloom.preparation.report.report import PrepareReport
from batchloom.preparation.request.recipe_file import describe_input_locations, recipe_settings_for_report
from batchloom.preparation.rerun import make_report_sources
from batchloom.preparation.settings.run_settings import RunSettings
from batchloom.preparation.units.unit_report import STAGES, StageTime, add_stage_times
from batchloom.preparation.workers.executor_choice import runs_inline


def make_job_report(
    results: JobResults, out: Path, settings: RunSettings, log: PrepareLog, *, workers: int, resumed_units: int
) -> PrepareReport:
    """Make the report of a run into ``out``."""
    seconds = log.elapsed
    durations = {name: round(value, 3) for name, value in log.seconds.items()}
    phases: dict[str, StageTime] = {name: StageTime(value) for name, value in durations.items() if name in STAGES}
    content = msgspec.structs.replace(results.content, stages=add_stage_times(results.content.stages, phases))
    locations = describe_input_locations(results.recipe.inputs)
    execution = settings.execution
    return PrepareReport(
        sources=make_report_sources(results.sources),
        inputs=locations["inputs"],
        folder=locations["folder"],
        engine_note=results.tokenizer.engine.note,
        out=decode_file_name(os.path.abspath(out)),
        recipe_fingerprint=compute_recipe_fingerprint(results.recipe),
        started=log.started.isoformat(timespec="seconds"),
        seconds=round(seconds, 3),
        seconds_by_phase=durations,
        bytes_per_second=round(sum(unit.unit.bytes for unit in results.units) / max(seconds, 1e-9)),
        peak_memory_bytes=measure_peak_memory(),
        units=len(results.units),
        resumed_units=resumed_units,
        notes=log.notes,
        left_out=log.left_out,
        dry_run=settings.dry_run,
        settings=recipe_settings_for_report(results.recipe),
        counts=make_manifest(results, {}).counts,
        workers=workers,
        executor="in-process" if runs_inline(execution, workers) else execution.engine,
        content=content,
        media=_find_media_folders(results),
    )


def _find_media_folders(results: JobResults) -> dict[str, str]:
    """Return the base folder of media paths by source; the store has none."""
    folders = {source.name: results.record_parsers.media_folder(source) for source in results.sources}
    return {
        decode_file_name(name): decode_file_name(redact_url(folder) if is_url(folder) else os.path.abspath(folder))
        for name, folder in folders.items()
        if folder is not None
    }
