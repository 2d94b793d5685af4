"""Inputs of a job: paths, and YAML manifests and DatasetConfigs to expand."""

import json
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, Union

from batchloom.core.addresses import make_input_labels, redact_url
from batchloom.core.errors import InputError, SettingsError
from batchloom.core.settings import list_settings
from batchloom.core.wording import format_count, shorten
from batchloom.preparation.settings.config_location import FileSetting
from batchloom.preparation.settings.peer_files import describe_dataset_info
from batchloom.preparation.settings.read_recipe import MAX_SAMPLES, ReadRecipe, SourceRecipe
from batchloom.preparation.settings.recipe import ChatRecipe, Recipe, as_recipe_inputs
from batchloom.sources import (
    DetectedFile,
    PartReader,
    ReadLimits,
    ReadRules,
    SourceListing,
    SourcePart,
    list_sources,
)
from batchloom.sources.files import RecordSample, Source, Spool, choose_random_records

if TYPE_CHECKING:
    from batchloom.preparation.settings.dataset_config import DatasetConfig
import glob

from batchloom.core.addresses import is_url_or_stdin

# DatasetConfig is quoted, because its module is only loaded when needed.
InputArgument: TypeAlias = Union[str, os.PathLike[str], "DatasetConfig"]

_DEFAULT_TOKENIZER = "gpt2"
_MAX_OPTION_LENGTH = 80


@dataclass(frozen=True, slots=True)
class ResolvedInputs:
    """The part of a recipe that inputs decide.

    Attributes:
        inputs: inputs as the recipe holds them.
        sources: settings of each input; empty if no input has any.
        reading: common settings of reading.
        tokenizer: the tokenizer, as ``prepare`` takes it.
        notes: notes for the user before work begins.
        follow_links: whether a manifest follows symbolic links that lead out of an input folder.
        settings: settings that files of other libraries state; the given ones override them.
    """

    inputs: tuple[str, ...]
    sources: tuple[SourceRecipe, ...]
    reading: ReadRecipe
    tokenizer: str
    notes: tuple[str, ...] = ()
    follow_links: bool = False
    settings: tuple[tuple[str, FileSetting], ...] = ()


def resolve_inputs(
    inputs: InputArgument | Sequence[InputArgument], reading: ReadRecipe, tokenizer: str | None
) -> ResolvedInputs:
    """Resolve the inputs of a recipe.

    Args:
        inputs: paths, manifests and DatasetConfigs, one or several.
        reading: requested settings of reading.
        tokenizer: the tokenizer; None for that of the manifests, else the processor's, else ``gpt2``.

    Raises:
        SettingsError: a manifest has invalid settings; all are reported at once.
        InputMissingError: a manifest, or an input that it names, is missing.
        InputError: a manifest cannot be read, names a path outside its folder, or declares images or audio
            without a processor.
    """
    input_arguments = as_input_tuple(inputs)
    if not any(
        is_dataset_config(argument) or is_manifest_path(argument) or split_sample_count(argument)[1] is not None
        for argument in input_arguments
    ):
        tokenizer = default_tokenizer(reading) if tokenizer is None else tokenizer
        return ResolvedInputs(input_arguments, (), reading, tokenizer)  # type: ignore[arg-type]
    # Importing pydantic is slow.
    from batchloom.preparation.request.dataset_inputs import expand_inputs  # noqa: PLC0415

    return expand_inputs(input_arguments, reading, tokenizer)


def default_tokenizer(reading: ReadRecipe) -> str:
    """Return the default tokenizer; with media that of the processor, which it needs."""
    return _DEFAULT_TOKENIZER if reading.media is None else reading.media.processor


def as_input_tuple(inputs: InputArgument | Sequence[InputArgument]) -> "tuple[str | DatasetConfig, ...]":
    """Return one input or several as a tuple, paths as strings."""
    return (inputs,) if is_dataset_config(inputs) else as_recipe_inputs(inputs)  # type: ignore[arg-type,return-value]


def input_name(argument: "str | DatasetConfig") -> str:
    """Return an input's name for messages, URLs without credentials.

    Empty for a config without a file.
    """
    return redact_url(argument) if isinstance(argument, str) else argument.location.name


def choose_file_settings(
    settings: Sequence[tuple[str, FileSetting]], given: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Choose the settings of other libraries' files, with a note for each file.

    Options override them.

    Raises:
        InputError: two files state a setting differently.
    """
    chosen: dict[str, FileSetting] = {}
    taken: dict[str, dict[str, list[str]]] = {}
    overridden: dict[str, list[str]] = {}
    for name, setting in settings:
        if name in given and given[name] != setting.value:
            overridden.setdefault(setting.file, []).append(setting.key)
            continue
        option, first = _format_option(name, setting.value), chosen.setdefault(name, setting)
        if first.value != setting.value:
            raise InputError(
                f"{first.file} says {_format_option(name, first.value)} ({first.key}) and {setting.file} {option} "
                f"({setting.key}), but a store has one {name}; choose it with an option."
            )
        taken.setdefault(setting.file, {}).setdefault(setting.key, []).append(option)
    notes = []
    for file in dict.fromkeys(setting.file for _, setting in settings):
        keys = [f"{key} ({', '.join(options)})" for key, options in taken.get(file, {}).items()]
        parts = [("taken", keys), ("overridden by options", overridden.get(file, []))]
        notes.append(f"{file}: {'; '.join(f'{verb}: ' + ', '.join(words) for verb, words in parts if words)}.")
    return {name: setting.value for name, setting in chosen.items()}, notes


def _format_option(name: str, value: object) -> str:
    """Return a setting as an option of the command line."""
    fields = {field.name: field for cls in (Recipe, ChatRecipe) for field in list_settings(cls)}
    option = fields[name].option_names[0]
    if isinstance(value, Mapping):
        return " ".join(f"{option} {key}={json.dumps(item)}" for key, item in value.items())
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return f"{option} {shorten(shlex.quote(text), _MAX_OPTION_LENGTH)}"


def list_inputs(
    recipe: Recipe,
    spool: Spool | None = None,
    *,
    exclude: Path | None = None,
    streaming: bool | None = None,
    detected_files: Mapping[str, DetectedFile] | None = None,
) -> SourceListing:
    """List the files of a recipe's inputs; see :func:`list_sources`.

    Raises:
        InputError: two inputs name a file with different settings; a file is read once.
    """
    sources = [recipe.source(number) for number in range(len(recipe.inputs))]
    declared_inputs = [replace(source.declared_input, follow_links=recipe.follow_links) for source in sources]
    listing = list_sources(
        recipe.inputs,
        declared_inputs=declared_inputs,
        exclude=exclude,
        spool=spool,
        streaming=streaming,
        detected_files=detected_files,
        media=recipe.reading.media is not None,
    )
    for name, first, second in listing.duplicates:
        if recipe.source(first) != recipe.source(second):
            first_location, second_location = (_describe_input(recipe, number) for number in (first, second))
            raise InputError(
                f"{name} is listed by {first_location} and by {second_location} with different settings, but a file "
                "is read only once; leave one of them out."
            )
    folder_notes = [
        note for path in recipe.inputs if not is_url_or_stdin(path) and (note := describe_dataset_info(Path(path)))
    ]
    return _sample_inputs(replace(listing, notes=(*folder_notes, *listing.notes)), recipe)


def _describe_input(recipe: Recipe, number: int) -> str:
    """Return an input as it was given."""
    source = recipe.source(number)
    count = "" if source.num_samples is None else f"#{source.num_samples}"
    return source.location or f"{recipe.inputs[number]}{count}"


def _sample_inputs(listing: SourceListing, recipe: Recipe) -> SourceListing:
    """Restrict the inputs that have a number of samples to these records."""
    sampled = {
        number: source for number, source in enumerate(recipe.sources) if source.max_samples or source.num_samples
    }
    if not sampled:
        return listing
    rules = replace(recipe.reading.rules(ReadLimits()), text_field=None)
    notes = list(listing.notes)
    sources_by_input: dict[int, list[Source]] = {}
    for source in listing.sources:
        sources_by_input.setdefault(source.input, []).append(source)
    for number, settings in sampled.items():
        name = settings.name or make_input_labels([recipe.inputs[number]])[0]
        chosen_sources, note = _choose_records(sources_by_input.get(number, []), settings, rules)
        sources_by_input[number] = chosen_sources
        notes.append(f"{name}: {note}.")
    chosen = (source for sources in sources_by_input.values() for source in sources)
    return replace(listing, sources=tuple(chosen), notes=tuple(notes))


def _choose_records(sources: Sequence[Source], settings: SourceRecipe, rules: ReadRules) -> tuple[list[Source], str]:
    """Return the sources of an input with their chosen records, and a note."""
    count = min(filter(None, (settings.max_samples, settings.num_samples)))
    is_random, chosen, before = settings.num_samples is not None, list[RecordSample](), 0
    record_counts: list[int] = []
    for source in sources:
        if is_random or len(sources) > 1:
            record_counts.append(_count_records(source, rules, None if is_random else count - before))
        chosen.append(RecordSample(count, None, before))
        before += record_counts[-1] if record_counts else 0
        if not is_random and before >= count:
            break
    if not is_random:
        sampled_sources = [replace(source, sample=sample) for source, sample in zip(sources, chosen, strict=False)]
        verb = "is" if count == 1 else "are"
        return sampled_sources, f"at most its first {format_count(count, 'record')} {verb} read"
    if count >= before:
        few = f", fewer than {count:,}" if count > before else ""
        return list(sources), f"all of its {format_count(before, 'record')} are read once{few}"
    numbers = choose_random_records(before, count)
    sampled_sources = [
        replace(source, sample=replace(sample, total=before))
        for source, sample, records in zip(sources, chosen, record_counts, strict=True)
        if ((numbers >= sample.before) & (numbers < sample.before + records)).any()
    ]
    return sampled_sources, f"{count:,} of its {format_count(before, 'record')} are read, chosen at random"


def _count_records(source: Source, rules: ReadRules, most: int | None) -> int:
    """Return the number of records of a source; counting may stop at ``most``."""
    count = 0
    with PartReader(SourcePart(source, 0, source.size), rules) as reader:
        for batch in reader:
            count += len(batch.values) + len(batch.bad)
            if most is not None and count >= most:
                break
    return count


def is_dataset_config(value: object) -> bool:
    """Return whether a value is a DatasetConfig, without importing its module."""
    module = sys.modules.get("batchloom.preparation.settings.dataset_config")
    return module is not None and isinstance(value, module.DatasetConfig)


def hoist_common_settings(
    sources: tuple[SourceRecipe, ...], reading: ReadRecipe
) -> tuple[tuple[SourceRecipe, ...], ReadRecipe]:
    """Move settings that all inputs share to the recipe, so that both forms are equal."""
    if not sources:
        return sources, reading
    first = sources[0]
    is_uniform = all((source.text_field, source.mapping) == (first.text_field, first.mapping) for source in sources)
    if not is_uniform or reading.text_field is not None or reading.mapping:
        return sources, reading
    lifted = replace(reading, text_field=first.text_field, mapping=first.mapping)
    return tuple(replace(source, text_field=None, mapping={}) for source in sources), lifted


# ms-swift's number of random records after the name of a data set.
_SAMPLE_PATTERN = re.compile(r"(.+)#([^#/]*)", re.DOTALL)
# The file with the data sets of LLaMA-Factory or ms-swift, and names of some of them.
_DATASET_INFO_PATTERN = re.compile(r"(.*/)?dataset_info\.json(:.*)?", re.DOTALL)
_MANIFEST_SUFFIXES = (".yaml", ".yml")


def is_manifest_path(value: object) -> bool:
    """Return whether an input is a YAML manifest or ``dataset_info.json``.

    Such files inside folders are not.
    """
    if isinstance(value, str) and _DATASET_INFO_PATTERN.fullmatch(value) and not is_url_or_stdin(value):
        return True
    if not isinstance(value, str) or not value.lower().endswith(_MANIFEST_SUFFIXES) or is_url_or_stdin(value):
        return False
    if glob.has_magic(value) and not os.path.lexists(value):
        return False
    return not os.path.isdir(value)  # noqa: PTH112 - a string stays a string


def split_sample_count(value: object) -> tuple[Any, int | None]:
    """Split ``INPUT#N``, N random records of an input; None without a number.

    A file may have such a name, and in a URL the number is a part of the address.
    """
    match = _SAMPLE_PATTERN.fullmatch(value) if isinstance(value, str) and not is_url_or_stdin(value) else None
    if match is None or os.path.lexists(match[0]):
        return value, None
    is_number = match[2].isdecimal()
    if not is_number and not os.path.lexists(match[1]):
        return value, None
    # int() takes at most 4,300 digits.
    count = int(match[2][:18]) if is_number else 0
    if not 1 <= count <= MAX_SAMPLES:
        raise SettingsError(
            [f"inputs: {match[0]!r}: {match[2]!r} is not a number of records from 1 to {MAX_SAMPLES:,}; write INPUT#N"]
        )
    if is_manifest_path(match[1]):
        problem = (
            f"a number belongs to one data set; write {match[1]}:NAME#{count}"
            if _DATASET_INFO_PATTERN.fullmatch(match[1])
            else f"a number belongs to one data set; write num_samples: {count} or its library's key into the file"
        )
        raise SettingsError([f"inputs: {match[0]!r}: {problem}"])
    return match[1], count


def check_no_manifests(inputs: Sequence[str], command: str) -> None:
    """Refuse manifests in a command that takes the files they list."""
    for path in inputs:
        if is_manifest_path(path):
            raise InputError(
                f"{path} is named like a manifest, which {command} does not read; name the files it lists, or "
                "inspect it with batchloom doctor."
            )
