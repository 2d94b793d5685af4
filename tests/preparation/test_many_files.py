"""Costs of very many files: known files are not read again, with equal results."""

import json
import os
import pickle
import tracemalloc

import pytest
from hypothesis import given, settings, strategies as st

from batchloom import open_store
from batchloom.chat import FORM_RULES, compute_record_shape, detect_schema
from batchloom.core.errors import SchemaError, StoreConflictError
from batchloom.preparation.units import plan_units
from batchloom.sources import ReadRules, list_sources
from batchloom.sources.files import Source
from preparation.stores import prepare_store, read_texts
from tiers import examples

NAMES = sorted({n for rule in FORM_RULES for names in rule.required.values() for n in names})
NAMES += ["label", "system", "input", "other", "labels"]
PLAIN = ["", "a text", " [1]", "[]", "true", " 0 ", "1.0", None, True, False, 0, 1, 1.0, 2, 0.5]
ROWS = st.dictionaries(st.sampled_from(NAMES), st.sampled_from(PLAIN), max_size=5)


def find_schema(rows):
    try:
        schema = detect_schema(rows)
    except SchemaError:
        return None
    return schema


@settings(max_examples=examples(400))
@given(ROWS, st.data())
def test_records_of_one_shape_have_one_schema(row, data):
    # The same columns, each with another value of the same kind.
    shape = compute_record_shape([row])
    assert shape is not None
    other_row = {
        name: data.draw(
            st.sampled_from([value for value in PLAIN if compute_record_shape([{name: value}]) == ((name, kind),)])
        )
        for name, kind in shape
    }
    assert compute_record_shape([row, other_row]) == shape
    assert find_schema([other_row] * 3) == find_schema([row])


@pytest.mark.parametrize(
    "rows",
    [
        [{"text": "a"}, {"text": ""}],
        [{"text": "a"}, {"text": "a", "label": 1}],
        [{"a": "b", "text": "c"}, {"text": "c", "a": "b"}],
        [{"messages": [{"role": "user", "content": "a"}]}],
        [{"answers": {"text": ["a"]}}],
    ],
)
def test_other_records_are_read(rows):
    assert compute_record_shape(rows) is None


def write_files(folder, names):
    folder.mkdir(exist_ok=True)
    for name in names:
        lines = [json.dumps({"text": f"document {name} {n}"}) + "\n" for n in range(2)]
        (folder / f"{name}.jsonl").write_text("".join(lines))


def test_files_of_a_finished_store_are_not_opened_again(tmp_path):
    write_files(tmp_path / "in", "abc")
    prepare_store(tmp_path / "in", tmp_path / "out")
    path = tmp_path / "in" / "b.jsonl"
    before = path.stat()
    # A file of invalid content with its old size and time shows that nobody reads it.
    path.write_bytes(b"[" + b" " * (before.st_size - 1))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert prepare_store(tmp_path / "in", tmp_path / "out").already_done
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    with pytest.raises(StoreConflictError, match="b.jsonl"):
        prepare_store(tmp_path / "in", tmp_path / "out")


def test_files_are_read_if_the_recipe_differs_or_the_report_is_unusable(tmp_path):
    write_files(tmp_path / "in", "ab")
    prepare_store(tmp_path / "in", tmp_path / "out")
    with pytest.raises(StoreConflictError, match="normalize"):
        prepare_store(tmp_path / "in", tmp_path / "out", normalize=False)
    report = json.loads((tmp_path / "out" / "report.json").read_bytes())
    assert [(source["kind"], source["compression"]) for source in report["sources"]] == [("jsonl", "")] * 2
    # A report with an unknown kind counts as no report.
    report["sources"][0]["kind"] = "poem"
    (tmp_path / "out" / "report.json").write_text(json.dumps(report))
    assert prepare_store(tmp_path / "in", tmp_path / "out").already_done


def test_few_lines_and_many_give_the_same_documents(tmp_path):
    for count in (1, 15, 16, 17):
        lines = [json.dumps({"text": f"line {n} \u00e4"}, ensure_ascii=False) for n in range(count)]
        for end in ("", "\n", "\n\n"):
            (tmp_path / "in.jsonl").write_text("\n".join(lines) + end)
            out = tmp_path / f"{count}{len(end)}"
            prepare_store(tmp_path / "in.jsonl", out, val_fraction=0)
            assert read_texts(out) == [f"line {n} \u00e4" for n in range(count)]


@pytest.mark.slow
def test_more_files_than_16_bits_number(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range((1 << 16) + 10):
        (folder / f"{number:05}.txt").write_text(f"text {number}")
    prepare_store(folder, tmp_path / "out", val_fraction=0)
    store = open_store(tmp_path / "out")
    for number in range(len(store) - 20, len(store)):
        assert bytes(store[number].ids[:-1].tolist()) == f"text {number}".encode()
        assert store.provenance.of(number).source == f"in/{number:05}.txt"


@pytest.mark.slow
def test_a_listing_and_its_units_take_little_memory_for_each_file(tmp_path):
    count = 8000
    for number in range(count):
        (tmp_path / f"{number:06}.txt").touch()
        os.truncate(tmp_path / f"{number:06}.txt", 100)
    list_sources([str(tmp_path / "000000.txt")])
    tracemalloc.start()
    listing = list_sources([str(tmp_path)])
    units = plan_units(listing.sources, ReadRules())
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(listing.sources) == sum(len(unit.parts) for unit in units) == count
    text_bytes = sum(len(source.name) + len(source.path) for source in listing.sources)
    # An object for each file, name, path and part takes 350 bytes more than their text, and 900 with the statuses of
    # all files in the folder.
    assert (kept - text_bytes) / count < 140
    assert (peak - text_bytes) / count < 600


def test_a_unit_is_sent_to_a_worker_with_its_own_sources(tmp_path):
    write_files(tmp_path / "in", "abcd")
    os.utime(tmp_path / "in" / "b.jsonl", ns=(5, -7))
    sources = list_sources([str(tmp_path / "in")]).sources
    first, second, third, _ = sources
    assert isinstance(first, Source)
    assert (second.name, second.mtime_ns, second.kind) == ("in/b.jsonl", -7, "jsonl")
    assert sources[1:3] == (second, third)
    assert sources[-1] == sources[3]
    size = first.size
    units = plan_units(sources, ReadRules(), unit_bytes=2 * size)
    assert [[(part.source, part.start, part.stop) for part in unit.parts] for unit in units] == [
        [(first, 0, size), (second, 0, size)],
        [(third, 0, size), (sources[3], 0, size)],
    ]
    encoded = pickle.dumps(units[1])
    assert pickle.loads(encoded) == units[1]
    assert b"in/a.jsonl" not in encoded
