"""The stores of a mixture as one reader of tokens."""

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar, final

import numpy as np
from numpy.typing import NDArray

from batchloom.batches.assembly.array_filling import Ids, TokenReader
from batchloom.core.errors import PlanError, StoreError
from batchloom.core.loss_weights import LossFlags
from batchloom.plan.packing import Rows
from batchloom.store import Store
from batchloom.store.format import LossMask, LossWeights
from batchloom.store.read import MappedShard, MappedSpans, ShardAddresses, collect_addresses, compute_mapped_limit

# Index of the store, its mapped shards, and index of a shard.
_ShardRange = tuple[int, "list[MappedShard | None] | None", int]


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
        self._most = compute_mapped_limit(shards, 2 + 2 * (self.masked or self.weighted))
        if len(store_list) > 1:
            # Limit each store to its share of the mapped shards, at least one.
            for store in store_list:
                store.reader.limit_mapped(max(1, self._most * len(store.shards) // max(shards, 1)))
        # First document of each store with flags, and its reader.
        self._flag_readers = [
            (int(first), store.reader)
            for first, store in zip(self._firsts, store_list, strict=False)
            if store.masked or store.reader.weighted
        ]
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
            first = int(self._firsts[number])
            mapped = store.shards.mapped
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
        for first, reader in self._flag_readers:
            reader.verify_flags(documents[(documents >= first) & (documents < first + reader.lengths.size)] - first)
        numbers = self._begins.searchsorted(documents, side="right") - 1
        documents = documents - self._begins.take(numbers)
        if self._addresses is not None:
            # Banned documents are not in a shard.
            return None if self._bans and (numbers < 0).any() else MappedSpans(self._addresses, numbers, documents)
        mapped_shards = []
        opened = 0
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


def number_documents(store: Store | CombinedStore, rows: Rows) -> Rows:
    """Return the rows of a plan with the document numbers of its store."""
    return store.number_documents(rows) if isinstance(store, CombinedStore) else rows


def get_token_reader(store: Store | CombinedStore) -> TokenReader:
    """Return the reader of tokens, masks and loss weights."""
    return store if isinstance(store, CombinedStore) else store.reader


def is_replicated(store: Store | CombinedStore) -> bool:
    """Return whether every rank reads rank 0's share."""
    return store.replicated if isinstance(store, CombinedStore) else store.location.replicated


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


def read_trained(store: object, document: int, start: int, length: int) -> NDArray[np.bool_]:
    """Return whether each token of a span carries a loss, bool [length]."""
    trained = np.ones(length, bool)
    if isinstance(store, Store) and (store.masked or store.reader.weighted):
        flags = store.reader.flags(np.array([document]), np.array([start]), np.array([length]))
        trained = flags[0].trained
    # The first token is predicted from nothing.
    trained[:1] = False
    return trained
