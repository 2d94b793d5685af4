"""``prepare``: make a store from input files, in three resumable phases."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Unpack

from batchloom.core.addresses import is_url
from batchloom.core.errors import InputError, SettingsError
from batchloom.core.process_state import pause_gc, relax_gc
from batchloom.core.settings import quote_value
from batchloom.preparation.prepare_run import make_store
from batchloom.preparation.report.progress import (
    Listener,
    Note,
    PrepareLog,
    PrepareResult,
    Progress,
    log_note,
)
from batchloom.preparation.report.report import read_report
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
    previous_detections,
)
from batchloom.preparation.settings.recipe import (
    PrepareOptions,
    Recipe,
    check_option_names,
    is_valid_path,
)
from batchloom.preparation.settings.run_settings import RunOptions, RunSettings, make_run_settings
from batchloom.preparation.synthetic_run import parse_synthetic_input, write_synthetic
from batchloom.preparation.units.work_folder import SPOOL_NAME
from batchloom.sources.files import Spool
from batchloom.store import MANIFEST_NAME, WORK_NAME, wrap_write_errors


def prepare(
    inputs: InputArgument | Sequence[InputArgument] | None = None,
    *,
    out: str | os.PathLike[str],
    recipe: RecipeReference | None = None,
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
        progress: callback that gets a :class:`Note` or a :class:`Progress`, several times a second. An
            exception in it stops the job. Without it, notes go to the log ``batchloom``.
        **options: settings of the run, which :class:`RunSettings` and :class:`ExecutionSettings` document, and of the
            recipe, which :class:`Recipe`, :class:`ReadRecipe` and :class:`ChatRecipe` document.
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
    settings = make_run_settings(options)
    recipe_options = {name: value for name, value in options.items() if name not in RunOptions.__annotations__}
    build_request = partial(make_append_request, out=out) if settings.append else make_request
    request = build_request(inputs, recipe_options, recipe)
    if not is_valid_path(folder := os.fspath(out) if isinstance(out, os.PathLike) else out):
        raise SettingsError([f"out: {quote_value(out)} is no path; name the folder of the store"])
    return run_request(request, folder, progress or log_note, settings)


@relax_gc()
def run_request(request: PrepareRequest, out: str, listener: Listener, settings: RunSettings) -> PrepareResult:
    """Run a request into a local folder or a URL; see :func:`prepare`.

    When a store is made again, a note says whether the result is the same.
    """
    if is_url(out):
        if settings.append:
            raise SettingsError(
                [f"append: {quote_value(out)} is remote, and only a store on this machine can be appended to"]
            )
        if request.partial:
            raise InputError(request.partial)
        from batchloom.preparation.remote_prepare import run_remote  # noqa: PLC0415 - few outputs are remote

        return run_remote(request, out, listener, settings)
    if settings.work is not None:
        raise SettingsError(
            [f"work: {quote_value(str(settings.work))} applies to a remote store only (--out s3://...); leave it out"]
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
    settings, log = settings or RunSettings(), PrepareLog(listener)
    request = PrepareRequest(recipe) if request is None else replace(request, recipe=recipe)
    if synthetic_spec := parse_synthetic_input(recipe.inputs):
        return write_synthetic(synthetic_spec, recipe, out, listener)
    check_separate(recipe.inputs, out)
    with wrap_write_errors(out):
        has_store = (out / MANIFEST_NAME).exists()
    if not has_store:
        # The spool below creates files in this folder.
        check_output_folder(out)
    with Spool(out / WORK_NAME / SPOOL_NAME) as spool:
        with pause_gc():
            report = read_report(out)
            # A file may have another format now, with the same size and time.
            detected_files = {} if settings.hash_inputs else previous_detections(report, recipe)
            listing = list_inputs(
                recipe, spool, exclude=out, streaming=settings.streaming, detected_files=detected_files
            )
        listing = request.add_notes(listing)
        return make_store(request, out, listing, spool, settings, log, report)
