"""From a recipe file, a store or a Recipe, and what is said over it, to the job that is carried out."""

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from batchloom.core.errors import InputError, SettingsError
from batchloom.core.settings import quote_value, raise_problems
from batchloom.preparation.request.append_checks import check_base_has_recipe
from batchloom.preparation.request.inputs import (
    InputArgument,
    ResolvedInputs,
    as_input_tuple,
    hoist_common_settings,
    resolve_inputs,
)
from batchloom.preparation.request.recipe_file import RawRecipe, read_recipe_file, to_raw_recipe
from batchloom.preparation.request.recipe_of_store import is_store_path, read_store_recipe
from batchloom.preparation.settings import (
    ChatRecipe,
    DedupRecipe,
    MediaRecipe,
    ReadRecipe,
    Recipe,
    SourceRecipe,
    coerce_token_count,
    is_valid_path,
    media_to_settings,
    parse_clean_steps,
    parse_dedup,
    parse_fim,
    parse_media,
    parse_names,
)
from batchloom.sources import make_input_labels
from batchloom.store import MANIFEST_NAME, read_manifest
from batchloom.store.format import split_checksum

RecipeReference = Recipe | str | os.PathLike[str]

_SHORT_FORMS = {
    "ignore": parse_names,
    "clean": parse_clean_steps,
    "fim": parse_fim,
    "media": parse_media,
    "dedup": parse_dedup,
    "tokens_per_shard": coerce_token_count,
}
_COLUMN_SETTINGS = ("text_field", "mapping")
_READING_SETTINGS = tuple(field.name for field in fields(ReadRecipe))
# Documents that are lines or paragraphs repeat without being copies (docs/decisions/0012-dedup.md).
_SPLIT_DEDUP_MODES = {
    "line": "lines",
    "paragraph": "paragraphs",
    "\n": "lines",
    "\n\n": "paragraphs",
}
_CHAT_SETTINGS = tuple(field.name for field in fields(ChatRecipe))


@dataclass(frozen=True, slots=True)
class PrepareRequest:
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
    def initial_notes(self) -> tuple[str, ...]:
        """All that is told before work begins."""
        return (*self.notes, *filter(None, [self.usual]))

    @property
    def tokenizer_note(self) -> str:
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
    return make_request(None, {}, path).recipe


def make_request(
    inputs: InputArgument | Sequence[InputArgument] | None,
    options: Mapping[str, Any],
    recipe: RecipeReference | None,
) -> PrepareRequest:
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
    return _make_request(inputs, options, recipe, by_label=False)


def make_append_request(
    inputs: InputArgument | Sequence[InputArgument] | None,
    options: Mapping[str, Any],
    recipe: RecipeReference | None,
    out: object,
) -> PrepareRequest:
    """The job that appends to a store: by the recipe of its newest generation, where no other is named.

    What that says of each of its inputs is said of those alone that are given again.

    Args:
        inputs: in place of the recipe's; None for those, of which new files are looked for.
        options: as :func:`make_request` takes them.
        recipe: as :func:`make_request` takes it; None for the store's.
        out: where the store may be; without one the job is as any other.

    Raises:
        SettingsError, InputMissingError, InputError, RecordError, StoreError: see :func:`make_request`.
        StoreConflictError: nothing can be appended to this store.
    """
    place = os.fspath(out) if isinstance(out, os.PathLike) else out
    if recipe is not None or not isinstance(place, str) or not is_valid_path(place):
        return _make_request(inputs, options, recipe, by_label=False)
    if not (Path(place) / MANIFEST_NAME).exists():
        return _make_request(inputs, options, recipe, by_label=False)
    check_base_has_recipe(read_manifest(Path(place)), Path(place))
    return _make_request(inputs, options, Path(place), by_label=True)


def _make_request(
    inputs: InputArgument | Sequence[InputArgument] | None,
    options: Mapping[str, Any],
    recipe: RecipeReference | None,
    *,
    by_label: bool,
) -> PrepareRequest:
    given = {name: value for name, value in options.items() if value is not None}
    said = () if inputs is None else as_input_tuple(inputs)
    stated = _load_raw_recipe(recipe, {*given, *(["inputs"] if said else [])})
    values, problems = _expand_short_forms(_override_settings(stated.settings, given))
    reading = ReadRecipe(**{name: values[name] for name in _READING_SETTINGS if name in values})
    found = _choose_inputs(said, stated, reading, values.get("tokenizer"), by_label=by_label)
    if found.follow_links:
        values.setdefault("follow_links", True)
    chat = ChatRecipe()
    try:
        chat = ChatRecipe(**{name: values[name] for name in _CHAT_SETTINGS if name in values})
    except SettingsError as error:
        problems += error.problems
    usual = ""
    if "dedup" not in values and not any("dedup" in problem for problem in problems):
        values["dedup"], usual = default_dedup(reading)
    beside = {"tokenizer", *_READING_SETTINGS, *_CHAT_SETTINGS}
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
    raise_problems([_locate_problem(problem, stated.where, over) for problem in problems])
    again = stated.store if not over else None
    notes = (*stated.notes, *found.notes)
    return PrepareRequest(made, notes, usual, stated.kept, again, "" if said else stated.partial)


def default_dedup(reading: ReadRecipe) -> tuple[DedupRecipe, str]:
    """What becomes of duplicates where nobody says: the mode, and what is told of it."""
    said: object = reading.split_on
    pieces = _SPLIT_DEDUP_MODES.get(said) if isinstance(said, str) else None
    if pieces:
        told = f"Duplicates stay, for {pieces} of verse and tables repeat and mean to (--dedup exact leaves them out)."
        return DedupRecipe(mode="none"), told
    return DedupRecipe(mode="exact"), (
        "Exact duplicates are left out: of documents that are equal to the letter the first stays (--no-dedup keeps "
        "all)."
    )


def describe_remade_store(out: Path, store: Path | None) -> str:
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


def _load_raw_recipe(recipe: RecipeReference | None, given: Collection[str]) -> RawRecipe:
    if recipe is None:
        return RawRecipe({})
    if isinstance(recipe, Recipe):
        return to_raw_recipe(recipe)
    place = os.fspath(recipe) if isinstance(recipe, os.PathLike) else recipe
    if not is_valid_path(place):
        raise SettingsError(
            [
                f"recipe: {quote_value(place)} is no path; name a recipe file or the folder of a store"
            ]
        )
    path = Path(place)
    return read_store_recipe(path, given) if is_store_path(path) else read_recipe_file(path)


def _override_settings(settings: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with others said over them: of the two that name columns one takes the other's place."""
    gone = next(
        (other for one, other in (_COLUMN_SETTINGS, _COLUMN_SETTINGS[::-1]) if one in given), ""
    )
    over = {name: value for name, value in settings.items() if name != gone} | dict(given)
    then, now = settings.get("media"), given.get("media")
    if isinstance(then, MediaRecipe):
        then = media_to_settings(then)
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        # What is not said anew of media stays as it was.
        over["media"] = {**then, **now}
    return over


def _expand_short_forms(settings: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Settings with their short forms spelled out; what is wrong with these is left out of them, and told."""
    values, problems = dict(settings), list[str]()
    for name, full in _SHORT_FORMS.items():
        if name in values:
            try:
                values[name] = full(values[name])
            except SettingsError as error:
                problems += error.problems
                del values[name]
    return values, problems


def _choose_inputs(
    said: tuple[Any, ...],
    stated: RawRecipe,
    reading: ReadRecipe,
    tokenizer: str | None,
    *,
    by_label: bool,
) -> ResolvedInputs:
    """The inputs of a job: those that are said, else the recipe's."""
    if not said:
        sources, reading = hoist_common_settings(stated.sources, reading)
        none = resolve_inputs((), reading, tokenizer)
        return replace(none, inputs=stated.inputs, sources=sources)
    found = resolve_inputs(said, reading, tokenizer)
    if not stated.sources or found.sources:
        return found
    if by_label:
        known, reading = hoist_common_settings(stated.sources, reading)
        of = dict(zip(make_input_labels(stated.inputs), known, strict=True))
        own = tuple(of.get(label, SourceRecipe()) for label in make_input_labels(found.inputs))
        some = any(one != SourceRecipe() for one in own)
        return replace(found, sources=own if some else (), reading=reading)
    if len(found.inputs) != len(stated.sources):
        raise InputError(
            f"{stated.where or 'The recipe'} says something of each of its {len(stated.sources)} inputs, and "
            f"{len(found.inputs)} are given in their place; give as many, in its order."
        )
    sources, reading = hoist_common_settings(stated.sources, reading)
    return replace(found, sources=sources, reading=reading)


def _locate_problem(problem: str, where: str, given: Collection[str]) -> str:
    """A problem of a setting with the file that it stands in, where it stands in one."""
    plain = problem.removeprefix("chat.")
    name = re.split(r"[.:\[]", plain, maxsplit=1)[0]
    if not where or ("mapping" if name == "map" else name) in given:
        return problem
    return f"{where}: {re.sub('^map(?=[.:])', 'mapping', plain)}"
