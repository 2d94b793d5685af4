"""Several stores read as one, with global document numbers and banned documents."""

import logging
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from batchloom.batches.assembly.array_filling import Ids, TokenReader
from batchloom.core.errors import InputError, PlanError, StoreError
from batchloom.core.loss_weights import TokenFlags
from batchloom.plan.packing import Rows
from batchloom.store import Store
from batchloom.store.format import LossMask, LossWeights
from batchloom.store.read import MappedShard, MappedSpans, ShardAddresses, collect_addresses, compute_mapped_limit

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
        """Read an array for each span, store by store; ``fill`` makes those of banned documents."""
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

    def mask(self, documents: Ids, starts: Ids, lengths: Ids) -> list[NDArray[np.bool_]]:
        """Return whether each span token carries a loss, as ``Store.mask`` does."""
        return [flags != 0 for flags in self.flags(documents, starts, lengths)]

    def flags(self, documents: Ids, starts: Ids, lengths: Ids) -> list[TokenFlags]:
        """Return the trained flags or weight codes of spans."""
        spans = (documents, starts, lengths)
        return self._read_by_store(spans, lambda store: store.reader.flags, lambda length: np.zeros(length, bool))


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
