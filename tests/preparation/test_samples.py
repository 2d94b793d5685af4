"""The first or random records of an input: ``max_samples``, ``num_samples`` and ``INPUT#N``."""

import csv
import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

import batchloom
from batchloom import DatasetConfig, InputError, SettingsError
from batchloom.preparation import convert
from batchloom.store import read_manifest
from preparation.stores import hash_store_files, read_documents, read_texts, write_jsonl

TEXTS = [f"text number {n}" for n in range(300)]


def write_csv(path):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["text"], *([text] for text in TEXTS)])


def write_table(path):
    pyarrow.parquet.write_table(pa.table({"text": TEXTS}), path, row_group_size=70)


def write_blank_lines(path):
    path.write_text("".join(json.dumps({"text": text}) + "\n\n" for text in TEXTS))


def write_compressed(path):
    path.write_bytes(gzip.compress("".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()))


WRITERS = {
    "a.jsonl": lambda path: write_jsonl(path, [{"text": text} for text in TEXTS]),
    "a.json": lambda path: path.write_text(json.dumps([{"text": text} for text in TEXTS])),
    "a.csv": write_csv,
    "a.parquet": write_table,
    "blank.jsonl": write_blank_lines,
    "a.jsonl.gz": write_compressed,
}


def prepare(inputs, out, **settings):
    result = batchloom.prepare(inputs, out=out, tokenizer="bytes", val_fraction=0, dedup="none", **settings)
    return result, sorted(read_texts(out), key=lambda text: int(text.split()[-1]))


def ignore_events(event):
    """Listen to nothing."""


def choose(total, count):
    """Return the texts that ms-swift chooses for ``NAME#count``, sorted by number."""
    state = np.random.RandomState(42)
    state.randint(0, np.iinfo(np.int32).max)
    return [TEXTS[number] for number in sorted(state.permutation(total)[:count])]


@pytest.mark.parametrize("name", WRITERS)
def test_a_number_of_records_is_read_of_every_format(tmp_path, name):
    WRITERS[name](tmp_path / name)
    entry = {"path": str(tmp_path / name)}
    result, texts = prepare(DatasetConfig(datasets=[{**entry, "max_samples": 100}]), tmp_path / "first")
    assert texts == TEXTS[:100]
    assert f"{name}: at most its first 100 records are read." in result.notes
    result, texts = prepare(DatasetConfig(datasets=[{**entry, "num_samples": 100}]), tmp_path / "random")
    assert texts == choose(300, 100)
    assert f"{name}: 100 of its 300 records are read, chosen at random." in result.notes
    _, texts = prepare(f"{tmp_path / name}#100", tmp_path / "suffix")
    assert texts == choose(300, 100)


def test_both_numbers_take_the_first_of_the_random_records(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    config = DatasetConfig(datasets=[{"path": str(tmp_path / "a.jsonl"), "num_samples": 200, "max_samples": 20}])
    assert prepare(config, tmp_path / "store")[1] == choose(300, 20)


def test_the_records_of_all_files_of_an_input_are_counted_together(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(3):
        texts = TEXTS[100 * number : 100 * number + 100]
        write_jsonl(folder / f"{number}.jsonl", [{"text": text} for text in texts])
    write_jsonl(tmp_path / "other.jsonl", [{"text": "other 1000"}])
    datasets = [{"path": str(folder), "max_samples": 150}, {"path": str(tmp_path / "other.jsonl")}]
    _, texts = prepare(DatasetConfig(datasets=datasets), tmp_path / "first")
    assert texts == [*TEXTS[:150], "other 1000"]
    assert [source.name for source in read_manifest(tmp_path / "first").sources] == [
        "data/0.jsonl",
        "data/1.jsonl",
        "other.jsonl",
    ]
    _, texts = prepare([f"{folder}#3", str(tmp_path / "other.jsonl")], tmp_path / "random")
    assert texts == [*choose(300, 3), "other 1000"]
    result, texts = prepare(f"{folder}#500", tmp_path / "all")
    assert texts == TEXTS
    assert "data: all of its 300 records are read once, fewer than 500." in result.notes


def test_a_sample_does_not_depend_on_units_and_workers(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    recipe = batchloom.preparation.make_request([f"{tmp_path / 'a.jsonl'}#50"], {"tokenizer": "bytes"}, None).recipe
    batchloom.preparation.run_recipe(recipe, tmp_path / "a", ignore_events)
    settings = batchloom.preparation.RunSettings(
        unit_bytes=100, execution=batchloom.preparation.ExecutionSettings(workers=2)
    )
    batchloom.preparation.run_recipe(recipe, tmp_path / "b", ignore_events, settings=settings)
    assert hash_store_files(tmp_path / "a") == hash_store_files(tmp_path / "b")
    # The recipe in the manifest makes the same store again.
    batchloom.prepare(recipe=tmp_path / "a", out=tmp_path / "c")
    assert hash_store_files(tmp_path / "a") == hash_store_files(tmp_path / "c")
    assert read_manifest(tmp_path / "a").recipe["sources"] == [{"num_samples": 50}]


def test_a_sample_counts_bad_records_and_keeps_their_lines(tmp_path):
    lines = [json.dumps({"text": text}) for text in TEXTS]
    lines[3] = "{"
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    config = DatasetConfig(datasets=[{"path": str(tmp_path / "a.jsonl"), "max_samples": 10}])
    _, texts = prepare(config, tmp_path / "store", max_bad=1)
    assert texts == [*TEXTS[:3], *TEXTS[4:10]]
    quarantined = json.loads((tmp_path / "store" / "quarantine.jsonl").read_text())
    assert quarantined["line"] == 4


def test_a_changed_number_of_records_is_another_job(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    assert len(prepare(f"{tmp_path / 'a.jsonl'}#5", tmp_path / "store")[1]) == 5
    with pytest.raises(batchloom.core.errors.StoreConflictError, match="num_samples"):
        prepare(f"{tmp_path / 'a.jsonl'}#6", tmp_path / "store")


def test_records_of_a_sample_are_found_again(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    prepare(f"{tmp_path / 'a.jsonl'}#20", tmp_path / "store")
    for origin, text, _ in read_documents(tmp_path / "store"):
        assert TEXTS[origin.record] == text


@pytest.mark.parametrize("name", ["a.jsonl#12", "b#1"])
def test_a_file_may_have_such_a_name(tmp_path, name):
    write_jsonl(tmp_path / name, [{"text": text} for text in TEXTS])
    recipe = batchloom.preparation.make_request([str(tmp_path / name)], {}, None).recipe
    assert (recipe.inputs, recipe.sources) == ((str(tmp_path / name),), ())


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a.jsonl#0", "inputs: 'a.jsonl#0': '0' is not a number of records from 1 to 1,000"),
        ("a.jsonl#-1", "inputs: 'a.jsonl#-1': '-1' is not a number of records"),
        ("a.jsonl#x", "inputs: 'a.jsonl#x': 'x' is not a number of records"),
        ("a.jsonl#", "inputs: 'a.jsonl#': '' is not a number of records"),
        (f"a.jsonl#{10**30}", "is not a number of records"),
        ("a.yaml#5", "a number belongs to one data set; write num_samples: 5"),
    ],
)
def test_wrong_numbers_are_refused(tmp_path, monkeypatch, text, problem):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "a.jsonl", [{"text": "t"}])
    with pytest.raises(SettingsError, match=problem):
        batchloom.prepare(text, out="store", tokenizer="bytes")


def test_two_numbers_of_one_file_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    with pytest.raises(InputError, match=r"a.jsonl is listed by a.jsonl#5 and by a.jsonl#3 with different settings"):
        batchloom.prepare(["a.jsonl#5", "a.jsonl#3"], out="store", tokenizer="bytes")


def test_a_conversion_reads_the_same_records(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    assert convert(["a.jsonl#5"], out="b.jsonl").rows == 5
    prepare("a.jsonl#5", tmp_path / "store")
    rows = [json.loads(line)["text"] for line in Path("b.jsonl").read_text().splitlines()]
    assert sorted(rows) == sorted(read_texts("store"))


@pytest.mark.parametrize("value", [0, -1, 1.5, "5", True, 10**16])
def test_wrong_settings_are_refused(value):
    with pytest.raises(SettingsError) as caught:
        DatasetConfig(datasets=[{"path": "a", "max_samples": value, "num_samples": value}])
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [
        "datasets[0].max_samples",
        "datasets[0].num_samples",
    ]


def test_nothing_is_appended_to_a_sample(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    prepare("a.jsonl#5", tmp_path / "store")
    with pytest.raises(SettingsError, match="'a.jsonl' is read in part"):
        batchloom.prepare(out="store", append=True)
    write_jsonl(tmp_path / "b.jsonl", [{"text": "b 1000"}])
    batchloom.prepare("b.jsonl", out="store", append=True)
    assert len(read_texts("store")) == 6
