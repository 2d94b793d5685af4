"""``DatasetConfig``: data sets, formats and packing as one checked value.

Its names and defaults are those of other trainers' data set blocks.
"""

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from batchloom.core.errors import SettingsError
from batchloom.core.settings import (
    Setting,
    WrittenForm,
    build_settings,
    find_choice_problem,
    find_problems,
    find_unknown_settings,
    is_text,
    parse_short_forms,
    quote_value,
    raise_problems,
    suggest,
)
from batchloom.media import PIXEL_LIMITS, FrameSampling
from batchloom.plan import PlanSpec
from batchloom.preparation.settings.dataset_file import ConfigLocation, read_dataset_file
from batchloom.preparation.settings.read_recipe import SourceRecipe, parse_folder, parse_path
from batchloom.sources.formats import InputFormat

DatasetType = Literal["text", "fineweb_edu", "vision", "vision_audio"]
# Dataset types that are read with a processor, and never split.
MULTIMODAL_TYPES = ("vision", "vision_audio")
# lmms-engine's other names of dataset types that hold the same records.
_TYPE_ALIASES = {
    "vision_iterable": "vision",
    "qwen3_vl": "vision",
    "qwen3_vl_iterable": "vision",
    "qwen_omni": "vision_audio",
    "qwen_omni_iterable": "vision_audio",
}
# lmms-engine's dataset types that have no equivalent, and what they do.
_REFUSED_TYPES = {
    "llava_video": "writes the times of frames into prompts and joins frames in its own processor",
    "llava_ov2_iterable": "reads the streams of video codecs for its own model",
    "aero_realtime_iterable": "aligns speech and text by time for its own model",
    "bagel_iterable": "trains a model that generates images",
    "rae": "trains an image encoder, without text",
    "sit": "trains a model that generates images of a class, without text",
}
# Settings of other trainers that do not apply to texts: accepted, with a note.
_UNUSED_SETTINGS = (
    "eval_dataset_path",
    "object_storage",
    "bucket_name",
    "filter_overlong_workers",
    "max_length",
    "data_seed",
    "extra_kwargs",
    "video_backend",
)
# Video settings, by their names in this class.
_VIDEO_FIELDS = {
    "fps": "fps",
    "frame_num": "frames",
    "video_max_frames": "max_frames",
    "video_min_pixels": "min_pixels",
    "video_max_pixels": "max_pixels",
}
_VIDEO_SETTINGS = ("video_sampling_strategy", *_VIDEO_FIELDS)
# Settings of lmms-engine's processors, by the settings of the image processor that they set.
_EXTRA_SETTINGS = {"image_max_pixels": "max_pixels", "image_min_pixels": "min_pixels"}
_REFUSED_EXTRA_SETTINGS = {
    **dict.fromkeys(
        ("video_max_pixels", "video_min_pixels"),
        "videos are read as images; write it next to dataset_type, where it limits the pixels of a frame",
    ),
    "audio_max_length": "sounds are never cut; split the files, and leave it out",
}
_DEFAULT_LENGTH = 32_000


def _find_type_problem(value: object) -> str:
    if isinstance(value, str) and value in _REFUSED_TYPES:
        return f"of lmms-engine {_REFUSED_TYPES[value]}; train it with lmms-engine"
    return find_choice_problem(value, get_args(DatasetType))


def _find_path_problem(value: object) -> str:
    return "" if is_text(value) and "\0" not in str(value) else "is not a text; write a path"


def _find_mapping_problem(value: object) -> str:
    return "" if isinstance(value, Mapping) else "is not a mapping"


_DATASET_TYPE = Setting(
    help="Type of the data sets: text, fineweb_edu (a column called text), vision (conversations with images) or "
    "vision_audio (images and audio); also lmms-engine's names for these.",
    check=_find_type_problem,
    parse=lambda name: _TYPE_ALIASES.get(name, name) if isinstance(name, str) else name,
)


@dataclass(frozen=True, kw_only=True)
class ProcessorConfig:
    """Settings of the tokenizer or processor."""

    processor_name: Annotated[
        str,
        Setting(
            help="Tokenizer, as prepare takes it: a path or a Hub id; also the processor of images and audio.",
            check=lambda _: "",
        ),
    ] = ""
    processor_type: Annotated[
        str | None,
        Setting(help="Kind of the processor; used only without processor_name, as a path or a Hub id."),
    ] = None
    max_pixels: Annotated[int | None, Setting(help="Maximum pixels of a resized image.")] = None
    min_pixels: Annotated[int | None, Setting(help="Minimum pixels of a resized image.")] = None
    kwargs: Annotated[
        Mapping[str, Any] | None,
        Setting(
            help="Settings of the image processor by name, which override those in its files.",
            check=_find_mapping_problem,
        ),
    ] = None
    extra_kwargs: Annotated[
        Mapping[str, Any] | None,
        Setting(
            help="lmms-engine's settings: image_max_pixels and image_min_pixels. Others are refused.",
            check=_find_mapping_problem,
        ),
    ] = None

    def __post_init__(self) -> None:
        kind: object = self.processor_type
        if self.processor_name == "" and isinstance(kind, str) and ("/" in kind or Path(kind).is_dir()):
            object.__setattr__(self, "processor_name", kind)
        missing = "missing; give a path or a Hub id" if self.processor_name == "" else ""
        problem = missing or _find_path_problem(self.processor_name)
        raise_problems(find_problems(self) + ([f"processor_name: {problem}"] if problem else []))

    def read_image_settings(self) -> dict[str, Any]:
        """Return the settings of the image processor that override those in its files.

        Raises:
            SettingsError: settings that have no effect here, or are given twice.
        """
        settings: dict[str, Any] = {}
        problems = []
        given = {name: value for name in PIXEL_LIMITS if (value := getattr(self, name)) is not None}
        for prefix, group in (("", given), ("kwargs.", self.kwargs or {}), ("extra_kwargs.", self.extra_kwargs or {})):
            for key, value in group.items():
                name = _EXTRA_SETTINGS.get(key, "") if prefix == "extra_kwargs." else key
                if not name:
                    reason = _REFUSED_EXTRA_SETTINGS.get(key) or f"unknown setting{suggest(key, _EXTRA_SETTINGS)}"
                    problems.append(f"processor_config.{prefix}{key}: {reason}")
                elif name in settings:
                    problems.append(f"processor_config.{prefix}{key}: sets {name}, which is set before; leave one out")
                else:
                    settings[name] = value
        raise_problems(problems)
        return settings


@dataclass(frozen=True, kw_only=True)
class DatasetEntry(SourceRecipe):
    """One data set of a list: its location, and the settings of an input."""

    path: Annotated[
        str,
        Setting(
            help="File, folder, glob, URL or data set of the Hub; relative to the manifest's folder or to data_folder.",
            check=_find_path_problem,
            parse=parse_path,
        ),
    ]
    data_folder: Annotated[
        str | None,
        Setting(help="Base folder of path; None for the manifest's.", check=_find_path_problem, parse=parse_folder),
    ] = None
    type: Annotated[DatasetType | None, _DATASET_TYPE] = None
    config: Annotated[str | None, Setting(help="Configuration of a data set of the Hub.")] = None
    revision: Annotated[str | None, Setting(help="Revision of a data set of the Hub.")] = None

    def __post_init__(self) -> None:
        raise_problems([problem.replace("map.", "mapping.", 1) for problem in self.problems()])


def parse_entries(listed: object, path: str = "datasets") -> tuple[DatasetEntry, ...]:
    """Parse data sets from a list of mappings and entries, whose path is ``path``.

    Raises:
        SettingsError: all problems, each with its path.
    """
    if not isinstance(listed, list | tuple):
        raise SettingsError([f"{path}: {quote_value(listed)} is not a list"])
    entries = list[DatasetEntry]()
    problems = list[str]()
    for number, entry in enumerate(listed):
        try:
            is_made = isinstance(entry, DatasetEntry)
            entries.append(entry if is_made else build_settings(DatasetEntry, entry, f"{path}[{number}]."))
        except SettingsError as error:
            problems += error.problems
    names = [entry.get("name") if isinstance(entry, Mapping) else getattr(entry, "name", None) for entry in listed]
    problems += [
        f"{path}: two are called {name!r}; a name is one data set's alone"
        for name, count in Counter(name for name in names if isinstance(name, str)).items()
        if count > 1
    ]
    raise_problems(problems)
    return tuple(entries)


def _parse_processor(value: object) -> ProcessorConfig:
    return value if isinstance(value, ProcessorConfig) else build_settings(ProcessorConfig, value, "processor_config.")


@dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """Data sets and their packing; ``load`` reads one from a YAML file.

    ``batchloom.prepare`` takes it as an input; ``plan_settings`` are those of a ``Loader``. Its settings are described
    in the reference of settings. Data sets and the processor may be given as mappings.

    Raises:
        SettingsError: all problems, each with its path.
    """

    dataset_type: Annotated[DatasetType, _DATASET_TYPE] = "text"
    dataset_format: Annotated[
        Literal[InputFormat, "yaml"] | None,
        Setting(help="Format of the files, or yaml: a file with a list of data sets.", shown_default="detected"),
    ] = None
    dataset_path: Annotated[
        str | None, Setting(help="File, folder, glob, URL or Hub id.", check=_find_path_problem, parse=parse_path)
    ] = None
    datasets: Annotated[tuple[DatasetEntry, ...] | None, WrittenForm(parse=parse_entries)] = None
    processor_config: Annotated[ProcessorConfig | None, WrittenForm(parse=_parse_processor)] = None
    shuffle: Annotated[bool, Setting(help="Shuffle documents.")] = True
    packing: Annotated[bool, Setting(help="Put several documents into a sequence.")] = False
    packing_length: Annotated[
        int | None, Setting(help="Tokens of a sequence.", check=lambda _: "", shown_default=f"{_DEFAULT_LENGTH:,}")
    ] = None
    packing_strategy: Annotated[
        str, Setting(help="Packing: first_fit, window_N, best_fit or wrap.", check=lambda _: "")
    ] = "first_fit"
    filter_overlong: Annotated[
        bool,
        Setting(
            help="Drop documents longer than a sequence. Otherwise they are split; documents with images or audio, "
            "which are never split, are refused."
        ),
    ] = True
    follow_links: Annotated[
        bool, Setting(help="Follow symbolic links that lead out of a data folder; else they are skipped.")
    ] = False
    videos: Annotated[
        Mapping[str, Any],
        Setting(
            help="Frame sampling of videos: fps or frame_num (video_sampling_strategy chooses one if both are given), "
            "video_max_frames, video_min_pixels, video_max_pixels. In a file these keys may also be next to the other "
            "settings.",
            check=_find_mapping_problem,
        ),
    ] = field(default_factory=dict)
    location: ConfigLocation = field(default_factory=ConfigLocation, compare=False, repr=False)

    def __post_init__(self) -> None:
        # A call may hold short forms, too.
        values, problems = parse_short_forms([DatasetConfig], vars(self))
        for name, value in values.items():
            object.__setattr__(self, name, value)
        problems += [*find_problems(self), *_find_source_problems(self)]
        if isinstance(self.videos, Mapping):
            problems += _find_video_problems(self.videos)
        try:
            length = 1 if self.packing_length is None else self.packing_length
            PlanSpec(seq_len=length, packing=self.packing_strategy, global_batch_size=1)
        except SettingsError as error:
            names = {"seq_len": "packing_length", "packing": "packing_strategy"}
            parts = [problem.partition(":") for problem in error.problems]
            problems += [f"{names.get(name, name)}:{message}" for name, _, message in parts]
        raise_problems(problems)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Load the data sets of a YAML file: a list, a block, or a trainer's file.

        Raises:
            InputMissingError: the file is missing or empty.
            RecordError: it is not valid YAML; with line and column.
            SettingsError: all problems of its settings, each with its path.
        """
        values, location = read_dataset_file(Path(path))
        unused = [name for name in _UNUSED_SETTINGS if values.get(name) not in (None, {}, "none")]
        settings = {name: value for name, value in values.items() if name not in _UNUSED_SETTINGS and value is not None}
        videos = {name: settings.pop(name) for name in _VIDEO_SETTINGS if name in settings}
        if videos and isinstance(settings.get("videos", {}), Mapping):
            settings["videos"] = {**settings.get("videos", {}), **videos}
        try:
            config = build_settings(cls, settings)
        except SettingsError as error:
            location_prefix = location.describe(location.block)
            raise SettingsError([f"{location_prefix}{problem}" for problem in error.problems]) from None
        if unused:
            location = location.with_note(f"not used of it: {', '.join(unused)}")
        return replace(config, location=location)

    @property
    def tokenizer(self) -> str | None:
        """The tokenizer, as ``prepare`` takes it, and the processor of media, or None."""
        if self.processor_config is None:
            return None
        return self.location.resolve_path(self.processor_config.processor_name)

    @property
    def sampling(self) -> FrameSampling:
        """The frame sampling of videos."""
        return _make_sampling(self.videos)

    @property
    def multimodal(self) -> bool:
        """True if it declares images or audio; a list in another file may do so, too."""
        dataset_types = [self.dataset_type, *(entry.type for entry in self.datasets or ())]
        return any(dataset_type in MULTIMODAL_TYPES for dataset_type in dataset_types)

    def plan_settings(self, longest: int | None = None) -> dict[str, Any]:
        """Return the settings of a ``Loader`` (or ``PlanSpec``) that it states.

        Empty for a bare list: a file with a list of data sets, or a trainer's, does not state packing.

        Args:
            longest: maximum tokens that a model takes; limits the default length.
        """
        if not self.location.has_block:
            return {}
        fallback_policy = "error" if self.multimodal else "split"
        return {
            "seq_len": self.packing_length or min(_DEFAULT_LENGTH, longest or _DEFAULT_LENGTH),
            "packing": self.packing_strategy if self.packing else "none",
            "overlong": "drop" if self.filter_overlong else fallback_policy,
            "shuffle": self.shuffle,
        }


def _find_source_problems(config: DatasetConfig) -> list[str]:
    listed = config.datasets
    if config.dataset_path is not None and listed is not None:
        return ["dataset_path: goes with no datasets; write the one or the other"]
    if listed == ():
        return ["datasets: there are none; write at least one"]
    # The name of this type selects a preset.
    is_preset = config.dataset_type == "fineweb_edu" and config.dataset_format in (None, "hf_dataset")
    if config.dataset_path is None and listed is None and not is_preset:
        return ["dataset_path: missing; write it, or a list under datasets"]
    return []


def _find_video_problems(video_settings: Mapping[str, Any]) -> list[str]:
    problems = find_unknown_settings(video_settings, _VIDEO_SETTINGS, "videos.")
    try:
        _make_sampling(video_settings)
    except SettingsError as error:
        problems += error.problems
    return problems


def _make_sampling(video_settings: Mapping[str, Any]) -> FrameSampling:
    """Return the frame sampling that video settings describe."""
    default_strategy = "frame_num" if "frame_num" in video_settings and "fps" not in video_settings else "fps"
    strategy = video_settings.get("video_sampling_strategy", default_strategy)
    if problem := find_choice_problem(strategy, ("fps", "frame_num")):
        raise SettingsError([f"video_sampling_strategy: {quote_value(strategy)} {problem}"])
    if strategy == "frame_num" and "frame_num" not in video_settings:
        raise SettingsError(["frame_num: there is none, and video_sampling_strategy is frame_num"])
    ignored_setting = "fps" if strategy == "frame_num" else "frame_num"
    names = {
        sampling_field: name
        for name, sampling_field in _VIDEO_FIELDS.items()
        if name in video_settings and name != ignored_setting
    }
    try:
        return FrameSampling(**{sampling_field: video_settings[name] for sampling_field, name in names.items()})
    except SettingsError as error:
        parts = [problem.partition(":") for problem in error.problems]
        raise SettingsError(
            [f"{names.get(sampling_field, sampling_field)}:{message}" for sampling_field, _, message in parts]
        ) from None
