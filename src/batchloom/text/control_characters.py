"""Removal of invisible control and format characters."""

import re
from dataclasses import dataclass

from batchloom.text.steps import CleanFunction

# Spelled out instead of using unicodedata, so that every Python removes the same characters.
_LINE_END_CHARACTERS = "\x0b\x0c\x1c-\x1e\x85\u2028\u2029"
_REMOVED_CHARACTERS = (
    "\x00-\x08\x0e-\x1b\x1f\x7f-\x84\x86-\x9f"  # C0 and C1 without those that end lines
    "\u00ad\u061c\u200b\u200e\u200f"  # soft hyphen, zero-width space, direction marks
    "\u202a-\u202e\u2060-\u206f\ufeff"  # embeddings and isolates, word joiner, byte-order mark
    "\ufff9-\ufffb\ufdd0-\ufdef\ud800-\udfff"  # annotations, noncharacters, lone surrogates
    "\U000e0001\U000e0020-\U000e007f"  # tags
    + "".join(f"{chr(plane << 16 | 0xFFFE)}{chr(plane << 16 | 0xFFFF)}" for plane in range(17))
)
_LINE_END_PATTERN = re.compile(f"\r\n?|[{_LINE_END_CHARACTERS}]")
_REMOVED_PATTERN = re.compile(f"[{_REMOVED_CHARACTERS}]")
_JOINER_PATTERN = re.compile("[\u200c\u200d]++")
_CONTROL_PATTERN = re.compile(f"[\r\u200c\u200d{_LINE_END_CHARACTERS}{_REMOVED_CHARACTERS}]")
_REMOVED_ASCII = bytes({*range(32), 127} - {9, 10})


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlSettings:
    """Settings of the step ``control``.

    Attributes:
        joiners: whether zero-width joiners and non-joiners stay after letters and signs that
            they shape (Persian, scripts of India, emoji); others are always removed.
    """

    joiners: bool = True


def make_control_step(settings: ControlSettings) -> CleanFunction:
    """Return the function of the step."""
    replace_joiner = _keep_one_joiner if settings.joiners else _drop_joiners

    def clean(text: str) -> str:
        if not _may_need_cleaning(text):
            return text
        clean = _REMOVED_PATTERN.sub("", _LINE_END_PATTERN.sub("\n", text))
        clean = _JOINER_PATTERN.sub(replace_joiner, clean)
        return text if clean == text else clean

    return clean


def _may_need_cleaning(text: str) -> bool:
    if text.isascii():
        return len(text.encode().translate(None, _REMOVED_ASCII)) != len(text)
    # No removed character is printable in any version of Unicode, but other characters may not be either.
    if text.replace("\n", "").replace("\t", "").isprintable():
        return False
    return _CONTROL_PATTERN.search(text) is not None


def _keep_one_joiner(run: re.Match[str]) -> str:
    before = run.string[run.start() - 1 : run.start()]
    # Joiners do not shape Latin letters (below U+0300) and punctuation.
    shaped = before >= "\u0300" and not "\u2000" <= before <= "\u206f" and before != "\u3000"
    return run[0][0] if shaped else ""


def _drop_joiners(_: re.Match[str]) -> str:
    return ""
