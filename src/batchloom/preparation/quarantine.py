"""A line of a quarantine file: what could not be used, where it stands and why."""

import msgspec

from batchloom.core.document import BadRecord
from batchloom.sources.places import place_of
from batchloom.sources.rules import ReadRules, Source


def quarantine_line(source: Source, rules: ReadRules, before: int, bad: BadRecord) -> bytes:
    """One JSON object and a newline, with the names and lines a person looks for.

    Args:
        source: holds the record.
        rules: how it is read.
        before: records of the source before the part.
        bad: the record.
    """
    line, row = place_of(source, rules, before, bad)
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
