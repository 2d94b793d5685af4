"""Listing of local, remote and Hub inputs as files, in a deterministic order."""

import glob
import os
import re
import stat
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, TypeVar, final

from batchloom.core.addresses import (
    STANDARD_INPUT,
    UniqueNames,
    check_url,
    expand_braces,
    get_scheme,
    has_wildcard,
    is_glob,
    is_url,
    is_url_or_stdin,
    list_paths_and_labels,
    redact_url,
    strip_file_scheme,
)
from batchloom.core.errors import DamagedFileError, InputError, InputMissingError
from batchloom.core.files import (
    decode_file_name,
    describe_missing_path,
    describe_os_error,
    make_absolute,
)
from batchloom.core.medium import detect_medium_kind
from batchloom.core.settings import suggest
from batchloom.core.synthetic_data import SYNTHETIC_NAMES
from batchloom.core.wording import format_count, format_list
from batchloom.remote import (
    PAGE_CACHE,
    clear_status_cache,
    fetch_through_cache,
    glob_remote,
    list_remote_files,
    prefetch_items,
    prefetch_status,
    stat_remote,
    supports_ranges,
)
from batchloom.sources.files.archives import Archive, ArchiveKind, detect_archive_by_name
from batchloom.sources.files.file_choice import NOT_SELECTED, FileChoice
from batchloom.sources.files.file_opening import (
    Compression,
    Spool,
    find_cached_copy,
    get_pinned_revision,
    open_location,
    read_zstd_window,
)
from batchloom.sources.files.part_stream import PartStream, Source, SourceTable, SourceTraits
from batchloom.sources.formats.format_registry import (
    FORMATS,
    JSON_OBJECT,
    DeclaredInput,
    DetectedFile,
    FileDetection,
    choose_encoding,
    describe_format_mismatch,
    detect_declared_kind,
    detect_file_kind,
    detect_kind_by_name,
    holds_data,
    list_archive_sources,
    matches_format,
    needs_content,
    reraise_with_location,
)
from batchloom.sources.formats.webdataset_format import find_unread_suffixes
from batchloom.sources.hf_datasets import (
    HubDatasetName,
    choose_hub_split,
    download_to_cache,
    find_hub_name,
    find_saved_split,
    is_saved_dataset,
    list_hub_files,
    list_preset_names,
    list_saved_files,
    parse_hub_name,
    pin_revision,
    strip_revision,
)
from batchloom.sources.splits import SPLIT_HINT, select_split

T = TypeVar("T")

# A folder with this file is a store, which is not an input.
STORE_MARKER_NAME = "dataset_metadata.json"
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
# Files that are read as text although hardly any of it is language: what they are, and how to read or leave them out.
_MARKUP = {
    (".html", ".htm", ".xhtml"): ("HTML with its tags", "--clean html keeps the visible text"),
    (".svg",): ("SVG drawings", "--exclude '*.svg' leaves them out"),
    (".min.js", ".min.css"): ("Minified code", "--exclude '*.min.*' leaves it out"),
}
_MARKUP_SUFFIXES = tuple(suffix for suffixes in _MARKUP for suffix in suffixes)
_DAMAGED = FileDetection(None, None, "damaged", "fetch or pack it again")
_BEGINNING_BYTES, _SMALL_FILE_BYTES = 256 << 10, 1 << 20
# Folders in the cache of huggingface_hub: of a repository, of its revisions, and of one revision.
_HUB_REPOSITORY = re.compile(r"(.*/(?:datasets|models)--[^/]+)(/snapshots)?")
_HUB_SNAPSHOTS = re.compile(r"(.*/(?:datasets|models)--[^/]+)/snapshots(?:/[0-9a-f]{40})?(?:/|$)")
_CARD_BYTES = 16 << 20
# Sizes and beginning of the pointers of Git LFS.
_POINTER_BYTES, _POINTER_START = range(110, 201), b"version https://git-lfs.github.com/spec/"
_MAX_EXAMPLES = 3
_LONG_WINDOW_BYTES = 128 << 20


class SharedFile(NamedTuple):
    """A file that two inputs list."""

    name: str
    first: int  # Number of the input that listed it before
    second: int
    is_val_too: bool = False  # Whether one of them lists it for another subset


@dataclass(slots=True)
class UnreadData:
    """Data files of an input that are left out because of their form.

    Attributes:
        input: label of the input.
        files, bytes: number and total size of these files.
        all_files, all_bytes: number and total size of all data files.
        examples: name, label and remedy of the first file with each label.
    """

    input: str
    files: int = 0
    bytes: int = 0
    all_files: int = 0
    all_bytes: int = 0
    examples: list[tuple[str, str, str]] = field(default_factory=list)

    def add(self, name: str, verdict: FileDetection, size: int) -> None:
        """Count a file that is not read if it holds data."""
        if not holds_data(verdict):
            return
        self.files += 1
        self.bytes += size
        if len(self.examples) < _MAX_EXAMPLES and verdict.label not in {label for _, label, _ in self.examples}:
            self.examples.append((decode_file_name(name), verdict.label, verdict.remedy))


@dataclass(frozen=True, slots=True)
class SourceListing:
    """The input files in reading order, and notes about skipped ones.

    Attributes:
        sources: the input files.
        notes: sentences about the input before work begins.
        warnings: those of the notes that tell what is left out.
        duplicates: files that several inputs list.
        content: content hash by path, if the content was hashed.
        unread: of each input with such files, the data that is left out.
    """

    sources: Sequence[Source]
    notes: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    duplicates: tuple[SharedFile, ...] = ()
    content: Mapping[str, str] = field(default_factory=dict)
    unread: tuple[UnreadData, ...] = ()

    @property
    def bytes(self) -> int:
        """Total size of all files on disk."""
        sources = self.sources
        return sources.bytes if isinstance(sources, SourceTable) else sum(source.size for source in sources)


def list_sources(
    inputs: Sequence[str],
    *,
    declared_inputs: Sequence[DeclaredInput] = (),
    exclude: Path | None = None,
    spool: Spool | None = None,
    streaming: bool | None = None,
    detected_files: Mapping[str, DetectedFile] | None = None,
    media: bool = False,
) -> SourceListing:
    """List the files of ``inputs`` in the given order, sorted by path inside folders.

    Folders, globs and archives skip hidden files, ``__pycache__``, stores, empty files and files of
    unknown kinds; the notes count them. They also skip symbolic links that lead out of the folder, or
    out of the folder before the first wildcard of a glob. A file named twice is listed once, even if
    the second name is a link. An input that is a link itself is followed.

    Args:
        inputs: files, folders, globs and URLs of them, and ``-`` for standard input.
        declared_inputs: declaration of each input. A named file that contradicts it is an error;
            folders, globs and archives skip such files.
        exclude: folder that is always skipped (the output).
        spool: storage for inputs that can be read only once; without it they are errors.
        streaming: whether Hub datasets are read remotely instead of downloaded first; None streams
            those above 10 GB.
        detected_files: formats detected by an earlier listing of the same inputs, by absolute path;
            files with unchanged size and time are not read again.
        media: whether images and audio that records and captions name are read; media files in
            folders are not inputs then.

    Raises:
        InputMissingError: an input does not exist, is empty or holds no usable file.
        InputError: a named file cannot be used, or something cannot be read.
    """
    # Not every server reports that a file has changed.
    PAGE_CACHE.forget()
    clear_status_cache()
    lister = _SourceLister(exclude, spool, detected_files or {}, streaming=streaming, media=media)
    numbered_inputs = list(enumerate(zip(inputs, list_paths_and_labels(inputs), strict=True)))
    if declared_inputs:
        numbered_inputs.sort(key=lambda item: declared_inputs[item[0]].subset not in ("val", "test"))
    # Held-out splits come first: deduplication keeps the first copy of a text.
    for is_val in (True, False):
        for number, (input_path, (_, label)) in prefetch_inputs(numbered_inputs, lambda one: one[1][0]):
            declared_input = declared_inputs[number] if declared_inputs else DeclaredInput()
            if is_val and declared_input.val_split is None:
                continue
            try:
                # A Path would change some names, so inputs remain strings.
                path = os.path.expanduser(strip_file_scheme(input_path))  # noqa: PTH111
                lister.add(path, label, number, declared_input, is_val=is_val)
            except InputError as error:
                reraise_with_location(error, declared_input.location)
    lister.find_shared_files()
    lister.warn_of_unmatched_patterns()
    return SourceListing(
        lister.sources,
        tuple(lister.notes),
        tuple(lister.warnings),
        tuple(lister.shared),
        unread=tuple(lister.unread),
    )


def strip_wildcard_part(input_path: str) -> str:
    """Return the path of an input, or the folder before the first wildcard of a glob.

    A name with wildcards that exists as a file is not a glob.
    """
    path = os.path.expanduser(strip_file_scheme(input_path))  # noqa: PTH111
    if not is_glob(path) or os.path.lexists(path):
        return path
    parts = path.split("/")
    first = next(index for index, part in enumerate(parts) if is_glob(part))
    return "/".join(parts[:first]) or ("/" if path.startswith("/") else ".")


@final
class _SourceLister:
    def __init__(
        self,
        exclude: Path | None,
        spool: Spool | None,
        detected_files: Mapping[str, DetectedFile],
        *,
        streaming: bool | None,
        media: bool,
    ) -> None:
        self._links = LinkBounds()
        self._archive_names: dict[str, str] = {}
        self._names, self._detected_files, self._media = UniqueNames(), detected_files, media
        self._spool, self._streaming = spool, streaming
        self.sources = SourceTable()
        # Of the files of an input, by kind, compression and revision.
        self._traits: dict[tuple[str, Compression | None, str], SourceTraits] = {}
        self.notes: list[str] = []
        self.warnings: list[str] = []
        self._exclude = _get_inode(exclude) if exclude else None
        # Number of the input that lists each file, by device and inode, for each split that inputs name: inputs that
        # read different splits of a folder both list all of its files.
        self._files_by_split: dict[tuple[str, str, bool], defaultdict[int, dict[int, int]]] = {}
        self._files: defaultdict[int, dict[int, int]] = defaultdict(dict)
        self._input_number, self._declared_input, self._is_val = 0, DeclaredInput(), False
        self._input_by_split: dict[tuple[str, tuple[str, str, bool]], int] = {}
        # Numbers of the inputs whose other splits are left out.
        self._divided: set[int] = set()
        self.shared: list[SharedFile] = []
        self.unread: list[UnreadData] = []
        self._unread = UnreadData("")
        self._folders: set[tuple[int, int]] = set()
        self._choice = FileChoice()
        self._skipped_counts: Counter[str] = Counter()
        self._duplicates: list[str] = []
        self._content_notes: list[str] = []
        self._last_store_check = ("", False)
        self._top_folder = ""

    def add(self, input_path: str, label: str, number: int, declared: DeclaredInput, *, is_val: bool = False) -> None:
        """Add the files of an input, or of its split that becomes ``val``."""
        if self._begin_input(input_path, label, number, declared, is_val=is_val):
            return
        previous_count, display_name = len(self.sources), label if is_url_or_stdin(input_path) else input_path
        is_stdin = input_path == STANDARD_INPUT
        if is_stdin:
            input_path = self._get_spool().copy_standard_input()
            self.notes.append(
                "Standard input is cached until the job ends; to resume a stopped job, pipe the same bytes again."
            )
        if is_url(input_path):
            check_url(input_path)
        hub_name = find_hub_name(input_path)
        if hub_name is None:
            input_path = pin_revision(input_path)
        file_status = None if hub_name else self._stat(input_path)
        alternatives = expand_braces(input_path)
        if hub_name:
            self._add_hub(hub_name)
        elif file_status is None and len(alternatives) > 1:
            # Each is named, so that a missing one is an error.
            for path, alternative_label in zip(alternatives, expand_braces(label), strict=True):
                count, duplicate_count = len(self.sources), len(self._duplicates)
                self._add_location(path, alternative_label, self._stat(path))
                if (len(self.sources), len(self._duplicates)) == (count, duplicate_count):
                    raise InputMissingError(self._describe_empty(path, alternative_label))
        else:
            self._add_location(input_path, label, file_status)
        if is_stdin and any(source.kind == "text" for source in self.sources[previous_count:]):
            self.notes.append("Standard input is read as plain text; write CSV to a file that ends in .csv.")
        self._keep_unread(previous_count)
        if hub_name is None and not self._split_is_chosen:
            self._select_split(input_path, label, previous_count)
        self._add_notes(label)
        if len(self.sources) == previous_count and not self._duplicates:
            raise InputMissingError(self._describe_empty(input_path, display_name))

    def _keep_unread(self, previous_count: int) -> None:
        """Keep the account of what an input leaves out."""
        if self._unread.files:
            added = range(previous_count, len(self.sources))
            self._unread.all_files = self._unread.files + len(added)
            self._unread.all_bytes = self._unread.bytes + sum(self.sources[number].size for number in added)
            self.unread.append(self._unread)

    def _begin_input(self, input_path: str, label: str, number: int, declared: DeclaredInput, *, is_val: bool) -> bool:
        """Forget the input before; return whether this one repeats an earlier one."""
        if is_val and declared.val_split is not None:
            self.notes.append(f"{label}: its split {declared.val_split.split} becomes the val subset.")
            declared = replace(declared, split=declared.val_split, subset="val")
        self._input_number, self._declared_input, self._is_val = number, declared, is_val
        self._traits.clear()
        request = declared.split
        split = ("", "", is_val) if request is None else (request.config, request.split, is_val)
        self._files = self._files_by_split.setdefault(split, defaultdict(dict))
        self._skipped_counts, self._duplicates, self._content_notes = Counter(), [], []
        self._longest_window, self._unread, self._choice.root = (0, ""), UnreadData(label), label
        self._unpaired_media, self._has_records, self._split_is_chosen = 0, False, False
        self._unread_suffixes: set[str] = set()
        self._markup: Counter[tuple[str, ...]] = Counter()
        self._folders, self._outside_links = set(), set[str]()
        first = self._input_by_split.setdefault((input_path, split), number)
        if first == number or first not in self._divided:
            return False
        # Only its other splits are new.
        self.notes.append(f"Named more than once, read once: {label}.")
        self.shared.append(SharedFile(label, first, number))
        return True

    def warn_of_unmatched_patterns(self) -> None:
        for option, pattern in sorted(self._choice.unmatched):
            self._warn(f"{option} {pattern!r} matches no file.")

    def find_shared_files(self) -> None:
        """Note the files that inputs with different splits both read."""
        if len(self._files_by_split) < 2:
            return
        first_by_path: dict[str, Source] = {}
        for source in self.sources:
            is_local = source.member is None and not is_url(source.path)
            path = os.path.realpath(source.path) if is_local else source.path
            first = first_by_path.setdefault(path, source)
            if first is not source:
                is_val_too = first.subset != source.subset
                self.shared.append(SharedFile(decode_file_name(source.name), first.input, source.input, is_val_too))

    def _add_location(self, path: str, label: str, file_status: os.stat_result | None) -> None:
        """Add a file, a folder, or the files that a glob matches."""
        if is_url(path):
            self._add_remote(path, label, file_status)
        elif file_status is None and glob.has_magic(path):
            self._add_glob(path, label)
        elif file_status is None:
            raise InputMissingError(describe_missing_input(path))
        elif stat.S_ISDIR(file_status.st_mode):
            if os.path.exists(f"{path}/{STORE_MARKER_NAME}"):  # noqa: PTH110
                raise InputError(f"{path} is already a store; name the text files it was made from.")
            self._add_folder(path, label, file_status)
        else:
            self._add_named(path, label, file_status)

    def _select_split(self, input_path: str, name: str, first: int) -> None:
        """Leave out other splits, and files about data sets, from source ``first`` on."""
        request = self._declared_input.split
        folder = strip_wildcard_part(input_path).rstrip("/") + "/"
        if len(self.sources) == first:
            # Earlier inputs name all of its files.
            return
        if request is None and not self.sources.matches_path(SPLIT_HINT, first, folder):
            return
        listed = self.sources[first:]
        selection = select_split(
            [source.path[len(folder) :] for source in listed],
            [bool(FORMATS[source.kind].method) for source in listed],
            request,
            lambda number: _read_card(listed[number]),
            name.rstrip("/"),
        )
        for note in () if self._is_val else selection.notes:
            self._warn(decode_file_name(note))
        if selection.metadata:
            self._skipped_counts["cards, licences and caches"] = len(selection.metadata)
        left_out = selection.left_out | selection.metadata
        if not left_out:
            return
        self.sources = self.sources.leave_out({first + number for number in left_out})
        self._divided.add(self._input_number)
        for number in left_out:
            source = listed[number]
            self._names.release(source.name)
            # Another input may name the file.
            status = None if source.member is not None else self._stat(source.path)
            if status is not None:
                self._files[status.st_dev].pop(status.st_ino, None)

    def _add_hub(self, name: HubDatasetName) -> None:
        """Add the data files of a Hub dataset, downloaded or streamed."""
        if (request := self._declared_input.split) is not None:
            # The name may hold the split that is trained.
            name = choose_hub_split(replace(name, split="") if self._is_val else name, request)
        files, note = list_hub_files(name)
        self.notes.append(note)
        if download_note := download_to_cache(files, streaming=self._streaming):
            self.notes.append(download_note)
        for file in prefetch_files(files, lambda one: (one.url, one.status)):
            self._add_file(file.url, file.name, file.status)

    def _add_remote(self, url: str, label: str, file_status: os.stat_result | None) -> None:
        """Add a file, a folder or a glob at a URL."""
        if file_status is not None and not stat.S_ISDIR(file_status.st_mode):
            if supports_ranges(url):
                self._add_named(url, label, file_status)
            else:
                path = self._get_spool().copy_web_file(url)
                self._add_named(path, label, os.stat(path))  # noqa: PTH116
        elif file_status is None and has_wildcard(url):
            includes_hidden = url.rpartition("/")[2].startswith(".")
            for file_url, status in prefetch_files(glob_remote(url), lambda one: one):
                if redact_url(file_url).rpartition("/")[2].startswith(".") and not includes_hidden:
                    self._skipped_counts["hidden"] += 1
                else:
                    self._add_file(file_url, strip_revision(redact_url(file_url)), status)
        elif file_status is None:
            raise InputMissingError(f"There is no file or folder {label}.")
        else:
            self._add_remote_folder(url, label)

    def _add_remote_folder(self, url: str, label: str) -> None:
        files = list_remote_files(url)
        if is_saved_dataset({relative_path for _, relative_path, _ in files}):
            raise InputError(
                f"{label} holds a dataset of save_to_disk, which is read from local folders only: copy it to this "
                "machine and name that folder, or name its .arrow files."
            )
        stores = {
            relative_path.rpartition("/")[0]
            for _, relative_path, _ in files
            if relative_path.endswith(STORE_MARKER_NAME)
        }
        for file_url, relative_path, status in prefetch_files(files, lambda one: (one[0], one[2])):
            parts = relative_path.split("/")
            parent_folders = {"/".join(parts[:count]) for count in range(len(parts))}
            if any(part.startswith(".") for part in parts):
                self._skipped_counts["hidden"] += 1
            elif "__pycache__" in parts:
                self._skipped_counts["__pycache__"] += 1
            elif parent_folders & stores:
                self._skipped_counts["files of stores"] += 1
            else:
                self._add_file(file_url, f"{label.rstrip('/')}/{relative_path}", status)

    def _add_notes(self, label: str) -> None:
        if self._unpaired_media and not self._has_records:
            self._skipped_counts["images and sounds without a text file of the same name"] = self._unpaired_media
        if self._outside_links:
            self._warn(decode_file_name(self._make_links_note(label)))
        if self._skipped_counts:
            counts = _describe_counts(self._skipped_counts)
            # Among archives, only tars can supply media.
            media = not detect_archive_by_name(label) and any(
                detect_medium_kind(reason.removeprefix("binary ")) for reason in self._skipped_counts
            )
            hint = " A processor reads images and audio (--processor FOLDER)." if media else ""
            self._warn(decode_file_name(f"Left out of {label}: {counts}.{hint}"))
        for suffixes, count in self._markup.items():
            content, remedy = _MARKUP[suffixes]
            if content != "HTML with its tags" or self._declared_input.keeps_tags:
                self._warn(f"{content} in {format_count(count, 'file')} of {label}: {remedy}.")
        if self._unread_suffixes:
            self._warn(
                f"Files of samples in {label} with these suffixes are not read: "
                f"{', '.join(sorted(self._unread_suffixes))}."
            )
        if self._longest_window[0]:
            window, name = self._longest_window
            self.notes.append(
                f"{decode_file_name(name)} takes up to {window >> 20:,} MiB of memory in each process that reads it "
                "(it was compressed with --long)."
            )
        if self._content_notes:
            self.notes.append(f"Read by content, not by name: {format_list(self._content_notes, 1)}.")
        if self._duplicates:
            self.notes.append(f"Named more than once, read once: {format_list(self._duplicates, 1)}.")

    def _warn(self, text: str) -> None:
        self.notes.append(text)
        self.warnings.append(text)

    def _make_links_note(self, label: str) -> str:
        links = (
            "1 symbolic link leads"
            if len(self._outside_links) == 1
            else f"{len(self._outside_links):,} symbolic links lead"
        )
        verb = "is" if len(self._outside_links) == 1 else "are"
        return (
            f"{links} out of the input folder ({label}) and {verb} skipped: {min(self._outside_links)}"
            f"{', ...' if len(self._outside_links) > 1 else ''}; --follow-links follows them."
        )

    def _describe_empty(self, location: str, display_name: str) -> str:
        if self._outside_links and not self._skipped_counts:
            return f"{display_name} holds no usable file. {self._make_links_note(display_name)}"
        counts = _describe_counts(self._skipped_counts)
        if is_url(location) and set(self._skipped_counts) == {"files of stores"}:
            return (
                f"{display_name} holds only {counts}. A store at a URL cannot be an input: copy it to this "
                "machine first."
            )
        if self._stat(location) is None:
            message = (
                f"Nothing matches {display_name}"
                if not counts
                else f"{display_name} matches no usable file, only {counts}"
            )
        else:
            message = (
                f"{display_name} holds no usable file, only {counts}" if counts else f"{display_name} holds no files"
            )
        if self._unread.examples:
            name, label, remedy = self._unread.examples[0]
            return f"{message}. {name} ({label}): {remedy}."
        return (
            f"{message}; supported are text, code, JSON, CSV, Parquet or Arrow (.txt, .py, .jsonl, ..., also "
            "compressed)."
        )

    def _add_glob(self, pattern: str, label: str) -> None:
        top = strip_wildcard_part(pattern)
        matches = sorted(self._expand_glob(pattern, top), key=lambda path: path.split("/"))
        # Names under an absolute pattern begin at its first wildcard, as its label does.
        prefix_length = len(os.path.normpath(pattern)) - len(label)
        for path in matches:
            name = os.path.normpath(path)[prefix_length:]
            file_status = self._stat(path)
            if file_status is None:
                self._skipped_counts["broken links"] += 1
            elif link := self._find_outside_link(top, path):
                self._outside_links.add(link)
            elif stat.S_ISDIR(file_status.st_mode):
                # After ** the files in the folder are matches of their own.
                if not pattern.endswith(("**", "**/", "**/*")):
                    self._add_folder(path, name, file_status, top)
            elif self._is_in_store(path):
                self._skipped_counts["files of stores"] += 1
            else:
                self._add_file(path, name, file_status)

    def _expand_glob(self, pattern: str, top: str) -> set[str]:
        """Return the paths that a glob matches; ``**`` enters each folder once.

        Several links may lead to the same folder.
        """
        parts = pattern.split("/")
        if "**" not in parts:
            return set(glob.glob(pattern))  # noqa: PTH207
        index = parts.index("**")
        root = "".join(f"{part}/" for part in parts[:index])
        subpattern = "/".join(parts[index + 1 :]) if index + 1 < len(parts) else "*"
        root_folders = sorted(glob.glob(root)) if glob.has_magic(root) else [root]  # noqa: PTH207
        return {
            path
            for folder in self._walk_folders(root_folders, top)
            for path in self._expand_glob(glob.escape(folder) + subpattern, top)
        }

    def _walk_folders(self, root_folders: Sequence[str], top: str) -> Iterator[str]:
        """Yield each visible folder and subfolder once, with a slash at its end."""
        visited: set[tuple[int, int]] = set()
        stack = list(reversed(root_folders))
        while stack:
            folder = stack.pop()
            # A link is recognized only by its name without the slash.
            path = folder if folder == "/" else folder[:-1] or "."
            status = self._stat(path)
            if status is None or not stat.S_ISDIR(status.st_mode):
                continue
            if link := self._find_outside_link(top, path):
                self._outside_links.add(link)
                continue
            identity = (status.st_dev, status.st_ino)
            if identity in visited:
                self._skipped_counts["folders linked twice"] += 1
                continue
            visited.add(identity)
            yield folder
            try:
                with os.scandir(path) as scan:
                    names = [entry.name for entry in scan if entry.name[0] != "." and entry.is_dir()]
            except OSError as error:
                raise InputError(f"Folder {path} cannot be read: {describe_os_error(error)}.") from error
            stack += [f"{folder}{name}/" for name in sorted(names, reverse=True)]

    def _add_folder(self, folder: str, name: str, file_status: os.stat_result, top: str | None = None) -> None:
        """Add everything below a folder; uses a stack, as folders may be deeply nested."""
        self._top_folder, stack = top or folder, [iter([(folder, name, file_status)])]
        while stack:
            entry = next(stack[-1], None)
            if entry is None:
                stack.pop()
                continue
            path, label, status = entry
            if stat.S_ISDIR(status.st_mode):
                if not self._skips_folder(path, status):
                    entries = self._list_saved(path, label) or self._list_hub_revision(path, label)
                    stack.append(iter(entries or self._iter_entries(path, label)))
            else:
                self._add_file(path, label, status)

    def _find_outside_link(self, top: str, path: str) -> str | None:
        """Return the link by which a path leaves the input folder, or None if allowed."""
        return None if self._declared_input.follow_links else self._links.find_outside_link(top, path)

    def _is_in_store(self, path: str) -> bool:
        """Return whether a file is in the folder of a store; the last answer is cached."""
        folder = os.path.dirname(path)  # noqa: PTH120
        if self._last_store_check[0] != folder:
            self._last_store_check = folder, os.path.exists(f"{folder}/{STORE_MARKER_NAME}")  # noqa: PTH110
        return self._last_store_check[1]

    def _skips_folder(self, path: str, status: os.stat_result) -> bool:
        """Return whether to skip a folder: visited, the output, or a store."""
        identity = (status.st_dev, status.st_ino)
        if identity in self._folders:
            self._skipped_counts["folders linked twice"] += 1
            return True
        self._folders.add(identity)
        if identity == self._exclude or os.path.exists(f"{path}/{STORE_MARKER_NAME}"):  # noqa: PTH110
            self._skipped_counts["stores"] += 1
            return True
        return False

    def _list_saved(self, folder: str, label: str) -> list[tuple[str, str, os.stat_result]] | None:
        """List the files of a saved dataset; None if the folder holds none."""
        request = self._declared_input.split
        split = find_saved_split(folder, "" if request is None else request.split)
        if split is not None:
            split_folders, note = split
            self.notes.append(note)
            self._split_is_chosen |= folder == self._top_folder
            files: list[str] | None = split_folders
        else:
            files = list_saved_files(folder)
        if files is None:
            return None
        saved_files = [(path, self._stat(path)) for path in files]
        for path, status in saved_files:
            if status is None:
                raise InputMissingError(f"{path} is missing: the saved dataset {folder} names it.")
            if self._find_outside_link(self._top_folder, path):
                raise InputError(
                    f"{path}, a file of the saved dataset {folder}, is a symbolic link that leads out of the input "
                    "folder; --follow-links follows it."
                )
        prefix = "" if label in ("", ".") else f"{label}/"
        return [(path, prefix + path.rpartition("/")[2], status) for path, status in saved_files if status is not None]

    def _list_hub_revision(self, folder: str, label: str) -> list[tuple[str, str, os.stat_result]] | None:
        """List one revision of a repository in the Hub's cache; None for other folders.

        Files of all revisions are in its ``blobs``, without names.
        """
        repository = _HUB_REPOSITORY.fullmatch(os.path.abspath(folder))  # noqa: PTH100 - as in LinkBounds
        if repository is None:
            return None
        snapshots = folder.rstrip("/") + ("" if repository[2] else "/snapshots")
        if not os.path.isdir(snapshots):  # noqa: PTH112
            return None
        revisions = sorted(os.listdir(snapshots))  # noqa: PTH208
        main = Path(repository[1], "refs", "main")
        revision = main.read_text().strip() if main.exists() else ""
        if revision not in revisions:
            if len(revisions) != 1:
                raise InputError(
                    f"{folder} holds {format_count(len(revisions), 'revision')}, and no refs/main says which is read: "
                    f"name one of {snapshots}."
                )
            (revision,) = revisions
        if len(revisions) > 1:
            self._warn(f"{folder}: revision {revision} (main) is read, and not {len(revisions) - 1:,} more.")
        prefix = "" if label in ("", ".") else f"{label}/"
        status = self._stat(path := f"{snapshots}/{revision}")
        return None if status is None else [(path, prefix + revision, status)]

    def _iter_entries(self, folder: str, label: str) -> Iterator[tuple[str, str, os.stat_result]]:
        """Yield path, name and status of the files and folders in a folder, in order.

        A folder may hold a million files, so no status is kept.
        """
        prefix, path_prefix = "" if label in ("", ".") else f"{label}/", folder if folder[-1] == "/" else f"{folder}/"
        names, links = list[str](), set[str]()
        try:
            with os.scandir(folder) as scan:
                for entry in scan:
                    names.append(entry.name)
                    if entry.is_symlink():
                        links.add(entry.name)
        except OSError as error:
            raise InputError(f"Folder {folder} cannot be read: {describe_os_error(error)}.") from error
        names.sort()
        media, listed_stems = list[str](), set[str]()
        for name in names:
            path = path_prefix + name
            if name.startswith("."):
                self._skipped_counts["hidden"] += 1
            elif self._media and detect_medium_kind(name):
                media.append(name)
            elif name == "__pycache__":
                self._skipped_counts["__pycache__"] += 1
            elif (status := self._stat(path)) is None:
                self._skipped_counts["broken links"] += 1
            elif name in links and self._find_outside_link(self._top_folder, path):
                self._outside_links.add(path)
            else:
                if self._media:
                    listed_stems.add(name.rpartition(".")[0])
                yield path, prefix + name, status
        # Media without a text of the same name may still belong to a record in another folder.
        self._unpaired_media += sum(name.rpartition(".")[0] not in listed_stems for name in media)

    def _add_file(self, path: str, name: str, file_status: os.stat_result) -> None:
        """Add a file found in a folder or by a glob; skip and count it if it is unusable."""
        if not stat.S_ISREG(file_status.st_mode):
            self._skipped_counts["special files"] += 1
        elif not self._choice.selects(name, self._declared_input.include, self._declared_input.exclude):
            self._skipped_counts[NOT_SELECTED] += 1
        elif file_status.st_size == 0:
            self._skipped_counts["empty"] += 1
        elif archive_kind := detect_archive_by_name(redacted_path := redact_url(path)):
            count = len(self.sources)
            try:
                self._add_archive(path, name, file_status, *archive_kind)
            except DamagedFileError:
                # Of one that was listed in part, documents would be lost.
                if len(self.sources) > count:
                    raise
                self._skipped_counts[_DAMAGED.label] += 1
                self._unread.add(name, _DAMAGED, file_status.st_size)
        else:
            name_detection = detect_kind_by_name(redacted_path)
            try:
                verdict = self._detect_file(path, name, file_status, name_detection)
            except DamagedFileError:
                # Reading it will say what is damaged.
                verdict = name_detection or _DAMAGED
            if verdict.kind is None or not verdict.sure:
                self._skipped_counts[verdict.label] += 1
                self._unread.add(name, verdict, file_status.st_size)
            elif not matches_format(self._declared_input.form, verdict.kind):
                self._skipped_counts[f"not {self._declared_input.form}"] += 1
            else:
                self._append(path, name, file_status, verdict, name_detection)

    def _add_named(self, path: str, name: str, file_status: os.stat_result) -> None:
        """Add a file that the input names; raise if it is unusable."""
        is_spooled = self._spool is not None and self._spool.holds(path)
        display_path = name if is_spooled or is_url(path) else path
        if not stat.S_ISREG(file_status.st_mode):
            raise InputError(f"{display_path} is neither a file nor a folder; write its output to a file first.")
        if file_status.st_size == 0:
            raise InputMissingError(
                f"{display_path} is empty: it has 0 bytes; name a file with content, or leave it out."
            )
        form = self._declared_input.form
        if form == "hf_dataset":
            raise InputError(
                f"{display_path} is a file, and data_type hf_dataset needs a folder of save_to_disk, or org/name on "
                "the Hub."
            )
        if archive_kind := detect_archive_by_name(redact_url(path)):
            self._add_archive(path, name, file_status, *archive_kind)
            return
        verdict = self._detect_file(path, name, file_status, detect_kind_by_name(redact_url(path)))
        if verdict.kind is None:
            raise InputError(f"{display_path} is not supported ({verdict.label}): {verdict.remedy}.")
        if form is not None and not matches_format(form, verdict.kind):
            raise InputError(f"{display_path} {describe_format_mismatch(form, verdict.kind)}.")
        # The path of a spooled file may lack the suffix of the original name.
        self._append(path, name, file_status, verdict, detect_kind_by_name(name))

    def _get_spool(self) -> Spool:
        if self._spool is None:
            raise InputError("An input that can be read only once cannot be used here; name a file.")
        return self._spool

    def _add_archive(
        self,
        path: str,
        name: str,
        file_status: os.stat_result,
        kind: ArchiveKind,
        compression: Compression | None,
    ) -> None:
        size, stamp = file_status.st_size, file_status.st_mtime_ns
        archive = Archive(name, path, kind, compression, size, stamp, get_pinned_revision(path))
        if self._media and self._declared_input.form is None and self._add_samples(archive, file_status):
            return
        if self._is_duplicate(name, file_status):
            return
        # Inputs of different splits may list an archive again.
        if path not in self._archive_names:
            self._archive_names[path] = self._names.make_unique(name)
        archive = replace(archive, name=self._archive_names[path])
        for member_name, source in list_archive_sources(
            archive, self._declared_input, self._choice, self._skipped_counts, self._unread.add
        ):
            self._note_other_kind(member_name, detect_kind_by_name(member_name), source.kind)
            self._count_markup(member_name, source.kind)
            if matches_format(self._declared_input.form, source.kind):
                self.sources.append(replace(source, input=self._input_number))
            else:
                self._skipped_counts[f"not {self._declared_input.form}"] += 1

    def _add_samples(self, archive: Archive, file_status: os.stat_result) -> bool:
        """Add a tar of WebDataset samples; return whether it is one."""
        unread = find_unread_suffixes(archive)
        if unread is None:
            return False
        if self._spool is not None and self._spool.holds(archive.path):
            raise InputError(
                f"{archive.name} holds samples of a WebDataset, and can be read only once, but their media are read "
                "again when batches are made. Write it to a file, and name that file."
            )
        self._unread_suffixes |= unread
        detection = FileDetection("webdataset", archive.compression)
        self._append(archive.path, archive.name, file_status, detection, None)
        return True

    def _count_markup(self, name: str, kind: str) -> None:
        if kind in ("text", "code") and name.endswith(_MARKUP_SUFFIXES):
            self._markup.update(suffixes for suffixes in _MARKUP if name.endswith(suffixes))

    def _note_other_kind(self, name: str, name_detection: FileDetection | None, kind: str) -> None:
        """Note a file that is read as another kind than its name suggests."""
        if name_detection is not None and kind not in (name_detection.kind, JSON_OBJECT):
            self._content_notes.append(f"{name} as {FORMATS[kind].label}")

    def _is_duplicate(self, name: str, file_status: os.stat_result) -> bool:
        """Return whether the file is already listed, and register it."""
        inputs_by_inode, inode = self._files[file_status.st_dev], file_status.st_ino
        if inode in inputs_by_inode:
            self._duplicates.append(decode_file_name(name))
            self.shared.append(SharedFile(decode_file_name(name), inputs_by_inode[inode], self._input_number))
            return True
        inputs_by_inode[inode] = self._input_number
        return False

    def _append(
        self,
        path: str,
        name: str,
        file_status: os.stat_result,
        verdict: FileDetection,
        name_detection: FileDetection | None,
    ) -> None:
        if verdict.kind is None:
            raise AssertionError("only files of a supported kind are listed")
        if self._is_duplicate(name, file_status):
            return
        if verdict.compression == "zstd" and file_status.st_size >= _SMALL_FILE_BYTES and not is_url(path):
            self._measure_window(path, name)
        name = self._names.make_unique(name)
        self._count_markup(name, verdict.kind)
        self._has_records |= bool(FORMATS[verdict.kind].method)
        self._note_other_kind(name, name_detection, verdict.kind)
        key = verdict.kind, verdict.compression, get_pinned_revision(path)
        if key not in self._traits:
            declared = self._declared_input
            encoding = choose_encoding(verdict.kind, declared.encoding)
            self._traits[key] = SourceTraits(*key, self._input_number, encoding, declared.subset)
        self.sources.append_file(name, path, file_status.st_size, file_status.st_mtime_ns, self._traits[key])

    def _measure_window(self, path: str, name: str) -> None:
        """Remember the file that needs most memory, above what zstd takes by itself."""
        with open_location(path, 0, 0) as file:
            window = read_zstd_window(file)
        if window > max(_LONG_WINDOW_BYTES, self._longest_window[0]):
            self._longest_window = window, name

    def _detect_file(
        self, path: str, name: str, file_status: os.stat_result, name_detection: FileDetection | None
    ) -> FileDetection:
        if (
            self._declared_input.form is None
            and (recalled_detection := self._detect_without_reading(path, file_status, name_detection)) is not None
        ):
            return _detect_pointer(path, file_status) or recalled_detection
        probe_source = Source(
            *(decode_file_name(name), path, "text", None, file_status.st_size, file_status.st_mtime_ns),
            revision=get_pinned_revision(path),
        )
        if pointer := _detect_pointer(path, file_status):
            return pointer
        detection = detect_file_kind(probe_source, self._declared_input.encoding)
        return detect_declared_kind(probe_source, detection, self._declared_input)

    def _detect_without_reading(
        self, path: str, file_status: os.stat_result, name_detection: FileDetection | None
    ) -> FileDetection | None:
        """Return the kind of a file if it is known without reading the file."""
        if not needs_content(name_detection):
            return name_detection
        if not self._detected_files or is_url(path):
            return None
        detected_file = self._detected_files.get(make_absolute(path))
        if detected_file is None or detected_file.kind not in FORMATS:
            return None
        if (detected_file.size, detected_file.mtime_ns) != (file_status.st_size, file_status.st_mtime_ns):
            return None
        return FileDetection(detected_file.kind, detected_file.compression)

    def _stat(self, path: str) -> os.stat_result | None:
        if is_url(path):
            return stat_remote(path)
        try:
            return os.stat(path)  # noqa: PTH116 - a Path per file costs more than the call
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            # A link that leads back to itself counts as a broken link.
            if os.path.islink(path):  # noqa: PTH114
                return None
            raise InputError(f"{path} cannot be read: {describe_os_error(error)}.") from error


def _detect_pointer(path: str, file_status: os.stat_result) -> FileDetection | None:
    """Return the detection of a pointer of Git LFS, which stands in place of a file."""
    if is_url(path) or file_status.st_size not in _POINTER_BYTES:
        return None
    with open_location(path, 0, 0) as file:
        if not file.read(len(_POINTER_START)).startswith(_POINTER_START):
            return None
    return FileDetection(None, label="Git LFS pointers", remedy="fetch the file itself: git lfs pull")


def _read_card(source: Source) -> str:
    # Cards are UTF-8, whatever the data is.
    with PartStream(replace(source, encoding="")) as stream:
        return stream.read_up_to(_CARD_BYTES).decode(errors="replace")


def _get_inode(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _describe_counts(skipped_counts: Mapping[str, int]) -> str:
    return ", ".join(
        f"{count:,} {_SINGULAR.get(reason, reason) if count == 1 else reason}"
        for reason, count in sorted(skipped_counts.items())
    )


def describe_missing_input(input_path: str) -> str:
    """Describe a missing input, with advice that depends on its name."""
    if input_path.partition(":")[0] in SYNTHETIC_NAMES:
        return (
            f"There is no file or folder {input_path}, and the synthetic data of that name has no records: batchloom "
            f"prepare {input_path} --out STORE writes a store of it, batchloom train --data {input_path} trains on it"
        )
    name_detection = detect_kind_by_name(input_path)
    kind = name_detection.kind if name_detection else None
    label = FORMATS[kind].missing_label if kind else ""
    remedy = "name files, folders or quoted globs that exist"
    if parse_hub_name(input_path) is not None and not is_url(input_path):
        remedy += f" (a data set of the Hub: hf://datasets/{input_path})"
    message = describe_missing_path(input_path, remedy)
    if label:
        message = message.replace("There is no file or folder", f"{label} file not found:", 1)
    if message.endswith("."):
        message = message[:-1] + (suggest(input_path, (*list_preset_names(), *SYNTHETIC_NAMES)) or ".")
    return message


@final
class LinkBounds:
    """Detector of symbolic links that lead out of a folder, with a cache of folders."""

    def __init__(self) -> None:
        self._real: dict[str, str] = {}

    def resolve(self, path: str) -> str:
        """Return the absolute path without links."""
        folder, name = os.path.split(os.path.abspath(path))  # noqa: PTH100 - many paths
        if folder not in self._real:
            self._real[folder] = os.path.realpath(folder)
        full = f"{self._real[folder].rstrip('/')}/{name}"
        return os.path.realpath(full) if os.path.islink(full) else full  # noqa: PTH114

    def find_outside_link(self, top: str, path: str) -> str | None:
        """Return the first link by which a path leaves a folder; None if it stays inside.

        Args:
            top: the folder, which may be a link itself.
            path: an existing path below it.
        """
        real, real_top = self.resolve(path), self.resolve(top)
        if is_inside(real, real_top):
            return None
        # The cache of huggingface_hub keeps files beside the snapshots, which hold links to them.
        if (cache := _HUB_SNAPSHOTS.match(real_top)) and is_inside(real, f"{cache[1]}/blobs"):
            return None
        # Every file below a linked folder leaves by the same link.
        folder = os.path.dirname(path)  # noqa: PTH120 - as above
        above = None if folder in ("", "/", top) else self.find_outside_link(top, folder)
        return above or path


def is_inside(path: str, folder: str) -> bool:
    """Return whether an absolute path is a folder or is below it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


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
    return prefetch_items(files, lambda one: _prefetch_beginning(*get_file(one)))


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
