"""Inputs of a job: paths, and YAML manifests and DatasetConfigs to expand."""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeAlias, final

from batchloom.core.addresses import STANDARD_INPUT, is_glob, is_url, is_url_or_stdin, redact_url, strip_file_scheme
from batchloom.core.errors import InputError, InputMissingError, SettingsError
from batchloom.core.settings import quote_value, raise_problems
from batchloom.core.synthetic_data import SYNTHETIC_NAMES
from batchloom.core.wording import format_list
from batchloom.media import FrameSampling
from batchloom.preparation.identity.processors import has_only_tokenizer
from batchloom.preparation.settings.dataset_config import MULTIMODAL_TYPES, DatasetConfig, DatasetEntry, DatasetType
from batchloom.preparation.settings.dataset_file import ConfigLocation
from batchloom.preparation.settings.media_recipe import MediaRecipe
from batchloom.preparation.settings.read_recipe import MAX_SAMPLES, ReadRecipe, SourceRecipe
from batchloom.preparation.settings.recipe import as_recipe_inputs
from batchloom.sources import (
    LinkBounds,
    describe_missing_input,
    find_hub_name,
    find_preset,
    is_inside,
    parse_hub_name,
    parse_split,
    strip_wildcard_part,
)

InputArgument: TypeAlias = str | os.PathLike[str] | DatasetConfig

_PRESET = "fineweb-edu"
_MAX_LISTED = 5
_DEFAULT_TOKENIZER = "gpt2"


@dataclass(frozen=True, slots=True)
class ResolvedInputs:
    """The part of a recipe that inputs decide."""

    inputs: tuple[str, ...]  # as the recipe holds them
    sources: tuple[SourceRecipe, ...]  # settings of each input; empty if no input has any
    reading: ReadRecipe  # common settings of reading
    tokenizer: str  # as ``prepare`` takes it
    notes: tuple[str, ...] = ()  # for the user before work begins
    follow_links: bool = False  # whether a manifest follows symbolic links that lead out of an input folder


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
    _refuse_dataset_info(input_arguments)
    if not any(
        isinstance(argument, DatasetConfig) or is_manifest_path(argument) or split_sample_count(argument)[1] is not None
        for argument in input_arguments
    ):
        tokenizer = default_tokenizer(reading) if tokenizer is None else tokenizer
        return ResolvedInputs(input_arguments, (), reading, tokenizer)  # type: ignore[arg-type]
    return _expand_inputs(input_arguments, reading, tokenizer)


def default_tokenizer(reading: ReadRecipe) -> str:
    """Return the default tokenizer; with media that of the processor, which it needs."""
    return _DEFAULT_TOKENIZER if reading.media is None else reading.media.processor


def as_input_tuple(inputs: InputArgument | Sequence[InputArgument]) -> tuple[str | DatasetConfig, ...]:
    """Return one input or several as a tuple, paths as strings."""
    return (inputs,) if isinstance(inputs, DatasetConfig) else as_recipe_inputs(inputs)  # type: ignore[arg-type]


def input_name(argument: str | DatasetConfig) -> str:
    """Return an input's name for messages, URLs without credentials.

    Empty for a config without a file.
    """
    return redact_url(argument) if isinstance(argument, str) else argument.location.name


def _expand_inputs(
    input_arguments: Sequence[str | DatasetConfig], reading: ReadRecipe, tokenizer: str | None
) -> ResolvedInputs:
    """Replace each manifest and DatasetConfig by the data sets it names, in order."""
    inputs: list[str] = []
    sources: list[SourceRecipe] = []
    tokenizer_files: dict[str, str] = {}
    notes: list[str] = []
    multimodal: list[tuple[str, DatasetConfig]] = []
    follow_links = False
    for argument in input_arguments:
        if isinstance(argument, str) and not is_manifest_path(argument):
            path, sample_count = split_sample_count(argument)
            inputs.append(path)
            sources.append(SourceRecipe(num_samples=sample_count))
            continue
        config = DatasetConfig.load(strip_file_scheme(argument)) if isinstance(argument, str) else argument
        notes += config.location.notes
        follow_links |= config.follow_links
        if config.tokenizer is not None:
            tokenizer_files.setdefault(config.tokenizer, config.location.name or "a DatasetConfig")
        located = _locate_entries(_iter_entries(config), _DatasetLocator(config.location), config.dataset_type)
        for input_path, source, kind in located:
            inputs.append(input_path)
            sources.append(source)
            if kind in MULTIMODAL_TYPES:
                multimodal.append((f"{source.location}: {kind!r}", config))
        if config.videos and not any(kind in MULTIMODAL_TYPES for *_, kind in located):
            config_name = config.location.name or "A DatasetConfig"
            notes.append(f"{config_name}: not used for texts: {', '.join(config.videos)}.")
    if tokenizer is None and len(tokenizer_files) > 1:
        (first, first_file), (second, second_file) = list(tokenizer_files.items())[:2]
        raise InputError(
            f"{first_file} names the tokenizer {first} and {second_file} names {second}, but a store has one; choose "
            "it with --tokenizer."
        )
    reading = _add_media(reading, multimodal)
    if reading.media is None:
        raise_problems(
            [
                f"{source.location}.media_folder: no media are read; write type: vision, or give --processor"
                for source in sources
                if source.media_folder
            ]
        )
    tokenizer = tokenizer if tokenizer is not None else next(iter(tokenizer_files), default_tokenizer(reading))
    hoisted_sources, reading = hoist_common_settings(tuple(sources), reading)
    return ResolvedInputs(tuple(inputs), hoisted_sources, reading, tokenizer, tuple(notes), follow_links)


def _add_media(reading: ReadRecipe, multimodal: Sequence[tuple[str, DatasetConfig]]) -> ReadRecipe:
    """Add the processor and the frame sampling that data sets with media declare."""
    sampling = _merge_sampling(multimodal)
    image_settings = _merge_image_settings(multimodal)
    if multimodal and reading.media is None:
        processor = next((name for _, config in multimodal if (name := config.tokenizer) is not None), None)
        if processor is None:
            raise InputError(
                f"{multimodal[0][0]} needs a processor, but none is given: write "
                "processor_config: {processor_name: FOLDER}, or give --processor."
            )
        if has_only_tokenizer(processor):
            # A language model that is trained on the texts of such data sets; records with media are refused.
            return reading
        reading = replace(reading, media=MediaRecipe(processor=processor))
    if reading.media is not None and reading.media.sampling == FrameSampling():
        reading = replace(reading, media=replace(reading.media, sampling=sampling))
    if reading.media is not None and not reading.media.image_settings:
        reading = replace(reading, media=replace(reading.media, image_settings=image_settings))
    return reading


def _merge_sampling(multimodal: Sequence[tuple[str, DatasetConfig]]) -> FrameSampling:
    """Return the common frame sampling of all data sets."""
    samplings = [(location, config.sampling) for location, config in multimodal if config.videos]
    _check_equal(samplings, "sample video frames differently, but a store has one frame sampling")
    return samplings[0][1] if samplings else FrameSampling()


def _merge_image_settings(multimodal: Sequence[tuple[str, DatasetConfig]]) -> dict[str, Any]:
    """Return the common settings of the image processor of all data sets."""
    image_settings = []
    for location, config in multimodal:
        try:
            settings = config.processor_config.read_image_settings() if config.processor_config else {}
        except SettingsError as error:
            raise SettingsError([f"{location}: {problem}" for problem in error.problems]) from None
        if settings:
            image_settings.append((location, settings))
    _check_equal(image_settings, "set the image processor differently, but a store has one processor")
    return image_settings[0][1] if image_settings else {}


def _check_equal(values: Sequence[tuple[str, Any]], conflict: str) -> None:
    """Refuse values of several locations that differ from the first."""
    for location, value in values[1:]:
        if value != values[0][1]:
            raise InputError(f"{values[0][0]} and {location} {conflict}: use equal settings, or prepare two stores.")


def locate_inputs(entries: Sequence[DatasetEntry], config_location: ConfigLocation) -> list[tuple[str, SourceRecipe]]:
    """Return the location and the settings of each input of a recipe file."""
    raise_problems(
        [
            f"{config_location.describe('')}inputs[{number}].type: {entry.type!r} is not supported in a recipe; "
            "leave it out, and write media: {processor: FOLDER}"
            for number, entry in enumerate(entries)
            if entry.type in MULTIMODAL_TYPES
        ]
    )
    named_entries = ((f"inputs[{number}]", entry, config_location) for number, entry in enumerate(entries))
    return [
        (input_path, source)
        for input_path, source, _ in _locate_entries(named_entries, _DatasetLocator(config_location), "text")
    ]


def _locate_entries(
    entries: Iterable[tuple[str, DatasetEntry, ConfigLocation]], locator: "_DatasetLocator", default_type: DatasetType
) -> list[tuple[str, SourceRecipe, DatasetType]]:
    """Return the location, settings and type of each data set."""
    located = []
    for name, entry, config_location in entries:
        if config_location != locator.config_location:
            locator.raise_missing()
            locator = _DatasetLocator(config_location)
        kind = entry.type or default_type
        plain = kind == "fineweb_edu" and not entry.mapping and entry.text_field is None
        settings = {field.name: getattr(entry, field.name) for field in fields(SourceRecipe)}
        source = replace(
            SourceRecipe(**settings),
            text_field="text" if plain else entry.text_field,
            media_folder=locator.resolve_media_folder(entry, name),
            location=f"{config_location.file}, {config_location.block}{name}" if config_location.file else name,
        )
        path, split = locator.find(entry, source.location)
        located.append((path, replace(source, split=split), kind))
    locator.raise_missing()
    return located


def _iter_entries(config: DatasetConfig) -> Iterator[tuple[str, DatasetEntry, ConfigLocation]]:
    """Yield each data set with its name in the file and the file's location."""
    data_type = None if config.dataset_format == "yaml" else config.dataset_format
    if config.dataset_path is None and config.datasets is None:
        yield "dataset_type", DatasetEntry(path=_PRESET), config.location
    elif config.datasets is not None:
        for number, entry in enumerate(config.datasets):
            typed_entry = entry if entry.data_type or not data_type else replace(entry, data_type=data_type)
            yield f"datasets[{number}]", typed_entry, config.location
    elif config.dataset_format == "yaml" or is_manifest_path(config.dataset_path):
        yield from _iter_file_entries(config)
    else:
        entry = DatasetEntry(path=str(config.dataset_path), data_type=data_type)
        yield "dataset_path", entry, config.location


def _iter_file_entries(config: DatasetConfig) -> Iterator[tuple[str, DatasetEntry, ConfigLocation]]:
    """Yield the data sets of the file that a block names."""
    config_location = config.location
    locator = _DatasetLocator(config_location, lists=True)
    location = (
        f"{config_location.file}, {config_location.block}dataset_path" if config_location.file else "dataset_path"
    )
    path, _ = locator.find(DatasetEntry(path=str(config.dataset_path)), location)
    locator.raise_missing()
    inner = DatasetConfig.load(path)
    if inner.datasets is None or inner.location.has_block:
        raise InputError(
            f"{location}: {path} holds more than a list of data sets; it may contain only datasets: with the list."
        )
    for number, entry in enumerate(inner.datasets):
        yield f"datasets[{number}]", entry, inner.location


@final
@dataclass
class _DatasetLocator:
    """Resolver of data set paths relative to their file."""

    config_location: ConfigLocation
    lists: bool = False
    missing: list[tuple[str, str]] = field(default_factory=list)
    has_hub_name: bool = False
    _links: LinkBounds = field(default_factory=LinkBounds)

    def find(self, entry: DatasetEntry, location: str) -> tuple[str, str | None]:
        """Return the input of a data set, and its split unless the input says it.

        Missing inputs are recorded for ``raise_missing``.
        """
        if entry.path == STANDARD_INPUT and self.config_location.recipe:
            return entry.path, entry.split
        if entry.path == STANDARD_INPUT:
            raise InputError(
                f"{location}: '-' is standard input, which a manifest cannot list; give it next to the manifest."
            )
        if is_url(entry.path) or is_url(entry.data_folder or ""):
            return _check_hub_settings(entry, self._resolve_url(entry, location), location), entry.split
        path = self._resolve_path(entry, location)
        if os.path.lexists(path):
            if is_manifest_path(path) and entry.data_type is None and not self.lists:
                raise InputError(
                    f"{location}: {path} is named like a manifest, but manifests cannot be nested; list its data sets "
                    "here."
                )
            return _split_path(entry, path, location)
        if self._may_be_remote(entry):
            has_rows = entry.split is not None and parse_split(entry.split).rows is not None
            return _format_hub_name(entry, location, has_rows=has_rows), entry.split if has_rows else None
        if self.config_location.recipe and entry.path.partition(":")[0] in SYNTHETIC_NAMES:
            return entry.path, None
        if not (is_glob(path) and os.path.isdir(strip_wildcard_part(path))):
            self.missing.append((location, path))
            self.has_hub_name = self.has_hub_name or (not entry.data_folder and parse_hub_name(entry.path) is not None)
        return path, entry.split

    def raise_missing(self) -> None:
        """Raise one error for all missing inputs."""
        if not self.missing:
            return
        (location, path), *other_missing = self.missing
        others = [f"{other_path} ({other_location})" for other_location, other_path in other_missing]
        listing = f"; also missing: {format_list(others, _MAX_LISTED)}" if others else ""
        sentence = f"{describe_missing_input(path).rstrip('.')}{listing}"
        end = "" if sentence.endswith("?") else "."
        raise InputMissingError(f"{location}: {sentence}{end}{self._hint()}")

    def _hint(self) -> str:
        """Return a hint about the location of missing inputs, with a leading space."""
        if self._exists_from_current_folder():
            return " Relative paths start from the folder of the file that contains them."
        return " A data set of the Hub needs data_type: hf_dataset, or no data_type." if self.has_hub_name else ""

    def _exists_from_current_folder(self) -> bool:
        """Return whether missing inputs exist relative to the current folder."""
        folder = str(self.config_location.file.parent) if self.config_location.file else "."
        return folder != "." and any(os.path.lexists(os.path.relpath(path, folder)) for _, path in self.missing)

    def _may_be_remote(self, entry: DatasetEntry) -> bool:
        if entry.data_folder or entry.data_type not in (None, "hf_dataset"):
            return False
        if entry.data_type or entry.config or entry.split or entry.revision:
            return parse_hub_name(entry.path) is not None
        folder = "" if self.config_location.file is None else str(self.config_location.file.parent)
        return find_hub_name(entry.path, folder) is not None

    def _resolve_url(self, entry: DatasetEntry, location: str) -> str:
        folder = (entry.data_folder or "").rstrip("/")
        if not folder:
            return entry.path
        inside = entry.path.removeprefix(f"{folder}/")
        if is_url(inside) or os.path.isabs(inside) or ".." in inside.split("/"):
            raise _make_outside_folder_error(location, redact_url(entry.path), f"its data_folder {redact_url(folder)}")
        if not is_url(folder):
            raise _make_outside_folder_error(location, redact_url(entry.path), f"its data_folder {entry.data_folder}")
        return f"{folder}/{inside}"

    @property
    def _is_confined(self) -> bool:
        """True if relative paths must stay below the folder of the file."""
        return self.config_location.file is not None and not self.config_location.recipe

    def resolve_media_folder(self, entry: DatasetEntry, name: str) -> str | None:
        """Return the base folder of a data set's media paths; None for the default."""
        if not entry.media_folder or is_url(entry.media_folder):
            return entry.media_folder or None
        folder = replace(entry, path=entry.media_folder, data_folder=None)
        return self._resolve_path(folder, f"{self.config_location.describe('')}{name}.media_folder")

    def _resolve_path(self, entry: DatasetEntry, location: str) -> str:
        """Return the local path of a data set."""
        config_folder = "" if self.config_location.file is None else str(self.config_location.file.parent)
        # Absolute paths are free; relative ones must stay below their base folder.
        folder = os.path.expanduser(strip_file_scheme(entry.data_folder or ""))
        if folder and not os.path.isabs(folder):
            full = os.path.join(config_folder, folder)
            if self._is_confined:
                self._check_inside(full, config_folder, location, entry.data_folder or "", "the folder of the manifest")
            folder = full
        path = os.path.expanduser(strip_file_scheme(entry.path))
        root = folder or config_folder
        full = os.path.normpath(os.path.join(root, path))
        if folder:
            self._check_inside(full, root, location, entry.path, f"its data_folder {entry.data_folder}")
        elif not os.path.isabs(path) and self._is_confined:
            self._check_inside(full, root, location, entry.path, "the folder of the manifest")
        return full

    def _check_inside(self, full: str, root: str, location: str, path_setting: str, folder_description: str) -> None:
        """Refuse a path outside a folder, by its parts or through a link."""
        plain = os.path.abspath(full)
        begin = os.path.abspath(root or ".")
        if not is_inside(plain, begin):
            raise _make_outside_folder_error(location, path_setting, folder_description)
        top = self._links.resolve(begin)
        real = self._links.resolve(strip_wildcard_part(plain))
        if not is_inside(real, top):
            raise _make_outside_folder_error(
                location, path_setting, f"{folder_description}, through a symbolic link to {real}"
            )


def _make_outside_folder_error(location: str, path_setting: str, folder_description: str) -> InputError:
    return InputError(
        f"{location}: {quote_value(path_setting)} lies outside of {folder_description}; move the data there, or "
        "give an absolute path without data_folder."
    )


def _format_hub_name(entry: DatasetEntry, location: str, *, has_rows: bool) -> str:
    """Return the name of a Hub data set, with config, split without rows, revision."""
    entry = replace(entry, split=None) if has_rows else entry
    name = parse_hub_name(entry.path)
    if name is None:
        raise AssertionError("only names of the Hub are formatted here")
    for word in ("config", "split", "revision"):
        path_value = getattr(name, word)
        entry_value = getattr(entry, word)
        if path_value and entry_value and path_value != entry_value and find_preset(entry.path) is None:
            raise SettingsError(
                [f"{location}.{word}: {entry_value!r} and path {entry.path!r} contradict each other; set only one"]
            )
        name = replace(name, **{word: entry_value or path_value})
    if not (entry.config or entry.split or entry.revision):
        # A local folder of the same name is not the data set that the manifest names.
        plain = find_hub_name(entry.path) is None and not (name.config or name.split)
        revision = f"@{name.revision}" if name.revision else ""
        return f"hf://datasets/{name.repo}{revision}" if plain else entry.path
    config = f":{name.config}" if name.config else ""
    split = f"/{name.split}" if name.split else ""
    revision = f"@{name.revision}" if name.revision else ""
    return f"{name.repo}{config}{split}{revision}"


def _check_hub_settings(entry: DatasetEntry, path: str, location: str) -> str:
    for word in ("config", "revision"):
        if getattr(entry, word):
            raise SettingsError(
                [f"{location}.{word}: applies only to Hub data sets, but path is {redact_url(path)!r}; leave it out"]
            )
    return path


def _split_path(entry: DatasetEntry, path: str, location: str) -> tuple[str, str | None]:
    """Return the folder of a split; else the path of a data set and the split."""
    inside = f"{path}/{entry.split}"
    if entry.split and "/" not in entry.split and os.path.isdir(inside):
        return _check_hub_settings(replace(entry, split=None), inside, location), None
    return _check_hub_settings(entry, path, location), entry.split


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
_MANIFEST_SUFFIXES = (".yaml", ".yml")
_DATASET_INFO_PATTERN = re.compile(r"(?:.*/)?dataset_info\.json(?::.*)?", re.DOTALL)


def _refuse_dataset_info(inputs: Iterable[str | DatasetConfig]) -> None:
    """Refuse the list of data sets of LLaMA-Factory and ms-swift."""
    for name in inputs:
        if isinstance(name, str) and not is_url_or_stdin(name) and _DATASET_INFO_PATTERN.fullmatch(name):
            raise InputError(
                f"{name} lists data sets of LLaMA-Factory or ms-swift, which is not read. Name their files, and give "
                "their keys as options: docs/how-to/coming-from says how."
            )


def is_manifest_path(value: object) -> bool:
    """Return whether an input is a YAML manifest; such files inside folders are not."""
    if not isinstance(value, str) or is_url_or_stdin(value):
        return False
    is_pattern = is_glob(value) and not os.path.lexists(value)
    return value.lower().endswith(_MANIFEST_SUFFIXES) and not is_pattern and not os.path.isdir(value)


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
        raise SettingsError(
            [f"inputs: {match[0]!r}: a number belongs to one data set; write num_samples: {count} into the file"]
        )
    return match[1], count


def check_no_manifests(inputs: Sequence[str], command: str) -> None:
    """Refuse manifests in a command that takes the files they list."""
    for path in inputs:
        if is_manifest_path(path):
            raise InputError(
                f"{path} is named like a manifest, which {command} does not read; name the files it lists, or "
                "inspect it with batchloom doctor."
            )
