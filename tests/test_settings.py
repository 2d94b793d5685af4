"""Settings classes: written forms of their values."""

from dataclasses import dataclass, field
from typing import Annotated

import pytest

from batchloom import SettingsError
from batchloom.core.settings import (
    Setting,
    WrittenForm,
    build_settings,
    find_problems,
    list_setting_names,
    raise_problems,
    to_plain,
)


def parse_words(value):
    return tuple(value.split()) if isinstance(value, str) else tuple(value)


@dataclass(frozen=True)
class Lens:
    zoom: Annotated[int, Setting(help="Zoom.", minimum=1, omit_default=True)] = 1

    def __post_init__(self):
        raise_problems(find_problems(self))


@dataclass(frozen=True)
class Camera:
    name: Annotated[str, Setting(help="Name.")]
    tags: Annotated[tuple[str, ...], Setting(help="Tags.", check=lambda _: "", parse=parse_words, plain=" ".join)] = ()
    lens: Annotated[Lens, WrittenForm(prefix="lens_")] = field(default_factory=Lens)
    origin: str = field(default="", compare=False)

    def __post_init__(self):
        raise_problems(find_problems(self))


def test_settings_are_built_from_what_their_plain_form_says():
    camera = Camera("a", ("x", "y"), Lens(3), origin="a file")
    assert to_plain(camera) == {"name": "a", "tags": "x y", "lens_zoom": 3}
    assert build_settings(Camera, to_plain(camera)) == camera
    assert to_plain(Camera("a")) == {"name": "a", "tags": ""}
    assert build_settings(Camera, {"name": "a", "tags": None}) == Camera("a")
    assert list_setting_names(Camera) == ("name", "tags", "lens_zoom")


def test_all_problems_of_written_settings_are_reported_at_once():
    with pytest.raises(SettingsError) as error:
        build_settings(Camera, {"nam": "a", "lens_zoom": 0, "origin": "x"}, "camera.")
    assert sorted(error.value.problems) == [
        "camera.lens_zoom: 0 is not a whole number of at least 1",
        "camera.nam: unknown setting; did you mean 'name'?",
        "camera.name: missing",
        "camera.origin: unknown setting",
    ]
    with pytest.raises(SettingsError, match="camera: 5 is not a mapping"):
        build_settings(Camera, 5, "camera.")
