"""What a step holds: each sequence's documents, with the place they came from and how their text begins."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchloom.analysis.plan_questions import (
    assign_step_ranks,
    ensure_tables_for,
    get_plan,
    resolve_world,
    sort_by_rank,
)
from batchloom.batches import Loader
from batchloom.core.addresses import redact_url as shown_address
from batchloom.core.errors import PlanError, SettingsError
from batchloom.core.medium import MediumKind
from batchloom.core.settings import as_int, quote_value, raise_problems
from batchloom.plan import Plan
from batchloom.plan.packing import Rows, reorder_rows, slice_rows
from batchloom.store import Store, StoreMedia, decode_beginning
from batchloom.store.format import DocumentProvenance, mask_removed
from batchloom.store.read import find_provenance

_MAX_TEXT_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class ExplainedMedium:
    """An image or a sound of a document.

    Attributes:
        kind: ``image`` or ``audio``.
        start, stop: the tokens of the document that stand for it.
        path: its path or URL as its record had it; empty where the record held its bytes.
    """

    kind: MediumKind
    start: int
    stop: int
    path: str


@dataclass(frozen=True, slots=True)
class ExplainedSpan:
    """A piece of a document in a sequence.

    Attributes:
        source: name of the source in the plan; of a lone store ``data``.
        document: its number in the store.
        start, stop: the tokens of the document that stand here.
        place: where they begin in the sequence.
        document_tokens: tokens of the whole document.
        trained: tokens of the span that carry a loss; the first of a span never does.
        banned: whether an edit of the run bans the document by then: padding stands in its place.
        removed: whether it was removed from the store: end tokens without loss stand in its place.
        origin: the input file, the record (from 0), its line (from 1) where records are lines, its byte offset and the
            hash of its text; None where the store does not say.
        text: how the span begins, decoded; None where it was not asked for, is not served, or cannot be decoded.
        media: the images, sounds and frames of videos that are served with it, in the order of their tokens; none of a
            store elsewhere, whose media are not read.
    """

    source: str
    document: int
    start: int
    stop: int
    place: int
    document_tokens: int
    trained: int
    banned: bool
    removed: bool
    origin: DocumentProvenance | None
    text: str | None
    media: tuple[ExplainedMedium, ...]


@dataclass(frozen=True, slots=True)
class ExplainedSequence:
    """One sequence of a step.

    Attributes:
        step: the step.
        row: its place in the step, counted over all ranks.
        position: its position in the run.
        rank: the data-parallel rank that is given it.
        rank_row: its place in the batch of that rank.
        seq_len: its tokens.
        padding: how many of them are padding.
        spans: its pieces of documents; none past the end of a run that ends inside its last step.
    """

    step: int
    row: int
    position: int
    rank: int
    rank_row: int
    seq_len: int
    padding: int
    spans: tuple[ExplainedSpan, ...]


def explain(
    data: Plan | Loader,
    step: int,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    row: int | None = None,
    text: int = 80,
) -> tuple[ExplainedSequence, ...]:
    """Tell which documents each sequence of a step is made of.

    Nothing but the plan, the lengths and the named pieces of documents is read.

    Args:
        data: a plan, or a loader, whose ``mesh``, ``balance`` and ``uneven`` then hold.
        step: the step, from 0.
        rank: only the rows of this data-parallel rank; None for those of all.
        world_size: number of data-parallel ranks; None for the loader's, of a plan 1.
        row: only this one: a row of the rank's batch where ``rank`` is given, else of the step.
        text: characters of each span's text at the most; 0 for none.

    Returns:
        Sequences in the order of their rows.

    Raises:
        PlanError: there is no such step, row or rank, or a world size that does not divide the step.
        SettingsError: numbers that are none.
        StoreError: a shard is missing or damaged.
    """
    plan, (number, ranks) = get_plan(data), resolve_world(data, rank, world_size)
    checked, limit = _validate_step(plan, step), _validate_text_limit(text)
    (start, stop), seq_len = plan.positions_of(checked), plan.spec_at(checked).seq_len
    ensure_tables_for(plan, start)
    if not plan.has_step(checked):
        raise PlanError(
            f"There is no step {checked:,}: the run has {plan.steps:,}, numbered from 0 to {plan.steps - 1:,}. A "
            "longer run has more: give epochs or steps."
        )
    if number is not None and _is_replicated(plan):
        # Every rank reads what rank 0 does.
        number = 0
    of = assign_step_ranks(data, checked, ranks)
    places = np.empty(len(of), np.int64)
    order = sort_by_rank(data, checked, of)
    firsts = np.searchsorted(of[order], np.arange(ranks))
    places[order] = np.arange(len(of)) - firsts[of[order]]
    chosen = np.arange(stop - start) if number is None else order[of[order] == number]
    if row is not None:
        chosen = _select_one_row(chosen, row)
    rows = _build_rows(plan, start, chosen)
    spans = _build_spans(plan, rows, limit)
    # Plain numbers a column at a time: one by one, taking them from arrays costs as much as the order.
    filled = np.concatenate([[0], np.cumsum(rows.lengths)])[rows.pointers]
    ends = rows.pointers
    columns = [chosen, of[chosen], places[chosen], np.diff(filled), ends[:-1], ends[1:]]
    return tuple(
        ExplainedSequence(
            step=checked,
            row=one,
            position=start + one,
            rank=its_rank,
            rank_row=place,
            seq_len=seq_len,
            padding=seq_len - tokens,
            spans=tuple(spans[a:b]),
        )
        for one, its_rank, place, tokens, a, b in zip(*(c.tolist() for c in columns), strict=True)
    )


def _is_replicated(plan: Plan) -> bool:
    return all(
        isinstance(store, Store) and store.location.replicated for store in plan.stores.values()
    )


def _validate_step(plan: Plan, asked: int) -> int:
    step = as_int(asked)
    if step is None or not 0 <= step <= plan.spec.bounds["steps"][1]:
        raise SettingsError([f"step: {quote_value(asked)} is no step; they are numbered from 0"])
    return step


def _validate_text_limit(asked: int) -> int:
    text = as_int(asked)
    if text is None or not 0 <= text <= _MAX_TEXT_TOKENS:
        raise_problems(
            [f"text: {quote_value(asked)} is no number of characters up to {_MAX_TEXT_TOKENS:,}"]
        )
    return text or 0


def _select_one_row(chosen: NDArray[np.int64], asked: int) -> NDArray[np.int64]:
    row = as_int(asked)
    if row is None or not 0 <= row < len(chosen):
        raise PlanError(
            f"There is no row {quote_value(asked)}: there are {len(chosen):,}, numbered from 0."
        )
    return chosen[row : row + 1]


def _build_rows(plan: Plan, start: int, chosen: NDArray[np.int64]) -> Rows:
    """The rows of some of a step; only the pools between the first and the last of them are entered."""
    if not len(chosen):
        return plan.rows(start, start)
    first, last = int(chosen.min()), int(chosen.max())
    whole_stretch = bool((np.diff(chosen) == 1).all())
    if plan.spec.lanes == 1:
        rows = plan.rows(start + first, start + last + 1)
        return rows if whole_stretch else reorder_rows(rows, chosen - first)
    lanes = plan.spec.lanes
    low, high = first // lanes * lanes, -(-(last + 1) // lanes) * lanes
    rows = plan.rows(start + low, start + high)
    if whole_stretch:
        return slice_rows(rows, first - low, last + 1 - low)
    return reorder_rows(rows, chosen - low)


def _build_spans(plan: Plan, rows: Rows, text: int) -> list[ExplainedSpan]:
    count = len(rows.documents)
    banned = np.zeros(count, bool) if rows.banned is None else rows.banned
    told = _SpanDetails(
        [0] * count, [0] * count, [False] * count, [None] * count, [None] * count, [()] * count
    )
    for source in np.unique(rows.sources).tolist():
        store = plan.stores[plan.names[source]]
        at = np.flatnonzero(rows.sources == source)
        lengths = store.lengths.take(rows.documents[at])
        trained = np.where(banned[at], 0, rows.lengths[at] - 1)
        for place, *both in zip(at.tolist(), lengths.tolist(), trained.tolist(), strict=True):
            told.lengths[place], told.trained[place] = both
        if isinstance(store, Store):
            _fill_span_details(store, rows, at, banned, text, told)
    return [
        ExplainedSpan(plan.names[source], *span)
        for source, *span in zip(
            rows.sources.tolist(),
            rows.documents.tolist(),
            rows.starts.tolist(),
            (rows.starts + rows.lengths).tolist(),
            rows.places.tolist(),
            told.lengths,
            told.trained,
            banned.tolist(),
            told.removed,
            told.origins,
            told.texts,
            told.media,
            strict=True,
        )
    ]


@dataclass(frozen=True, slots=True)
class _SpanDetails:
    """What is found out of each span."""

    lengths: list[int]
    trained: list[int]
    removed: list[bool]
    origins: list[DocumentProvenance | None]
    texts: list[str | None]
    media: list[tuple[ExplainedMedium, ...]]


def _fill_span_details(
    store: Store,
    rows: Rows,
    at: NDArray[np.int64],
    banned: NDArray[np.bool_],
    text: int,
    told: _SpanDetails,
) -> None:
    """Find out what an open store says of the spans ``at``."""
    documents = rows.documents[at]
    gone = (
        mask_removed(store.contents.removed, documents)
        if store.contents.removed.size
        else np.zeros(len(at), bool)
    )
    origins = find_provenance(store, documents.tolist())
    for place, origin, removed in zip(at.tolist(), origins, gone.tolist(), strict=True):
        told.origins[place], told.removed[place] = origin, removed
    if store.masked:
        long = at[(rows.lengths[at] > 1) & ~banned[at]]
        masks = store.mask(rows.documents[long], rows.starts[long] + 1, rows.lengths[long] - 1)
        for place, mask in zip(long.tolist(), masks, strict=True):
            told.trained[place] = int(mask.sum())
    shown_at = at[~gone & ~banned[at]]
    for place, media in zip(
        shown_at.tolist(), StoreMedia(store).of(rows.documents[shown_at]), strict=True
    ):
        told.media[place] = tuple(
            ExplainedMedium(one.kind, one.start, one.start + one.tokens, shown_address(one.place))
            for one in media
        )
    if text and store.manifest is not None:
        # A token is at least one byte, and a character at most four.
        seen = [sum(one.stop - one.start for one in told.media[at]) for at in shown_at.tolist()]
        sizes = np.minimum(rows.lengths[shown_at], 4 * text + np.array(seen, np.int64))
        views = store.read(rows.documents[shown_at], rows.starts[shown_at], sizes)
        for place, view in zip(shown_at.tolist(), views, strict=True):
            told.texts[place] = decode_beginning(store.tokenizer, view, 4 * text)[:text]
