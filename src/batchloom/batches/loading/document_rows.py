"""Batches of complete documents outside of any plan, to try a model on them."""

import inspect
import weakref
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, final

import numpy as np

from batchloom.batches.assembly.array_filling import Ids
from batchloom.batches.assembly.batch_assembly import Batch, BatchLayout, assemble_rows
from batchloom.batches.assembly.device import to_torch
from batchloom.batches.loading.combined_store import CombinedStore, get_token_reader, list_stores
from batchloom.batches.loading.loader import Loader, require_plan_feed
from batchloom.batches.loading.loader_media import make_stream_media
from batchloom.batches.loading.plan_feed import PlanFeed
from batchloom.batches.loading.stream_feed import StreamFeed
from batchloom.batches.media.media_stores import make_media_of_stores
from batchloom.core.medium import MEDIUM_KINDS
from batchloom.plan.packing import Rows
from batchloom.store import Store, StoreMedia
from batchloom.store.format import mask_removed

_MAX_CANDIDATES = 1 << 20
# Most tokens of a document that counts as short.
_SHORT_TOKENS = 256
# Steps of a stream that are searched for one with media.
_MAX_STREAM_STEPS = 8


@final
class _StoreDocuments:
    """Documents of stores, with global numbers."""

    def __init__(self, feed: PlanFeed) -> None:
        store = feed.store
        self.reader = get_token_reader(store)
        self._stores = list_stores(store)
        self.media_maker = make_media_of_stores(self._stores, feed.spec.media)
        self.origin = next(
            source_store.location.name
            for source_store in self._stores
            if StoreMedia(source_store).processor is not None
        )
        self._firsts = np.cumsum([0, *(len(source_store) for source_store in self._stores)])
        self._banned = [
            np.unique(np.array([n for edit in feed.plan.edits for n in edit.ban.get(name, ())], np.int64))
            for name in (store.stores if isinstance(store, CombinedStore) else feed.plan.stores)
        ]

    def with_media(self, longest: int) -> list[int]:
        """Return a short document of each media kind, of at most ``longest`` tokens."""
        shortest_by_kind: dict[str, int] = {}
        every = zip(self._stores, self._firsts.tolist(), self._banned, strict=False)
        for store, first, banned in every:
            for kind, document in StoreMedia(store).shortest(longest, banned).items():
                shortest_by_kind.setdefault(kind, first + document)
        return sorted(set(shortest_by_kind.values()))

    def first(self, longest: int) -> list[int]:
        every = zip(self._stores, self._firsts.tolist(), self._banned, strict=False)
        return [
            number
            for store, first, banned in every
            for number in islice(iter_short_documents(store, first, longest, banned), 2)
        ]

    def lengths(self, documents: Sequence[int]) -> Ids:
        owners = np.searchsorted(self._firsts, documents, side="right") - 1
        document_lengths = [
            int(self._stores[owner].lengths.take(np.array([document - self._firsts[owner]]))[0])
            for owner, document in zip(owners.tolist(), documents, strict=True)
        ]
        return np.array(document_lengths, np.int64)


@final
class _StreamDocuments:
    """Documents of a rank's first stream step, or of an early step with media.

    The stream stays open while the documents may be read: closing it deletes its temporary files.
    """

    def __init__(self, feed: StreamFeed) -> None:
        stream = feed.stream
        media_maker = make_stream_media(stream, feed.spec, None)
        if media_maker is None:
            raise AssertionError("only for data with media")
        self.media_maker = media_maker
        self.origin = stream.origin
        ranks = feed.share_at(0).placement
        begin = stream.begin(ranks.rank, ranks.world_size)
        steps = stream.open(ranks.rank, ranks.world_size, begin)
        weakref.finalize(self, steps.close)
        for step in range(min(_MAX_STREAM_STEPS, stream.steps)):
            self.reader, rows = steps.take(step)
            self._media_kinds = {
                batch_medium.span: batch_medium.medium.kind for batch_medium in media_maker.find(self.reader, rows)
            }
            if self._media_kinds:
                break
        self._documents = rows.documents
        self._lengths = rows.lengths

    def with_media(self, longest: int) -> list[int]:
        documents = []
        for kind in MEDIUM_KINDS:
            spans = [span for span, medium_kind in self._media_kinds.items() if medium_kind == kind]
            fitting_spans = [span for span in spans if self._lengths[span] <= longest]
            if fitting_spans:
                shortest = min(fitting_spans, key=lambda span: int(self._lengths[span]))
                documents.append(int(self._documents[shortest]))
        return sorted(set(documents))

    def first(self, longest: int) -> list[int]:
        is_short = (self._lengths > 1) & (self._lengths <= longest)
        documents: list[int] = np.unique(self._documents[is_short])[:2].tolist()
        return documents

    def lengths(self, documents: Sequence[int]) -> Ids:
        length_by_document = dict(zip(self._documents.tolist(), self._lengths.tolist(), strict=True))
        return np.array([length_by_document[document] for document in documents], np.int64)


@final
class DocumentRows:
    """Maker of batches from document numbers, outside of any plan.

    Documents are numbered across all stores of the loader, in their order; in a stream, those of one early step.

    Args:
        loader: a loader of data with media.

    Raises:
        InputError: a store or an input cannot be read.
    """

    def __init__(self, loader: Loader) -> None:
        feed = loader.feed
        self._documents = (
            _StreamDocuments(feed) if isinstance(feed, StreamFeed) else _StoreDocuments(require_plan_feed(feed, 0))
        )
        self._reader = self._documents.reader
        self._media = self._documents.media_maker

    @property
    def tokens(self) -> dict[str, tuple[str, int]]:
        """Placeholder token of each media kind, and its id."""
        state, control = self._media.processing
        tokens_by_kind = state.get("tokens", {})
        return {kind: (token, control()[token]) for kind, token in tokens_by_kind.items()}

    def with_media(self, longest: int) -> list[int]:
        """Return a short document of each media kind, of at most ``longest`` tokens."""
        return self._documents.with_media(longest)

    def few(self, longest: int) -> list[int]:
        """Return two to four documents, with and without media, to try a model on.

        Together they have at most twice ``longest`` tokens. The same document may occur twice.
        """
        media_documents = self.with_media(longest)
        short = max([_SHORT_TOKENS, *self._documents.lengths(media_documents).tolist()])
        candidates = [*media_documents, *self._documents.first(min(short, longest))] or self._documents.first(longest)
        numbers: list[int] = []
        room = longest
        for number, length in zip(candidates, self._documents.lengths(candidates).tolist(), strict=True):
            if number not in numbers and (length <= room or not numbers):
                numbers.append(number)
                room -= length
        return numbers if len(numbers) > 1 else numbers * 2

    def describe_media_mismatch(self, model: Any, longest: int) -> str:
        """Describe the mismatch of a model and the data's media; empty if there is none."""
        name = type(model).__name__
        parameters = inspect.signature(model.forward).parameters
        origin = self._documents.origin
        numbers = self.with_media(longest)
        features = {feature for number in numbers for feature in self.batch([[number]])}
        if not numbers:
            # The first steps of the stream hold no media: take the names from the processor.
            features = {name for kind in self.tokens for name in self._media.names(kind)}
        if lacking := sorted(features - parameters.keys() - {"labels"}):
            return (
                f"{name}, which does not take {', '.join(lacking)}, the features of each {' or '.join(self.tokens)} "
                f"in {origin}: use the model whose processor the data was prepared with"
            )
        for kind, (token, number) in self.tokens.items():
            for setting in (f"{kind}_token_id", f"{kind}_token_index"):
                value = getattr(model.config, setting, None)
                if value is not None and value != number:
                    return (
                        f"{name}, whose config has {setting} {value}, but in {origin} each {kind} has the "
                        f"placeholder {token!r}, which is {number}: the model would not find it. Prepare the data "
                        "with the model's own processor and tokenizer, or correct the config"
                    )
        return ""

    def batch(self, rows: Sequence[Sequence[int]], seq_len: int = 0) -> Batch:
        """Return a batch of tensors with the complete documents of each row concatenated.

        Args:
            rows: document numbers of each row.
            seq_len: tokens of a row; 0 for the longest row's.

        Raises:
            MediumError: a medium cannot be read.
        """
        listed = [number for row in rows for number in row]
        documents = np.array(listed, np.int64)
        lengths = self._documents.lengths(listed)
        pointers = np.cumsum([0, *map(len, rows)])
        ends = np.cumsum(lengths)
        begins = ends - lengths
        sizes = np.diff(np.concatenate(([0], ends))[pointers])
        offsets = begins - np.repeat(begins[pointers[:-1]], np.diff(pointers))
        none = np.zeros_like(documents)
        built = Rows(pointers, none.astype(np.int32), documents, none, lengths, offsets)
        arrays = assemble_rows(self._reader, built, seq_len or int(sizes.max()), "aligned")
        layout = BatchLayout(pointers, lengths, offsets, 1, "aligned", sliced=False)
        layout = self._media.begin(arrays, self._reader, built, layout, varlen=False).finish()
        return Batch(to_torch(arrays), layout=layout)


def iter_short_documents(store: Store, first: int, longest: float, banned: Ids) -> Iterator[int]:
    """Yield served documents of 2 to ``longest`` tokens, numbered from ``first``."""
    for start in range(0, len(store), _MAX_CANDIDATES):
        lengths = store.lengths.slice(start, min(len(store), start + _MAX_CANDIDATES))
        short_documents = start + np.flatnonzero((lengths > 1) & (lengths <= longest))
        left_out = mask_removed(store.contents.removed, short_documents) | np.isin(short_documents, banned)
        yield from (first + short_documents[~left_out]).tolist()
