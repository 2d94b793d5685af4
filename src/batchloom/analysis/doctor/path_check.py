"""``check``: verify a store with its media, a Megatron prefix, or raw input."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from batchloom import sources
from batchloom.core.addresses import (
    has_wildcard,
    is_url,
    is_url_or_stdin,
    redact_url,
    strip_file_scheme,
)
from batchloom.core.errors import (
    BatchloomError,
    DownloadError,
    InputError,
    InputMissingError,
    NoRangesError,
    SettingsError,
    StoreError,
    StoreMissingError,
)
from batchloom.core.files import describe_os_error
from batchloom.core.synthetic_data import parse_synthetic_spec
from batchloom.remote import is_web_url
from batchloom.store import MANIFEST_NAME, verify_prefix, verify_store
from batchloom.store.format import describe_partial_store
from batchloom.store.maintain import (
    VerificationResult,
    verify_remote_store,
    verify_synthetic,
)
from batchloom.store.read import open_remote_manifest

_FLAT_SUFFIXES = (".bin", ".npy")
_NPY_MAGIC = b"\x93NUMPY"
_MAX_CHECKED_IDS = 8192
_RawCheck = Callable[[str], VerificationResult]


def check(
    path: str | os.PathLike[str],
    *,
    text_field: str | None = None,
    encoding: str | None = None,
    vocab_size: int | None = None,
    generation: int | None = None,
    media: bool = True,
    missing_media: str | os.PathLike[str] | None = None,
) -> VerificationResult:
    """Verify a store, a Megatron prefix or raw input; report whether it is real data.

    A store, also at a URL: checksums, counts, ids within the vocabulary, the tokenizer's fingerprint, a decoded
    sample, that tokens are not uniform noise; and that its images and audio exist, are unchanged, and can be
    decoded and processed. Raw input, also named by a manifest: that every record can be read as by ``prepare``.

    Args:
        path: path or URL to check.
        text_field: field of a raw record that holds the text; None to detect the schema.
        encoding: encoding of raw text, JSON and CSV files; None for UTF-8.
        vocab_size: upper bound (exclusive) of the ids of a bare prefix; a store records its own.
        generation: generation of a store; None for the newest.
        media: whether to read images and audio of a store that was made with a processor.
        missing_media: output file that lists documents with unreadable media, for ``MediaOptions(replace=...)``.

    Raises:
        InputMissingError: there is nothing at ``path``.
        InputError: the kind cannot be checked, or a manifest names no data sets.
        SettingsError: settings of synthetic data or of a manifest are invalid; ``path`` has no generations; or
            ``missing_media`` is given for data without media.
        GenerationError: the store has no such generation.
        MissingDependencyError: the decoder of images or audio is not installed.
        OutputError: the list cannot be written.
    """
    if missing_media is not None and not media:
        raise SettingsError(["missing_media: missing media are found only with media=True"])
    check_raw_input = partial(_check_raw, text_field=text_field, encoding=encoding)
    verdict = _check_raw_or_prepared(path, check_raw_input, vocab_size, generation)
    if "processor" in verdict.facts:
        if media:
            from batchloom.batches.media import check_media

            check_media(verdict, strip_file_scheme(os.fspath(path)), generation, missing_media)
    elif missing_media is not None:
        raise SettingsError([f"missing_media: {verdict.path} is not a store that was made with a processor"])
    return verdict


def _check_raw_or_prepared(
    path: str | os.PathLike[str], check_raw_input: _RawCheck, vocab_size: int | None, generation: int | None
) -> VerificationResult:
    location = strip_file_scheme(os.fspath(path))
    local_path = Path(location)
    if is_url(location):
        return _check_remote(location, check_raw_input, generation)
    if is_url_or_stdin(location) and generation is None:
        return check_raw_input(location)
    try:
        verdict = _check_prepared(location, vocab_size, generation)
    except BatchloomError:
        raise
    except OSError as error:
        raise InputError(f"{local_path} cannot be read: {describe_os_error(error)}.") from error
    return verdict or check_raw_input(location)


def _check_raw(location: str, text_field: str | None, encoding: str | None) -> VerificationResult:
    from batchloom.analysis.doctor.examination import check_raw

    return check_raw(location, text_field, encoding)


def _check_remote(url: str, check_raw_input: _RawCheck, generation: int | None) -> VerificationResult:
    """Verify a URL: a store if it has a manifest, otherwise raw input."""
    is_store, error = (True, None) if generation is not None else _find_remote_store(url)
    if is_store:
        return verify_remote_store(url, generation=generation)
    # Reading records reports an unreachable server, but not an unexpected answer to the manifest request.
    if not (is_web_url(url) and isinstance(error, DownloadError)):
        return check_raw_input(url)
    try:
        verdict = check_raw_input(url)
    except InputMissingError:
        raise error from None
    verdict.facts["no store"] = str(error)
    return verdict


def detect_prepared_kind(location: str) -> str:
    """Return ``store`` (also at a URL), ``prefix``, ``ids``, or an empty string."""
    if is_url(location):
        return "store" if _find_remote_store(location)[0] else ""
    path = Path(os.path.expanduser(location))  # noqa: PTH111 - Path.expanduser raises for ~nobody
    if (path / MANIFEST_NAME).is_file():
        return "store"
    if _find_prefix(path):
        return "prefix"
    if path.suffix in _FLAT_SUFFIXES and path.is_file():
        with path.open("rb") as file:
            start = file.read(_MAX_CHECKED_IDS)
        # A text file may have the same suffix; binary ids contain zero bytes, since their high bytes are mostly zero.
        return "ids" if start.startswith(_NPY_MAGIC) or b"\0" in start else ""
    return ""


def _find_remote_store(url: str) -> tuple[bool, InputError | None]:
    """Return whether a URL is a store, and the error of the request for its manifest."""
    # A URL with a suffix is a file, and its server may answer anything for a path below it.
    if has_wildcard(url) or Path(redact_url(url)).suffix:
        return False, None
    try:
        open_remote_manifest(url)
    except StoreMissingError:
        return False, None
    except (StoreError, NoRangesError):
        return True, None  # It is damaged, or its server lacks range requests; opening it reports the error.
    except InputError as error:
        return False, error
    return True, None


def _find_prefix(path: Path) -> Path | None:
    """Return the Megatron prefix that a path names, also by one of its two files."""
    stem = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    is_prefix = stem.name and not path.is_dir() and stem.with_name(f"{stem.name}.idx").is_file()
    return stem if is_prefix else None


def _check_prepared(location: str, vocab_size: int | None, generation: int | None) -> VerificationResult | None:
    """Verify a store or a prefix; None if the path is neither."""
    local_path = Path(location)
    if (local_path / MANIFEST_NAME).exists():
        return verify_store(local_path, generation=generation)
    if generation is not None:
        raise SettingsError([f"generation: only stores have generations, and {local_path} is not a store"])
    if prefix := _find_prefix(local_path):
        return verify_prefix(prefix, vocab_size)
    if local_path.suffix not in (".bin", ".idx") and sources.find_hub_name(location):
        return None
    if not local_path.exists():
        if not os.path.lexists(local_path) and parse_synthetic_spec(str(local_path)):
            return verify_synthetic(str(local_path))
        raise InputMissingError(sources.describe_missing_input(location))
    if half := describe_partial_store(local_path):
        raise InputError(half)
    return None
