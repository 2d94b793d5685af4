"""``check`` of the images and audio of a store."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from batchloom.batches.media import SubsetMissingMedia, check_store_media, write_missing_media
from batchloom.core.addresses import is_url
from batchloom.core.errors import StoreError
from batchloom.core.wording import format_count
from batchloom.store import Store, open_store, read_manifest
from batchloom.store.maintain import VerificationResult
from batchloom.store.read import open_remote_manifest

_MAX_LISTED = 10
# Cache limit for a remote store while its media are checked.
_MEDIA_CACHE_BYTES = 1 << 30


def check_media(
    verdict: VerificationResult,
    location: str,
    generation: int | None,
    missing_media_file: str | os.PathLike[str] | None,
) -> None:
    """Add the media of a store to its verdict; write the list of unreadable ones."""
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
