"""From DatasetConfigs to the inputs of a recipe: where each data set lies, and what is said of it."""

import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import final

from batchloom.core.addresses import (
    STANDARD_INPUT,
    is_url,
    redact_url as address,
    strip_file_scheme,
)
from batchloom.core.errors import InputError, InputMissingError, SettingsError
from batchloom.core.settings import quote_value, raise_problems
from batchloom.core.synthetic_data import SYNTHETIC_NAMES
from batchloom.media import FrameSampling
from batchloom.preparation.request.manifest_inputs import is_manifest_path
from batchloom.preparation.settings import (
    FORM_BY_FORMAT,
    MULTIMODAL_TYPES,
    ConfigLocation,
    DatasetConfig,
    DatasetEntry,
    DatasetType,
    SourceRecipe,
)
from batchloom.sources import describe_missing_input, parse_hub_name, strip_wildcard_part
from batchloom.sources.files import LinkBounds, find_hub_name, find_preset, is_inside

_PRESET = "fineweb-edu"
_PROCESSOR_SETTINGS = ("max_pixels", "min_pixels", "kwargs", "extra_kwargs")
_MAX_LISTED = 5


@dataclass(frozen=True, slots=True)
class ExpandedInputs:
    """What inputs come to when every manifest is followed.

    Attributes:
        inputs: in order.
        sources: what is said of each.
        tokenizer: the one that is named; None for none.
        notes: what is to be told, one sentence each.
        multimodal: where it is said of a data set that it holds images or sounds, and what; empty for none.
        processor: the processor that is named for those; None for none.
        sampling: which frames of their videos are seen.
        follow_links: one of them asks to follow symbolic links that lead out of an input folder.
    """

    inputs: tuple[str, ...]
    sources: tuple[SourceRecipe, ...]
    tokenizer: str | None
    notes: tuple[str, ...]
    multimodal: str = ""
    processor: str | None = None
    sampling: FrameSampling = field(default_factory=FrameSampling)
    follow_links: bool = False


def expand_inputs(given: Sequence[str | DatasetConfig]) -> ExpandedInputs:
    """Inputs in order, each manifest and DatasetConfig replaced by the data sets it names.

    Raises:
        SettingsError: whatever is wrong with what a manifest says.
        InputMissingError: a manifest, or what one names, is not there.
        InputError: a manifest cannot be read, or names what lies outside of its folder.
    """
    inputs: list[str] = []
    sources: list[SourceRecipe] = []
    named: dict[str, str] = {}
    notes: list[str] = []
    multimodal: list[tuple[str, DatasetConfig]] = []
    follow_links = False
    for one in given:
        if isinstance(one, str) and not is_manifest_path(one):
            inputs.append(one)
            sources.append(SourceRecipe())
            continue
        config = DatasetConfig.load(strip_file_scheme(one)) if isinstance(one, str) else one
        notes += config.notes
        follow_links |= config.follow_links
        if config.tokenizer is not None:
            named.setdefault(config.tokenizer, str(config.written.file or "a DatasetConfig"))
        located = _locate_config(config)
        for place, source, kind in located:
            inputs.append(place)
            sources.append(source)
            if kind in MULTIMODAL_TYPES:
                multimodal.append((f"{source.place}: {kind!r}", config))
        if config.videos and not any(kind in MULTIMODAL_TYPES for *_, kind in located):
            said_by = config.written.file or "A DatasetConfig"
            notes.append(f"{said_by}: not used for texts: {', '.join(config.videos)}.")
    if len(named) > 1:
        (first, one_file), (second, other_file) = list(named.items())[:2]
        raise InputError(
            f"{one_file} names the tokenizer {first} and {other_file} {second}, and a store has one; choose with "
            "--tokenizer."
        )
    for where, config in multimodal:
        _check_processor_settings(where, config)
    processors = [name for _, config in multimodal if (name := config.tokenizer) is not None]
    return ExpandedInputs(
        tuple(inputs),
        tuple(sources),
        next(iter(named), None),
        tuple(notes),
        next((where for where, _ in multimodal), ""),
        next(iter(processors), None),
        _merge_sampling(multimodal),
        follow_links,
    )


def _merge_sampling(multimodal: Sequence[tuple[str, DatasetConfig]]) -> FrameSampling:
    """Which frames are seen of the videos of all data sets.

    Raises:
        InputError: two say so differently; names both.
    """
    said = [(where, config) for where, config in multimodal if config.videos]
    if not said:
        return FrameSampling()
    where, first = said[0]
    for other, config in said[1:]:
        if config.sampling != first.sampling:
            raise InputError(
                f"{where} and {other} say differently which frames of videos are seen, and a store has one way: write "
                "them alike, or prepare two stores."
            )
    return first.sampling


def _check_processor_settings(where: str, config: DatasetConfig) -> None:
    """Refuse settings of a processor, which would not be those that its files hold.

    Raises:
        SettingsError: names each.
    """
    said = config.processor_config
    given = [name for name in _PROCESSOR_SETTINGS if said is not None and getattr(said, name)]
    raise_problems(
        [
            f"{where} is read by the processor as its files say, and processor_config.{name} is "
            f"{quote_value(getattr(said, name))}: write it into {config.tokenizer}/preprocessor_config.json, and "
            f"leave it "
            "out here"
            for name in given
        ]
    )


def locate_inputs(
    entries: Sequence[DatasetEntry], written: ConfigLocation
) -> list[tuple[str, SourceRecipe]]:
    """The inputs of a recipe file: where each lies, and what is said of it.

    Raises:
        InputMissingError: names all that are not there.
        SettingsError: a data set of images or sounds, which a recipe reads by its own setting.
    """
    raise_problems(
        [
            f"{written.where('')}inputs[{number}].type: {entry.type!r} goes with no recipe; leave it out, and write "
            "media: {processor: FOLDER}"
            for number, entry in enumerate(entries)
            if entry.type in MULTIMODAL_TYPES
        ]
    )
    named = ((f"inputs[{number}]", entry, written) for number, entry in enumerate(entries))
    return [
        (place, source)
        for place, source, _ in _locate_entries(named, _DatasetLocator(written), "text")
    ]


def _locate_config(config: DatasetConfig) -> list[tuple[str, SourceRecipe, DatasetType]]:
    """The data sets of a config: where each lies, what is said of it, and its type."""
    return _locate_entries(
        _iter_entries(config), _DatasetLocator(config.written), config.dataset_type
    )


def _locate_entries(
    entries: Iterable[tuple[str, DatasetEntry, ConfigLocation]],
    places: "_DatasetLocator",
    usual: DatasetType,
) -> list[tuple[str, SourceRecipe, DatasetType]]:
    found = []
    for name, entry, written in entries:
        if written != places.written:
            places.raise_missing()
            places = _DatasetLocator(written)
        kind = entry.type or usual
        plain = kind == "fineweb_edu" and not entry.mapping and entry.text_field is None
        form = FORM_BY_FORMAT[entry.data_type] if entry.data_type else None
        source = SourceRecipe(
            text_field="text" if plain else entry.text_field,
            mapping=entry.mapping,
            ignore=entry.ignore or (),
            form=form,
            name=entry.name,
            weight=entry.weight,
            place=f"{written.file}, {written.block}{name}" if written.file else name,
        )
        found.append((places.find(entry, source.place), source, kind))
    places.raise_missing()
    return found


def _iter_entries(config: DatasetConfig) -> Iterator[tuple[str, DatasetEntry, ConfigLocation]]:
    """Each data set with its name in the file and where that was written."""
    form = None if config.dataset_format == "yaml" else config.dataset_format
    if config.dataset_path is None and config.datasets is None:
        yield "dataset_type", DatasetEntry(path=_PRESET), config.written
    elif config.datasets is not None:
        for number, entry in enumerate(config.datasets):
            said = (
                entry
                if entry.data_type or not form
                else entry.model_copy(update={"data_type": form})
            )
            yield f"datasets[{number}]", said, config.written
    elif config.dataset_format == "yaml" or is_manifest_path(config.dataset_path):
        yield from _iter_file_entries(config)
    else:
        name = "dataset_path" if config.written.has_block else "sft_dataset_name"
        entry = DatasetEntry(path=str(config.dataset_path), data_type=form)
        yield name, entry, config.written


def _iter_file_entries(config: DatasetConfig) -> Iterator[tuple[str, DatasetEntry, ConfigLocation]]:
    """The data sets of the file that a block names."""
    written = config.written
    places = _DatasetLocator(written, lists=True)
    place = f"{written.file}, {written.block}dataset_path" if written.file else "dataset_path"
    path = places.find(DatasetEntry(path=str(config.dataset_path)), place)
    places.raise_missing()
    inner = DatasetConfig.load(path)
    if inner.datasets is None or inner.written.has_block:
        raise InputError(
            f"{place}: {path} holds more than a list of data sets; write datasets: and the list into it, and nothing "
            "else."
        )
    for number, entry in enumerate(inner.datasets):
        yield f"datasets[{number}]", entry, inner.written


@final
@dataclass
class _DatasetLocator:
    """Finds where data sets lie, seen from the file they are written in."""

    written: ConfigLocation
    lists: bool = False
    missing: list[tuple[str, str]] = field(default_factory=list)
    far: bool = False
    _links: LinkBounds = field(default_factory=LinkBounds)

    def find(self, entry: DatasetEntry, place: str) -> str:
        """The input that a data set is; what is not there is kept for ``raise_missing``."""
        if entry.path == STANDARD_INPUT and self.written.recipe:
            return entry.path
        if entry.path == STANDARD_INPUT:
            raise InputError(
                f"{place}: '-' is standard input, which is no data set of a manifest; give it beside the manifest."
            )
        if is_url(entry.path) or is_url(entry.data_folder or ""):
            return _check_hub_settings(entry, self._url(entry, place), place)
        path = self._path(entry, place)
        if os.path.lexists(path):
            if is_manifest_path(path) and entry.data_type is None and not self.lists:
                raise InputError(
                    f"{place}: {path} is a manifest by its name, and a list holds no lists; write its data sets here."
                )
            return _split_path(entry, path, place)
        if self._may_be_remote(entry):
            return _format_hub_name(entry, place)
        if self.written.recipe and entry.path.partition(":")[0] in SYNTHETIC_NAMES:
            return entry.path
        if not (glob.has_magic(path) and os.path.isdir(strip_wildcard_part(path))):  # noqa: PTH112
            self.missing.append((place, path))
            self.far = self.far or (
                not entry.data_folder and parse_hub_name(entry.path) is not None
            )
        return path

    def raise_missing(self) -> None:
        """Raise one error for everything that is not there.

        Raises:
            InputMissingError: names the first, and where the others stand.
        """
        if not self.missing:
            return
        (place, path), *others = self.missing
        told = ", ".join(f"{other} ({where})" for where, other in others[:_MAX_LISTED])
        told = f"; missing too: {told}" if told else ""
        more = f" and {len(others) - _MAX_LISTED:,} more" if len(others) > _MAX_LISTED else ""
        sentence = f"{describe_missing_input(path).rstrip('.')}{told}{more}"
        end = "" if sentence.endswith("?") else "."
        raise InputMissingError(f"{place}: {sentence}{end}{self._hint()}")

    def _hint(self) -> str:
        """Where what is missing may be, where that can be told; with a space before it."""
        if self._exists_from_current_folder():
            return " Relative paths begin at the folder of the file that names them."
        return " A data set of the Hub has data_type: hf_dataset, or none." if self.far else ""

    def _exists_from_current_folder(self) -> bool:
        """Whether what is missing is there, seen from the current folder."""
        folder = str(self.written.file.parent) if self.written.file else "."
        return folder != "." and any(
            os.path.lexists(os.path.relpath(path, folder)) for _, path in self.missing
        )

    def _may_be_remote(self, entry: DatasetEntry) -> bool:
        if entry.data_folder or entry.data_type not in (None, "hf_dataset"):
            return False
        if entry.data_type or entry.config or entry.split or entry.revision:
            return parse_hub_name(entry.path) is not None
        folder = "" if self.written.file is None else str(self.written.file.parent)
        return find_hub_name(entry.path, folder) is not None

    def _url(self, entry: DatasetEntry, place: str) -> str:
        folder = (entry.data_folder or "").rstrip("/")
        if not folder:
            return entry.path
        inside = entry.path.removeprefix(f"{folder}/")
        if is_url(inside) or os.path.isabs(inside) or ".." in inside.split("/"):  # noqa: PTH117
            raise _outside_folder_error(
                place, address(entry.path), f"its data_folder {address(folder)}"
            )
        return f"{folder}/{inside}" if is_url(folder) else self._raise_mixed_paths(entry, place)

    def _raise_mixed_paths(self, entry: DatasetEntry, place: str) -> str:
        raise _outside_folder_error(
            place, address(entry.path), f"its data_folder {entry.data_folder}"
        )

    @property
    def _is_confined(self) -> bool:
        """Whether relative paths stay below the folder of the file."""
        return self.written.file is not None and not self.written.recipe

    def _path(self, entry: DatasetEntry, place: str) -> str:
        """The path of a data set of this machine."""
        here = "" if self.written.file is None else str(self.written.file.parent)
        # What is written out in full may lie anywhere; what is relative stays below where it begins.
        folder = os.path.expanduser(strip_file_scheme(entry.data_folder or ""))  # noqa: PTH111
        if folder and not os.path.isabs(folder):  # noqa: PTH117
            full = os.path.join(here, folder)  # noqa: PTH118
            if self._is_confined:
                self._stay(full, here, place, entry.data_folder or "", "the folder of the manifest")
            folder = full
        path = os.path.expanduser(strip_file_scheme(entry.path))  # noqa: PTH111
        root = folder or here
        full = os.path.normpath(os.path.join(root, path))  # noqa: PTH118
        if folder:
            self._stay(full, root, place, entry.path, f"its data_folder {entry.data_folder}")
        elif not os.path.isabs(path) and self._is_confined:  # noqa: PTH117
            self._stay(full, root, place, entry.path, "the folder of the manifest")
        return full

    def _stay(self, full: str, root: str, place: str, given: str, what: str) -> None:
        """Refuse a path that is not below a folder, by its parts or by where a link leads."""
        plain, begin = os.path.abspath(full), os.path.abspath(root or ".")  # noqa: PTH100
        if not is_inside(plain, begin):
            raise _outside_folder_error(place, given, what)
        top, real = self._links.resolve(begin), self._links.resolve(strip_wildcard_part(plain))
        if not is_inside(real, top):
            raise _outside_folder_error(place, given, f"{what}, through a symbolic link to {real}")


def _outside_folder_error(place: str, given: str, what: str) -> InputError:
    return InputError(
        f"{place}: {quote_value(given)} lies outside of {what}; put the data there, or write the path out in full, "
        f"from "
        "its / on, without data_folder."
    )


def _format_hub_name(entry: DatasetEntry, place: str) -> str:
    """The name of a data set of the Hub, with what is said beside its path."""
    name = parse_hub_name(entry.path)
    if name is None:
        raise AssertionError("only names of the Hub come here")
    for word in ("config", "split", "revision"):
        said, beside = getattr(name, word), getattr(entry, word)
        if said and beside and said != beside and find_preset(entry.path) is None:
            raise SettingsError(
                [
                    f"{place}.{word}: {beside!r} and path {entry.path!r} contradict each other; say it once"
                ]
            )
        name = replace(name, **{word: beside or said})
    if not (entry.config or entry.split or entry.revision):
        # A folder of that name where the job runs is not what the manifest names.
        plain = find_hub_name(entry.path) is None and not (name.config or name.split)
        revision = f"@{name.revision}" if name.revision else ""
        return f"hf://datasets/{name.repo}{revision}" if plain else entry.path
    config = f":{name.config}" if name.config else ""
    split = f"/{name.split}" if name.split else ""
    revision = f"@{name.revision}" if name.revision else ""
    return f"{name.repo}{config}{split}{revision}"


def _check_hub_settings(entry: DatasetEntry, path: str, place: str) -> str:
    for word in ("split", "config", "revision"):
        if getattr(entry, word):
            raise SettingsError(
                [
                    f"{place}.{word}: belongs to a data set of the Hub, and path is {address(path)!r}; leave it out"
                ]
            )
    return path


def _split_path(entry: DatasetEntry, path: str, place: str) -> str:
    """A saved data set's split is a folder in it; other files have none."""
    inside = f"{path}/{entry.split}"
    if entry.split and "/" not in entry.split and os.path.isdir(inside):  # noqa: PTH112
        return _check_hub_settings(entry.model_copy(update={"split": None}), inside, place)
    return _check_hub_settings(entry, path, place)
