"""Lines of a quarantine file, and the reasons that most bad records share."""

import re
from collections.abc import Mapping

import msgspec

from batchloom.core.document import BadRecord
from batchloom.sources import ReadRules, locate_record
from batchloom.sources.files import Source

# Bad records by kind of reason: their number, and the reason of the first.
ReasonCounts = dict[str, tuple[int, str]]
# Kinds that are counted; an input of more kinds has no cause that most of its records share.
_MAX_REASONS = 32
# Values of single records in a reason: numbers and quoted texts.
_VALUE_PATTERN = re.compile(r"\d[\d,]*|'[^']*'")


def count_reason(reasons: ReasonCounts, reason: str, count: int = 1) -> None:
    """Count bad records under their reason, without the values that differ from record to record."""
    kind = _VALUE_PATTERN.sub("0", reason)
    if kind in reasons or len(reasons) < _MAX_REASONS:
        previous_count, first = reasons.get(kind, (0, reason))
        reasons[kind] = previous_count + count, first


def describe_bad_records(bad: float, records: int, reasons: Mapping[str, tuple[int, str]], first: str = "") -> str:
    """Return what to do about too many bad records.

    Args:
        bad: bad records.
        records: all records.
        reasons: bad records by kind of reason, as far as they were counted.
        first: the sentence about the first bad record, where the reader has it in front of them.
    """
    if 20 * bad <= records:
        return "mend the input, or raise the budget, for example --max-bad 5%"
    count, reason = max(reasons.values(), default=(0, ""), key=lambda one: one[0])
    if not reason:
        return "mend the input: a budget is for single records"
    is_first_fault = _VALUE_PATTERN.sub("0", reason) in _VALUE_PATTERN.sub("0", first)
    fault = "this fault" if is_first_fault else "the commonest fault"
    reason_suffix = "" if is_first_fault else f" ({reason})"
    return f"mend {fault}, which {count:,} of them have{reason_suffix}; a budget is for single records"


def encode_quarantine_line(source: Source, rules: ReadRules, before: int, bad: BadRecord) -> bytes:
    """One JSON object and a newline, with the names and lines a person looks for.

    Args:
        source: holds the record.
        rules: how it is read.
        before: records of the source before the part.
        bad: the record.
    """
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
