"""Contents of a step: documents of each sequence, their provenance and text."""

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
from batchloom.core.settings import as_int, quote_value
from batchloom.plan import Plan
from batchloom.plan.packing import MAX_STEPS, Rows, reorder_rows, slice_rows
from batchloom.store import Store, StoreMedia, decode_beginning
from batchloom.store.format import DocumentProvenance, mask_removed
from batchloom.store.read import find_provenance

_MAX_TEXT_TOKENS = 1 << 20

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ExplainedMedium:
    """An image or a sound of a document.

    Attributes:
        kind: ``image`` or ``audio``.
        start, stop: range of its placeholder tokens in the document.
        path: path or URL in the record; empty if the record held its bytes.
    """

    kind: MediumKind
    start: int
    stop: int
    path: str


@dataclass(frozen=True, slots=True)
class ExplainedSpan:
    """A span of a document in a sequence.

    Attributes:
        source: name of the source in the plan; ``data`` for a single store.
        document: number of the document in its store.
        start, stop: token range of the document.
        place: offset of the span in the sequence.
        document_tokens: tokens of the complete document.
        trained: tokens of the span that carry a loss; the first of a span never does.
        banned: whether an edit of the run bans the document at this position; padding is served instead.
        removed: whether it was removed from the store; end tokens without loss are served instead.
        origin: the input file, the record (from 0), its line (from 1) if records are lines, its byte offset and the
            hash of its text; None if the store does not record it.
        text: beginning of the span, decoded; None if it was not requested, is not served, or cannot be decoded.
        media: images, sounds and video frames served with the span, in the order of their tokens; empty for a remote
            store, whose media are not read.
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
        row: row in the step, over all ranks.
        position: position in the run.
        rank: data-parallel rank that receives it.
        rank_row: row in the batch of that rank.
        seq_len: length in tokens, padding included.
        padding: number of padding tokens.
        spans: spans of documents; empty past the end of a run that ends inside its last step.
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
    """Return the documents in each sequence of a step.

    It reads only the plan, the lengths and the listed spans of documents.

    Args:
        data: a plan, or a loader, whose ``mesh``, ``balance`` and ``uneven`` then apply.
        step: the step, from 0.
        rank: only the rows of this data-parallel rank; None for all rows.
        world_size: number of data-parallel ranks; None for the loader's, or 1 for a plan.
        row: only this row: of the rank's batch if ``rank`` is given, otherwise of the step.
        text: largest number of characters of each span's text; 0 for none.

    Returns:
        Sequences in row order.

    Raises:
        PlanError: no such step, row or rank, or the world size does not divide the step.
        SettingsError: a number is invalid.
        StoreError: a shard is missing or damaged.
    """
    plan, (number, ranks) = get_plan(data), resolve_world(data, rank, world_size)
    step_number, limit = as_int(step), as_int(text)
    if step_number is None or not 0 <= step_number <= MAX_STEPS:
        raise SettingsError([f"step: {quote_value(step)} is not a step; steps are numbered from 0"])
    if limit is None or not 0 <= limit <= _MAX_TEXT_TOKENS:
        raise SettingsError([f"text: {quote_value(text)} is not a number of characters up to {_MAX_TEXT_TOKENS:,}"])
    (start, stop), seq_len = plan.positions_of(step_number), plan.spec_at(step_number).seq_len
    ensure_tables_for(plan, start)
    if not plan.has_step(step_number):
        raise PlanError(
            f"There is no step {step_number:,}: the run has {plan.steps:,}, numbered from 0 to {plan.steps - 1:,}. A "
            "longer run has more: give epochs or steps."
        )
    stores = plan.stores.values()
    if number is not None and all(isinstance(store, Store) and store.location.replicated for store in stores):
        # Every rank of a replicated store reads the rows of rank 0.
        number = 0
    row_ranks = assign_step_ranks(data, step_number, ranks)
    rank_rows = np.empty(len(row_ranks), np.int64)
    order = sort_by_rank(data, step_number, row_ranks)
    firsts = np.searchsorted(row_ranks[order], np.arange(ranks))
    rank_rows[order] = np.arange(len(row_ranks)) - firsts[row_ranks[order]]
    row_numbers = np.arange(stop - start) if number is None else order[row_ranks[order] == number]
    if row is not None:
        row_index = as_int(row)
        if row_index is None or not 0 <= row_index < len(row_numbers):
            raise PlanError(f"There is no row {quote_value(row)}: there are {len(row_numbers):,}, numbered from 0.")
        row_numbers = row_numbers[row_index : row_index + 1]
    rows = _build_rows(plan, start, row_numbers)
    spans = _build_spans(plan, rows, limit)
    filled_tokens = np.concatenate([[0], np.cumsum(rows.lengths)])[rows.pointers]
    ends = rows.pointers
    columns = [
        row_numbers,
        row_ranks[row_numbers],
        rank_rows[row_numbers],
        np.diff(filled_tokens),
        ends[:-1],
        ends[1:],
    ]
    return tuple(
        ExplainedSequence(
            step=step_number,
            row=row_number,
            position=start + row_number,
            rank=row_rank,
            rank_row=rank_row,
            seq_len=seq_len,
            padding=seq_len - tokens,
            spans=tuple(spans[a:b]),
        )
        for row_number, row_rank, rank_row, tokens, a, b in zip(*(c.tolist() for c in columns), strict=True)
    )


def _build_rows(plan: Plan, start: int, row_numbers: Ints) -> Rows:
    """Build some rows of a step; enters only the pools between first and last row."""
    if not len(row_numbers):
        return plan.rows(start, start)
    first, last = int(row_numbers.min()), int(row_numbers.max())
    is_contiguous = bool((np.diff(row_numbers) == 1).all())
    if plan.spec.lanes == 1:
        rows = plan.rows(start + first, start + last + 1)
        return rows if is_contiguous else reorder_rows(rows, row_numbers - first)
    lanes = plan.spec.lanes
    low, high = first // lanes * lanes, -(-(last + 1) // lanes) * lanes
    rows = plan.rows(start + low, start + high)
    if is_contiguous:
        return slice_rows(rows, first - low, last + 1 - low)
    return reorder_rows(rows, row_numbers - low)


def _build_spans(plan: Plan, rows: Rows, text: int) -> list[ExplainedSpan]:
    spans: dict[int, ExplainedSpan] = {}
    for source in np.unique(rows.sources).tolist():
        indices = np.flatnonzero(rows.sources == source)
        spans |= zip(indices.tolist(), _explain_spans(plan, plan.names[source], rows, indices, text), strict=True)
    return [spans[index] for index in range(len(rows.documents))]


def _explain_spans(plan: Plan, name: str, rows: Rows, indices: Ints, text: int) -> list[ExplainedSpan]:
    """Explain spans of one source; assumed sources have no provenance, text or media."""
    store, count = plan.stores[name], len(indices)
    documents, starts, lengths = rows.documents[indices], rows.starts[indices], rows.lengths[indices]
    banned = np.zeros(count, bool) if rows.banned is None else rows.banned[indices]
    trained, removed = np.where(banned, 0, lengths - 1), np.zeros(count, bool)
    provenance: list[DocumentProvenance | None] = [None] * count
    texts: list[str | None] = [None] * count
    media: list[tuple[ExplainedMedium, ...]] = [()] * count
    if isinstance(store, Store):
        removed = mask_removed(store.contents.removed, documents) if store.contents.removed.size else removed
        provenance = list(find_provenance(store, documents.tolist()))
        if store.masked:
            long = np.flatnonzero((lengths > 1) & ~banned)
            masks = store.mask(documents[long], starts[long] + 1, lengths[long] - 1)
            trained[long] = [int(mask.sum()) for mask in masks]
        served = np.flatnonzero(~removed & ~banned)
        for index, document_media in zip(served.tolist(), StoreMedia(store).of(documents[served]), strict=True):
            media[index] = tuple(
                ExplainedMedium(medium.kind, medium.start, medium.start + medium.tokens, shown_address(medium.location))
                for medium in document_media
            )
        if text and store.manifest is not None:
            # A token is at least one byte and a character at most four, so 4 * text tokens suffice.
            media_tokens = [sum(medium.stop - medium.start for medium in media[index]) for index in served.tolist()]
            sizes = np.minimum(lengths[served], 4 * text + np.array(media_tokens, np.int64))
            views = store.read(documents[served], starts[served], sizes)
            for index, view in zip(served.tolist(), views, strict=True):
                texts[index] = decode_beginning(store.tokenizer, view, 4 * text)[:text]
    # Convert columns to plain numbers at once: converting single elements takes as long as computing the order.
    columns = (
        *(documents, starts, starts + lengths, rows.row_offsets[indices], store.lengths.take(documents)),
        *(trained, banned, removed),
    )
    spans = zip(*(column.tolist() for column in columns), provenance, texts, media, strict=True)
    return [ExplainedSpan(name, *span) for span in spans]
