"""Settings of images, audio and video, and the processor that they name."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal

import orjson

from batchloom.core.addresses import redact_url
from batchloom.core.errors import InputError, SettingsError
from batchloom.core.settings import (
    Setting,
    WrittenForm,
    as_int,
    build_settings,
    find_problems,
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


def _find_path_problem(value: object) -> str:
    return "" if is_text(value) and "\0" not in str(value) else "is no path; name a folder"


def _expand_home(value: object) -> object:
    """Return a path with ``~`` replaced; other values unchanged."""
    return os.path.expanduser(os.fspath(value)) if isinstance(value, str | os.PathLike) else value  # noqa: PTH111


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
            parse=_expand_home,
        ),
    ]
    data_folder: Annotated[
        str | None,
        MediaSetting(
            help="Folder or URL that the paths of media start from.",
            check=_find_path_problem,
            parse=_expand_home,
            shown_default="the folder of each file",
            omit_default=True,
        ),
    ] = None
    keep: Annotated[
        MediaStorage,
        MediaSetting(
            help="Storage of media: reference (the store names the files) or embed (it holds their bytes).",
            option="--media",
            omit_default=True,
        ),
    ] = "reference"
    image_settings: Annotated[
        Mapping[str, Any],
        Setting(
            help="Settings of the image processor that override those in its files: {max_pixels: 200704, ...}.",
            check=_find_image_settings_problem,
            has_option=False,
            omit_default=True,
        ),
    ] = field(default_factory=dict)
    limits: Annotated[MediaLimits, WrittenForm(prefix="")] = field(default_factory=MediaLimits)
    sampling: Annotated[FrameSampling, WrittenForm(prefix="video_")] = field(default_factory=FrameSampling)

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
    settings = {name: setting for name, setting in value.items() if setting is not None}
    folder_name = settings.pop("data_folder_name", None)
    problems = []
    if "processor" not in settings:
        problems.append("media.processor: there is none; name the folder of a processor (--processor)")
    if folder_name is not None and "data_folder" not in settings:
        problems.append(
            f"media.data_folder: the store was made of media below a folder {quote_value(folder_name)}; say where that "
            "is (--data-folder)"
        )
    if "video_fps" in settings and "video_frames" in settings:
        problems.append("media.video_frames: video_fps says how many frames, too; give one of them")
    try:
        media = build_settings(MediaRecipe, {"processor": "", **settings}, "media.")
    except SettingsError as error:
        raise SettingsError([*problems, *error.problems]) from None
    raise_problems(problems)
    return media


def compute_processor_fingerprint(processor: str, image_settings: Mapping[str, Any]) -> str:
    """Return the fingerprint of a recipe's processor: 32 hex digits."""
    return read_processor_files(find_processor_folder(processor)).with_image_settings(image_settings).fingerprint


def media_to_plain(media: MediaRecipe) -> dict[str, Any]:
    """Return the media settings for a manifest, without absolute paths.

    The processor is given by name and content.
    """
    plain = to_plain(media)
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
