"""The rules of C4 (Raffel et al. 2020, section 2.2).

See https://jmlr.org/papers/v21/20-074.html. Rules remove single lines or complete documents, as datatrove's
``C4QualityFilter`` does after the code that made C4 (tensorflow_datasets/text/c4_utils.py). Two rules are off by
default: mC4's on paragraphs (Xue et al. 2021; datatrove's ``C4ParagraphFilter``), and the one on bad words,
whose list is not part of this package (``C4BadWordsFilter``).
"""

import functools
import re
from dataclasses import dataclass
from typing import Final

from batchloom.core.errors import InputError, InputMissingError
from batchloom.core.files import describe_os_error, read_regular_file, suggest_path
from batchloom.text.english_words import count_sentences
from batchloom.text.steps import CleanFunction, Count, DroppedText, ListPath, Switch, check_limits

LOREM_IPSUM: Final = "c4: lorem ipsum"
CURLY_BRACKET: Final = "c4: curly bracket"
FEW_SENTENCES: Final = "c4: too few sentences"
FEW_PARAGRAPHS: Final = "c4: too few long paragraphs"
BAD_WORD: Final = "c4: bad word"

_CITATION = re.compile(r"\[\d*]|\[edit]|\[citation needed]")
_TERMINAL_PUNCTUATION = (".", "?", "!", '"', "'")
# Lines with one of these are policy notices.
POLICY_PHRASES = (
    "terms of use",
    "privacy policy",
    "cookie policy",
    "uses cookies",
    "use of cookies",
    "use cookies",
)
_LOREM_PHRASE = "lorem ipsum"
_JAVASCRIPT_WORD = "javascript"
_MAX_LIST_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class C4:
    """Rules of C4; None or False disables one. Defaults are the published ones.

    Attributes:
        max_word_length: remove lines with a longer word, in characters.
        remove_citations: remove ``[1]``, ``[edit]`` and ``[citation needed]``.
        terminal_punctuation: remove lines that do not end with ``. ? ! " '``, and those that end
            with an ellipsis.
        min_words: remove lines with fewer words.
        lorem_ipsum: drop documents with ``lorem ipsum``.
        javascript: remove lines with ``javascript``.
        curly_bracket: drop documents with ``{``.
        policy: remove lines that mention cookies, terms of use or a privacy policy.
        min_sentences: drop documents with fewer sentences in the remaining lines.
        min_paragraphs: drop documents with fewer lines of at least ``long_paragraph`` characters;
            mC4 uses 3.
        long_paragraph: length of a long line in characters.
        bad_words: path of a list, one word or phrase in lower case per line. A document with one
            between characters other than letters, digits and ``_`` is dropped.
    """

    max_word_length: Count | None = 1000
    remove_citations: Switch = True
    terminal_punctuation: Switch = True
    min_words: Count | None = 3
    lorem_ipsum: Switch = True
    javascript: Switch = True
    curly_bracket: Switch = True
    policy: Switch = True
    min_sentences: Count | None = 5
    min_paragraphs: Count | None = None
    long_paragraph: Count = 200
    bad_words: ListPath | None = None

    def __post_init__(self) -> None:
        check_limits(self)


def make_c4_step(settings: C4) -> CleanFunction:
    """Return a function that removes lines and drops texts that violate a rule.

    Raises InputError if the list of bad words is unreadable or empty.
    """
    bad_words = None
    if settings.bad_words is not None:
        # Trying the longest word first at each position changes no verdict.
        words = sorted(read_bad_words(settings.bad_words), key=len, reverse=True)
        bad_words = re.compile(rf"(?:\W|^)({'|'.join(map(re.escape, words))})(?:\W|$)")
    return functools.partial(_clean_text, settings, bad_words)


def read_bad_words(path: str) -> tuple[str, ...]:
    """Read the distinct words of a list, in order."""
    try:
        text = read_regular_file(path, _MAX_LIST_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"bad_words: {path} is not UTF-8; save it as UTF-8 text") from error
    except FileNotFoundError as error:
        raise InputMissingError(f"bad_words: {path} does not exist{suggest_path(path)}") from error
    except OSError as error:
        raise InputError(f"bad_words: {path} cannot be read: {describe_os_error(error)}") from error
    words = tuple(dict.fromkeys(filter(None, map(str.strip, text.splitlines()))))
    if not words:
        raise InputError(f"bad_words: {path} holds no words; give one word per line")
    return words


def _clean_text(settings: C4, bad_words: re.Pattern[str] | None, text: str) -> str | DroppedText:
    lines = _filter_lines(settings, text)
    if isinstance(lines, DroppedText):
        return lines
    if settings.min_sentences is not None:
        count = 0
        for line in lines:
            count += count_sentences(line, settings.min_sentences - count)
            if count >= settings.min_sentences:
                break
        if count < settings.min_sentences:
            requirement = f"at least {settings.min_sentences:,}"
            return DroppedText(FEW_SENTENCES, f"{count:,} in {len(lines):,} lines, {requirement}")
    filtered_text = "\n".join(lines).strip()
    # Return the same object if nothing changed.
    text = text if filtered_text == text else filtered_text
    if settings.min_paragraphs:
        long = sum(len(line) >= settings.long_paragraph for line in text.split("\n"))
        if long < settings.min_paragraphs:
            requirement = f"at least {settings.min_paragraphs:,}"
            return DroppedText(FEW_PARAGRAPHS, f"{long:,} of {settings.long_paragraph:,} characters, {requirement}")
    match = bad_words.search(text.lower()) if bad_words else None
    return DroppedText(BAD_WORD, repr(match[1])) if match else text


def _filter_lines(settings: C4, text: str) -> list[str] | DroppedText:
    """Return the remaining lines, or the drop of the document."""
    lines: list[str] = []
    lowered = (_CITATION.sub("", text) if settings.remove_citations else text).lower()
    has_phrase = any(map(lowered.__contains__, (_LOREM_PHRASE, _JAVASCRIPT_WORD, *POLICY_PHRASES)))
    for raw in text.splitlines():
        line = _normalize_line(settings, raw.strip())
        if line is None:
            continue
        verdict = _check_line(settings, line) if has_phrase or "{" in line else None
        if isinstance(verdict, DroppedText):
            return verdict
        if verdict is None:
            lines.append(line)
    return lines


def _normalize_line(settings: C4, line: str) -> str | None:
    """Remove citations from a line; None if it does not look like a sentence."""
    most = settings.max_word_length
    least = settings.min_words
    if most is not None and len(line) > most and max(map(len, line.split()), default=0) > most:
        return None
    cited = _CITATION.sub("", line) if settings.remove_citations and "[" in line else line
    if settings.terminal_punctuation and (not cited.endswith(_TERMINAL_PUNCTUATION) or cited.endswith("...")):
        return None
    return None if least and len(line.split(None, least - 1)) < least else cited


def _check_line(settings: C4, line: str) -> DroppedText | str | None:
    """Return the drop of the document, the phrase that removes the line, or None."""
    lowered = line.lower()
    if settings.lorem_ipsum and _LOREM_PHRASE in lowered:
        return DroppedText(LOREM_IPSUM, _make_snippet(lowered, _LOREM_PHRASE))
    if settings.javascript and _JAVASCRIPT_WORD in lowered:
        return _JAVASCRIPT_WORD
    if settings.curly_bracket and "{" in line:
        return DroppedText(CURLY_BRACKET, _make_snippet(line, "{"))
    return next((policy for policy in POLICY_PHRASES if settings.policy and policy in lowered), None)


def _make_snippet(line: str, phrase: str) -> str:
    at = line.index(phrase)
    return repr(line[max(0, at - 20) : at + len(phrase) + 20])
