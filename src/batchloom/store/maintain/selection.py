"""Which documents of a store somebody names: by their sources, numbers, hashes or records."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import InputError, InputMissingError
from batchloom.core.files import describe_missing_path, describe_os_error, read_regular_file
from batchloom.core.settings import quote_value, suggest
from batchloom.store.format import SUBSETS, Manifest, ProvenanceTable

_NUMBER_PATTERN = re.compile(rf"({'|'.join(SUBSETS)}):(\d{{1,18}})")
_HASH_PATTERN = re.compile(r"[0-9a-fA-F]{32}")
_RECORD_PATTERN = re.compile(r"(\S.*?)\s+(\d{1,18})")
_FORMS_HINT = (
    "a line is a document's number (train:17), its hash (32 hex digits), or the name of a source and a record of it, "
    "counted from 0 (wiki.jsonl 17)"
)
_MAX_LISTED = 10
_RECORD_BITS = 40


class SelectionLine(NamedTuple):
    """A line of a list of documents: its number and what it says."""

    number: int
    text: str


@dataclass(slots=True)
class NamedDocuments:
    """Documents as they are named.

    Attributes:
        sources: numbers of sources of which all are meant.
        numbers: by subset, document numbers and their lines.
        hashes: by (high, low) half, their lines.
        records: by (source name, record), their lines.
    """

    sources: set[int] = field(default_factory=set)
    numbers: dict[str, dict[int, SelectionLine]] = field(default_factory=dict)
    hashes: dict[tuple[int, int], SelectionLine] = field(default_factory=dict)
    records: dict[tuple[str, int], SelectionLine] = field(default_factory=dict)


def add_named_sources(named: NamedDocuments, patterns: Sequence[str], manifest: Manifest) -> None:
    """Add all documents of the sources, or of the data sets, that names or globs fit.

    Raises:
        InputError: a pattern fits none; names what is near.
    """
    # Most sources are of no data set, and an empty name must not mean all of these.
    known = [[one for one in (source.name, source.dataset) if one] for source in manifest.sources]
    for pattern in patterns:
        found = {n for n, names in enumerate(known) if pattern in names}
        found = found or {
            n for n, names in enumerate(known) if any(fnmatchcase(one, pattern) for one in names)
        }
        if not found:
            hint = suggest(pattern, [one for names in known for one in names])
            raise InputError(
                f"sources: no source of the store is called {quote_value(pattern)}{hint or '.'} batchloom log "
                f"--json lists "
                "them; * and ? stand for any characters."
            )
        named.sources |= found


def add_named_documents(named: NamedDocuments, path: Path, manifest: Manifest) -> None:
    """Add the documents that the lines of a file name; empty lines and those that begin with # say nothing.

    Raises:
        InputMissingError: there is no such file.
        InputError: it cannot be read, or has lines of no known form, or numbers that are none of the store; up to
            ten of them are told at once.
    """
    try:
        text = read_regular_file(path).decode("utf-8-sig")
    except FileNotFoundError as error:
        remedy = "name a file that lists documents"
        raise InputMissingError(describe_missing_path(str(path), remedy)) from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is no UTF-8 text: {error.reason} at byte {error.start}."
        ) from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {describe_os_error(error)}.") from error
    problems: list[str] = []
    for count, raw in enumerate(text.splitlines(), 1):
        line = SelectionLine(count, raw.strip())
        if (
            line.text
            and not line.text.startswith("#")
            and (fault := _add_line(named, line, manifest))
        ):
            problems.append(f"{path}:{count}: {fault}")
    if problems:
        more = f"\nand {len(problems) - _MAX_LISTED:,} more" if len(problems) > _MAX_LISTED else ""
        raise InputError("\n".join(problems[:_MAX_LISTED]) + more + f"\n{_FORMS_HINT}.")


def _add_line(named: NamedDocuments, line: SelectionLine, manifest: Manifest) -> str:
    """What is wrong with a line; empty where it was added."""
    if match := _NUMBER_PATTERN.fullmatch(line.text):
        subset, number = match[1], int(match[2])
        have = manifest.subsets[subset].documents if subset in manifest.subsets else 0
        if number >= have:
            return (
                f"there is no document {line.text}: subset {subset} has {have:,}, numbered from 0"
            )
        named.numbers.setdefault(subset, {})[number] = line
    elif _HASH_PATTERN.fullmatch(line.text):
        value = int(line.text, 16)
        named.hashes[value >> 64, value & 0xFFFFFFFFFFFFFFFF] = line
    elif match := _RECORD_PATTERN.fullmatch(line.text):
        named.records[match[1], int(match[2])] = line
    else:
        return f"{quote_value(line.text)} names no document"
    return ""


@final
class DocumentSelection:
    """Finds what is named in one shard after the other, and knows in the end what was not there.

    Args:
        named: what is looked for.
        manifest: of the store.
    """

    def __init__(self, named: NamedDocuments, manifest: Manifest) -> None:
        self._named = named
        whole: list[bool] = []
        records: dict[int, SelectionLine] = {}
        places: dict[str, list[tuple[int, int, int]]] = {}
        part = 0
        for number, source in enumerate(manifest.sources):
            before = 0
            for entry in source.parts:
                whole.append(number in named.sources)
                places.setdefault(source.name, []).append((part, before, entry.records))
                before += entry.records
                part += 1
        for (name, record), line in named.records.items():
            for place, before, count in places.get(name, ()):
                if before <= record < before + count:
                    records[place << _RECORD_BITS | record - before] = line
        # Parts that no source of the manifest has count as the last.
        self._whole = np.array([*whole, False])
        self._numbers = {
            subset: np.array(sorted(numbers), np.int64) for subset, numbers in named.numbers.items()
        }
        self._records = records
        self._keys = np.array(sorted(records), np.uint64)
        self._high = np.array(sorted({high for high, _ in named.hashes}), np.uint64)
        self._found: set[SelectionLine] = set()

    def select_in_shard(
        self, subset: str, first: int, origins: ProvenanceTable
    ) -> NDArray[np.int64]:
        """Numbers of the named documents of a shard, ascending, int64.

        Args:
            subset: its name.
            first: number of the shard's first document.
            origins: of its documents.
        """
        parts = origins.parts.astype(np.int64)
        chosen = self._whole[np.minimum(parts, len(self._whole) - 1)]
        if self._keys.size:
            keys = (parts.astype(np.uint64) << np.uint64(_RECORD_BITS)) | origins.records
            for place in np.flatnonzero(np.isin(keys, self._keys)).tolist():
                chosen[place] = True
                self._found.add(self._records[int(keys[place])])
        if self._high.size:
            for place in np.flatnonzero(np.isin(origins.hashes[:, 1], self._high)).tolist():
                low, high = origins.hashes[place].tolist()
                if line := self._named.hashes.get((high, low)):
                    chosen[place] = True
                    self._found.add(line)
        numbers = self._numbers.get(subset, np.zeros(0, np.int64))
        begin, end = numbers.searchsorted([first, first + len(origins)])
        chosen[numbers[begin:end] - first] = True
        return np.flatnonzero(chosen) + first

    def absent(self) -> tuple[str, ...]:
        """The lines that name nothing that the store was made of or holds, in the order of the file."""
        lines: Iterable[SelectionLine] = (
            *self._named.hashes.values(),
            *self._named.records.values(),
        )
        return _list_line_texts({*lines} - self._found - {*self._records.values()})

    def left_out(self) -> tuple[str, ...]:
        """The lines that name records which were read, but no document of the shards looked at; in order."""
        return _list_line_texts({*self._records.values()} - self._found)


def _list_line_texts(lines: Iterable[SelectionLine]) -> tuple[str, ...]:
    return tuple(line.text for line in sorted(lines))
