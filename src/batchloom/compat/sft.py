"""Records of files: as dictionaries, and as the rows of ``SFTDataset``."""

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, final

import numpy as np

from batchloom.batches import IGNORE_INDEX
from batchloom.chat import detect_schema, make_record_reader
from batchloom.compat.script_arguments import as_asked, check_output, tokenizer_of
from batchloom.core.document import BadRecord
from batchloom.core.errors import InputError, InputMissingError, SettingsError, UnusableRecordError
from batchloom.core.fingerprint import derive_key
from batchloom.core.loss_weights import LossFlags
from batchloom.core.settings import as_int, quote_value
from batchloom.core.wording import describe_json_type
from batchloom.plan import Permutation
from batchloom.preparation import ChatRecipe, coerce_row
from batchloom.preparation.documents import (
    DirectEncoder,
    EncodedDocuments,
    RecordParser,
    make_record_parser,
    read_sample_rows,
)
from batchloom.sources import (
    PartReader,
    ReadRules,
    SourcePart,
    find_hub_name,
    list_sources,
    make_bad_record_error,
)
from batchloom.sources.files import Source
from batchloom.sources.formats import JSON_OBJECT

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

_LOG = logging.getLogger("batchloom")


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
        if source.kind == JSON_OBJECT:
            raise InputError(f"JSON file must contain a list of objects: {source.name} holds one object.")
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


def _make_parser(formatter: str | Formatter | None, source: Source) -> RecordParser:
    """Make the parser for the records of a source, as the formatter says."""
    rows = [coerce_row(row) for row in read_sample_rows(source, _RULES)[0]]
    chat = ChatRecipe(template=_get_template(formatter))
    mapping = dict[str, str]()
    if formatter is None or isinstance(formatter, str):
        if source.kind in ("text", "code"):
            return RecordParser(_RULES)
        mapping = SCHEMAS.get((formatter or "").replace("_", "-"), {})
        return make_record_parser(source, rows, _RULES, detect_schema(rows, mapping), chat)
    formatted_rows = _format_sample(formatter, rows)
    schema = detect_schema(formatted_rows, mapping)
    parser = make_record_parser(source, formatted_rows, _RULES, schema, chat)
    read_record = make_record_reader(schema)
    return replace(
        parser,
        rules=_RULES,
        record_reader=lambda row: read_record(_as_record(formatter(coerce_row(row)))),
    )


def _get_template(formatter: str | Formatter | None) -> str | None:
    """Return the chat template that a formatter names; None for the tokenizer's own."""
    if isinstance(formatter, str) and formatter.replace("_", "-") not in SCHEMAS:
        return formatter
    return None


def _format_sample(call: Formatter, rows: Sequence[Row]) -> list[Row]:
    formatted_rows = []
    for row in rows:
        with suppress(UnusableRecordError):
            formatted_rows.append(_as_record(call(row)))
    return formatted_rows or [_as_record(call(row)) for row in rows[:1]]


def _as_record(value: Any) -> Row:
    if isinstance(value, str):
        return {"text": value}
    if isinstance(value, list):
        return {"messages": value}
    if isinstance(value, dict):
        return value
    raise UnusableRecordError(
        f"the formatter returned {describe_json_type(value)} for it: return a text, a list of messages, or a record"
    )


@final
class SFTDataset:
    """Rows of a file or of a Hub dataset, tokenized and masked in memory.

    A row is one document without padding; ``collate`` makes a batch of several. Ids and masks equal those
    that ``batchloom prepare`` stores. A row longer than ``max_seq_length`` is truncated. A row
    with nothing left to train is dropped, and the log reports their number. For data that does not
    fit into memory, for packing and for resuming, prepare a store and use ``batchloom.Loader``.

    Args:
        path_or_id: a local file or folder, else a Hub dataset (``org/name``).
        tokenizer: see :func:`batchloom.compat.script_arguments.tokenizer_of`.
        max_seq_length: maximum number of tokens of a row.
        split: split of a Hub dataset, or of a saved one; a file only has the split ``train``.
        formatter: a function of a record that returns messages, a text or another record; the
            name of a schema or of a template, or the path of a template; None to detect the schema.
        seed: seed of the row order; None for the order of the file.
        output: ``torch`` or ``numpy``.

    Attributes:
        left_out: number of dropped rows by reason.
        truncated_rows: number of truncated rows.

    Raises:
        InputMissingError, InputError, RecordError: the data cannot be read or used, or none of
            it is trained.
        TokenizerError: the tokenizer cannot be read or trusted.
        TemplateError: the template cannot be used.
    """

    def __init__(
        self,
        path_or_id: str | os.PathLike[str],
        tokenizer: Any,
        max_seq_length: int = 2048,
        split: str = "train",
        formatter: str | Formatter | None = None,
        seed: int | None = None,
        *,
        output: str = "torch",
    ) -> None:
        if (as_int(max_seq_length) or 0) < 2:
            raise SettingsError([f"max_seq_length: {quote_value(max_seq_length)} is not a number above 1"])
        check_output(output)
        self._output = output
        self._max_seq_length = max_seq_length
        resolved_tokenizer = tokenizer_of(tokenizer)
        encoder = DirectEncoder(resolved_tokenizer, partial(_make_parser, formatter), _refuse, _get_template(formatter))
        encoded = list(encoder.encode(list_sources([_format_location(path_or_id, split)]).sources))
        self._documents = EncodedDocuments(encoded, resolved_tokenizer.end_id)
        self.left_out = Counter(fault.rule for batch in encoded for fault in batch.dropped)
        self._row_documents = self._find_trainable()
        lengths = self._documents.lengths.take(self._row_documents)
        self.truncated_rows = int((lengths > max_seq_length).sum())
        if not self._row_documents.size:
            raise InputMissingError(
                f"{os.fspath(path_or_id)} gives no row to train ({_format_counts(self.left_out)}); raise "
                "max_seq_length, or choose another formatter."
            )
        if self.left_out or self.truncated_rows:
            _LOG.warning(
                "SFTDataset: %s rows; cut at %s tokens: %s; left out: %s.",
                f"{self._row_documents.size:,}",
                max_seq_length,
                self.truncated_rows,
                _format_counts(self.left_out),
            )
        if seed is not None:
            order = Permutation(self._row_documents.size, derive_key("sft", seed))
            self._row_documents = self._row_documents[order.at(np.arange(self._row_documents.size))]

    def __len__(self) -> int:
        return int(self._row_documents.size)

    def __getitem__(self, number: int) -> dict[str, Any]:
        """Return ``input_ids``, ``labels`` (-100 without loss) and ``loss_mask``.

        Each is int64 [tokens]. Data with loss weights also have ``loss_weights``, float32 [tokens].
        """
        ids, flags = self._row(int(self._row_documents[number]))
        labels = np.where(flags.trained, ids, IGNORE_INDEX)
        # No token precedes the first one, so nothing predicts it.
        labels[0] = IGNORE_INDEX
        row = {"input_ids": ids, "labels": labels, "loss_mask": labels != IGNORE_INDEX}
        if self._documents.weighted:
            row["loss_weights"] = np.where(row["loss_mask"], flags.weights, np.float32(0))
        return as_asked(row, self._output)

    def collate(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Pad rows at their ends to one batch [rows, longest]; padding has no loss."""
        fill = {"input_ids": self._documents.end_id, "labels": IGNORE_INDEX, "loss_mask": 0}
        longest = max(len(row["input_ids"]) for row in rows)
        batch: dict[str, Any] = {name: np.full((len(rows), longest), value) for name, value in fill.items()}
        if self._documents.weighted:
            batch["loss_weights"] = np.zeros((len(rows), longest), np.float32)
        for number, row in enumerate(rows):
            for name, values in batch.items():
                values[number, : len(row[name])] = row[name]
        return as_asked(batch, self._output)

    def _row(self, document: int) -> tuple[Any, LossFlags]:
        number = np.array([document])
        start = np.zeros(1, np.int64)
        length = np.minimum(self._documents.lengths.take(number), self._max_seq_length).astype(np.int64)
        (ids,) = self._documents.read(number, start, length)
        (flags,) = self._documents.flags(number, start, length)
        return ids.astype(np.int64), flags

    def _find_trainable(self) -> Any:
        """Return the documents with something to train within ``max_seq_length``."""
        trainable_documents = [n for n in range(self._documents.lengths.size) if self._row(n)[1][1:].count_trained()]
        if dropped_count := self._documents.lengths.size - len(trainable_documents):
            self.left_out["nothing to train within max_seq_length"] += dropped_count
        return np.array(trainable_documents, np.int64)


def _refuse(source: Source, bad: BadRecord) -> None:
    raise make_bad_record_error(source, ReadRules(), 0, bad)


def _format_counts(left_out: Counter[str]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in left_out.items()) or "none"


def _format_location(path_or_id: str | os.PathLike[str], split: str) -> str:
    """Combine a path or an id and a split to one input."""
    location = os.fspath(path_or_id)
    if split == "train":
        return location
    if os.path.isfile(location):  # noqa: PTH113 - a string stays a string
        raise InputError(
            f"split: {split!r} of {location}, which is one file and has no splits; name the file of that split."
        )
    name = find_hub_name(location)
    if name is None:
        return f"{location}/{split}"
    config = f":{name.config}" if name.config else ""
    revision = f"@{name.revision}" if name.revision else ""
    return f"{name.repo}{config}/{split}{revision}"
