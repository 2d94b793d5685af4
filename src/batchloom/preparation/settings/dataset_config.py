"""``DatasetConfig``: data sets, formats and packing as one checked value.

Its names and defaults are those of other trainers' data set blocks.
"""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationError,
    model_validator,
)

from batchloom.core.errors import SettingsError
from batchloom.core.settings import (
    find_unknown_settings,
    is_positive_number,
    is_text,
    quote_value,
    raise_problems,
    suggest,
)
from batchloom.media import PIXEL_LIMITS, FrameSampling
from batchloom.plan import PlanSpec
from batchloom.preparation.settings.config_location import ConfigLocation
from batchloom.preparation.settings.dataset_file import read_dataset_file
from batchloom.preparation.settings.read_recipe import MAX_SAMPLES, check_column_settings
from batchloom.sources.formats import InputFormat

DatasetType = Literal["text", "fineweb_edu", "vision", "vision_audio"]
Format = Literal[InputFormat, "yaml"]

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
_MAX_PROBLEMS = 100
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
# Settings of lmms-engine's processors, by the settings of the image processor that they set.
_EXTRA_SETTINGS = {"image_max_pixels": "max_pixels", "image_min_pixels": "min_pixels"}
_REFUSED_EXTRA_SETTINGS = {
    **dict.fromkeys(
        ("video_max_pixels", "video_min_pixels"),
        "videos are read as images; write it next to dataset_type, where it limits the pixels of a frame",
    ),
    "audio_max_length": "sounds are never cut; split the files, and leave it out",
}
# Expected types, by pydantic's name of the error.
_TYPE_DESCRIPTIONS = {
    "string_type": "text",
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "tuple_type": "a list",
}
_VIDEO_SETTINGS = ("video_sampling_strategy", *_VIDEO_FIELDS)


def _check_text(value: str) -> str:
    if not is_text(value) or "\0" in value:
        raise ValueError(f"{quote_value(value)} is not a word; write one, or leave it out")
    return value


def _check_not_yaml(value: str) -> str:
    if value == "yaml":
        raise ValueError("'yaml' is a list in a list; write its data sets here")
    return value


def _check_weight(value: float) -> float:
    if not is_positive_number(value):
        raise ValueError(f"{quote_value(value)} is not a finite number above 0")
    return value


def _check_samples(value: int) -> int:
    if not 1 <= value <= MAX_SAMPLES:
        raise ValueError(f"{quote_value(value)} is not a whole number from 1 to {MAX_SAMPLES:,}")
    return value


def _check_length(value: int) -> int:
    _check_plan_settings(seq_len=value)
    return value


def _check_strategy(value: str) -> str:
    _check_plan_settings(packing=value)
    return value


def _check_plan_settings(*, seq_len: int = 1, packing: str = "none") -> None:
    """Refuse settings that the plan would refuse, before they are renamed."""
    try:
        PlanSpec(seq_len=seq_len, packing=packing, global_batch_size=1)
    except SettingsError as error:
        raise ValueError(error.problems[0].partition(": ")[2]) from None


def _resolve_type_alias(value: object) -> object:
    """Return the dataset type of a name; raise for types that have no equivalent."""
    if not isinstance(value, str):
        return value
    if value in _REFUSED_TYPES:
        raise ValueError(f"{value!r} of lmms-engine {_REFUSED_TYPES[value]}; train it with lmms-engine")
    return _TYPE_ALIASES.get(value, value)


def _path_to_text(value: object) -> object:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


DatasetTypeName = Annotated[DatasetType, BeforeValidator(_resolve_type_alias)]
NonEmptyText = Annotated[StrictStr, AfterValidator(_check_text)]
PathText = Annotated[StrictStr, BeforeValidator(_path_to_text), AfterValidator(_check_text)]
# An empty value counts as None.
FolderText = Annotated[
    StrictStr, BeforeValidator(_path_to_text), AfterValidator(lambda value: value and _check_text(value))
]


@contextmanager
def _convert_validation_errors() -> Iterator[None]:
    """Convert all validation errors of pydantic into one SettingsError."""
    try:
        yield
    except ValidationError as error:
        raise SettingsError(_describe_validation_errors(error, BaseModel)) from None


class _ConfigModel(BaseModel):
    """Base model that reports all problems at once, including contradictions."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    __init__ = _convert_validation_errors()(BaseModel.__init__)

    @model_validator(mode="wrap")
    @classmethod
    def _validate_all(cls, values: Any, make: ModelWrapValidatorHandler[Self]) -> Self:
        if isinstance(values, Mapping):
            # A null setting counts as absent.
            values = cls._nest_flat_settings({n: value for n, value in values.items() if value is not None})
        contradictions = cls._contradictions(values) if isinstance(values, Mapping) else []
        try:
            config = make(values)
        except ValidationError as error:
            raise SettingsError([*_describe_validation_errors(error, cls), *contradictions]) from None
        raise_problems(contradictions)
        return config

    @classmethod
    def _nest_flat_settings(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values, with flat settings moved into the field that holds them."""
        return dict(values)

    @classmethod
    def _contradictions(cls, values: Mapping[str, Any]) -> list[str]:  # noqa: ARG003
        """List contradictions between the unchecked values."""
        return []


class ProcessorConfig(_ConfigModel):
    """Settings of the tokenizer or processor.

    Attributes:
        processor_name: the tokenizer, as ``prepare`` takes it: a path or a Hub id; also the processor
            for ``vision`` and ``vision_audio``.
        processor_type: kind of the processor; not used, because its files say it.
        max_pixels, min_pixels: limits of the pixels of a resized image; not used for texts, like the others below.
        kwargs: settings of the image processor by name, which override those in its files.
        extra_kwargs: lmms-engine's settings: ``image_max_pixels`` and ``image_min_pixels``. Others are refused.
    """

    processor_name: NonEmptyText
    processor_type: StrictStr | None = None
    max_pixels: StrictInt | None = None
    min_pixels: StrictInt | None = None
    kwargs: dict[str, Any] | None = None
    extra_kwargs: dict[str, Any] | None = None

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


class DatasetEntry(_ConfigModel):
    """One data set of a list.

    Attributes:
        path: a file, folder, glob or URL, or a data set of the Hub; relative to the
            manifest's folder, or to ``data_folder``.
        data_folder: base folder of ``path``; empty or None for the manifest's.
        media_folder: folder or URL that the paths of its media start from; relative to the manifest's folder. None for
            the job's, else the folder of each file.
        data_type: format of its files; None to detect it.
        name: label of the data set.
        weight: its share among the others, above 0; recorded only: sampling weights belong to stores.
        type: dataset type; None for the block's.
        mapping: columns by role, over the detected ones.
        ignore: columns and message keys that are treated as absent.
        text_field: column that holds the text.
        max_samples: number of its first records that are read; None for all.
        num_samples: number of its records that are read, chosen at random; None for all.
        split, config, revision: those of a data set of the Hub; ``split`` also of a saved one.
    """

    path: PathText
    data_folder: FolderText | None = None
    media_folder: FolderText | None = None
    data_type: Annotated[Format, AfterValidator(_check_not_yaml)] | None = None
    name: NonEmptyText | None = None
    weight: Annotated[StrictFloat, AfterValidator(_check_weight)] | None = None
    type: DatasetTypeName | None = None
    mapping: dict[StrictStr, StrictStr] = Field(default_factory=dict)
    ignore: tuple[NonEmptyText, ...] | None = None
    text_field: NonEmptyText | None = None
    max_samples: Annotated[StrictInt, AfterValidator(_check_samples)] | None = None
    num_samples: Annotated[StrictInt, AfterValidator(_check_samples)] | None = None
    split: NonEmptyText | None = None
    config: NonEmptyText | None = None
    revision: NonEmptyText | None = None

    @classmethod
    def _contradictions(cls, values: Mapping[str, Any]) -> list[str]:
        mapping, text_field = values.get("mapping", {}), values.get("text_field")
        if not isinstance(mapping, Mapping) or not all(
            isinstance(word, str) for item in mapping.items() for word in item
        ):
            return []
        problems = check_column_settings(text_field if is_text(text_field) else None, mapping)
        return [problem.replace("map.", "mapping.", 1) for problem in problems]


def _make_sampling(video_settings: Mapping[str, Any]) -> FrameSampling:
    """Return the frame sampling that video settings describe."""
    default_strategy = "frame_num" if "frame_num" in video_settings and "fps" not in video_settings else "fps"
    strategy = video_settings.get("video_sampling_strategy", default_strategy)
    if strategy not in ("fps", "frame_num"):
        raise SettingsError([f"video_sampling_strategy: {quote_value(strategy)} is none of fps, frame_num"])
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


def _check_sampling(video_settings: Mapping[str, Any]) -> list[str]:
    """List the problems of video settings."""
    problems = find_unknown_settings(video_settings, _VIDEO_SETTINGS, "videos.")
    try:
        _make_sampling(video_settings)
    except SettingsError as error:
        return [*problems, *error.problems]
    return problems


class DatasetConfig(_ConfigModel):
    """Data sets and their packing; ``load`` reads one from a YAML file.

    ``batchloom.prepare`` takes it as an input; ``plan_settings`` are those of a ``Loader``.

    Attributes:
        dataset_type: ``text``, ``fineweb_edu`` (a column called text), ``vision`` (conversations with
            images) or ``vision_audio`` (images and audio); also lmms-engine's names for these.
        dataset_format: format of the files: json, jsonl, csv, parquet, arrow, hf_dataset (a folder
            of ``save_to_disk`` or a Hub id), or yaml, a file with a list of data sets; None to
            detect it.
        dataset_path: file, folder, glob, URL or Hub id.
        datasets: list of data sets, instead of ``dataset_path``.
        processor_config: its ``processor_name`` is the tokenizer, and the processor of images and audio.
        shuffle: whether documents are shuffled.
        packing: whether several documents share a sequence.
        packing_length: tokens of a sequence.
        packing_strategy: ``first_fit``, ``window_N``, ``best_fit`` or ``wrap``.
        filter_overlong: whether documents longer than a sequence are dropped. Otherwise they are split;
            documents with images or audio, which are never split, are refused.
        follow_links: whether to follow symbolic links that lead out of a data folder; else they are skipped.
        videos: frame sampling of videos. Its keys are also accepted next to the other settings:
            ``video_sampling_strategy``, whether ``fps`` or ``frame_num`` sets the number of frames (default ``fps``,
            unless only ``frame_num`` is given), and ``fps``, ``frame_num``, ``video_max_frames``,
            ``video_min_pixels``, ``video_max_pixels`` as in ``media.sampling.Sampling``.

    Raises:
        SettingsError: all problems, each with its path.
    """

    dataset_type: DatasetTypeName = "text"
    dataset_format: Format | None = None
    dataset_path: PathText | None = None
    datasets: tuple[DatasetEntry, ...] | None = None
    processor_config: ProcessorConfig | None = None
    shuffle: StrictBool = True
    packing: StrictBool = False
    packing_length: Annotated[StrictInt, AfterValidator(_check_length)] = 32_000
    packing_strategy: Annotated[StrictStr, AfterValidator(_check_strategy)] = "first_fit"
    filter_overlong: StrictBool = True
    follow_links: StrictBool = False
    videos: dict[StrictStr, Any] = Field(default_factory=dict)

    _location: ConfigLocation = PrivateAttr(default_factory=ConfigLocation)

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
        settings = {name: value for name, value in values.items() if name not in _UNUSED_SETTINGS}
        try:
            config: Self = cls(**settings)
        except SettingsError as error:
            location_prefix = location.describe(location.block)
            raise SettingsError([f"{location_prefix}{problem}" for problem in error.problems]) from None
        if unused:
            location = location.with_note(f"not used of it: {', '.join(unused)}")
        config._location = location
        return config

    @property
    def tokenizer(self) -> str | None:
        """The tokenizer, as ``prepare`` takes it, and the processor of media, or None."""
        if self.processor_config is None:
            return None
        return self._location.resolve_path(self.processor_config.processor_name)

    @property
    def sampling(self) -> FrameSampling:
        """The frame sampling of videos."""
        return _make_sampling(self.videos)

    @property
    def multimodal(self) -> bool:
        """True if it declares images or audio; a list in another file may do so, too."""
        dataset_types = [self.dataset_type, *(entry.type for entry in self.datasets or ())]
        return any(dataset_type in MULTIMODAL_TYPES for dataset_type in dataset_types)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes about the file, one sentence each."""
        return self._location.notes

    @property
    def location(self) -> ConfigLocation:
        """The location it was written in."""
        return self._location

    def plan_settings(self, longest: int | None = None) -> dict[str, Any]:
        """Return the settings of a ``Loader`` (or ``PlanSpec``) that it states.

        Empty for a bare list: a file with a list of data sets, or a trainer's, does not state packing.

        Args:
            longest: maximum tokens that a model takes; limits the default length.
        """
        if not self._location.has_block:
            return {}
        length = self.packing_length
        if longest is not None and "packing_length" not in self.model_fields_set:
            length = min(length, longest)
        fallback_policy = "error" if self.multimodal else "split"
        return {
            "seq_len": length,
            "packing": self.packing_strategy if self.packing else "none",
            "overlong": "drop" if self.filter_overlong else fallback_policy,
            "shuffle": self.shuffle,
        }

    @classmethod
    def _contradictions(cls, values: Mapping[str, Any]) -> list[str]:
        video_settings = values.get("videos", {})
        sampling_problems = _check_sampling(video_settings) if isinstance(video_settings, Mapping) else []
        return [*cls._find_source_problems(values), *sampling_problems]

    @classmethod
    def _nest_flat_settings(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        video_settings = {name: value for name, value in values.items() if name in _VIDEO_SETTINGS}
        if not video_settings or not isinstance(values.get("videos", {}), Mapping):
            return dict(values)
        other_settings = {name: value for name, value in values.items() if name not in video_settings}
        return {**other_settings, "videos": {**values.get("videos", {}), **video_settings}}

    @classmethod
    def _find_source_problems(cls, values: Mapping[str, Any]) -> list[str]:
        path, listed = values.get("dataset_path"), values.get("datasets")
        form, kind = values.get("dataset_format"), values.get("dataset_type")
        if path is not None and listed is not None:
            return ["dataset_path: goes with no datasets; write the one or the other"]
        if isinstance(listed, (list, tuple)) and not listed:
            return ["datasets: there are none; write at least one"]
        if (twice := _find_repeated_name(listed or ())) is not None:
            return [f"datasets: two are called {twice!r}; a name is one data set's alone"]
        # The name selects a preset.
        alone = kind == "fineweb_edu" and form in (None, "hf_dataset")
        if path is None and listed is None and not alone:
            return ["dataset_path: missing; write it, or a list under datasets"]
        return []


def _find_repeated_name(listed: object) -> str | None:
    """Return the first name that two data sets share, even if they are invalid."""
    names = [
        entry.get("name") if isinstance(entry, Mapping) else getattr(entry, "name", None)
        for entry in (listed if isinstance(listed, (list, tuple)) else ())
    ]
    counts = Counter(name for name in names if isinstance(name, str))
    return next((name for name, count in counts.items() if count > 1), None)


def _describe_validation_errors(error: ValidationError, model: type[BaseModel]) -> list[str]:
    problems = [
        sentence for fault in error.errors(include_url=False) for sentence in _describe_validation_error(fault, model)
    ]
    more = len(problems) - _MAX_PROBLEMS
    return problems if more <= 0 else [*problems[:_MAX_PROBLEMS], f"and {more:,} problems more"]


def _describe_validation_error(fault: Any, model: type[BaseModel]) -> Iterator[str]:
    """Yield the messages for one validation error of pydantic."""
    path, value = _format_path(fault["loc"]), fault["input"]
    cause = (fault.get("ctx") or {}).get("error")
    if isinstance(cause, SettingsError):
        yield from (_prefix_path(path, problem) for problem in cause.problems)
    elif cause is not None:
        yield f"{path}: {cause}"
    elif fault["type"] == "extra_forbidden":
        yield f"{path}: unknown setting{suggest(path, model.model_fields)}"
    elif fault["type"] == "missing":
        yield f"{path}: missing"
    elif fault["type"] == "literal_error":
        choices = get_args(DatasetType if path in ("dataset_type", "type") else Format)
        hint = suggest(value, choices) if isinstance(value, str) else ""
        yield f"{path}: {quote_value(value)} is none of {', '.join(choices)}{hint}"
    else:
        expected = _TYPE_DESCRIPTIONS.get(fault["type"], fault["type"].replace("_", " "))
        yield f"{path}: {quote_value(value)} is not {expected}"


def _prefix_path(path: str, problem: str) -> str:
    """Prefix the problem of a nested setting, or of all nested settings, with a path."""
    if problem.startswith(":"):
        return path + problem
    return f"{path}.{problem}" if path else problem


def _format_path(keys: tuple[int | str, ...]) -> str:
    text = ""
    for key in keys:
        if isinstance(key, int):
            text += f"[{key}]"
        elif key != "[key]":
            text += f".{key}" if text else key
    return text
