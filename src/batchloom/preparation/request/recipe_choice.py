"""From a recipe file, a store or a Recipe, and what is said over it, to the job that is carried out."""

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from batchloom.core.errors import InputError, SettingsError
from batchloom.core.settings import raise_problems, shown
from batchloom.preparation.request.append_checks import refuse_without_recipe
from batchloom.preparation.request.inputs import Given, Inputs, as_given, lifted, read_inputs
from batchloom.preparation.request.recipe_file import Stated, read_recipe_file, state_recipe
from batchloom.preparation.request.recipe_of_store import is_store, read_store_recipe
from batchloom.preparation.settings import (
    ChatRecipe,
    DedupRecipe,
    MediaRecipe,
    ReadRecipe,
    Recipe,
    SourceRecipe,
    dedup_of,
    fim_of,
    is_path,
    media_of,
    media_settings,
    parse_names,
    steps_of,
    tokens_of,
)
from batchloom.sources import input_labels
from batchloom.store import MANIFEST_NAME, read_manifest
from batchloom.store.format import split_checksum

RecipePlace = Recipe | str | os.PathLike[str]

_SHORT = {
    "ignore": parse_names,
    "clean": steps_of,
    "fim": fim_of,
    "media": media_of,
    "dedup": dedup_of,
    "tokens_per_shard": tokens_of,
}
_COLUMNS = ("text_field", "mapping")
_READING = tuple(field.name for field in fields(ReadRecipe))
# Documents that are lines or paragraphs repeat without being copies (docs/decisions/0012-dedup.md).
_REPEATING = {"line": "lines", "paragraph": "paragraphs", "\n": "lines", "\n\n": "paragraphs"}
_CHAT = tuple(field.name for field in fields(ChatRecipe))


@dataclass(frozen=True, slots=True)
class Chosen:
    """A job as it was asked for.

    Attributes:
        recipe: what to do.
        notes: what is to be known of it.
        usual: what becomes of duplicates, told before work begins; empty where somebody said so himself.
        kept: the state of the tokenizer, where a store has kept it.
        store: the store that is made again, or the manifest of an older generation of it; None where
            something was said over its recipe.
        partial: why the recipe of a store makes a part of it alone, with what to do; else empty.
    """

    recipe: Recipe
    notes: tuple[str, ...] = ()
    usual: str = ""
    kept: Mapping[str, Any] | None = None
    store: Path | None = None
    partial: str = ""

    @property
    def announced(self) -> tuple[str, ...]:
        """All that is told before work begins."""
        return (*self.notes, *filter(None, [self.usual]))

    @property
    def kept_note(self) -> str:
        """What a file with this recipe does not hold; empty where it holds all."""
        if self.kept is None:
            return ""
        return "The tokenizer is kept in the store; where its original is gone, write the path of the store for it."


def read_recipe(path: str | os.PathLike[str]) -> Recipe:
    """The recipe in a file (YAML or JSON) or in the manifest of a store, as a value.

    ``prepare(recipe=path)`` carries it out; ``dataclasses.replace`` makes another of it. A
    tokenizer that a store keeps is no part of the value: ``prepare(recipe=store)`` uses it.

    Args:
        path: the file, the store's folder or its ``dataset_metadata.json``.

    Raises:
        SettingsError: everything that is wrong with it, each with its path.
        InputMissingError: there is no such file, or an input is not there.
        RecordError: it is no YAML; says at which line and column.
        InputError: it is no recipe, or cannot be read.
        StoreError: the store is missing or damaged.
    """
    return choose_recipe(None, {}, path).recipe


def choose_recipe(
    inputs: Given | Sequence[Given] | None,
    options: Mapping[str, Any],
    recipe: RecipePlace | None,
) -> Chosen:
    """The job that a recipe, and the inputs and options said over it, come to.

    Args:
        inputs: in place of the recipe's; None for those. Where the recipe says something of each of
            its inputs, as many take their places.
        options: settings by the names ``prepare`` takes them under; None is not said.
        recipe: a Recipe, a recipe file or a store; None for the defaults.

    Raises:
        SettingsError: everything that is wrong with the settings; those of a file with its name.
        InputMissingError, InputError, RecordError, StoreError: see :func:`read_recipe`.
    """
    return _choose(inputs, options, recipe, by_label=False)


def choose_appended(
    inputs: Given | Sequence[Given] | None,
    options: Mapping[str, Any],
    recipe: RecipePlace | None,
    out: object,
) -> Chosen:
    """The job that appends to a store: by the recipe of its newest generation, where no other is named.

    What that says of each of its inputs is said of those alone that are given again.

    Args:
        inputs: in place of the recipe's; None for those, of which new files are looked for.
        options: as :func:`choose_recipe` takes them.
        recipe: as :func:`choose_recipe` takes it; None for the store's.
        out: where the store may be; without one the job is as any other.

    Raises:
        SettingsError, InputMissingError, InputError, RecordError, StoreError: see :func:`choose_recipe`.
        StoreConflictError: nothing can be appended to this store.
    """
    place = os.fspath(out) if isinstance(out, os.PathLike) else out
    if recipe is not None or not isinstance(place, str) or not is_path(place):
        return _choose(inputs, options, recipe, by_label=False)
    if not (Path(place) / MANIFEST_NAME).exists():
        return _choose(inputs, options, recipe, by_label=False)
    refuse_without_recipe(read_manifest(Path(place)), Path(place))
    return _choose(inputs, options, Path(place), by_label=True)


def _choose(
    inputs: Given | Sequence[Given] | None,
    options: Mapping[str, Any],
    recipe: RecipePlace | None,
    *,
    by_label: bool,
) -> Chosen:
    given = {name: value for name, value in options.items() if value is not None}
    said = () if inputs is None else as_given(inputs)
    stated = _stated(recipe, {*given, *(["inputs"] if said else [])})
    values, problems = _full(_over(stated.settings, given))
    reading = ReadRecipe(**{name: values[name] for name in _READING if name in values})
    found = _inputs(said, stated, reading, values.get("tokenizer"), by_label=by_label)
    if found.follow_links:
        values.setdefault("follow_links", True)
    chat = ChatRecipe()
    try:
        chat = ChatRecipe(**{name: values[name] for name in _CHAT if name in values})
    except SettingsError as error:
        problems += error.problems
    usual = ""
    if "dedup" not in values and not any("dedup" in problem for problem in problems):
        values["dedup"], usual = usual_dedup(reading)
    beside = {"tokenizer", *_READING, *_CHAT}
    try:
        made = Recipe(
            inputs=found.inputs,
            sources=found.sources,
            tokenizer=found.tokenizer,
            reading=found.reading,
            chat=chat,
            **{name: value for name, value in values.items() if name not in beside},
        )
    except SettingsError as error:
        problems += error.problems
    over = {*given, *(["inputs"] if said else [])}
    raise_problems([_placed(problem, stated.where, over) for problem in problems])
    again = stated.store if not over else None
    notes = (*stated.notes, *found.notes)
    return Chosen(made, notes, usual, stated.kept, again, "" if said else stated.partial)


def usual_dedup(reading: ReadRecipe) -> tuple[DedupRecipe, str]:
    """What becomes of duplicates where nobody says: the mode, and what is told of it."""
    said: object = reading.split_on
    pieces = _REPEATING.get(said) if isinstance(said, str) else None
    if pieces:
        told = f"Duplicates stay, for {pieces} of verse and tables repeat and mean to (--dedup exact leaves them out)."
        return DedupRecipe(mode="none"), told
    return DedupRecipe(mode="exact"), (
        "Exact duplicates are left out: of documents that are equal to the letter the first stays (--no-dedup keeps "
        "all)."
    )


def same_as(out: Path, store: Path | None) -> str:
    """What to say of a store that was made by the recipe of another; empty where there is none."""
    if store is None or out.resolve() == store.resolve():
        return ""
    made = store if store.is_file() else store / MANIFEST_NAME
    # Older stores have the same manifest without its checksum.
    one, other = (split_checksum(path.read_bytes())[0] for path in (made, out / MANIFEST_NAME))
    if one == other:
        return f"{out} is the same as {store}, to the byte."
    return (
        f"{out} differs from {store}: its inputs, its tokenizer or batchloom itself are not what they were; compare "
        f"{MANIFEST_NAME} of both."
    )


def _stated(recipe: RecipePlace | None, given: Collection[str]) -> Stated:
    if recipe is None:
        return Stated({})
    if isinstance(recipe, Recipe):
        return state_recipe(recipe)
    place = os.fspath(recipe) if isinstance(recipe, os.PathLike) else recipe
    if not is_path(place):
        raise SettingsError(
            [f"recipe: {shown(place)} is no path; name a recipe file or the folder of a store"]
        )
    path = Path(place)
    return read_store_recipe(path, given) if is_store(path) else read_recipe_file(path)


def _over(settings: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with others said over them: of the two that name columns one takes the other's place."""
    gone = next((other for one, other in (_COLUMNS, _COLUMNS[::-1]) if one in given), "")
    over = {name: value for name, value in settings.items() if name != gone} | dict(given)
    then, now = settings.get("media"), given.get("media")
    if isinstance(then, MediaRecipe):
        then = media_settings(then)
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        # What is not said anew of media stays as it was.
        over["media"] = {**then, **now}
    return over


def _full(settings: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Settings with their short forms spelled out; what is wrong with these is left out of them, and told."""
    values, problems = dict(settings), list[str]()
    for name, full in _SHORT.items():
        if name in values:
            try:
                values[name] = full(values[name])
            except SettingsError as error:
                problems += error.problems
                del values[name]
    return values, problems


def _inputs(
    said: tuple[Any, ...],
    stated: Stated,
    reading: ReadRecipe,
    tokenizer: str | None,
    *,
    by_label: bool,
) -> Inputs:
    """The inputs of a job: those that are said, else the recipe's."""
    if not said:
        sources, reading = lifted(stated.sources, reading)
        none = read_inputs((), reading, tokenizer)
        return replace(none, inputs=stated.inputs, sources=sources)
    found = read_inputs(said, reading, tokenizer)
    if not stated.sources or found.sources:
        return found
    if by_label:
        known, reading = lifted(stated.sources, reading)
        of = dict(zip(input_labels(stated.inputs), known, strict=True))
        own = tuple(of.get(label, SourceRecipe()) for label in input_labels(found.inputs))
        some = any(one != SourceRecipe() for one in own)
        return replace(found, sources=own if some else (), reading=reading)
    if len(found.inputs) != len(stated.sources):
        raise InputError(
            f"{stated.where or 'The recipe'} says something of each of its {len(stated.sources)} inputs, and "
            f"{len(found.inputs)} are given in their place; give as many, in its order."
        )
    sources, reading = lifted(stated.sources, reading)
    return replace(found, sources=sources, reading=reading)


def _placed(problem: str, where: str, given: Collection[str]) -> str:
    """A problem of a setting with the file that it stands in, where it stands in one."""
    plain = problem.removeprefix("chat.")
    name = re.split(r"[.:\[]", plain, maxsplit=1)[0]
    if not where or ("mapping" if name == "map" else name) in given:
        return problem
    return f"{where}: {re.sub('^map(?=[.:])', 'mapping', plain)}"
