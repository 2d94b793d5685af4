"""``load_jsonl_file``: the records of a JSON Lines file as dictionaries."""

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from batchloom.sources import PartReader, ReadRules, SourcePart, list_sources, make_bad_record_error

_RULES = ReadRules(text_field=None)


def load_jsonl_file(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return all records of a file as a list; :func:`iter_jsonl_file` needs no memory."""
    return list(iter_jsonl_file(path))


def iter_jsonl_file(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Yield the records of a file with unchanged values; blank lines are skipped.

    JSON lists, CSV files and tables are read too, also compressed or in archives. A file of
    unknown name and content counts as JSON Lines.

    Args:
        path: path or URL of the file.

    Raises:
        InputMissingError: the file does not exist (``JSONL file not found``), or is empty.
        InvalidJsonError: a line is not JSON; the error names file, line and column.
        RecordError: a line is JSON but not an object.
        InputError: a ``.json`` file is not a list of objects.
    """
    for source in list_sources([os.fspath(path)]).sources:
        if source.kind in ("text", "code"):
            source = replace(source, kind="jsonl")  # noqa: PLW2901 - the same source with another kind
        with PartReader(SourcePart(source, 0, source.size), _RULES) as reader:
            for records in reader:
                bad = records.bad[0] if records.bad else None
                for row, number in zip(records.values, records.records, strict=True):
                    if bad is None or number < bad.record:
                        yield row
                if bad is not None:
                    raise make_bad_record_error(source, _RULES, 0, bad)
            reader.finish()
