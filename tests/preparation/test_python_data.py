"""Rows, texts, tables and tokenizers of Python as inputs of ``prepare``."""

from types import MappingProxyType

import datasets
import pandas as pd
import pyarrow as pa
import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

import batchloom
from batchloom.core.errors import InputError, InputMissingError, SettingsError
from batchloom.preparation import convert, prepare_mixture
from batchloom.tokens import resolve_tokenizer

ROWS = [{"text": f"row {number}"} for number in range(50)]
TEXTS = [row["text"] for row in ROWS]

DATA = {
    "rows": lambda: ROWS,
    "tuple of rows": lambda: tuple(ROWS),
    "generator of rows": lambda: iter(ROWS),
    "generator of texts": lambda: iter(TEXTS),
    "pandas": lambda: pd.DataFrame(ROWS),
    "a column": lambda: pd.DataFrame(ROWS)["text"],
    "arrow": lambda: pa.table({"text": TEXTS}),
    "record batches": lambda: pa.table({"text": TEXTS}).to_reader(max_chunksize=7),
    "categories": lambda: pd.DataFrame(ROWS, dtype="category"),
    "batches with categories": lambda: pa.RecordBatchReader.from_batches(
        pa.schema([("text", pa.dictionary(pa.int32(), pa.string()))]),
        [pa.record_batch({"text": pa.array(part).dictionary_encode()}) for part in (TEXTS[:20], TEXTS[20:])],
    ),
    "mappings": lambda: map(MappingProxyType, ROWS),
    "data set": lambda: datasets.Dataset.from_list(ROWS[::-1]).select(range(49, -1, -1)),
    "columns of a data set": lambda: datasets.Dataset.from_list([{"prompt": "no", **row} for row in ROWS]).with_format(
        columns=["text"]
    ),
    "transformed data set": lambda: datasets.Dataset.from_dict({"number": range(50)}).with_transform(
        lambda batch: {"text": [f"row {number}" for number in batch["number"]]}
    ),
    "iterable data set": lambda: datasets.Dataset.from_list(ROWS).to_iterable_dataset(),
}


def prepare(data, out, **options):
    return batchloom.prepare(data, out=out, **{"tokenizer": "bytes", "val_fraction": 0, **options})


@pytest.mark.parametrize("kind", DATA)
def test_data_of_python_become_documents(tmp_path, kind):
    out = tmp_path / "made" / "store"
    assert prepare(DATA[kind](), out).counts.documents == 50
    store = batchloom.open_store(out)
    assert [bytes(store[n].ids[:-1].astype("u1")).decode() for n in range(50)] == TEXTS
    assert store.provenance.of(7).source in ("data.jsonl", "data.arrow")
    # The same data are the same job, and other data another one.
    assert prepare(DATA[kind](), out).already_done
    with pytest.raises(batchloom.BatchloomError, match="another job"):
        prepare(ROWS[:-1], out)
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
    assert [path.name for path in out.parent.iterdir()] == ["store"]


def test_conversations_of_a_data_set(tmp_path):
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    prepare(datasets.Dataset.from_list([{"messages": turns}] * 2), tmp_path / "s", template="plain", dedup="none")
    store = batchloom.open_store(tmp_path / "s")
    assert len(store) == 2
    assert 0 < store.contents.trained_tokens < store.tokens


def test_iterables_of_paths_stay_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("one")
    for number, paths in enumerate((["a.txt"], iter(["a.txt"]), tmp_path.glob("*.txt"), {"a.txt"})):
        assert prepare(paths, tmp_path / f"s{number}").counts.documents == 1
        assert batchloom.open_store(tmp_path / f"s{number}").provenance.of(0).source == "a.txt"


@pytest.mark.parametrize("text", ["What is it?", "*starred* text", "https://example.com is a site", "a\nb*"])
def test_texts_that_resemble_names_are_texts(tmp_path, text):
    assert prepare(iter([text, "b"]), tmp_path / "s").counts.documents == 2


def test_a_tokenizer_object_is_its_files(tmp_path):
    gpt2 = resolve_tokenizer("gpt2")
    plain = Tokenizer.from_str(gpt2.json.decode())
    for name, tokenizer in (
        ("transformers", PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<|endoftext|>")),
        ("tokenizers", plain),
        ("odd", PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<|endoftext|>", name_or_path="a/..")),
        ("long", PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<|endoftext|>", name_or_path="a" * 300)),
    ):
        prepare(ROWS, tmp_path / name, tokenizer=tokenizer)
        store = batchloom.open_store(tmp_path / name)
        assert (store.tokenizer.fingerprint, store.manifest.tokenizer.name) == (gpt2.fingerprint, "tokenizer")


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ([{"a": b"x"}], InputError, "row 0 cannot be written as JSON: Type is not JSON serializable: bytes"),
        ([{"text": "a"}, 5], InputError, "row 1 is of type int, neither a mapping nor a text"),
        ({"train": ROWS, "test": ROWS}, SettingsError, "a mapping of 'train', 'test'; give one data set"),
        (pa.chunked_array([TEXTS]), InputError, "ChunkedArray cannot be read as a table, which has named columns"),
        (5, SettingsError, "an object of type int is neither path nor rows nor an Arrow table"),
        (iter([]), SettingsError, "there are none"),
        (iter([None, {"text": "a"}]), InputError, "row 0 is of type NoneType"),
        (pd.DataFrame({"text": []}), InputError, r"^inputs: there are no rows\.$"),
        (datasets.Dataset.from_list([]), InputError, "there are no rows"),
        (pd.DataFrame([["a", "b"]], columns=["text", "text"]), InputError, "Duplicate column names"),
        ([pd.DataFrame(ROWS)], SettingsError, "a list of tables; give one table"),
        (iter(["data/*.jsonl"]), InputMissingError, "data/"),
        (TEXTS, SettingsError, r"'row 0' is neither path nor glob; give texts as iter\(texts\), or rows"),
        (["a.txt"], InputMissingError, "There is no file or folder a.txt"),
        ({"one text", "another"}, SettingsError, "a set has no order"),
    ],
)
def test_other_data_are_refused_in_one_sentence(tmp_path, data, error, message):
    with pytest.raises(error, match=message) as raised:
        prepare(data, tmp_path / "s")
    assert len(str(raised.value)) < 300
    assert [*tmp_path.iterdir()] == []


STREAM_SIZES = {"seq_len": 64, "global_batch_size": 2, "steps": 2}


@pytest.mark.parametrize("data", [ROWS, pd.DataFrame(ROWS), {"text": TEXTS}], ids=["rows", "table", "mapping"])
@pytest.mark.parametrize(
    "read",
    [
        batchloom.doctor,
        lambda data: batchloom.stream(data, **STREAM_SIZES),
        lambda data: convert(data, out="out.jsonl"),
        lambda data: prepare_mixture(data, out="out"),
    ],
    ids=["doctor", "stream", "convert", "prepare_mixture"],
)
def test_functions_that_read_files_name_what_takes_data(tmp_path, monkeypatch, read, data):
    monkeypatch.chdir(tmp_path)
    kind = type(data).__name__
    with pytest.raises(SettingsError) as raised:
        read(data)
    assert str(raised.value) == f"inputs: a {kind} of rows is no path; give it to prepare, or write it to a file"


def test_a_class_is_no_tokenizer(tmp_path):
    with pytest.raises(SettingsError, match="is a class; give an object"):
        prepare(ROWS, tmp_path / "s", tokenizer=PreTrainedTokenizerFast)
