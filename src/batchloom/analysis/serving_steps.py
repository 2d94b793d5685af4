"""Steps of a run, past and future, that serve a document or an input record."""

import json
from dataclasses import dataclass

import numpy as np

from batchloom.analysis.plan_questions import assign_step_ranks, ensure_tables, get_plan, resolve_world
from batchloom.batches import Loader
from batchloom.core.errors import InputError
from batchloom.core.settings import as_int, quote_value, raise_problems, suggest
from batchloom.core.wording import format_count, format_list
from batchloom.plan import Plan, find_document_positions
from batchloom.plan.mixture import list_weighted_sources
from batchloom.store import Store, find_documents, open_store
from batchloom.store.format import QUARANTINE_NAME, SUBSETS, format_generation_file_name
from batchloom.store.read import find_source_names, has_media

_MAX_LISTED = 5


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
    total = plan.orders.order(number, eras[0]).sequences
    skips = " Edits skip steps." if any(edit.skip for edit in plan.edits) else ""
    ended = plan.orders.timeline.end is not None and plan.orders.timeline.end <= end
    later = "The sources end the run" if ended else "Later steps may hold it"
    return (
        f"it is not served up to step {last:,}: until then {name} serves {format_count(served, 'sequence')}, and an "
        f"epoch of it has {total:,}.{skips} {later}"
    )


def _count_served(plan: Plan, number: int, end: int) -> int:
    """Count the sequences of a source before a position."""
    served_sequences = 0
    for segment in plan.orders.timeline.segments():
        if segment.position < end:
            until = min(plan.orders.timeline.until(segment) or end, end)
            served_sequences += int((segment.served(until) - segment.bases)[number].sum())
    return served_sequences


def _describe_later_start(plan: Plan, number: int, end: int) -> str:
    """Describe when the source gets a weight, if that is after ``end``."""
    for change in plan.orders.run_layout.changes:
        if change.position >= end and plan.names[number] in list_weighted_sources(change.weights, plan.names):
            return f"; it gets one after {format_count(plan.orders.run_layout.steps_until(change.position), 'step')}"
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
    """

    source: str
    document: int
    step: int
    row: int
    rank: int
    position: int
    epoch: int
    banned: bool


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
    return find_serving_steps(
        data,
        document=document,
        source=source,
        record=record,
        file=file,
        last_step=last_step,
        world_size=world_size,
    )[0]


def find_serving_steps(
    data: Plan | Loader,
    *,
    document: int | None,
    source: str | None,
    record: int | None,
    file: str | None,
    last_step: int | None,
    world_size: int | None,
) -> tuple[tuple[ServedSequence, ...], tuple[UnservedDocument, ...]]:
    """Return the result of :func:`when`, and the documents in no step with reasons."""
    plan, (_, ranks) = get_plan(data), resolve_world(data, None, world_size)
    request_numbers = _validate_request(document, record, last_step)
    number, documents = _select_documents(plan, request_numbers, source, file)
    ensure_tables(plan)
    last = plan.steps - 1 if request_numbers["last_step"] is None else min(request_numbers["last_step"], plan.steps - 1)
    name, served_sequences, unserved = plan.names[number], [], []
    for document_number in documents:
        bans = [p for p, n, numbers in plan.orders.run_layout.bans if n == name and document_number in numbers]
        locations = find_document_positions(plan, number, document_number, last) if last >= 0 else []
        if not locations:
            reason = explain_unserved(plan, number, document_number, last)
            unserved.append(UnservedDocument(name, document_number, reason))
        for location in locations:
            rank = int(assign_step_ranks(data, location.step, ranks)[location.row]) if ranks > 1 else 0
            is_banned = any(location.position >= position for position in bans)
            served_sequences.append(
                ServedSequence(
                    *(name, document_number, location.step, location.row, rank),
                    *(location.position, location.epoch, is_banned),
                )
            )
    served_sequences.sort(key=lambda showing: (showing.position, showing.document))
    return tuple(served_sequences), tuple(unserved)


def _validate_request(document: object, record: object, last_step: object) -> dict[str, int | None]:
    arguments = {"document": document, "record": record, "last_step": last_step}
    numbers = {name: as_int(value) for name, value in arguments.items()}
    problems = [
        f"{name}: {quote_value(value)} is not a whole number of at least 0"
        for name, value in arguments.items()
        if value is not None and (numbers[name] is None or int(numbers[name] or 0) < 0)
    ]
    if (document is None) == (record is None):
        problems.append("document: give the number of a document, or a record of a source")
    raise_problems(problems)
    return numbers


def _select_documents(
    plan: Plan, request_numbers: dict[str, int | None], source: str | None, file: str | None
) -> tuple[int, list[int]]:
    """Return the source number in the plan and the requested documents."""
    names = [plan.names[n] for n in plan.orders.weighted_sources]
    document, record = request_numbers["document"], request_numbers["record"]
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
    name, input_name = _resolve_input(plan, source, file)
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
        candidate_stores, requested_name = stores, file or source
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
    summary = f"Record {record:,} of {file} was read, and became no document of subset {store.split!r}"
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
    for number in range(1, (store.location.generation or 1) + 1):
        path = store.path / format_generation_file_name(QUARANTINE_NAME, number)
        if not path.is_file():
            continue
        with path.open("rb") as lines:
            for line in lines:
                try:
                    entry = json.loads(line)
                except ValueError:
                    continue
                if not isinstance(entry, dict) or entry.get("source") != file:
                    continue
                if record + 1 in (entry.get("line"), entry.get("row")):
                    return str(entry.get("reason"))
    return ""
