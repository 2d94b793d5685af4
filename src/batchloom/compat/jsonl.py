"""``load_jsonl_file``: the records of a file of JSON lines as dictionaries."""

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from batchloom.sources import PartReader, ReadRules, SourcePart, list_sources, make_bad_record_error

_RULES = ReadRules(text_field=None)


def load_jsonl_file(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All records of a file as a list; see :func:`iter_jsonl_file`, which needs no memory for them."""
    return list(iter_jsonl_file(path))


def iter_jsonl_file(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The records of a file one after the other, every value as it is found; blank lines are none.

    A JSON list, a CSV file and a table are read too, and whatever these are packed in. A file whose
    name and content do not say what it is counts as JSON lines.

    Args:
        path: the file, or a URL of one.

    Raises:
        InputMissingError: there is no such file (``JSONL file not found``), or it is empty.
        InvalidJsonError: a line is no JSON; it is named with file, line and column.
        RecordError: a line is JSON and no object.
        InputError: a ``.json`` file holds no list of objects.
    """
    for source in list_sources([os.fspath(path)]).sources:
        if source.kind in ("text", "code"):
            source = replace(source, kind="jsonl")  # noqa: PLW2901 - the same source, read otherwise
        with PartReader(SourcePart(source, 0, source.size), _RULES) as reader:
            for records in reader:
                bad = records.bad[0] if records.bad else None
                for row, number in zip(records.values, records.records, strict=True):
                    if bad is None or number < bad.record:
                        yield row
                if bad is not None:
                    raise make_bad_record_error(source, _RULES, 0, bad)
            reader.finish()
