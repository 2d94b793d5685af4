"""Text, table cells and plain values of a comparison, shared by all outputs."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from batchloom.analysis.compare.batch_difference import BatchDifference
from batchloom.analysis.compare.comparison import FrameworkComparison, FrameworkResult
from batchloom.analysis.compare.run_comparison import ComparedRun, RunComparison
from batchloom.analysis.explanation import ExplainedSequence
from batchloom.core.addresses import redact_url
from batchloom.core.wording import format_count, format_size

FORMAT, VERSION = "batchloom-compare", 1
FRAMEWORK_COLUMNS = (*("framework", "batches", "hash", "losses", "last loss", "tokens/s", "data wait", "memory"),)
RUN_COLUMNS = ("run", "log", "points", "at the common end", "verdict", "why")
# Columns of both tables that hold numbers.
NUMBER_COLUMNS = {"last loss", "tokens/s", "data wait", "points", "at the common end"}
_MAX_LISTED = 4

TableCells = tuple[str, ...]
AnyComparison = FrameworkComparison | RunComparison


def comparison_to_plain(comparison: AnyComparison) -> dict[str, Any]:
    """Return the content of ``compare.json``, see docs/compare.md.

    Numbers that are not finite become null.
    """
    kind = "frameworks" if isinstance(comparison, FrameworkComparison) else "runs"
    header = {
        "format": FORMAT,
        "version": VERSION,
        "kind": kind,
        "source": "synthetic" if comparison.synthetic else "real",
        "agree": comparison.agree,
    }
    if isinstance(comparison, RunComparison):
        # A run may not record whether its data was real.
        has_unknown_source = any(run.curve.synthetic is None for run in comparison.runs)
        header["source"] = "unknown" if has_unknown_source and not comparison.synthetic else header["source"]
    plain: dict[str, Any] = _replace_non_finite({**header, **asdict(comparison)})
    if isinstance(comparison, FrameworkComparison) and comparison.spec.store is not None:
        plain["spec"]["store"] = redact_url(comparison.spec.store)
    return plain


def _replace_non_finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _replace_non_finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_non_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def make_title(comparison: AnyComparison) -> str:
    """Return the title of the table, the picture and the page."""
    if isinstance(comparison, FrameworkComparison):
        run_size = (
            f"{format_count(comparison.spec.steps, 'step')}, {format_count(comparison.spec.processes, 'process')}"
        )
        title = f"Frameworks compared: {run_size}, {comparison.origin}"
    else:
        title = f"{format_count(len(comparison.runs), 'run')} compared by {comparison.by}"
    return f"{make_banner(comparison)}. {title}" if comparison.synthetic else title


def make_banner(comparison: AnyComparison) -> str:
    """Return the warning shown first for synthetic data; empty for real data."""
    if not comparison.synthetic:
        return ""
    if isinstance(comparison, FrameworkComparison):
        return "SYNTHETIC DATA: a throughput run on generated tokens, which says nothing about training"
    made_up = sum(bool(run.curve.synthetic) for run in comparison.runs)
    runs = format_count(len(comparison.runs), "run")
    return f"SYNTHETIC DATA in {made_up:,} of {runs}: such losses say nothing about training"


def list_columns(comparison: AnyComparison) -> TableCells:
    return FRAMEWORK_COLUMNS if isinstance(comparison, FrameworkComparison) else RUN_COLUMNS


def make_table_rows(comparison: AnyComparison) -> list[TableCells]:
    if isinstance(comparison, FrameworkComparison):
        return [_make_framework_row(comparison, outcome) for outcome in comparison.outcomes if outcome.state == "ran"]
    return [_make_run_row(run) for run in comparison.runs]


def _make_framework_row(comparison: FrameworkComparison, outcome: FrameworkResult) -> TableCells:
    batches = comparison.spec.steps * comparison.spec.processes
    equal = f"{batches:,} equal" if not outcome.differing else f"{len(outcome.differing):,} differ"
    loss = "the reference" if outcome.name == comparison.reference else "agree"
    if outcome.loss_difference is not None:
        loss = f"differ from step {outcome.loss_difference.step:,}"
    return (
        outcome.name,
        equal,
        outcome.digest,
        loss,
        f"{outcome.losses[-1]:.4f}" if outcome.losses else "-",
        f"{outcome.speed.tokens_per_s:,.0f}" if outcome.speed else "-",
        f"{outcome.speed.data_wait:.2%}" if outcome.speed else "-",
        ", ".join(f"{format_size(size)} {name}" for name, size in sorted(outcome.memory.items(), reverse=True)),
    )


def _make_run_row(run: ComparedRun) -> TableCells:
    verdict = run.verdict
    made_up = " (synthetic data)" if run.curve.synthetic else ""
    return (
        run.curve.name,
        run.curve.kind + made_up,
        f"{verdict.points:,}",
        "begins later" if run.at_common is None else f"{run.at_common:.4f}",
        verdict.kind,
        verdict.reason,
    )


def describe_comparison(comparison: AnyComparison) -> list[str]:
    """Return sentences on frameworks or runs that differ, failed or are missing."""
    if isinstance(comparison, RunComparison):
        first = comparison.runs[0].curve.name
        compared = comparison.tolerance is not None
        unmatched_names = [run.curve.name for run in comparison.runs if compared and not run.common]
        return [
            f"{name}: it has no step in common with {first}, so nothing was compared." for name in unmatched_names
        ] + [
            f"{run.curve.name}: its loss at step {run.first_apart:,} is more than {comparison.tolerance:g} "
            "(relative) from "
            f"that of {first} ({format_count(run.common, 'step')} in common)."
            for run in comparison.runs
            if run.first_apart is not None
        ]
    return [sentence for outcome in comparison.outcomes for sentence in _describe_framework(comparison, outcome)]


def _describe_framework(comparison: FrameworkComparison, outcome: FrameworkResult) -> list[str]:
    if outcome.state != "ran":
        return [f"{outcome.name} {'is missing' if outcome.state == 'missing' else 'FAILED'}: {outcome.problem}"]
    sentences = []
    if outcome.difference is not None:
        batches = comparison.spec.steps * comparison.spec.processes
        counts = f"{len(outcome.differing):,} of {batches:,} batches are not the plan's"
        sentences.append(f"{outcome.name}: {counts}. {_describe_difference(outcome.difference)}")
    loss_difference = outcome.loss_difference
    if loss_difference is not None:
        loss = "no loss was recorded" if loss_difference.loss is None else f"{loss_difference.loss:.6f}"
        sentences.append(
            f"{outcome.name}: losses differ from step {loss_difference.step:,}: {loss}, and {comparison.reference} has "
            f"{loss_difference.reference:.6f}; {comparison.spec.tolerance:g} (relative) is allowed."
        )
    return sentences


def _describe_difference(difference: BatchDifference) -> str:
    text = f"The first is step {difference.step:,} on rank {difference.rank}: {difference.sentence}."
    if difference.planned:
        text += f" The plan has: {format_sequences(difference.planned)}."
    if difference.came:
        text += f" The received rows are, in the plan: {format_sequences(difference.came)}."
    return text


def format_sequences(sequences: Sequence[ExplainedSequence]) -> str:
    """Summarize the documents of sequences."""
    return "; ".join(
        f"row {sequence.rank_row} of step {sequence.step:,}: {_format_spans(sequence) or 'nothing but padding'}"
        for sequence in sequences
    )


def _format_spans(sequence: ExplainedSequence) -> str:
    span_texts = []
    for span in sequence.spans[:_MAX_LISTED]:
        line = ""
        if span.origin is not None:
            record_number = span.origin.line or span.origin.record
            line = f" ({span.origin.source}, {'line' if span.origin.line else 'record'} {record_number:,})"
        beginning = f" {span.text!r}" if span.text else ""
        span_texts.append(f"document {span.document:,} tokens {span.start:,}-{span.stop:,}{line}{beginning}")
    more = len(sequence.spans) - _MAX_LISTED
    return ", ".join(span_texts) + (f", and {format_count(more, 'document')} more" if more > 0 else "")


def describe_verdict(comparison: AnyComparison) -> str:
    """Return the overall verdict, for the last line."""
    if isinstance(comparison, RunComparison):
        kinds = [run.verdict.kind for run in comparison.runs]
        return ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    outcomes = [outcome for outcome in comparison.outcomes if outcome.state != "missing"]
    differing_names = [outcome.name for outcome in outcomes if not outcome.agrees]
    if differing_names:
        frameworks = format_count(len(outcomes), "framework")
        return (
            f"{len(differing_names)} of {frameworks} not equal to the plan and the others: {', '.join(differing_names)}"
        )
    every = "every batch of every rank is the plan's"
    if len(outcomes) == 1:
        return f"{every}; with only one framework, losses were not compared"
    return f"all {len(outcomes)} agree: {every}, and losses agree within {comparison.spec.tolerance:g}"
