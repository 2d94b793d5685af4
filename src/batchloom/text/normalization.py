"""Characters of a text: wrong decodings, NFC and LF, control characters, blanks."""

import itertools
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass

from batchloom.core.settings import coerce_int_fields, raise_problems
from batchloom.text.steps import CleanFunction

# CPython sorts runs of combining marks by insertion, in quadratic time: a megabyte of
# alternating marks takes hours. Sorting a run beforehand is cheap and gives the same NFC.
_MAX_COMBINING_RUN = 1024
# Tibetan vowels that are marks only once they are decomposed, which NFC does for good.
_DECOMPOSED_MARKS = {"\u0f73": "\u0f71\u0f72", "\u0f75": "\u0f71\u0f74", "\u0f81": "\u0f71\u0f80"}
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
# Category Zs without the space itself, spelled out so that every Python matches the same.
_UNICODE_SPACES = re.compile("[\u00a0\u1680\u2000-\u200a\u202f\u205f\u3000]")
# Each begins with one character, which is found at memory speed; the lookbehind is checked
# afterwards. Blanks at the beginning of a line are its indentation.
_SPACE_RUNS = re.compile(r" (?<=[^ \t\n] )[ \t]++")
_TAB_RUNS = re.compile(r"\t(?<=[^ \t\n]\t)[ \t]++")
# Characters that no rule of ftfy matches on their own, so that a text of ASCII and these is sound:
# Chinese, Japanese, Korean and full width, typographic quotes, dashes, the ellipsis.
_SAFE_CHARACTERS = (
    "\x00-\x7f\u2e80-\ua4cf\uac00-\ud7a3\uff00-\uffef\U0001f300-\U0001faff"
    "\u2010-\u2015\u2018\u2019\u201c\u201d\u2026\u2022"
)


def normalize(text: str) -> str:
    r"""Return ``text`` in Unicode NFC, with ``\r\n`` and ``\r`` as ``\n``."""
    if not text.isascii():
        if len(text) >= _MAX_COMBINING_RUN:
            for character, marks in _DECOMPOSED_MARKS.items():
                text = text.replace(character, marks)
        if len(text) >= _MAX_COMBINING_RUN and _has_long_run(text):
            runs = itertools.groupby(text, lambda char: unicodedata.combining(char) != 0)
            text = "".join("".join(sorted(run, key=unicodedata.combining) if marks else run) for marks, run in runs)
        text = unicodedata.normalize("NFC", text)
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text


def _has_long_run(text: str) -> bool:
    """Return whether a run has at least ``_MAX_COMBINING_RUN`` combining marks."""
    step = _MAX_COMBINING_RUN // 2
    return any(map(unicodedata.combining, text[::step])) and any(
        unicodedata.combining(text[at]) and all(map(unicodedata.combining, text[at : at + step]))
        for at in range(0, len(text), step)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlSettings:
    """Settings of the step ``control``.

    Attributes:
        joiners: keep zero-width joiners and non-joiners after letters and signs that they shape
            (Persian, scripts of India, emoji); others are always removed.
    """

    joiners: bool = True


def make_control_step(settings: ControlSettings) -> CleanFunction:
    replace_joiner = _keep_one_joiner if settings.joiners else ""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class WhitespaceSettings:
    """Settings of the step ``whitespace``.

    Attributes:
        spaces: replace other Unicode spaces (no-break, ideographic ...) by a space.
        runs: replace runs of blanks inside a line by one space; indentation stays.
        trailing: remove blanks at the end of a line.
        blank_lines: maximum number of consecutive empty lines.
    """

    spaces: bool = True
    runs: bool = True
    trailing: bool = True
    blank_lines: int | None = 2

    def __post_init__(self) -> None:
        if self.blank_lines is not None:
            raise_problems(coerce_int_fields(self, {"blank_lines": (0, 1 << 30)}))


def make_whitespace_step(settings: WhitespaceSettings) -> CleanFunction:
    most = settings.blank_lines
    breaks = "\n" * (2 if most is None else most + 2)
    many = re.compile(f"{breaks}\n*+")

    def clean(text: str) -> str:
        if settings.spaces and not text.isascii() and _UNICODE_SPACES.search(text):
            text = _UNICODE_SPACES.sub(" ", text)
        if settings.trailing:
            text = _strip_trailing(text)
        if settings.runs:
            text = _collapse_runs(text)
        if most is None or breaks[1:] not in text:
            return text
        if text.startswith(breaks[1:]):  # The first line has no line end before it that would count.
            text = breaks[2:] + text.lstrip("\n")
        return many.sub(breaks[1:], text) if breaks in text else text

    return clean


def _strip_trailing(text: str) -> str:
    if " \n" in text or "\t\n" in text or text.endswith((" ", "\t")):
        return "\n".join([line.rstrip(" \t") for line in text.split("\n")])
    return text


def _collapse_runs(text: str) -> str:
    if "\t" in text:
        return _TAB_RUNS.sub(" ", _SPACE_RUNS.sub(" ", text))
    return _SPACE_RUNS.sub(" ", text) if "  " in text else text


@dataclass(frozen=True, slots=True, kw_only=True)
class MojibakeSettings:
    """Settings of the step ``mojibake``; fixes beyond encodings are off.

    Attributes:
        unescape_html: replace entities (``&amp;``) by their characters, in lines without ``<``.
        uncurl_quotes: replace typographic quotes by straight ones.
        width: replace full-width and half-width characters by ordinary ones.
        ligatures: replace Latin ligatures by their letters.
    """

    unescape_html: bool = False
    uncurl_quotes: bool = False
    width: bool = False
    ligatures: bool = False


def make_mojibake_step(settings: MojibakeSettings) -> CleanFunction:
    more = settings != MojibakeSettings()
    fix = _make_extra_fixes(settings) if more else _load_fix_encoding()
    unsafe_pattern = re.compile(f"[^{_SAFE_CHARACTERS}]")

    def clean(text: str) -> str:
        if more:
            if text.isascii() and not settings.unescape_html:
                return text
        elif text.isascii() or unsafe_pattern.search(text) is None:
            return text
        # Fix line by line, as ftfy does: each line may have another encoding.
        return "\n".join([_fix_if_stable(line, fix) for line in text.split("\n")])

    return clean


# Lines are fixed in chunks, because ftfy makes several copies of its input.
_CHUNK_CHARACTERS = 1_000_000


def _fix_if_stable(line: str, fix: Callable[[str], str]) -> str:
    if len(line) <= _CHUNK_CHARACTERS:
        return fix(line)
    return "".join(fix(line[at : at + _CHUNK_CHARACTERS]) for at in range(0, len(line), _CHUNK_CHARACTERS))


def _load_fix_encoding() -> Callable[[str], str]:
    from ftfy import fix_encoding

    def fix(line: str) -> str:
        return line if line.isascii() else str(fix_encoding(line))

    return fix


def _make_extra_fixes(settings: MojibakeSettings) -> Callable[[str], str]:
    from ftfy import TextFixerConfig, fix_text

    config = TextFixerConfig(
        unescape_html="auto" if settings.unescape_html else False,
        uncurl_quotes=settings.uncurl_quotes,
        fix_character_width=settings.width,
        fix_latin_ligatures=settings.ligatures,
        remove_terminal_escapes=False,
        fix_line_breaks=False,
        fix_surrogates=False,
        remove_control_chars=False,
        normalization=None,
        explain=False,
    )
    return lambda line: str(fix_text(line, config))
