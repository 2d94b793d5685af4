"""Recipe in the manifest of a store, prepared for another run."""

import glob
import os
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from batchloom.core.addresses import STANDARD_INPUT, is_url_or_stdin, redact_url, strip_file_scheme
from batchloom.core.errors import InputError, InputMissingError, SettingsError, StoreError
from batchloom.core.files import JSON_DECODE_ERRORS, decode_file_name, describe_os_error, read_regular_file
from batchloom.core.settings import from_plain, raise_problems, suggest
from batchloom.core.synthetic_data import SYNTHETIC, SyntheticSpec
from batchloom.preparation.request.recipe_file import SETTINGS, RawRecipe
from batchloom.preparation.settings.media_recipe import compute_processor_fingerprint
from batchloom.preparation.settings.read_recipe import SourceRecipe
from batchloom.preparation.settings.recipe import flatten_settings
from batchloom.sources import detect_kind_by_name, parse_hub_name, strip_wildcard_part
from batchloom.sources.formats import InputFormat
from batchloom.store import MANIFEST_NAME, REPORT_NAME, Manifest, read_manifest
from batchloom.store.format import (
    GENERATIONS_NAME,
    TOKENIZER_NAME,
    SourceEntry,
    format_generation_file_name,
    format_generation_name,
)
from batchloom.tokens import parse_train_spec

_TEXT_KINDS = ("text", "code")
_FORM_BY_KIND: dict[str, InputFormat] = {
    "jsonl": "jsonl",
    "json": "json",
    "csv": "csv",
    "tsv": "csv",
    "parquet": "parquet",
    "arrow": "arrow",
}
_MAX_LISTED = 5
# Manifest keys that are no settings.
_NON_SETTING_KEYS = ("inputs", "sources", "reading", "chat")


class _ReportedLocations(msgspec.Struct, frozen=True):
    """Original input locations in ``report.json``."""

    inputs: list[str]
    folder: str


def describe_input_locations(inputs: Sequence[str]) -> dict[str, Any]:
    """Return the inputs as given and the current folder, for ``report.json``."""
    try:
        folder = os.getcwd()  # noqa: PTH109
    except FileNotFoundError:
        folder = ""  # the folder was deleted, so relative inputs cannot be resolved
    locations = [
        redact_url(input_path) if is_url_or_stdin(input_path) else os.path.expanduser(strip_file_scheme(input_path))  # noqa: PTH111
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
    if settings["balance_subsets"] is None:
        # The store's version lacks this setting, or it has no subsets to balance.
        settings["balance_subsets"] = not (settings["val_fraction"] or settings["test_fraction"])
    if expected is not None and "template" not in overridden_names:
        _check_template(str(settings.get("template")), expected, folder)
    if isinstance(media := settings.get("media"), dict):
        settings["media"] = _extract_media_settings(media, folder, verify="media" not in overridden_names)
    step = [entry for entry in manifest.all_history if entry.has_inputs][-1]
    sources = manifest.list_sources_of(step)
    source_recipes = _make_source_recipes(plain, sources, location)
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
    flat = flatten_settings(dict(plain))
    known_names = {*SETTINGS, "template_hash", "clean_files"}
    present_names = {name for name in plain if name not in _NON_SETTING_KEYS} | {
        name for group in ("reading", "chat") for name in plain.get(group) or ()
    }
    raise_problems(
        [
            f"{location}: recipe.{name}: unknown setting{suggest(name, SETTINGS)}"
            for name in sorted(present_names - known_names)
        ]
    )
    return {name: value for name, value in flat.items() if name in known_names}


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
        fingerprint = compute_processor_fingerprint(str(media.get("processor")))
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
    reported, folder = _read_reported_locations(report), report.parent
    locations, relocated, missing = list(labels), [], []
    recorded_paths = reported.inputs if reported is not None and len(reported.inputs) == len(labels) else labels
    for number, (label, recorded_path) in enumerate(zip(labels, recorded_paths, strict=True)):
        if os.path.isabs(recorded_path):  # noqa: PTH117
            locations[number] = recorded_path
        if recorded_path == STANDARD_INPUT or not _location_exists(locations[number], of_hub=of_hub):
            missing.append(label)
        elif locations[number] != label:
            relocated.append(recorded_path)
    if missing:
        more = f" and {len(missing) - _MAX_LISTED:,} more" if len(missing) > _MAX_LISTED else ""
        folder_hint = f", or run this command in {reported.folder}, where it was made" if reported is not None else ""
        raise InputMissingError(
            f"{folder} was made from {', '.join(missing[:_MAX_LISTED])}{more}, which cannot be found; give the "
            f"inputs as arguments, in the order of its manifest ({', '.join(labels[:_MAX_LISTED])}"
            f"{', ...' if len(labels) > _MAX_LISTED else ''}){folder_hint}."
        )
    more = f" and {len(relocated) - 1:,} more" if len(relocated) > 1 else ""
    note = f"Using input paths from {report.name} in {folder}: {relocated[0]}{more}." if relocated else ""
    return locations, (note,) if note else ()


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


def _make_source_recipes(
    recipe: Mapping[str, Any], sources: Sequence[SourceEntry], location: str
) -> tuple[SourceRecipe, ...]:
    """Return the settings of each input; empty if no input has any."""
    labels = [str(label) for label in recipe.get("inputs", ())]
    plain = recipe.get("sources") or [{}] * len(labels)
    forms = _infer_forms(sources, labels)
    known_names = ("text_field", "mapping", "ignore", "name", "weight")
    raise_problems(
        [
            f"{location}: recipe.sources[{number}].{name}: unknown setting{suggest(name, known_names)}"
            for number, settings in enumerate(plain)
            for name in settings
            if name not in known_names
        ]
    )
    if len(plain) != len(labels):
        raise StoreError(f"{location} is damaged: {len(plain)} sources for {len(labels)} inputs.")
    source_recipes = tuple(
        SourceRecipe(
            **{**settings, "ignore": tuple(settings.get("ignore", ()))},
            form=form,
            location=f"{location}, recipe.inputs[{number}]",
        )
        for number, (settings, form) in enumerate(zip(plain, forms, strict=True))
    )
    return source_recipes if any(source_recipe != SourceRecipe() for source_recipe in source_recipes) else ()


def _infer_forms(sources: Sequence[SourceEntry], labels: Sequence[str]) -> list[InputFormat | None]:
    """Return the declared format of each input, or None.

    Files with names of text formats hold records only if the user declared it.
    """
    if not any(_was_declared(source.name, source.kind) for source in sources):
        return [None] * len(labels)
    numbers = {label.rstrip("/"): number for number, label in enumerate(labels)}
    globs = [label for label in labels if glob.has_magic(label)]
    kinds: list[set[str]] = [set() for _ in labels]
    declared_numbers: set[int] = set()
    for source in sources:
        number = _find_input_number(source.name, numbers, globs)
        if number is not None:
            kinds[number].add(source.kind)
            if _was_declared(source.name, source.kind):
                declared_numbers.add(number)
    return [_common_form(kinds[number]) if number in declared_numbers else None for number in range(len(labels))]


def _common_form(kinds: set[str]) -> InputFormat | None:
    """Return the format that files of these kinds share, or None."""
    forms = {_FORM_BY_KIND.get(kind) for kind in kinds}
    if forms == {"json", "jsonl"}:
        return "json"
    return forms.pop() if len(forms) == 1 else None


def _was_declared(name: str, kind: str) -> bool:
    verdict = detect_kind_by_name(name)
    return verdict is not None and verdict.kind in _TEXT_KINDS and kind in _FORM_BY_KIND


def _find_input_number(name: str, numbers: Mapping[str, int], globs: Sequence[str]) -> int | None:
    """Return the input of a file: itself, a parent folder or archive, or a glob."""
    prefix = name
    while prefix not in numbers and "/" in prefix:
        prefix = prefix.rpartition("/")[0]
    if prefix not in numbers:
        prefix = next((pattern for pattern in globs if fnmatchcase(name, pattern)), "")
    return numbers.get(prefix.rstrip("/"))
