"""``prepare``: a store of input files, tables, texts or rows of Python."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Unpack

from batchloom.core.addresses import is_url
from batchloom.core.errors import SettingsError
from batchloom.core.settings import quote_value
from batchloom.preparation.keywords import PrepareOptions
from batchloom.preparation.python_data import PythonRows, write_python_data
from batchloom.preparation.report.progress import Note, PrepareResult, Progress, log_note
from batchloom.preparation.request.inputs import InputArgument, default_tokenizer
from batchloom.preparation.request.recipe_choice import RecipeReference, make_append_request, make_request
from batchloom.preparation.request_run import run_request
from batchloom.preparation.settings.recipe import check_option_names, is_valid_path
from batchloom.preparation.settings.run_settings import RUN_SETTINGS, make_run_settings


def prepare(
    inputs: InputArgument | Sequence[InputArgument] | PythonRows | None = None,
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
            name of synthetic data. Or data of Python: rows (dicts), an iterator or Series of texts, a
            ``datasets.Dataset``, a table of pandas, polars or Arrow. They replace the recipe's inputs; None uses those.
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
    if not is_valid_path(folder := os.fspath(out) if isinstance(out, os.PathLike) else out):
        raise SettingsError([f"out: {quote_value(out)} is no path; name the folder of the store"])
    settings = make_run_settings(options)
    recipe_options = drop_run_options(options)
    build_request = partial(make_append_request, out=out) if settings.append else make_request
    with write_python_data(inputs, recipe_options.get("tokenizer"), _find_near_folder(folder)) as data:
        if data.tokenizer is not None:
            recipe_options["tokenizer"] = data.tokenizer
        request = build_request(data.inputs, recipe_options, recipe)
        default = default_tokenizer(request.recipe.reading)
        if progress is None and recipe is None and data.tokenizer is None and request.recipe.tokenizer == default:
            log_note(Note(f"The tokenizer is {default}, the default (tokenizer=)."))
        settings = replace(settings, hash_inputs=settings.hash_inputs or data.is_written)
        return run_request(request, folder, progress or log_note, settings)


def _find_near_folder(out: str) -> Path | None:
    """Return an existing folder on the disk of a store.

    None for a remote store, and if nothing can be written there.
    """
    if is_url(out):
        return None
    folder = next((folder for folder in Path(out).absolute().parents if folder.is_dir()), None)
    return folder if folder and os.access(folder, os.W_OK) else None


def drop_run_options(options: PrepareOptions) -> dict[str, object]:
    """Return the options of the recipe."""
    return {name: value for name, value in options.items() if name not in RUN_SETTINGS}
