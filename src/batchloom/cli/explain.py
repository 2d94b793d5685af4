"""``batchloom explain`` and ``batchloom when``."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import batchloom
from batchloom.analysis import (
    DocumentQuery,
    ExplainedSequence,
    ExplainedSpan,
    PlanRequest,
    ServedSequence,
    choose_last_step,
    find_serving_steps,
    make_data_label,
    resolve_plan,
)
from batchloom.cli.options import AsJson, Option, StorePath, WorldSize, with_settings
from batchloom.cli.terminal import format_marks, print_log, report
from batchloom.core.wording import format_count, format_list

_MAX_WEIGHTS = 4


@with_settings(PlanRequest)
def explain(
    store: StorePath = None,
    *,
    step: Annotated[int, Option(help="Number of the step, from 0.")],
    rank: Annotated[int | None, Option(help="Show only the rows of this rank of --world-size.")] = None,
    row: Annotated[int | None, Option(help="Show only this row of the step, or of the rank's batch.")] = None,
    text: Annotated[int, Option(help="Maximum characters of each span's text; 0 for none.")] = 80,
    world_size: WorldSize = None,
    settings: dict[str, Any],
    as_json: AsJson = False,
) -> None:
    """Show the documents of a step, and where they come from."""
    request = PlanRequest(store=store, **settings)
    with print_log():
        plan, _ = resolve_plan(request, step)
        sequences = batchloom.explain(plan, step, rank=rank, world_size=world_size, row=row, text=text)
    label = make_data_label(plan)
    values = {"step": step, "fingerprint": plan.fingerprint, **label, "sequences": sequences}
    title = f"step {step:,} of plan {plan.fingerprint}{format_marks(label)}"
    report(values, _iter_step_lines(title, sequences, world_size), as_json=as_json)


def _iter_step_lines(title: str, sequences: Sequence[ExplainedSequence], world_size: int | None) -> Iterator[str]:
    yield title
    for sequence in sequences:
        ranks = f", rank {sequence.rank} row {sequence.rank_row}" if world_size else ""
        contents = format_count(len(sequence.spans), "span") if sequence.spans else "empty: past the end of the run"
        yield f"row {sequence.row}{ranks}, position {sequence.position:,}: {contents}, padding {sequence.padding:,}"
        yield from ("  " + _format_span(span) for span in sequence.spans)


def _format_span(span: ExplainedSpan) -> str:
    part = (
        f"all {span.document_tokens:,} tokens"
        if span.stop - span.start == span.document_tokens
        else f"tokens {span.start:,}-{span.stop:,} of {span.document_tokens:,}"
    )
    facts = [f"{span.source} document {span.document:,}", part]
    if span.banned:
        facts.append("banned: served as padding")
    elif span.removed:
        facts.append("removed: served as end tokens without loss since then")
    elif span.trained < span.stop - span.start - 1:
        facts.append(f"{span.trained:,} trained")
    if span.loss_weights:
        facts.append(f"loss weights {format_list([f'{weight:g}' for weight in span.loss_weights], _MAX_WEIGHTS)}")
    if span.origin is not None:
        facts.append(f"{span.origin.source} {span.origin.position} (byte {span.origin.offset:,})")
        facts += [f"{name} {value}" for name, value in span.origin.columns.items()]
    facts += [
        f"{medium.kind} {medium.path or 'of the record'} ({medium.stop - medium.start:,} tokens)"
        for medium in span.media
    ]
    begins = f": {span.text!r}" if span.text else ""
    return ", ".join(facts) + begins


@with_settings(DocumentQuery, parameter="query")
@with_settings(PlanRequest)
def when(
    store: StorePath = None,
    *,
    query: dict[str, Any],
    world_size: WorldSize = None,
    settings: dict[str, Any],
    as_json: AsJson = False,
) -> None:
    """Show every step and row in which a document is served."""
    request = PlanRequest(store=store, **settings)
    with print_log():
        plan, saved_position = resolve_plan(request)
        steps_done = plan.step_at(int(saved_position.state["position"]))[0] if saved_position else None
        if steps_done is not None and (last_done := choose_last_step(plan, steps_done)) is not None:
            query.setdefault("last_step", last_done)
        served, unserved = find_serving_steps(plan, DocumentQuery(**query), world_size)
    label = make_data_label(plan)
    values = {"fingerprint": plan.fingerprint, "step": steps_done, **label, "showings": served, "unserved": unserved}
    until = f" up to step {query['last_step']:,}" if "last_step" in query else ""
    lines = [
        f"{format_count(len(served), 'sequence')}{until} of plan {plan.fingerprint}{format_marks(label)}",
        *("  " + _format_served_sequence(sequence, world_size, steps_done) for sequence in served),
        *(f"  {missing.source} document {missing.document:,}: {missing.reason}." for missing in unserved),
    ]
    report(values, lines, as_json=as_json)


def _format_served_sequence(sequence: ServedSequence, world_size: int | None, steps_done: int | None) -> str:
    ranks = f", rank {sequence.rank}" if world_size else ""
    past = "" if steps_done is None else (" (past)" if sequence.step < steps_done else " (to come)")
    fate = ""
    if sequence.banned:
        fate = ", banned: served as padding"
    elif sequence.removed:
        fate = ", removed: served as end tokens without loss since then"
    return (
        f"step {sequence.step:,}{past}, row {sequence.row}{ranks}: {sequence.source} document {sequence.document:,}, "
        f"epoch {sequence.epoch}{fate}"
    )
