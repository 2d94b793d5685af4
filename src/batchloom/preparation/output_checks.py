"""Checks of an output before any work: it is its own, and apart from the inputs."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from batchloom.core.addresses import get_scheme, is_url, is_url_or_stdin, redact_url
from batchloom.core.errors import StoreConflictError
from batchloom.core.files import refuse_url
from batchloom.sources import strip_wildcard_part
from batchloom.store import WORK_NAME, wrap_write_errors

_MAX_LISTED = 3


def check_separate(inputs: Sequence[str], out: Path) -> None:
    """Refuse an output folder that is, or holds, an input.

    Raises:
        StoreConflictError: the message names the input.
    """
    with wrap_write_errors(out):
        if not out.is_dir():
            return
    folder = os.path.realpath(out)
    for input_path in inputs:
        # Hub data sets and missing paths are in no local folder.
        if is_url_or_stdin(input_path) or not os.path.lexists(strip_wildcard_part(input_path)):
            continue
        real_path = os.path.realpath(strip_wildcard_part(input_path))
        if real_path == folder:
            raise StoreConflictError(
                f"--out {out} is the folder of the input {input_path} itself; choose another --out, next to it or "
                "inside it."
            )
        if real_path.startswith(folder.rstrip("/") + "/"):
            raise StoreConflictError(
                f"The input {input_path} lies inside --out {out}, which may hold only the store; choose another --out."
            )


def check_output_folder(out: Path) -> None:
    """Refuse a folder that holds anything but this job's work.

    Raises:
        StoreConflictError: it is not empty and holds no unfinished job.
        InputError: it is a URL.
    """
    refuse_url(out, "The output")
    with wrap_write_errors(out):
        if not out.is_dir() or (out / WORK_NAME).is_dir():
            return
        unknown_names = sorted(path.name for path in out.iterdir())
    if unknown_names:
        raise StoreConflictError(
            f"{out} is not empty "
            f"({', '.join(unknown_names[:_MAX_LISTED])}{', ...' if len(unknown_names) > _MAX_LISTED else ''}) and "
            "is not a store; choose another --out."
        )


def check_remote_separate(inputs: Sequence[str], url: str) -> None:
    """Refuse a remote output inside an input, or an input inside the output."""
    out = _normalize_url(url)
    for input_url in inputs:
        if not is_url(input_url):
            continue
        normalized_url = _normalize_url(input_url)
        fixed_prefix = re.split(r"[*?\[]", normalized_url, maxsplit=1)[0]
        if fixed_prefix != normalized_url:
            fixed_prefix = fixed_prefix.rpartition("/")[0]
        if f"{normalized_url}/".startswith(f"{out}/"):
            raise StoreConflictError(
                f"The input {redact_url(input_url)} lies inside --out {redact_url(url)}, which may hold only the "
                "store; choose another --out."
            )
        if f"{out}/".startswith(f"{fixed_prefix}/") and (fixed_prefix == normalized_url or "**" in normalized_url):
            raise StoreConflictError(
                f"--out {redact_url(url)} lies inside the input {redact_url(input_url)} and would be read with "
                "it; choose another --out, next to the input."
            )


def _normalize_url(url: str) -> str:
    scheme = get_scheme(url)
    usual = {"s3a": "s3", "gcs": "gs"}.get(scheme, scheme)
    return usual + redact_url(url)[len(scheme) :].rstrip("/")
