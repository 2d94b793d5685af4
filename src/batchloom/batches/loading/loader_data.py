"""Inputs of a loader: stores, mixtures, plans and streams, and what they allow."""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar, cast, final

import numpy as np
from numpy.typing import NDArray

from batchloom.batches.assembly.array_filling import Ids, TokenReader
from batchloom.batches.assembly.augment import TokenizerSource
from batchloom.batches.assembly.batch_spec import BatchSpec, PlanArguments
from batchloom.batches.loading.stream_steps import RawStream
from batchloom.batches.media.batch_media import BatchMedia, BatchMedium, MediaSource, ProcessorContext
from batchloom.batches.media.media_stores import make_media_of_stores
from batchloom.core.errors import InputError, PlanError, SettingsError, StateError, StoreError
from batchloom.core.loss_weights import LossFlags
from batchloom.core.wording import format_list
from batchloom.plan import LanePlan, Mixture, Plan, SourceSpec, choose_lane_pool_size
from batchloom.plan.order import SOURCE, SourceOrder
from batchloom.plan.packing import CUTTING_STRATEGIES, Rows
from batchloom.store import Store, StoreMedia, read_range_bounds
from batchloom.store.format import OBJECTIVES, LossMask, LossWeights, StoredMedium, find_generation
from batchloom.store.read import (
    MappedShard,
    MappedSpans,
    ShardAddresses,
    choose_default_overlong,
    collect_addresses,
    compute_mapped_limit,
    has_media,
)

# Index of the store, its mapped shards, and index of a shard.
_ShardRange = tuple[int, "list[MappedShard | None] | None", int]
_SYNTHETIC_LABEL = "source=synthetic"
_LOG = logging.getLogger("batchloom")
Array = TypeVar("Array")


@final
class CombinedStore:
    """The stores of a mixture as one token reader; banned documents read as padding.

    Attributes:
        end_id: the id that fills padding.
        vocab_size: exclusive upper bound of the ids; None if no store knows it.
        masked: whether some tokens carry no loss.
        weighted: whether some tokens have another loss weight than 0 and 1.
        tokens, trained_tokens: sums over the stores.
        replicated: whether every rank reads rank 0's share.
    """

    def __init__(self, stores: Mapping[str, Store], *, bans: bool) -> None:
        self.stores = dict(stores)
        store_list = list(self.stores.values())
        tokenized_stores = [store for store in store_list if store.vocab_size is not None]
        ends = {name: s.end_id for name, s in self.stores.items() if s.vocab_size is not None}
        if len(set(ends.values())) > 1:
            raise PlanError(f"The stores of a mixture end documents with different tokens: {ends}.")
        self.end_id = tokenized_stores[0].end_id if tokenized_stores else 0
        self.vocab_size = max((s.vocab_size or 0 for s in tokenized_stores), default=0) or None
        self._stores = store_list
        self._firsts = np.cumsum([0, *(len(store) for store in store_list)])
        self._bans = bans
        self.masked = bans or any(store.masked for store in store_list)
        self.weighted = any(store.reader.weighted for store in store_list)
        self.tokens = sum(store.tokens for store in store_list)
        self.trained_tokens = sum(store.contents.trained_tokens for store in store_list)
        self.replicated = all(store.location.replicated for store in store_list)
        shards = sum(len(store.shards) for store in store_list)
        self._most = compute_mapped_limit(shards, 2 + self.masked + self.weighted)
        if len(store_list) > 1:
            # Limit each store to its share of the mapped shards, at least one.
            for store in store_list:
                store.reader.limit_mapped(max(1, self._most * len(store.shards) // max(shards, 1)))
        self._begins, self._shard_ranges = self._index_shards()
        # Cache the shards that stay mapped: each object on the way to one is a CPU cache miss.
        self._keep_all = shards <= self._most
        self._mapped_shards: list[MappedShard | None] = [None] * len(self._shard_ranges)
        # Addresses of all shards, once all of them are mapped for good.
        self._addresses: ShardAddresses | None = None

    def _index_shards(self) -> tuple[Ids, list[_ShardRange]]:
        """Return the first document of each shard of all stores, and the shards.

        A store without mapped shards counts as one shard. The last entry is for banned documents, whose numbers
        are negative.
        """
        begins: list[int] = []
        shard_ranges: list[_ShardRange] = []
        for number, store in enumerate(self._stores):
            first, mapped = int(self._firsts[number]), store.shards.mapped
            if mapped is None:
                begins.append(first)
                shard_ranges.append((number, None, 0))
                continue
            begins += [first + bound for bound in store.shards.bounds[:-1]]
            shard_ranges += [(number, mapped, inside) for inside in range(len(store.shards))]
        return np.array(begins, np.int64), [*shard_ranges, (-1, None, 0)]

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def shard_of(self, document: int) -> str:
        number = int(self._firsts.searchsorted(document, side="right")) - 1
        return self._stores[number].shards.name_of(document - int(self._firsts[number]))

    def number_documents(self, rows: Rows) -> Rows:
        """Return the rows with global document numbers; banned ones are inverted (``~n``)."""
        documents = rows.documents + self._firsts.take(rows.sources)
        if rows.banned is not None:
            documents = np.where(rows.banned, ~documents, documents)
        return Rows(rows.pointers, rows.sources, documents, rows.starts, rows.lengths, rows.row_offsets)

    def read(self, documents: Ids, starts: Ids, lengths: Ids) -> list[NDArray[np.generic]]:
        """Return the ids of spans as ``Store.read`` does; end tokens for banned documents."""
        spans = (documents, starts, lengths)
        return self._read_by_store(spans, lambda store: store.read, lambda length: np.full(length, self.end_id))

    def _map_shard(self, shard: int) -> MappedShard:
        number, _, inside = self._shard_ranges[shard]
        mapped_shard = self._stores[number].shards.map(inside)
        if self._keep_all:
            self._mapped_shards[shard] = mapped_shard
        return mapped_shard

    def locate(self, documents: Ids) -> MappedSpans | None:
        """Return where documents are mapped; None if some have to be read."""
        numbers = self._begins.searchsorted(documents, side="right") - 1
        documents = documents - self._begins.take(numbers)
        if self._addresses is not None:
            # Banned documents are not in a shard.
            return None if self._bans and (numbers < 0).any() else MappedSpans(self._addresses, numbers, documents)
        mapped_shards, opened = [], 0
        for number in numbers.tolist():
            mapped_shard = self._mapped_shards[number]
            if mapped_shard is None:
                _, mapped, inside = self._shard_ranges[number]
                if mapped is None or opened > self._most // 2:
                    return None
                opened += mapped[inside] is None
                mapped_shard = self._map_shard(number)
            mapped_shards.append(mapped_shard)
        if all(self._mapped_shards[:-1]):
            all_shards = [self._map_shard(number) for number in range(len(self._begins))]
            self._addresses = self._collect_addresses(all_shards, range(len(all_shards)))
        addresses = self._collect_addresses(mapped_shards, numbers.tolist())
        return MappedSpans(addresses, np.arange(len(numbers)), documents)

    def _collect_addresses(self, shards: list[MappedShard], numbers: Iterable[int]) -> ShardAddresses:
        flags = [self._find_flag_file(number) for number in numbers] if self.masked or self.weighted else []
        return collect_addresses(shards, flags)

    def _find_flag_file(self, shard: int) -> LossMask | LossWeights | None:
        number, _, inside = self._shard_ranges[shard]
        return self._stores[number].reader.find_flag_file(inside)

    def _read_by_store(
        self,
        spans: tuple[Ids, Ids, Ids],
        get_read: Callable[[Store], Callable[[Ids, Ids, Ids], list[Array]]],
        fill: Callable[[int], Array],
    ) -> list[Array]:
        """Read spans store by store; ``fill`` makes the arrays of banned documents."""
        documents, starts, lengths = spans
        numbers = self._firsts.searchsorted(documents, side="right") - 1
        arrays_by_span: dict[int, Array] = {}
        for number in np.unique(numbers).tolist():
            indices = np.flatnonzero(numbers == number)
            if number < 0:
                arrays = [fill(length) for length in lengths[indices].tolist()]
            else:
                read = get_read(self._stores[number])
                arrays = read(documents[indices] - self._firsts[number], starts[indices], lengths[indices])
            arrays_by_span.update(zip(indices.tolist(), arrays, strict=True))
        return [arrays_by_span[index] for index in range(len(documents))]

    def flags(self, documents: Ids, starts: Ids, lengths: Ids) -> list[LossFlags]:
        """Return the loss flags of spans."""
        return self._read_by_store(
            (documents, starts, lengths), lambda store: store.reader.flags, LossFlags.none_trained
        )


def list_stores(store: Store | CombinedStore) -> list[Store]:
    return list(store.stores.values()) if isinstance(store, CombinedStore) else [store]


def get_token_reader(store: Store | CombinedStore) -> TokenReader:
    """Return the reader of tokens, masks and loss weights."""
    return store if isinstance(store, CombinedStore) else store.reader


def is_replicated(store: Store | CombinedStore) -> bool:
    """Return whether every rank reads rank 0's share."""
    return store.replicated if isinstance(store, CombinedStore) else store.location.replicated


def require_open_stores(stores: Mapping[str, object]) -> dict[str, Store]:
    open_stores = {name: store for name, store in stores.items() if isinstance(store, Store)}
    for name, store in stores.items():
        if name not in open_stores:
            raise InputError(
                f"A Loader reads the tokens of open stores; source {name!r} is {type(store).__name__}. Give "
                "open_store(path)."
            )
    return open_stores


def describe_data_source(*stores: object) -> str:
    """Return ``source=real NAME/SUBSET FINGERPRINT, ...`` or ``source=synthetic ...``."""
    opened = [store for store in stores if isinstance(store, Store)]
    made_up = any(store.contents.synthetic for store in opened)
    names = ", ".join(
        f"{store.path.name}{f'/{store.split}' if store.split else ''} {store.fingerprint[:12]}" for store in opened
    )
    return f"{_SYNTHETIC_LABEL if made_up else 'source=real'} {names}"


def make_data_logger(*stores: object) -> logging.Logger | logging.LoggerAdapter[logging.Logger]:
    """Return the ``batchloom`` logger, which marks every line about synthetic data."""
    if any(isinstance(store, Store) and store.contents.synthetic for store in stores):
        return _SyntheticLogAdapter(_LOG)
    return _LOG


@final
class _SyntheticLogAdapter(logging.LoggerAdapter[logging.Logger]):
    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        return f"{msg} {_SYNTHETIC_LABEL}", kwargs


def check_id_range(store: Store | CombinedStore, rows: Rows, highest_id: int) -> None:
    """Reject ids outside the vocabulary; a negative one is 2**63 - 1."""
    if store.vocab_size is None or highest_id < store.vocab_size:
        return
    name_of = store.shard_of if isinstance(store, CombinedStore) else store.shards.name_of
    span_tokens = store.read(rows.documents, rows.starts, rows.lengths)
    for document, tokens in zip(rows.documents.tolist(), span_tokens, strict=True):
        wide = tokens.astype(np.int64)
        wrong = wide[(wide < 0) | (wide >= store.vocab_size)]
        if wrong.size:
            raise StoreError(
                f"{name_of(document)} holds token id {wrong[0]} in document {document}, and the vocabulary has "
                f"ids 0 to {store.vocab_size - 1}: the shard was changed or damaged. Run batchloom check on the store."
            )


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
    stores, bans = require_open_stores(plan.stores), any(segment.bans for segment in plan.segments)
    for store in stores.values():
        check_next_token_objective(store)
    is_single = plan.mixture is None and not bans
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
        if (remainder := order.remainder) is not None:
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


def read_trained(store: object, document: int, start: int, length: int) -> NDArray[np.bool_]:
    """Return whether each token of a span carries a loss, bool [length]."""
    trained = np.ones(length, bool)
    if isinstance(store, Store) and (store.masked or store.reader.weighted):
        flags = store.reader.flags(np.array([document]), np.array([start]), np.array([length]))
        trained = flags[0].trained
    # The first token is predicted from nothing.
    trained[:1] = False
    return trained
