"""Long documents of a stream: what becomes of them is what becomes of them in a store of the same inputs."""

from itertools import permutations

import pytest

import batchloom
from batchloom import Loader, open_store
from batchloom.batches import PlanOptions
from raw_streams.streams import rows_of, small_stream, texts, write_lines, write_texts

ORDER = {"seq_len": 64, "global_batch_size": 4, "steps": 20, "lanes": 2}
CUT = "including conversations. overlong='drop'"


def asked(count: int, words: int = 3) -> list[dict]:
    return [{"question": f"Is {n} odd?", "answer": "Yes it is. " * (n % words + 1)} for n in range(count)]


@pytest.fixture
def inputs(tmp_path):
    """One of each: conversations, texts in records, a text file, token ids with a mask."""
    ids = [{"input_ids": [n % 250, 5, 6], "labels": [-100, 5, -100]} for n in range(40)]
    (tmp_path / "prose.txt").write_text("\n\n".join(texts(30)))
    return {
        "chat": write_lines(tmp_path / "chat.jsonl", asked(200, 40)),
        "talk": write_lines(tmp_path / "talk.jsonl", asked(80)),
        "text": write_texts(tmp_path / "text.jsonl", 120),
        "prose": tmp_path / "prose.txt",
        "ids": write_lines(tmp_path / "ids.jsonl", ids),
    }


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (("chat",), "drop"),
        (("chat", "talk"), "drop"),
        (("chat", "text"), "split"),
        (("chat", "prose"), "split"),
        (("chat", "talk", "ids"), "split"),
        (("text", "prose", "ids"), "split"),
    ],
)
def test_the_default_is_that_of_the_store_in_every_order(tmp_path, inputs, names, wanted, caplog):
    batchloom.prepare([inputs[name] for name in names], out=tmp_path / "s", tokenizer="bytes")
    store = open_store(tmp_path / "s")
    assert Loader(store, seq_len=64, global_batch_size=4).plan.spec.overlong == wanted
    for order in permutations(names):
        stream = small_stream(*(inputs[name] for name in order), **ORDER)
        assert stream.spec.overlong == wanted
        caplog.clear()
        rows_of(stream)
        rows_of(stream)
        assert caplog.text.count(CUT) == (store.contents.mixed and wanted == "split")
        assert caplog.text.count("overlong='drop' leaves out documents") == (wanted == "drop")
    said = small_stream(*(inputs[name] for name in names), overlong="split", **ORDER)
    caplog.clear()
    rows_of(said)
    assert CUT not in caplog.text


@pytest.mark.parametrize("workers", [0, 2])
def test_conversations_that_nobody_looked_for_are_told_when_they_come(tmp_path, inputs, workers, caplog):
    (tmp_path / "in").mkdir()
    for number in range(70):
        write_texts(tmp_path / f"in/{number:03}.jsonl", 3, seed=number)
    inputs["talk"].rename(tmp_path / "in/talk.jsonl")
    order = {**ORDER, "steps": 120, "lanes": 1, "shuffle": False}
    stream = small_stream(tmp_path / "in", workers=workers, **order)
    batches = iter(Loader(stream, output="numpy", prefetch=0))
    next(batches)
    assert CUT not in caplog.text
    list(batches)
    assert caplog.text.count(CUT) == 1


@pytest.mark.parametrize("names", [("chat", "text"), ("text", "chat")])
def test_the_kept_store_of_mixed_inputs_repeats_the_stream(tmp_path, inputs, names):
    order = {"seq_len": 64, "global_batch_size": 4, "steps": 30}
    stream = batchloom.stream(
        [inputs[name] for name in names],
        tokenizer="bytes",
        val_fraction=0,
        workers=0,
        keep=tmp_path / "kept",
        **order,
    )
    streamed = [batch["input_ids"].tolist() for batch in Loader(stream, output="numpy")]
    stream.finish(workers=1)
    again = Loader(
        open_store(tmp_path / "kept"),
        plan=PlanOptions(order="lanes", lanes=stream.lanes, pool_size=8192),
        output="numpy",
        **order,
    )
    assert [batch["input_ids"].tolist() for batch in again] == streamed
