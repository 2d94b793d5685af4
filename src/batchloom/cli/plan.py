"""``batchloom plan``."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from batchloom.analysis import (
    JournalEntry,
    MixingMeasure,
    PlanForecast,
    PlanRequest,
    SourceForecast,
    adopt_tables,
    forecast_plan,
    make_data_label,
    make_journal_entry,
    read_checkpoint,
    read_journal,
    resolve_plan,
    write_tables,
)
from batchloom.cli.options import AsJson, Option, StorePath, WorldSize, with_settings
from batchloom.cli.terminal import format_marks, print_log, report
from batchloom.core.errors import SettingsError
from batchloom.core.wording import format_count, format_list, format_size

# Maximum number of share changes to print, and of sources in each.
_MAX_LISTED = 6


@with_settings(PlanRequest)
def plan(
    store: StorePath = None,
    *,
    journal: Annotated[
        Path | None,
        Option(
            help="Show the edits in the journal of this run or checkpoint; needs no store.",
        ),
    ] = None,
    assume: Annotated[
        str | None,
        Option(
            help="Sources that do not exist: '15T tokens, 12B documents' or 'web=10T tokens/8B documents, code=...'.",
        ),
    ] = None,
    write: Annotated[
        bool,
        Option("--write", help="Count the sequences of every pool, and cache the tables."),
    ] = False,
    tokens_per_second: Annotated[
        float | None, Option(help="Throughput of all ranks together, for the hours of the run.")
    ] = None,
    world_size: WorldSize = None,
    settings: dict[str, Any],
    as_json: AsJson = False,
) -> None:
    """Forecast a run: steps, epochs, padding, mixture, hours."""
    if journal is not None:
        _print_journal(journal, as_json=as_json)
        return
    request = PlanRequest(store=store, assume=assume, **settings)
    if write and assume is not None:
        raise SettingsError(["write: there is no store to keep tables of; leave --assume or --write out"])
    with print_log():
        resolved_plan, _ = resolve_plan(request)
        table_files = write_tables(resolved_plan) if write else ()
        adopt_tables(resolved_plan)
        forecast = forecast_plan(
            resolved_plan,
            tokens_per_second=tokens_per_second,
            world_size=1 if world_size is None else world_size,
        )
    label = make_data_label(resolved_plan)
    edits = [make_journal_entry(edit) for edit in resolved_plan.journal]
    values = {**dataclasses.asdict(forecast), "edits": edits, **label, "written": table_files}
    lines = [line + format_marks(label) for line in _iter_forecast_lines(forecast, edits)]
    report(values, [*lines, *(f"written: {path}" for path in table_files)], as_json=as_json)


def _iter_forecast_lines(forecast: PlanForecast, edits: list[JournalEntry]) -> Iterator[str]:
    about = "" if forecast.exact else "about "
    near = "" if forecast.exact_tokens else "about "
    yield f"plan {forecast.fingerprint}"
    yield (
        f"{about}{forecast.steps:,} steps of {forecast.global_batch_size:,} sequences of {forecast.seq_len:,} tokens: "
        f"{about}{forecast.sequences:,} sequences, {near}{forecast.tokens:,} tokens"
    )
    if forecast.empty:
        yield f"{about}{format_count(forecast.empty, 'sequence')} without loss fill the last step"
    if forecast.skipped:
        yield f"edits leave out {format_count(forecast.skipped, 'sequence')}"
    yield (
        f"padding: {near}{forecast.padding:.3%} of the run's token slots; lower bound for whole documents: "
        f"{about}{forecast.least_padding:.3%}"
    )
    if forecast.cut_padding is not None:
        yield (
            f"padding where each step is cut to its longest row: {forecast.cut_padding:.3%} of its token "
            "slots, in the first window of --group-by-length"
        )
    by_rank = f", {format_size(forecast.rank_bytes)} by each of {forecast.world_size:,} ranks"
    yield f"token ids read: {near}{format_size(forecast.bytes)}{by_rank if forecast.world_size > 1 else ''}"
    if forecast.hours is not None:
        yield f"{about}{forecast.hours:,.2f} hours, padding included"
    yield from _format_shares(forecast)
    yield from (f"edit {entry}" for entry in edits)
    for source in forecast.sources:
        yield from _format_source_lines(source, forecast)
    if not forecast.exact:
        remedy = "" if forecast.assumed else "; batchloom plan --write counts all of them, once"
        yield f"about: from a sample of the pools{remedy}"


def _format_source_lines(source: SourceForecast, forecast: PlanForecast) -> list[str]:
    name = source.name + (" (assumed)" if source.assumed else "")
    near = "" if forecast.exact_tokens else "about "
    served = f"{near}{source.tokens_served:,} tokens served, {source.share:.3%} of the run"
    size_text = f"{source.documents:,} documents, {source.tokens:,} tokens"
    lines = [f"{name}: {size_text}; {source.epochs:,.3f} epochs, {served}"]
    if source.weight == 0:
        lines.append(f"{name}: no weight at the beginning")
    elif source.weight is not None and source.effective is not None:
        error = f", {source.error:+.4%} of itself" if source.error is not None else ""
        lines.append(f"{name}: weight {source.weight:.4%}, effective {source.effective:.4%}{error}")
    if source.split:
        lines.append(f"{name}: {near}{source.split:,} documents of an epoch are cut")
    if source.dropped or source.lost:
        lines.append(
            f"{name}: {near}{source.dropped:,} documents of an epoch are too long; {source.lost:,} tokens are left out"
        )
    if source.exhausted is not None:
        lines.append(f"{name}: exhausted after {format_count(source.exhausted, 'step')}")
    elif source.through is not None and source.through < forecast.steps - 1:
        steps_text = format_count(source.through + 1, "step")
        lines.append(f"{name}: passed through once after {steps_text}, and begins again")
    if source.mixing is not None:
        lines.append(_format_mixing(name, source.mixing))
    return lines


def _format_shares(forecast: PlanForecast) -> list[str]:
    lines = []
    for effective_shares in forecast.shares[:_MAX_LISTED]:
        largest = sorted(effective_shares.shares, key=lambda name: (-effective_shares.shares[name], name))
        shares_text = format_list([f"{name} {effective_shares.shares[name]:.2%}" for name in largest], _MAX_LISTED)
        is_first = effective_shares is forecast.shares[0]
        since = "" if is_first else f", after {format_count(effective_shares.step, 'step')}"
        lines.append(f"shares: {shares_text} of the sequences{since}")
    if len(forecast.shares) > _MAX_LISTED:
        later = len(forecast.shares) - _MAX_LISTED
        lines.append(f"shares: {later:,} later changes are not shown; --json has them")
    return lines


def _format_mixing(name: str, mixing: MixingMeasure) -> str:
    moved = f"in blocks of {mixing.block:,}" if mixing.block > 1 else "one at a time"
    step_text = f"about {mixing.documents:,.0f} documents from {mixing.blocks:,.0f} blocks of the store"
    if mixing.documents < 1:
        step_text = "less than 1 document"
    return (
        f"{name}: shuffle moves documents {moved} within pools of {mixing.pool:,}; two neighbors of the store end up "
        f"about {mixing.apart:,.0f} sequences apart; a step draws {step_text}"
    )


def _print_journal(path: Path, *, as_json: bool) -> None:
    first, entries = read_journal(read_checkpoint(path))
    lines = [f"{entry}  -> {entry.fingerprint}" for entry in entries]
    title = f"began as {first}; {format_count(len(entries), 'edit')}"
    report({"fingerprint": first, "edits": entries}, [title, *lines], as_json=as_json)
