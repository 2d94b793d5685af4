"""How many samples an MP3 holds, counted by the headers of its frames.

An MP3 without a Xing, Info or VBRI header does not say how long it is; decoders take the rate of its first
frame for that of all. Frames as ISO/IEC 11172-3 and 13818-3 have them, of layer III.
"""

from batchloom.media.media_content import Content

_KBITS_1 = (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)
_KBITS_2 = (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)
_RATES = {3: (44100, 48000, 32000), 2: (22050, 24000, 16000), 0: (11025, 12000, 8000)}
_MARKS = (b"Xing", b"Info", b"VBRI")


def is_mp3(content: Content) -> bool:
    """Whether frames of an MP3 begin where its tags end."""
    return _frame(content.read(at := _behind_tags(content), at + 4)) is not None


def has_length(content: Content) -> bool:
    """Whether the first frame of an MP3 says how long it is."""
    at = _behind_tags(content)
    first = content.read(at, at + 64)
    return any(mark in first for mark in _MARKS)


def mp3_samples(content: Content) -> int:
    """Samples in the frames of an MP3, each of its channels."""
    data = content.read(0, content.size)
    at, samples = _behind_tags(content), 0
    while (found := _frame(data[at : at + 4])) is not None:
        size, held = found
        if at + size > len(data):
            break
        at, samples = at + size, samples + held
    return samples


def _behind_tags(content: Content) -> int:
    """Where an ID3v2 tag at the beginning ends."""
    at = 0
    while (head := content.read(at, at + 10))[:3] == b"ID3" and len(head) == 10:
        size = sum(
            (byte & 127) << shift for byte, shift in zip(head[6:], (21, 14, 7, 0), strict=True)
        )
        at += 10 + size + (10 if head[5] & 16 else 0)
    return at


def _frame(head: bytes) -> tuple[int, int] | None:
    """(bytes, samples) of the frame that a header begins; None where it is none."""
    if len(head) < 4 or head[0] != 0xFF or head[1] & 0xE6 != 0xE2:
        return None
    version, bits, rate = head[1] >> 3 & 3, head[2] >> 4, head[2] >> 2 & 3
    if version == 1 or rate == 3 or not 0 < bits < 15:
        return None
    kbits = (_KBITS_1 if version == 3 else _KBITS_2)[bits]
    samples = 1152 if version == 3 else 576
    size = samples // 8 * kbits * 1000 // _RATES[version][rate] + (head[2] >> 1 & 1)
    return size, samples
