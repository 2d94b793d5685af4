"""Unique labels of inputs and files that contain no absolute paths."""

import glob
import os
from collections import Counter
from collections.abc import Sequence
from typing import final

from batchloom.core.addresses import (
    STANDARD_INPUT,
    format_input_label,
    is_url_or_stdin,
    strip_file_scheme,
)
from batchloom.core.files import decode_file_name


def make_input_labels(inputs: Sequence[str]) -> list[str]:
    """Return unique labels of the inputs, without absolute paths.

    A relative input is its own label. For an absolute one it is the last part of its path (for a
    glob, from the first part with a wildcard), with more parts if labels would collide. A URL loses
    credentials and query. Bytes that are not UTF-8 are replaced.
    """
    names, labels_by_path = UniqueNames(), dict[str, str]()
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
        path = os.path.normpath(os.path.expanduser(strip_file_scheme(location)))  # noqa: PTH111
        # A file named like the standard input argument remains a file.
        paths.append(f"./{path}" if path == STANDARD_INPUT else path)
    part_lists = [path.split("/") for path in set(paths) if not is_url_or_stdin(path)]
    tail_counts = Counter("/".join(parts[start:]) for parts in part_lists for start in range(len(parts)))
    return [
        (path, format_input_label(path) if is_url_or_stdin(path) else _format_label(path, tail_counts))
        for path in paths
    ]


def _format_label(path: str, tail_counts: Counter[str]) -> str:
    if not os.path.isabs(path):  # noqa: PTH117
        return path
    parts = path.strip("/").split("/")
    first = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts) - 1)
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
