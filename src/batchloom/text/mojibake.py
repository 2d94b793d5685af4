"""Repair of text that was decoded with the wrong encoding, with ftfy."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from batchloom.text.steps import CleanFunction

# Characters that no rule of ftfy matches on their own, so that a text of ASCII and these is sound:
# Chinese, Japanese, Korean and full width, typographic quotes, dashes, the ellipsis.
_SAFE_CHARACTERS = (
    "\x00-\x7f\u2e80-\ua4cf\uac00-\ud7a3\uff00-\uffef\U0001f300-\U0001faff"
    "\u2010-\u2015\u2018\u2019\u201c\u201d\u2026\u2022"
)
_UNSAFE_PATTERN = re.compile(f"[^{_SAFE_CHARACTERS}]")


@dataclass(frozen=True, slots=True, kw_only=True)
class MojibakeSettings:
    """Settings of the step ``mojibake``; fixes beyond encodings are off.

    Attributes:
        unescape_html: whether entities (``&amp;``) become their characters, in lines without ``<``.
        uncurl_quotes: whether typographic quotes become straight ones.
        width: whether full-width and half-width characters become ordinary ones.
        ligatures: whether Latin ligatures become their letters.
    """

    unescape_html: bool = False
    uncurl_quotes: bool = False
    width: bool = False
    ligatures: bool = False


def make_mojibake_step(settings: MojibakeSettings) -> CleanFunction:
    """Return the function of the step."""
    more = settings != MojibakeSettings()
    fix = _make_extra_fixes(settings) if more else _load_fix_encoding()

    def clean(text: str) -> str:
        if more:
            if text.isascii() and not settings.unescape_html:
                return text
        elif text.isascii() or _UNSAFE_PATTERN.search(text) is None:
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
    from ftfy import fix_encoding  # noqa: PLC0415  # optional dependency

    def fix(line: str) -> str:
        return line if line.isascii() else str(fix_encoding(line))

    return fix


def _make_extra_fixes(settings: MojibakeSettings) -> Callable[[str], str]:
    from ftfy import TextFixerConfig, fix_text  # noqa: PLC0415  # optional dependency

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
