"""Images and audio of the batches of a loader."""

from collections.abc import Sequence
from typing import Protocol, cast

import numpy as np

from batchloom.batches.assembly.array_filling import Ids, TokenReader
from batchloom.batches.assembly.batch_spec import BatchSpec
from batchloom.batches.loading.stream_steps import RawStream
from batchloom.batches.media.batch_media import BatchMedia, BatchMedium, MediaSource, ProcessorContext
from batchloom.batches.media.media_stores import make_media_of_stores
from batchloom.core.errors import PlanError
from batchloom.plan import Plan, SourceSpec
from batchloom.plan.packing import CUTTING_STRATEGIES, Rows
from batchloom.store import Store, StoreMedia
from batchloom.store.format import StoredMedium
from batchloom.store.read import has_media


class _MediaReader(Protocol):
    """A reader of a stream with images or audio."""

    def media(self, documents: Ids) -> list[tuple[MediaSource, Sequence[StoredMedium]]]:
        """Return the source and the media of each document, in token order."""


def _find_reader_media(reader: TokenReader, rows: Rows) -> list[BatchMedium]:
    document_media = cast("_MediaReader", reader).media(rows.documents)
    return [
        BatchMedium(span, source, medium) for span, (source, media) in enumerate(document_media) for medium in media
    ]


def make_stream_media(stream: RawStream, spec: BatchSpec, augment: object) -> BatchMedia | None:
    """Return the media maker of a stream's batches; None if it reads no media."""
    if stream.processor is None:
        return None
    _check_media_settings(spec, augmented=augment is not None)
    return BatchMedia(_find_reader_media, ProcessorContext(stream.processor, lambda: stream.control), spec.media)


def make_store_media(stores: Sequence[Store], plan: Plan, spec: BatchSpec, augment: object) -> BatchMedia | None:
    """Return the media maker of batches; None if no store has a processor."""
    # Stores opened with media "none" serve text only.
    if not any(
        store.manifest is not None and store.manifest.processor and store.contents.media != "none" for store in stores
    ):
        return None
    _check_media_plan(plan, spec, augmented=augment is not None)
    return make_media_of_stores(stores, spec.media)


def check_edit_keeps_media(plan: Plan) -> None:
    era = len(plan.orders.weighted_sources_by_era) - 1
    for order in (plan.orders.order(number, era) for number in plan.orders.weighted_sources_by_era[era]):
        store = order.store
        if not (isinstance(store, Store) and has_media(store)):
            continue
        media = StoreMedia(store)
        if (remainder := order.remainder) is not None:
            full_lengths = store.lengths.take(remainder.documents)
            cut_indices = np.flatnonzero(remainder.lengths != full_lengths)
            media_indices = cut_indices[media.count_tokens(remainder.documents[cut_indices]) > 0]
            if media_indices.size:
                longest = media_indices[full_lengths[media_indices].argmax()]
                document = int(remainder.documents[longest])
                tokens = int(full_lengths[longest])
                raise PlanError(
                    f"seq_len {order.spec.seq_len} of the edit cuts document {document} of {store.location.name}, "
                    f"which holds images or audio and has {tokens} tokens: the rest of a pool is packed again, and "
                    f"none of it is left out. Give a seq_len of at least {tokens}."
                )


def _check_media_plan(plan: Plan, spec: BatchSpec, *, augmented: bool) -> None:
    """Reject settings that documents with media do not allow."""
    mixed = plan.mixture is not None
    source_specs = plan.mixture.sources if plan.mixture is not None else {}
    for name, store in plan.stores.items():
        if not (isinstance(store, Store) and has_media(store)):
            continue
        source_suffix = f" of source {name!r}" if mixed else ""
        if plan.spec.packing in CUTTING_STRATEGIES:
            raise _make_cut_media_error(f"packing={plan.spec.packing!r}", source_suffix, "packing='best_fit'")
        overlong = source_specs.get(name, SourceSpec()).overlong or plan.spec.overlong
        if overlong in ("split", "truncate"):
            remedy = f"sources: {{{name}: {{overlong: drop}}}}" if mixed else "overlong='drop'"
            raise _make_cut_media_error(f"overlong={overlong!r}", source_suffix, f"{remedy}, or 'error'")
    _check_media_settings(spec, augmented=augmented)


def _check_media_settings(spec: BatchSpec, *, augmented: bool) -> None:
    if spec.mesh.context > 1:
        raise PlanError("Images and audio are not cut for context-parallel ranks: give a mesh without context ranks.")
    if augmented:
        raise PlanError(
            "Augmentation would change the placeholders of images and audio: leave augment (--noise-prob) out."
        )


def _make_cut_media_error(setting: str, source_suffix: str, remedy: str) -> PlanError:
    return PlanError(
        f"{setting} cuts documents, and a document with images or audio{source_suffix} is never cut: give {remedy}."
    )
