"""Prefetching of remote inputs, files and sources."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from batchloom.core.addresses import get_scheme, is_url, redact_url
from batchloom.remote import PAGE_CACHE, fetch_through_cache, prefetch_items, prefetch_status
from batchloom.sources.files.archives import detect_archive_by_name
from batchloom.sources.files.file_opening import find_cached_copy
from batchloom.sources.files.part_stream import Source
from batchloom.sources.formats.format_registry import detect_kind_by_name, needs_content
from batchloom.sources.hf_datasets import parse_hub_name

T = TypeVar("T")

_BEGINNING_BYTES = 256 << 10
_SMALL_FILE_BYTES = 1 << 20


# Prefetching only fills caches: readers find the data there or request it again. So the order does not change, and
# errors are raised by the reader of the file, under its name.
def prefetch_inputs(inputs: Sequence[T], get_location: Callable[[T], str]) -> Iterable[T]:
    """Yield inputs in order, with status and beginning of remote files prefetched."""

    def begin(item: T) -> None:
        url = get_location(item)
        if is_url(url) and get_scheme(url) != "hf" and parse_hub_name(url) is None:
            status = prefetch_status(url)
            if status is not None:
                _prefetch_beginning(url, status)

    return prefetch_items(inputs, begin) if any(is_url(get_location(item)) for item in inputs[1:]) else inputs


def prefetch_files(files: Sequence[T], get_file: Callable[[T], tuple[str, os.stat_result]]) -> Iterator[T]:
    """Yield listed files in order, with beginnings prefetched for content detection."""
    return prefetch_items(files, lambda file: _prefetch_beginning(*get_file(file)))


def prefetch_sources(items: Sequence[T], get_source: Callable[[T], Source]) -> Iterable[T]:
    """Yield items in order, with their small remote sources prefetched and checked."""

    def begin(item: T) -> None:
        listed_source = get_source(item)
        if not _is_small(listed_source) or find_cached_copy(listed_source.path, listed_source.size) is not None:
            return
        version = listed_source.path, listed_source.size, listed_source.mtime_ns
        fetch_through_cache(version, 0, listed_source.size)
        # The reader checks at the end whether the file is unchanged; this answer is prefetched too.
        if not listed_source.revision and PAGE_CACHE.holds(version):
            prefetch_status(listed_source.path)

    return prefetch_items(items, begin) if any(_is_small(get_source(item)) for item in items) else items


def _is_small(source: Source) -> bool:
    return is_url(source.path) and source.member is None and 0 < source.size <= _SMALL_FILE_BYTES


def _prefetch_beginning(url: str, status: os.stat_result) -> None:
    is_sniffed = needs_content(detect_kind_by_name(redact_url(url))) and detect_archive_by_name(redact_url(url)) is None
    size = status.st_size
    if is_sniffed and size and find_cached_copy(url, size) is None:
        fetch_through_cache((url, size, status.st_mtime_ns), 0, min(size, _BEGINNING_BYTES))
