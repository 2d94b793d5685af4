"""Normalization to Unicode NFC and LF newlines, without case folding."""

import itertools
import unicodedata
from collections.abc import Iterator

# CPython sorts runs of combining marks by insertion, in quadratic time: a megabyte of
# alternating marks takes hours. Sorting a run beforehand is cheap and gives the same NFC.
_MAX_COMBINING_RUN = 1024
# Normalization takes several times the memory of a text, so large texts are processed in chunks.
_LARGE_TEXT = 1 << 20


def normalize(text: str) -> str:
    r"""Return ``text`` in Unicode NFC, with ``\r\n`` and ``\r`` as ``\n``."""
    if not text.isascii():
        text = _normalize_nfc(text) if len(text) < _LARGE_TEXT else _normalize_large_nfc(text)
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text


def _normalize_nfc(text: str) -> str:
    if len(text) >= _MAX_COMBINING_RUN and _has_long_run(text):
        text = _sort_combining_runs(text)
    return unicodedata.normalize("NFC", text)


def _normalize_large_nfc(text: str) -> str:
    if all(_normalize_nfc(chunk) == chunk for chunk in _split_after_newlines(text)):
        return text
    return "".join(map(_normalize_nfc, _split_after_newlines(text)))


def _split_after_newlines(text: str) -> Iterator[str]:
    """Split the text after newlines, which never compose with other characters."""
    start = 0
    while start < len(text):
        newline = text.find("\n", start + _LARGE_TEXT)
        stop = newline + 1 if newline >= 0 else len(text)
        yield text[start:stop]
        start = stop


def _has_long_run(text: str) -> bool:
    """Return whether a run has at least ``_MAX_COMBINING_RUN`` combining marks."""
    step = _MAX_COMBINING_RUN // 2
    return any(map(unicodedata.combining, text[::step])) and any(
        unicodedata.combining(text[at]) and all(map(unicodedata.combining, text[at : at + step]))
        for at in range(0, len(text), step)
    )


def _sort_combining_runs(text: str) -> str:
    runs = itertools.groupby(text, lambda char: unicodedata.combining(char) != 0)
    return "".join("".join(sorted(run, key=unicodedata.combining) if marks else run) for marks, run in runs)
