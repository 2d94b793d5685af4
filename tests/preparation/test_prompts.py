"""Prompts with carried columns through ``prepare`` and back."""

import json
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest

import batchloom
from batchloom import InputError, SettingsError
from batchloom.core.errors import SchemaError, StoreConflictError, StoreError
from batchloom.store import (
    LabelledAnswers,
    PreferencePairs,
    StoredPrompts,
    compact_store,
    export_store,
    remove_documents,
)
from preparation.stores import hash_store_files, prepare_store, write_jsonl
from preparation.test_resume import prepare_until_killed
from store.remote_stores import copy_to_memory
from store.test_damaged_stores import seal_sidecars

ROWS = [{"question": f"{n} + {n}?", "answer": "4" * (1 + n % 7), "level": n, "tags": [n, None]} for n in range(200)]
CARRY = {"prompts": True, "carry": ("answer", "number=level", "tags")}


def prepare(tmp_path, rows, **settings):
    write_jsonl(tmp_path / "in.jsonl", rows)
    settings = {"tokenizer": "bytes", "val_fraction": 0, **settings}
    return batchloom.prepare(tmp_path / "in.jsonl", out=tmp_path / "out", **settings)


def expect(n):
    prompt = [{"role": "user", "content": f"{n} + {n}?"}]
    return {"prompt": prompt, "answer": "4" * (1 + n % 7), "number": n, "tags": [n, None]}


def read_rows(out):
    """Return the rows of all subsets, checked against their ids, by their number."""
    rows = []
    for split in batchloom.open_store(out).subsets:
        prompts = StoredPrompts(batchloom.open_store(out, split))
        texts = StoredPrompts(prompts.store, "text")
        for n in range(len(prompts)):
            row = prompts[n]
            assert texts[n]["prompt"] == f"User:\n{row['prompt'][0]['content']}\n\nAssistant:\n"
            assert bytes(prompts.ids(n)).decode() == texts[n]["prompt"]
            assert prompts.store.provenance.of(n).record == row["number"]
            rows.append(row)
    return sorted(rows, key=lambda row: row["number"])


def test_rows_are_those_of_the_records(tmp_path):
    result = prepare(tmp_path, ROWS, **CARRY)
    assert "Detected question -> prompts in in.jsonl." in result.notes
    assert not any("Unused" in note for note in result.notes)
    store = batchloom.open_store(result.path)
    prompts = StoredPrompts(store)
    assert list(prompts) == list(map(expect, range(200)))
    assert (len(prompts), prompts[-1], prompts[np.int64(3)]) == (200, expect(199), expect(3))
    assert list(pickle.loads(pickle.dumps(prompts))) == list(prompts)
    assert (store.contents.objective, store.contents.trained_tokens) == ("prompts", 0)
    report = batchloom.check(result.path)
    assert report.sound
    assert "(batchloom.store.StoredPrompts)" in report.used
    with pytest.raises(IndexError):
        prompts[200]


SETTINGS = {"unit_bytes": 3000, "val_fraction": 0.2, "tokens_per_shard": 700, **CARRY}


@pytest.mark.slow
def test_the_same_whatever_the_units_and_after_any_kill(tmp_path, monkeypatch):
    monkeypatch.setattr("batchloom.preparation.units.unit_tokenizer._BATCH_DOCUMENTS", 9)
    write_jsonl(tmp_path / "in.jsonl", [*ROWS[:50], {"question": ""}, *ROWS[50:100], ROWS[3]])
    inputs = [tmp_path / "in.jsonl"]
    prepare_store(inputs, tmp_path / "whole", **SETTINGS)
    rows = read_rows_by_level(tmp_path / "whole")
    assert rows == list(map(expect, range(100)))
    assert batchloom.check(tmp_path / "whole").sound
    expected, out, runs = hash_store_files(tmp_path / "whole"), tmp_path / "out", 0
    assert sum(name.endswith(".fields") for name in expected) > 5
    while prepare_until_killed({"open"}, 120, inputs, out, **SETTINGS):
        runs += 1
        assert runs < 40
    assert runs > 2
    assert hash_store_files(out) == expected


def read_rows_by_level(out):
    rows = [
        row for split in batchloom.open_store(out).subsets for row in StoredPrompts(batchloom.open_store(out, split))
    ]
    return sorted(rows, key=lambda row: row["number"])


def test_equal_prompts_with_other_columns_are_no_duplicates(tmp_path):
    rows = [{"prompt": "q", "answer": "a"}, {"prompt": "q", "answer": "b"}, {"prompt": "q", "answer": "a"}]
    prepare(tmp_path, rows, prompts=True, carry="answer")
    prompts = StoredPrompts(batchloom.open_store(tmp_path / "out"))
    assert [row["answer"] for row in prompts] == ["a", "b"]


def test_without_a_template_a_prompt_stays_a_text(tmp_path):
    prepare(tmp_path, ROWS, template="none", **CARRY)
    prompts = StoredPrompts(batchloom.open_store(tmp_path / "out"))
    assert [row["prompt"] for row in prompts] == [row["question"] for row in ROWS]
    assert bytes(prompts.ids(3)) == b"3 + 3?"
    assert StoredPrompts(prompts.store, "messages")[3]["prompt"] == [{"role": "user", "content": "3 + 3?"}]
    with pytest.raises(InputError, match="holds messages"):
        batchloom.prepare(
            write_messages(tmp_path), out=tmp_path / "no", tokenizer="bytes", template="none", prompts=True
        )


def write_messages(folder):
    write_jsonl(folder / "messages.jsonl", [{"prompt": [{"role": "user", "content": "q"}]}] * 5)
    return folder / "messages.jsonl"


def test_appending_removing_and_compacting(tmp_path):
    prepare(tmp_path, ROWS[:100], **CARRY)
    write_jsonl(tmp_path / "more.jsonl", ROWS[100:])
    batchloom.prepare(tmp_path / "more.jsonl", out=tmp_path / "out", append=True)
    assert len(read_rows_by_level(tmp_path / "out")) == 200
    (tmp_path / "list").write_text("train:7\ntrain:150\n")
    remove_documents(tmp_path / "out", documents_file=tmp_path / "list")
    remaining = [expect(n) for n in range(200) if n not in (7, 150)]
    assert read_rows_by_level(tmp_path / "out") == remaining
    assert batchloom.check(tmp_path / "out").sound
    compact_store(tmp_path / "out")
    assert read_rows_by_level(tmp_path / "out") == remaining
    assert batchloom.check(tmp_path / "out").sound


def test_a_remote_store(tmp_path):
    prepare(tmp_path, ROWS, **CARRY)
    url = copy_to_memory(tmp_path / "out", tmp_path.name)
    assert list(StoredPrompts(batchloom.open_store(url))) == list(map(expect, range(200)))


def test_exports_hold_the_columns(tmp_path):
    import pyarrow.parquet as pq

    prepare(tmp_path, ROWS, **CARRY)
    export_store(tmp_path / "out", out=tmp_path / "parquet", to="parquet")
    (path,) = (tmp_path / "parquet").glob("*.parquet")
    table = pq.read_table(path).to_pylist()
    assert [json.loads(row["fields"]) for row in table] == list(map(expect, range(200)))
    assert {row["side"] for row in table} == {"prompt"}


def test_other_readers_refuse_the_store(tmp_path):
    prepare(tmp_path, ROWS, **CARRY)
    store = batchloom.open_store(tmp_path / "out")
    with pytest.raises(InputError, match="holds prompts without answers.* batchloom.store.StoredPrompts"):
        batchloom.Loader(store, seq_len=64, global_batch_size=2)
    with pytest.raises(InputError, match="holds no preference pairs"):
        PreferencePairs(store)
    with pytest.raises(SettingsError, match="form: 'ids' is not one of messages, text"):
        StoredPrompts(store, "ids")
    with pytest.raises(InputError, match="read from an open store, not"):
        StoredPrompts(str(tmp_path / "out"))
    options = {"tokenizer": "bytes", "seq_len": 64, "global_batch_size": 2, "steps": 2, "workers": 0}
    stream = batchloom.stream(tmp_path / "in.jsonl", **options, prompts=True)
    with pytest.raises(InputError, match="holds prompts without answers"):
        next(iter(batchloom.Loader(stream, output="numpy")))


def test_inputs_that_cannot_be_prepared_together(tmp_path):
    prepare(tmp_path, ROWS, **CARRY)
    with pytest.raises(StoreConflictError, match="carries the columns answer, number, tags, and --carry names level"):
        batchloom.prepare(tmp_path / "in.jsonl", out=tmp_path / "out", append=True, carry="level")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"carry": "answer"}, "carry: only prompts carry columns; give prompts, too"),
        ({"prompts": True, "carry": 5}, "carry: 5 is no list of columns"),
        ({"prompts": True, "carry": ["answer", 5]}, "carry: .* is no list of columns"),
        ({"prompts": True, "carry": "a=,b"}, "carry: .* has an item without a name"),
        ({"prompts": True, "carry": "prompt"}, "carry: .* names 'prompt', which holds the messages"),
        ({"prompts": True, "carry": "a=x,a=y"}, "carry: .* names 'a' twice"),
        ({"prompts": "yes"}, "prompts: 'yes' is"),
        ({"prompts": True, "text_field": "question"}, "text_field: goes with no prompts"),
    ],
)
def test_settings_that_make_no_sense(tmp_path, settings, sentence):
    with pytest.raises(SettingsError, match=sentence):
        prepare(tmp_path, ROWS, **settings)
    assert not (tmp_path / "out").exists()


def test_settings_that_the_records_contradict(tmp_path):
    with pytest.raises(InputError, match="prompts are not trained: leave --train-on last out"):
        prepare(tmp_path, ROWS, train_on="last", **CARRY)
    with pytest.raises(SchemaError, match="--carry solution: no column 'solution'"):
        prepare(tmp_path, ROWS, prompts=True, carry="solution")


def test_a_record_without_a_carried_column_is_bad(tmp_path):
    result = prepare(tmp_path, [*ROWS[:20], {"question": "q", "level": 1, "tags": []}], **CARRY)
    assert (result.counts.documents, result.counts.quarantined) == (20, 1)
    (line,) = (tmp_path / "out/quarantine.jsonl").read_text().splitlines()
    assert "no column 'answer'" in line


@pytest.mark.parametrize(
    ("row", "settings", "sentence"),
    [
        ({"prompt": "q", "image": "a.png"}, {"prompts": True}, "with --carry image, or leave them out with --ignore"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, {"prompts": True}, "and prompts take none"),
    ],
)
def test_no_medium_is_dropped_silently(tmp_path, row, settings, sentence):
    with pytest.raises(InputError, match=sentence):
        prepare(tmp_path, [row], **settings)


def test_prompts_carry_images_for_the_trainer(tmp_path):
    prepare(tmp_path, [{"prompt": "q", "images": ["a.png"]}] * 9, prompts=True, carry="images")
    assert StoredPrompts(batchloom.open_store(tmp_path / "out"))[0]["images"] == ["a.png"]


def edit_fields(out, change):
    (path,) = Path(out).rglob("*.fields")
    data = bytearray(path.read_bytes())
    path.write_bytes(bytes(change(data)))


DAMAGE = {
    "cut": (lambda data: data[:-1], "documents in .* bytes; its shard has 200"),
    "another file": (lambda data: b"BLMMASK\0" + data[8:], "is not a .fields file of version 1"),
    "another version": (lambda data: data[:8] + struct.pack("<Q", 2) + data[16:], "is not a .fields file of version 1"),
    "ends out of order": (
        lambda data: data[:32] + struct.pack("<QQ", 9, 1) + data[48:],
        "ends that are out of order",
    ),
    "an end beyond": (
        lambda data: data[:24] + struct.pack("<Q", len(data)) + data[32:],
        "documents in .* bytes; its shard has 200",
    ),
    "no JSON": (lambda data: data[:-1] + b"x", "are no JSON"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_found(tmp_path, name):
    change, sentence = DAMAGE[name]
    prepare(tmp_path, ROWS, **CARRY)
    edit_fields(tmp_path / "out", change)
    seal_sidecars(tmp_path / "out")
    with pytest.raises(StoreError, match=sentence):
        list(StoredPrompts(batchloom.open_store(tmp_path / "out")))
    assert not batchloom.check(tmp_path / "out").sound


def test_check_compares_the_columns_with_the_documents(tmp_path):
    prepare(tmp_path, ROWS, **CARRY)
    edit_fields(tmp_path / "out", lambda data: data.replace(b'"prompt"', b'"prompd"', 1))
    assert any("document 0 carries no prompt" in fault for fault in batchloom.check(tmp_path / "out").faults)


def test_a_changed_value_is_found_by_its_checksum(tmp_path):
    prepare(tmp_path, ROWS, **CARRY)
    edit_fields(tmp_path / "out", lambda data: data.replace(b'"4"', b'"5"', 1))
    with pytest.raises(StoreError, match=r"\.fields: checksum differs"):
        list(StoredPrompts(batchloom.open_store(tmp_path / "out")))
    faults = batchloom.check(tmp_path / "out").faults
    assert any(".fields: checksum differs" in fault for fault in faults)


def test_the_recipe_of_a_store_makes_it_again(tmp_path):
    prepare(tmp_path, ROWS, **CARRY)
    batchloom.prepare(tmp_path / "in.jsonl", out=tmp_path / "again", recipe=tmp_path / "out")
    assert hash_store_files(tmp_path / "again") == hash_store_files(tmp_path / "out")
    recipe = batchloom.open_store(tmp_path / "out").manifest.recipe
    assert (recipe["reading"]["prompts"], recipe["reading"]["carry"]) == (True, ["answer", "number=level", "tags"])


def test_prompts_take_a_tool_format(tmp_path):
    tool = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
    results = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
    question = {"role": "user", "content": "1 + 1?"}
    rows = [{"prompt": [question], "a": 1}, {"prompt": [question, call, *results], "tools": [tool], "a": 2}]
    result = prepare(tmp_path, rows, prompts=True, carry=("a",), tool_format="default")
    prompts = StoredPrompts(batchloom.open_store(result.path))
    texts = [prompts.store[n].text for n in range(2)]
    assert texts[0] == "User:\n1 + 1?\n\nAssistant:\n"
    assert "> Tool Name: add\n" in texts[1]
    assert texts[1].endswith("User:\n1\n2\n\nAssistant:\n")


def test_prompts_are_no_labelled_answers(tmp_path):
    store = batchloom.open_store(prepare(tmp_path, ROWS, **CARRY).path)
    with pytest.raises(InputError, match="holds no labelled answers"):
        LabelledAnswers(store)


def test_labelled_steps_are_refused(tmp_path):
    steps = [{"prompt": f"{n}?", "completions": ["a", "b"], "labels": [True, False]} for n in range(9)]
    with pytest.raises(SchemaError, match=r"no schema fits: .*completions.*labels"):
        prepare(tmp_path, steps)
