"""``prepare_mixture``: a store of each input, and the file that mixes them."""

import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import NamedTuple, Unpack

import yaml

from batchloom.core.addresses import is_url
from batchloom.core.files import replace_file
from batchloom.core.settings import quote_value, raise_problems
from batchloom.preparation.keywords import PrepareOptions
from batchloom.preparation.prepare_job import drop_run_options
from batchloom.preparation.report.progress import Listener, Note, PrepareResult, Progress, log_note
from batchloom.preparation.request.inputs import InputArgument
from batchloom.preparation.request.recipe_choice import PrepareRequest, RecipeReference, make_request
from batchloom.preparation.request_run import run_recipe
from batchloom.preparation.settings.read_recipe import SourceRecipe
from batchloom.preparation.settings.recipe import Recipe, check_option_names
from batchloom.preparation.settings.run_settings import RunSettings, make_run_settings
from batchloom.store import wrap_write_errors

MIXTURE_NAME = "mixture.yaml"
# Names of folders on every system, and of sources in a mixture file.
_NAME_PATTERN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


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
    request = make_request(inputs, drop_run_options(options), recipe)
    return run_separately(request, os.fspath(out), progress or log_note, make_run_settings(options))


def run_separately(request: PrepareRequest, out: str, listener: Listener, settings: RunSettings) -> MixtureResult:
    """Run a request into a store of each input; see :func:`prepare_mixture`."""
    recipe = request.recipe
    sources = recipe.sources or (SourceRecipe(),) * len(recipe.inputs)
    names = [source.name or _make_name(path) for path, source in zip(recipe.inputs, sources, strict=True)]
    raise_problems([*_find_setting_problems(recipe, out, settings), *_find_name_problems(sources, names)])
    results = {}
    settings = replace(settings, for_loader=True)
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
