"""Selection of documents of a store by source, number, hash or record."""

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
from batchloom.store.format.layout import SUBSETS
from batchloom.store.format.manifest import Manifest
from batchloom.store.format.provenance import ProvenanceTable

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
    """A line of a document list: its number and its text."""

    number: int
    text: str


@dataclass(slots=True)
class NamedDocuments:
    """Requested documents, by the way they are named.

    Attributes:
        sources: indices of sources whose documents are all selected.
        numbers: for each subset, document numbers with their lines.
        hashes: (high, low) halves of hashes with their lines.
        records: (source name, record) pairs with their lines.
    """

    sources: set[int] = field(default_factory=set)
    numbers: dict[str, dict[int, SelectionLine]] = field(default_factory=dict)
    hashes: dict[tuple[int, int], SelectionLine] = field(default_factory=dict)
    records: dict[tuple[str, int], SelectionLine] = field(default_factory=dict)


def add_named_sources(named_documents: NamedDocuments, patterns: Sequence[str], manifest: Manifest) -> None:
    """Add all documents of sources or data sets that match the names or globs.

    Raises:
        InputError: a pattern matches nothing; suggests similar names.
    """
    # Most sources have no data set; an empty name must not match all of them.
    source_names = [[name for name in (source.name, source.dataset) if name] for source in manifest.sources]
    for pattern in patterns:
        matches = {n for n, names in enumerate(source_names) if pattern in names}
        matches = matches or {
            n for n, names in enumerate(source_names) if any(fnmatchcase(name, pattern) for name in names)
        }
        if not matches:
            hint = suggest(pattern, [name for names in source_names for name in names])
            raise InputError(
                f"sources: no source of the store is called {quote_value(pattern)}{hint or '.'} batchloom log "
                "--json lists them; * and ? stand for any characters."
            )
        named_documents.sources |= matches


def add_named_documents(named_documents: NamedDocuments, path: Path, manifest: Manifest) -> None:
    """Add the documents listed in a file; empty lines and lines with # are skipped.

    Raises:
        InputMissingError: the file does not exist.
        InputError: the file cannot be read, or has lines of unknown form, or numbers that the store lacks; lists up to
            ten of them.
    """
    try:
        text = read_regular_file(path).decode("utf-8-sig")
    except FileNotFoundError as error:
        remedy = "name a file that lists documents"
        raise InputMissingError(describe_missing_path(str(path), remedy)) from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}.") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {describe_os_error(error)}.") from error
    problems: list[str] = []
    for count, raw in enumerate(text.splitlines(), 1):
        line = SelectionLine(count, raw.strip())
        if line.text and not line.text.startswith("#") and (fault := _add_line(named_documents, line, manifest)):
            problems.append(f"{path}:{count}: {fault}")
    if problems:
        more = f"\nand {len(problems) - _MAX_LISTED:,} more" if len(problems) > _MAX_LISTED else ""
        raise InputError("\n".join(problems[:_MAX_LISTED]) + more + f"\n{_FORMS_HINT}.")


def _add_line(named_documents: NamedDocuments, line: SelectionLine, manifest: Manifest) -> str:
    """Add the document of a line; return the fault of an invalid line, else ""."""
    if match := _NUMBER_PATTERN.fullmatch(line.text):
        subset, number = match[1], int(match[2])
        document_count = manifest.subsets[subset].documents if subset in manifest.subsets else 0
        if number >= document_count:
            return f"there is no document {line.text}: subset {subset} has {document_count:,}, numbered from 0"
        named_documents.numbers.setdefault(subset, {})[number] = line
    elif _HASH_PATTERN.fullmatch(line.text):
        value = int(line.text, 16)
        named_documents.hashes[value >> 64, value & 0xFFFFFFFFFFFFFFFF] = line
    elif match := _RECORD_PATTERN.fullmatch(line.text):
        named_documents.records[match[1], int(match[2])] = line
    else:
        return f"{quote_value(line.text)} names no document"
    return ""


@final
class DocumentSelection:
    """Matcher of named documents, shard by shard, that records which lines matched.

    ``manifest`` is that of the store.
    """

    def __init__(self, named_documents: NamedDocuments, manifest: Manifest) -> None:
        self._named_documents = named_documents
        part_selected: list[bool] = []
        records: dict[int, SelectionLine] = {}
        part_ranges: dict[str, list[tuple[int, int, int]]] = {}
        part = 0
        for number, source in enumerate(manifest.sources):
            first_record = 0
            for entry in source.parts:
                part_selected.append(number in named_documents.sources)
                part_ranges.setdefault(source.name, []).append((part, first_record, entry.records))
                first_record += entry.records
                part += 1
        for (name, record), line in named_documents.records.items():
            for part_index, first_record, count in part_ranges.get(name, ()):
                if first_record <= record < first_record + count:
                    records[part_index << _RECORD_BITS | record - first_record] = line
        # Unlisted parts are mapped to the last element, which is never selected.
        self._part_selected = np.array([*part_selected, False])
        self._numbers = {
            subset: np.array(sorted(numbers), np.int64) for subset, numbers in named_documents.numbers.items()
        }
        self._records = records
        self._keys = np.array(sorted(records), np.uint64)
        self._high = np.array(sorted({high for high, _ in named_documents.hashes}), np.uint64)
        self._matched_lines: set[SelectionLine] = set()

    def select_in_shard(self, subset: str, first: int, provenance: ProvenanceTable) -> NDArray[np.int64]:
        """Return the numbers of the named documents of a shard, ascending, int64.

        ``first`` is the number of the shard's first document, ``provenance`` that of its documents.
        """
        parts = provenance.parts.astype(np.int64)
        is_selected = self._part_selected[np.minimum(parts, len(self._part_selected) - 1)]
        if self._keys.size:
            keys = (parts.astype(np.uint64) << np.uint64(_RECORD_BITS)) | provenance.records
            for row in np.flatnonzero(np.isin(keys, self._keys)).tolist():
                is_selected[row] = True
                self._matched_lines.add(self._records[int(keys[row])])
        if self._high.size:
            for row in np.flatnonzero(np.isin(provenance.hashes[:, 1], self._high)).tolist():
                low, high = provenance.hashes[row].tolist()
                if line := self._named_documents.hashes.get((high, low)):
                    is_selected[row] = True
                    self._matched_lines.add(line)
        numbers = self._numbers.get(subset, np.zeros(0, np.int64))
        begin, end = numbers.searchsorted([first, first + len(provenance)])
        is_selected[numbers[begin:end] - first] = True
        return np.flatnonzero(is_selected) + first

    def list_absent(self) -> tuple[str, ...]:
        """List the lines that match no document and no record read, in file order."""
        lines: Iterable[SelectionLine] = (
            *self._named_documents.hashes.values(),
            *self._named_documents.records.values(),
        )
        return _list_line_texts({*lines} - self._matched_lines - {*self._records.values()})

    def list_left_out(self) -> tuple[str, ...]:
        """List the lines of records that were read but have no document, in file order."""
        return _list_line_texts({*self._records.values()} - self._matched_lines)


def _list_line_texts(lines: Iterable[SelectionLine]) -> tuple[str, ...]:
    return tuple(line.text for line in sorted(lines))
