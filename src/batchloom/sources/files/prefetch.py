"""The beginnings of files elsewhere, fetched while those before them are read.

Nothing is decided here: what is fetched is kept, and whoever comes for it finds it there or
asks again. So the order stays, and a fault is told by who reads the file, under its name.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from batchloom.core.addresses import is_url, scheme_of, shown
from batchloom.remote import KEPT, begun, fetch_once, look_ahead
from batchloom.sources.files.file_kinds import archive_by_name, kind_by_name, must_look
from batchloom.sources.files.hub_datasets import copy_of, hub_name
from batchloom.sources.files.source_rules import Source

T = TypeVar("T")

_BEGINNING, _SMALL = 256 << 10, 1 << 20


def inputs_ahead(inputs: Sequence[T], place: Callable[[T], str]) -> Iterable[T]:
    """Inputs in order; of single files elsewhere it is known what lies there, and how it begins."""

    def begin(one: T) -> None:
        url = place(one)
        if is_url(url) and scheme_of(url) != "hf" and hub_name(url) is None:
            found = look_ahead(url)
            if found is not None:
                _look(url, found)

    return begun(inputs, begin) if any(is_url(place(one)) for one in inputs[1:]) else inputs


def files_ahead(files: Sequence[T], file: Callable[[T], tuple[str, os.stat_result]]) -> Iterator[T]:
    """Listed files in order, with the beginnings of those that are looked at."""
    return begun(files, lambda one: _look(*file(one)))


def read_ahead(items: Sequence[T], source: Callable[[T], Source]) -> Iterable[T]:
    """What is read of sources, in order; small ones elsewhere are there, and are those listed."""

    def begin(item: T) -> None:
        one = source(item)
        if not _small(one) or copy_of(one.path, one.size) is not None:
            return
        version = one.path, one.size, one.mtime_ns
        fetch_once(version, 0, one.size)
        # Whoever reads to the end asks whether it is still the file that was listed: by now it is.
        if not one.revision and KEPT.holds(version):
            look_ahead(one.path)

    return begun(items, begin) if any(_small(source(item)) for item in items) else items


def _small(source: Source) -> bool:
    return is_url(source.path) and source.member is None and 0 < source.size <= _SMALL


def _look(url: str, found: os.stat_result) -> None:
    wanted = must_look(kind_by_name(shown(url))) and archive_by_name(shown(url)) is None
    size = found.st_size
    if wanted and size and copy_of(url, size) is None:
        fetch_once((url, size, found.st_mtime_ns), 0, min(size, _BEGINNING))
