"""Lists of documents with missing media, which ``check`` writes for loaders."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from batchloom.core.errors import InputError
from batchloom.core.files import JSON_DECODE_ERRORS, describe_os_error, read_regular_file
from batchloom.store.write.store_writer import write_file

_VERSION = 1


class SubsetMissingMedia(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Fingerprint of a subset, independent of its location, and document numbers."""

    fingerprint: str
    documents: tuple[int, ...]


class MissingMedia(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Address of the checked store, and its subsets by name."""

    version: int
    store: str
    subsets: dict[str, SubsetMissingMedia]


def write_missing_media(path: Path, store: str, subsets: Mapping[str, SubsetMissingMedia]) -> None:
    """Write a list as JSON, atomically.

    Args:
        path: path of the file.
        store: address of the store, without credentials.
        subsets: subsets by name.

    Raises:
        OutputError: the file cannot be written.
    """
    missing_media = MissingMedia(_VERSION, store, dict(subsets))
    write_file(path, msgspec.json.format(msgspec.json.encode(missing_media), indent=1) + b"\n")


def read_missing_media(path: Path) -> MissingMedia:
    """Read a list of documents with missing media.

    Raises:
        InputError: the file cannot be read or has another format.
    """
    remedy = "batchloom check STORE --missing-media FILE writes one"
    try:
        missing_media = msgspec.json.decode(read_regular_file(path), type=MissingMedia)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {describe_os_error(error)}; {remedy}.") from error
    except JSON_DECODE_ERRORS as error:
        raise InputError(
            f"{path} is not a list of documents with missing images or audio: {error}; {remedy}."
        ) from error
    if missing_media.version != _VERSION:
        raise InputError(f"{path} has version {missing_media.version}; this batchloom reads {_VERSION}; {remedy}.")
    return missing_media
