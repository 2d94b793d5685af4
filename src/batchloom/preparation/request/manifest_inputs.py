"""Detection of YAML manifests among inputs, by name."""

import glob
import os
from collections.abc import Sequence

from batchloom.core.addresses import is_url_or_stdin
from batchloom.core.errors import InputError

_MANIFEST_SUFFIXES = (".yaml", ".yml")


def is_manifest_path(value: object) -> bool:
    """Return whether an input is a YAML manifest; such files inside folders are not."""
    if not isinstance(value, str) or not value.lower().endswith(_MANIFEST_SUFFIXES) or is_url_or_stdin(value):
        return False
    if glob.has_magic(value) and not os.path.lexists(value):
        return False
    return not os.path.isdir(value)  # noqa: PTH112 - a string stays a string


def check_no_manifests(inputs: Sequence[str], command: str) -> None:
    """Refuse manifests in a command that takes the files they list.

    Raises:
        InputError: the message names the first.
    """
    for path in inputs:
        if is_manifest_path(path):
            raise InputError(
                f"{path} is named like a manifest, which {command} does not read; name the files it lists, or "
                "inspect it with batchloom doctor."
            )
