"""Locations of inputs (files, URLs, standard input) and their display names.

Decisions use the text of the location only. A URL may carry credentials and signatures: names,
messages and manifests show its address without them.
"""

import re
from urllib.parse import urlsplit

from batchloom.core.errors import InputError

STANDARD_INPUT = "-"
_URL_PATTERN = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://")
_FILE_SCHEME = "file://"
# In these schemes a question mark is part of the name, and URLs carry no signature.
_QUERYLESS_SCHEMES = ("s3", "s3a", "gs", "gcs", "hf", "memory")


def is_url_or_stdin(location: str) -> bool:
    """Return whether a location is a URL or standard input, not a local path."""
    return is_url(location) or location == STANDARD_INPUT


def is_url(location: str) -> bool:
    """Return whether a location is a URL of something other than a local file."""
    # Most locations are paths, and the search for three characters is the cheapest check.
    return "://" in location and bool(_URL_PATTERN.match(location)) and not location.lower().startswith(_FILE_SCHEME)


def strip_file_scheme(location: str) -> str:
    """Return the path of a ``file://`` URL; any other location unchanged."""
    return location[len(_FILE_SCHEME) :] if location.lower().startswith(_FILE_SCHEME) else location


def get_scheme(url: str) -> str:
    """Return the lowercase scheme before ``://``; empty for a path."""
    match = _URL_PATTERN.match(url) if "://" in url else None
    return match[1].lower() if match else ""


def redact_url(location: str) -> str:
    """Return a URL without credentials, query and fragment; a path unchanged."""
    scheme = get_scheme(location)
    if not scheme:
        return location
    address = location[len(scheme) + 3 :]
    if scheme not in _QUERYLESS_SCHEMES:
        # An extra slash must not reveal a password.
        address = re.split(r"[?#]", address, maxsplit=1)[0].lstrip("/")
    host, slash, path = address.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


def format_input_label(location: str) -> str:
    """Return the label of an input that is no path; labels are not unique."""
    return "stdin" if location == STANDARD_INPUT else redact_url(location)


def check_url(url: str) -> None:
    """Reject a URL that libraries cannot parse.

    Raises:
        InputError: its host or its port is invalid.
    """
    try:
        _ = urlsplit(url).port
    except ValueError:
        raise InputError(
            f"{redact_url(url)} is not a readable URL: its host or port is invalid; write it as scheme://host:port/path."
        ) from None


def has_wildcard(url: str) -> bool:
    """Return whether a URL may be a glob; ``?`` begins the query of a web address."""
    if get_scheme(url) in _QUERYLESS_SCHEMES:
        return bool(re.search(r"[*?\[]", url))
    return bool(re.search(r"[*\[]", urlsplit(url).path))
