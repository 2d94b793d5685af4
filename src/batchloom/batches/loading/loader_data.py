"""Inputs of a loader: stores, mixtures, plans and streams, and what they allow."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from batchloom.batches.assembly.array_filling import Ids, TokenReader
from batchloom.batches.assembly.augment import TokenizerSource
from batchloom.batches.assembly.batch_spec import BatchSpec, PlanArguments
from batchloom.batches.loading.combined_store import CombinedStore, make_data_logger, require_open_stores
from batchloom.batches.loading.stream_steps import RawStream
from batchloom.batches.media.batch_media import BatchMedia, BatchMedium, MediaSource, ProcessorContext
from batchloom.batches.media.media_stores import make_media_of_stores
from batchloom.core.errors import InputError, PlanError, SettingsError, StateError
from batchloom.core.wording import format_list
from batchloom.plan import LanePlan, Mixture, Plan, SourceSpec, choose_lane_pool_size
from batchloom.plan.order import SOURCE, SourceOrder
from batchloom.plan.packing import CUTTING_STRATEGIES, Rows
from batchloom.store import Store, StoreMedia, read_range_bounds
from batchloom.store.format import OBJECTIVES, StoredMedium, find_generation
from batchloom.store.read import choose_default_overlong, has_media

LoaderData = Store | Mixture | Plan | LanePlan | RawStream
# Counting reads every length; up to this many documents that takes a few milliseconds.
_MAX_INLINE_COUNT = 1 << 20
_MAX_LISTED = 5


def get_first_store(stores: Mapping[str, object]) -> Store:
    """Return the first of a plan's stores, which share a tokenizer."""
    return next(iter(require_open_stores(stores).values()))


def find_tokenizer_source(data: LoaderData, plan: Plan) -> TokenizerSource:
    """Return the store or stream that names the tokenizer of the ids."""
    if isinstance(data, RawStream):
        # RawStream omits this member: isinstance() of a store would load its tokenizer.
        return cast("TokenizerSource", data)
    return get_first_store(plan.stores)


def make_plan_store(plan: Plan) -> Store | CombinedStore:
    """Return the plan's store, or a ``CombinedStore`` of several or with bans."""
    stores, bans = require_open_stores(plan.stores), bool(plan.orders.run_layout.bans)
    for store in stores.values():
        check_next_token_objective(store)
    is_single = not isinstance(plan.orders.data, Mixture) and not bans
    return next(iter(stores.values())) if is_single else CombinedStore(stores, bans=bans)


def check_generation(store: Store, state: dict[str, Any], name: str = SOURCE) -> None:
    """Reject a state of another store generation; the plan checks all else."""
    try:
        saved_fingerprint = state["identity"]["sources"][name]["store"]
    except (KeyError, TypeError):
        return
    if saved_fingerprint == store.fingerprint or store.manifest is None or not store.location.on_disk:
        return
    newest = store.reader.read_manifest()
    number = find_generation(newest, store.split, saved_fingerprint, store.contents.media)
    if number is None:
        return
    # Raises GenerationError if the generation was compacted away.
    store.reader.read_manifest(number)
    raise StateError(
        f"The state was made on generation {number} of {store.location.name}, but generation "
        f"{store.location.generation} is open. To resume exactly, give open_store({store.location.name!r}, "
        f"{store.split!r}, generation={number})."
    )


def check_next_token_objective(store: Store) -> None:
    """Reject a store for another objective than the next token."""
    if store.contents.objective:
        raise InputError(OBJECTIVES[store.contents.objective].describe_refusal(store.location.name))


def make_loader_plan(data: LoaderData, request: PlanArguments) -> Plan:
    """Return the given plan or stream, or make a plan for a store or mixture."""
    if isinstance(data, Plan | LanePlan | RawStream):
        changed_settings = request.list_changed_settings()
        if changed_settings:
            raise SettingsError(
                [f"{name}: belongs to the plan, and a finished plan was given" for name in changed_settings]
            )
        # The other types provide the members that all plans need: spec, steps and fingerprint.
        return cast("Plan", data)
    if not isinstance(data, (Store, Mixture)):
        raise InputError(
            f"Loader takes an open store, a Mixture, a Plan or a stream, not {type(data).__name__}; open a path with "
            "open_store(path)."
        )
    spec = request.spec(choose_default_overlong(data) if isinstance(data, Store) else "split")
    if request.overlong is None and isinstance(data, Mixture):
        data = _with_default_overlong(data)
    order: object = request.options.order
    if order == "pools":
        return Plan(data, spec)
    if order != "lanes" or not isinstance(data, Store):
        wrong = (
            f"{order!r} is none of pools, lanes"
            if order != "lanes"
            else "lanes repeat a stream over one store, not a mixture"
        )
        raise SettingsError([f"order: {wrong}"])
    media = data.manifest is not None and data.manifest.processor is not None
    spec = replace(spec, pool_size=spec.pool_size or choose_lane_pool_size(media=media))
    repeated = LanePlan(data, spec, lanes=spec.lanes, bounds=read_range_bounds(data))
    return cast("Plan", repeated)


def _with_default_overlong(mixture: Mixture) -> Mixture:
    """Return the mixture with each source's default overlong policy filled in."""
    sources = dict(mixture.sources)
    for name, store in mixture.stores.items():
        own = sources.get(name, SourceSpec())
        if isinstance(store, Store) and choose_default_overlong(store) == "drop" and own.overlong is None:
            sources[name] = replace(own, overlong="drop")
    return replace(mixture, sources=sources)


def announce_left_out(plan: Plan, missing_documents: Mapping[str, tuple[int, ...]]) -> bool:
    """Log what the run leaves out; return True if it still has to be counted."""
    for name, numbers in missing_documents.items():
        store = plan.stores[name]
        make_data_logger(store).warning(
            "%s of %s documents of %s are served as padding: their images or audio are missing (MediaOptions.replace).",
            f"{len(numbers):,}",
            f"{store.lengths.size:,}",
            store.location.name if isinstance(store, Store) else name,
        )
    leaving = _list_shortened_orders(plan)
    if sum(order.pools.documents for order in leaving) <= _MAX_INLINE_COUNT:
        _log_left_out_counts(plan)
        return False
    for order in leaving:
        rule = order.spec.overlong
        make_data_logger(order.store).warning(
            "overlong=%r leaves out %s%s longer than seq_len %d; plan.left_out() counts them, and %s keeps them.",
            rule,
            "documents" if rule == "drop" else "the ends of documents",
            _describe_source(order),
            order.spec.seq_len,
            _suggest_overlong_remedy(order),
        )
    return True


def _list_shortened_orders(plan: Plan) -> list[SourceOrder]:
    """Return the sources that drop or truncate overlong documents."""
    return [order for order in plan.orders.latest() if order.spec.overlong in ("drop", "truncate")]


def _describe_source(order: SourceOrder) -> str:
    return "" if order.name == SOURCE else f" of {order.name!r}"


def _suggest_overlong_remedy(order: SourceOrder) -> str:
    """Return the setting that would include the documents."""
    media = isinstance(order.store, Store) and has_media(order.store)
    return "a larger seq_len" if media else "overlong='split'"


def announce_split_conversations(plan: Plan) -> None:
    """Warn that conversations are split, for stores that mix them with text."""
    for order in plan.orders.latest():
        store, spec = order.store, order.spec
        if not (isinstance(store, Store) and store.contents.mixed and spec.overlong == "split"):
            continue
        if order.pools.documents > _MAX_INLINE_COUNT or order.pools.longest() > spec.seq_len:
            make_data_logger(store).warning(
                "The store%s holds texts and conversations, and its documents longer than seq_len %d are cut, "
                "conversations too: overlong='drop' leaves all of them out; prepare --max-tokens %d leaves out only "
                "conversations.",
                _describe_source(order),
                spec.seq_len,
                spec.seq_len,
            )


def announce_loss_weights(plan: Plan) -> None:
    """Log the sources whose loss has weights, which a training loop must apply."""
    stores = [store for store in plan.stores.values() if isinstance(store, Store) and store.reader.weighted]
    if stores:
        make_data_logger(*stores).warning(
            "Batches have loss_weights, which the loss must apply (docs/how-to/train/loader.md): those of %s.",
            ", ".join(store.location.name for store in stores),
        )


def announce_unused_weights(plan: Plan) -> None:
    """Warn that the weights that a single store records do not change its order."""
    (order, *others) = plan.orders.latest()
    if others or not (isinstance(order.store, Store) and order.store.contents.weights):
        return
    weights = [f"{name} {weight:g}" for name, weight in order.store.contents.weights]
    make_data_logger(order.store).warning(
        "The weights recorded in %s (%s) are not applied: documents of one store are drawn in proportion to their "
        "tokens. To apply them: batchloom prepare MANIFEST --separate --out DIR, then train --mixture DIR/mixture.yaml "
        "(or read_mixture('DIR/mixture.yaml')).",
        order.store.location.name,
        format_list(weights, _MAX_LISTED),
    )


def count_left_out(plan: Plan) -> None:
    threading.Thread(target=_log_left_out_counts, args=(plan,), name="batchloom-left-out", daemon=True).start()


def _log_left_out_counts(plan: Plan) -> None:
    for order in _list_shortened_orders(plan):
        left_out, spec = order.pools.left_out(), order.spec
        if left_out.tokens:
            make_data_logger(order.store).warning(
                "overlong=%r leaves %s of %s documents%s and %s tokens out of every epoch because they are longer "
                "than seq_len %d; %s keeps them.",
                spec.overlong,
                f"{left_out.documents:,}",
                f"{order.pools.documents:,}",
                _describe_source(order),
                f"{left_out.tokens:,}",
                spec.seq_len,
                _suggest_overlong_remedy(order),
            )


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


def _check_media_plan(plan: Plan, spec: BatchSpec, *, augmented: bool) -> None:
    """Reject settings that documents with media do not allow."""
    mixed = isinstance(plan.orders.data, Mixture)
    source_specs = plan.orders.data.sources if isinstance(plan.orders.data, Mixture) else {}
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


def read_trained(store: object, document: int, start: int, length: int) -> NDArray[np.bool_]:
    """Return whether each token of a span carries a loss, bool [length]."""
    trained = np.ones(length, bool)
    if isinstance(store, Store) and (store.masked or store.reader.weighted):
        flags = store.reader.flags(np.array([document]), np.array([start]), np.array([length]))
        trained = np.asarray(flags[0] != 0)
    # The first token is predicted from nothing.
    trained[:1] = False
    return trained
