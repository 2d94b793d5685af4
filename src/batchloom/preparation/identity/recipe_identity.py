"""Recipes as manifests hold them, their fingerprints and differences."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

import xxhash

from batchloom.chat import TEMPLATE_NAMES
from batchloom.core.addresses import make_input_labels, redact_url
from batchloom.core.files import read_regular_file
from batchloom.core.fingerprint import fingerprint
from batchloom.core.settings import quote_value, to_plain
from batchloom.preparation.identity.processors import compute_processor_fingerprint, is_repository_name
from batchloom.preparation.identity.step_files import clean_steps_to_plain, fingerprint_step_files
from batchloom.preparation.settings.media_recipe import MediaRecipe
from batchloom.preparation.settings.read_recipe import ReadRecipe, SourceRecipe, normalize_encoding
from batchloom.preparation.settings.recipe import Recipe, flatten_settings

# Settings that do not change the bytes of shards.
_NON_IDENTITY_SETTINGS = ("inputs", "max_bad", "follow_links")
# Settings of an input that do not change its documents.
_LABELS = ("name", "weight")


def recipe_to_plain(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe for a manifest: plain values, no absolute paths."""
    plain = to_plain(replace(recipe, sources=(), reading=_make_portable(recipe.reading)))
    plain["inputs"] = make_input_labels(recipe.inputs)
    if not _is_balanced(recipe):
        del plain["balance_subsets"]
    plain["sources"] = sources_to_plain(recipe.sources)
    if PurePath(recipe.tokenizer).is_absolute():
        plain["tokenizer"] = Path(recipe.tokenizer).name
    if files_fingerprint := fingerprint_step_files(recipe.reading.clean):
        plain["reading"]["clean_files"] = files_fingerprint
    if recipe.reading.media is not None:
        plain["reading"]["media"] = media_to_plain(recipe.reading.media)
    plain["chat"] |= _template_to_plain(recipe.chat.template)
    return plain


def _make_portable(reading: ReadRecipe) -> ReadRecipe:
    """Return the settings of reading that make the same documents anywhere."""
    return replace(
        reading,
        clean=clean_steps_to_plain(reading.clean),
        encoding=normalize_encoding(reading.encoding or "utf-8") or None,
        # Without it, the same files are read or none.
        allow_skipped=False,
    )


def _is_balanced(recipe: Recipe) -> bool:
    """Return whether documents may move between the subsets of a recipe."""
    return recipe.balance_subsets and bool(recipe.val_fraction or recipe.test_fraction)


def _template_to_plain(template: str | None) -> dict[str, Any]:
    """Return a template by name, and by content if it is a file."""
    if template is None or template in TEMPLATE_NAMES:
        return {}
    if not Path(template).is_file():
        return {"template": Path(template).name} if PurePath(template).is_absolute() else {}
    content = read_regular_file(template)
    return {"template": Path(template).name, "template_hash": xxhash.xxh3_128_hexdigest(content)}


def compute_recipe_fingerprint(recipe: Recipe) -> str:
    """Fingerprint what a recipe does to a document, independent of input locations."""
    plain = recipe_to_plain(recipe) | {"sources": sources_to_plain(recipe.sources, include_labels=False)}
    # Balancing runs after units are made, and does not change the document itself.
    ignored_settings = {*_NON_IDENTITY_SETTINGS, "balance_subsets"}
    return fingerprint({name: value for name, value in plain.items() if name not in ignored_settings})


def list_recipe_differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """List the differing settings that change bytes, each as ``name: old -> new``."""
    then = flatten_settings(old)
    now = flatten_settings(new)
    return [
        f"{name}: {_describe_setting_change(name, then.get(name), now.get(name))}"
        for name in {**now, **then}
        if name not in _NON_IDENTITY_SETTINGS and then.get(name) != now.get(name)
    ]


def _describe_setting_change(name: str, old: Any, new: Any) -> str:
    """Describe the change of a setting; for cleaning, the steps or the first change."""
    if name != "clean":
        return f"{quote_value(old)} -> {quote_value(new)}"
    steps = [
        [(entry, {}) if isinstance(entry, str) else next(iter(entry.items())) for entry in steps or ()]
        for steps in (old, new)
    ]
    names = [",".join(step for step, _ in step_list) or "none" for step_list in steps]
    if names[0] != names[1] or steps[0] == steps[1]:
        # An import without cleaning settings has no cleaning.
        return f"{names[0]} -> {names[1]}"
    pairs = zip(*steps, strict=True)
    (step, then), (_, now) = next(pair for pair in pairs if pair[0] != pair[1])
    setting = next(key for key in {**then, **now} if then.get(key) != now.get(key))
    return f"{step}: {setting}: {quote_value(then.get(setting))} -> {quote_value(now.get(setting))}"


def sources_to_plain(sources: Sequence[SourceRecipe], *, include_labels: bool = True) -> list[dict[str, Any]]:
    """Return the set settings of each input for a manifest; empty if no input has any.

    A declared data_type is not recorded. Labels (name and weight) do not change documents.
    """
    plain = []
    for source in sources:
        settings = to_plain(replace(source, data_type=None, media_folder=None))
        labels = {name: settings.pop(name) for name in _LABELS if name in settings}
        folder = media_folder_to_plain(source.media_folder, "media_folder")
        plain.append(settings | (labels if include_labels else {}) | folder)
    return plain if any(plain) else []


def media_to_plain(media: MediaRecipe) -> dict[str, Any]:
    """Return the media settings for a manifest, without absolute paths.

    The processor is given by name and content.
    """
    plain = to_plain(media)
    if not is_repository_name(media.processor):
        plain["processor"] = Path(media.processor).absolute().name
    plain["processor_fingerprint"] = compute_processor_fingerprint(media.processor, media.image_settings)
    folder = media_folder_to_plain(media.data_folder, "data_folder")
    if "data_folder" not in folder:
        plain.pop("data_folder", None)
    return plain | folder


def media_folder_to_plain(folder: str | None, setting: str) -> dict[str, str]:
    """Return a media folder for a manifest; of an absolute one, its last name."""
    if folder is None:
        return {}
    if PurePath(folder).is_absolute():
        return {f"{setting}_name": Path(folder).name}
    return {setting: redact_url(folder)}
