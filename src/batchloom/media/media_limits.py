"""Size limits of media."""

from dataclasses import dataclass

from batchloom.core.settings import as_int, is_positive_number, quote_value, raise_problems

_MAX_VALUE = 10**12


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """Size limits of media: a small file can decode to gigabytes.

    Attributes:
        image_pixels: maximum width x height of an image.
        audio_seconds: maximum length of a sound.
        file_bytes: maximum size of a file held in memory, because it is remote or embedded.
        fetch_seconds: timeout for the download of a remote file.
    """

    image_pixels: int = 100_000_000
    audio_seconds: float = 3600.0
    file_bytes: int = 256 << 20
    fetch_seconds: float = 60.0

    def __post_init__(self) -> None:
        problems = [
            f"{name}: {quote_value(value)} is not a whole number from 1 to {_MAX_VALUE:,}"
            for name, value in (
                ("image_pixels", self.image_pixels),
                ("file_bytes", self.file_bytes),
            )
            if not 1 <= (as_int(value) or 0) <= _MAX_VALUE
        ]
        problems += [
            f"{name}: {quote_value(value)} is not a time above 0"
            for name, value in (
                ("audio_seconds", self.audio_seconds),
                ("fetch_seconds", self.fetch_seconds),
            )
            if not is_positive_number(value)
        ]
        raise_problems(problems)
