import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
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
from batchloom.core.fingerprint import fingerprint
from batchloom.plan import order_lane_ranges
from batchloom.preparation import ChatRecipe, DedupRecipe
from batchloom.streaming import merge_states
from raw_streams.streams import STEPS, rows_of, small_stream, table, texts, write_lines, write_texts
from tiers import examples

SLOW = settings(
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
@SLOW
def test_a_stream_is_the_same_for_every_number_of_ranks(tmp_path_factory, files, lanes, shuffle, packing, data):
    folder = tmp_path_factory.mktemp("inputs")
    for number, count in enumerate(files):
        write_texts(folder / f"{number}.jsonl", count, seed=number)
    stream = small_stream(folder, lanes=lanes, shuffle=shuffle, packing=packing)
    whole = rows_of(stream)
    assert len(whole) == STEPS * 8
    world = data.draw(st.sampled_from([n for n in (1, 2, 4, 8) if lanes % n == 0]))
    assert rows_of(small_stream(folder, lanes=lanes, shuffle=shuffle, packing=packing), world) == whole


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_change_nothing(lines, workers):
    assert rows_of(small_stream(lines, workers=workers), 2) == rows_of(small_stream(lines))


def test_every_document_is_read_once_in_an_epoch(tmp_path):
    every = texts(200)
    lines = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in every])
    recipe = Recipe(inputs=("x",), tokenizer="bytes", val_fraction=0.0)
    stream = small_stream(lines, recipe=recipe, seq_len=256, packing="none", steps=25, lanes=1)
    loader = Loader(stream, output="numpy", prefetch=0)
    found = []
    for batch in loader:
        for ids in batch["input_ids"]:
            text = bytes(ids[: int((ids != stream.tokenizer.end_id).sum())].tolist()).decode()
            found.append(text)
    assert sorted(found) == sorted(every)
    assert found != every


def test_documents_of_val_are_left_out(tmp_path):
    lines = write_texts(tmp_path / "a.jsonl", 200)
    recipe = Recipe(inputs=("x",), tokenizer="bytes", val_fraction=0.3, dedup=DedupRecipe(mode="none"))
    stream = small_stream(lines, recipe=recipe, seq_len=256, packing="none", steps=25, lanes=1)
    streamed = {tuple(row[0]) for row in rows_of(stream).values()}
    batchloom.prepare(lines, out=tmp_path / "s", tokenizer="bytes", dedup="none", val_fraction=0.3)
    kept = {"train": set(), "val": set()}
    for split, documents in kept.items():
        store = batchloom.open_store(tmp_path / "s", split)
        for number in range(len(store)):
            ids = store[number].ids.tolist()
            documents.add((*ids, *[stream.tokenizer.end_id] * (256 - len(ids))))
    assert streamed == kept["train"]


@pytest.mark.parametrize("step", [1, 4, 11])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (4, 1), (2, 8)])
def test_a_run_goes_on_with_other_ranks_as_if_nothing_had_happened(lines, step, before, after):
    whole = rows_of(small_stream(lines))
    states = []
    for rank in range(before):
        loader = Loader(small_stream(lines), rank=rank, world_size=before, output="numpy")
        for batch in loader:
            if batch.step == step:
                states.append(json.loads(json.dumps(loader.state_dict())))
                break
    merged = merge_states(states)
    rest = rows_of(small_stream(lines), after, state=merged)
    assert rest == {place: row for place, row in whole.items() if place[0] > step}


KINDS = {
    "lines.txt.gz": lambda rows: gzip.compress("\n".join(rows).encode()),
    "table.csv": lambda rows: ("text,n\n" + "".join(f'"{t}\n!",{n}\n' for n, t in enumerate(rows))).encode(),
    "list.json": lambda rows: json.dumps([{"text": t} for t in rows]).encode(),
    "long.txt": lambda rows: "\n\n".join(rows).encode(),
    "packed.jsonl.gz": lambda rows: gzip.compress("".join(json.dumps({"text": t}) + "\n" for t in rows).encode()),
}


KIND_LANES = {"lines.txt.gz": 1, "packed.jsonl.gz": 1, "parquet": 2}


@pytest.mark.parametrize("kind", [*KINDS, "parquet"])
def test_a_lane_goes_on_inside_of_every_kind_of_file(tmp_path, kind):
    rows = texts(150)
    path = tmp_path / kind
    if kind == "parquet":
        path = table(rows, tmp_path)
    else:
        path.write_bytes(KINDS[kind](rows))
    made = [small_stream(path, lanes=KIND_LANES.get(kind)) for _ in range(2)]
    whole = rows_of(made[0])
    loader = Loader(made[0], output="numpy")
    states = {batch.step: loader.state_dict() for batch in loader}
    for step in (0, 3, 7):
        rest = rows_of(made[1], state=states[step])
        assert rest == {place: row for place, row in whole.items() if place[0] > step}


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
    stream = small_stream(path, seq_len=128)
    assert stream.spec.overlong == "drop"
    for batch in Loader(stream, output="numpy"):
        assert (batch["labels"] == -100).mean() > 0.3
        trained = batch["labels"][batch["labels"] != -100]
        said = bytes(trained[trained < 256].tolist()).decode()
        assert "answer" in said
        assert "question" not in said
    flat = next(iter(Loader(small_stream(path, seq_len=128), output="numpy", form="varlen")))
    assert (flat["labels"] != -100).any()
    assert flat["cu_seq_lens_q"][-1] == flat["input_ids"].size


def test_a_state_knows_its_stream(lines, tmp_path):
    loader = Loader(small_stream(lines), output="numpy")
    next(iter(loader))
    state = loader.state_dict()
    other = write_texts(tmp_path / "b.jsonl", 300)
    for stream, said in (
        (small_stream(lines, seed=4), "spec.seed was 3 and is 4"),
        (small_stream(lines, lanes=4), "spec.lanes was 8 and is 4"),
        (small_stream(other), "inputs.fingerprint was"),
    ):
        with pytest.raises(StateError, match=said):
            Loader(stream, output="numpy").load_state_dict(state)
    with pytest.raises(StateError, match="changed after it was saved"):
        loader.load_state_dict({**state, "position": 16})
    with pytest.raises(StateError, match="not the state of a stream"):
        loader.load_state_dict({"position": 8})
    part = Loader(small_stream(lines), rank=0, world_size=2, output="numpy").state_dict()
    with pytest.raises(StateError, match="this rank needs lane 1"):
        Loader(small_stream(lines), rank=1, world_size=2, output="numpy").load_state_dict(part)
    with pytest.raises(StateError, match="do not belong together: position"):
        merge_states([part, state])


def test_a_state_names_the_fields_of_a_recipe_that_differ(lines, tmp_path):
    batchloom.prepare(lines, out=tmp_path / "a", tokenizer="train:270", val_fraction=0)
    batchloom.prepare(lines, out=tmp_path / "b", tokenizer="train:285", val_fraction=0)
    order = {"seq_len": 32, "global_batch_size": 8, "steps": 4, "workers": 0}

    def loader(**changes):
        asked = {"tokenizer": str(tmp_path / "a"), "val_fraction": 0, **order, **changes}
        return Loader(batchloom.stream(lines, **asked), output="numpy")

    state = json.loads(json.dumps(loader().state_dict()))
    for changes, said in (
        ({"tokenizer": str(tmp_path / "b")}, "stream: tokenizer: 'a' -> 'b'. Give"),
        ({"val_fraction": 0.1}, "stream: val_fraction: 0.0 -> 0.1. Give"),
        ({"normalize": False, "seed": 4}, "True -> False; spec.seed was 0 and is 4. Give"),
    ):
        with pytest.raises(StateError, match=said):
            loader(**changes).load_state_dict(state)
    (tmp_path / "a").rename(tmp_path / "old")
    (tmp_path / "b").rename(tmp_path / "a")
    with pytest.raises(StateError, match=r"stream: tokenizer was '\w{32}' and is '\w{32}'. Give"):
        loader().load_state_dict(state)


def test_a_state_without_a_recipe_goes_on(lines):
    def loader(**changes):
        return Loader(small_stream(lines, **changes), output="numpy", prefetch=0)

    first = loader()
    next(iter(first))
    state = {k: v for k, v in first.state_dict().items() if k not in ("recipe", "keep", "check")}
    old = {**state, "check": fingerprint(state)}
    again = loader()
    again.load_state_dict(old)
    assert again.next_step == 1
    with pytest.raises(StateError, match="stream: spec.seed was 3 and is 4. Give"):
        loader(seed=4).load_state_dict(old)


def test_a_loader_of_a_stream_is_as_any_other(lines):
    stream = small_stream(lines)
    loader = Loader(stream, output="numpy")
    assert len(loader) == STEPS
    assert "source=real stream of a.jsonl" in loader.origin
    first = [batch["input_ids"] for batch in loader]
    again = [batch["input_ids"] for batch in loader]
    there = [batch["input_ids"].numpy() for batch in Loader(stream, device="cpu")]
    assert all((a == b).all() for a, b in zip(first * 2, again + there, strict=True))
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


def test_what_cannot_be_is_refused(lines, tmp_path):
    with pytest.raises(PlanError, match="lanes 3 does not divide"):
        small_stream(lines, lanes=3)
    with pytest.raises(PlanError, match="8 lanes cannot be divided evenly among 3 ranks"):
        Loader(small_stream(lines, global_batch_size=24, lanes=8), rank=0, world_size=3)
    with pytest.raises(SettingsError, match="steps"):
        small_stream(lines, steps=None)
    with pytest.raises(SettingsError, match="lanes: 'x'"):
        small_stream(lines, lanes="x")
    with pytest.raises(InputMissingError):
        small_stream(tmp_path / "none.jsonl")
    packed = tmp_path / "p.jsonl.gz"
    packed.write_bytes(gzip.compress(lines.read_bytes()))
    with pytest.raises(PlanError, match=r"1 record ranges, too few for 8 lanes.*lanes=1"):
        small_stream(packed, lanes=8)
    assert small_stream(packed).lanes == 1
    pairs = write_lines(
        tmp_path / "pairs.jsonl",
        [{"prompt": "p", "chosen": "a", "rejected": "b"} for _ in range(20)],
    )
    with pytest.raises(InputError, match="preferences"):
        list(Loader(small_stream(pairs, lanes=1), output="numpy"))
    with pytest.raises(SettingsError, match="is synthetic"):
        batchloom.stream("dummy", seq_len=8, global_batch_size=1, steps=1)


NOTHING = [
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


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(("name", "held", "asked", "said"), NOTHING)
def test_a_stream_without_documents_says_why(tmp_path, name, held, asked, said, workers):
    (tmp_path / name).write_bytes(held)
    order = dict(asked)
    recipe = Recipe(
        inputs=("x",),
        tokenizer="bytes",
        dedup=DedupRecipe(mode="none"),
        val_fraction=order.pop("val", 0.0),
        chat=ChatRecipe(max_tokens=order.pop("most", None)),
    )
    with pytest.raises((PlanError, InputError), match=said) as error:
        stream = small_stream(tmp_path / name, recipe=recipe, lanes=1, workers=workers, **order)
        list(Loader(stream, output="numpy"))
    assert "lanes=" not in str(error.value)


@pytest.mark.parametrize(("lanes", "fewer"), [(9, 3), (6, 3), (5, 1), (2, 1)])
def test_a_lane_without_documents_names_lanes_that_fit(tmp_path, lanes, fewer):
    path = write_lines(tmp_path / "a.jsonl", [{"text": ""}] * 1000)
    order = {"global_batch_size": 90, "lanes": lanes}
    with pytest.raises(PlanError, match=rf"Lane 0 of {lanes} .* fewer lanes \(lanes={fewer}\)"):
        rows_of(small_stream(path, **order))


def test_bad_records_are_left_out_within_the_budget(lines, tmp_path, caplog):
    good = lines.read_text().splitlines()
    mended = tmp_path / "c.jsonl"
    mended.write_text("\n".join([*good[:5], '{"text": "a', *good[5:]]) + "\n")
    found = rows_of(small_stream(mended, lanes=1, steps=300))
    assert len(found) == 300 * 8
    assert caplog.text.count("on line 6 in c.jsonl") == 1
    mended.write_text("\n".join([*good[:5], *['{"text": "a'] * 12, *good[5:]]) + "\n")
    with pytest.raises(TooManyBadRecordsError, match=r"max_bad 0.1% allows 10"):
        rows_of(small_stream(mended, lanes=1, steps=300))


def test_a_file_that_vanishes_is_named(tmp_path):
    for number in range(4):
        write_texts(tmp_path / f"{number}.jsonl", 60, seed=number)
    stream = small_stream(tmp_path, lanes=1)
    batches = iter(Loader(stream, output="numpy", prefetch=0))
    next(batches)
    (tmp_path / "2.jsonl").unlink()
    with pytest.raises(InputMissingError, match=r"2.jsonl is missing"):
        list(batches)


def test_stretches_hold_every_byte_once(tmp_path):
    for number in range(3):
        write_texts(tmp_path / f"{number}.jsonl", 90, seed=number)
    (tmp_path / "long.txt").write_text("\n\n".join(texts(200)))
    stream = small_stream(tmp_path)
    stretches = stream._range_groups
    held = {}
    for stretch in stretches:
        for piece in stretch.ranges:
            held.setdefault((stretch.unit, piece.part_index), []).append((piece.start, piece.stop))
    for unit in stream._units:
        for place, part in enumerate(unit.parts):
            pieces = held[unit.number, place]
            assert pieces[0][0] == part.start
            assert pieces[-1][1] == part.stop
            assert all(a[1] == b[0] for a, b in pairwise(pieces))
    every = np.concatenate([order_lane_ranges(len(stretches), 8, stream.spec, lane, 0) for lane in range(8)])
    assert sorted(every) == list(range(len(stretches)))


def test_a_terabyte_is_not_read_before_the_first_batch(tmp_path):
    """4,096 files of 256 MiB: each has a beginning and a hole, which a reader of all of it meets."""
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts(150, words=60)).encode()
    for number in range(4096):
        with (tmp_path / f"{number:04d}.jsonl").open("wb") as file:
            file.write(lines)
            file.truncate(256 << 20)
    stream = batchloom.stream(tmp_path, tokenizer="bytes", seq_len=64, global_batch_size=8, steps=1, workers=0)
    assert stream.lanes == 8
    assert "1,099,511,627,776 bytes" in repr(stream)
    began = time.monotonic()
    batch = next(iter(Loader(stream, output="numpy", prefetch=0)))
    assert batch["input_ids"].shape == (8, 64)
    # Eight beginnings; a terabyte takes hours.
    assert time.monotonic() - began < 60


def test_inputs_and_settings_may_come_from_a_recipe(lines, tmp_path):
    recipe = Recipe(inputs=(str(lines),), tokenizer="bytes", val_fraction=0.0)
    order = {"seq_len": 32, "global_batch_size": 8, "steps": 4, "workers": 0}
    made = batchloom.stream(recipe=recipe, **order)
    said = batchloom.stream(lines, tokenizer="bytes", val_fraction=0, **order)
    assert made.fingerprint == said.fingerprint
    assert rows_of(made) == rows_of(said)
    (tmp_path / "r.yaml").write_text(f"inputs: [{lines}]\ntokenizer: bytes\nval_fraction: 0\n")
    assert batchloom.stream(recipe=tmp_path / "r.yaml", **order).fingerprint == said.fingerprint


def test_a_stream_goes_through_no_data_loader(lines):
    pytorch = pytest.importorskip("batchloom.adapters.pytorch")
    with pytest.raises(InputError, match="its own worker processes"):
        pytorch.LoaderIterable(Loader(small_stream(lines)))


@pytest.mark.parametrize("ask", [lambda of: explain(of, 0), lambda of: when(of, document=0)])
def test_a_stream_is_asked_no_questions(lines, ask):
    stream = small_stream(lines)
    for asked in (stream, Loader(stream, output="numpy")):
        with pytest.raises(PlanError, match=r"stream cannot be used.*batchloom prepare"):
            ask(asked)


def test_what_a_killed_process_left_is_deleted_by_the_next_stream(tmp_path, monkeypatch):
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
    left = Path(process.stdout.readline().strip())
    monkeypatch.setattr(tempfile, "tempdir", str(home))
    first = small_stream(lines)
    assert left.exists()
    process.kill()
    process.communicate()
    assert left.exists()
    second = small_stream(lines)
    assert not left.exists()
    assert first._folder.exists()
    assert rows_of(first) == rows_of(second)
