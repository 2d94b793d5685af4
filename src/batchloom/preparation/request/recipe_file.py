"""Recipe files: the settings of a ``prepare`` job as YAML, read and written."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, final

import yaml

from batchloom.chat import BUILT_IN_TEMPLATES
from batchloom.core.addresses import is_url, is_url_or_stdin, redact_url as shown_address
from batchloom.core.errors import InputError, SettingsError
from batchloom.core.files import decode_file_name, refuse_url
from batchloom.core.settings import quote_value, raise_problems, suggest
from batchloom.core.yaml_reader import EXPONENT_PATTERN, FLOAT_TAG, read_yaml
from batchloom.preparation.settings.dataset_file import MANIFEST_KEYS, ConfigLocation
from batchloom.preparation.settings.media_recipe import media_to_settings
from batchloom.preparation.settings.read_recipe import ReadRecipe, SourceRecipe, fim_to_plain
from batchloom.preparation.settings.recipe import (
    ChatRecipe,
    Recipe,
    clean_steps_to_settings,
    dedup_to_plain,
    format_token_count,
)
from batchloom.store import MANIFEST_NAME

# Order of a printed recipe; settings that are not listed come before those of conversations.
_FIRST_SETTINGS = ("tokenizer", "end_token", *(field.name for field in fields(ReadRecipe)), "dedup")
_LAST_SETTINGS = (*(field.name for field in fields(ChatRecipe)), "follow_links")
# Names of settings in prepare and in recipe files.
SETTINGS = (
    *_FIRST_SETTINGS,
    *(
        field.name
        for field in fields(Recipe)
        if field.name not in (*_FIRST_SETTINGS, *_LAST_SETTINGS, "inputs", "sources", "reading", "chat")
    ),
    *_LAST_SETTINGS,
)
# Settings written only if they are not the default, as older files lack them.
_LATER_DEFAULTS: dict[str, Any] = {"ignore": [], "balance_subsets": True, "follow_links": False}
RECIPE_KEYS = ("inputs", *SETTINGS)
_TIKTOKEN = "tiktoken:"
_TOKENIZER_WORDS = ("bytes", "gpt2")
_REMEDY = "write settings such as inputs: and a list into it (batchloom prepare INPUT --print-recipe prints them all)"
_HEADER = "# batchloom prepare --recipe FILE --out STORE; relative paths begin at the folder of this file.\n"


@dataclass(frozen=True, slots=True)
class RawRecipe:
    """Unchecked settings of a recipe file, a store or a Recipe.

    Attributes:
        settings: settings by their names in ``prepare``; unset ones are absent.
        inputs: locations of the inputs.
        sources: settings of each input; empty if no input has any.
        location: name in messages; empty for a Recipe made in Python.
        notes: notes for the user before work begins.
        tokenizer_state: state of the tokenizer, if a store holds it.
        store: the store that it made.
        partial: reason why it made only a part of that store; empty if it made all.
    """

    settings: Mapping[str, Any]
    inputs: tuple[str, ...] = ()
    sources: tuple[SourceRecipe, ...] = ()
    location: str = ""
    notes: tuple[str, ...] = ()
    tokenizer_state: Mapping[str, Any] | None = None
    store: Path | None = None
    partial: str = ""


def to_raw_recipe(recipe: Recipe) -> RawRecipe:
    """Convert a Recipe to a RawRecipe."""
    parts = (recipe, recipe.reading, recipe.chat)
    values = {field.name: getattr(part, field.name) for part in parts for field in fields(part)}
    return RawRecipe({name: values[name] for name in SETTINGS}, recipe.inputs, recipe.sources)


def read_recipe_file(path: Path) -> RawRecipe:
    """Read a recipe file; its values are checked when a Recipe is made."""
    refuse_url(path, "The recipe")
    content = read_yaml(path, _REMEDY)
    _check_is_recipe(path, content)
    problems = [
        f"{path}: {name}: unknown setting{suggest(name, RECIPE_KEYS)}" for name in content if name not in RECIPE_KEYS
    ]
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
    if isinstance(content, list) or (isinstance(content, dict) and _is_dataset_manifest(content)):
        raise InputError(
            f"{path} is a manifest of data sets, not a recipe; give it as an input: batchloom prepare {path}."
        )
    if isinstance(content, dict) and {"format_version", "recipe"} <= set(content):
        raise InputError(
            f"{path} is the manifest of a store under another name; call it {MANIFEST_NAME}, and give it or its folder."
        )
    if not isinstance(content, dict):
        raise InputError(f"{path} holds {quote_value(content)}, which is no recipe; {_REMEDY}.")


def _is_dataset_manifest(content: Mapping[str, Any]) -> bool:
    return "inputs" not in content and any(name in content for name in MANIFEST_KEYS)


def _read_recipe_inputs(value: object, config_location: ConfigLocation) -> list[tuple[str, SourceRecipe]]:
    """Return the location and the settings of each input."""
    if not isinstance(value, list):
        raise SettingsError(
            [f"{config_location.file}: inputs: {quote_value(value)} is no list; write - and each path on its own line"]
        )
    raise_problems(
        [
            f"{config_location.file}: inputs[{number}]: {quote_value(entry)} is neither a path nor a data set; "
            "write a path, or "
            "{path: ..., data_type: ..., mapping: ...}"
            for number, entry in enumerate(value)
            if not isinstance(entry, (str, dict))
        ]
    )
    if not value:
        return []
    # pydantic takes its time to import.
    from batchloom.preparation.request.dataset_inputs import locate_inputs  # noqa: PLC0415
    from batchloom.preparation.settings.dataset_config import DatasetConfig  # noqa: PLC0415

    listed = [entry if isinstance(entry, dict) else {"path": entry} for entry in value]
    try:
        config = DatasetConfig(datasets=listed)  # type: ignore[arg-type]  # it makes them
    except SettingsError as error:
        raise SettingsError(
            [f"{config_location.file}: {problem.replace('datasets', 'inputs', 1)}" for problem in error.problems]
        ) from None
    return locate_inputs(config.datasets or (), config_location)


def _resolve_relative(name: str, value: str, config_location: ConfigLocation) -> str:
    """Resolve a tokenizer or template relative to the file's folder."""
    if name == "template":
        return value if value in BUILT_IN_TEMPLATES else config_location.resolve_path(value)
    if value in _TOKENIZER_WORDS or value.startswith("train:") or is_url_or_stdin(value):
        return value
    if value.startswith(_TIKTOKEN):
        return _TIKTOKEN + config_location.resolve_path(value.removeprefix(_TIKTOKEN))
    return config_location.resolve_path(value)


def recipe_settings(recipe: Recipe) -> dict[str, Any]:
    """Return the settings of a recipe as a file has them, with defaults."""
    settings = {
        **to_raw_recipe(recipe).settings,
        "mapping": dict(recipe.reading.mapping),
        "ignore": list(recipe.reading.ignore),
        "clean": clean_steps_to_settings(recipe.reading.clean),
        "fim": fim_to_plain(recipe.reading.fim),
        "media": media_to_settings(recipe.reading.media),
        "dedup": dedup_to_plain(recipe.dedup),
        "tokens_per_shard": format_token_count(recipe.tokens_per_shard),
    }
    return {
        name: value for name, value in settings.items() if name not in _LATER_DEFAULTS or value != _LATER_DEFAULTS[name]
    }


def recipe_settings_for_report(recipe: Recipe) -> dict[str, Any]:
    """Return the settings for a report, with invalid Unicode in names replaced."""
    plain = recipe_settings(recipe)
    return {name: _make_printable(value) for name, value in plain.items() if value not in (None, {}, [])}


def _make_printable(value: Any) -> Any:
    if isinstance(value, str):
        return decode_file_name(shown_address(value) if is_url(value) else value)
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
            "it, or name "
            f"its folder."
        )
    sources = recipe.sources or (SourceRecipe(),) * len(recipe.inputs)
    inputs = [_input_to_plain(input_path, source) for input_path, source in zip(recipe.inputs, sources, strict=True)]
    content = {"inputs": inputs, **recipe_settings(recipe)}
    text = yaml.dump(content, Dumper=_RecipeDumper, sort_keys=False, allow_unicode=True, width=1 << 20)
    return f"{_HEADER}{f'# {note}' + chr(10) if note else ''}{text}"


def _input_to_plain(input_path: str, source: SourceRecipe) -> Any:
    """Return an input as in a manifest of data sets; only the path without settings."""
    values = {
        "data_type": source.form,
        "name": source.name,
        "weight": source.weight,
        "text_field": source.text_field,
        "mapping": dict(source.mapping) or None,
        "ignore": list(source.ignore) or None,
    }
    settings = {name: value for name, value in values.items() if value is not None}
    return {"path": input_path, **settings} if settings else input_path


@final
class _RecipeDumper(yaml.SafeDumper):  # type: ignore[misc]  # it has no types
    """YAML dumper that quotes texts so that ``read_yaml`` reads them as texts."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - the signature is the parent's
        """Return True: write equal values in full each time."""
        return True


def _represent_text(writer: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # A plain scalar would fold newlines over several lines.
    return writer.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


_RecipeDumper.add_representer(str, _represent_text)
_RecipeDumper.add_implicit_resolver(FLOAT_TAG, EXPONENT_PATTERN, list("-+0123456789"))
