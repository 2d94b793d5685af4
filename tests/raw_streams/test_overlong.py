"""Streams apply the overlong policy of a store of the same inputs."""

from itertools import permutations

import pytest

import batchloom
from batchloom import Loader, open_store
from lane_plans import make_lane_loader
from raw_streams.streams import collect_rows, make_small_stream, make_texts, write_lines, write_texts

ORDER = {"seq_len": 64, "global_batch_size": 4, "steps": 2, "lanes": 2}
SPLIT_WARNING = "are cut, conversations too: overlong='drop'"
SPLIT_NOTE = "are cut; overlong='drop' drops them"


def make_questions(count: int, max_repeats: int = 3) -> list[dict]:
    return [{"question": f"Is {n} odd?", "answer": "Yes it is. " * (n % max_repeats + 1)} for n in range(count)]


@pytest.fixture
def inputs(tmp_path):
    """Conversations, text records, a text file and token ids with a mask."""
    ids = [{"input_ids": [n % 250, 5, 6], "labels": [-100, 5, -100]} for n in range(40)]
    (tmp_path / "prose.txt").write_text("\n\n".join(make_texts(30)))
    return {
        "chat": write_lines(tmp_path / "chat.jsonl", make_questions(200, 40)),
        "talk": write_lines(tmp_path / "talk.jsonl", make_questions(40)),
        "text": write_texts(tmp_path / "text.jsonl", 60),
        "prose": tmp_path / "prose.txt",
        "ids": write_lines(tmp_path / "ids.jsonl", ids),
    }


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("chat",), "drop"),
        (("chat", "talk"), "drop"),
        (("chat", "text"), "split"),
        (("chat", "prose"), "split"),
        (("chat", "talk", "ids"), "split"),
        (("text", "prose", "ids"), "split"),
    ],
)
def test_the_default_is_that_of_the_store_in_every_order(tmp_path, inputs, names, expected, caplog):
    caplog.set_level("INFO", "batchloom")
    batchloom.prepare([inputs[name] for name in names], out=tmp_path / "s", tokenizer="bytes")
    store = open_store(tmp_path / "s")
    assert Loader(store, seq_len=64, global_batch_size=4).plan.spec.overlong == expected
    for order in permutations(names):
        stream = make_small_stream(*(inputs[name] for name in order), **ORDER)
        assert stream.spec.overlong == expected
        caplog.clear()
        collect_rows(stream)
        collect_rows(stream)
        warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        is_mixed = store.contents.mixed and expected == "split"
        assert sum(SPLIT_WARNING in warning for warning in warnings) == is_mixed
        assert caplog.text.count(SPLIT_NOTE) == (expected == "split" and not is_mixed)
        assert caplog.text.count("overlong='drop' leaves out documents") == (expected == "drop")
    explicit = make_small_stream(*(inputs[name] for name in names), overlong="split", **ORDER)
    caplog.clear()
    collect_rows(explicit)
    assert SPLIT_WARNING not in caplog.text
    assert SPLIT_NOTE not in caplog.text
    # A record of the log holds its stream, and the stream its folder.
    caplog.clear()


@pytest.mark.parametrize("names", [("chat", "text"), ("text", "chat")])
def test_the_kept_store_of_mixed_inputs_repeats_the_stream(tmp_path, inputs, names):
    order = {"seq_len": 64, "global_batch_size": 4, "steps": 10}
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
    repeated = make_lane_loader(open_store(tmp_path / "kept"), stream)
    assert [batch["input_ids"].tolist() for batch in repeated] == streamed
