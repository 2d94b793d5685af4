"""What people give as inputs: paths as they are, YAML manifests and DatasetConfigs as what they name."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, Union

from batchloom.core.addresses import redact_url
from batchloom.core.errors import InputError
from batchloom.media import FrameSampling
from batchloom.preparation.request.manifest_inputs import is_manifest_path
from batchloom.preparation.settings import (
    MediaRecipe,
    ReadRecipe,
    Recipe,
    SourceRecipe,
    as_recipe_inputs,
)
from batchloom.sources import SourceListing, list_sources
from batchloom.sources.files import DetectedFile, Spool

if TYPE_CHECKING:
    from batchloom.preparation.settings import DatasetConfig

# A string within: DatasetConfig's module is loaded only where there is one.
InputArgument: TypeAlias = Union[str, os.PathLike[str], "DatasetConfig"]

_DEFAULT_TOKENIZER = "gpt2"


@dataclass(frozen=True, slots=True)
class ResolvedInputs:
    """The part of a recipe that inputs decide.

    Attributes:
        inputs: as the recipe holds them.
        sources: what is said of each; empty where nothing is said of any.
        reading: how they are read, where nothing else is said of one.
        tokenizer: as ``prepare`` takes it.
        notes: what is to be told before work begins.
        follow_links: a manifest asks to follow symbolic links that lead out of an input folder.
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
    """The inputs of a recipe.

    Args:
        inputs: paths, manifests and DatasetConfigs, one or several.
        reading: how they are read, as it was asked for.
        tokenizer: None for what the manifests name, else the processor's own, else ``gpt2``.

    Raises:
        SettingsError: whatever is wrong with what a manifest says, all at once.
        InputMissingError: a manifest, or what one names, is not there.
        InputError: a manifest cannot be read, names what lies outside of its folder, or has images or sounds read
            without a processor.
    """
    input_arguments = as_input_tuple(inputs)
    if not any(is_dataset_config(argument) or is_manifest_path(argument) for argument in input_arguments):
        tokenizer = _default_tokenizer(reading) if tokenizer is None else tokenizer
        return ResolvedInputs(input_arguments, (), reading, tokenizer)  # type: ignore[arg-type]
    # pydantic takes its time to import.
    from batchloom.preparation.request.dataset_inputs import expand_inputs  # noqa: PLC0415

    expanded = expand_inputs(input_arguments)
    if expanded.multimodal and reading.media is None:
        if expanded.processor is None:
            raise InputError(
                f"{expanded.multimodal} is read with a processor, and none is named: write "
                "processor_config: {processor_name: FOLDER}, or give --processor."
            )
        reading = replace(reading, media=MediaRecipe(processor=expanded.processor))
    if reading.media is not None and reading.media.sampling == FrameSampling():
        reading = replace(reading, media=replace(reading.media, sampling=expanded.sampling))
    tokenizer_name = tokenizer if tokenizer is not None else expanded.tokenizer or _default_tokenizer(reading)
    hoisted = hoist_common_settings(expanded.sources, reading)
    return ResolvedInputs(expanded.inputs, *hoisted, tokenizer_name, expanded.notes, expanded.follow_links)


def _default_tokenizer(reading: ReadRecipe) -> str:
    """The tokenizer where nobody names one: what lies beside a processor, which knows its tokens."""
    return _DEFAULT_TOKENIZER if reading.media is None else reading.media.processor


def as_input_tuple(
    inputs: InputArgument | Sequence[InputArgument],
) -> "tuple[str | DatasetConfig, ...]":
    """One input or several as several, paths as strings."""
    return (inputs,) if is_dataset_config(inputs) else as_recipe_inputs(inputs)  # type: ignore[arg-type,return-value]


def input_name(argument: "str | DatasetConfig") -> str:
    """An input as a command line names it, URLs without credentials; empty for a config of no file."""
    return redact_url(argument) if isinstance(argument, str) else str(argument.location.file or "")


def list_inputs(
    recipe: Recipe,
    spool: Spool,
    *,
    exclude: Path | None = None,
    streaming: bool | None = None,
    detected_files: Mapping[str, DetectedFile] | None = None,
) -> SourceListing:
    """The files behind the inputs of a recipe; see :func:`list_sources`.

    Raises:
        InputError: a file is asked for twice, each time as something else: it is read once.
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
                f"{name} is named by {first_location} and by {second_location}, which say different things of it, "
                "and a file is read once; "
                "leave one of them out."
            )
    return listing


def is_dataset_config(value: object) -> bool:
    """Whether a value is a DatasetConfig; there is none where its module is not loaded."""
    module = sys.modules.get("batchloom.preparation.settings.dataset_config")
    return module is not None and isinstance(value, module.DatasetConfig)


def hoist_common_settings(
    sources: tuple[SourceRecipe, ...], reading: ReadRecipe
) -> tuple[tuple[SourceRecipe, ...], ReadRecipe]:
    """What is said of every input alike as what is said of all, so that both give one recipe."""
    if not sources:
        return sources, reading
    first = sources[0]
    is_uniform = all((source.text_field, source.mapping) == (first.text_field, first.mapping) for source in sources)
    if not is_uniform or reading.text_field is not None or reading.mapping:
        return sources, reading
    lifted = replace(reading, text_field=first.text_field, mapping=first.mapping)
    return tuple(replace(source, text_field=None, mapping={}) for source in sources), lifted
