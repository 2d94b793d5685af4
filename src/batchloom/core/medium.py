"""Media as they travel with a document, from its source to the store."""

import re
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


def format_tar_location(file: str, start: int, size: int) -> str:
    """The place of a medium that is a stretch of a tar: ``FILE#START+SIZE``, in bytes."""
    return f"{file}#{start}+{size}"


def parse_tar_location(location: str) -> tuple[str, tuple[int, int] | None]:
    """The file of a place, and where in it the medium begins and how many bytes it has; None where it is the file."""
    match = _TAR_RANGE_PATTERN.fullmatch(location)
    return (location, None) if match is None else (match[1], (int(match[2]), int(match[3])))


def detect_medium_kind(name: str) -> MediumKind | None:
    """The kind of medium that a file is by the ending of its name; None where it is none."""
    return _KIND_BY_EXTENSION.get(name.rpartition(".")[2].lower())


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """What decides how many tokens an image becomes.

    Attributes:
        width: in pixels, turned upright as its EXIF orientation says.
        height: in pixels.
        animated: whether the file holds several pictures, of which the first is read.
    """

    width: int
    height: int
    animated: bool = False


@dataclass(frozen=True, slots=True)
class FrameFacts(ImageFacts):
    """A frame of a video, which stands as an image.

    Attributes:
        width: in pixels, upright and made as large as it is to be seen.
        height: in pixels.
        time: when it is shown, in microseconds from the beginning.
    """

    time: int = 0


@dataclass(frozen=True, slots=True)
class AudioFacts:
    """What decides how many tokens a sound becomes.

    Attributes:
        samples: of each channel.
        rate: samples a second.
        channels: they are read as their mean.
    """

    samples: int
    rate: int
    channels: int = 1

    def samples_at(self, rate: int) -> int:
        """Samples after a change of rate: what lasts as long, rounded up."""
        return -(-self.samples * rate // self.rate)

    @property
    def seconds(self) -> float:
        """How long it lasts."""
        return self.samples / self.rate


MediumFacts = ImageFacts | AudioFacts


@dataclass(frozen=True, slots=True)
class MediumInfo:
    """What was found where a medium lies.

    Attributes:
        facts: what its header says.
        digest: what tells it from others, 16 bytes (:func:`batchloom.media.hash_edges`).
        size: bytes of its file.
    """

    facts: MediumFacts
    digest: bytes
    size: int


@dataclass(frozen=True, slots=True)
class Medium:
    """An image, a sound or a video of a record.

    Attributes:
        kind: which of them; each frame of a video that was looked at is an image.
        location: its path or URL as the record has it, of one in a tar as :func:`format_tar_location` writes it; empty
            where the record holds its bytes.
        data: its bytes where the record holds them, else None.
        info: what was found there; None before anybody has looked.
    """

    kind: MediumKind
    location: str
    data: bytes | None = None
    info: MediumInfo | None = None
