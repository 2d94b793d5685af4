"""Check of a store's media: each is read, decoded and processed as for a batch."""

import contextlib
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

import numpy as np

from batchloom.batches.assembly.batch_spec import DEFAULT_MEDIA_SPEC
from batchloom.batches.media.batch_media import BatchMedia
from batchloom.batches.media.media_stores import StoreSource, make_media_of_stores
from batchloom.core.errors import StoreError
from batchloom.store import Store
from batchloom.store.format import StoredMedium, mask_removed

# Number of documents whose media are read together; a medium that several of them share is read once.
_BATCH_DOCUMENTS = 512


class MediaCheckBatch(NamedTuple):
    """Check result of some neighbouring documents.

    Attributes:
        documents: number of documents that hold media.
        media: number of their media.
        faults: first fault of each document with an unreadable medium, by document number.
    """

    documents: int
    media: int
    faults: dict[int, str]


def check_store_media(store: Store) -> Iterator[MediaCheckBatch]:
    """Read the media of a store's documents, except removed ones.

    Args:
        store: an open store that was made with a processor.

    Raises:
        StoreError: the store does not say which media its documents hold.
        InputError: a remote store cannot be reached, or its processor cannot be created.
        MissingDependencyError: a media decoder is not installed.
    """
    reads, source = make_media_of_stores([store], DEFAULT_MEDIA_SPEC), StoreSource(store)
    for first in range(0, len(store), _BATCH_DOCUMENTS):
        numbers = np.arange(first, min(first + _BATCH_DOCUMENTS, len(store)))
        numbers = numbers[~mask_removed(store.contents.removed, numbers)]
        document_media = [media for media in source.media.of(numbers) if media]
        if not document_media:
            continue
        # A failed fetch is reported for the medium that needs it.
        with contextlib.suppress(StoreError):
            store.reader.fetch(np.array([media[0].document for media in document_media]))
        yield _check_documents(reads, source, document_media)


def _check_documents(
    reads: BatchMedia, source: StoreSource, document_media: list[list[StoredMedium]]
) -> MediaCheckBatch:
    kinds: dict[tuple[object, ...], StoredMedium] = {}
    for medium in chain.from_iterable(document_media):
        kinds.setdefault(_medium_key(medium), medium)
    wrong = dict(zip(kinds, reads.faults(source, list(kinds.values())), strict=True))
    faults: dict[int, str] = {}
    for medium in chain.from_iterable(document_media):
        if fault := wrong[_medium_key(medium)]:
            first_document = kinds[_medium_key(medium)].document
            prefix = "" if first_document == medium.document else f"Document {medium.document}, too: "
            faults.setdefault(medium.document, prefix + fault)
    return MediaCheckBatch(len(document_media), sum(map(len, document_media)), faults)


def _medium_key(medium: StoredMedium) -> tuple[object, ...]:
    """Return a key that distinguishes media, including frames of one video."""
    return medium.facts, medium.digest, medium.location, medium.blob, medium.grid
