"""Inputs of a job: paths, and YAML manifests and DatasetConfigs to expand."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, Union

from batchloom.core.addresses import redact_url
from batchloom.core.errors import InputError
from batchloom.preparation.settings.read_recipe import ReadRecipe, SourceRecipe
from batchloom.preparation.settings.recipe import Recipe, as_recipe_inputs
from batchloom.sources import DetectedFile, SourceListing, list_sources
from batchloom.sources.files import Spool

if TYPE_CHECKING:
    from batchloom.preparation.settings.dataset_config import DatasetConfig
import glob

from batchloom.core.addresses import is_url_or_stdin

# DatasetConfig is quoted, because its module is only loaded when needed.
InputArgument: TypeAlias = Union[str, os.PathLike[str], "DatasetConfig"]

_DEFAULT_TOKENIZER = "gpt2"


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
    """

    inputs: tuple[str, ...]
    sources: tuple[SourceRecipe, ...]
    reading: ReadRecipe
    tokenizer: str
    notes: tuple[str, ...] = ()
    follow_links: bool = False


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
    if not any(is_dataset_config(argument) or is_manifest_path(argument) for argument in input_arguments):
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
    return redact_url(argument) if isinstance(argument, str) else str(argument.location.file or "")


def list_inputs(
    recipe: Recipe,
    spool: Spool,
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
            first_location, second_location = (recipe.source(n).location or recipe.inputs[n] for n in (first, second))
            raise InputError(
                f"{name} is listed by {first_location} and by {second_location} with different settings, but a file "
                "is read only once; leave one of them out."
            )
    return listing


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


_MANIFEST_SUFFIXES = (".yaml", ".yml")


def is_manifest_path(value: object) -> bool:
    """Return whether an input is a YAML manifest; such files inside folders are not."""
    if not isinstance(value, str) or not value.lower().endswith(_MANIFEST_SUFFIXES) or is_url_or_stdin(value):
        return False
    if glob.has_magic(value) and not os.path.lexists(value):
        return False
    return not os.path.isdir(value)  # noqa: PTH112 - a string stays a string


def check_no_manifests(inputs: Sequence[str], command: str) -> None:
    """Refuse manifests in a command that takes the files they list."""
    for path in inputs:
        if is_manifest_path(path):
            raise InputError(
                f"{path} is named like a manifest, which {command} does not read; name the files it lists, or "
                "inspect it with batchloom doctor."
            )
