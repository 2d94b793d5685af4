"""A comparison in words, cells and plain values: the table, the page and the JSON file say the same."""

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
FRAMEWORK_COLUMNS = (
    *("framework", "batches", "hash", "losses", "last loss", "tokens/s", "data wait", "memory"),
)
RUN_COLUMNS = ("run", "log", "points", "at the common end", "verdict", "why")
# Of both, those that hold numbers.
NUMBER_COLUMNS = {"last loss", "tokens/s", "data wait", "points", "at the common end"}
_MAX_LISTED = 4

TableCells = tuple[str, ...]
AnyComparison = FrameworkComparison | RunComparison


def comparison_to_plain(found: AnyComparison) -> dict[str, Any]:
    """What ``compare.json`` holds, see docs/compare.md; numbers that are not finite are null."""
    kind = "frameworks" if isinstance(found, FrameworkComparison) else "runs"
    about = {
        "format": FORMAT,
        "version": VERSION,
        "kind": kind,
        "source": "synthetic" if found.synthetic else "real",
        "agree": found.agree,
    }
    if isinstance(found, RunComparison):
        # A run may not say what it was on.
        silent = any(one.curve.synthetic is None for one in found.runs)
        about["source"] = "unknown" if silent and not found.synthetic else about["source"]
    plain: dict[str, Any] = _replace_non_finite({**about, **asdict(found)})
    if isinstance(found, FrameworkComparison) and found.spec.store is not None:
        plain["spec"]["store"] = redact_url(found.spec.store)
    return plain


def _replace_non_finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _replace_non_finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_non_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def make_title(found: AnyComparison) -> str:
    """Of the table, the picture and the page."""
    if isinstance(found, FrameworkComparison):
        what = f"{format_count(found.spec.steps, 'step')}, {format_count(found.spec.processes, 'process')}"
        title = f"Frameworks compared: {what}, {found.origin}"
    else:
        title = f"{format_count(len(found.runs), 'run')} compared by {found.by}"
    return f"{make_banner(found)}. {title}" if found.synthetic else title


def make_banner(found: AnyComparison) -> str:
    """What has to be seen before all else, where data is made up; empty of real data."""
    if not found.synthetic:
        return ""
    if isinstance(found, FrameworkComparison):
        return "SYNTHETIC DATA: a throughput run on made-up tokens, which says nothing of training"
    made_up = sum(bool(one.curve.synthetic) for one in found.runs)
    runs = format_count(len(found.runs), "run")
    return f"SYNTHETIC DATA in {made_up:,} of {runs}: such losses say nothing of training"


def list_columns(found: AnyComparison) -> TableCells:
    """The heads of the table."""
    return FRAMEWORK_COLUMNS if isinstance(found, FrameworkComparison) else RUN_COLUMNS


def make_table_rows(found: AnyComparison) -> list[TableCells]:
    """The cells of the table."""
    if isinstance(found, FrameworkComparison):
        return [_make_framework_row(found, one) for one in found.outcomes if one.state == "ran"]
    return [_make_run_row(one) for one in found.runs]


def _make_framework_row(found: FrameworkComparison, one: FrameworkResult) -> TableCells:
    batches = found.spec.steps * found.spec.processes
    equal = f"{batches:,} equal" if not one.differing else f"{len(one.differing):,} differ"
    loss = "the reference" if one.name == found.reference else "agree"
    if one.loss_difference is not None:
        loss = f"differ from step {one.loss_difference.step:,}"
    return (
        one.name,
        equal,
        one.digest,
        loss,
        f"{one.losses[-1]:.4f}" if one.losses else "-",
        f"{one.speed.tokens_per_s:,.0f}" if one.speed else "-",
        f"{one.speed.data_wait:.2%}" if one.speed else "-",
        ", ".join(
            f"{format_size(size)} {name}" for name, size in sorted(one.memory.items(), reverse=True)
        ),
    )


def _make_run_row(one: ComparedRun) -> TableCells:
    verdict = one.verdict
    made_up = " (synthetic data)" if one.curve.synthetic else ""
    return (
        one.curve.name,
        one.curve.kind + made_up,
        f"{verdict.points:,}",
        "begins later" if one.at_common is None else f"{one.at_common:.4f}",
        verdict.kind,
        verdict.reason,
    )


def describe_comparison(found: AnyComparison) -> list[str]:
    """What differs, failed or is missing, a sentence or more each; and what is behind the numbers."""
    if isinstance(found, RunComparison):
        first = found.runs[0].curve.name
        compared = found.tolerance is not None
        strangers = [one.curve.name for one in found.runs if compared and not one.common]
        return [
            f"{name}: it has no step in common with {first}, so nothing was compared."
            for name in strangers
        ] + [
            f"{one.curve.name}: its loss at step {one.first_apart:,} is more than {found.tolerance:g} (relative) from "
            f"that of {first} ({format_count(one.common, 'step')} in common)."
            for one in found.runs
            if one.first_apart is not None
        ]
    return [said for one in found.outcomes for said in _describe_framework(found, one)]


def _describe_framework(found: FrameworkComparison, one: FrameworkResult) -> list[str]:
    if one.state != "ran":
        return [f"{one.name} {'is missing' if one.state == 'missing' else 'FAILED'}: {one.problem}"]
    said = []
    if one.difference is not None:
        batches = found.spec.steps * found.spec.processes
        counts = f"{len(one.differing):,} of {batches:,} batches are not the plan's"
        said.append(f"{one.name}: {counts}. {_describe_difference(one.difference)}")
    apart = one.loss_difference
    if apart is not None:
        loss = "none was told" if apart.loss is None else f"{apart.loss:.6f}"
        said.append(
            f"{one.name}: losses differ from step {apart.step:,}: {loss}, and {found.reference} has "
            f"{apart.reference:.6f}; {found.spec.tolerance:g} (relative) is allowed."
        )
    return said


def _describe_difference(one: BatchDifference) -> str:
    said = f"The first is step {one.step:,} on rank {one.rank}: {one.sentence}."
    if one.planned:
        said += f" The plan has there: {format_sequences(one.planned)}."
    if one.came:
        said += f" What came is, of the plan: {format_sequences(one.came)}."
    return said


def format_sequences(told: Sequence[ExplainedSequence]) -> str:
    """The documents of sequences in a few words."""
    return "; ".join(
        f"row {one.rank_row} of step {one.step:,}: {_format_spans(one) or 'nothing but padding'}"
        for one in told
    )


def _format_spans(one: ExplainedSequence) -> str:
    said = []
    for span in one.spans[:_MAX_LISTED]:
        line = ""
        if span.origin is not None:
            where = span.origin.line or span.origin.record
            line = f" ({span.origin.source}, {'line' if span.origin.line else 'record'} {where:,})"
        begins = f" {span.text!r}" if span.text else ""
        said.append(f"document {span.document:,} tokens {span.start:,}-{span.stop:,}{line}{begins}")
    more = len(one.spans) - _MAX_LISTED
    return ", ".join(said) + (f", and {format_count(more, 'document')} more" if more > 0 else "")


def describe_verdict(found: AnyComparison) -> str:
    """The last line: what it comes to."""
    if isinstance(found, RunComparison):
        kinds = [one.verdict.kind for one in found.runs]
        return ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    ran = [one for one in found.outcomes if one.state != "missing"]
    wrong = [one.name for one in ran if not one.agrees]
    if wrong:
        frameworks = format_count(len(ran), "framework")
        return f"{len(wrong)} of {frameworks} not as the plan and the others: {', '.join(wrong)}"
    every = "every batch of every rank is the plan's"
    if len(ran) == 1:
        return f"{every}; one framework alone, its losses are compared with nothing"
    return f"all {len(ran)} agree: {every}, and losses agree within {found.spec.tolerance:g}"
