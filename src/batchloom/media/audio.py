"""Sounds: length from the header alone, and samples."""

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import MissingDependencyError, UnusableRecordError
from batchloom.core.medium import AudioFacts
from batchloom.core.wording import format_duration
from batchloom.media.media_content import MediaContent, MediaLimits, check_declared_size, open_content

_READABLE_FORMATS = "WAV, FLAC, MP3, Ogg (Vorbis, Opus), AIFF and other formats of libsndfile"
_CHUNK_SAMPLES = 1 << 20
_MAX_AMPLITUDE = 1e6
_MAX_SAMPLES = 1 << 48
_BITRATES_MPEG1 = (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)
_BITRATES_MPEG2 = (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)
_SAMPLE_RATES = {3: (44100, 48000, 32000), 2: (22050, 24000, 16000), 0: (11025, 12000, 8000)}
_LENGTH_TAGS = (b"Xing", b"Info", b"VBRI")


def inspect_audio(content: MediaContent, limits: MediaLimits) -> AudioFacts:
    """Read the header of a sound and check that its last sample exists.

    Raises:
        UnusableRecordError: the content is empty, no sound, truncated, damaged, or longer than allowed.
        MissingDependencyError: soundfile is not installed.
    """
    if not content.size:
        raise UnusableRecordError("is empty (0 bytes)")
    _check_not_truncated(content)
    with _open_audio(content) as sound:
        facts = AudioFacts(int(sound.frames), int(sound.samplerate), int(sound.channels))
        if facts.samples < 1:
            raise UnusableRecordError("holds no samples")
        if facts.samples > _MAX_SAMPLES:
            raise UnusableRecordError("does not state its length, as in streamed audio; rewrite it: ffmpeg -i IN OUT")
        if facts.seconds > limits.audio_seconds:
            raise UnusableRecordError(
                f"lasts {format_duration(facts.seconds)}, more than the {format_duration(limits.audio_seconds)} that "
                "are allowed (audio_seconds): cut it, or allow more"
            )
        _check_length(content, sound, facts.samples)
    return facts


def decode_audio(content: MediaContent, facts: AudioFacts, rate: int) -> NDArray[np.float32]:
    """Decode a sound to mono at a given rate, float32 [facts.samples_at(rate)].

    Channels are averaged and resampled by soxr at quality HQ, as in ``librosa.load`` and
    therefore transformers' ``load_audio``.

    Raises:
        UnusableRecordError: the sound cannot be decoded, or is shorter than its header says.
        MissingDependencyError: soxr is not installed.
    """
    chunks = []
    with _open_audio(content) as sound:
        remaining = facts.samples
        while remaining:
            chunk = _read_samples(sound, min(remaining, _CHUNK_SAMPLES))
            if not len(chunk):
                header_length = f"{facts.samples:,} samples"
                raise UnusableRecordError(f"ends {remaining:,} samples early: its header said {header_length}")
            chunks.append(chunk.mean(axis=1, dtype=np.float32))
            remaining -= len(chunk)
    mono = np.concatenate(chunks)
    # Larger values are no sound, and their squares overflow.
    if not (np.abs(mono) < _MAX_AMPLITUDE).all():
        raise UnusableRecordError("holds samples that are not numbers, or far beyond full scale (1.0); encode it again")
    return _resample(mono, facts, rate)


def _resample(mono: NDArray[np.float32], facts: AudioFacts, rate: int) -> NDArray[np.float32]:
    if facts.rate == rate:
        return mono
    try:
        import soxr
    except ImportError as error:
        raise MissingDependencyError("Resampling audio needs soxr: pip install 'batchloom[media]'.") from error
    resampled = soxr.resample(mono, facts.rate, rate, quality="HQ")
    # soxr may return a sample or so too many or too few.
    exact = np.zeros(facts.samples_at(rate), np.float32)
    exact[: len(resampled)] = resampled[: len(exact)]
    return exact


def _read_samples(sound: Any, samples: int) -> NDArray[np.float32]:
    try:
        chunk: NDArray[np.float32] = sound.read(samples, dtype="float32", always_2d=True)
    except RuntimeError as error:
        raise _damaged_audio_error(error) from error
    return chunk


def _open_audio(content: MediaContent) -> Any:
    try:
        import soundfile
    except ImportError as error:
        raise MissingDependencyError("Audio needs soundfile: pip install 'batchloom[media]'.") from error
    try:
        return soundfile.SoundFile(open_content(content))
    except (RuntimeError, TypeError) as error:
        head = content.read(0, 16)
        raise UnusableRecordError(
            f"begins with {head!r} and cannot be read as audio: it is damaged, or not one of {_READABLE_FORMATS}"
        ) from error


def _check_length(content: MediaContent, sound: Any, samples: int) -> None:
    """Raise if the last sample is not at the position that the header gives."""
    try:
        sound.seek(samples - 1)
        last = len(sound.read(1))
    except RuntimeError as error:
        raise _damaged_audio_error(error) from error
    if not last:
        raise UnusableRecordError(
            f"ends before its last sample (its header says {samples:,} samples): it is cut short; fetch it again"
        )
    if is_mp3(content) and not has_mp3_length(content) and count_mp3_samples(content) != samples:
        raise UnusableRecordError(
            "is an MP3 of variable bit rate that does not state its length; add the length: ffmpeg -i IN.mp3 -c copy "
            "OUT.mp3"
        )


def _check_not_truncated(content: MediaContent) -> None:
    """Raise if a WAV or AIFF is shorter than declared: libsndfile reads what remains."""
    head = content.read(0, 12)
    if head[:4] == b"RIFF" and head[8:12] == b"WAVE":
        order: Literal["little", "big"] = "little"
    elif head[:4] == b"FORM" and head[8:12] in (b"AIFF", b"AIFC"):
        order = "big"
    else:
        return
    declared_size = int.from_bytes(head[4:8], order) + 8
    offset = 12
    while len(start := content.read(offset, offset + 8)) == 8 and start[:4] not in (
        b"data",
        b"SSND",
    ):
        offset += 8 + int.from_bytes(start[4:], order) + int.from_bytes(start[4:], order) % 2
    if start[:4] in (b"data", b"SSND"):
        declared_size = max(declared_size, offset + 8 + int.from_bytes(start[4:], order))
    check_declared_size(declared_size, content.size)


def _damaged_audio_error(error: BaseException) -> UnusableRecordError:
    return UnusableRecordError(f"cannot be decoded: it is damaged or cut short ({error})")


def is_mp3(content: MediaContent) -> bool:
    """Return whether an MP3 frame follows the tags."""
    return _parse_frame_header(content.read(at := _skip_id3_tag(content), at + 4)) is not None


def has_mp3_length(content: MediaContent) -> bool:
    """Return whether the first frame of an MP3 stores its length."""
    at = _skip_id3_tag(content)
    first = content.read(at, at + 64)
    return any(mark in first for mark in _LENGTH_TAGS)


def count_mp3_samples(content: MediaContent) -> int:
    """Count the samples per channel in the frames of an MP3."""
    data = content.read(0, content.size)
    offset = _skip_id3_tag(content)
    samples = 0
    while (frame := _parse_frame_header(data[offset : offset + 4])) is not None:
        size, frame_samples = frame
        if offset + size > len(data):
            break
        offset = offset + size
        samples = samples + frame_samples
    return samples


def _skip_id3_tag(content: MediaContent) -> int:
    """Return the offset after the leading ID3v2 tags."""
    at = 0
    while (head := content.read(at, at + 10))[:3] == b"ID3" and len(head) == 10:
        size = sum((byte & 127) << shift for byte, shift in zip(head[6:], (21, 14, 7, 0), strict=True))
        at += 10 + size + (10 if head[5] & 16 else 0)
    return at


def _parse_frame_header(head: bytes) -> tuple[int, int] | None:
    """Return (bytes, samples) of a frame; None if this is no frame header."""
    if len(head) < 4 or head[0] != 0xFF or head[1] & 0xE6 != 0xE2:
        return None
    version = head[1] >> 3 & 3
    bitrate_index = head[2] >> 4
    sample_rate_index = head[2] >> 2 & 3
    if version == 1 or sample_rate_index == 3 or not 0 < bitrate_index < 15:
        return None
    kilobits_per_second = (_BITRATES_MPEG1 if version == 3 else _BITRATES_MPEG2)[bitrate_index]
    samples = 1152 if version == 3 else 576
    size = samples // 8 * kilobits_per_second * 1000 // _SAMPLE_RATES[version][sample_rate_index] + (head[2] >> 1 & 1)
    return size, samples
