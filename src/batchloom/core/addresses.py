"""Where an input lies: in a file, behind a URL, on standard input; and how such a place is named.

All of this is decided by the words alone. A URL may carry credentials and signatures: what is
shown of it in a name, a message or a manifest is its address without them.
"""

import re
from urllib.parse import urlsplit

from batchloom.core.errors import InputError

STANDARD_INPUT = "-"
_URL_PATTERN = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://")
_FILE_SCHEME = "file://"
# Of these a question mark is a part of the name, and there is no signature behind it.
_QUERYLESS_SCHEMES = ("s3", "s3a", "gs", "gcs", "hf", "memory")


def is_url_or_stdin(location: str) -> bool:
    """Whether a place is no path of this machine: a URL, or standard input."""
    return is_url(location) or location == STANDARD_INPUT


def is_url(location: str) -> bool:
    """Whether a place is the URL of something that is no file of this machine."""
    # Most places are paths, and the search for three characters is the cheapest that tells.
    return "://" in location and bool(_URL_PATTERN.match(location)) and not location.lower().startswith(_FILE_SCHEME)


def strip_file_scheme(location: str) -> str:
    """The path of a ``file://`` URL; any other place as it is."""
    return location[len(_FILE_SCHEME) :] if location.lower().startswith(_FILE_SCHEME) else location


def get_scheme(url: str) -> str:
    """What stands before ``://``, in small letters; empty for a path."""
    match = _URL_PATTERN.match(url) if "://" in url else None
    return match[1].lower() if match else ""


def redact_url(location: str) -> str:
    """The place without credentials, query and fragment; a path as it is."""
    scheme = get_scheme(location)
    if not scheme:
        return location
    address = location[len(scheme) + 3 :]
    if scheme not in _QUERYLESS_SCHEMES:
        # A slash too many is no reason to show a password.
        address = re.split(r"[?#]", address, maxsplit=1)[0].lstrip("/")
    host, slash, path = address.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


def format_input_label(location: str) -> str:
    """What an input that is no path is called; several may be called the same."""
    return "stdin" if location == STANDARD_INPUT else redact_url(location)


def check_url(url: str) -> None:
    """Refuse a URL that libraries cannot take apart.

    Raises:
        InputError: its host or its port is none.
    """
    try:
        _ = urlsplit(url).port
    except ValueError:
        raise InputError(
            f"{redact_url(url)} is no URL that can be read: its host or its port is none; write it as "
            "scheme://host:port/path."
        ) from None


def has_wildcard(url: str) -> bool:
    """Whether a URL may be a glob: a question mark of a web address begins its query."""
    if get_scheme(url) in _QUERYLESS_SCHEMES:
        return bool(re.search(r"[*?\[]", url))
    return bool(re.search(r"[*\[]", urlsplit(url).path))
