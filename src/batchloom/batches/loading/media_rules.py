"""Plan and batch settings that documents with media allow."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from batchloom.batches.assembly.batch_assembly import Ids, TokenReader
from batchloom.batches.assembly.batch_spec import BatchSpec
from batchloom.batches.loading.loader_data import get_overlong_policies
from batchloom.batches.loading.stream_steps import RawStream
from batchloom.batches.media.batch_media import BatchMedia, BatchMedium, MediaSource, ProcessorContext
from batchloom.batches.media.media_stores import make_media_of_stores
from batchloom.core.errors import InputError, PlanError
from batchloom.plan import Mixture, Plan
from batchloom.plan.packing import CUTTING_STRATEGIES, Rows
from batchloom.store import Store, StoreMedia
from batchloom.store.format import StoredMedium
from batchloom.store.read import has_media


class LoaderInfo(Protocol):
    """Loader properties for media checks."""

    @property
    def holds_media(self) -> bool:
        """True if its data holds images or audio."""
        ...

    @property
    def origin(self) -> str:
        """Origin of the data."""
        ...


@runtime_checkable
class _MediaReader(Protocol):
    """A reader of a stream with images or audio."""

    def media(self, documents: Ids) -> list[tuple[MediaSource, Sequence[StoredMedium]]]:
        """Return the source and the media of each document, in token order."""
        ...


def _find_reader_media(reader: TokenReader, rows: Rows) -> list[BatchMedium]:
    if not isinstance(reader, _MediaReader):
        raise AssertionError("a stream with a processor reads media")  # noqa: TRY004 - not an argument of the caller
    return [
        BatchMedium(span, source, medium)
        for span, (source, media) in enumerate(reader.media(rows.documents))
        for medium in media
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
    """Reject a plan whose last change of ``seq_len`` cuts documents with media.

    The edit packs the rest of each pool again, which can cut a document.
    """
    era = len(plan.orders.weighted_sources_by_era) - 1
    for order in (plan.orders.order(number, era) for number in plan.orders.weighted_sources_by_era[era]):
        store = order.store
        if not (isinstance(store, Store) and has_media(store)):
            continue
        media = StoreMedia(store)
        for remainder in (candidate for candidate in order.remainders if candidate is not None):
            full_lengths = store.lengths.take(remainder.documents)
            cut_indices = np.flatnonzero(remainder.lengths != full_lengths)
            media_indices = cut_indices[media.count_tokens(remainder.documents[cut_indices]) > 0]
            if media_indices.size:
                longest = media_indices[full_lengths[media_indices].argmax()]
                document, tokens = int(remainder.documents[longest]), int(full_lengths[longest])
                raise PlanError(
                    f"seq_len {order.spec.seq_len} of the edit cuts document {document} of {store.location.name}, "
                    f"which holds images or audio and has {tokens} tokens: the rest of a pool is packed again, and "
                    f"none of it is left out. Give a seq_len of at least {tokens}."
                )


def check_text_only(loader: LoaderInfo, consumer: str) -> None:
    """Reject a loader with media for a consumer of token arrays only.

    Args:
        loader: the loader to read.
        consumer: description of the consumer for the message.

    Raises:
        InputError: the stores hold images or audio.
    """
    if loader.holds_media:
        raise InputError(
            f"{loader.origin} holds images or audio, which {consumer} does not pass on yet: the model would be "
            "trained on their placeholders only. Give the model the Loader's batches as they are (docs/media.md)."
        )


def _check_media_plan(plan: Plan, spec: BatchSpec, *, augmented: bool) -> None:
    """Reject settings that documents with media do not allow."""
    mixed = isinstance(plan.orders.data, Mixture)
    rules = get_overlong_policies(plan)
    for name, store in plan.stores.items():
        if not (isinstance(store, Store) and has_media(store)):
            continue
        source_suffix = f" of source {name!r}" if mixed else ""
        if plan.spec.packing in CUTTING_STRATEGIES:
            raise _cut_media_error(f"packing={plan.spec.packing!r}", source_suffix, "packing='best_fit'")
        if rules[name] in ("split", "truncate"):
            remedy = f"sources: {{{name}: {{overlong: drop}}}}" if mixed else "overlong='drop'"
            raise _cut_media_error(f"overlong={rules[name]!r}", source_suffix, f"{remedy}, or 'error'")
    _check_media_settings(spec, augmented=augmented)


def _check_media_settings(spec: BatchSpec, *, augmented: bool) -> None:
    if spec.mesh.context > 1:
        raise PlanError("Images and audio are not cut for context-parallel ranks: give a mesh without context ranks.")
    if augmented:
        raise PlanError(
            "Augmentation would change the placeholders of images and audio: leave augment (--noise-prob) out."
        )


def _cut_media_error(setting: str, source_suffix: str, remedy: str) -> PlanError:
    return PlanError(
        f"{setting} cuts documents, and a document with images or audio{source_suffix} is never cut: give {remedy}."
    )
