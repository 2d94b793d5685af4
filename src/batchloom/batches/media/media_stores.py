"""Media of store documents for batches: lookup by row, and their sources."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import chain
from typing import NamedTuple, final

import numpy as np

from batchloom.batches.assembly.batch_assembly import Ids, TokenReader
from batchloom.batches.assembly.batch_spec import DEFAULT_MEDIA_SPEC, MediaOptions
from batchloom.batches.media.batch_media import BatchMedia, BatchMedium, ProcessorContext
from batchloom.core.errors import PlanError, StoreError
from batchloom.media import MediaLimits
from batchloom.plan.packing import Rows
from batchloom.store import Store, StoreMedia
from batchloom.store.format import StoredMedium, mask_removed

# Number of documents whose media are read together; a medium that several of them share is read once.
_BATCH_DOCUMENTS = 512


@final
class StoreSource:
    remedy = (
        "batchloom check STORE --missing-media FILE lists such documents; MediaOptions(replace=FILE), or train "
        "--missing-media FILE, serves padding for them."
    )

    def __init__(self, store: Store) -> None:
        self.store, self.media = store, StoreMedia(store)
        self.limits = _read_limits(store)

    def read_bytes(self, medium: StoredMedium) -> bytes:
        return self.media.read_bytes(medium)

    def folder_of(self, document: int) -> str | None:
        return self.media.folder_of(document)

    def describe_document(self, document: int) -> str:
        origin = self.store.provenance.of(document)
        line = f", line {origin.line}" if origin.line is not None else f", row {origin.record + 1}"
        return f"Document {document} of {self.store.location.name} ({origin.source}{line})"


@final
class _StoreMediaFinder:
    def __init__(self, stores: Sequence[Store]) -> None:
        self.sources = [StoreSource(store) for store in stores]
        self._firsts = np.cumsum([0, *(len(store) for store in stores)])

    def __call__(self, _reader: TokenReader, rows: Rows) -> list[BatchMedium]:
        numbers = np.searchsorted(self._firsts, rows.documents, side="right") - 1
        batch_media: list[BatchMedium] = []
        for number, source in enumerate(self.sources):
            if not source.media.any:
                continue
            spans = np.flatnonzero(numbers == number)
            documents = rows.documents[spans] - self._firsts[number]
            # Removed documents read as end tokens, without their media placeholders.
            is_present = ~mask_removed(source.store.contents.removed, documents)
            spans, documents = spans[is_present], documents[is_present]
            document_media = source.media.of(documents)
            _check_documents_whole(source, rows, spans, documents, document_media)
            batch_media += [
                BatchMedium(span, source, medium)
                for span, some in zip(spans.tolist(), document_media, strict=True)
                for medium in some
            ]
        return sorted(batch_media, key=lambda batch_medium: (batch_medium.span, batch_medium.medium.start))


def make_media_of_stores(stores: Sequence[Store], spec: MediaOptions) -> BatchMedia:
    find = _StoreMediaFinder(stores)
    prepared = [(source.store, state) for source in find.sources if (state := source.media.processor) is not None]
    if len({state["fingerprint"] for _, state in prepared}) > 1:
        raise PlanError(
            "The stores have several processors, whose features do not fit one model: "
            f"{', '.join(sorted({str(state['name']) for _, state in prepared}))}. Prepare all stores with one "
            "processor."
        )
    store, state = prepared[0]
    return BatchMedia(find, ProcessorContext(state, lambda: store.tokenizer.control), spec)


def _check_documents_whole(
    source: StoreSource, rows: Rows, spans: Ids, documents: Ids, media: Sequence[object]
) -> None:
    """Reject spans that cut a document with media: features are of the full document."""
    full_lengths = source.store.lengths.take(documents)
    is_cut = (rows.starts[spans] != 0) | (rows.lengths[spans] != full_lengths)
    for index in np.flatnonzero(is_cut).tolist():
        if media[index]:
            raise PlanError(
                f"Document {int(documents[index])} of {source.store.location.name} holds images or audio and is cut by "
                "the plan: give its source overlong='drop' or 'error', and a packing that cuts nothing (best_fit)."
            )


def _read_limits(store: Store) -> MediaLimits:
    recipe = store.manifest.recipe if store.manifest else {}
    media_settings = (recipe.get("reading") or {}).get("media") or {}
    limit_names = {field.name for field in fields(MediaLimits)}
    return MediaLimits(**{name: value for name, value in media_settings.items() if name in limit_names})


class MediaCheckBatch(NamedTuple):
    """Check result of some neighbouring documents."""

    documents: int
    media: int
    faults: dict[int, str]


def check_store_media(store: Store) -> Iterator[MediaCheckBatch]:
    """Read the media of a store's documents, except removed ones."""
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
