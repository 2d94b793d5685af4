"""Number of samples of an MP3, counted from its frame headers.

An MP3 without a Xing, Info or VBRI header does not store its length; decoders apply the bit rate of the first
frame to all. Frames are those of ISO/IEC 11172-3 and 13818-3, layer III.
"""

from batchloom.media.media_content import MediaContent

_BITRATES_MPEG1 = (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)
_BITRATES_MPEG2 = (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)
_SAMPLE_RATES = {3: (44100, 48000, 32000), 2: (22050, 24000, 16000), 0: (11025, 12000, 8000)}
_LENGTH_TAGS = (b"Xing", b"Info", b"VBRI")


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
    offset, samples = _skip_id3_tag(content), 0
    while (frame := _parse_frame_header(data[offset : offset + 4])) is not None:
        size, frame_samples = frame
        if offset + size > len(data):
            break
        offset, samples = offset + size, samples + frame_samples
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
    version, bitrate_index, sample_rate_index = head[1] >> 3 & 3, head[2] >> 4, head[2] >> 2 & 3
    if version == 1 or sample_rate_index == 3 or not 0 < bitrate_index < 15:
        return None
    kilobits_per_second = (_BITRATES_MPEG1 if version == 3 else _BITRATES_MPEG2)[bitrate_index]
    samples = 1152 if version == 3 else 576
    size = samples // 8 * kilobits_per_second * 1000 // _SAMPLE_RATES[version][sample_rate_index] + (head[2] >> 1 & 1)
    return size, samples
