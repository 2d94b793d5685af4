"""Lines of a quarantine file, and the reasons shared by most bad records."""

import re
from collections.abc import Mapping

import msgspec

from batchloom.core.document import BadRecord
from batchloom.sources import ReadRules, locate_record
from batchloom.sources.files import Source

# Kind of reason to (number of bad records, reason of the first one).
ReasonCounts = dict[str, tuple[int, str]]
# Maximum number of counted kinds; an input with more has no common cause.
_MAX_REASONS = 32
# Values of single records inside a reason: numbers and quoted texts.
_VALUE_PATTERN = re.compile(r"\d[\d,]*|'[^']*'")


def count_reason(reasons: ReasonCounts, reason: str, count: int = 1) -> None:
    """Count bad records by reason, ignoring values that differ between records."""
    kind = _VALUE_PATTERN.sub("0", reason)
    if kind in reasons or len(reasons) < _MAX_REASONS:
        previous_count, first = reasons.get(kind, (0, reason))
        reasons[kind] = previous_count + count, first


def describe_bad_records(bad: float, records: int, reasons: Mapping[str, tuple[int, str]], first: str = "") -> str:
    """Return what to do about too many bad records.

    Args:
        bad: number of bad records.
        records: number of all records.
        reasons: bad records by kind of reason, as far as counted.
        first: description of the first bad record, if the user has just read it.
    """
    if 20 * bad <= records:
        return "fix the input, or raise the budget, for example --max-bad 5%"
    count, reason = max(reasons.values(), default=(0, ""), key=lambda one: one[0])
    if not reason:
        return "fix the input: a budget is for single records"
    is_first_fault = _VALUE_PATTERN.sub("0", reason) in _VALUE_PATTERN.sub("0", first)
    fault = "this fault" if is_first_fault else "the most common fault"
    reason_suffix = "" if is_first_fault else f" ({reason})"
    return f"fix {fault}, which {count:,} of them have{reason_suffix}; a budget is for single records"


def encode_quarantine_line(source: Source, rules: ReadRules, before: int, bad: BadRecord) -> bytes:
    """Return a JSON line of a bad record after ``before`` records of other parts."""
    line, row = locate_record(source, rules, before, bad)
    facts = {
        "source": source.name,
        "line": line,
        "row": row,
        "column": bad.column,
        "offset": bad.offset,
        "reason": bad.reason,
        "snippet": bad.snippet,
    }
    return msgspec.json.encode(facts) + b"\n"
