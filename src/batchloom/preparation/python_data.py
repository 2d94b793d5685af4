"""Rows, tables and tokenizers of Python, written to files that a job reads."""

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set as AbstractSet
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import orjson

from batchloom.core.addresses import is_glob, is_url
from batchloom.core.errors import InputError, SettingsError
from batchloom.core.settings import quote_value
from batchloom.preparation.settings.dataset_config import DatasetConfig

# Rows of a data set of Hugging Face that are converted at once.
_BATCH_ROWS = 1000
_SINGLE_TYPES = (str, bytes, os.PathLike, DatasetConfig, type(None))
_SAFE_NAME = re.compile(r"\w[\w.-]{0,99}")


class ArrowStream(Protocol):
    """A table that exports an Arrow stream, as those of pandas, polars and pyarrow do."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """Export the table."""


# ``datasets.Dataset`` is an iterable of rows.
PythonRows: TypeAlias = Iterable[Mapping[str, Any]] | Iterator[str] | ArrowStream


class PythonData(NamedTuple):
    """Inputs and tokenizer as ``prepare`` takes them from a command line."""

    inputs: Any
    tokenizer: Any
    # Whether the inputs are a new file. Its content must be its identity, so that the same rows resume a job.
    is_written: bool


@contextlib.contextmanager
def write_python_data(inputs: object, tokenizer: object, folder: Path | None) -> Iterator[PythonData]:
    """Yield inputs and tokenizer with the objects replaced by files.

    Args:
        inputs: paths, or rows (mappings), texts (an iterator of strings, or a Series), or a table:
            ``datasets.Dataset``, pandas, polars, Arrow and whatever else exports an Arrow stream.
        tokenizer: name or path, or a tokenizer of transformers or tokenizers.
        folder: existing folder in which the files are made, None for that of the system; they are deleted at the end.

    Raises:
        InputError: there are no rows, or one is neither a mapping nor a text, or holds what JSON cannot hold.
        SettingsError: the inputs are several data sets, or the tokenizer is a class.
    """
    inputs = _peek(inputs)
    has_data = not _names_files(inputs)
    has_tokenizer = hasattr(tokenizer, "save_pretrained") or hasattr(tokenizer, "to_str")
    if not has_data and not has_tokenizer:
        yield PythonData(inputs, tokenizer, is_written=False)
        return
    files = Path(tempfile.mkdtemp(prefix=".batchloom-", dir=folder))
    try:
        yield PythonData(
            _write_data(inputs, files) if has_data else inputs,
            _save_tokenizer(tokenizer, files) if has_tokenizer else tokenizer,
            is_written=has_data,
        )
    finally:
        shutil.rmtree(files)


def _peek(inputs: Any) -> Any:
    """Return the inputs; those of an iterable that names files as a list."""
    if _is_column(inputs):
        inputs = iter(inputs)
    if isinstance(inputs, (*_SINGLE_TYPES, Sequence, Mapping)) or _is_hf_dataset(inputs) or _is_arrow_stream(inputs):
        return inputs
    if not isinstance(inputs, Iterable) or hasattr(inputs, "columns"):
        kind = type(inputs).__name__
        table = "an Arrow table (pandas exports them from 2.2 on)"
        raise SettingsError([f"inputs: an object of type {kind} is neither path nor rows nor {table}"])
    if isinstance(inputs, AbstractSet) and not all(isinstance(item, os.PathLike) or _is_name(item) for item in inputs):
        raise SettingsError(["inputs: a set has no order, so two runs would differ; give a list of rows"])
    items = iter(inputs)
    first = [*islice(items, 1)]
    items = chain(first, items)
    # A first item that is a name of files decides for all.
    return [*items] if not first or isinstance(first[0], (os.PathLike, DatasetConfig)) or _is_name(first[0]) else items


def _is_name(item: object) -> bool:
    """Return whether an item is a name of files, not a text."""
    if not isinstance(item, str):
        return False
    has_blanks = len(item.split()) != 1
    return os.path.exists(item) or (not has_blanks and (is_url(item) or is_glob(item)))


def _is_hf_dataset(inputs: Any) -> bool:
    return hasattr(inputs, "with_format") and hasattr(inputs, "num_rows")


def _is_column(inputs: Any) -> bool:
    """Return whether inputs are one column of a table: a Series of pandas or polars."""
    return _is_arrow_stream(inputs) and len(getattr(inputs, "shape", ())) == 1


def _is_arrow_stream(inputs: Any) -> bool:
    return hasattr(inputs, "__arrow_c_stream__")


def _names_files(inputs: Any) -> bool:
    """Return whether inputs are those that a command line has, or manifests."""
    if isinstance(inputs, _SINGLE_TYPES):
        return True
    if not isinstance(inputs, Sequence):
        return False
    first = inputs[0] if inputs else None
    if _is_hf_dataset(first) or _is_arrow_stream(first):
        raise SettingsError(["inputs: a list of tables; give one table"])
    if isinstance(first, str) and not _is_name(first) and len(first.split()) > 1:
        problem = f"inputs: {quote_value(first)} is neither path nor glob; give texts as iter(texts), or rows"
        raise SettingsError([problem])
    return not isinstance(first, Mapping)


def _write_data(inputs: Any, folder: Path) -> str:
    if isinstance(inputs, Mapping):
        names = ", ".join(map(repr, inputs))
        raise SettingsError([f"inputs: a mapping of {names}; give one data set, or the rows of one"])
    if _is_hf_dataset(inputs):
        # A transform makes the rows when they are read.
        if inputs.format["type"] == "custom":
            return _write_rows(inputs, folder)
        arrow = inputs.with_format("arrow", columns=inputs.format["columns"])
        return _write_tables(arrow.iter(_BATCH_ROWS), folder)
    if _is_arrow_stream(inputs):
        import pyarrow as pa

        try:
            return _write_tables(pa.RecordBatchReader.from_stream(inputs), folder)
        except InputError:
            raise
        except (ValueError, pa.ArrowTypeError) as error:
            raise InputError(
                f"inputs: {type(inputs).__name__} cannot be read as a table, which has named columns: {error}."
            ) from error
    return _write_rows(inputs, folder)


def _write_tables(tables: Iterable[Any], folder: Path) -> str:
    import pyarrow as pa

    path = folder / "data.arrow"
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(path.open("wb"))
        writer = None
        for table in tables:
            # The metadata hold versions of the library that made the table, and a file has one dictionary for a column.
            types = [
                field.type.value_type if pa.types.is_dictionary(field.type) else field.type for field in table.schema
            ]
            schema = pa.schema(zip(table.schema.names, types, strict=True))
            if writer is None:
                writer = stack.enter_context(pa.ipc.new_file(file, schema))
            writer.write(table.cast(schema))
    if writer is None:
        raise InputError("inputs: there are no rows.")
    return os.fspath(path)


def _write_rows(rows: Iterable[Any], folder: Path) -> str:
    path = folder / "data.jsonl"
    with path.open("wb") as file:
        for number, row in enumerate(rows):
            if not isinstance(row, (Mapping, str)):
                raise InputError(
                    f"inputs: row {number:,} is of type {type(row).__name__}, neither a mapping nor a text."
                )
            try:
                plain = {"text": row} if isinstance(row, str) else dict(row)
                line = orjson.dumps(plain, option=orjson.OPT_SERIALIZE_NUMPY)
            except TypeError as error:
                raise InputError(f"inputs: row {number:,} cannot be written as JSON: {error}.") from error
            file.write(line + b"\n")
        if not file.tell():
            raise InputError("inputs: there are no rows.")
    return os.fspath(path)


def _save_tokenizer(tokenizer: Any, folder: Path) -> str:
    """Save a tokenizer in a folder of its name, which a store records."""
    if isinstance(tokenizer, type):
        raise SettingsError([f"tokenizer: {tokenizer.__name__} is a class; give an object, as from_pretrained returns"])
    name = Path(str(getattr(tokenizer, "name_or_path", ""))).name
    path = folder / "tokenizer" / (name if _SAFE_NAME.fullmatch(name) else "tokenizer")
    path.mkdir(parents=True)
    if hasattr(tokenizer, "save_pretrained"):
        tokenizer.save_pretrained(path)
    else:
        (path / "tokenizer.json").write_text(tokenizer.to_str(), "utf-8")
    return os.fspath(path)
