"""``check``: verify a path, including the media of a store."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from batchloom.analysis import raw_check as inputs
from batchloom.batches.media import SubsetMissingMedia, check_store_media, write_missing_media
from batchloom.core.addresses import is_url, strip_file_scheme
from batchloom.core.errors import SettingsError, StoreError
from batchloom.core.wording import format_count
from batchloom.store import Store, open_store, read_manifest
from batchloom.store.maintain import VerificationResult
from batchloom.store.read import open_remote_manifest

_MAX_LISTED = 10
# Cache limit for a remote store while its media are checked.
_MEDIA_CACHE_BYTES = 1 << 30


def check(
    path: str | os.PathLike[str],
    *,
    text_field: str | None = None,
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
    verdict = inputs.check_raw_or_prepared(path, text_field=text_field, vocab_size=vocab_size, generation=generation)
    if "processor" in verdict.facts:
        if media:
            _check_media(verdict, strip_file_scheme(os.fspath(path)), generation, missing_media)
    elif missing_media is not None:
        raise SettingsError([f"missing_media: {verdict.path} is not a store that was made with a processor"])
    return verdict


def _check_media(
    verdict: VerificationResult,
    location: str,
    generation: int | None,
    missing_media_file: str | os.PathLike[str] | None,
) -> None:
    """Read the media of a store and add the findings to its verdict."""
    missing_by_subset: dict[str, SubsetMissingMedia] = {}
    faults: list[str] = []
    documents = media = 0
    try:
        with _iter_subsets(location, generation) as stores:
            for store in stores:
                document_faults: dict[int, str] = {}
                for media_check in check_store_media(store):
                    documents, media = documents + media_check.documents, media + media_check.media
                    document_faults |= media_check.faults
                missing_by_subset[store.split] = SubsetMissingMedia(store.fingerprint, tuple(sorted(document_faults)))
                faults += [document_faults[number] for number in sorted(document_faults)[: _MAX_LISTED - len(faults)]]
    except StoreError as error:
        # The same error may have been reported before.
        if str(error) not in verdict.faults:
            verdict.faults.append(f"{error} Its media were not checked.")
        return
    count = sum(len(missing_media.documents) for missing_media in missing_by_subset.values())
    verdict.facts["media"] = (
        f"{media:,} in {format_count(documents, 'document')}, {count:,} of which hold unreadable media"
    )
    if count:
        if not verdict.faults:
            verdict.used = (
                "batchloom.Loader, with media=MediaOptions(replace=FILE), replaces "
                f"{format_count(count, 'document')} of it with padding; --missing-media FILE lists them"
            )
        verdict.faults += faults
        if count > len(faults):
            more = format_count(count - len(faults), "more document")
            verdict.faults.append(f"{verdict.path}: and {more} with unreadable media.")
    if missing_media_file is not None:
        write_missing_media(Path(missing_media_file), verdict.path, missing_by_subset)


@contextmanager
def _iter_subsets(location: str, generation: int | None) -> Iterator[Iterator[Store]]:
    """Open the subsets that hold documents; a remote store is cached while in use."""
    if not is_url(location):
        manifest = read_manifest(Path(location), generation)
        names = [name for name, subset in manifest.subsets.items() if subset.documents]
        yield (open_store(location, name, generation=generation) for name in names)
        return
    manifest = open_remote_manifest(location, generation)
    names = [name for name, subset in manifest.subsets.items() if subset.documents]
    with tempfile.TemporaryDirectory(prefix="batchloom-check-") as cache:
        open_subset = partial(open_store, location, generation=generation, cache=cache, cache_limit=_MEDIA_CACHE_BYTES)
        yield (open_subset(split=name) for name in names)
