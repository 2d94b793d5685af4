import gzip
import json
import os
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import batchloom
from batchloom import (
    InputError,
    Loader,
    PlanError,
    Recipe,
    SettingsError,
    StateError,
    explain,
    when,
)
from batchloom.core.errors import InputMissingError, TooManyBadRecordsError
from batchloom.preparation import ChatRecipe, DedupRecipe
from batchloom.streaming import merge_states, order_lane_ranges
from batchloom.testing import write_store
from processes import have_ended
from raw_streams.streams import (
    STEPS,
    collect_rows,
    make_small_stream,
    make_texts,
    write_lines,
    write_table,
    write_texts,
)
from tiers import examples
from waiting import wait_until

SLOW = pytest.mark.slow
HYPOTHESIS_SETTINGS = settings(
    max_examples=examples(12),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture
def lines(tmp_path):
    return write_texts(tmp_path / "a.jsonl", 300)


@given(
    files=st.lists(st.integers(100, 200), min_size=1, max_size=3),
    lanes=st.sampled_from([1, 2, 4, 8]),
    shuffle=st.booleans(),
    packing=st.sampled_from(["best_fit", "wrap", "none"]),
    data=st.data(),
)
@HYPOTHESIS_SETTINGS
def test_a_stream_is_the_same_for_every_number_of_ranks(tmp_path_factory, files, lanes, shuffle, packing, data):
    folder = tmp_path_factory.mktemp("inputs")
    for number, count in enumerate(files):
        write_texts(folder / f"{number}.jsonl", count, seed=number)
    stream = make_small_stream(folder, lanes=lanes, shuffle=shuffle, packing=packing)
    expected = collect_rows(stream)
    assert len(expected) == STEPS * 8
    world = data.draw(st.sampled_from([n for n in (1, 2, 4, 8) if lanes % n == 0]))
    assert collect_rows(make_small_stream(folder, lanes=lanes, shuffle=shuffle, packing=packing), world) == expected


@pytest.mark.parametrize("workers", [pytest.param(1, marks=SLOW), 2, pytest.param(3, marks=SLOW)])
def test_workers_do_not_change_the_rows(lines, workers):
    """A rank with four of the eight lanes divides them among its workers."""
    expected = collect_rows(make_small_stream(lines))
    rows = collect_rows(make_small_stream(lines, workers=workers), 2, ranks=[1])
    assert rows == {position: row for position, row in expected.items() if position[1] % 2}


def test_every_document_is_read_once_in_an_epoch(tmp_path):
    documents = make_texts(200)
    lines = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in documents])
    recipe = Recipe(inputs=("x",), tokenizer="bytes", val_fraction=0.0)
    stream = make_small_stream(lines, recipe=recipe, seq_len=256, packing="none", steps=25, lanes=1)
    loader = Loader(stream, output="numpy", prefetch=0)
    streamed = []
    for batch in loader:
        for ids in batch["input_ids"]:
            text = bytes(ids[: int((ids != stream.tokenizer.end_id).sum())].tolist()).decode()
            streamed.append(text)
    assert sorted(streamed) == sorted(documents)
    assert streamed != documents


def test_documents_of_val_are_left_out(tmp_path):
    lines = write_texts(tmp_path / "a.jsonl", 200)
    recipe = Recipe(inputs=("x",), tokenizer="bytes", val_fraction=0.3, dedup=DedupRecipe(mode="none"))
    stream = make_small_stream(lines, recipe=recipe, seq_len=256, packing="none", steps=25, lanes=1)
    streamed = {tuple(row[0]) for row in collect_rows(stream).values()}
    batchloom.prepare(lines, out=tmp_path / "s", tokenizer="bytes", dedup="none", val_fraction=0.3)
    stored = {"train": set(), "val": set()}
    for split, documents in stored.items():
        store = batchloom.open_store(tmp_path / "s", split)
        for number in range(len(store)):
            ids = store[number].ids.tolist()
            documents.add((*ids, *[stream.tokenizer.end_id] * (256 - len(ids))))
    assert streamed == stored["train"]


@pytest.mark.parametrize("step", [1, 4, 11])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (4, 1), (2, 8)])
def test_a_run_is_resumed_with_another_number_of_ranks(lines, step, before, after):
    expected = collect_rows(make_small_stream(lines))
    states = []
    for rank in range(before):
        loader = Loader(make_small_stream(lines), rank=rank, world_size=before, output="numpy")
        for batch in loader:
            if batch.step == step:
                states.append(json.loads(json.dumps(loader.state_dict())))
                break
    merged = merge_states(states)
    resumed = collect_rows(make_small_stream(lines), after, state=merged)
    assert resumed == {position: row for position, row in expected.items() if position[0] > step}


ENCODERS = {
    "lines.txt.gz": lambda rows: gzip.compress("\n".join(rows).encode()),
    "table.csv": lambda rows: ("text,n\n" + "".join(f'"{t}\n!",{n}\n' for n, t in enumerate(rows))).encode(),
    "list.json": lambda rows: json.dumps([{"text": t} for t in rows]).encode(),
    "long.txt": lambda rows: "\n\n".join(rows).encode(),
    "packed.jsonl.gz": lambda rows: gzip.compress("".join(json.dumps({"text": t}) + "\n" for t in rows).encode()),
}


KIND_LANES = {"lines.txt.gz": 1, "packed.jsonl.gz": 1, "parquet": 2}


@pytest.mark.parametrize("kind", [*ENCODERS, "parquet"])
def test_a_lane_is_resumed_inside_of_every_kind_of_file(tmp_path, kind):
    rows = make_texts(150)
    path = tmp_path / kind
    if kind == "parquet":
        path = write_table(rows, tmp_path)
    else:
        path.write_bytes(ENCODERS[kind](rows))
    streams = [make_small_stream(path, lanes=KIND_LANES.get(kind)) for _ in range(2)]
    expected = collect_rows(streams[0])
    loader = Loader(streams[0], output="numpy")
    states = {batch.step: loader.state_dict() for batch in loader}
    for step in (0, 3, 7):
        resumed = collect_rows(streams[1], state=states[step])
        assert resumed == {position: row for position, row in expected.items() if position[0] > step}


def test_conversations_have_masks(tmp_path):
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"question {n}"},
                {"role": "assistant", "content": f"answer {n}"},
            ]
        }
        for n in range(120)
    ]
    path = write_lines(tmp_path / "chat.jsonl", rows)
    stream = make_small_stream(path, seq_len=128)
    assert stream.spec.overlong == "drop"
    for batch in Loader(stream, output="numpy"):
        assert (batch["labels"] == -100).mean() > 0.3
        trained = batch["labels"][batch["labels"] != -100]
        trained_text = bytes(trained[trained < 256].tolist()).decode()
        assert "answer" in trained_text
        assert "question" not in trained_text
    flat = next(iter(Loader(make_small_stream(path, seq_len=128), output="numpy", form="varlen")))
    assert (flat["labels"] != -100).any()
    assert flat["cu_seq_lens_q"][-1] == flat["input_ids"].size


def test_a_state_of_another_stream_is_refused(lines, tmp_path):
    loader = Loader(make_small_stream(lines), output="numpy")
    next(iter(loader))
    state = loader.state_dict()
    other_lines = write_texts(tmp_path / "b.jsonl", 300)
    for stream, message in (
        (make_small_stream(lines, seed=4), "spec.seed was 3 and is 4"),
        (make_small_stream(lines, lanes=4), "spec.lanes was 8 and is 4"),
        (make_small_stream(other_lines), "inputs.fingerprint was"),
    ):
        with pytest.raises(StateError, match=message):
            Loader(stream, output="numpy").load_state_dict(state)
    with pytest.raises(StateError, match="changed after it was saved"):
        loader.load_state_dict({**state, "position": 16})
    with pytest.raises(StateError, match="not a loader's state"):
        loader.load_state_dict({"position": 8})
    rank_state = Loader(make_small_stream(lines), rank=0, world_size=2, output="numpy").state_dict()
    with pytest.raises(StateError, match="this rank needs lane 1"):
        Loader(make_small_stream(lines), rank=1, world_size=2, output="numpy").load_state_dict(rank_state)
    with pytest.raises(StateError, match="do not belong together: position"):
        merge_states([rank_state, state])
    store = write_store(tmp_path / "s", {"train": [[1, 2, 3]] * 20})
    store_state = Loader(store, seq_len=8, global_batch_size=2, rank=0, world_size=1, output="numpy").state_dict()
    with pytest.raises(StateError, match="state of a loader of a store, not of a stream"):
        merge_states([store_state])
    with pytest.raises(StateError):
        Loader(make_small_stream(lines), output="numpy").load_state_dict(store_state)


def test_a_state_names_the_fields_of_a_recipe_that_differ(lines, tmp_path):
    batchloom.prepare(lines, out=tmp_path / "a", tokenizer="train:270", val_fraction=0)
    batchloom.prepare(lines, out=tmp_path / "b", tokenizer="train:285", val_fraction=0)
    plan_settings = {"seq_len": 32, "global_batch_size": 8, "steps": 4, "workers": 0}

    def loader(**changes):
        options = {"tokenizer": str(tmp_path / "a"), "val_fraction": 0, **plan_settings, **changes}
        return Loader(batchloom.stream(lines, **options), output="numpy")

    state = json.loads(json.dumps(loader().state_dict()))
    for changes, message in (
        ({"tokenizer": str(tmp_path / "b")}, "stream: tokenizer: 'a' -> 'b'. Give"),
        ({"val_fraction": 0.1}, "stream: val_fraction: 0.0 -> 0.1. Give"),
        ({"normalize": False, "seed": 4}, "True -> False; spec.seed was 0 and is 4. Give"),
    ):
        with pytest.raises(StateError, match=message):
            loader(**changes).load_state_dict(state)
    (tmp_path / "a").rename(tmp_path / "old")
    (tmp_path / "b").rename(tmp_path / "a")
    with pytest.raises(StateError, match=r"stream: tokenizer was '\w{32}' and is '\w{32}'. Give"):
        loader().load_state_dict(state)


def test_a_loader_of_a_stream(lines):
    stream = make_small_stream(lines)
    loader = Loader(stream, output="numpy")
    assert len(loader) == STEPS
    assert "source=real stream of a.jsonl" in loader.origin
    batches = [batch["input_ids"] for batch in loader]
    repeated = [batch["input_ids"] for batch in loader]
    torch_batches = [batch["input_ids"].numpy() for batch in Loader(stream, device="cpu")]
    assert all((a == b).all() for a, b in zip(batches * 2, repeated + torch_batches, strict=True))
    state = loader.state_dict()
    assert state["position"] == 8 * STEPS
    loader.load_state_dict(state)
    assert list(loader) == []
    with pytest.raises(PlanError, match="read in order"):
        loader[3]
    with pytest.raises(PlanError, match="read in order"):
        loader.batch(3)
    with pytest.raises(SettingsError, match="seq_len: belongs to the plan"):
        Loader(stream, seq_len=8)
    loader.load_state_dict(Loader(stream, output="numpy").state_dict())
    assert loader.next_step == 0


def test_invalid_settings_are_refused(lines, tmp_path):
    with pytest.raises(PlanError, match="lanes 3 does not divide"):
        make_small_stream(lines, lanes=3)
    with pytest.raises(PlanError, match="8 lanes cannot be divided evenly among 3 ranks"):
        Loader(make_small_stream(lines, global_batch_size=24, lanes=8), rank=0, world_size=3)
    with pytest.raises(SettingsError, match="steps"):
        make_small_stream(lines, steps=None)
    with pytest.raises(SettingsError, match="lanes: 'x'"):
        make_small_stream(lines, lanes="x")
    with pytest.raises(InputMissingError):
        make_small_stream(tmp_path / "none.jsonl")
    packed = tmp_path / "p.jsonl.gz"
    packed.write_bytes(gzip.compress(lines.read_bytes()))
    with pytest.raises(PlanError, match=r"1 record ranges, too few for 8 lanes.*lanes=1"):
        make_small_stream(packed, lanes=8)
    assert make_small_stream(packed).lanes == 1
    pairs = write_lines(
        tmp_path / "pairs.jsonl",
        [{"prompt": "p", "chosen": "a", "rejected": "b"} for _ in range(20)],
    )
    with pytest.raises(InputError, match="preferences"):
        list(Loader(make_small_stream(pairs, lanes=1), output="numpy"))
    with pytest.raises(SettingsError, match="is synthetic"):
        batchloom.stream("dummy", seq_len=8, global_batch_size=1, steps=1)


EMPTY_INPUTS = [
    ("e.jsonl", b"", {}, "received no record|holds no|empty"),
    ("b.jsonl", b'{"text": ""}\n' * 30, {}, r"of 30 records: 30 empty. Name other inputs.$"),
    ("blank.txt", b"\n\n  \n", {}, r"of 1 record: 1 empty. Name other inputs.$"),
    ("x.txt", b"\xff\xfe\x00\x01\x02", {}, r"1 bad. The first bad record: x.txt.* Fix the input"),
    (
        "t.jsonl",
        b'{"text": "abcdef"}\n' * 9,
        {"val": 0.999999},
        r"9 for val. Give a smaller val_fr",
    ),
    (
        *("t.jsonl", b'{"text": "abcdef"}\n' * 9, {"overlong": "drop", "seq_len": 3}),
        r"all 9 documents are longer than seq_len 3 \(the shortest has 7 tokens\).*'split'; documents with images or ",
    ),
    (
        *("c.jsonl", b'{"question": "a?", "answer": "b."}\n' * 9, {"most": 3}),
        r"of 9 records: 9 overlong. Leave fewer out \(clean=, max_tokens=",
    ),
]


@pytest.mark.parametrize(
    ("name", "data", "options", "message", "workers"),
    [
        # A worker process is as slow as all other cases together.
        pytest.param(*case, workers, marks=[SLOW] if workers and case[0] != "x.txt" else [])
        for case in EMPTY_INPUTS
        for workers in (0, 1)
    ],
)
def test_a_stream_without_documents_says_why(tmp_path, name, data, options, message, workers):
    (tmp_path / name).write_bytes(data)
    plan_settings = dict(options)
    recipe = Recipe(
        inputs=("x",),
        tokenizer="bytes",
        dedup=DedupRecipe(mode="none"),
        val_fraction=plan_settings.pop("val", 0.0),
        chat=ChatRecipe(max_tokens=plan_settings.pop("most", None)),
    )
    with pytest.raises((PlanError, InputError), match=message) as error:
        stream = make_small_stream(tmp_path / name, recipe=recipe, lanes=1, workers=workers, **plan_settings)
        list(Loader(stream, output="numpy"))
    assert "lanes=" not in str(error.value)


@pytest.mark.parametrize(("lanes", "fewer"), [(9, 3), (6, 3), (5, 1), (2, 1)])
def test_a_lane_without_documents_names_lanes_that_fit(tmp_path, lanes, fewer):
    path = write_lines(tmp_path / "a.jsonl", [{"text": ""}] * 1000)
    plan_settings = {"global_batch_size": 90, "lanes": lanes}
    with pytest.raises(PlanError, match=rf"Lane 0 of {lanes} .* fewer lanes \(lanes={fewer}\)"):
        collect_rows(make_small_stream(path, **plan_settings))


def test_bad_records_are_left_out_within_the_budget(lines, tmp_path, caplog):
    good_lines = lines.read_text().splitlines()
    path = tmp_path / "c.jsonl"
    path.write_text("\n".join([*good_lines[:5], '{"text": "a', *good_lines[5:]]) + "\n")
    rows = collect_rows(make_small_stream(path, lanes=1, steps=300))
    assert len(rows) == 300 * 8
    assert caplog.text.count("on line 6 in c.jsonl") == 1
    path.write_text("\n".join([*good_lines[:5], *['{"text": "a'] * 12, *good_lines[5:]]) + "\n")
    with pytest.raises(TooManyBadRecordsError, match=r"max_bad 0.1% allows 10"):
        collect_rows(make_small_stream(path, lanes=1, steps=300))


def test_a_stream_that_fails_or_is_left_closes_its_files(lines):
    loader = Loader(make_small_stream(lines, lanes=1), output="numpy", prefetch=0)
    batches = iter(loader)
    next(batches)
    assert str(lines) in [file.path for file in psutil.Process().open_files()]
    with pytest.raises(RuntimeError, match="training fails"):
        batches.throw(RuntimeError("training fails"))
    assert str(lines) not in [file.path for file in psutil.Process().open_files()]


def test_the_folder_of_a_stream_is_deleted_after_its_workers_have_ended(lines, tmp_path, monkeypatch):
    """A worker would make it again."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    others = psutil.Process().children(recursive=True)
    batches = iter(Loader(make_small_stream(lines, workers=1), output="numpy", prefetch=0))
    next(batches)
    workers = [process.pid for process in psutil.Process().children(recursive=True) if process not in others]
    assert workers
    batches.close()
    wait_until(lambda: not list(folder.iterdir()), "the folder is deleted")
    assert have_ended(workers, seconds=0)


def test_a_deleted_file_is_named(tmp_path):
    for number in range(4):
        write_texts(tmp_path / f"{number}.jsonl", 60, seed=number)
    stream = make_small_stream(tmp_path, lanes=1)
    batches = iter(Loader(stream, output="numpy", prefetch=0))
    next(batches)
    (tmp_path / "2.jsonl").unlink()
    with pytest.raises(InputMissingError, match=r"2.jsonl is missing"):
        list(batches)


def test_range_groups_hold_every_byte_once(tmp_path):
    for number in range(3):
        write_texts(tmp_path / f"{number}.jsonl", 90, seed=number)
    (tmp_path / "long.txt").write_text("\n\n".join(make_texts(200)))
    stream = make_small_stream(tmp_path)
    range_groups = stream._range_groups
    ranges_by_part = {}
    for group in range_groups:
        for record_range in group.ranges:
            ranges_by_part.setdefault((group.unit, record_range.part_index), []).append(
                (record_range.start, record_range.stop)
            )
    for unit in stream._units:
        for part_number, part in enumerate(unit.parts):
            ranges = ranges_by_part[unit.number, part_number]
            assert ranges[0][0] == part.start
            assert ranges[-1][1] == part.stop
            assert all(a[1] == b[0] for a, b in pairwise(ranges))
    lane_order = np.concatenate([order_lane_ranges(len(range_groups), 8, stream.spec, lane, 0) for lane in range(8)])
    assert sorted(lane_order) == list(range(len(range_groups)))


@pytest.mark.slow
def test_large_inputs_are_not_read_before_the_first_batch(tmp_path):
    """Each of 1,024 files of 256 MiB has a short beginning and a hole.

    Units of inputs of this size are whole files, so no range begins in a hole.
    """
    lines = "".join(json.dumps({"text": text}) + "\n" for text in make_texts(150, words=60)).encode()
    for number in range(1024):
        with (tmp_path / f"{number:04d}.jsonl").open("wb") as file:
            file.write(lines)
            file.truncate(256 << 20)
    stream = batchloom.stream(tmp_path, tokenizer="bytes", seq_len=64, global_batch_size=8, steps=1, workers=0)
    assert stream.lanes == 8
    assert "274,877,906,944 bytes" in repr(stream)
    read_before = psutil.Process().io_counters().read_chars
    batch = next(iter(Loader(stream, output="numpy", prefetch=0)))
    assert batch["input_ids"].shape == (8, 64)
    # Eight beginnings are read.
    assert psutil.Process().io_counters().read_chars - read_before < 100 << 20


def test_a_recipe_gives_inputs_and_settings(lines, tmp_path):
    recipe = Recipe(inputs=(str(lines),), tokenizer="bytes", val_fraction=0.0)
    plan_settings = {"seq_len": 32, "global_batch_size": 8, "steps": 4, "workers": 0}
    from_recipe = batchloom.stream(recipe=recipe, **plan_settings)
    from_arguments = batchloom.stream(lines, tokenizer="bytes", val_fraction=0, **plan_settings)
    assert from_recipe.fingerprint == from_arguments.fingerprint
    assert collect_rows(from_recipe) == collect_rows(from_arguments)
    (tmp_path / "r.yaml").write_text(f"inputs: [{lines}]\ntokenizer: bytes\nval_fraction: 0\n")
    assert batchloom.stream(recipe=tmp_path / "r.yaml", **plan_settings).fingerprint == from_arguments.fingerprint


def test_a_data_loader_of_a_stream_is_refused(lines):
    pytorch = pytest.importorskip("batchloom.adapters.pytorch")
    with pytest.raises(InputError, match="its own worker processes"):
        pytorch.LoaderIterable(Loader(make_small_stream(lines)))


@pytest.mark.parametrize("query", [lambda data: explain(data, 0), lambda data: when(data, document=0)])
def test_plan_queries_of_a_stream_are_refused(lines, query):
    stream = make_small_stream(lines)
    for target in (stream, Loader(stream, output="numpy")):
        with pytest.raises(PlanError, match=r"stream cannot be used.*batchloom prepare"):
            query(target)


def test_the_folder_of_a_killed_process_is_deleted_by_the_next_stream(tmp_path, monkeypatch):
    home, lines = tmp_path / "tmp", write_texts(tmp_path / "in.jsonl", 60)
    home.mkdir()
    code = (
        "import sys, time, batchloom\n"
        f"s = batchloom.stream({str(lines)!r}, tokenizer='bytes', seq_len=32, global_batch_size=2, steps=2, workers=0)\n"
        "print(s._folder, flush=True)\n"
        "time.sleep(600)\n"
    )
    environment = {**os.environ, "TMPDIR": str(home)}
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    killed_folder = Path(process.stdout.readline().strip())
    monkeypatch.setattr(tempfile, "tempdir", str(home))
    first_stream = make_small_stream(lines)
    assert killed_folder.exists()
    process.kill()
    process.communicate()
    assert killed_folder.exists()
    second_stream = make_small_stream(lines)
    assert not killed_folder.exists()
    assert first_stream._folder.exists()
    assert collect_rows(first_stream) == collect_rows(second_stream)


# Writes the reasoning of the last answer alone.
THINKING = (
    "{% for m in messages %}{{ m.role }}:{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}"
    "</think>{% endif %}{{ m.content }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def list_labelled_rows(data, **plan):
    batches = list(Loader(data, **plan))
    return sorted(
        (*ids, *labels)
        for batch in batches
        for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True)
    )


@pytest.mark.parametrize("policy", ["keep", "mask", "drop", "split"])
def test_a_stream_has_the_labels_of_the_store_and_of_doctor(tmp_path, caplog, policy):
    (tmp_path / "t.jinja").write_text(THINKING)
    turns = [
        [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "Yes.", "reasoning_content": f"Hm {n}"}]
        for n in range(40)
    ]
    file = write_lines(tmp_path / "in.jsonl", [{"messages": turns[n] + turns[n + 1]} for n in range(0, 40, 2)])
    settings = {"tokenizer": "bytes", "template": str(tmp_path / "t.jinja"), "reasoning": policy}
    path = batchloom.prepare(file, out=tmp_path / "out", val_fraction=0, dedup="none", **settings).path
    store = batchloom.open_store(path)
    diagnosis = batchloom.doctor(file, **settings)
    assert (diagnosis.documents, diagnosis.tokens) == (len(store), sum(len(document.ids) for document in store))
    assert diagnosis.trained_tokens == store.contents.trained_tokens
    caplog.clear()
    plan = {"seq_len": 128, "global_batch_size": 4, "steps": len(store) // 4, "packing": "none"}
    streamed = list_labelled_rows(batchloom.stream(file, **plan, lanes=1, workers=0, val_fraction=0, **settings))
    assert streamed == list_labelled_rows(store, **plan)
    notes = [message for message in caplog.messages if "leaves out the reasoning" in message]
    assert len(notes) == (policy == "keep")
