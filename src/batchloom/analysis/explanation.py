"""``explain`` and ``when``: documents of a step, and the steps of a document."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from batchloom.analysis.plan_questions import (
    assign_step_ranks,
    ensure_tables,
    ensure_tables_for,
    get_plan,
    resolve_world,
    sort_by_rank,
)
from batchloom.batches import Loader
from batchloom.core.addresses import redact_url as shown_address
from batchloom.core.errors import InputError, PlanError, SettingsError
from batchloom.core.medium import MediumKind
from batchloom.core.settings import Setting, as_int, convert_int_settings, quote_value, raise_problems, suggest
from batchloom.core.wording import format_count, format_list
from batchloom.plan import Plan, find_document_positions, list_weighted_sources
from batchloom.plan.packing import MAX_STEPS, Rows, reorder_rows, slice_rows
from batchloom.store import Store, StoreMedia, decode_beginning, find_documents, open_store
from batchloom.store.format import (
    QUARANTINE_NAME,
    SUBSETS,
    DocumentProvenance,
    format_generation_file_name,
    mask_removed,
)
from batchloom.store.read import find_provenance, find_source_names, has_media

_MAX_TEXT_TOKENS = 1 << 20
_MAX_NUMBER = (1 << 63) - 1

Ints = NDArray[np.int64]
_MAX_LISTED = 5


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
        loss_weights: loss weights of the trained tokens, ascending; empty if all are 1.
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
    loss_weights: tuple[float, ...]


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
    step_number = as_int(step)
    limit = as_int(text)
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
    first = int(row_numbers.min())
    last = int(row_numbers.max())
    is_contiguous = bool((np.diff(row_numbers) == 1).all())
    if plan.spec.lanes == 1:
        rows = plan.rows(start + first, start + last + 1)
        return rows if is_contiguous else reorder_rows(rows, row_numbers - first)
    lanes = plan.spec.lanes
    low = first // lanes * lanes
    high = -(-(last + 1) // lanes) * lanes
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
    store = plan.stores[name]
    count = len(indices)
    documents = rows.documents[indices]
    starts = rows.starts[indices]
    lengths = rows.lengths[indices]
    banned = np.zeros(count, bool) if rows.banned is None else rows.banned[indices]
    trained = np.where(banned, 0, lengths - 1)
    removed = np.zeros(count, bool)
    provenance: list[DocumentProvenance | None] = [None] * count
    texts: list[str | None] = [None] * count
    media: list[tuple[ExplainedMedium, ...]] = [()] * count
    weights: list[tuple[float, ...]] = [()] * count
    if isinstance(store, Store):
        removed = mask_removed(store.contents.removed, documents) if store.contents.removed.size else removed
        provenance = list(find_provenance(store, documents.tolist()))
        if store.masked or store.reader.weighted:
            long = np.flatnonzero((lengths > 1) & ~banned)
            flags = store.reader.flags(documents[long], starts[long] + 1, lengths[long] - 1)
            for index, span_flags in zip(long.tolist(), flags, strict=True):
                counts = span_flags.count_weights()
                trained[index] = sum(counts.values())
                weights[index] = tuple(counts) if counts.keys() - {1.0} else ()
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
        documents,
        starts,
        starts + lengths,
        rows.row_offsets[indices],
        store.lengths.take(documents),
        trained,
        banned,
        removed,
    )
    spans = zip(*(column.tolist() for column in columns), provenance, texts, media, weights, strict=True)
    # The columns are in the order of the fields.
    return [ExplainedSpan(name, *span) for span in spans]


def explain_unserved(plan: Plan, number: int, document: int, last: int) -> str:
    """Explain why no step up to ``last`` serves a document of source ``number``.

    The pools of the source must be counted.
    """
    name = plan.names[number]
    store = plan.stores[name]
    length = int(store.lengths.take(np.array([document]))[0])
    media = store.contents.media if isinstance(store, Store) else ""
    if not length and media:
        return f"it is empty, or its media are not the ones that source {name!r} takes from its store (media={media!r})"
    if not length:
        return "it is empty: there is no token to serve"
    eras = [era for era, numbers in enumerate(plan.orders.weighted_sources_by_era) if number in numbers]
    specs = [plan.orders.order(number, era).spec for era in eras]
    if all(spec.overlong == "drop" and length > spec.seq_len for spec in specs):
        overlong_remedy = "" if isinstance(store, Store) and has_media(store) else ", overlong='split' or 'truncate'"
        return (
            f"it has {length:,} tokens, more than seq_len {max(spec.seq_len for spec in specs):,}, and overlong='drop' "
            f"leaves it out; a seq_len of at least {length:,}{overlong_remedy} would serve it"
        )
    if last < 0:
        return "the run has no step"
    # Count a started group_by_length window to its end, since grouping reorders the rows within it.
    end = min(plan.run.window(plan.positions_of(last)[1] - 1)[1], plan.positions)
    served = _count_served(plan, number, end)
    if not served:
        return f"source {name!r} has no weight up to step {last:,}{_describe_later_start(plan, number, end)}"
    total = plan.orders.order(number, eras[0]).counts.sequences
    skips = " Edits skip steps." if any(edit.skip for edit in plan.edits) else ""
    later = "The sources end the run" if plan.serve_until(end).has_ended else "Later steps may hold it"
    return (
        f"it is not served up to step {last:,}: until then {name} serves {format_count(served, 'sequence')}, and an "
        f"epoch of it has {total:,}.{skips} {later}"
    )


def _count_served(plan: Plan, number: int, end: int) -> int:
    """Count the sequences of a source before a position."""
    return sum(int((segment.served(stop) - segment.bases)[number]) for segment, stop in plan.serve_until(end).segments)


def _describe_later_start(plan: Plan, number: int, end: int) -> str:
    """Describe when the source gets a weight, if that is after ``end``."""
    for segment in plan.segments:
        if segment.start >= end and plan.names[number] in list_weighted_sources(segment.weights, plan.names):
            return f"; it gets one after {format_count(segment.step, 'step')}"
    return ""


@dataclass(frozen=True, slots=True)
class ServedSequence:
    """A sequence of a run that holds a document, or a part of it.

    Attributes:
        source: name of the source in the plan; ``data`` for a single store.
        document: number of the document in its store.
        step: the step.
        row: row of the sequence in the step, over all ranks.
        rank: data-parallel rank that receives it.
        position: position in the run.
        epoch: epoch of the source, from 0.
        banned: whether an edit of the run bans the document at this position; padding is served instead.
        removed: whether it was removed from the store; end tokens without loss are served instead.
    """

    source: str
    document: int
    step: int
    row: int
    rank: int
    position: int
    epoch: int
    banned: bool
    removed: bool


@dataclass(frozen=True, slots=True)
class UnservedDocument:
    """A requested document that is in none of the steps.

    Attributes:
        source: name of the source in the plan; ``data`` for a single store.
        document: number of the document in its store.
        reason: why no step serves it.
    """

    source: str
    document: int
    reason: str


def when(
    data: Plan | Loader,
    *,
    document: int | None = None,
    source: str | None = None,
    record: int | None = None,
    file: str | None = None,
    last_step: int | None = None,
    world_size: int | None = None,
) -> tuple[ServedSequence, ...]:
    """Return the steps and rows that serve a document.

    The inverse of :func:`explain`. It needs the number of sequences of every pool. If no table of
    them is cached, they are counted (progress is logged to ``batchloom``) and cached.

    Args:
        data: a plan, or a loader, whose ``mesh``, ``balance`` and ``uneven`` then apply.
        document: number of a document in its store; or
        record: number of a record, from 0, in an input file.
        source: name of the mixture source; otherwise name of an input (a file or a data set) of the store.
        file: the input file, if the source has several.
        last_step: last step to search; None for the last of the run.
        world_size: number of data-parallel ranks; None for the loader's, or 1 for a plan.

    Returns:
        Sequences in position order.

    Raises:
        InputError: no such source, document or record; or the record became no document, with the reason if
            known.
        SettingsError: neither a document nor a record is given, or both.
        PlanError: the world size does not divide the step.
    """
    query = DocumentQuery(document=document, source=source, record=record, file=file, last_step=last_step)
    return find_serving_steps(data, query, world_size)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentQuery:
    """Arguments of :func:`when` that name a document, or the documents of a record."""

    document: Annotated[
        int | None, Setting(help="Number of a document in its store.", minimum=0, maximum=_MAX_NUMBER)
    ] = None
    source: Annotated[
        str | None, Setting(help="Source of a mixture; of a single store, an input file or data set.")
    ] = None
    record: Annotated[
        int | None,
        Setting(
            help="Number of a record in its file, from 0: its line or row, less 1.", minimum=0, maximum=_MAX_NUMBER
        ),
    ] = None
    file: Annotated[str | None, Setting(help="Input file, if the source has several.")] = None
    last_step: Annotated[
        int | None,
        Setting(help="Last step to search.", minimum=0, maximum=_MAX_NUMBER, shown_default="the last step of the run"),
    ] = None

    def __post_init__(self) -> None:
        problems = convert_int_settings(self)
        if (self.document is None) == (self.record is None):
            problems.append("document: give a document (--document), or a record of a source (--source with --record)")
        raise_problems(problems)


def find_serving_steps(
    data: Plan | Loader, query: DocumentQuery, world_size: int | None = None
) -> tuple[tuple[ServedSequence, ...], tuple[UnservedDocument, ...]]:
    """Return the result of :func:`when`, and the documents in no step with reasons."""
    plan, (_, ranks) = get_plan(data), resolve_world(data, None, world_size)
    number, documents = _select_documents(plan, query)
    ensure_tables(plan)
    last = plan.steps - 1 if query.last_step is None else min(query.last_step, plan.steps - 1)
    name = plan.names[number]
    served_sequences = []
    unserved = []
    store = plan.stores[name]
    for document in documents:
        removed = isinstance(store, Store) and bool(mask_removed(store.contents.removed, np.array([document]))[0])
        bans = [segment.start for segment in plan.segments if document in segment.bans.get(name, ())]
        locations = find_document_positions(plan, number, document, last) if last >= 0 else []
        if not locations:
            unserved.append(UnservedDocument(name, document, explain_unserved(plan, number, document, last)))
        for location in locations:
            rank = int(assign_step_ranks(data, location.step, ranks)[location.row]) if ranks > 1 else 0
            served_sequences.append(
                ServedSequence(
                    source=name,
                    document=document,
                    step=location.step,
                    row=location.row,
                    rank=rank,
                    position=location.position,
                    epoch=location.epoch,
                    banned=any(location.position >= position for position in bans),
                    removed=removed,
                )
            )
    served_sequences.sort(key=lambda sequence: (sequence.position, sequence.document))
    return tuple(served_sequences), tuple(unserved)


def _select_documents(plan: Plan, query: DocumentQuery) -> tuple[int, list[int]]:
    """Return the source number in the plan and the requested documents."""
    names = [plan.names[n] for n in plan.orders.weighted_sources]
    document = query.document
    record = query.record
    source = query.source
    if document is not None:
        name = source if source in plan.names else None
        if name is None and (source is not None or len(plan.names) > 1):
            raise InputError(
                f"source: {quote_value(source)} is not one of "
                f"{', '.join(plan.names)}{suggest(str(source), plan.names)}. Document numbers count within one "
                "source of the plan; name the source."
            )
        name = name or plan.names[0]
        size = plan.stores[name].lengths.size
        if document >= size:
            raise InputError(f"There is no document {document:,} in {name}: there are {size:,}, numbered from 0.")
        return _find_source_number(plan, name, names), [document]
    name, input_name = _resolve_input(plan, source, query.file)
    store = plan.stores[name]
    if not isinstance(store, Store) or record is None:
        raise InputError(f"Source {name!r} has only lengths; give the number of a document.")
    documents = find_documents(store, input_name, record)
    if not documents:
        raise InputError(_explain_left_out(store, input_name, record))
    return _find_source_number(plan, name, names), documents


def _find_source_number(plan: Plan, name: str, names: list[str]) -> int:
    if name not in names:
        raise InputError(
            f"Source {name!r} has no weight anywhere in the run, so none of its documents is served. Sources with a "
            f"weight: {', '.join(names)}."
        )
    return plan.names.index(name)


def _resolve_input(plan: Plan, source: str | None, file: str | None) -> tuple[str, str]:
    """Return the source of the plan and the input file of its store."""
    stores = {name: store for name, store in plan.stores.items() if isinstance(store, Store)}
    if source in plan.names:
        candidate_stores = {name: store for name, store in stores.items() if name == source}
        requested_name = file
    else:
        candidate_stores = stores
        requested_name = file or source
    matches = [
        (name, input_name)
        for name, store in candidate_stores.items()
        for input_name in (find_source_names(store, requested_name) if requested_name else _list_inputs(store))
    ]
    if len(matches) == 1:
        return matches[0]
    input_names = [input_name for store in candidate_stores.values() for input_name in _list_inputs(store)]
    if not input_names:
        raise InputError(
            "record: a bare prefix does not say which records its documents came from; give the number of a document."
        )
    if not matches:
        raise InputError(
            f"source: no input of {', '.join(candidate_stores)} is called "
            f"{quote_value(requested_name)}{_match_input(str(requested_name), input_names) or '.'} "
            "batchloom log --json lists them."
        )
    matching_names = format_list(sorted({input_name for _, input_name in matches}), _MAX_LISTED)
    raise InputError(
        f"file: missing; a record belongs to one file, and {quote_value(requested_name or source)} has "
        f"{len(matches):,}: {matching_names}"
    )


def _match_input(requested_name: str, input_names: list[str]) -> str:
    """Suggest input names for a wrong one, such as a path from another folder."""
    last = requested_name.rpartition("/")[2]
    matches = sorted({name for name in input_names if name.rpartition("/")[2] == last})
    if not matches:
        return suggest(requested_name, input_names)
    return f"; did you mean {' or '.join(map(quote_value, matches[:_MAX_LISTED]))}?"


def _list_inputs(store: Store) -> list[str]:
    return [source.name for source in store.manifest.sources] if store.manifest else []


def _explain_left_out(store: Store, file: str, record: int) -> str:
    """Explain why a record became no document of the subset, as far as is known."""
    place = f"Record {record:,} (line or row {record + 1:,}) of {file}"
    summary = f"{place} was read, and became no document of subset {store.split!r}"
    for subset in SUBSETS:
        if subset in store.subsets and subset != store.split:
            other_store = open_store(store.path, subset, generation=store.location.generation)
            if document_numbers := find_documents(other_store, file, record):
                numbers = ", ".join(map(str, document_numbers[:_MAX_LISTED]))
                return f"{summary}: it is document {numbers} of subset {subset!r}, which the plan does not serve."
    if reason := _explain_quarantined(store, file, record):
        return f"{summary}: it is in {QUARANTINE_NAME}, because {reason}"
    return (
        f"{summary}: it was left out when the store was made (a duplicate, dropped by a cleaning step, or empty; "
        f"{store.path / 'report.json'} counts them by reason), or compaction removed it. The text of a duplicate is "
        "stored under another record."
    )


def _explain_quarantined(store: Store, file: str, record: int) -> str:
    for _, entry in iter_quarantine(store):
        if entry and entry["source"] == file and record + 1 in (entry.get("line"), entry.get("row")):
            return str(entry["reason"])
    return ""


def iter_quarantine(store: Store) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Yield ``file:line`` and entry of each bad record; None for a damaged line."""
    for number in range(1, (store.location.generation or 1) + 1):
        path = store.path / format_generation_file_name(QUARANTINE_NAME, number)
        if path.is_file():
            with path.open("rb") as lines:
                yield from ((f"{path.name}:{count}", _parse_quarantined(line)) for count, line in enumerate(lines, 1))


def _parse_quarantined(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) and {"source", "reason"} <= entry.keys() else None
