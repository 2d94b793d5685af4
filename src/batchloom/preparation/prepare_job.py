"""``prepare``: make a store from input files, in three resumable phases."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Unpack

from batchloom.core.addresses import is_url
from batchloom.core.errors import InputError, SettingsError, StoreConflictError, TooManyBadRecordsError
from batchloom.core.process_state import pause_gc
from batchloom.core.settings import quote_value
from batchloom.preparation.phases.append import read_base_manifest, read_tokenizer_state, select_new_inputs
from batchloom.preparation.prepare_run import PrepareRun
from batchloom.preparation.remote_prepare import run_remote
from batchloom.preparation.report.progress import (
    Listener,
    Note,
    PrepareResult,
    Progress,
    log_note,
    make_result,
    subtract_base,
)
from batchloom.preparation.report.report import PrepareReport, read_report
from batchloom.preparation.request.append_checks import check_same_recipe
from batchloom.preparation.request.inputs import InputArgument, list_inputs
from batchloom.preparation.request.recipe_choice import (
    PrepareRequest,
    RecipeReference,
    describe_remade_store,
    make_append_request,
    make_request,
)
from batchloom.preparation.rerun import (
    check_output_folder,
    check_separate,
    clear_leftover_work,
    find_finished_store,
    previous_detections,
    remove_leftover_work,
)
from batchloom.preparation.settings.recipe import (
    PrepareOptions,
    Recipe,
    check_option_names,
    count_allowed_bad,
    is_valid_path,
)
from batchloom.preparation.synthetic_run import parse_synthetic_input, write_synthetic
from batchloom.preparation.units.work_folder import SPOOL_NAME, WorkFolder
from batchloom.preparation.workers.executors import ExecutionSettings, ExecutorName, RunSettings
from batchloom.sources import SourceListing
from batchloom.sources.files import Spool
from batchloom.store import MANIFEST_NAME, WORK_NAME, Manifest, lock_store, read_manifest, wrap_write_errors
from batchloom.store.format import QUARANTINE_NAME


def prepare(
    inputs: InputArgument | Sequence[InputArgument] | None = None,
    *,
    out: str | os.PathLike[str],
    recipe: RecipeReference | None = None,
    workers: int | Literal["auto"] = "auto",
    engine: ExecutorName = "pool",
    address: str | None = None,
    memory_per_worker: int | None = None,
    append: bool = False,
    restart: bool = False,
    hash_inputs: bool = False,
    dry_run: bool = False,
    streaming: bool | None = None,
    work: str | os.PathLike[str] | None = None,
    progress: Callable[[Note | Progress], None] | None = None,
    **options: Unpack[PrepareOptions],
) -> PrepareResult:
    """Make a store of text, code, JSON, CSV, Parquet and Arrow files.

    Each worker uses less than 700 MiB of memory, for an input of any size. A run with the same
    arguments resumes the work of an interrupted run; on a finished store it succeeds at once.
    The store is the same to the byte for any number of workers and any engine.

    Args:
        inputs: files, folders, globs, archives and URLs, also compressed (``.gz``, ``.zst`` ...), data sets
            of the Hub, ``-`` for standard input; YAML manifests and :class:`DatasetConfig`; or one
            name of synthetic data. They replace the recipe's inputs; None uses those.
        out: folder of the store, or a URL of an object store (``s3://bucket/prefix``).
        recipe: a :class:`Recipe`, a recipe file, or a store to make again. The other arguments
            override it.
        workers: number of units processed in parallel; ``auto`` uses as many as cores, memory and units allow.
        engine: ``pool`` (processes of this machine) or ``ray``.
        address: address of a Ray cluster; None starts one on this machine.
        memory_per_worker: maximum bytes of a worker; None for no limit.
        append: add the new inputs to an existing store as a new generation.
        restart: replace the work of another recipe or of other inputs; identical units are reused.
        hash_inputs: identify inputs by content, not by modification time.
        dry_run: stop before shards are written, after counting what would be dropped.
        streaming: read remote Hub datasets without downloading them; None: only large ones.
        work: folder in which a store for a URL is made; None for one below the user's cache.
        progress: callback that gets a :class:`Note` or a :class:`Progress`, several times a second. An
            exception in it stops the job. Without it, notes go to the log ``batchloom``.
        **options: settings of the recipe, which :class:`Recipe`, :class:`ReadRecipe` and :class:`ChatRecipe` document.
            ``fim`` may be the rate of a :class:`FimRecipe`, ``dedup`` the mode of a :class:`DedupRecipe` and ``media``
            a mapping with at least a ``processor``. The default tokenizer is that of a manifest, else the
            processor's, else ``gpt2``; the default ``dedup`` is ``exact``, or ``none`` if texts are split into lines
            or paragraphs.

    Raises:
        SettingsError, InputMissingError, InputError, TokenizerError: the request is invalid, or an input is unusable.
        StoreConflictError, OutputError: ``out`` holds another job's work, or cannot be written.
        WorkerError: workers cannot be started, or die repeatedly.
    """
    check_option_names("prepare", options, PrepareOptions)
    build_request = partial(make_append_request, out=out) if append else make_request
    request = build_request(inputs, options, recipe)
    if not is_valid_path(folder := os.fspath(out) if isinstance(out, os.PathLike) else out):
        raise SettingsError([f"out: {quote_value(out)} is no path; name the folder of the store"])
    execution = ExecutionSettings(workers=workers, engine=engine, address=address, memory=memory_per_worker)
    settings = RunSettings(
        execution=execution,
        append=append,
        restart=restart,
        hash_inputs=hash_inputs,
        dry_run=dry_run,
        streaming=streaming,
        work=None if work is None else Path(work),
    )
    return run_request(request, folder, progress or log_note, settings)


def run_request(request: PrepareRequest, out: str, listener: Listener, settings: RunSettings) -> PrepareResult:
    """Run a request into a local folder or a URL; see :func:`prepare`.

    When a store is made again, a note says whether the result is the same.
    """
    if is_url(out):
        if settings.append:
            raise SettingsError(
                [f"append: {quote_value(out)} lies elsewhere, and only a store of this machine is appended to"]
            )
        if request.partial:
            raise InputError(request.partial)
        make = partial(_make_store, job_options=_JobOptions(settings, request.tokenizer_state))
        return run_remote(request, out, listener, make, settings)
    if settings.work is not None:
        raise SettingsError(
            [f"work: {quote_value(str(settings.work))} is for a store elsewhere (--out s3://...); leave it out"]
        )
    if request.partial and not settings.append:
        raise InputError(request.partial)
    result = run_recipe(request.recipe, Path(out), listener, request=request, settings=settings)
    # A dry run leaves no store to compare.
    note = "" if settings.dry_run else describe_remade_store(Path(out), request.store)
    if not note:
        return result
    listener(Note(note))
    return replace(result, notes=(*result.notes, note))


def run_recipe(
    recipe: Recipe,
    out: Path,
    listener: Listener,
    *,
    request: PrepareRequest | None = None,
    settings: RunSettings | None = None,
) -> PrepareResult:
    """Run a recipe into ``out``; see :func:`prepare`.

    Args:
        recipe: the recipe.
        out: folder of the store.
        listener: callback that gets notes and progress.
        request: origin of the recipe: its notes, and the tokenizer that a store holds.
        settings: settings of the run.
    """
    began, settings = time.perf_counter(), settings or RunSettings()
    if synthetic_spec := parse_synthetic_input(recipe.inputs):
        return write_synthetic(synthetic_spec, recipe, out, listener)
    check_separate(recipe.inputs, out)
    initial_notes, tokenizer_state = (
        (request.initial_notes, request.tokenizer_state) if request is not None else ((), None)
    )
    with wrap_write_errors(out):
        has_store = (out / MANIFEST_NAME).exists()
    if not has_store:
        # The spool below creates files in this folder.
        check_output_folder(out)
    with Spool(out / WORK_NAME / SPOOL_NAME) as spool:
        streaming = settings.streaming
        with pause_gc():
            report = read_report(out)
            # A file may have another format now, with the same size and time.
            detected_files = {} if settings.hash_inputs else previous_detections(report, recipe)
            listing = list_inputs(recipe, spool, exclude=out, streaming=streaming, detected_files=detected_files)
        listing = replace(listing, notes=(*initial_notes, *listing.notes))
        job_options = _JobOptions(
            settings, tokenizer_state, report, read_base_manifest(out) if settings.append else None
        )
        return _make_store(recipe, out, listing, spool, listener, began, job_options)


@dataclass(frozen=True, slots=True)
class _JobOptions:
    """Options for making a store of listed inputs.

    Attributes:
        settings: settings of the run.
        tokenizer_state: state of a stored tokenizer.
        report: report of the existing store.
        base: newest generation of the store to append to; None if there is no store.
    """

    settings: RunSettings
    tokenizer_state: Mapping[str, Any] | None = None
    report: PrepareReport | None = None
    base: Manifest | None = None


def _make_store(
    recipe: Recipe,
    out: Path,
    listing: SourceListing,
    spool: Spool,
    listener: Listener,
    began: float,
    job_options: _JobOptions,
) -> PrepareResult:
    """Make the store of listed inputs."""
    appended = _append_generation(recipe, out, listing, spool, listener, began, job_options)
    if appended is not None:
        return appended
    if job_options.settings.append:
        note = f"There is no store at {out} yet: it is made, with the tokenizer {recipe.tokenizer}."
        listing = replace(listing, notes=(*listing.notes, note))
    finished_result = _find_finished_job(recipe, out, listing, began, job_options)
    if finished_result is not None:
        remove_leftover_work(out, finished_result.generation)
        return finished_result
    with WorkFolder(out) as work:
        # Another run may have finished before this one got the lock.
        finished_result = _find_finished_job(recipe, out, listing, began, job_options)
        if finished_result is not None:
            clear_leftover_work(work, finished_result.generation)
            return finished_result
        spool.sweep()
        return PrepareRun(work, recipe, listing, listener, job_options.settings, began).run(job_options.tokenizer_state)


def _append_generation(
    recipe: Recipe,
    out: Path,
    listing: SourceListing,
    spool: Spool,
    listener: Listener,
    began: float,
    job_options: _JobOptions,
) -> PrepareResult | None:
    """Append the new inputs to a store as a generation; None if there is no store."""
    base = job_options.base
    if base is None:
        return None
    check_same_recipe(recipe, base, out, job_options.tokenizer_state)
    listing = select_new_inputs(listing, base, out, hashed=job_options.settings.hash_inputs)
    if not listing.sources:
        remove_leftover_work(out, base.generation)
        for note in listing.notes:
            listener(Note(note))
        seconds = time.perf_counter() - began
        result = make_result(out, base, seconds=seconds, already_done=True, notes=listing.notes)
        return subtract_base(result, base)
    with lock_store(out):
        # From here on, commands that change the store see that a job is running in it.
        work = WorkFolder(out)
    with work:
        if (newest := read_manifest(out).generation) != base.generation:
            raise StoreConflictError(
                f"{out} has become generation {newest} since this run looked at it; give the command again."
            )
        spool.sweep()
        clear_leftover_work(work, base.generation)
        job = PrepareRun(work, recipe, listing, listener, job_options.settings, began, base)
        return job.run(read_tokenizer_state(out))


def _find_finished_job(
    recipe: Recipe, out: Path, listing: SourceListing, began: float, job_options: _JobOptions
) -> PrepareResult | None:
    """Return the result of a finished job; None if there is work to do."""
    report = job_options.report
    with pause_gc():
        hashed = job_options.settings.hash_inputs
        manifest = find_finished_store(out, recipe, listing, report, job_options.tokenizer_state, hashed=hashed)
    if manifest is None:
        return None
    bad, records = manifest.counts.quarantined, manifest.counts.records
    if bad > count_allowed_bad(recipe.max_bad, records):
        raise TooManyBadRecordsError(
            f"{bad:,} of the {records:,} records that {out} was made of are bad, more than --max-bad {recipe.max_bad} "
            f"allows; they stand in {out / QUARANTINE_NAME}. Mend the input, or give the budget it was made with."
        )
    note = report.engine_note if report else ""
    seconds = time.perf_counter() - began
    return make_result(out, manifest, engine_note=note, seconds=seconds, already_done=True)
