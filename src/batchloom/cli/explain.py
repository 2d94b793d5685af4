"""``batchloom explain`` and ``batchloom when``."""

import dataclasses
import json
from collections.abc import Callable
from typing import Annotated

import typer

import batchloom
from batchloom.analysis import ExplainedSequence, ExplainedSpan, ServedSequence, find_serving_steps
from batchloom.analysis.plan_questions import PlanRequest, is_endless, make_data_label, resolve_plan
from batchloom.cli.terminal import plain_console, plan_options as order
from batchloom.core.wording import escape_unprintable, format_count


def explain(
    store: order.StorePath = None,
    *,
    step: Annotated[int, typer.Option(help="The step, from 0.")],
    rank: Annotated[
        int | None, typer.Option(help="Only the rows of this rank of --world-size.")
    ] = None,
    row: Annotated[
        int | None, typer.Option(help="Only this row: of the rank's batch, or of the step.")
    ] = None,
    text: Annotated[
        int, typer.Option(help="Characters of each span's text at the most; 0 for none.")
    ] = 80,
    world_size: order.WorldSize = None,
    mixture: order.MixtureText = None,
    checkpoint: order.CheckpointPath = None,
    split: order.Split = "train",
    generation: order.Generation = None,
    seq_len: order.SeqLen = None,
    global_batch_size: order.BatchSize = None,
    packing: order.Packing = None,
    overlong: order.Overlong = None,
    seed: order.Seed = None,
    shuffle: order.Shuffle = None,
    epochs: order.Epochs = None,
    steps: order.Steps = None,
    last: order.Last = None,
    pool_size: order.PoolSize = None,
    block: order.Block = None,
    lanes: order.Lanes = None,
    align: order.Align = None,
    group_by_length: order.GroupByLength = None,
    as_json: order.AsJson = False,
) -> None:
    """Show what a step holds: each sequence's documents, where they came from, and how they begin."""
    asked = PlanRequest(
        store=store,
        mixture=mixture,
        checkpoint=checkpoint,
        split=split,
        generation=generation,
        settings=order.select_plan_settings(locals()),
    )
    with order.log_to_stderr():
        plan, _ = resolve_plan(asked)
        found = batchloom.explain(plan, step, rank=rank, world_size=world_size, row=row, text=text)
    if as_json:
        plain = [dataclasses.asdict(sequence) for sequence in found]
        about = {"step": step, "fingerprint": plan.fingerprint, **make_data_label(plan)}
        print(json.dumps({**about, "sequences": plain}, ensure_ascii=False))
        return
    console, mark = plain_console(), "".join(f"  {k}={v}" for k, v in make_data_label(plan).items())
    console.print(f"step {step:,} of plan {plan.fingerprint}{mark}")
    for sequence in found:
        _print_sequence(console.print, sequence, world_size)


def _print_sequence(
    say: Callable[[str], None], one: ExplainedSequence, world_size: int | None
) -> None:
    ranks = f", rank {one.rank} row {one.rank_row}" if world_size else ""
    held = format_count(len(one.spans), "span") if one.spans else "empty: past the end of the run"
    say(f"row {one.row}{ranks}, position {one.position:,}: {held}, padding {one.padding:,}")
    for span in one.spans:
        say("  " + _format_span(span))


def _format_span(span: ExplainedSpan) -> str:
    part = (
        f"all {span.document_tokens:,} tokens"
        if span.stop - span.start == span.document_tokens
        else f"tokens {span.start:,}-{span.stop:,} of {span.document_tokens:,}"
    )
    facts = [f"{escape_unprintable(span.source)} document {span.document:,}", part]
    if span.banned:
        facts.append("banned: served as padding")
    elif span.removed:
        facts.append("removed: served as end tokens without loss")
    elif span.trained < span.stop - span.start - 1:
        facts.append(f"{span.trained:,} trained")
    if span.origin is not None:
        where = span.origin.line or span.origin.record
        unit = "line" if span.origin.line else "record"
        facts.append(
            f"{escape_unprintable(span.origin.source)} {unit} {where:,} (byte {span.origin.offset:,})"
        )
    facts += [
        f"{one.kind} {escape_unprintable(one.path) or 'of the record'} ({one.stop - one.start:,} tokens)"
        for one in span.media
    ]
    begins = f": {span.text!r}" if span.text else ""
    return ", ".join(facts) + begins


def when(
    store: order.StorePath = None,
    *,
    document: Annotated[int | None, typer.Option(help="Number of a document in its store.")] = None,
    source: Annotated[
        str | None,
        typer.Option(help="Of a mixture one of its sources; else an input (file or data set)."),
    ] = None,
    record: Annotated[
        int | None, typer.Option(help="Number of a record in its file, from 0.")
    ] = None,
    file: Annotated[
        str | None, typer.Option(help="The input file, where the source has several.")
    ] = None,
    last_step: Annotated[
        int | None, typer.Option(help="The last step of interest; the run's last by default.")
    ] = None,
    world_size: order.WorldSize = None,
    mixture: order.MixtureText = None,
    checkpoint: order.CheckpointPath = None,
    split: order.Split = "train",
    generation: order.Generation = None,
    seq_len: order.SeqLen = None,
    global_batch_size: order.BatchSize = None,
    packing: order.Packing = None,
    overlong: order.Overlong = None,
    seed: order.Seed = None,
    shuffle: order.Shuffle = None,
    epochs: order.Epochs = None,
    steps: order.Steps = None,
    last: order.Last = None,
    pool_size: order.PoolSize = None,
    block: order.Block = None,
    lanes: order.Lanes = None,
    align: order.Align = None,
    group_by_length: order.GroupByLength = None,
    as_json: order.AsJson = False,
) -> None:
    """Show every step and row in which a document is served, past and future."""
    asked = PlanRequest(
        store=store,
        mixture=mixture,
        checkpoint=checkpoint,
        split=split,
        generation=generation,
        settings=order.select_plan_settings(locals()),
    )
    with order.log_to_stderr():
        plan, found = resolve_plan(asked)
        done = plan.orders.course.step_at(int(found.state["position"]))[0] if found else None
        if last_step is None and done is not None and is_endless(plan):
            last_step = max(done - 1, 0)
        showings, unserved = find_serving_steps(
            plan,
            document=document,
            source=source,
            record=record,
            file=file,
            last_step=last_step,
            world_size=world_size,
        )
    if as_json:
        about = {"fingerprint": plan.fingerprint, "step": done, **make_data_label(plan)}
        told = {
            "showings": [dataclasses.asdict(one) for one in showings],
            "unserved": [dataclasses.asdict(one) for one in unserved],
        }
        print(json.dumps({**about, **told}, ensure_ascii=False))
        return
    mark = "".join(f"  {k}={v}" for k, v in make_data_label(plan).items())
    until = f" up to step {last_step:,}" if last_step is not None else ""
    console = plain_console()
    console.print(
        f"{format_count(len(showings), 'sequence')}{until} of plan {plan.fingerprint}{mark}"
    )
    for one in showings:
        console.print("  " + _format_served_sequence(one, world_size, done))
    for gone in unserved:
        console.print(
            f"  {escape_unprintable(gone.source)} document {gone.document:,}: {escape_unprintable(gone.reason)}."
        )


def _format_served_sequence(one: ServedSequence, world_size: int | None, done: int | None) -> str:
    ranks = f", rank {one.rank}" if world_size else ""
    past = "" if done is None else (" (past)" if one.step < done else " (to come)")
    ban = ", banned: served as padding" if one.banned else ""
    return (
        f"step {one.step:,}{past}, row {one.row}{ranks}: {escape_unprintable(one.source)} document {one.document:,}, "
        f"epoch {one.epoch}{ban}"
    )
