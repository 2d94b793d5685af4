"""Account of an input: the files that are left out, and notes about the others."""

import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

from batchloom.core.addresses import is_url
from batchloom.core.files import decode_file_name
from batchloom.core.medium import detect_medium_kind
from batchloom.core.wording import format_count, format_list
from batchloom.sources.files.archives import detect_archive_by_name
from batchloom.sources.formats.format_registry import (
    FORMATS,
    JSON_OBJECT,
    DeclaredInput,
    FileDetection,
)

# Singular forms of the reasons in notes.
_SINGULAR = {
    "broken links": "broken link",
    "cards, licences and caches": "card, licence or cache",
    "files of stores": "file of a store",
    "folders linked twice": "folder linked twice",
    "images and sounds without a text file of the same name": "image or sound without a text file of the same name",
    "links and special files": "link or special file",
    "special files": "special file",
    "stores": "store",
}
# Files that are read as text although hardly any of it is language: what they are, the setting that reads them well or
# leaves them out, its value, and its effect.
_MARKUP = {
    (".html", ".htm", ".xhtml"): ("HTML with its tags", "clean", "html", "keeps the visible text"),
    (".svg",): ("SVG drawings", "exclude", "*.svg", "leaves them out"),
    (".min.js", ".min.css"): ("Minified code", "exclude", "*.min.*", "leaves it out"),
}
_MARKUP_SUFFIXES = tuple(suffix for suffixes in _MARKUP for suffix in suffixes)


@dataclass(frozen=True, slots=True)
class LeftOutFile:
    """A file that holds data and is not read; ``reason`` is a sentence that names it."""

    name: str
    reason: str


@final
class ListingNotes:
    """Sentences about all inputs before work begins.

    Attributes:
        notes: all sentences.
        warnings: those of the notes that tell what is left out.
        proposals: settings that the notes propose, and their values, in order.
    """

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.proposals: dict[tuple[str, str], None] = {}
        self.warnings: list[str] = []

    def add(self, text: str) -> None:
        self.notes.append(text)

    def warn(self, text: str) -> None:
        self.notes.append(text)
        self.warnings.append(text)


@dataclass(slots=True)
class UnreadData:
    """Data files of an input that are left out because of their form.

    Attributes:
        input: label of the input.
        files, bytes: number and total size of these files.
        all_files, all_bytes: number and total size of all data files.
        left_out: these files, the first with each label before the others.
    """

    input: str
    files: int = 0
    bytes: int = 0
    all_files: int = 0
    all_bytes: int = 0
    left_out: list[LeftOutFile] = field(default_factory=list)
    _labels: set[str] = field(default_factory=set)

    def add(self, name: str, verdict: FileDetection, size: int) -> None:
        """Count a file that is not read if it holds data."""
        if not verdict.is_unread_data:
            return
        self.files += 1
        self.bytes += size
        name = decode_file_name(name)
        file = LeftOutFile(name, f"{name} ({verdict.label}): {verdict.remedy}.")
        if verdict.label in self._labels:
            self.left_out.append(file)
        else:
            self.left_out.insert(len(self._labels), file)
            self._labels.add(verdict.label)


@final
class InputAccount:
    """Counts of what an input leaves out, and facts about the files that it lists.

    Attributes:
        skipped: number of files by the reason that they are left out.
        unread: data files that are left out because of their form.
        duplicates: names of files that an input listed before.
        outside_links: symbolic links that lead out of the input.
        unpaired_media: number of media files without a text of the same name.
        has_records: whether a file has records, which may name such media.
        unread_suffixes: suffixes of files of WebDataset samples that are not read.
        longest_window: bytes of the largest zstd window, and the name of its file.
    """

    def __init__(self, label: str) -> None:
        self.skipped: Counter[str] = Counter()
        self.unread = UnreadData(label)
        self.duplicates: list[str] = []
        self.outside_links: set[str] = set()
        self.unpaired_media = 0
        self.has_records = False
        self.unread_suffixes: set[str] = set()
        self.longest_window = 0, ""
        self._content_notes: list[str] = []
        self._markup: Counter[tuple[str, ...]] = Counter()

    def count_markup(self, name: str, kind: str) -> None:
        if kind in ("text", "code") and name.endswith(_MARKUP_SUFFIXES):
            self._markup.update(suffixes for suffixes in _MARKUP if name.endswith(suffixes))

    def note_other_kind(self, name: str, name_detection: FileDetection | None, kind: str) -> None:
        """Note a file that is read as another kind than its name suggests."""
        if name_detection is not None and kind not in (name_detection.kind, JSON_OBJECT):
            self._content_notes.append(f"{name} as {FORMATS[kind].label}")

    def write_notes(self, notes: ListingNotes, declared: DeclaredInput) -> None:
        """Write the notes about the input, when all its files are listed."""
        label = self.unread.input
        if self.unpaired_media and not self.has_records:
            self.skipped["images and sounds without a text file of the same name"] = self.unpaired_media
        if self.outside_links:
            notes.warn(decode_file_name(self._describe_links(label)))
        if self.skipped:
            counts = _describe_counts(self.skipped)
            # Among archives, only tars can supply media.
            media = not detect_archive_by_name(label) and any(
                detect_medium_kind(reason.removeprefix("binary ")) for reason in self.skipped
            )
            hint = " A processor reads images and audio (--processor FOLDER)." if media else ""
            notes.warn(decode_file_name(f"Left out of {label}: {counts}.{hint}"))
        for suffixes, count in self._markup.items():
            content, setting, value, effect = _MARKUP[suffixes]
            if setting != "clean" or declared.keeps_tags:
                files = format_count(count, "file")
                notes.warn(f"{content} in {files} of {label}: --{setting} {shlex.quote(value)} {effect}.")
                notes.proposals[setting, value] = None
        if self.unread_suffixes:
            notes.warn(
                f"Files of samples in {label} with these suffixes are not read: "
                f"{', '.join(sorted(self.unread_suffixes))}."
            )
        if self.longest_window[0]:
            window, name = self.longest_window
            notes.add(
                f"{decode_file_name(name)} takes up to {window >> 20:,} MiB of memory in each process that reads it "
                "(it was compressed with --long)."
            )
        if self._content_notes:
            notes.add(f"Read by content, not by name: {format_list(self._content_notes, 1)}.")
        if self.duplicates:
            notes.add(f"Named more than once, read once: {format_list(self.duplicates, 1)}.")

    def _describe_links(self, label: str) -> str:
        links = (
            "1 symbolic link leads"
            if len(self.outside_links) == 1
            else f"{len(self.outside_links):,} symbolic links lead"
        )
        verb = "is" if len(self.outside_links) == 1 else "are"
        return (
            f"{links} out of the input folder ({label}) and {verb} skipped: {min(self.outside_links)}"
            f"{', ...' if len(self.outside_links) > 1 else ''}; --follow-links follows them."
        )

    def describe_empty(self, location: str, display_name: str, *, exists: bool) -> str:
        """Describe an input without a usable file."""
        if self.outside_links and not self.skipped:
            return f"{display_name} holds no usable file. {self._describe_links(display_name)}"
        counts = _describe_counts(self.skipped)
        if is_url(location) and set(self.skipped) == {"files of stores"}:
            return (
                f"{display_name} holds only {counts}. A store at a URL cannot be an input: copy it to this "
                "machine first."
            )
        if set(self.skipped) == {"stores"}:
            return f"{display_name} holds only {counts}: name one of them."
        if not exists:
            message = (
                f"Nothing matches {display_name}"
                if not counts
                else f"{display_name} matches no usable file, only {counts}"
            )
        else:
            message = (
                f"{display_name} holds no usable file, only {counts}" if counts else f"{display_name} holds no files"
            )
        if self.unread.left_out:
            return f"{message}. {self.unread.left_out[0].reason}"
        return (
            f"{message}; supported are text, code, JSON, CSV, Parquet or Arrow (.txt, .py, .jsonl, ..., also "
            "compressed)."
        )


def _describe_counts(skipped_counts: Mapping[str, int]) -> str:
    return ", ".join(
        f"{count:,} {_SINGULAR.get(reason, reason) if count == 1 else reason}"
        for reason, count in sorted(skipped_counts.items())
    )
