"""Locations of inputs (files, URLs, standard input) and their labels.

Decisions use the text of the location only. A URL may carry credentials and signatures: names,
messages and manifests show its address without them.
"""

import glob
import os
import re
from collections import Counter
from collections.abc import Sequence
from typing import final
from urllib.parse import urlsplit

from batchloom.core.errors import InputError
from batchloom.core.files import decode_file_name

STANDARD_INPUT = "-"
_URL_PATTERN = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://")
_FILE_SCHEME = "file://"
# In these schemes a question mark is part of the name, and URLs carry no signature.
_QUERYLESS_SCHEMES = ("s3", "s3a", "gs", "gcs", "hf", "memory")
# Alternatives or a range of numbers, without braces inside.
_BRACES = re.compile(r"\{((?:[^{}/]*,[^{}/]*)+|-?\d+\.\.-?\d+)\}")
_BRACE_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")


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
    """Return a URL without credentials, query and fragment; a local path unchanged."""
    scheme = get_scheme(location)
    if scheme in ("", "file"):
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


def is_glob(path: str) -> bool:
    """Return whether a local path has a wildcard or alternatives in braces."""
    return glob.has_magic(path) or _BRACES.search(path) is not None


def expand_braces(text: str) -> list[str]:
    """Return the alternatives of ``{a,b}`` and ``{0..3}``, as a shell does.

    Numbers have leading zeros if one of their bounds has them.
    """
    match = _BRACES.search(text)
    if match is None:
        return [text]
    alternatives = match[1].split(",")
    if bounds := _BRACE_RANGE.fullmatch(match[1]):
        first = int(bounds[1])
        last = int(bounds[2])
        is_padded = any(len(bound.lstrip("-")) > 1 and bound.lstrip("-")[0] == "0" for bound in bounds.groups())
        width = max(map(len, bounds.groups())) if is_padded else 0
        numbers = range(first, last + 1) if first <= last else range(first, last - 1, -1)
        alternatives = [f"{number:0{width}d}" for number in numbers]
    start, stop = match.span()
    return [one for word in alternatives for one in expand_braces(text[:start] + word + text[stop:])]


def has_wildcard(url: str) -> bool:
    """Return whether a URL may be a glob; ``?`` begins the query of a web address."""
    if get_scheme(url) in _QUERYLESS_SCHEMES:
        return bool(re.search(r"[*?\[]", url))
    return bool(re.search(r"[*\[]", urlsplit(url).path))


def make_input_labels(inputs: Sequence[str]) -> list[str]:
    """Return unique labels of the inputs, without absolute paths.

    A relative input is its own label. For an absolute one it is the last part of its path (for a
    glob, from the first part with a wildcard), with more parts if labels would collide. A URL loses
    credentials and query. Bytes that are not UTF-8 are replaced.
    """
    names = UniqueNames()
    labels_by_path = dict[str, str]()
    for path, label in list_paths_and_labels(inputs):
        if path not in labels_by_path:
            labels_by_path[path] = names.make_unique(label)
    return [labels_by_path[path] for path, _ in list_paths_and_labels(inputs)]


def list_paths_and_labels(inputs: Sequence[str]) -> list[tuple[str, str]]:
    """Return the normalized path or URL and the label of each input, undecoded."""
    paths = []
    for location in inputs:
        if is_url_or_stdin(location):
            paths.append(location)
            continue
        path = os.path.normpath(os.path.expanduser(strip_file_scheme(location)))
        # A file named like the standard input argument remains a file.
        paths.append(f"./{path}" if path == STANDARD_INPUT else path)
    part_lists = [path.split("/") for path in set(paths) if not is_url_or_stdin(path)]
    tail_counts = Counter("/".join(parts[start:]) for parts in part_lists for start in range(len(parts)))
    return [
        (path, format_input_label(path) if is_url_or_stdin(path) else _format_label(path, tail_counts))
        for path in paths
    ]


def _format_label(path: str, tail_counts: Counter[str]) -> str:
    if not os.path.isabs(path):
        return path
    parts = path.strip("/").split("/")
    first = next((i for i, part in enumerate(parts) if is_glob(part)), len(parts) - 1)
    for start in range(first, 0, -1):
        tail = "/".join(parts[start:])
        if tail_counts[tail] == 1:
            return tail
    return "/".join(parts)


@final
class UniqueNames:
    """Unique names as text: the manifest is JSON, and identifies files by them."""

    def __init__(self) -> None:
        self._used_names: set[str] = set()
        self._repeat_counts: Counter[str] = Counter()

    def make_unique(self, name: str) -> str:
        """Return the name as valid UTF-8, numbered if it is taken."""
        plain = unique_name = decode_file_name(name)
        while unique_name in self._used_names:
            self._repeat_counts[plain] += 1
            unique_name = f"{plain} ({self._repeat_counts[plain] + 1})"
        self._used_names.add(unique_name)
        return unique_name

    def release(self, unique_name: str) -> None:
        """Allow a name to be used again."""
        self._used_names.discard(unique_name)
