"""Walk over the files of local folders and globs, in a deterministic order."""

import glob
import os
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import final

from batchloom.core.addresses import is_glob, is_url, strip_file_scheme
from batchloom.core.errors import InputError, InputMissingError
from batchloom.core.files import describe_os_error
from batchloom.core.medium import detect_medium_kind
from batchloom.core.wording import format_count
from batchloom.remote import stat_remote
from batchloom.sources.formats.format_registry import DeclaredInput
from batchloom.sources.hf_datasets import ListedFile, find_saved_split, list_saved_files
from batchloom.sources.input_account import InputAccount, ListingNotes

# A folder with this file is a store, which is not an input.
STORE_MARKER_NAME = "dataset_metadata.json"
# Folders in the cache of huggingface_hub: of a repository, of its revisions, and of one revision.
_HUB_REPOSITORY = re.compile(r"(.*/(?:datasets|models)--[^/]+)(/snapshots)?")
_HUB_SNAPSHOTS = re.compile(r"(.*/(?:datasets|models)--[^/]+)/snapshots(?:/[0-9a-f]{40})?(?:/|$)")


def strip_wildcard_part(input_path: str) -> str:
    """Return the path of an input, or the folder before the first wildcard of a glob.

    A name with wildcards that exists as a file is not a glob.
    """
    path = os.path.expanduser(strip_file_scheme(input_path))
    if not is_glob(path) or os.path.lexists(path):
        return path
    parts = path.split("/")
    first = next(index for index, part in enumerate(parts) if is_glob(part))
    return "/".join(parts[:first]) or ("/" if path.startswith("/") else ".")


def stat_path(path: str) -> os.stat_result | None:
    """Return the status of a local or remote path; None if nothing is there."""
    if is_url(path):
        return stat_remote(path)
    try:
        return os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        # A link that leads back to itself counts as a broken link.
        if os.path.islink(path):
            return None
        raise InputError(f"{path} cannot be read: {describe_os_error(error)}.") from error


@final
class FolderWalk:
    """Walk over the local folders and globs of one input.

    Args:
        declared: declaration of the input.
        account: where skipped files and links are counted.
        notes: where notes are added.
        links: detector of links, shared by all inputs.
        exclude: device and inode of a folder that is skipped; None for none.
        media: whether media files are no inputs.

    Attributes:
        is_split_chosen: whether a split of a saved data set was chosen.
    """

    def __init__(
        self,
        declared: DeclaredInput,
        account: InputAccount,
        notes: ListingNotes,
        links: "LinkBounds",
        exclude: tuple[int, int] | None,
        *,
        media: bool,
    ) -> None:
        self._declared = declared
        self._account = account
        self._notes = notes
        self._links = links
        self._exclude = exclude
        self._media = media
        self.is_split_chosen = False
        self._visited_folders: set[tuple[int, int]] = set()
        self._top_folder = ""
        self._last_store_check = ("", False)

    def iter_glob(self, pattern: str, label: str) -> Iterator[ListedFile]:
        """Yield the files that a glob matches, and those below folders that it matches."""
        top = strip_wildcard_part(pattern)
        matches = sorted(self._expand_glob(pattern, top), key=lambda path: path.split("/"))
        # Names under an absolute pattern begin at its first wildcard, as its label does.
        prefix_length = len(os.path.normpath(pattern)) - len(label)
        for path in matches:
            name = os.path.normpath(path)[prefix_length:]
            file_status = stat_path(path)
            if file_status is None:
                self._account.skipped["broken links"] += 1
            elif link := self._find_outside_link(top, path):
                self._account.outside_links.add(link)
            elif stat.S_ISDIR(file_status.st_mode):
                # After ** the files in the folder are matches of their own.
                if not pattern.endswith(("**", "**/", "**/*")):
                    yield from self.iter_folder(path, name, file_status, top)
            elif self._is_in_store(path):
                self._account.skipped["files of stores"] += 1
            else:
                yield path, name, file_status

    def _expand_glob(self, pattern: str, top: str) -> set[str]:
        """Return the paths that a glob matches; ``**`` enters each folder once.

        Several links may lead to the same folder.
        """
        parts = pattern.split("/")
        if "**" not in parts:
            return set(glob.glob(pattern))
        index = parts.index("**")
        root = "".join(f"{part}/" for part in parts[:index])
        subpattern = "/".join(parts[index + 1 :]) if index + 1 < len(parts) else "*"
        root_folders = sorted(glob.glob(root)) if glob.has_magic(root) else [root]
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
            status = stat_path(path)
            if status is None or not stat.S_ISDIR(status.st_mode):
                continue
            if link := self._find_outside_link(top, path):
                self._account.outside_links.add(link)
                continue
            identity = (status.st_dev, status.st_ino)
            if identity in visited:
                self._account.skipped["folders linked twice"] += 1
                continue
            visited.add(identity)
            yield folder
            try:
                with os.scandir(path) as scan:
                    names = [entry.name for entry in scan if entry.name[0] != "." and entry.is_dir()]
            except OSError as error:
                raise InputError(f"Folder {path} cannot be read: {describe_os_error(error)}.") from error
            stack += [f"{folder}{name}/" for name in sorted(names, reverse=True)]

    def iter_folder(
        self, folder: str, name: str, file_status: os.stat_result, top: str | None = None
    ) -> Iterator[ListedFile]:
        """Yield the files below a folder; uses a stack, as folders may be deeply nested."""
        self._top_folder = top or folder
        stack = [iter([(folder, name, file_status)])]
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
                yield path, label, status

    def _find_outside_link(self, top: str, path: str) -> str | None:
        """Return the link by which a path leaves the input folder, or None if allowed."""
        return None if self._declared.follow_links else self._links.find_outside_link(top, path)

    def _is_in_store(self, path: str) -> bool:
        """Return whether a file is in the folder of a store; the last answer is cached."""
        folder = os.path.dirname(path)
        if self._last_store_check[0] != folder:
            self._last_store_check = folder, os.path.exists(f"{folder}/{STORE_MARKER_NAME}")
        return self._last_store_check[1]

    def _skips_folder(self, path: str, status: os.stat_result) -> bool:
        """Return whether to skip a folder: visited, the output, or a store."""
        identity = (status.st_dev, status.st_ino)
        if identity in self._visited_folders:
            self._account.skipped["folders linked twice"] += 1
            return True
        self._visited_folders.add(identity)
        if identity == self._exclude or os.path.exists(f"{path}/{STORE_MARKER_NAME}"):
            self._account.skipped["stores"] += 1
            return True
        return False

    def _list_saved(self, folder: str, label: str) -> list[ListedFile] | None:
        """List the files of a saved dataset; None if the folder holds none."""
        request = self._declared.split
        split = find_saved_split(folder, "" if request is None else request.split)
        if split is not None:
            split_folders, note = split
            self._notes.add(note)
            self.is_split_chosen |= folder == self._top_folder
            files: list[str] | None = split_folders
        else:
            files = list_saved_files(folder)
        if files is None:
            return None
        saved_files = [(path, stat_path(path)) for path in files]
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

    def _list_hub_revision(self, folder: str, label: str) -> list[ListedFile] | None:
        """List one revision of a repository in the Hub's cache; None for other folders.

        Files of all revisions are in its ``blobs``, without names.
        """
        repository = _HUB_REPOSITORY.fullmatch(os.path.abspath(folder))
        if repository is None:
            return None
        snapshots = folder.rstrip("/") + ("" if repository[2] else "/snapshots")
        if not os.path.isdir(snapshots):
            return None
        revisions = sorted(os.listdir(snapshots))
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
            self._notes.warn(f"{folder}: revision {revision} (main) is read, and not {len(revisions) - 1:,} more.")
        prefix = "" if label in ("", ".") else f"{label}/"
        status = stat_path(path := f"{snapshots}/{revision}")
        return None if status is None else [(path, prefix + revision, status)]

    def _iter_entries(self, folder: str, label: str) -> Iterator[ListedFile]:
        """Yield path, name and status of the files and folders in a folder, in order.

        A folder may hold a million files, so no status is kept.
        """
        prefix = "" if label in ("", ".") else f"{label}/"
        path_prefix = folder if folder[-1] == "/" else f"{folder}/"
        names = list[str]()
        links = set[str]()
        try:
            with os.scandir(folder) as scan:
                for entry in scan:
                    names.append(entry.name)
                    if entry.is_symlink():
                        links.add(entry.name)
        except OSError as error:
            raise InputError(f"Folder {folder} cannot be read: {describe_os_error(error)}.") from error
        names.sort()
        media = list[str]()
        listed_stems = set[str]()
        for name in names:
            path = path_prefix + name
            if name.startswith("."):
                self._account.skipped["hidden"] += 1
            elif self._media and detect_medium_kind(name):
                media.append(name)
            elif name == "__pycache__":
                self._account.skipped["__pycache__"] += 1
            elif (status := stat_path(path)) is None:
                self._account.skipped["broken links"] += 1
            elif name in links and self._find_outside_link(self._top_folder, path):
                self._account.outside_links.add(path)
            else:
                if self._media:
                    listed_stems.add(name.rpartition(".")[0])
                yield path, prefix + name, status
        # Media without a text of the same name may still belong to a record in another folder.
        self._account.unpaired_media += sum(name.rpartition(".")[0] not in listed_stems for name in media)


@final
class LinkBounds:
    """Detector of symbolic links that lead out of a folder, with a cache of folders."""

    def __init__(self) -> None:
        self._real: dict[str, str] = {}

    def resolve(self, path: str) -> str:
        """Return the absolute path without links."""
        folder, name = os.path.split(os.path.abspath(path))
        if folder not in self._real:
            self._real[folder] = os.path.realpath(folder)
        full = f"{self._real[folder].rstrip('/')}/{name}"
        return os.path.realpath(full) if os.path.islink(full) else full

    def find_outside_link(self, top: str, path: str) -> str | None:
        """Return the first link by which a path leaves a folder; None if it stays inside.

        Args:
            top: the folder, which may be a link itself.
            path: an existing path below it.
        """
        real = self.resolve(path)
        real_top = self.resolve(top)
        if is_inside(real, real_top):
            return None
        # The cache of huggingface_hub keeps files beside the snapshots, which hold links to them.
        if (cache := _HUB_SNAPSHOTS.match(real_top)) and is_inside(real, f"{cache[1]}/blobs"):
            return None
        # Every file below a linked folder leaves by the same link.
        folder = os.path.dirname(path)
        above = None if folder in ("", "/", top) else self.find_outside_link(top, folder)
        return above or path


def is_inside(path: str, folder: str) -> bool:
    """Return whether an absolute path is a folder or is below it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")
