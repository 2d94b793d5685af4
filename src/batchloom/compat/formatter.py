"""Formatters of scripts: functions or names that turn a record into training text."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from batchloom.chat import detect_schema, make_record_reader
from batchloom.core.errors import UnusableRecordError
from batchloom.core.wording import describe_json_type
from batchloom.preparation import ChatRecipe
from batchloom.preparation.conversion import coerce_row
from batchloom.preparation.documents import RecordParser, make_record_parser, read_sample_rows
from batchloom.sources import ReadRules
from batchloom.sources.files import Source

Row = dict[str, Any]
Formatter = Callable[[Row], Any]

# Common schema names of scripts, and the columns that they mean.
SCHEMAS: dict[str, dict[str, str]] = {
    "text": {"text": "text"},
    "messages": {"messages": "messages"},
    "sharegpt": {"messages": "conversations"},
    "instruction": {"prompt": "instruction", "response": "output"},
    "prompt-completion": {"prompt": "prompt", "completion": "completion"},
}
_RULES = ReadRules(text_field=None)


@dataclass(frozen=True, slots=True)
class Formatted:
    """Formatter as a record parser and a chat template.

    Attributes:
        template: name of the chat template; None for the tokenizer's own.
        mapping: columns by role.
        call: function that converts a record to messages, a text, or another record.
    """

    template: str | None = None
    mapping: Mapping[str, str] | None = None
    call: Formatter | None = None

    def make_parser(self, source: Source) -> RecordParser:
        """Make the parser for the records of a source."""
        rows = [coerce_row(row) for row in read_sample_rows(source, _RULES)[0]]
        call = self.call
        chat, mapping = ChatRecipe(template=self.template), dict(self.mapping or {})
        if call is None:
            if source.kind in ("text", "code"):
                return RecordParser(_RULES)
            return make_record_parser(source, rows, _RULES, detect_schema(rows, mapping), chat)
        formatted_rows = _format_sample(call, rows)
        schema = detect_schema(formatted_rows, mapping)
        parser = make_record_parser(source, formatted_rows, _RULES, schema, chat)
        read_record = make_record_reader(schema)
        return replace(
            parser,
            rules=_RULES,
            record_reader=lambda row: read_record(_as_record(call(coerce_row(row)))),
        )


def formatted(formatter: str | Formatter | None) -> Formatted:
    """Interpret a script's formatter.

    Args:
        formatter: a function of a record that returns messages, a text or another record; the
            name of a schema or of a template, or the path of a template; None to detect the schema.
    """
    if formatter is None:
        return Formatted()
    if not isinstance(formatter, str):
        return Formatted(call=formatter)
    name = formatter.replace("_", "-")
    if name in SCHEMAS:
        return Formatted(mapping=SCHEMAS[name])
    return Formatted(template=formatter)


def _format_sample(call: Formatter, rows: Sequence[Row]) -> list[Row]:
    """Format the first records; records that fail are reported when they are read."""
    formatted_rows = []
    for row in rows:
        with suppress(UnusableRecordError):
            formatted_rows.append(_as_record(call(row)))
    return formatted_rows or [_as_record(call(row)) for row in rows[:1]]


def _as_record(value: Any) -> Row:
    """Convert a formatter's result to a record."""
    if isinstance(value, str):
        return {"text": value}
    if isinstance(value, list):
        return {"messages": value}
    if isinstance(value, dict):
        return value
    raise UnusableRecordError(
        f"the formatter returned {describe_json_type(value)} for it: return a text, a list of messages, or a record"
    )
