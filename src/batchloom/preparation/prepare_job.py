"""``prepare``: a store of input files; ``prepare_mixture``: a store of each input.

Both make a request of their arguments, and run its recipe.
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import NamedTuple, Unpack

import yaml

from batchloom.core.addresses import is_url
from batchloom.core.errors import InputError, SettingsError
from batchloom.core.files import replace_file
from batchloom.core.process_state import pause_gc, relax_gc
from batchloom.core.settings import quote_value, raise_problems
from batchloom.preparation.input_jobs import make_store
from batchloom.preparation.report.progress import Listener, Note, PrepareLog, PrepareResult, Progress, log_note
from batchloom.preparation.report.report import read_report
from batchloom.preparation.request.inputs import InputArgument, default_tokenizer, list_inputs
from batchloom.preparation.request.python_data import PythonRows, write_python_data
from batchloom.preparation.request.recipe_choice import (
    PrepareRequest,
    RecipeReference,
    describe_remade_store,
    make_append_request,
    make_request,
)
from batchloom.preparation.rerun import check_output_folder, check_separate, previous_detections
from batchloom.preparation.settings.read_recipe import SourceRecipe
from batchloom.preparation.settings.recipe import PrepareOptions, Recipe, check_option_names, is_valid_path
from batchloom.preparation.settings.run_settings import RunOptions, RunSettings, make_run_settings
from batchloom.preparation.synthetic_request import parse_synthetic_input
from batchloom.preparation.synthetic_run import write_synthetic
from batchloom.preparation.units.work_folder import SPOOL_NAME
from batchloom.sources.files import Spool
from batchloom.store import MANIFEST_NAME, WORK_NAME, wrap_write_errors

MIXTURE_NAME = "mixture.yaml"
# Names of folders on every system, and of sources in a mixture file.
_NAME_PATTERN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


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
            name of synthetic data. Or data of Python: rows (dicts), an iterator of texts, a ``datasets.Dataset``, a
            table of pandas, polars or Arrow. They replace the recipe's inputs; None uses those.
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
    settings, recipe_options = make_run_settings(options), _drop_run_options(options)
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


def _drop_run_options(options: PrepareOptions) -> dict[str, object]:
    """Return the options of the recipe."""
    return {name: value for name, value in options.items() if name not in RunOptions.__annotations__}


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


class MixtureResult(NamedTuple):
    """Finished stores of a mixture.

    Attributes:
        path: the mixture file, for ``read_mixture`` and ``train --mixture``; None after a dry run.
        stores: result of each data set, by name.
    """

    path: Path | None
    stores: dict[str, PrepareResult]


def prepare_mixture(
    inputs: InputArgument | Sequence[InputArgument] | None = None,
    *,
    out: str | os.PathLike[str],
    recipe: RecipeReference | None = None,
    progress: Callable[[Note | Progress], None] | None = None,
    **options: Unpack[PrepareOptions],
) -> MixtureResult:
    """Make a store of each input, and the mixture file that applies their weights.

    Duplicates are removed inside each store, not between them. A run with the same arguments resumes an
    interrupted one.

    Args:
        inputs: as of ``prepare``. A data set of a manifest is called by its ``name``, any other input by the beginning
            of its file name.
        out: folder of the stores, one folder for each name, and of ``mixture.yaml``.
        recipe: as of ``prepare``.
        progress: as of ``prepare``.
        **options: as of ``prepare``, without ``append`` and ``work``.

    Returns:
        The mixture file and the results by name.

    Raises:
        SettingsError: as of ``prepare``; also equal or missing names, or weights of a part of the data sets.
        InputError: as of ``prepare``; also preferences or prompts, which mixtures do not train.
    """
    check_option_names("prepare_mixture", options, PrepareOptions)
    request = make_request(inputs, _drop_run_options(options), recipe)
    return run_separately(request, os.fspath(out), progress or log_note, make_run_settings(options))


def run_separately(request: PrepareRequest, out: str, listener: Listener, settings: RunSettings) -> MixtureResult:
    """Run a request into a store of each input; see :func:`prepare_mixture`."""
    recipe = request.recipe
    sources = recipe.sources or (SourceRecipe(),) * len(recipe.inputs)
    names = [source.name or _make_name(path) for path, source in zip(recipe.inputs, sources, strict=True)]
    raise_problems([*_find_setting_problems(recipe, out, settings), *_find_name_problems(sources, names)])
    results, settings = {}, replace(settings, for_loader=True)
    for name, path, source in zip(names, recipe.inputs, sources, strict=True):
        listener(Note(f"Preparing {name}."))
        # The mixture holds the weights.
        part = replace(recipe, inputs=(path,), sources=(replace(source, weight=None),))
        results[name] = run_recipe(part, Path(out) / name, listener, request=request, settings=settings)
    if settings.dry_run:
        return MixtureResult(None, results)
    mixture_path = Path(out) / MIXTURE_NAME
    with wrap_write_errors(mixture_path), replace_file(mixture_path) as new_path:
        new_path.write_text(_format_mixture(names, sources), "utf-8")
    return MixtureResult(mixture_path, results)


def _make_name(path: str) -> str:
    """Return the name of an input: its last component, up to the first dot."""
    return PurePosixPath(path.rstrip("/")).name.partition(".")[0]


def _find_setting_problems(recipe: Recipe, out: str, settings: RunSettings) -> list[str]:
    problems = []
    if is_url(out):
        problems.append(
            f"out: {quote_value(out)} is remote; prepare into a folder, then give batchloom upload for each store"
        )
    if settings.append:
        problems.append("append: belongs to one store; append to the store of the data set")
    if settings.work is not None:
        problems.append("work: belongs to one store; leave it out")
    if recipe.tokenizer.startswith("train:"):
        problems.append(
            f"tokenizer: {recipe.tokenizer!r} would learn one for each store, and a mixture has one; learn it from all "
            "data sets first (prepare them into one store), and name that store"
        )
    return problems


def _find_name_problems(sources: Sequence[SourceRecipe], names: Sequence[str]) -> list[str]:
    problems = [
        f"{source.location or 'inputs'}: {quote_value(name)} is no name of a folder; write name: in a manifest, of "
        "letters, digits, dots, hyphens and underscores"
        for source, name in zip(sources, names, strict=True)
        if not _NAME_PATTERN.fullmatch(name)
    ]
    if MIXTURE_NAME in names:
        problems.append(f"inputs: {MIXTURE_NAME!r} is the name of the mixture file; give the data set another name")
    problems += [
        f"inputs: {count} are called {name!r}; give each a name: in a manifest"
        for name, count in Counter(names).items()
        if count > 1
    ]
    missing = [name for name, source in zip(names, sources, strict=True) if source.weight is None]
    if missing and len(missing) < len(names):
        problems.append(f"weight: missing for {', '.join(missing)}; give every data set one, or none")
    return problems


def _format_mixture(names: Sequence[str], sources: Sequence[SourceRecipe]) -> str:
    """Return the mixture file; without weights, shares follow the sizes."""
    weights = {name: source.weight for name, source in zip(names, sources, strict=True)}
    content = {
        "weights": "size" if None in weights.values() else weights,
        "stores": {name: name for name in names},
    }
    return str(yaml.safe_dump(content, sort_keys=False))
