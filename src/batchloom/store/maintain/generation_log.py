"""``log``: the generations of a store, with the times that the reports beside them know."""

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from batchloom.core.files import JSON_DECODE_ERRORS, read_regular_file, refuse_url
from batchloom.store.format import (
    REPORT_NAME,
    format_generation_file_name,
    read_manifest,
    resolve_store_folder,
)


@dataclass(frozen=True, slots=True)
class GenerationLogEntry:
    """One generation.

    Attributes:
        number: of the generation.
        made: ``prepared``, ``appended``, ``removed`` or ``compacted``.
        documents: of each subset after it, without what is removed.
        tokens: of each subset, likewise.
        sources: names of the sources it added.
        recipe_fingerprint: of the job that read them; empty where none was read.
        selected: the names of sources that documents were removed by.
        fingerprints: of each subset.
        when: the time of its beginning by its report; empty where that is not there.
        readable: whether it can be opened.
    """

    number: int
    made: str
    documents: dict[str, int]
    tokens: dict[str, int]
    sources: tuple[str, ...]
    recipe_fingerprint: str
    selected: tuple[str, ...]
    fingerprints: dict[str, str]
    when: str
    readable: bool


class _GenerationReport(msgspec.Struct, frozen=True):
    started: str = ""


def read_log(path: str | os.PathLike[str]) -> tuple[GenerationLogEntry, ...]:
    """The generations of a store, the first one first, those that were compacted away too.

    Raises:
        StoreMissingError, StoreError: there is no store, or its manifest is damaged.
    """
    refuse_url(path, "The store")
    folder = resolve_store_folder(path)
    manifest = read_manifest(folder)
    entries, source_count = [], 0
    for entry in manifest.all_history:
        entries.append(
            GenerationLogEntry(
                number=entry.number,
                made=entry.made,
                documents=entry.documents,
                tokens=entry.tokens,
                sources=tuple(source.name for source in manifest.sources[source_count : entry.sources]),
                recipe_fingerprint=entry.recipe_fingerprint,
                selected=entry.selected,
                fingerprints=entry.fingerprints,
                when=_read_start_time(folder, entry.number),
                readable=entry.number in manifest.readable,
            )
        )
        source_count = entry.sources
    return tuple(entries)


def _read_start_time(folder: Path, generation: int) -> str:
    """What the report of a generation says of its time; a sidecar that is no report says nothing."""
    try:
        data = read_regular_file(folder / format_generation_file_name(REPORT_NAME, generation))
        return msgspec.json.decode(data, type=_GenerationReport).started
    except (OSError, *JSON_DECODE_ERRORS):
        return ""
