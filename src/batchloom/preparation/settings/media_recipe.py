"""Settings of images, audio and video, and the processor that they name."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

import orjson

from batchloom.core.errors import SettingsError
from batchloom.core.settings import (
    Setting,
    WrittenForm,
    as_int,
    build_settings,
    find_problems,
    is_text,
    quote_value,
    raise_problems,
)
from batchloom.media import PIXEL_LIMITS, FrameSampling, MediaLimits

MediaStorage = Literal["reference", "embed"]
MediaSetting = partial(Setting, panel="Images, audio and video")


def _find_path_problem(value: object) -> str:
    return "" if is_text(value) and "\0" not in str(value) else "is no path; name a folder"


def _expand_home(value: object) -> object:
    """Return a path with ``~`` replaced; other values unchanged."""
    return os.path.expanduser(os.fspath(value)) if isinstance(value, str | os.PathLike) else value


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
