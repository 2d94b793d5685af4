"""Normalisation: Unicode NFC and newlines, and nothing else; letters keep their case."""

import itertools
import unicodedata

# CPython orders runs of combining marks by insertion, in quadratic time: a megabyte of
# alternating marks takes hours. A run sorted beforehand costs nothing and gives the same NFC.
_LONG_RUN = 1024


def normalize(text: str) -> str:
    r"""``text`` in Unicode NFC, with ``\r\n`` and ``\r`` as ``\n``."""
    if not text.isascii():
        if len(text) >= _LONG_RUN and _has_long_run(text):
            text = _sort_runs(text)
        text = unicodedata.normalize("NFC", text)
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text


def _has_long_run(text: str) -> bool:
    """Whether somewhere at least ``_LONG_RUN`` combining marks follow each other."""
    step = _LONG_RUN // 2
    return any(
        unicodedata.combining(text[at]) and all(map(unicodedata.combining, text[at : at + step]))
        for at in range(0, len(text), step)
    )


def _sort_runs(text: str) -> str:
    runs = itertools.groupby(text, lambda char: unicodedata.combining(char) != 0)
    return "".join(
        "".join(sorted(run, key=unicodedata.combining) if marks else run) for marks, run in runs
    )
