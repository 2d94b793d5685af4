"""Listing of local, remote and Hub inputs as files, in a deterministic order."""

import glob
import os
import stat
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, final

from batchloom.core.addresses import (
    STANDARD_INPUT,
    UniqueNames,
    check_url,
    expand_braces,
    has_wildcard,
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
    make_absolute,
)
from batchloom.core.settings import suggest
from batchloom.core.synthetic_data import SYNTHETIC_NAMES
from batchloom.core.wording import format_count
from batchloom.remote import (
    PAGE_CACHE,
    clear_status_cache,
    glob_remote,
    list_remote_files,
    supports_ranges,
)
from batchloom.sources.files.archives import Archive, ArchiveKind, detect_archive_by_name
from batchloom.sources.files.file_choice import NOT_SELECTED, FileChoice, describe_nothing_chosen
from batchloom.sources.files.file_opening import (
    UTF8_FIRST,
    Compression,
    Spool,
    get_pinned_revision,
    open_location,
    read_zstd_window,
)
from batchloom.sources.files.part_stream import PartStream, Source, SourceTable, SourceTraits
from batchloom.sources.folder_walk import (
    STORE_MARKER_NAME,
    FolderWalk,
    LinkBounds,
    stat_path,
    strip_wildcard_part,
)
from batchloom.sources.formats.format_registry import (
    FORMATS,
    DeclaredInput,
    DetectedFile,
    FileDetection,
    choose_encoding,
    describe_format_mismatch,
    detect_declared_kind,
    detect_file_kind,
    detect_kind_by_name,
    list_archive_sources,
    matches_format,
    needs_content,
    reraise_with_location,
)
from batchloom.sources.formats.webdataset_format import find_unread_suffixes
from batchloom.sources.hf_datasets import (
    HubDatasetName,
    ListedFile,
    choose_hub_split,
    download_to_cache,
    find_hub_name,
    is_saved_dataset,
    list_hub_files,
    list_preset_names,
    parse_hub_name,
    pin_revision,
    strip_revision,
)
from batchloom.sources.input_account import InputAccount, LeftOutFile, ListingNotes, UnreadData
from batchloom.sources.prefetching import prefetch_files, prefetch_inputs
from batchloom.sources.splits import SPLIT_HINT, select_split

# Number of the input that listed each file, by device and inode.
ListedFiles = defaultdict[int, dict[int, int]]
_DAMAGED = FileDetection(None, None, "damaged", "fetch or pack it again")
_CARD_BYTES = 16 << 20
# Sizes and beginning of the pointers of Git LFS.
_POINTER_BYTES = range(110, 201)
_POINTER_START = b"version https://git-lfs.github.com/spec/"
# Above a window of this size, and in files of this size, the memory of zstd is noted.
_LONG_WINDOW_BYTES = 128 << 20
_MEASURED_BYTES = 1 << 20


class SharedFile(NamedTuple):
    """A file that two inputs list."""

    name: str
    first: int  # Number of the input that listed it before
    second: int
    is_val_too: bool = False  # Whether one of them lists it for another subset


@dataclass(frozen=True, slots=True)
class SourceListing:
    """The input files in reading order, and notes about skipped ones.

    Attributes:
        sources: the input files.
        notes: sentences about the input before work begins.
        warnings: those of the notes that tell what is left out.
        duplicates: files that several inputs list.
        content: content hash by path, if the content was hashed.
        unread: of each input with such files, the data that is left out because of its form.
        left_out: all files with data that are not read.
        proposals: settings that notes propose, and their values.
    """

    sources: Sequence[Source]
    notes: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    duplicates: tuple[SharedFile, ...] = ()
    content: Mapping[str, str] = field(default_factory=dict)
    unread: tuple[UnreadData, ...] = ()
    left_out: tuple[LeftOutFile, ...] = ()
    proposals: tuple[tuple[str, str], ...] = ()

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
    lister.has_one_input = len(inputs) == 1
    numbered_inputs = list(enumerate(zip(inputs, list_paths_and_labels(inputs), strict=True)))
    if declared_inputs:
        numbered_inputs.sort(key=lambda item: declared_inputs[item[0]].subset not in ("val", "test"))
    # Held-out splits come first: deduplication keeps the first copy of a text.
    for is_val in (True, False):
        for number, (input_path, (_, label)) in prefetch_inputs(numbered_inputs, lambda item: item[1][0]):
            declared_input = declared_inputs[number] if declared_inputs else DeclaredInput()
            if is_val and declared_input.val_split is None:
                continue
            try:
                # A Path would change some names, so inputs remain strings.
                path = os.path.expanduser(strip_file_scheme(input_path))
                lister.add(path, label, number, declared_input, is_val=is_val)
            except InputError as error:
                reraise_with_location(error, declared_input.location)
    lister.find_shared_files()
    lister.finish_choice()
    return SourceListing(
        lister.sources,
        tuple(lister.notes.notes),
        tuple(lister.notes.warnings),
        tuple(lister.shared),
        unread=tuple(lister.unread),
        proposals=tuple(lister.notes.proposals),
        left_out=tuple(file for unread in lister.unread for file in unread.left_out),
    )


@final
class _SourceLister:
    """Lister of several inputs, and what they share.

    Attributes:
        sources: the files listed so far.
        names: names that sources have.
        archive_names: name of each listed archive, by path.
        notes: notes about all inputs.
        links: detector of links that lead out of an input.
        choice: choice of files by patterns.
        has_one_input: whether there is one input only.
        unchosen: files that inputs name and their patterns leave out: name and declaration.
        detected_files: formats detected by an earlier listing, by absolute path.
        exclude: device and inode of a folder that is skipped; None for none.
        streaming: whether Hub data sets are streamed; None decides by size.
        media: whether images and audio that records name are read.
        divided: numbers of the inputs whose other splits are left out.
        shared: files that several inputs list.
        unread: data that inputs leave out.
    """

    def __init__(
        self,
        exclude: Path | None,
        spool: Spool | None,
        detected_files: Mapping[str, DetectedFile],
        *,
        streaming: bool | None,
        media: bool,
    ) -> None:
        self._spool = spool
        self.streaming = streaming
        self.media = media
        self.detected_files = detected_files
        self.exclude = _get_inode(exclude) if exclude else None
        self.sources = SourceTable()
        self.names = UniqueNames()
        self.archive_names: dict[str, str] = {}
        self.notes = ListingNotes()
        self.links = LinkBounds()
        self.choice = FileChoice()
        self.has_one_input = False
        self.unchosen: list[tuple[str, DeclaredInput]] = []
        # Number of the input that lists each file, by device and inode, for each split that inputs name: inputs that
        # read different splits of a folder both list all of its files.
        self._files_by_split: dict[tuple[str, str, bool], ListedFiles] = {}
        self._input_by_split: dict[tuple[str, tuple[str, str, bool]], int] = {}
        self.divided: set[int] = set()
        self.shared: list[SharedFile] = []
        self.unread: list[UnreadData] = []

    def add(self, input_path: str, label: str, number: int, declared: DeclaredInput, *, is_val: bool = False) -> None:
        """Add the files of an input, or of its split that becomes ``val``."""
        if is_val and declared.val_split is not None:
            self.notes.add(f"{label}: its split {declared.val_split.split} becomes the val subset.")
            declared = replace(declared, split=declared.val_split, subset="val")
        request = declared.split
        split = ("", "", is_val) if request is None else (request.config, request.split, is_val)
        first = self._input_by_split.setdefault((input_path, split), number)
        if first != number and first in self.divided:
            # Only its other splits are new.
            self.notes.add(f"Named more than once, read once: {label}.")
            self.shared.append(SharedFile(label, first, number))
            return
        files = self._files_by_split.setdefault(split, defaultdict(dict))
        _InputListing(self, label, number, declared, files, is_val=is_val).add(input_path)

    def get_spool(self) -> Spool:
        """Return the storage for inputs that can be read only once."""
        if self._spool is None:
            raise InputError("An input that can be read only once cannot be used here; name a file.")
        return self._spool

    def is_spooled(self, path: str) -> bool:
        """Return whether a path is a copy of an input that can be read only once."""
        return self._spool is not None and self._spool.holds(path)

    def finish_choice(self) -> None:
        """Warn of named files that patterns leave out, and of patterns without a match.

        Raises:
            InputMissingError: the patterns leave out every file.
        """
        if self.unchosen:
            name, declared = self.unchosen[0]
            if not self.sources:
                raise InputMissingError(describe_nothing_chosen("the inputs", name, declared.include, declared.exclude))
            count = format_count(len(self.unchosen), "named file")
            self.notes.warn(f"Left out: {count} {NOT_SELECTED}, first {decode_file_name(name)}.")
        for option, pattern in sorted(self.choice.unmatched):
            self.notes.warn(f"{option} {pattern!r} matches no file.")

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


@final
class _InputListing:
    """Listing of the files of one input."""

    def __init__(
        self,
        lister: _SourceLister,
        label: str,
        number: int,
        declared: DeclaredInput,
        files: ListedFiles,
        *,
        is_val: bool,
    ) -> None:
        self._lister = lister
        self._label = label
        self._number = number
        self._declared = (
            replace(declared, encoding=f"{UTF8_FIRST}{declared.encoding}") if declared.encoding else declared
        )
        self._files = files
        self._is_val = is_val
        self._is_stdin = False
        self._account = InputAccount(label)
        self._walk = FolderWalk(declared, self._account, lister.notes, lister.links, lister.exclude, media=lister.media)
        lister.choice.begin_input(label)
        # Properties of the input's files, by kind, compression and revision.
        self._traits: dict[tuple[str, Compression | None, str], SourceTraits] = {}

    def add(self, input_path: str) -> None:
        """Add the files of the input."""
        lister = self._lister
        label = self._label
        previous_count = len(lister.sources)
        counts = self._count_listed()
        display_name = label if is_url_or_stdin(input_path) else input_path
        self._is_stdin = input_path == STANDARD_INPUT
        if self._is_stdin:
            input_path = lister.get_spool().copy_standard_input()
            lister.notes.add(
                "Standard input is cached until the job ends; to resume a stopped job, pipe the same bytes again."
            )
        if is_url(input_path):
            check_url(input_path)
        hub_name = find_hub_name(input_path)
        if hub_name is None:
            input_path = pin_revision(input_path)
        file_status = None if hub_name else stat_path(input_path)
        alternatives = expand_braces(input_path)
        if hub_name:
            self._add_hub(hub_name)
        elif file_status is None and len(alternatives) > 1:
            # Each is named, so that a missing one is an error.
            for path, alternative_label in zip(alternatives, expand_braces(label), strict=True):
                earlier_counts = self._count_listed()
                self._add_location(path, alternative_label, stat_path(path))
                if self._count_listed() == earlier_counts:
                    raise self._make_empty_error(path, alternative_label)
        else:
            self._add_location(input_path, label, file_status)
        if self._is_stdin and any(source.kind == "text" for source in lister.sources[previous_count:]):
            lister.notes.add("Standard input is read as plain text; write CSV to a file that ends in .csv.")
        self._keep_unread(previous_count)
        if hub_name is None and not self._walk.is_split_chosen:
            self._select_split(input_path, label, previous_count)
        self._account.write_notes(lister.notes, self._declared)
        if self._count_listed() == counts:
            raise self._make_empty_error(input_path, display_name)

    def _count_listed(self) -> tuple[int, ...]:
        """Count the files that show that an input is not empty."""
        return len(self._lister.sources), len(self._account.duplicates), len(self._lister.unchosen)

    def _make_empty_error(self, location: str, display_name: str) -> InputMissingError:
        choice = self._lister.choice
        if choice.left_out and not self._account.unread.files:
            declared = self._declared
            reason = describe_nothing_chosen(display_name, choice.left_out, declared.include, declared.exclude)
            return InputMissingError(reason)
        exists = stat_path(location) is not None
        return InputMissingError(self._account.describe_empty(location, display_name, exists=exists))

    def _add_files(self, files: Iterable[ListedFile]) -> None:
        for path, name, file_status in files:
            self._add_file(path, name, file_status)

    def _add_location(self, path: str, label: str, file_status: os.stat_result | None) -> None:
        """Add a file, a folder, or the files that a glob matches."""
        if is_url(path):
            self._add_remote(path, label, file_status)
        elif file_status is None and glob.has_magic(path):
            self._add_files(self._walk.iter_glob(path, label))
        elif file_status is None:
            raise InputMissingError(describe_missing_input(path))
        elif stat.S_ISDIR(file_status.st_mode):
            if os.path.exists(f"{path}/{STORE_MARKER_NAME}"):
                raise InputError(f"{path} is already a store; name the text files it was made from.")
            self._add_files(self._walk.iter_folder(path, label, file_status))
        else:
            self._add_named(path, label, file_status)

    def _add_hub(self, name: HubDatasetName) -> None:
        """Add the data files of a Hub dataset, downloaded or streamed."""
        if (request := self._declared.split) is not None:
            # The name may hold the split that is trained.
            name = choose_hub_split(replace(name, split="") if self._is_val else name, request)
        files, note = list_hub_files(name)
        self._lister.notes.add(note)
        if download_note := download_to_cache(files, streaming=self._lister.streaming):
            self._lister.notes.add(download_note)
        self._add_files(prefetch_files(files, lambda file: (file[0], file[2])))

    def _add_remote(self, url: str, label: str, file_status: os.stat_result | None) -> None:
        """Add a file, a folder or a glob at a URL."""
        if file_status is not None and not stat.S_ISDIR(file_status.st_mode):
            if supports_ranges(url):
                self._add_named(url, label, file_status)
            else:
                path = self._lister.get_spool().copy_web_file(url)
                self._add_named(path, label, os.stat(path))
        elif file_status is None and has_wildcard(url):
            includes_hidden = url.rpartition("/")[2].startswith(".")
            for file_url, status in prefetch_files(glob_remote(url), lambda file: file):
                if redact_url(file_url).rpartition("/")[2].startswith(".") and not includes_hidden:
                    self._account.skipped["hidden"] += 1
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
        for file_url, relative_path, status in prefetch_files(files, lambda file: (file[0], file[2])):
            parts = relative_path.split("/")
            parent_folders = {"/".join(parts[:count]) for count in range(len(parts))}
            if any(part.startswith(".") for part in parts):
                self._account.skipped["hidden"] += 1
            elif "__pycache__" in parts:
                self._account.skipped["__pycache__"] += 1
            elif parent_folders & stores:
                self._account.skipped["files of stores"] += 1
            else:
                self._add_file(file_url, f"{label.rstrip('/')}/{relative_path}", status)

    def _add_file(self, path: str, name: str, file_status: os.stat_result) -> None:
        """Add a file found in a folder or by a glob; skip and count it if it is unusable."""
        if not stat.S_ISREG(file_status.st_mode):
            self._account.skipped["special files"] += 1
        elif not self._lister.choice.selects(name, self._declared.include, self._declared.exclude):
            self._account.skipped[NOT_SELECTED] += 1
        elif file_status.st_size == 0:
            self._account.skipped["empty"] += 1
        elif archive_kind := detect_archive_by_name(redacted_path := redact_url(path)):
            count = len(self._lister.sources)
            try:
                self._add_archive(path, name, file_status, *archive_kind)
            except DamagedFileError:
                # Of one that was listed in part, documents would be lost.
                if len(self._lister.sources) > count:
                    raise
                self._account.skipped[_DAMAGED.label] += 1
                self._account.unread.add(name, _DAMAGED, file_status.st_size)
        else:
            name_detection = detect_kind_by_name(redacted_path)
            try:
                verdict = self._detect_file(path, name, file_status, name_detection)
            except DamagedFileError:
                # Reading it will say what is damaged.
                verdict = name_detection or _DAMAGED
            if verdict.kind is None or not verdict.sure:
                self._account.skipped[verdict.label] += 1
                self._account.unread.add(name, verdict, file_status.st_size)
            elif not matches_format(self._declared.form, verdict.kind):
                self._account.skipped[f"not {self._declared.form}"] += 1
            else:
                self._append(path, name, file_status, verdict, name_detection)

    def _add_named(self, path: str, name: str, file_status: os.stat_result) -> None:
        """Add a file that the input names; raise if it is unusable."""
        display_path = name if self._lister.is_spooled(path) or is_url(path) else path
        if not stat.S_ISREG(file_status.st_mode):
            raise InputError(f"{display_path} is neither a file nor a folder; write its output to a file first.")
        archive_kind = detect_archive_by_name(redact_url(path))
        # The members of an archive are chosen, which only --exclude leaves out as a whole. Standard input has no name.
        include = () if archive_kind else self._declared.include
        if not self._is_stdin and not self._lister.choice.selects(name, include, self._declared.exclude):
            self._lister.unchosen.append((name, self._declared))
            return
        if file_status.st_size == 0:
            raise InputMissingError(
                f"{display_path} is empty: it has 0 bytes; name a file with content, or leave it out."
            )
        form = self._declared.form
        if form == "hf_dataset":
            raise InputError(
                f"{display_path} is a file, and data_type hf_dataset needs a folder of save_to_disk, or org/name on "
                "the Hub."
            )
        if archive_kind:
            self._add_archive(path, name, file_status, *archive_kind)
            return
        if self._lister.has_one_input or self._declared.location:
            # The encoding is that of this file. Several files may be those of a folder that a shell has listed.
            self._declared = replace(self._declared, encoding=self._declared.encoding.removeprefix(UTF8_FIRST))
        verdict = self._detect_file(path, name, file_status, detect_kind_by_name(redact_url(path)))
        if verdict.kind is None:
            raise InputError(f"{display_path} is not supported ({verdict.label}): {verdict.remedy}.")
        if form is not None and not matches_format(form, verdict.kind):
            raise InputError(f"{display_path} {describe_format_mismatch(form, verdict.kind)}.")
        # The path of a spooled file may lack the suffix of the original name.
        self._append(path, name, file_status, verdict, detect_kind_by_name(name))

    def _add_archive(
        self,
        path: str,
        name: str,
        file_status: os.stat_result,
        kind: ArchiveKind,
        compression: Compression | None,
    ) -> None:
        size = file_status.st_size
        stamp = file_status.st_mtime_ns
        archive = Archive(name, path, kind, compression, size, stamp, get_pinned_revision(path))
        if self._lister.media and self._declared.form is None and self._add_samples(archive, file_status):
            return
        if self._is_duplicate(name, file_status):
            return
        # Inputs of different splits may list an archive again.
        if path not in self._lister.archive_names:
            self._lister.archive_names[path] = self._lister.names.make_unique(name)
        archive = replace(archive, name=self._lister.archive_names[path])
        for member_name, source in list_archive_sources(
            archive, self._declared, self._lister.choice, self._account.skipped, self._account.unread.add
        ):
            self._account.note_other_kind(member_name, detect_kind_by_name(member_name), source.kind)
            self._account.count_markup(member_name, source.kind)
            if matches_format(self._declared.form, source.kind):
                self._lister.sources.append(replace(source, input=self._number))
            else:
                self._account.skipped[f"not {self._declared.form}"] += 1

    def _add_samples(self, archive: Archive, file_status: os.stat_result) -> bool:
        """Add a tar of WebDataset samples; return whether it is one."""
        unread = find_unread_suffixes(archive)
        if unread is None:
            return False
        if self._lister.is_spooled(archive.path):
            raise InputError(
                f"{archive.name} holds samples of a WebDataset, and can be read only once, but their media are read "
                "again when batches are made. Write it to a file, and name that file."
            )
        self._account.unread_suffixes |= unread
        detection = FileDetection("webdataset", archive.compression)
        self._append(archive.path, archive.name, file_status, detection, None)
        return True

    def _is_duplicate(self, name: str, file_status: os.stat_result) -> bool:
        """Return whether the file is already listed, and register it."""
        inputs_by_inode = self._files[file_status.st_dev]
        inode = file_status.st_ino
        if inode in inputs_by_inode:
            self._account.duplicates.append(decode_file_name(name))
            self._lister.shared.append(SharedFile(decode_file_name(name), inputs_by_inode[inode], self._number))
            return True
        inputs_by_inode[inode] = self._number
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
        if verdict.compression == "zstd" and file_status.st_size >= _MEASURED_BYTES and not is_url(path):
            self._measure_window(path, name)
        name = self._lister.names.make_unique(name)
        self._account.count_markup(name, verdict.kind)
        self._account.has_records |= bool(FORMATS[verdict.kind].method)
        self._account.note_other_kind(name, name_detection, verdict.kind)
        key = verdict.kind, verdict.compression, get_pinned_revision(path)
        if key not in self._traits:
            declared = self._declared
            encoding = choose_encoding(verdict.kind, declared.encoding)
            self._traits[key] = SourceTraits(*key, self._number, encoding, declared.subset)
        self._lister.sources.append_file(name, path, file_status.st_size, file_status.st_mtime_ns, self._traits[key])

    def _measure_window(self, path: str, name: str) -> None:
        """Remember the file that needs most memory, above what zstd takes by itself."""
        with open_location(path, 0, 0) as file:
            window = read_zstd_window(file)
        if window > max(_LONG_WINDOW_BYTES, self._account.longest_window[0]):
            self._account.longest_window = window, name

    def _detect_file(
        self, path: str, name: str, file_status: os.stat_result, name_detection: FileDetection | None
    ) -> FileDetection:
        if (
            self._declared.form is None
            and (recalled_detection := self._detect_without_reading(path, file_status, name_detection)) is not None
        ):
            return _detect_pointer(path, file_status) or recalled_detection
        probe_source = Source(
            *(decode_file_name(name), path, "text", None, file_status.st_size, file_status.st_mtime_ns),
            revision=get_pinned_revision(path),
        )
        if pointer := _detect_pointer(path, file_status):
            return pointer
        detection = detect_file_kind(probe_source, self._declared.encoding)
        return detect_declared_kind(probe_source, detection, self._declared)

    def _detect_without_reading(
        self, path: str, file_status: os.stat_result, name_detection: FileDetection | None
    ) -> FileDetection | None:
        """Return the kind of a file if it is known without reading the file."""
        if not needs_content(name_detection):
            return name_detection
        if not self._lister.detected_files or is_url(path):
            return None
        detected_file = self._lister.detected_files.get(make_absolute(path))
        if detected_file is None or detected_file.kind not in FORMATS:
            return None
        if (detected_file.size, detected_file.mtime_ns) != (file_status.st_size, file_status.st_mtime_ns):
            return None
        return FileDetection(detected_file.kind, detected_file.compression)

    def _select_split(self, input_path: str, name: str, first: int) -> None:
        """Leave out other splits, and files about data sets, from source ``first`` on."""
        request = self._declared.split
        folder = strip_wildcard_part(input_path).rstrip("/") + "/"
        if len(self._lister.sources) == first:
            # Earlier inputs name all of its files.
            return
        if request is None and not self._lister.sources.matches_path(SPLIT_HINT, first, folder):
            return
        listed = self._lister.sources[first:]
        selection = select_split(
            [source.path[len(folder) :] for source in listed],
            [bool(FORMATS[source.kind].method) for source in listed],
            request,
            lambda number: _read_card(listed[number]),
            name.rstrip("/"),
        )
        for note in () if self._is_val else selection.notes:
            self._lister.notes.warn(decode_file_name(note))
        if selection.metadata:
            self._account.skipped["cards, licences and caches"] = len(selection.metadata)
        left_out = selection.left_out | selection.metadata
        if not left_out:
            return
        self._lister.sources = self._lister.sources.leave_out({first + number for number in left_out})
        self._lister.divided.add(self._number)
        for number in left_out:
            source = listed[number]
            self._lister.names.release(source.name)
            # Another input may name the file.
            status = None if source.member is not None else stat_path(source.path)
            if status is not None:
                self._files[status.st_dev].pop(status.st_ino, None)

    def _keep_unread(self, previous_count: int) -> None:
        """Keep the account of what an input leaves out."""
        unread = self._account.unread
        sources = self._lister.sources
        if unread.files:
            added = range(previous_count, len(sources))
            unread.all_files = unread.files + len(added)
            unread.all_bytes = unread.bytes + sum(sources[number].size for number in added)
            self._lister.unread.append(unread)


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
