"""Evaluation sets for decontamination: their records read from files, and the index made of them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path, PurePath
from typing import Any

from batchloom.core.fingerprint import fingerprint
from batchloom.core.spec import to_plain
from batchloom.sources.listing import list_sources
from batchloom.sources.parts import PartReader
from batchloom.sources.places import error_of
from batchloom.sources.rules import Limits, Part, ReadRules
from batchloom.store.writer import write_pieces
from batchloom.text.c4 import bad_words
from batchloom.text.overlap import Decontaminate
from batchloom.text.overlap_index import Overlap, build_index
from batchloom.text.registry import filled, settings_of
from batchloom.text.steps import CleanStep

DECONTAMINATE = "decontaminate"
BAD_WORDS = "bad_words"
_DEEPEST = 32


def with_index(
    settings: Decontaminate, folder: Path, tell: Callable[[str], None] | None = None
) -> Decontaminate:
    """The settings with the index of their sets, which is made in ``folder``, or was there.

    Raises:
        InputError: a file of a set cannot be read, a record of it cannot be used, or no field of
            a set has ``min_words`` words.
    """
    key = _key(settings)
    path = folder / f"evaluation_sets.{key}.index"
    if not path.exists():
        index = _index(key, *_decisive(settings))
        write_pieces(path, index.pieces())
        if tell:
            tell(_told(settings, index))
    # Workers read it from the file, and its name is kept; it may be large.
    _index.cache_clear()
    return replace(settings, index=str(path))


def index_of(settings: Decontaminate) -> Overlap:
    """The index of the sets that the settings name."""
    records = {name: records_of(place) for name, place in settings.sets.items()}
    return build_index(records, words=settings.words, min_words=settings.min_words)


def steps_with_index(
    steps: Sequence[CleanStep], folder: Path, tell: Callable[[str], None]
) -> tuple[CleanStep, ...]:
    """The steps as workers take them: where one looks for evaluation sets, with the index of them."""
    ready = []
    for step in steps:
        if step.name == DECONTAMINATE:
            settings = with_index(settings_of(step), folder, tell)
            step = CleanStep(step.name, to_plain(settings))  # noqa: PLW2901 - what it becomes
        ready.append(step)
    return tuple(ready)


def clean_plain(steps: Sequence[CleanStep]) -> tuple[CleanStep, ...]:
    """The steps as a manifest holds them: every setting said, absolute places by their last name only."""
    plain = []
    for step in filled(steps):
        settings = {name: value for name, value in step.settings.items() if name != "index"}
        if step.name == DECONTAMINATE:
            settings["sets"] = {name: _label(place) for name, place in settings["sets"].items()}
        if settings.get(BAD_WORDS):
            settings[BAD_WORDS] = _label(settings[BAD_WORDS])
        plain.append(CleanStep(step.name, settings))
    return tuple(plain)


def files_identity(steps: Sequence[CleanStep]) -> str | None:
    """What names the contents of all files that these steps look into; None where they need none.

    Raises:
        InputMissingError, InputError: one cannot be read.
    """
    found: list[Any] = []
    for step in steps:
        settings = settings_of(step)
        if isinstance(settings, Decontaminate):
            found.append(_identity(_key(settings), *_decisive(settings)))
        elif words := getattr(settings, BAD_WORDS, None):
            found.append(sorted(bad_words(words)))
    return fingerprint(found) if found else None


def _label(place: str) -> str:
    return PurePath(place).name if PurePath(place).is_absolute() else place


_Sets = tuple[tuple[str, str], ...]


def _decisive(settings: Decontaminate) -> tuple[_Sets, int, int]:
    return (*settings.sets.items(),), settings.words, settings.min_words


@lru_cache(maxsize=8)
def _identity(key: str, sets: _Sets, words: int, min_words: int) -> str:
    """The fingerprint of an index."""
    return _index(key, sets, words, min_words).fingerprint


@lru_cache(maxsize=1)
def _index(
    key: str,  # noqa: ARG001 - it changes with the files
    sets: _Sets,
    words: int,
    min_words: int,
) -> Overlap:
    """The index itself, which a job names before it is written."""
    return index_of(Decontaminate(sets=dict(sets), words=words, min_words=min_words))


def records_of(place: str) -> Iterator[tuple[str, ...]]:
    """The records of an evaluation set: of each the texts of its fields, in order.

    Args:
        place: a file or folder in any form that ``prepare`` reads; of a text file each line is a
            record.

    Raises:
        InputMissingError, InputError: it cannot be read.
        RecordError: a record cannot be used: an evaluation set is looked for whole or not at all.
    """
    rules = ReadRules(None, "line", Limits())
    for source in list_sources([place]).sources:
        with PartReader(Part(source, 0, source.size), rules) as reader:
            before = 0
            for found in reader:
                if found.bad:
                    raise error_of(source, rules, before, found.bad[0])
                before += found.seen
                for value in found.values:
                    yield tuple(_texts(value, 0))


def _key(settings: Decontaminate) -> str:
    """What decides an index, as far as can be told without reading the sets."""
    files = {
        name: [[one.path, one.size, one.mtime_ns] for one in list_sources([place]).sources]
        for name, place in settings.sets.items()
    }
    return fingerprint([files, settings.words, settings.min_words])[:16]


def _texts(value: Any, depth: int) -> Iterator[str]:
    """Every text in a value, those of lists and objects in it too."""
    if isinstance(value, str):
        yield value
    elif depth < _DEEPEST and isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item, depth + 1)
    elif depth < _DEEPEST and isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item, depth + 1)


def _told(settings: Decontaminate, index: Overlap) -> str:
    names = ", ".join(settings.sets)
    return f"Documents that share {settings.words} words with {names} are dropped: {len(index.hashes):,} n-grams."
