"""Images, sounds and video frames of a document, read where the store names them."""

import base64
import re
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from batchloom.batches.media import StoreSource, read_medium, read_medium_head
from batchloom.core.addresses import is_url, redact_url
from batchloom.core.errors import InputError, MissingDependencyError, StoreError, UnusableRecordError
from batchloom.core.medium import parse_tar_location
from batchloom.core.wording import format_size
from batchloom.store import Store
from batchloom.store.format import StoredMedium

_LISTED_MEDIA = 48
_MAX_BYTES = 64 << 20
_MAX_EMBEDDED = 16 << 20
_HEAD_BYTES = 16
# First bytes of a file, as regular expressions, and its media type. None of these formats can hold a script.
_MEDIA_TYPES = {
    rb"\x89PNG": "image/png",
    rb"\xff\xd8\xff": "image/jpeg",
    rb"GIF8": "image/gif",
    rb"BM": "image/bmp",
    rb"RIFF....WEBP": "image/webp",
    rb"....ftypavif": "image/avif",
    rb"RIFF....WAVE": "audio/wav",
    rb"OggS": "audio/ogg",
    rb"fLaC": "audio/flac",
    rb"ID3|\xff[\xe2-\xff]": "audio/mpeg",
}


@dataclass(frozen=True, slots=True)
class ShownMedium:
    """A medium on the page of its document.

    Attributes:
        medium: the medium.
        location: the path or URL in the record, without credentials; empty if the record held the bytes.
        fault: why it cannot be shown; empty if it can.
        data: ``data:`` URL for a page in one file; empty on a page of the server.
    """

    medium: StoredMedium
    location: str
    fault: str
    data: str = ""


# Reports with the folders of the media are read once per open store.
@lru_cache(maxsize=8)
def _open_source(store: Store) -> StoreSource:
    return StoreSource(store)


def list_media(store: Store, document: int, *, embed: bool = False) -> tuple[list[ShownMedium], int]:
    """Return the first media of a document, checked, and the number of further ones.

    With ``embed`` they hold their bytes, as far as those of all fit into a page.
    """
    source = _open_source(store)
    media = source.media.of(np.array([document]))[0]
    # The frames of a video are in one file.
    faults: dict[object, str] = {}
    for medium in media[:_LISTED_MEDIA]:
        if (key := (medium.location, medium.blob)) not in faults:
            faults[key] = _find_fault(source, medium)
    shown = []
    room = _MAX_EMBEDDED if embed else 0
    for index, medium in enumerate(media[:_LISTED_MEDIA]):
        fault = faults[medium.location, medium.blob]
        data = ""
        if embed and not fault and medium.size <= room:
            content, kind = read_shown_medium(store, document, index)
            data = f"data:{kind};base64,{base64.b64encode(content).decode()}"
            room = room - len(content)
        elif embed and not fault:
            fault = "is not in this file, which would be too large"
        shown.append(ShownMedium(medium, redact_url(medium.location), fault, data))
    return shown, len(media) - len(shown)


def _find_fault(source: StoreSource, medium: StoredMedium) -> str:
    try:
        _check_access(source, medium)
        head = read_medium_head(source, medium, _HEAD_BYTES)
    except UnusableRecordError as error:
        return error.reason
    except StoreError as error:
        return str(error)
    if medium.kind != "video" and not _detect_type(head):
        return f"begins with {head!r}, which is no format that browsers show"
    return ""


def _check_access(source: StoreSource, medium: StoredMedium) -> None:
    """Refuse a medium that is behind a URL or too large."""
    path = parse_tar_location(medium.location)[0]
    if medium.blob is None and (is_url(path) or is_url(source.folder_of(medium.document) or "")):
        raise UnusableRecordError("is behind a URL, and these pages load nothing from other machines")
    if medium.size > _MAX_BYTES and (medium.kind != "video" or medium.blob is not None):
        raise UnusableRecordError(f"has {format_size(medium.size)}, and a page shows at most {format_size(_MAX_BYTES)}")


def _detect_type(data: bytes) -> str:
    kinds = (kind for pattern, kind in _MEDIA_TYPES.items() if re.match(pattern, data, re.DOTALL))
    return next(kinds, "")


def read_shown_medium(store: Store, document: int, index: int) -> tuple[bytes, str]:
    """Return the bytes of a medium of a document, and their type.

    Only the number of the medium comes from the request, so that no other file can be named.

    Raises:
        InputError: there is no such medium, or its file is missing, changed, or no image or sound.
        StoreError: the bytes in the store are damaged.
    """
    source = _open_source(store)
    media = source.media.of(np.array([document]))[0]
    if index >= len(media):
        raise InputError(f"Document {document:,} has no medium {index}.")
    try:
        _check_access(source, media[index])
        data = read_medium(source, media[index])
    except (UnusableRecordError, MissingDependencyError) as error:
        raise InputError(f"{media[index].kind.capitalize()} {index} of document {document:,}: {error}") from error
    kind = _detect_type(data)
    if not kind:
        raise InputError(f"Medium {index} of document {document:,} has no format that browsers show.")
    return data, kind
