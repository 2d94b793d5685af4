"""How large a medium may be before it is refused."""

from dataclasses import dataclass

from batchloom.core.settings import is_amount, raise_problems, shown, whole

_MOST = 10**12


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """What is refused for its size: a small file can become gigabytes when it is decoded.

    Attributes:
        image_pixels: width x height of an image at most.
        audio_seconds: of a sound at most.
        file_bytes: of a file that is held in memory as a whole: one that lies elsewhere, or is embedded.
        fetch_seconds: until a file that lies elsewhere has come.
    """

    image_pixels: int = 100_000_000
    audio_seconds: float = 3600.0
    file_bytes: int = 256 << 20
    fetch_seconds: float = 60.0

    def __post_init__(self) -> None:
        problems = [
            f"{name}: {shown(value)} is not a whole number from 1 to {_MOST:,}"
            for name, value in (
                ("image_pixels", self.image_pixels),
                ("file_bytes", self.file_bytes),
            )
            if not 1 <= (whole(value) or 0) <= _MOST
        ]
        problems += [
            f"{name}: {shown(value)} is no time above 0"
            for name, value in (
                ("audio_seconds", self.audio_seconds),
                ("fetch_seconds", self.fetch_seconds),
            )
            if not is_amount(value)
        ]
        raise_problems(problems)
