"""Selection of video frames and their size, from length, rate and size."""

import math
from dataclasses import dataclass
from fractions import Fraction

from batchloom.core.settings import as_int, is_positive_number, quote_value, raise_problems

_MAX_VALUE = 10**9
_MICROSECONDS_PER_SECOND = 10**6


@dataclass(frozen=True, slots=True)
class FrameSampling:
    """Sampling of frames from videos.

    Attributes:
        fps: frames per second of video.
        frames: number of evenly spaced frames in place of ``fps``; all frames of a shorter video.
        max_frames: maximum number of frames with ``fps``.
        min_pixels: minimum width x height of a frame; smaller frames are enlarged.
        max_pixels: maximum width x height of a frame; larger frames are shrunk.
    """

    fps: float = 2.0
    frames: int | None = None
    max_frames: int = 128
    min_pixels: int = 16 * 16
    max_pixels: int = 256 * 256

    def __post_init__(self) -> None:
        problems = [] if is_positive_number(self.fps) else [f"fps: {quote_value(self.fps)} is not a number above 0"]
        problems += [
            f"{name}: {quote_value(value)} is not a whole number from 1 to {_MAX_VALUE:,}"
            for name in ("frames", "max_frames", "min_pixels", "max_pixels")
            if (value := getattr(self, name)) is not None and not 1 <= (as_int(value) or 0) <= _MAX_VALUE
        ]
        if not problems and self.min_pixels > self.max_pixels:
            problems.append(f"min_pixels: {self.min_pixels:,} is more than max_pixels, {self.max_pixels:,}")
        raise_problems(problems)


def compute_frame_times(seconds: Fraction, rate: Fraction | None, sampling: FrameSampling) -> list[int]:
    """Return the times of the sampled frames in microseconds, ascending, at least one.

    They are evenly spaced from the first frame on, as in transformers' ``default_sample_indices_fn``: the N frames
    ``floor(i * T / N)`` of T. ``rate`` is the approximate frame rate, or None if unknown.
    """
    frame_count = sampling.frames
    if frame_count is None:
        frame_count = min(
            math.floor(seconds * Fraction(sampling.fps).limit_denominator(_MAX_VALUE)),
            sampling.max_frames,
        )
    if rate:
        frame_count = min(frame_count, round(seconds * rate))
    frame_count = max(frame_count, 1)
    # Frame times are rounded down, so round up here to get the frame displayed exactly then.
    return [math.ceil(_MICROSECONDS_PER_SECOND * seconds * index / frame_count) for index in range(frame_count)]


def fit_frame_size(width: int, height: int, sampling: FrameSampling) -> tuple[int, int]:
    """Return width and height of a frame within the pixel limits, same aspect ratio."""
    pixels = width * height
    if pixels > sampling.max_pixels:
        scale = math.sqrt(sampling.max_pixels / pixels)
        return max(1, int(width * scale)), max(1, int(height * scale))
    if pixels < sampling.min_pixels:
        scale = math.sqrt(sampling.min_pixels / pixels)
        return math.ceil(width * scale), math.ceil(height * scale)
    return width, height
