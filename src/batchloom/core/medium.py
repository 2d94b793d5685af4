"""Media of a document, as passed from its source to the store."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

MediumKind = Literal["image", "audio", "video"]
MEDIUM_KINDS: tuple[MediumKind, ...] = ("image", "audio", "video")
_EXTENSIONS_BY_KIND: dict[MediumKind, str] = {
    "image": "jpg jpeg jpe jfif png gif webp bmp tif tiff ppm pgm avif",
    "audio": "wav flac mp3 ogg oga opus aif aiff au caf m4a aac wma",
    "video": "mp4 m4v mkv webm mov avi mpg mpeg wmv flv",
}
_KIND_BY_EXTENSION = {ending: kind for kind, endings in _EXTENSIONS_BY_KIND.items() for ending in endings.split()}


_TAR_RANGE_PATTERN = re.compile(r"(.*\.tar)#(\d{1,18})\+(\d{1,18})", re.DOTALL | re.IGNORECASE)


def make_placeholder_pattern(kinds: Sequence[MediumKind]) -> re.Pattern[str]:
    """Return the pattern of texts that stand for media, as in LLaVA and LLaMA-Factory."""
    return re.compile(f"<({'|'.join(kinds)})>")


PLACEHOLDER_PATTERN = make_placeholder_pattern(MEDIUM_KINDS)
# What marks a medium in a text: a placeholder, or a path between tags as of Qwen-VL and ms-swift.
TEXT_MARKER_PATTERN = re.compile(rf"{PLACEHOLDER_PATTERN.pattern}|<(?P<tag>img|audio|video)>[^<\s]+</(?P=tag)>")


def format_tar_location(file: str, start: int, size: int) -> str:
    """Return the location of a medium in a tar, ``FILE#START+SIZE`` in bytes."""
    return f"{file}#{start}+{size}"


def parse_tar_location(location: str) -> tuple[str, tuple[int, int] | None]:
    """Return the file of a location, and the (start, size) of a tar member or None."""
    match = _TAR_RANGE_PATTERN.fullmatch(location)
    return (location, None) if match is None else (match[1], (int(match[2]), int(match[3])))


def detect_medium_kind(name: str) -> MediumKind | None:
    """Return the kind of medium for a file extension; None if it is none."""
    return _KIND_BY_EXTENSION.get(name.rpartition(".")[2].lower())


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """Properties of an image that decide its number of tokens.

    Attributes:
        width: width in pixels, after EXIF rotation.
        height: height in pixels, after EXIF rotation.
        animated: whether the file holds several pictures; only the first is read.
    """

    width: int
    height: int
    animated: bool = False


@dataclass(frozen=True, slots=True)
class FrameFacts(ImageFacts):
    """Properties of a video frame, which is used as an image.

    Attributes:
        width: display width in pixels, after rotation.
        height: display height in pixels.
        time: time from the start in microseconds.
    """

    time: int = 0


@dataclass(frozen=True, slots=True)
class AudioFacts:
    """Properties of audio that decide its number of tokens.

    Attributes:
        samples: samples of each channel.
        rate: samples per second.
        channels: number of channels, which are averaged.
    """

    samples: int
    rate: int
    channels: int = 1

    def samples_at(self, rate: int) -> int:
        """Return the number of samples after resampling to a rate, rounded up."""
        return -(-self.samples * rate // self.rate)

    @property
    def seconds(self) -> float:
        """Duration in seconds."""
        return self.samples / self.rate


MediumFacts = ImageFacts | AudioFacts


@dataclass(frozen=True, slots=True)
class MediumInfo:
    """Result of reading a medium's header.

    Attributes:
        facts: properties from the header.
        digest: 16-byte digest that identifies the medium (:func:`batchloom.media.hash_edges`).
        size: size of its file in bytes.
    """

    facts: MediumFacts
    digest: bytes
    size: int


@dataclass(frozen=True, slots=True)
class Medium:
    """An image, audio or video of a record.

    Attributes:
        kind: media kind; each sampled video frame is an image.
        location: path or URL as in the record, or :func:`format_tar_location` for a tar member; empty
            if the record holds the bytes.
        data: bytes from the record, else None.
        info: header information; None before the header is read.
    """

    kind: MediumKind
    location: str
    data: bytes | None = None
    info: MediumInfo | None = None
