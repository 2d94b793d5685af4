"""Recipes in files: YAML, read and written, and the manifest of a store."""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import msgspec
import xxhash
import yaml

from batchloom.chat import TEMPLATE_NAMES
from batchloom.core.addresses import STANDARD_INPUT, is_url, is_url_or_stdin, redact_url, strip_file_scheme
from batchloom.core.errors import InputError, InputMissingError, SettingsError, StoreError
from batchloom.core.files import JSON_DECODE_ERRORS, decode_file_name, describe_os_error, read_regular_file, refuse_url
from batchloom.core.settings import (
    build_settings,
    find_unknown_settings,
    from_plain,
    list_setting_names,
    quote_value,
    raise_problems,
    to_plain,
)
from batchloom.core.synthetic_data import SYNTHETIC, SyntheticSpec
from batchloom.core.wording import format_list
from batchloom.core.yaml_reader import EXPONENT_PATTERN, FLOAT_TAG, read_yaml
from batchloom.preparation.identity.processors import compute_processor_fingerprint
from batchloom.preparation.request.inputs import locate_inputs
from batchloom.preparation.settings.dataset_config import parse_entries
from batchloom.preparation.settings.dataset_file import MANIFEST_KEYS, ConfigLocation
from batchloom.preparation.settings.read_recipe import ReadRecipe, SourceRecipe
from batchloom.preparation.settings.recipe import ChatRecipe, Recipe, flatten_settings, format_token_count
from batchloom.sources import detect_kind_by_name, parse_hub_name, strip_wildcard_part
from batchloom.store import MANIFEST_NAME, REPORT_NAME, Manifest, read_manifest
from batchloom.store.format import (
    GENERATIONS_NAME,
    TOKENIZER_NAME,
    SourceEntry,
    format_generation_file_name,
    format_generation_name,
)
from batchloom.tokens import parse_train_spec

_READING_SETTINGS = list_setting_names(ReadRecipe)
_CHAT_SETTINGS = list_setting_names(ChatRecipe)
# Names of settings in prepare and in recipe files, in the order of a printed recipe.
SETTINGS = tuple(
    dict.fromkeys(
        [
            *("tokenizer", "end_token", *_READING_SETTINGS, "dedup"),
            *(name for name in list_setting_names(Recipe) if name != "follow_links"),
            *(*_CHAT_SETTINGS, "follow_links"),
        ]
    )
)
RECIPE_KEYS = ("inputs", *SETTINGS)
_TIKTOKEN = "tiktoken:"
_TOKENIZER_WORDS = ("bytes", "gpt2")
_REMEDY = "write settings such as inputs: and a list into it (batchloom prepare INPUT --print-recipe prints them all)"
_HEADER = "# batchloom prepare --recipe FILE --out STORE; relative paths begin at the folder of this file.\n"


@dataclass(frozen=True, slots=True)
class RawRecipe:
    """Unchecked settings of a recipe file, a store or a Recipe."""

    settings: Mapping[str, Any]  # by their names in ``prepare``; unset ones are absent
    inputs: tuple[str, ...] = ()  # locations
    sources: tuple[SourceRecipe, ...] = ()  # settings of each input; empty if no input has any
    location: str = ""  # name in messages; empty for a Recipe made in Python
    notes: tuple[str, ...] = ()  # for the user before work begins
    tokenizer_state: Mapping[str, Any] | None = None  # state of the tokenizer, if a store holds it
    store: Path | None = None  # the store that it made
    partial: str = ""  # reason why it made only a part of that store; empty if it made all
    declared_file: SourceEntry | None = None  # first file of the store read as records in spite of a text's name


def to_raw_recipe(recipe: Recipe) -> RawRecipe:
    """Convert a Recipe to a RawRecipe."""
    parts = (recipe, recipe.reading, recipe.chat)
    values = {name: getattr(part, name) for part in parts for name in list_setting_names(type(part))}
    return RawRecipe(values, recipe.inputs, recipe.sources)


def read_recipe_file(path: Path) -> RawRecipe:
    """Read a recipe file; its values are checked when a Recipe is made."""
    refuse_url(path, "The recipe")
    content = read_yaml(path, _REMEDY)
    _check_is_recipe(path, content)
    problems = find_unknown_settings(content, RECIPE_KEYS, f"{path}: ")
    # A null setting counts as absent.
    values = {name: content[name] for name in RECIPE_KEYS if content.get(name) is not None}
    config_location = ConfigLocation(path, recipe=True)
    inputs: list[tuple[str, SourceRecipe]] = []
    try:
        inputs = _read_recipe_inputs(values.pop("inputs", []), config_location)
    except SettingsError as error:
        problems += error.problems
    raise_problems(problems)
    for name in ("tokenizer", "template"):
        if isinstance(values.get(name), str):
            values[name] = _resolve_relative(name, values[name], config_location)
    sources = tuple(source for _, source in inputs)
    return RawRecipe(
        values,
        tuple(input_path for input_path, _ in inputs),
        sources if any(source_recipe != SourceRecipe() for source_recipe in sources) else (),
        str(path),
    )


def _check_is_recipe(path: Path, content: object) -> None:
    """Refuse a file that is no recipe, with what it is if that is known."""
    is_manifest = (
        isinstance(content, dict) and "inputs" not in content and any(name in content for name in MANIFEST_KEYS)
    )
    if isinstance(content, list) or is_manifest:
        raise InputError(
            f"{path} is a manifest of data sets, not a recipe; give it as an input: batchloom prepare {path}."
        )
    if isinstance(content, dict) and {"format_version", "recipe"} <= set(content):
        raise InputError(
            f"{path} is the manifest of a store under another name; call it {MANIFEST_NAME}, and give it or its folder."
        )
    if not isinstance(content, dict):
        raise InputError(f"{path} holds {quote_value(content)}, which is no recipe; {_REMEDY}.")


def _read_recipe_inputs(value: object, config_location: ConfigLocation) -> list[tuple[str, SourceRecipe]]:
    """Return the location and the settings of each input."""
    if not isinstance(value, list):
        raise SettingsError(
            [f"{config_location.file}: inputs: {quote_value(value)} is no list; write - and each path on its own line"]
        )
    raise_problems(
        [
            f"{config_location.file}: inputs[{number}]: {quote_value(entry)} is neither a path nor a data set; "
            "write a path, or {path: ..., data_type: ..., mapping: ...}"
            for number, entry in enumerate(value)
            if not isinstance(entry, (str, dict))
        ]
    )
    listed = [entry if isinstance(entry, dict) else {"path": entry} for entry in value]
    return locate_inputs(parse_entries(listed, f"{config_location.file}: inputs"), config_location)


def _resolve_relative(name: str, value: str, config_location: ConfigLocation) -> str:
    """Resolve a tokenizer or template relative to the file's folder."""
    if name == "template":
        return value if value in TEMPLATE_NAMES else config_location.resolve_path(value)
    if value in _TOKENIZER_WORDS or value.startswith("train:") or is_url_or_stdin(value):
        return value
    if value.startswith(_TIKTOKEN):
        return _TIKTOKEN + config_location.resolve_path(value.removeprefix(_TIKTOKEN))
    return config_location.resolve_path(value)


def recipe_settings(recipe: Recipe) -> dict[str, Any]:
    """Return the settings of a recipe as a file has them, with defaults."""
    plain = flatten_settings({"fim": None, "media": None} | to_plain(recipe))
    plain["tokens_per_shard"] = format_token_count(recipe.tokens_per_shard)
    if recipe.balance_subsets:
        del plain["balance_subsets"]
    return {name: plain[name] for name in SETTINGS if name in plain}


def recipe_settings_for_report(recipe: Recipe) -> dict[str, Any]:
    """Return the settings for a report, with invalid Unicode in names replaced."""
    plain = recipe_settings(recipe)
    return {name: _make_printable(value) for name, value in plain.items() if value not in (None, {}, [])}


def _make_printable(value: Any) -> Any:
    if isinstance(value, str):
        return decode_file_name(redact_url(value) if is_url(value) else value)
    if isinstance(value, dict):
        return {decode_file_name(str(name)): _make_printable(item) for name, item in value.items()}
    return [_make_printable(item) for item in value] if isinstance(value, (list, tuple)) else value


def format_recipe(recipe: Recipe, note: str = "") -> str:
    """Format the complete recipe as YAML that :func:`read_recipe_file` reads back.

    Args:
        recipe: the recipe.
        note: a sentence to add as a comment.

    Raises:
        InputError: a path is not valid Unicode, which YAML cannot hold.
    """
    if undecodable_paths := [path for path in recipe.inputs if decode_file_name(path) != path]:
        raise InputError(
            f"{quote_value(undecodable_paths[0])} holds bytes that are no UTF-8, which no recipe file can; rename "
            "it, or name its folder."
        )
    sources = recipe.sources or (SourceRecipe(),) * len(recipe.inputs)
    inputs = [_input_to_plain(input_path, source) for input_path, source in zip(recipe.inputs, sources, strict=True)]
    content = {"inputs": inputs, **recipe_settings(recipe)}
    text = yaml.dump(content, Dumper=_RecipeDumper, sort_keys=False, allow_unicode=True, width=1 << 20)
    return f"{_HEADER}{f'# {note}' + chr(10) if note else ''}{text}"


def _input_to_plain(input_path: str, source: SourceRecipe) -> Any:
    """Return an input as in a manifest of data sets; only the path without settings."""
    settings = to_plain(source)
    return {"path": input_path, **settings} if settings else input_path


@final
class _RecipeDumper(yaml.SafeDumper):  # type: ignore[misc]  # it has no types
    """YAML dumper that quotes texts so that ``read_yaml`` reads them as texts."""

    def ignore_aliases(self, data: Any) -> bool:
        """Return True: write equal values in full each time."""
        return True


def _represent_text(writer: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # A plain scalar would fold newlines over several lines.
    return writer.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


_RecipeDumper.add_representer(str, _represent_text)
_RecipeDumper.add_implicit_resolver(FLOAT_TAG, EXPONENT_PATTERN, list("-+0123456789"))


_TEXT_KINDS = ("text", "code")
_MAX_LISTED = 5


class _ReportedLocations(msgspec.Struct, frozen=True):
    """Original input locations in ``report.json``."""

    inputs: list[str]
    folder: str


def describe_input_locations(inputs: Sequence[str]) -> dict[str, Any]:
    """Return the inputs as given and the current folder, for ``report.json``."""
    try:
        folder = os.getcwd()
    except FileNotFoundError:
        folder = ""  # the folder was deleted, so relative inputs cannot be resolved
    locations = [
        redact_url(input_path) if is_url_or_stdin(input_path) else os.path.expanduser(strip_file_scheme(input_path))
        for input_path in inputs
    ]
    return {"inputs": [decode_file_name(location) for location in locations], "folder": decode_file_name(folder)}


def is_store_path(path: Path) -> bool:
    """Return whether a path is a store: its folder, or a generation's manifest."""
    return path.is_dir() or path.name == MANIFEST_NAME or _parse_generation(path) is not None


def _parse_generation(path: Path) -> int | None:
    """Return the number of an older generation from its manifest path, or None."""
    above = path.parent
    older = above.name == GENERATIONS_NAME and path.suffix == ".json" and path.stem.isdecimal()
    return int(path.stem) if older and (above.parent / MANIFEST_NAME).exists() else None


def read_store_recipe(path: Path, overridden_names: Collection[str]) -> RawRecipe:
    """Read the recipe of the job that made a store from its manifest.

    Relative inputs are resolved in the working folder. The manifest has only the last names of
    absolute inputs; the report next to it has their locations.
    """
    generation = _parse_generation(path)
    folder = path if path.is_dir() else path.parent if generation is None else path.parent.parent
    manifest = read_manifest(folder, generation)
    plain = manifest.recipe
    location = str(folder / MANIFEST_NAME) if generation is None else str(path)
    if plain.get("source") == SYNTHETIC:
        return _read_synthetic_recipe(plain, folder)
    _check_prepared(plain, folder, location)
    settings = _extract_settings(plain, location)
    expected = settings.pop("template_hash", None)
    # Comparing the stores shows whether the files of cleaning steps are unchanged.
    settings.pop("clean_files", None)
    # It is left out if nothing may move: documents stay where they are, or there are no subsets.
    settings.setdefault("balance_subsets", not (settings["val_fraction"] or settings["test_fraction"]))
    if expected is not None and "template" not in overridden_names:
        _check_template(str(settings.get("template")), expected, folder)
    if isinstance(media := settings.get("media"), dict):
        settings["media"] = _extract_media_settings(media, folder, verify="media" not in overridden_names)
    step = [entry for entry in manifest.all_history if entry.has_inputs][-1]
    sources = manifest.list_sources_of(step)
    source_recipes = _make_source_recipes(plain, location, has_inputs="inputs" in overridden_names)
    inputs = [str(label) for label in plain.get("inputs", ())]
    notes: tuple[str, ...] = ()
    if "inputs" not in overridden_names:
        report = folder / format_generation_file_name(REPORT_NAME, step.number)
        inputs, notes = _locate_recorded_inputs(inputs, report, of_hub=any(source.revision for source in sources))
    overridden_tokenizer = {"tokenizer", "end_token"} & set(overridden_names)
    return RawRecipe(
        {name: value for name, value in settings.items() if value is not None},
        tuple(inputs),
        source_recipes,
        location,
        notes,
        None if overridden_tokenizer else _read_stored_tokenizer(manifest, folder),
        folder if generation is None else path,
        "" if generation is not None else _describe_partial(manifest, folder),
        next((source for source in sources if _has_text_name(source.name) and source.kind not in _TEXT_KINDS), None),
    )


def _check_prepared(plain: Mapping[str, Any], folder: Path, location: str) -> None:
    """Check that a store was prepared, and that its manifest has the recipe."""
    if "reading" not in plain:
        raise InputError(
            f"{folder} was imported, so its manifest has no recipe; to make it again, run batchloom import on the same "
            "files."
        )
    if not all(isinstance(plain.get(group) or {}, dict) for group in ("reading", "chat")):
        raise StoreError(f"{location} is damaged: its recipe is invalid; restore it from a copy.")


def _describe_partial(manifest: Manifest, folder: Path) -> str:
    """Return why a recipe makes only a part of its store, and the remedy, or ""."""
    steps = [entry.number for entry in manifest.all_history if entry.has_inputs]
    if len(steps) == 1:
        return ""
    summary = f"{folder} was made by {len(steps)} jobs, and its recipe is only that of the last one: "
    if not set(steps) <= set(manifest.readable):
        return f"{summary}compaction removed the others. Give the inputs of all jobs as arguments."
    first, *later_paths = (folder / format_generation_name(number) for number in steps[:-1])
    appended = " and ".join(f"--append --recipe {path}" for path in [*later_paths, folder])
    return f"{summary}run all jobs again in order into one --out, with --recipe {first}, then {appended}."


def _extract_settings(plain: Mapping[str, Any], location: str) -> dict[str, Any]:
    """Return the settings by their names in ``prepare``, with a template's hash."""
    settings = {name: value for name, value in flatten_settings(plain).items() if name not in ("inputs", "sources")}
    known_names = (*SETTINGS, "template_hash", "clean_files")
    raise_problems(find_unknown_settings(sorted(settings), known_names, f"{location}: recipe."))
    return settings


def _read_synthetic_recipe(plain: Mapping[str, Any], folder: Path) -> RawRecipe:
    """Return the recipe of a store of synthetic data."""
    names = ("name", "documents", "vocab", "lengths", "seed", "kind")
    try:
        spec = from_plain(SyntheticSpec, {name: plain[name] for name in names if name in plain})
    except SettingsError as error:
        raise StoreError(f"{folder / MANIFEST_NAME} is damaged: {error}.") from error
    settings = {name: plain[name] for name in SETTINGS if name in plain}
    return RawRecipe(settings, (spec.spec_string,), location=str(folder / MANIFEST_NAME), store=folder)


def _check_template(template: str, expected: object, folder: Path) -> None:
    """Check that a template file exists and is unchanged."""
    needed = f"{folder} was made with the chat template file {template}"
    remedy = "give the path of the original with --template"
    try:
        digest = xxhash.xxh3_128_hexdigest(read_regular_file(template))
    except FileNotFoundError:
        raise InputMissingError(f"{needed}, which is missing (its XXH3-128 is {expected}); {remedy}.") from None
    except OSError as error:
        raise InputError(f"{needed}, which cannot be read: {describe_os_error(error)}.") from error
    if digest != expected:
        raise InputError(f"{needed}, which has changed (its XXH3-128 is {digest}, not {expected}); {remedy}.")


def _extract_media_settings(plain: dict[str, Any], folder: Path, *, verify: bool) -> dict[str, Any]:
    """Return the media settings of a manifest; check that the processor is unchanged."""
    expected = plain.get("processor_fingerprint")
    media = {name: value for name, value in plain.items() if name != "processor_fingerprint"}
    if not verify:
        return media
    needed = f"{folder} was made with the processor in {media.get('processor')}"
    remedy = "give the path of the original with --processor"
    try:
        fingerprint = compute_processor_fingerprint(str(media.get("processor")), media.get("image_settings", {}))
    except InputMissingError:
        raise InputMissingError(f"{needed}, which is missing; {remedy}.") from None
    if fingerprint != expected:
        raise InputError(f"{needed}, which has changed (its fingerprint is {fingerprint}, not {expected}); {remedy}.")
    return media


def _read_stored_tokenizer(manifest: Manifest, folder: Path) -> Mapping[str, Any] | None:
    """Return the tokenizer that a store holds, unless it was learned."""
    if parse_train_spec(str(manifest.recipe.get("tokenizer"))) is not None:
        return None
    path = folder / TOKENIZER_NAME
    try:
        state = msgspec.json.decode(read_regular_file(path))
    except FileNotFoundError:
        # The manifest has no tokenizer file next to it.
        return None
    except (OSError, *JSON_DECODE_ERRORS) as error:
        raise StoreError(f"{path} cannot be read: {error}; restore it from a copy, or give --tokenizer.") from error
    fingerprint = state.get("fingerprint") if isinstance(state, dict) else None
    if fingerprint != manifest.tokenizer.fingerprint:
        raise StoreError(
            f"{path} is not the tokenizer of the manifest next to it; restore it from a copy, or give --tokenizer."
        )
    return state  # type: ignore[no-any-return]  # it has a fingerprint


def _locate_recorded_inputs(labels: list[str], report: Path, *, of_hub: bool) -> tuple[list[str], tuple[str, ...]]:
    """Return the current locations of a manifest's inputs, from the report, and notes."""
    reported = _read_reported_locations(report)
    folder = report.parent
    locations = list(labels)
    relocated = []
    missing = []
    recorded_paths = reported.inputs if reported is not None and len(reported.inputs) == len(labels) else labels
    for number, (label, recorded_path) in enumerate(zip(labels, recorded_paths, strict=True)):
        if os.path.isabs(recorded_path):
            locations[number] = recorded_path
        if recorded_path == STANDARD_INPUT or not _location_exists(locations[number], of_hub=of_hub):
            missing.append(label)
        elif locations[number] != label:
            relocated.append(recorded_path)
    if missing:
        folder_hint = f", or run this command in {reported.folder}, where it was made" if reported is not None else ""
        raise InputMissingError(
            f"{folder} was made from {format_list(missing, _MAX_LISTED)}, which cannot be found; give the "
            f"inputs as arguments, in the order of its manifest ({', '.join(labels[:_MAX_LISTED])}"
            f"{', ...' if len(labels) > _MAX_LISTED else ''}){folder_hint}."
        )
    if not relocated:
        return locations, ()
    return locations, (f"Using input paths from {report.name} in {folder}: {format_list(relocated, 1)}.",)


def _location_exists(location: str, *, of_hub: bool) -> bool:
    """Return whether a location can be looked up; Hub names only for Hub stores."""
    if is_url_or_stdin(location) or os.path.lexists(strip_wildcard_part(location)):
        return True
    return of_hub and parse_hub_name(location) is not None


def _read_reported_locations(report: Path) -> _ReportedLocations | None:
    try:
        return msgspec.json.decode(read_regular_file(report), type=_ReportedLocations)
    except (OSError, *JSON_DECODE_ERRORS):
        return None


def _make_source_recipes(recipe: Mapping[str, Any], location: str, *, has_inputs: bool) -> tuple[SourceRecipe, ...]:
    """Return the settings of each input; empty if no input has any.

    With ``has_inputs`` the inputs are given anew.
    """
    labels = [str(label) for label in recipe.get("inputs", ())]
    plain = recipe.get("sources") or [{}] * len(labels)
    if has_inputs:
        # The store has only the last name of an absolute folder; the new inputs say where theirs is.
        plain = [{k: value for k, value in settings.items() if k != "media_folder_name"} for settings in plain]
    raise_problems(
        [
            f"{location}: recipe.sources[{number}].media_folder: the store was made of media below a folder "
            f"{quote_value(settings['media_folder_name'])}, whose location it does not hold; give the manifest again, "
            "which says where that is (media_folder)"
            for number, settings in enumerate(plain)
            if "media_folder_name" in settings
        ]
    )
    if len(plain) != len(labels):
        raise StoreError(f"{location} is damaged: {len(plain)} sources for {len(labels)} inputs.")
    source_recipes = tuple(
        replace(
            build_settings(SourceRecipe, settings, f"{location}: recipe.sources[{number}]."),
            location=f"{location}, recipe.inputs[{number}]",
        )
        for number, settings in enumerate(plain)
    )
    return source_recipes if any(source_recipe != SourceRecipe() for source_recipe in source_recipes) else ()


def _has_text_name(name: str) -> bool:
    verdict = detect_kind_by_name(name)
    return verdict is not None and verdict.kind in _TEXT_KINDS


def check_formats_are_known(raw_recipe: RawRecipe, inputs: Sequence[str]) -> None:
    """Refuse a store of text-named files that were read as records.

    That was because of a data_type, which the store does not record. Without it, such files would be read as texts.
    Inputs whose own names are those of records need none.
    """
    declared_file = raw_recipe.declared_file
    if declared_file is None:
        return
    verdicts = map(detect_kind_by_name, inputs)
    if all(verdict is not None and verdict.kind not in (None, *_TEXT_KINDS) for verdict in verdicts):
        return
    raise InputError(
        f"{raw_recipe.location}: {declared_file.name} was read as {declared_file.kind} because of a data_type, which "
        "the store does not record. Give the manifest or recipe file the store was made with."
    )
