"""Preferences through ``prepare``: pairs stay together and reach trainers."""

import json

import numpy as np
import pytest

import batchloom
from batchloom import InputError, SettingsError
from batchloom.store import CHOSEN, REJECTED, LabelledAnswers, PreferencePairs, export_store
from preparation.stores import hash_store_files, prepare_store, write_jsonl
from preparation.test_resume import prepare_until_killed

ROWS = [
    {"prompt": f"{n} + {n}?", "chosen": f"{2 * n}" * (1 + n % 5), "rejected": f"no {n}", "score_chosen": 1.0}
    for n in range(200)
]  # fmt: skip
LABELLED_ROWS = [{"prompt": f"q{n}", "completion": f"a{n}", "label": n % 3 == 0} for n in range(40)]


def prepare(tmp_path, rows, **settings):
    write_jsonl(tmp_path / "in.jsonl", rows)
    settings = {"tokenizer": "bytes", "val_fraction": 0, **settings}
    return batchloom.prepare(tmp_path / "in.jsonl", out=tmp_path / "out", **settings)


def decode_text(ids):
    return bytes(n for n in ids if n < 256).decode()


def read_pairs(out):
    """Return (id, record, prompt, chosen, rejected, subset) of every pair, by id."""
    rows = []
    for split in batchloom.open_store(out).subsets:
        stored = PreferencePairs(batchloom.open_store(out, split))
        for n, number in enumerate(stored.ids.tolist()):
            pair = stored[n]
            record = stored.store.provenance.of(int(stored.chosen[n])).record
            assert record == stored.store.provenance.of(int(stored.rejected[n])).record
            rows.append((number, record, *map(decode_text, pair.values()), split))
    return sorted(rows)


@pytest.mark.parametrize("val_fraction", [0, 0.3])
def test_every_pair_is_two_documents_of_one_subset(tmp_path, val_fraction):
    result = prepare(tmp_path, ROWS, val_fraction=val_fraction, test_fraction=val_fraction / 3)
    assert "Detected prompt/chosen/rejected -> preference pairs in in.jsonl." in result.notes
    assert result.counts.documents == 400
    stored_pairs = read_pairs(result.path)
    assert [pair[1] for pair in stored_pairs] == list(range(200))
    for _, record, prompt, chosen, rejected, _ in stored_pairs:
        row = ROWS[record]
        assert prompt == f"User:\n{row['prompt']}\n\nAssistant:\n"
        assert (chosen, rejected) == (row["chosen"] + "\n", row["rejected"] + "\n")
    assert len({pair[-1] for pair in stored_pairs}) == (3 if val_fraction else 1)
    assert len({pair[0] for pair in stored_pairs}) == 200
    report = batchloom.check(result.path)
    assert report.sound
    assert "the chosen answer and the rejected one" in report.facts["objective"]
    (source,) = batchloom.open_store(result.path).manifest.sources
    assert (source.preferences, source.documents) == ("pairs", 400)


SETTINGS = {"unit_bytes": 4000, "val_fraction": 0.2, "tokens_per_shard": 500}


def test_no_shard_cuts_a_pair(tmp_path, monkeypatch):
    monkeypatch.setattr("batchloom.preparation.phases.remaining_rows._CHUNK_ROWS", 7)
    monkeypatch.setattr("batchloom.preparation.phases.shard_batches._CHUNK_TOKENS", 100)
    monkeypatch.setattr("batchloom.preparation.units.unit_tokenizer._BATCH_DOCUMENTS", 9)
    write_jsonl(tmp_path / "in.jsonl", ROWS[:60])
    for name, tokens_per_shard, count in (("tiny", 1, 60), ("odd", 500, 6), ("one", 10**6, 2)):
        out = tmp_path / name
        prepare_store(tmp_path / "in.jsonl", out, **SETTINGS | {"tokens_per_shard": tokens_per_shard})
        shards = 0
        for split in ("train", "val"):
            store = batchloom.open_store(out, split)
            for shard in range(len(store.shards)):
                sides = store.shards.sides(shard).sides.tolist()
                assert sides == [CHOSEN, REJECTED] * (len(sides) // 2)
                sizes = store.lengths.slice(*store.shards.bounds[shard : shard + 2])
                assert len(sizes) == 2 or sizes.sum() <= tokens_per_shard
            shards += len(store.shards)
        assert shards >= count
        assert batchloom.check(out).sound
        assert [pair[1] for pair in read_pairs(out)] == list(range(60))


@pytest.mark.slow
def test_the_same_whatever_the_units_and_after_any_kill(tmp_path):
    write_jsonl(tmp_path / "in.jsonl", [*ROWS[:80], {"prompt": "a", "chosen": "b", "rejected": "b"}])
    inputs = [tmp_path / "in.jsonl"]
    prepare_store(inputs, tmp_path / "whole", **SETTINGS)
    prepare_store(inputs, tmp_path / "one", val_fraction=0.2)
    assert [pair[1:] for pair in read_pairs(tmp_path / "one")] == [pair[1:] for pair in read_pairs(tmp_path / "whole")]
    expected, out, runs = hash_store_files(tmp_path / "whole"), tmp_path / "out", 0
    assert any(name.endswith(".pairs") for name in expected)
    while prepare_until_killed({"open"}, 140, inputs, out, **SETTINGS):
        runs += 1
        assert runs < 40
    assert runs > 2
    assert hash_store_files(out) == expected


BAD_PAIRS = {
    "prompt lacking": ({"chosen": "a", "rejected": "b"}, "no column 'prompt'"),
    "chosen lacking": ({"prompt": "q", "rejected": "b"}, "no column 'chosen'"),
    "rejected null": ({"prompt": "q", "chosen": "a", "rejected": None}, "'rejected' is null"),
    "one side empty": ({"prompt": "q", "chosen": "a", "rejected": " "}, "'rejected' is empty"),
    "a number": ({"prompt": "q", "chosen": 5, "rejected": "b"}, "'chosen' holds a number"),
    "both alike": ({"prompt": "q", "chosen": "a", "rejected": "a"}, "are equal"),
    "alike when rendered": ({"prompt": "q", "chosen": "a", "rejected": " a"}, "are the same tokens"),
    "no Unicode": ({"prompt": "q", "chosen": "a", "rejected": "\ud800"}, "not"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_PAIRS)
def test_a_bad_side_quarantines_the_pair_with_its_line(tmp_path, name):
    row, reason = BAD_PAIRS[name]
    result = prepare(tmp_path, [*ROWS[:20], row, *ROWS[20:30]])
    assert (result.counts.documents, result.counts.quarantined) == (60, 1)
    (line,) = (result.path / "quarantine.jsonl").read_text().splitlines()
    quarantined = json.loads(line)
    assert quarantined["line"] == 21
    assert reason in quarantined["reason"]
    assert batchloom.check(result.path).sound
    assert [pair[1] for pair in read_pairs(result.path)] == [*range(20), *range(21, 31)]


def test_a_pair_too_long_is_dropped_once(tmp_path):
    rows = [*ROWS[:20], {"prompt": "q", "chosen": "a", "rejected": "z" * 500}]
    result = prepare(tmp_path, rows, max_tokens=200)
    assert (result.counts.documents, result.counts.dropped) == (40, {"overlong": 1})
    assert batchloom.check(result.path).sound
    with pytest.raises(InputError, match=r"in.jsonl, line 21: on its rejected side has \d+ tokens"):
        prepare_store(tmp_path / "in.jsonl", tmp_path / "e", chat=make_chat_recipe(max_tokens=200, overlong="error"))


def make_chat_recipe(**settings):
    from batchloom.preparation import ChatRecipe

    return ChatRecipe(**settings)


PROMPT_TURNS = [{"role": "user", "content": "q"}]
GOOD_TURN, BAD_TURN = {"role": "assistant", "content": "good"}, {"role": "assistant", "content": "bad"}
PAIR_FORMS = {
    "messages": ({"prompt": PROMPT_TURNS, "chosen": [GOOD_TURN], "rejected": [BAD_TURN]}, {}),
    "implicit": ({"chosen": [*PROMPT_TURNS, GOOD_TURN], "rejected": [*PROMPT_TURNS, BAD_TURN]}, {}),
    "mapped": ({"q": "q", "yes": "good", "no": "bad"}, {"chosen": "yes", "rejected": "no", "prompt": "q"}),
    "mapped messages": ({"yes": [*PROMPT_TURNS, GOOD_TURN], "no": [*PROMPT_TURNS, BAD_TURN]}, {"chosen": "yes", "rejected": "no"}),
    "beside messages": ({"prompt": "q", "messages": [*PROMPT_TURNS, GOOD_TURN], "chosen": [*PROMPT_TURNS, GOOD_TURN], "rejected": [*PROMPT_TURNS, BAD_TURN]}, {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIR_FORMS)
def test_forms(tmp_path, name):
    row, mapping = PAIR_FORMS[name]
    result = prepare(tmp_path, [row] * 3, mapping=mapping, dedup="none")
    assert [pair[2:5] for pair in read_pairs(result.path)] == [("User:\nq\n\nAssistant:\n", "good\n", "bad\n")] * 3


def test_two_texts_keep_the_text_they_begin_with_as_prompt(tmp_path):
    prompt = "\n\nHuman: e\u0301?\r\n\nAssistant: "
    rows = [{"chosen": f"{prompt}yes {n}", "rejected": f"{prompt}no {n}"} for n in range(9)]
    rows.append({"chosen": [*PROMPT_TURNS, GOOD_TURN], "rejected": [*PROMPT_TURNS, BAD_TURN]})
    rows.append({"chosen": "other", "rejected": "text"})
    result = prepare(tmp_path, rows)
    assert "Detected chosen/rejected -> preference pairs, the prompt in both in in.jsonl." in (result.notes)
    assert not any("template" in note for note in result.notes)
    stored_pairs = read_pairs(result.path)
    assert [pair[2:5] for pair in stored_pairs] == [
        ("\n\nHuman: é?\n\nAssistant:", f" yes {n}", f" no {n}") for n in range(9)
    ]
    quarantined = [json.loads(line) for line in (result.path / "quarantine.jsonl").read_text().splitlines()]
    assert "its answers are messages where those of the first records are texts" in quarantined[0]["reason"]
    assert "--map prompt=" in quarantined[1]["reason"]
    store = batchloom.open_store(result.path)
    assert store[0].ids[-1] == store.end_id
    (source,) = store.manifest.sources
    assert (source.end, source.conversations) == ("added", False)
    assert batchloom.check(result.path).sound


def test_labels(tmp_path):
    rows = [*LABELLED_ROWS, {"prompt": "q", "completion": "a", "label": "maybe"}]
    rows[1] = {"prompt": "q1", "completion": "a1", "label": 0}
    result = prepare(tmp_path, rows, val_fraction=0.3)
    assert (result.counts.documents, result.counts.quarantined) == (40, 1)
    assert "not true (good) or false (bad)" in (result.path / "quarantine.jsonl").read_text()
    labels_by_record = {}
    for split in ("train", "val"):
        store = batchloom.open_store(result.path, split)
        labels = LabelledAnswers(store)
        assert len(labels) == len(store) == len(labels.good)
        for n in range(len(labels)):
            answer = labels[n]
            labels_by_record[store.provenance.of(n).record] = answer["label"]
            assert decode_text(answer["completion_ids"]) == f"a{store.provenance.of(n).record}\n"
            assert decode_text(answer["prompt_ids"]).startswith("User:\nq")
    assert labels_by_record == {n: n % 3 == 0 for n in range(40)}
    assert batchloom.check(result.path).sound
    with pytest.raises(InputError, match="holds no preference pairs"):
        PreferencePairs(store)


def test_no_labelled_answer_is_kept_without_its_prompt(tmp_path):
    rows = [{"prompt": "long " * 30, "completion": "yes", "label": True}, *LABELLED_ROWS]
    result = prepare(tmp_path, rows, max_tokens=100, overlong="split")
    assert result.counts.dropped == {"overlong": 1}
    assert result.counts.documents == len(LABELLED_ROWS)
    assert batchloom.check(result.path).sound


def test_a_labelled_conversation_is_judged_by_its_last_turn(tmp_path):
    turns = [*PROMPT_TURNS, GOOD_TURN, *PROMPT_TURNS, BAD_TURN]
    rows = [{"messages": turns, "label": n % 2 == 0} for n in range(6)]
    rows.append({"messages": turns[:3], "label": True})
    result = prepare(tmp_path, rows)
    answer = LabelledAnswers(batchloom.open_store(result.path))[0]
    assert decode_text(answer["completion_ids"]) == "bad\n"
    assert decode_text(answer["prompt_ids"]).count("Assistant:") == 2
    reason = json.loads((result.path / "quarantine.jsonl").read_text())["reason"]
    assert "ends with a user turn" in reason


def test_of_pairs_the_answers_have_labels(tmp_path):
    store = batchloom.open_store(prepare(tmp_path, ROWS[:5]).path)
    labels = LabelledAnswers(store)
    assert labels.good.tolist() == [True, False] * 5
    assert [labels[n]["label"] for n in (0, 1, -1)] == [True, False, False]
    assert labels[0]["completion_ids"] == PreferencePairs(store)[0]["chosen_ids"]


def test_pairs_are_a_dataset(tmp_path):
    import pickle

    stored = PreferencePairs(batchloom.open_store(prepare(tmp_path, ROWS[:5]).path))
    assert len(list(stored)) == len(stored) == 5
    assert stored[-1] == stored[4] == pickle.loads(pickle.dumps(stored))[4]
    assert stored[np.int64(2)]["prompt_ids"] == stored[2]["prompt_ids"]
    assert (stored.chosen + 1 == stored.rejected).all()
    with pytest.raises(IndexError, match="There is no pair 5: there are 5"):
        stored[5]
    with pytest.raises(TypeError, match="a whole number, not by 'a'"):
        stored["a"]


def test_a_loader_does_not_train_rejected_answers(tmp_path):
    for rows, sentence in (
        (ROWS[:5], "the rejected answers.*--map prompt=prompt,completion=chosen"),
        (LABELLED_ROWS, "the bad answers.*--map label="),
    ):
        out = tmp_path / str(len(rows))
        out.mkdir()
        store = batchloom.open_store(prepare(out, rows).path)
        with pytest.raises(InputError, match=f"would also train {sentence}"):  # fmt: skip
            batchloom.Loader(store, seq_len=64, global_batch_size=1, output="numpy")
    # The mapping of the message leads to a store that a loader accepts.
    mapping = {"prompt": "prompt", "completion": "chosen"}
    store = batchloom.open_store(prepare_store(tmp_path / "5/in.jsonl", tmp_path / "c", mapping=mapping).path)  # fmt: skip
    batch = batchloom.Loader(store, seq_len=64, global_batch_size=1, output="numpy")[0]
    assert (batch["labels"] != -100).any()


def test_preferences_are_not_mixed_with_other_documents(tmp_path):
    (tmp_path / "in").mkdir()
    write_jsonl(tmp_path / "in/a.jsonl", ROWS[:3])
    write_jsonl(tmp_path / "in/empty.jsonl", [])
    prepare_store(tmp_path / "in", tmp_path / "fine")
    for name, rows, sentence in (
        ("b.jsonl", LABELLED_ROWS, "labelled answers"),
        ("b.jsonl", [{"text": "x"}], "documents for language modelling"),
        ("b.txt", [{"text": "x"}], "documents for language modelling"),
    ):
        write_jsonl(tmp_path / "in" / name, rows)
        with pytest.raises(InputError, match=rf"hold preference pairs \(in/a.jsonl\) and {sentence} \(in/{name}\)"):
            prepare_store(tmp_path / "in", tmp_path / "out")
        (tmp_path / "in" / name).unlink()
        assert not (tmp_path / "out").exists()


def test_the_answer_is_trained_and_nothing_else_can_be_asked_for(tmp_path):
    with pytest.raises(InputError, match="only their answers are trained.* leave --train-on last"):
        prepare(tmp_path, ROWS, train_on="last")
    assert prepare(tmp_path, ROWS, train_on="completion").counts.documents == 400
    with pytest.raises(SettingsError, match="together"):
        prepare(tmp_path, ROWS, mapping={"chosen": "chosen", "response": "rejected"})


@pytest.mark.parametrize("rows", [ROWS[:20], LABELLED_ROWS], ids=["pairs", "labels"])
def test_export_carries_pair_and_side(tmp_path, rows):
    import pyarrow.ipc as ipc
    import pyarrow.parquet as pq

    path = prepare(tmp_path, rows).path
    store = batchloom.open_store(path)
    result = export_store(path, to="parquet", out=tmp_path / "parquet")
    table = pq.read_table(tmp_path / "parquet").to_pylist()
    export_store(path, to="hf", out=tmp_path / "hf")
    with (tmp_path / "hf/data-00000-of-00001.arrow").open("rb") as file:
        assert ipc.open_stream(file).read_all().to_pylist() == table
    assert not result.notes
    sides = store.shards.sides(0)
    assert [row["pair"] for row in table] == sides.pairs.tolist()
    names = {1: "chosen", 2: "rejected", 3: "good", 4: "bad"}
    assert [row["side"] for row in table] == [names[side] for side in sides.sides.tolist()]
    assert [row["input_ids"] for row in table] == [store[n].ids.tolist() for n in range(len(store))]
    for target in ("megatron", "flat"):
        notes = export_store(path, to=target, out=tmp_path / target).notes
        assert any("--to parquet or hf keeps pair and side" in note for note in notes)


def test_inspect_and_the_command_line_show_what_they_are(tmp_path, capsys):
    from batchloom.cli import run_command_line

    write_jsonl(tmp_path / "in.jsonl", ROWS)
    out = str(tmp_path / "out")
    settings = ["--out", out, "--tokenizer", "bytes", "--val-fraction", "0"]
    assert run_command_line(["prepare", str(tmp_path / "in.jsonl"), *settings]) == 0
    assert run_command_line(["check", out]) == 0
    assert run_command_line(["inspect", out, "--seq-len", "64"]) == 0
    output = capsys.readouterr().out
    assert "preference pairs: 200 chosen, 200 rejected" in " ".join(output.split())
    assert batchloom.inspect(out, seq_len=64).sides == {"chosen": 200, "rejected": 200}


def test_csv_and_parquet(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "a.csv").write_text("prompt,completion,label\nq,a,True\nq,b,0\nq,c,yes\n")
    assert LabelledAnswers(open_new_store(tmp_path / "a.csv", tmp_path / "c", max_bad=1)).good.tolist() == [
        True,
        False,
    ]
    rows = [{"chosen": [*PROMPT_TURNS, GOOD_TURN], "rejected": [*PROMPT_TURNS, BAD_TURN]}] * 3
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert len(PreferencePairs(open_new_store(tmp_path / "a.parquet", tmp_path / "p", dedup="none"))) == 3


def open_new_store(source, out, **settings):
    return batchloom.open_store(prepare_store(source, out, val_fraction=0, **settings).path)
