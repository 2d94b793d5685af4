"""Settings of images, audio and video, and the processor that they name."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache, partial
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal

import orjson

from batchloom.core.addresses import redact_url
from batchloom.core.errors import InputError, SettingsError
from batchloom.core.settings import (
    Setting,
    as_int,
    find_problems,
    find_unknown_settings,
    is_text,
    quote_value,
    raise_problems,
    to_plain,
)
from batchloom.media import (
    PIXEL_LIMITS,
    PROCESSOR_FILES,
    TEMPLATE_FILES,
    FrameSampling,
    MediaLimits,
    MediaProcessor,
    is_tokenizer_folder,
    open_processor,
    read_processor_files,
)
from batchloom.tokens import HUB_ID_PATTERN, RepositoryFiles, fetch_hub_folder, read_sidecar_hints

MediaStorage = Literal["reference", "embed"]
MediaSetting = partial(Setting, panel="Images, audio and video")
_LIMIT_FIELDS = tuple(field.name for field in fields(MediaLimits))
_SAMPLING_FIELDS = {f"video_{field.name}": field.name for field in fields(FrameSampling)}


def _find_path_problem(value: object) -> str:
    return "" if is_text(value) and "\0" not in str(value) else "is no path; name a folder"


def _find_image_settings_problem(value: object) -> str:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        return "is no mapping of settings by name; write {max_pixels: 200704}"
    for name in set(PIXEL_LIMITS) & set(value):
        pixels = as_int(value[name])
        if pixels is None or pixels < 1:
            return f"has {name} {quote_value(value[name])}, which is no number of pixels above 0"
    try:
        orjson.dumps(value)
    except (TypeError, ValueError) as error:
        return f"holds what JSON cannot hold ({error})"
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaRecipe:
    """Settings of conversations with images, audio and video.

    The recipe that holds it reports its problems.
    """

    processor: Annotated[
        str,
        MediaSetting(
            help="Folder or Hub id of a transformers processor: conversations may then hold images, audio or video.",
            check=_find_path_problem,
        ),
    ]
    data_folder: Annotated[
        str | None,
        MediaSetting(
            help="Folder or URL that the paths of media start from.",
            check=_find_path_problem,
            shown_default="the folder of each file",
        ),
    ] = None
    keep: Annotated[
        MediaStorage,
        MediaSetting(
            help="Storage of media: reference (the store names the files) or embed (it holds their bytes).",
            option="--media",
        ),
    ] = "reference"
    image_settings: Annotated[
        Mapping[str, Any],
        Setting(
            help="Settings of the image processor that override those in its files: {max_pixels: 200704, ...}.",
            check=_find_image_settings_problem,
            has_option=False,
        ),
    ] = field(default_factory=dict)
    limits: MediaLimits = field(default_factory=MediaLimits)
    sampling: FrameSampling = field(default_factory=FrameSampling)

    def problems(self) -> list[str]:
        """List the problems of the values, by the names ``prepare`` takes them under."""
        return find_problems(self, "media.")


def parse_media(value: object) -> MediaRecipe | None:
    """Parse media settings from a mapping or a MediaRecipe; None for none.

    Raises:
        SettingsError: unknown settings, invalid limits, or no processor.
    """
    if value is None or isinstance(value, MediaRecipe):
        return value
    if not isinstance(value, Mapping):
        raise SettingsError([f"media: {quote_value(value)} is no mapping; write {{processor: FOLDER}}"])
    setting_names = ("processor", "data_folder", "keep", "image_settings", *_LIMIT_FIELDS, *_SAMPLING_FIELDS)
    given_names = [name for name in value if name != "data_folder_name"]
    problems = find_unknown_settings(given_names, setting_names, "media.")
    if value.get("processor") is None:
        problems.append("media.processor: there is none; name the folder of a processor (--processor)")
    settings: dict[str, Any] = {
        name: os.path.expanduser(os.fspath(setting)) if isinstance(setting, str | os.PathLike) else setting  # noqa: PTH111
        for name, setting in value.items()
        if setting is not None
    }
    if settings.pop("data_folder_name", None) is not None and "data_folder" not in settings:
        problems.append(
            "media.data_folder: the store was made of media below a folder "
            f"{quote_value(value['data_folder_name'])}; say where that is (--data-folder)"
        )
    if "video_fps" in settings and "video_frames" in settings:
        problems.append("media.video_frames: video_fps says how many frames, too; give one of them")
    limits, sampling = MediaLimits(), FrameSampling()
    try:
        limits = MediaLimits(**{name: settings[name] for name in _LIMIT_FIELDS if name in settings})
    except SettingsError as error:
        problems += [f"media.{problem}" for problem in error.problems]
    try:
        sampling_settings = {
            sampling_field: settings[name] for name, sampling_field in _SAMPLING_FIELDS.items() if name in settings
        }
        sampling = FrameSampling(**sampling_settings)
    except SettingsError as error:
        problems += [f"media.video_{problem}" for problem in error.problems]
    raise_problems(problems)
    recipe_settings = {
        name: setting for name, setting in settings.items() if name not in (*_LIMIT_FIELDS, *_SAMPLING_FIELDS)
    }
    return MediaRecipe(**recipe_settings, limits=limits, sampling=sampling)


def media_to_settings(media: MediaRecipe | None) -> dict[str, Any] | None:
    """Return the media settings for a recipe file, without defaults."""
    if media is None:
        return None
    base_settings = {"processor": media.processor, "data_folder": media.data_folder}
    keep = {} if media.keep == "reference" else {"keep": media.keep}
    defaults = to_plain(MediaLimits()) | _sampling_to_plain(FrameSampling())
    amounts = to_plain(media.limits) | _sampling_to_plain(media.sampling)
    changed = {name: value for name, value in amounts.items() if value != defaults[name]}
    image_settings = {"image_settings": dict(media.image_settings)} if media.image_settings else {}
    return {name: value for name, value in base_settings.items() if value is not None} | keep | image_settings | changed


def _sampling_to_plain(sampling: FrameSampling) -> dict[str, Any]:
    plain = to_plain(sampling)
    return {name: plain[sampling_field] for name, sampling_field in _SAMPLING_FIELDS.items()}


def compute_processor_fingerprint(processor: str, image_settings: Mapping[str, Any]) -> str:
    """Return the fingerprint of a recipe's processor: 32 hex digits."""
    return read_processor_files(find_processor_folder(processor)).with_image_settings(image_settings).fingerprint


def media_to_plain(media: MediaRecipe) -> dict[str, Any]:
    """Return the media settings for a manifest, without absolute paths.

    The processor is given by name and content.
    """
    plain = media_to_settings(media) or {}
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


_FOLDER_HINT = "give the folder that a processor's save_pretrained wrote"
_REQUIRED_FILES = RepositoryFiles(
    # video_preprocessor_config.json alone is no processor.
    PROCESSOR_FILES[:2],
    (
        *PROCESSOR_FILES[2:],
        *TEMPLATE_FILES,
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "config.json",
    ),
    InputError,
    f"it is of no processor; {_FOLDER_HINT}",
    f"{_FOLDER_HINT} (there is none of this name here)",
)


# Files of a processor, or of a plain tokenizer.
_TOKENIZER_FILES = replace(_REQUIRED_FILES, main=(*_REQUIRED_FILES.main, "tokenizer.json", "tokenizer_config.json"))


def has_only_tokenizer(processor: str) -> bool:
    """Return whether a folder or repository holds a tokenizer and no processor."""
    if is_repository_name(processor):
        processor = str(fetch_hub_folder(processor, _TOKENIZER_FILES))
    return is_tokenizer_folder(processor)


def is_repository_name(processor: str) -> bool:
    """Return whether a name is a Hub repository: no local path, and of its form."""
    return HUB_ID_PATTERN.fullmatch(processor) is not None and not Path(processor).exists()


def find_processor_folder(processor: str) -> Path:
    """Return the folder of a processor, fetched from the Hub if it is a repository.

    Files in the local Hub cache are not requested again.
    """
    if is_repository_name(processor):
        return fetch_hub_folder(processor, _REQUIRED_FILES)
    return Path(processor).expanduser()


def open_job_processor(media: MediaRecipe, tokenizer: str) -> MediaProcessor:
    """Open the processor of a recipe; its folder is read again if its files change.

    Args:
        media: media settings, which name the processor.
        tokenizer: tokenizer as the recipe names it; used if the processor's folder has no tokenizer.

    Raises:
        InputError: the processor does not exist or cannot be loaded.
        MissingDependencyError: transformers or Pillow is not installed.
    """
    folder = find_processor_folder(media.processor)
    tokenizer_path = Path(tokenizer).expanduser()
    tokenizer_folder = tokenizer_path if tokenizer_path.is_dir() else None
    image_settings = orjson.dumps(media.image_settings, option=orjson.OPT_SORT_KEYS)
    fingerprint = read_processor_files(folder).with_image_settings(media.image_settings).fingerprint
    return _open_cached_processor(folder, tokenizer_folder, image_settings, fingerprint)


def get_processor_state(media: MediaRecipe, tokenizer: str) -> dict[str, Any]:
    """Return the stored state of a recipe's processor, with its media tokens.

    Args:
        media: media settings, which name the processor.
        tokenizer: as in :func:`open_job_processor`, which also lists the exceptions.
    """
    processor = open_job_processor(media, tokenizer)
    tokens = {kind: family.token for kind, family in processor.families.items()}
    return {**processor.files.state(), "tokens": tokens}


@lru_cache(maxsize=4)
def _open_cached_processor(
    folder: Path, tokenizer: Path | None, image_settings: bytes, fingerprint: str
) -> MediaProcessor:
    processor = open_processor(folder, tokenizer, orjson.loads(image_settings))
    if processor.files.fingerprint != fingerprint:
        raise AssertionError(f"{folder} changed while it was read")
    return processor


def read_processor_template(media: MediaRecipe) -> str | None:
    """Read the chat template next to a processor; None if there is none."""
    return read_sidecar_hints(find_processor_folder(media.processor)).chat.templates.get("default")
