"""Videos: selection of frames by time and size, and their pixels.

Formats are detected by their first bytes and nothing else is tried: some FFmpeg formats refer to other files.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Annotated, Any, NamedTuple, final

from batchloom.core.errors import MissingDependencyError, UnusableRecordError
from batchloom.core.medium import FrameFacts
from batchloom.core.settings import Setting, find_problems, is_positive_number, raise_problems
from batchloom.core.wording import format_duration
from batchloom.media.media_content import MediaContent, MediaLimits, check_declared_size, open_content

_MAX_VALUE = 10**9
_MICROSECONDS_PER_SECOND = 10**6
# Minimum distance of a frame for a seek; nearer frames are reached sooner by decoding on.
_SEEK_DISTANCE = 2 * _MICROSECONDS_PER_SECOND
# Headers round the end of the last frame.
_END_TOLERANCE = 1 * _MICROSECONDS_PER_SECOND
_SamplingSetting = partial(Setting, has_option=False, omit_default=True)
_READABLE_FORMATS = "MP4, MOV, WebM, Matroska and AVI"
_MP4_BOXES = (b"moov", b"mdat", b"wide", b"free", b"skip")
_IMAGE_BRANDS = (b"avif", b"avis", b"heic", b"heix", b"hevc", b"mif1", b"msf1")
_MAX_SHOWN_BYTES = 16


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

    fps: Annotated[
        float,
        _SamplingSetting(
            help="Frames per second of video.",
            check=lambda value: "" if is_positive_number(value) else "is not a number above 0",
        ),
    ] = 2.0
    frames: Annotated[
        int | None,
        _SamplingSetting(
            help="Number of evenly spaced frames in place of frames per second; all frames of a shorter video.",
            minimum=1,
            maximum=_MAX_VALUE,
        ),
    ] = None
    max_frames: Annotated[
        int,
        _SamplingSetting(help="Maximum number of frames with frames per second.", minimum=1, maximum=_MAX_VALUE),
    ] = 128
    min_pixels: Annotated[
        int,
        _SamplingSetting(
            help="Minimum width x height of a frame; smaller frames are enlarged.",
            minimum=1,
            maximum=_MAX_VALUE,
        ),
    ] = 16 * 16
    max_pixels: Annotated[
        int,
        _SamplingSetting(
            help="Maximum width x height of a frame; larger frames are shrunk.",
            minimum=1,
            maximum=_MAX_VALUE,
        ),
    ] = 256 * 256

    def __post_init__(self) -> None:
        problems = find_problems(self)
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


def inspect_video(content: MediaContent, limits: MediaLimits, sampling: FrameSampling) -> list[FrameFacts]:
    """Return the sampled frames of a video after checking that the last one exists."""
    with _open_video(content) as film:
        pixels = film.stream.codec_context.width * film.stream.codec_context.height
        if not pixels:
            raise UnusableRecordError("is empty: its frames have no size")
        if pixels > limits.image_pixels:
            raise UnusableRecordError(
                f"has frames of {pixels:,} pixels, more than the {limits.image_pixels:,} that are allowed "
                "(image_pixels): make them smaller, or allow more"
            )
        times = compute_frame_times(film.seconds, film.stream.average_rate, sampling)
        last = film.get_frame(times[-1])
        end = film.end
        if end is not None and end + _END_TOLERANCE < times[-1]:
            raise UnusableRecordError(
                f"ends after {format_duration(end / _MICROSECONDS_PER_SECOND)}, where its header says "
                f"{format_duration(float(film.seconds))}: it is cut short; fetch it again"
            )
        width, height = _to_upright_rgb(last).size
    width, height = fit_frame_size(width, height, sampling)
    return [FrameFacts(width, height, time=time) for time in times]


def decode_frames(content: MediaContent, facts: Sequence[FrameFacts]) -> Iterator[Any]:
    """Yield video frames as upright RGB ``PIL.Image.Image``, resized to their facts.

    A frame is the one displayed at its time; ``facts`` ascend by time. Pillow resizes with bicubic interpolation.
    """
    from PIL import Image

    with _open_video(content) as film:
        for frame_facts in facts:
            picture = _to_upright_rgb(film.get_frame(frame_facts.time))
            if picture.size != (frame_facts.width, frame_facts.height):
                picture = picture.resize((frame_facts.width, frame_facts.height), Image.Resampling.BICUBIC)
            yield picture


def detect_video_format(head: bytes, size: int) -> str:
    """Detect the format from the first bytes of a video, as named by FFmpeg."""
    if head[4:8] == b"ftyp" and head[8:12] in _IMAGE_BRANDS:
        raise UnusableRecordError("is an image (AVIF or HEIF), not a video")
    if head[4:8] == b"ftyp" or head[4:8] in _MP4_BOXES:
        return "mov"
    if head.startswith(b"\x1aE\xdf\xa3"):
        return "matroska"
    if head[:4] == b"RIFF" and head[8:12] == b"AVI ":
        check_declared_size(int.from_bytes(head[4:8], "little") + 8, size)
        return "avi"
    if not head:
        raise UnusableRecordError("is empty (0 bytes)")
    raise UnusableRecordError(
        f"begins with {head[:_MAX_SHOWN_BYTES]!r}, which is not the start of a supported video: {_READABLE_FORMATS}; "
        "convert it: ffmpeg -i IN OUT.mp4"
    )


class _TimedFrame(NamedTuple):
    """A frame and its presentation time in microseconds."""

    time: int
    frame: Any


@final
class _VideoDecoder:
    """An open video that returns the frame at a time; ascending times are fastest."""

    def __init__(self, container: Any, stream: Any) -> None:
        self._container = container
        self.stream = stream
        self._origin = stream.start_time or 0
        self._frames: Iterator[Any] = iter(())
        self._current: _TimedFrame | None = None
        self._next: _TimedFrame | None = None
        self._seek_distance = _SEEK_DISTANCE

    @property
    def seconds(self) -> Fraction:
        """Duration of the video."""
        stream = self.stream
        if stream.duration:
            return Fraction(stream.duration * stream.time_base)
        if not self._container.duration:
            raise UnusableRecordError(
                "does not state its length, as in live recordings; rewrite it: ffmpeg -i IN -c copy OUT"
            )
        return Fraction(self._container.duration, _MICROSECONDS_PER_SECOND)

    def get_frame(self, time: int) -> Any:
        """Return the frame displayed at a time, clamped to the first and last frame."""
        if self._current is None or not self._current.time <= time <= self._current.time + self._seek_distance:
            self._seek(time)
        while self._next is not None and self._next.time <= time:
            self._current, self._next = self._next, self._decode_next()
        if self._current is None:
            raise UnusableRecordError("holds no frame that can be decoded: it is damaged or cut short")
        if self._current.frame.is_corrupt:
            raise UnusableRecordError(
                f"is damaged at {format_duration(self._current.time / _MICROSECONDS_PER_SECOND)}; fetch it again"
            )
        return self._current.frame

    @property
    def end(self) -> int | None:
        """End of the last frame in microseconds; None before it is reached."""
        if self._current is None or self._next is not None:
            return None
        frame = self._current.frame
        return self._to_microseconds(frame.pts + (frame.duration or 0))

    def _seek(self, time: int) -> None:
        """Seek to the last frame before a time from which decoding can begin."""
        previous = self._current
        self._start_decoding_at(self._origin + int(time / _MICROSECONDS_PER_SECOND / self.stream.time_base))
        if self._next is None or self._next.time > time:
            self._start_decoding_at(self._origin)
        if previous is not None and self._next is not None and self._next.time <= previous.time:
            self._seek_distance *= 2  # Decoding on would have been faster.
        self._current, self._next = self._next, self._decode_next()

    def _start_decoding_at(self, timestamp: int) -> None:
        self._container.seek(timestamp, stream=self.stream)
        self._frames = self._container.decode(self.stream)
        self._next = self._decode_next()

    def _decode_next(self) -> _TimedFrame | None:
        frame = next(self._frames, None)
        if frame is None:
            return None
        if frame.pts is None:
            raise UnusableRecordError("has frames without timestamps; convert it: ffmpeg -i IN OUT.mp4")
        return _TimedFrame(self._to_microseconds(frame.pts), frame)

    def _to_microseconds(self, timestamp: int) -> int:
        return int((timestamp - self._origin) * self.stream.time_base * _MICROSECONDS_PER_SECOND)


@contextmanager
def _open_video(content: MediaContent) -> Iterator[_VideoDecoder]:
    form = detect_video_format(content.read(0, 64), content.size)
    try:
        import av
    except ImportError as error:
        raise MissingDependencyError("Videos need PyAV: pip install 'batchloom[media]'.") from error
    try:
        with av.open(open_content(content), format=form, metadata_errors="ignore") as container:
            if not container.streams.video:
                raise UnusableRecordError(
                    "holds no video stream: it has none, or is cut short before its header names one"
                )
            stream = container.streams.video[0]
            if stream.codec_context is None:
                raise UnusableRecordError("has a codec that is not available, or is damaged")
            # Videos are decoded in parallel, so each uses one thread.
            stream.codec_context.thread_count = 1
            yield _VideoDecoder(container, stream)
    except av.FFmpegError as error:
        raise UnusableRecordError(
            f"cannot be decoded: it is damaged, cut short, or has a codec that is not available ({error})"
        ) from error


def _to_upright_rgb(frame: Any) -> Any:
    """Convert a frame to an RGB image and apply its rotation."""
    picture = frame.to_image()
    return picture.rotate(frame.rotation, expand=True) if frame.rotation else picture
