"""Expansion of DatasetConfigs into recipe inputs: locations and settings."""

import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

from batchloom.core.addresses import STANDARD_INPUT, is_url, redact_url as address, strip_file_scheme
from batchloom.core.errors import InputError, InputMissingError, SettingsError
from batchloom.core.settings import quote_value, raise_problems
from batchloom.core.synthetic_data import SYNTHETIC_NAMES
from batchloom.core.wording import format_list
from batchloom.media import FrameSampling
from batchloom.preparation.request.inputs import (
    ResolvedInputs,
    default_tokenizer,
    hoist_common_settings,
    is_manifest_path,
    split_sample_count,
)
from batchloom.preparation.settings.config_location import ConfigLocation, FileSetting
from batchloom.preparation.settings.dataset_config import (
    MULTIMODAL_TYPES,
    DatasetConfig,
    DatasetEntry,
    DatasetType,
)
from batchloom.preparation.settings.media_recipe import MediaRecipe
from batchloom.preparation.settings.read_recipe import ReadRecipe, SourceRecipe
from batchloom.sources import (
    LinkBounds,
    describe_missing_input,
    find_hub_name,
    find_preset,
    is_inside,
    parse_hub_name,
    strip_wildcard_part,
)

_PRESET = "fineweb-edu"
_MAX_LISTED = 5


def expand_inputs(
    input_arguments: Sequence[str | DatasetConfig], reading: ReadRecipe, tokenizer: str | None
) -> ResolvedInputs:
    """Replace each manifest and DatasetConfig by the data sets it names, in order."""
    inputs: list[str] = []
    sources: list[SourceRecipe] = []
    tokenizer_files: dict[str, str] = {}
    notes: list[str] = []
    multimodal: list[tuple[str, DatasetConfig]] = []
    follow_links = False
    settings: list[tuple[str, FileSetting]] = []
    for argument in input_arguments:
        if isinstance(argument, str) and not is_manifest_path(argument):
            path, sample_count = split_sample_count(argument)
            inputs.append(path)
            sources.append(SourceRecipe(num_samples=sample_count))
            continue
        config = DatasetConfig.load(strip_file_scheme(argument)) if isinstance(argument, str) else argument
        notes += config.notes
        follow_links |= config.follow_links
        settings += config.location.settings.items()
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
    return ResolvedInputs(
        tuple(inputs),
        hoisted_sources,
        reading,
        tokenizer,
        tuple(notes),
        follow_links,
        tuple(settings),
    )


def _add_media(reading: ReadRecipe, multimodal: Sequence[tuple[str, DatasetConfig]]) -> ReadRecipe:
    """Add the processor and the frame sampling that data sets with media declare."""
    sampling, image_settings = _merge_sampling(multimodal), _merge_image_settings(multimodal)
    if multimodal and reading.media is None:
        processor = next((name for _, config in multimodal if (name := config.tokenizer) is not None), None)
        if processor is None:
            raise InputError(
                f"{multimodal[0][0]} needs a processor, but none is given: write "
                "processor_config: {processor_name: FOLDER}, or give --processor."
            )
        reading = replace(reading, media=MediaRecipe(processor=processor))
    if reading.media is not None and reading.media.sampling == FrameSampling():
        reading = replace(reading, media=replace(reading.media, sampling=sampling))
    if reading.media is not None and not reading.media.image_settings:
        reading = replace(reading, media=replace(reading.media, image_settings=image_settings))
    return reading


def _merge_sampling(multimodal: Sequence[tuple[str, DatasetConfig]]) -> FrameSampling:
    """Return the common frame sampling of all data sets."""
    video_configs = [(location, config) for location, config in multimodal if config.videos]
    if not video_configs:
        return FrameSampling()
    location, first = video_configs[0]
    for other_location, config in video_configs[1:]:
        if config.sampling != first.sampling:
            raise InputError(
                f"{location} and {other_location} sample video frames differently, but a store has one frame "
                "sampling: use equal settings, or prepare two stores."
            )
    return first.sampling


def _merge_image_settings(multimodal: Sequence[tuple[str, DatasetConfig]]) -> dict[str, Any]:
    """Return the common settings of the image processor of all data sets."""
    named_settings = []
    for location, config in multimodal:
        try:
            settings = config.processor_config.read_image_settings() if config.processor_config else {}
        except SettingsError as error:
            raise SettingsError([f"{location}: {problem}" for problem in error.problems]) from None
        if settings:
            named_settings.append((location, settings))
    for location, settings in named_settings[1:]:
        if settings != named_settings[0][1]:
            raise InputError(
                f"{named_settings[0][0]} and {location} set the image processor differently, but a store has one "
                "processor: use equal settings, or prepare two stores."
            )
    return named_settings[0][1] if named_settings else {}


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
        source = SourceRecipe(
            text_field="text" if plain else entry.text_field,
            mapping=entry.mapping,
            ignore=entry.ignore or (),
            form=None if entry.data_type == "yaml" else entry.data_type,
            name=entry.name,
            weight=entry.weight,
            max_samples=entry.max_samples,
            num_samples=entry.num_samples,
            media_folder=locator.resolve_media_folder(entry, name),
            location=f"{config_location.file}, {config_location.block}{name}" if config_location.file else name,
            column_keys=config_location.column_keys,
        )
        located.append((locator.find(entry, source.location), source, kind))
    locator.raise_missing()
    return located


def _iter_entries(config: DatasetConfig) -> Iterator[tuple[str, DatasetEntry, ConfigLocation]]:
    """Yield each data set with its name in the file and the file's location."""
    form = None if config.dataset_format == "yaml" else config.dataset_format
    if config.dataset_path is None and config.datasets is None:
        yield "dataset_type", DatasetEntry(path=_PRESET), config.location
    elif config.datasets is not None:
        for number, entry in enumerate(config.datasets):
            typed_entry = entry if entry.data_type or not form else entry.model_copy(update={"data_type": form})
            names = config.location.entry_names
            yield names[number] if names else f"datasets[{number}]", typed_entry, config.location
    elif config.dataset_format == "yaml" or is_manifest_path(config.dataset_path):
        yield from _iter_file_entries(config)
    else:
        name = "dataset_path" if config.location.has_block else "sft_dataset_name"
        entry = DatasetEntry(path=str(config.dataset_path), data_type=form)
        yield name, entry, config.location


def _iter_file_entries(config: DatasetConfig) -> Iterator[tuple[str, DatasetEntry, ConfigLocation]]:
    """Yield the data sets of the file that a block names."""
    config_location = config.location
    locator = _DatasetLocator(config_location, lists=True)
    location = (
        f"{config_location.file}, {config_location.block}dataset_path" if config_location.file else "dataset_path"
    )
    path = locator.find(DatasetEntry(path=str(config.dataset_path)), location)
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

    def find(self, entry: DatasetEntry, location: str) -> str:
        """Return the input of a data set; missing ones are recorded for ``raise_missing``."""
        if entry.path == STANDARD_INPUT and self.config_location.recipe:
            return entry.path
        if entry.path == STANDARD_INPUT:
            raise InputError(
                f"{location}: '-' is standard input, which a manifest cannot list; give it next to the manifest."
            )
        if is_url(entry.path) or is_url(entry.data_folder or ""):
            return _check_hub_settings(entry, self._resolve_url(entry, location), location)
        path = self._resolve_path(entry, location)
        if os.path.lexists(path):
            if is_manifest_path(path) and entry.data_type is None and not self.lists:
                raise InputError(
                    f"{location}: {path} is named like a manifest, but manifests cannot be nested; list its data sets "
                    "here."
                )
            return _split_path(entry, path, location)
        if self._may_be_remote(entry):
            return _format_hub_name(entry, location)
        if self.config_location.recipe and entry.path.partition(":")[0] in SYNTHETIC_NAMES:
            return entry.path
        if not (glob.has_magic(path) and os.path.isdir(strip_wildcard_part(path))):  # noqa: PTH112
            self.missing.append((location, path))
            self.has_hub_name = self.has_hub_name or (not entry.data_folder and parse_hub_name(entry.path) is not None)
        return path

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
        if is_url(inside) or os.path.isabs(inside) or ".." in inside.split("/"):  # noqa: PTH117
            raise _make_outside_folder_error(location, address(entry.path), f"its data_folder {address(folder)}")
        if not is_url(folder):
            raise _make_outside_folder_error(location, address(entry.path), f"its data_folder {entry.data_folder}")
        return f"{folder}/{inside}"

    @property
    def _is_confined(self) -> bool:
        """True if relative paths must stay below the folder of the file."""
        return self.config_location.file is not None and not self.config_location.recipe

    def resolve_media_folder(self, entry: DatasetEntry, name: str) -> str | None:
        """Return the base folder of a data set's media paths; None for the default."""
        if not entry.media_folder or is_url(entry.media_folder):
            return entry.media_folder or None
        folder = entry.model_copy(update={"path": entry.media_folder, "data_folder": None})
        return self._resolve_path(folder, f"{self.config_location.describe('')}{name}.media_folder")

    def _resolve_path(self, entry: DatasetEntry, location: str) -> str:
        """Return the local path of a data set."""
        config_folder = "" if self.config_location.file is None else str(self.config_location.file.parent)
        # Absolute paths are free; relative ones must stay below their base folder.
        folder = os.path.expanduser(strip_file_scheme(entry.data_folder or ""))  # noqa: PTH111
        if folder and not os.path.isabs(folder):  # noqa: PTH117
            full = os.path.join(config_folder, folder)  # noqa: PTH118
            if self._is_confined:
                self._check_inside(full, config_folder, location, entry.data_folder or "", "the folder of the manifest")
            folder = full
        path = os.path.expanduser(strip_file_scheme(entry.path))  # noqa: PTH111
        root = folder or config_folder
        full = os.path.normpath(os.path.join(root, path))  # noqa: PTH118
        if folder:
            self._check_inside(full, root, location, entry.path, f"its data_folder {entry.data_folder}")
        elif not os.path.isabs(path) and self._is_confined:  # noqa: PTH117
            self._check_inside(full, root, location, entry.path, "the folder of the manifest")
        return full

    def _check_inside(self, full: str, root: str, location: str, path_setting: str, folder_description: str) -> None:
        """Refuse a path outside a folder, by its parts or through a link."""
        plain, begin = os.path.abspath(full), os.path.abspath(root or ".")  # noqa: PTH100
        if not is_inside(plain, begin):
            raise _make_outside_folder_error(location, path_setting, folder_description)
        top, real = self._links.resolve(begin), self._links.resolve(strip_wildcard_part(plain))
        if not is_inside(real, top):
            raise _make_outside_folder_error(
                location, path_setting, f"{folder_description}, through a symbolic link to {real}"
            )


def _make_outside_folder_error(location: str, path_setting: str, folder_description: str) -> InputError:
    return InputError(
        f"{location}: {quote_value(path_setting)} lies outside of {folder_description}; move the data there, or "
        "give an absolute path without data_folder."
    )


def _format_hub_name(entry: DatasetEntry, location: str) -> str:
    """Return the name of a Hub data set, with its config, split and revision."""
    name = parse_hub_name(entry.path)
    if name is None:
        raise AssertionError("only names of the Hub are formatted here")
    for word in ("config", "split", "revision"):
        path_value, entry_value = getattr(name, word), getattr(entry, word)
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
    for word in ("split", "config", "revision"):
        if getattr(entry, word):
            raise SettingsError(
                [f"{location}.{word}: applies only to Hub data sets, but path is {address(path)!r}; leave it out"]
            )
    return path


def _split_path(entry: DatasetEntry, path: str, location: str) -> str:
    """Return the path of a split of a saved data set; other files have none."""
    inside = f"{path}/{entry.split}"
    if entry.split and "/" not in entry.split and os.path.isdir(inside):  # noqa: PTH112
        return _check_hub_settings(entry.model_copy(update={"split": None}), inside, location)
    return _check_hub_settings(entry, path, location)
