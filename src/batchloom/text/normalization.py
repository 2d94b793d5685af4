"""Normalisation: Unicode NFC and newlines, and nothing else; letters keep their case."""

import itertools
import unicodedata
from collections.abc import Iterator

# CPython orders runs of combining marks by insertion, in quadratic time: a megabyte of
# alternating marks takes hours. A run sorted beforehand costs nothing and gives the same NFC.
_LONG_RUN = 1024
# Normalising takes several times the memory of a text; a large one goes piece by piece.
_LARGE = 1 << 20


def normalize(text: str) -> str:
    r"""``text`` in Unicode NFC, with ``\r\n`` and ``\r`` as ``\n``."""
    if not text.isascii():
        text = _nfc(text) if len(text) < _LARGE else _nfc_of_large(text)
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text


def _nfc(text: str) -> str:
    if len(text) >= _LONG_RUN and _has_long_run(text):
        text = _sort_runs(text)
    return unicodedata.normalize("NFC", text)


def _nfc_of_large(text: str) -> str:
    if all(_nfc(piece) == piece for piece in _pieces(text)):
        return text
    return "".join(map(_nfc, _pieces(text)))


def _pieces(text: str) -> Iterator[str]:
    """The text cut after newlines, with which nothing composes: NFC of the pieces is NFC of all."""
    start = 0
    while start < len(text):
        newline = text.find("\n", start + _LARGE)
        stop = newline + 1 if newline >= 0 else len(text)
        yield text[start:stop]
        start = stop


def _has_long_run(text: str) -> bool:
    """Whether somewhere at least ``_LONG_RUN`` combining marks follow each other."""
    step = _LONG_RUN // 2
    return any(map(unicodedata.combining, text[::step])) and any(
        unicodedata.combining(text[at]) and all(map(unicodedata.combining, text[at : at + step]))
        for at in range(0, len(text), step)
    )


def _sort_runs(text: str) -> str:
    runs = itertools.groupby(text, lambda char: unicodedata.combining(char) != 0)
    return "".join(
        "".join(sorted(run, key=unicodedata.combining) if marks else run) for marks, run in runs
    )
