"""Merge of a recipe file, store or Recipe with overrides into a job."""

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from batchloom.core.addresses import make_input_labels
from batchloom.core.errors import InputError, SettingsError
from batchloom.core.settings import list_setting_names, parse_short_forms, quote_value, raise_problems, to_plain
from batchloom.preparation.append import check_base_has_recipe
from batchloom.preparation.request.inputs import (
    InputArgument,
    ResolvedInputs,
    as_input_tuple,
    hoist_common_settings,
    resolve_inputs,
)
from batchloom.preparation.request.recipe_file import (
    RawRecipe,
    check_formats_are_known,
    is_store_path,
    read_recipe_file,
    read_store_recipe,
    to_raw_recipe,
)
from batchloom.preparation.settings.media_recipe import MediaRecipe
from batchloom.preparation.settings.read_recipe import ReadRecipe, SourceRecipe
from batchloom.preparation.settings.recipe import ChatRecipe, DedupRecipe, Recipe, is_valid_path
from batchloom.sources import SourceListing
from batchloom.sources.files import describe_patterns
from batchloom.store import MANIFEST_NAME, read_manifest

RecipeReference = Recipe | str | os.PathLike[str]

_COLUMN_SETTINGS = ("text_field", "mapping")
# Lines and paragraphs repeat without being copies (docs/explanation/decisions/0012-dedup.md).
_SPLIT_DEDUP_MODES = {"line": "lines", "paragraph": "paragraphs", "\n": "lines", "\n\n": "paragraphs"}


@dataclass(frozen=True, slots=True)
class PrepareRequest:
    """A requested job.

    Attributes:
        recipe: the recipe.
        notes: notes about the recipe.
        dedup_note: note about default deduplication; empty if the user set it.
        tokenizer_state: state of the tokenizer, if a store holds it.
        store: the store to make again, or the manifest of an older generation of it; None if
            its recipe is overridden.
        kept_patterns: options of --include and --exclude that come from the store that is appended to; else empty.
        partial: reason why a store's recipe makes only a part of it, and the remedy; else empty.
    """

    recipe: Recipe
    notes: tuple[str, ...] = ()
    dedup_note: str = ""
    tokenizer_state: Mapping[str, Any] | None = None
    store: Path | None = None
    kept_patterns: str = ""
    partial: str = ""

    def add_notes(self, listing: SourceListing) -> SourceListing:
        """Return a listing with the notes of the request before its own."""
        warnings = tuple(filter(None, [self.dedup_note]))
        return replace(
            listing,
            notes=(*self.notes, *warnings, *listing.notes),
            warnings=(*warnings, *listing.warnings),
        )

    @property
    def tokenizer_note(self) -> str:
        """Note about the tokenizer that a recipe file cannot hold; empty if none."""
        if self.tokenizer_state is None:
            return ""
        return "The store contains the tokenizer. If its original is missing, set tokenizer to the path of the store."


def read_recipe(path: str | os.PathLike[str]) -> Recipe:
    """Read the recipe in a file (YAML or JSON) or in the manifest of a store.

    ``prepare(recipe=path)`` runs it; ``dataclasses.replace`` changes a copy. A tokenizer that
    a store holds is not part of the value: ``prepare(recipe=store)`` uses it.

    Args:
        path: the file, the store's folder or its ``dataset_metadata.json``.

    Raises:
        SettingsError: all invalid settings, each with its path.
        InputMissingError: the file or an input is missing.
        RecordError: it is not valid YAML; with line and column.
        InputError: it is no recipe, or cannot be read.
        StoreError: the store is missing or damaged.
    """
    return make_request(None, {}, path).recipe


def make_request(
    inputs: InputArgument | Sequence[InputArgument] | None,
    options: Mapping[str, Any],
    recipe: RecipeReference | None,
    *,
    by_label: bool = False,
) -> PrepareRequest:
    """Return the job of a recipe, with inputs and options that override it.

    Args:
        inputs: replacement of the recipe's inputs; None uses those. If the recipe has settings of each
            input, the number must be equal.
        options: settings by their names in ``prepare``; None values are ignored.
        recipe: a Recipe, a recipe file or a store; None for the defaults.
        by_label: apply the recipe's settings of single inputs only to inputs that are given again.

    Raises:
        SettingsError: all invalid settings; those of a file with its name.
        InputMissingError, InputError, RecordError, StoreError: see :func:`read_recipe`.
    """
    overrides = {name: value for name, value in options.items() if value is not None}
    input_arguments = () if inputs is None else as_input_tuple(inputs)
    overridden_names = {*overrides, *(["inputs"] if input_arguments else [])}
    raw_recipe = _load_raw_recipe(recipe, overridden_names)
    merged = _override_settings(raw_recipe.settings, overrides)
    values, problems = parse_short_forms((Recipe, ReadRecipe, ChatRecipe), merged)
    reading = ReadRecipe(**_take_settings(values, ReadRecipe))
    tokenizer = values.pop("tokenizer", None)
    resolved = _choose_inputs(input_arguments, raw_recipe, reading, tokenizer, by_label=by_label)
    if resolved.follow_links:
        values.setdefault("follow_links", True)
    if reading.val_from is not None or any(source.subset == "val" for source in resolved.sources):
        # A split that is named now replaces the share of the recipe. Other documents of a store that grows keep its.
        is_replaced = "val_from" in overrides and "val_fraction" not in overrides
        if values.get("val_fraction") and not is_replaced and not by_label:
            problems.append(
                "val_fraction: val comes from a split (val_from) or from inputs (subset: val); leave val_fraction out"
            )
        if not by_label:
            values["val_fraction"] = 0.0
    chat = ChatRecipe()
    chat_values = _take_settings(values, ChatRecipe)
    try:
        chat = ChatRecipe(**chat_values)
    except SettingsError as error:
        problems += error.problems
    dedup_note = ""
    if "dedup" not in values and not any("dedup" in problem for problem in problems):
        values["dedup"], dedup_note = default_dedup(reading)
    try:
        new_recipe = Recipe(
            inputs=resolved.inputs,
            sources=resolved.sources,
            tokenizer=resolved.tokenizer,
            reading=resolved.reading,
            chat=chat,
            **values,
        )
    except SettingsError as error:
        problems += error.problems
    raise_problems([_locate_problem(problem, raw_recipe.location, overridden_names) for problem in problems])
    return PrepareRequest(
        new_recipe,
        notes=(*raw_recipe.notes, *resolved.notes),
        dedup_note=dedup_note,
        tokenizer_state=raw_recipe.tokenizer_state,
        store=None if overridden_names else raw_recipe.store,
        partial="" if input_arguments else raw_recipe.partial,
    )


def make_append_request(
    inputs: InputArgument | Sequence[InputArgument] | None,
    options: Mapping[str, Any],
    recipe: RecipeReference | None,
    out: object,
) -> PrepareRequest:
    """Return the job that appends to a store, by default with its newest recipe.

    The settings that this recipe has for single inputs apply only to inputs that are given again.

    Args:
        inputs: replacement of the recipe's inputs; None searches those for new files.
        options: as in :func:`make_request`.
        recipe: as in :func:`make_request`; None for the store's.
        out: folder of the store; if there is no store, the job is an ordinary one.

    Raises:
        SettingsError, InputMissingError, InputError, RecordError, StoreError: see :func:`make_request`.
        StoreConflictError: nothing can be appended to this store.
    """
    out_path = os.fspath(out) if isinstance(out, os.PathLike) else out
    # An invalid path is reported with the other problems.
    store = Path(out_path) if isinstance(out_path, str) and is_valid_path(out_path) else None
    if recipe is not None or store is None or not (store / MANIFEST_NAME).exists():
        return make_request(inputs, options, recipe)
    check_base_has_recipe(read_manifest(store), store)
    request = make_request(inputs, options, store, by_label=True)
    raise_problems(
        [
            f"inputs: {input_path!r} is read in part (max_samples or num_samples), and a sample of other files would "
            "not extend the one in the store; prepare a new store, or append inputs that are read completely"
            for input_path, source in zip(request.recipe.inputs, request.recipe.sources, strict=False)
            if source.max_samples or source.num_samples
        ]
    )
    kept = {name: () if options.get(name) else getattr(request.recipe.reading, name) for name in ("include", "exclude")}
    return replace(request, kept_patterns=describe_patterns(**kept))


def default_dedup(reading: ReadRecipe) -> tuple[DedupRecipe, str]:
    """Return the default deduplication, and the note about it."""
    split_on: object = reading.split_on
    repeat_unit = _SPLIT_DEDUP_MODES.get(split_on) if isinstance(split_on, str) else None
    if repeat_unit:
        note = (
            f"Keeping duplicates, because {repeat_unit} of verse and tables repeat on purpose (--dedup exact removes "
            "them)."
        )
        return DedupRecipe(mode="none"), note
    return DedupRecipe(mode="exact"), ("Removing exact duplicates, keeping the first copy (--no-dedup keeps all).")


def describe_remade_store(out: Path, store: Path | None) -> str:
    """Return the note about a store made with another's recipe; empty if none."""
    if store is None or out.resolve() == store.resolve():
        return ""
    manifest_path = store if store.is_file() else store / MANIFEST_NAME
    if manifest_path.read_bytes() == (out / MANIFEST_NAME).read_bytes():
        return f"{out} is identical to {store}, byte for byte."
    return (
        f"{out} differs from {store}: the inputs, the tokenizer or batchloom itself changed; compare {MANIFEST_NAME} "
        "of both."
    )


def _load_raw_recipe(recipe: RecipeReference | None, overridden_names: Collection[str]) -> RawRecipe:
    if recipe is None:
        return RawRecipe({})
    if isinstance(recipe, Recipe):
        return to_raw_recipe(recipe)
    recipe_path = os.fspath(recipe) if isinstance(recipe, os.PathLike) else recipe
    if not is_valid_path(recipe_path):
        raise SettingsError(
            [f"recipe: {quote_value(recipe_path)} is not a path; name a recipe file or the folder of a store"]
        )
    path = Path(recipe_path)
    return read_store_recipe(path, overridden_names) if is_store_path(path) else read_recipe_file(path)


def _override_settings(settings: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Merge settings with overrides; ``text_field`` and ``mapping`` are exclusive."""
    replaced_names = _COLUMN_SETTINGS if any(name in overrides for name in _COLUMN_SETTINGS) else ()
    merged = {name: value for name, value in settings.items() if name not in replaced_names} | dict(overrides)
    base_media = settings.get("media")
    new_media = overrides.get("media")
    if isinstance(base_media, MediaRecipe):
        base_media = to_plain(base_media)
    if isinstance(base_media, Mapping) and isinstance(new_media, Mapping):
        # Media settings that are not overridden stay.
        merged["media"] = {**base_media, **new_media}
    return merged


def _take_settings(values: dict[str, Any], cls: type) -> dict[str, Any]:
    """Remove the settings of a class from values; return them."""
    return {name: values.pop(name) for name in list_setting_names(cls) if name in values}


def _choose_inputs(
    input_arguments: tuple[Any, ...],
    raw_recipe: RawRecipe,
    reading: ReadRecipe,
    tokenizer: str | None,
    *,
    by_label: bool,
) -> ResolvedInputs:
    """Resolve the inputs of a job: the given ones, else the recipe's."""
    resolved = resolve_inputs(input_arguments, reading, tokenizer)
    if not input_arguments:
        resolved = replace(resolved, inputs=raw_recipe.inputs)
    if not resolved.sources:
        check_formats_are_known(raw_recipe, resolved.inputs)
    if resolved.sources or not raw_recipe.sources:
        return resolved
    sources, reading = hoist_common_settings(raw_recipe.sources, reading)
    if by_label and input_arguments:
        source_by_label = dict(zip(make_input_labels(raw_recipe.inputs), sources, strict=True))
        sources = tuple(source_by_label.get(label, SourceRecipe()) for label in make_input_labels(resolved.inputs))
    if len(resolved.inputs) != len(sources):
        raise InputError(
            f"{raw_recipe.location or 'The recipe'} has settings for each of its {len(sources)} inputs, but the number "
            f"of given inputs is {len(resolved.inputs)}; give {len(sources)}, in its order."
        )
    has_settings = any(source != SourceRecipe() for source in sources)
    return replace(resolved, sources=sources if has_settings else (), reading=reading)


def _locate_problem(problem: str, location: str, overridden_names: Collection[str]) -> str:
    """Prefix the problem of a setting with the file that contains it, if any."""
    name = re.split(r"[.:\[]", problem, maxsplit=1)[0]
    if not location or ("mapping" if name == "map" else name) in overridden_names:
        return problem
    return f"{location}: {re.sub('^map(?=[.:])', 'mapping', problem)}"
