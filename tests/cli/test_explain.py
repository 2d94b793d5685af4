"""``batchloom explain`` and ``batchloom when``, as people type them."""

import json

import pytest

import batchloom
from batchloom import Edit, Loader, open_store
from batchloom.batches import read_mixture
from batchloom.cli import run_command_line
from batchloom.testing import append_documents, write_store

SIZES = ["--seq-len", "64", "--global-batch-size", "4"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def prepared(here, capsys):
    """A store of two files, with a duplicate, a bad record and a split conversation."""
    lines = [f'{{"text": "story number {n} {"of many " * (n % 7)}"}}' for n in range(40)]
    (here / "in").mkdir()
    (here / "in" / "a.jsonl").write_text("\n".join([*lines, lines[3], '{"body": "?"}']) + "\n")
    chat = [
        {"role": "user", "content": "hello " * 30},
        {"role": "assistant", "content": "yes " * 9},
    ]
    chats = [json.dumps({"messages": chat * n}) for n in (1, 3)]
    (here / "in" / "b.jsonl").write_text("\n".join(chats) + "\n")
    words = ["--tokenizer", "bytes", "--max-bad", "5", "--val-fraction", "0.2"]
    words += ["--max-tokens", "500", "--overlong", "split"]
    assert run_command_line(["prepare", "in", "--out", "store", *words]) == 0, capsys.readouterr().err
    capsys.readouterr()
    return "store"


def asked(capsys, *words):
    assert run_command_line([*words, "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def test_explain_names_line_file_and_text(prepared, capsys):
    told = asked(capsys, "explain", prepared, *SIZES, "--step", "2", "--text", "12")
    store = open_store(prepared)
    spans = [span for one in told["sequences"] for span in one["spans"]]
    assert spans
    for span in spans:
        document = store[span["document"]]
        assert span["origin"]["line"] == document.provenance.line
        assert span["origin"]["source"] == document.provenance.source
        assert span["text"] == store.tokenizer.decode(document.ids[span["start"] : span["stop"]])[:12]
    assert [one["row"] for one in told["sequences"]] == [0, 1, 2, 3]
    words = ["--rank", "1", "--world-size", "2", "--row", "1"]
    (one,) = asked(capsys, "explain", prepared, *SIZES, "--step", "2", *words)["sequences"]
    assert (one["row"], one["rank"], one["rank_row"]) == (3, 1, 1)
    assert run_command_line(["explain", prepared, *SIZES, "--step", "2", "--world-size", "2"]) == 0
    text = capsys.readouterr().out
    assert "row 3, rank 1 row 1, position 11" in text
    assert ".jsonl line " in text


def test_when_of_a_record_is_of_all_its_documents(prepared, capsys):
    told = asked(capsys, "when", prepared, *SIZES, "--source", "in/b.jsonl", "--record", "1")
    store = open_store(prepared)
    own = [n for n in range(len(store)) if store.provenance.of(n).source.endswith("b.jsonl")]
    own = [n for n in own if store.provenance.of(n).record == 1]
    assert len(own) > 1
    assert {one["document"] for one in told["showings"]} == set(own)
    steps = {one["step"] for one in told["showings"]}
    held = [asked(capsys, "explain", prepared, *SIZES, "--step", str(step)) for step in steps]
    found = {s["document"] for h in held for one in h["sequences"] for s in one["spans"]}
    assert set(own) <= found


def test_records_that_became_no_document_say_why(prepared, capsys):
    store = open_store(prepared)
    inside = {store.provenance.of(n).record for n in range(len(store)) if "a.jsonl" in store.provenance.of(n).source}
    elsewhere = next(n for n in range(40) if n not in inside)
    for record, told in (
        (40, "a duplicate, dropped by a cleaning step"),
        (41, "is in quarantine.jsonl, because no field 'text'"),
        (elsewhere, "of subset 'val', which the plan does not serve"),
        (42, "There is no record 42 of in/a.jsonl: 42 were read"),
    ):
        words = ["when", prepared, *SIZES, "--source", "in/a.jsonl", "--record", str(record)]
        assert run_command_line(words) == 1
        assert told in capsys.readouterr().err


def test_a_document_that_never_comes_is_told_with_the_reason(here, capsys):
    write_store(here / "s", [[65] * 20] * 30 + [[], [66] * 70])
    write_store(here / "t", [[65] * 64] * 30)
    (here / "mix.yaml").write_text("weights: {s: 1}\nstores: {s: s, t: t}\nstages: [{step: 6, weights: {t: 1}}]\n")
    mixture = ["--mixture", "mix.yaml", "--source", "t", "--document", "1"]
    for words, reason in (
        (["s", "--document", "30"], "it is empty"),
        (["s", "--overlong", "drop", "--document", "31"], "it has 70 tokens, more than seq_len 64"),
        (
            [*mixture, "--steps", "9", "--last-step", "5"],
            "source 't' has no weight up to step 5; it gets one after 6 steps",
        ),
        (
            [*mixture, "--steps", "5"],
            "source 't' has no weight up to step 4; it gets one after 6 steps",
        ),
        (
            ["t", "--no-shuffle", "--document", "29", "--last-step", "3"],
            "until then data serves 16 sequences, and an epoch of it has 30. Later steps may hold",
        ),
    ):
        told = asked(capsys, "when", *words, *SIZES)
        assert told["showings"] == []
        (unserved,) = told["unserved"]
        assert reason in unserved["reason"]
        assert run_command_line(["when", *words, *SIZES]) == 0
        assert reason in capsys.readouterr().out
    assert asked(capsys, "when", "s", "--document", "31", *SIZES)["unserved"] == []


def test_an_input_that_is_named_by_the_path_it_was_prepared_from_is_recognised(prepared, capsys):
    words = ["when", prepared, *SIZES, "--source", "/data/of/mine/b.jsonl", "--record", "1"]
    assert run_command_line(words) == 1
    assert "did you mean 'in/b.jsonl'?" in capsys.readouterr().err


def test_a_run_on_a_stream_says_that_it_cannot_be_asked(here, capsys):
    (here / "a.jsonl").write_text('{"text": "word after word"}\n' * 50)
    stream = batchloom.stream("a.jsonl", tokenizer="bytes", seq_len=16, global_batch_size=2, steps=4, workers=0)
    loader = Loader(stream, output="numpy", rank=0, world_size=1)
    (here / "state.json").write_text(json.dumps(loader.state_dict()))
    write_store(here / "s", [[65] * 20] * 30)
    for words in (
        ["plan", "--journal", "state.json"],
        ["plan", "s", "--checkpoint", "state.json"],
        ["explain", "s", "--checkpoint", "state.json", "--step", "1"],
        ["when", "--mixture", "s=1", "--checkpoint", "state.json", "--document", "1"],
    ):
        assert run_command_line(words) == 1
        assert "was on a stream: streams take no edits, and explain" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["explain", "s", *SIZES, "--step", "999"], "There is no step 999: the run has "),
        (["explain", "s", *SIZES, "--step", "-1"], "is not a step"),
        (["explain", "s", *SIZES, "--step", "0", "--rank", "1"], "world_size: missing"),
        (["explain", "s", *SIZES, "--step", "0", "--rank", "2", "--world-size", "2"], "rank 2 of"),
        (["explain", "s", *SIZES, "--step", "0", "--world-size", "3"], "cannot be divided evenly"),
        (["explain", "s", *SIZES, "--step", "0", "--row", "4"], "There is no row 4: there are 4"),
        (["explain", "s", *SIZES, "--step", "0", "--text", "-1"], "not a number of characters"),
        (["when", "s", *SIZES], "give the number of a document, or a record"),
        (
            ["when", "s", *SIZES, "--document", "1", "--record", "1"],
            "give the number of a document",
        ),
        (
            ["when", "s", *SIZES, "--document", "30"],
            "There is no document 30 in data: there are 30",
        ),
        (["when", "s", *SIZES, "--record", "1", "--source", "givn"], "did you mean 'given'"),
        (["explain", "s", "--step", "0", "--checkpoint", "no"], "There is no file or folder no: "),
        (["explain", "s", *SIZES, "--step", "0", "--checkpoint", "no"], "the checkpoint sets it"),
    ],
)
def test_what_cannot_be_answered_is_refused(here, capsys, words, told):
    write_store(here / "s", [[65] * 20] * 30)
    assert run_command_line(words) in (1, 2)
    assert told in capsys.readouterr().err


def test_a_bare_prefix_is_asked_by_number(here, capsys):
    write_store(here / "s", [[65] * 20] * 30)
    for end in (".bin", ".idx"):
        (here / f"bare{end}").write_bytes((here / "s/train" / f"shard_00000{end}").read_bytes())
    told = asked(capsys, "explain", "bare", *SIZES, "--step", "0")
    span = told["sequences"][0]["spans"][0]
    assert (span["origin"], span["text"]) == (None, None)
    assert asked(capsys, "when", "bare", *SIZES, "--document", str(span["document"]))["showings"]
    assert run_command_line(["when", "bare", *SIZES, "--record", "1", "--source", "x"]) == 1
    assert "a bare prefix does not say which records" in capsys.readouterr().err


def test_a_run_answers_by_its_checkpoint_alone(here, capsys):
    write_store(here / "s", {"train": [[n % 200] * (9 + n % 30) for n in range(90)]})
    words = ["train", "--data", "s", "--out", "run", "--max-iters", "6", "--save-interval", "2"]
    words += ["--seq-len", "32", "--global-batch-size", "4", "--seed", "5", "--device", "cpu"]
    assert run_command_line(words) == 0, capsys.readouterr().err
    capsys.readouterr()
    append_documents(here / "s", [[7] * 9] * 20)
    plain = ["--seq-len", "32", "--global-batch-size", "4", "--seed", "5", "--steps", "6"]
    for place in ("run", "run/checkpoints/step_00000004"):
        by_run = asked(capsys, "explain", "s", "--checkpoint", place, "--step", "3")
        by_hand = asked(capsys, "explain", "s", "--generation", "1", *plain, "--step", "3")
        assert by_run == by_hand
    place = "run/checkpoints/step_00000004"
    assert run_command_line(["when", "s", "--checkpoint", place, "--document", "3"]) == 0
    text = capsys.readouterr().out
    assert "(past)" in text or "(to come)" in text
    assert run_command_line(["explain", "s", "--checkpoint", "run", "--step", "6"]) == 1
    assert "the run has 6" in capsys.readouterr().err
    write_store(here / "other", [[3] * 9] * 40)
    assert run_command_line(["explain", "other", "--checkpoint", "run", "--step", "3"]) == 1
    error = capsys.readouterr().err
    assert "The state belongs to another plan: " in error
    assert "sources.data.documents was 90 and is 40" in error
    assert "Give the settings and the store the state was made with" in error
    assert run_command_line(["plan", "s", "--checkpoint", "run"]) == 0
    assert "6 steps of 4 sequences of 32 tokens" in capsys.readouterr().out


def test_a_mixture_with_edits_answers_by_its_state(here, capsys):
    for name, size in (("web", 40), ("code", 25)):
        write_store(here / name, [[65 + n % 50] * (5 + n % 40) for n in range(size)])
    mixture = read_mixture("web=0.7,code=0.3")
    loader = Loader(mixture, seq_len=64, global_batch_size=4, steps=60, output="numpy", rank=0, world_size=2)
    loader.edit(Edit(step=10, weights={"web": 1, "code": 2}, note="more code"))
    loader.edit(Edit(step=20, seq_len=32, ban={"web": [1]}))
    (here / "state.json").write_text(json.dumps(loader.state_dict()))
    append_documents(here / "web", [[7] * 9] * 20)
    words = ["--mixture", "web=1,code=1", "--checkpoint", "state.json"]
    told = asked(capsys, "explain", *words, "--step", "25", "--world-size", "2", "--steps", "60")
    own = batchloom.explain(loader, 25)
    assert told["fingerprint"] == loader.plan.fingerprint
    assert [one["position"] for one in told["sequences"]] == [one.position for one in own]
    assert [[s["document"] for s in one["spans"]] for one in told["sequences"]] == [
        [s.document for s in one.spans] for one in own
    ]
    shown = ["when", *words, "--source", "web", "--document", "1", "--steps", "60"]
    assert {one["banned"] for one in asked(capsys, *shown)["showings"]} == {False, True}
    assert run_command_line(["explain", "web", "--checkpoint", "state.json", "--step", "1"]) == 1
    assert "one store is given. Give --mixture" in capsys.readouterr().err
    assert run_command_line(["explain", "--mixture", "web=1", "--checkpoint", "state.json", "--step", "1"]) == 1
    assert "no store is given for code" in capsys.readouterr().err


def test_removed_and_masked_tokens_are_marked(here, capsys):
    write_store(
        here / "s",
        [[65] * 20, [66] * 20],
        trained=[[0] * 10 + [1] * 10, [1] * 20],
    )
    assert run_command_line(["remove", "s", "--source", "given", "--dry-run"]) == 0
    (here / "list").write_text("train:1\n")
    assert run_command_line(["remove", "s", "--documents-file", "list"]) == 0
    capsys.readouterr()
    told = asked(capsys, "explain", "s", "--seq-len", "40", "--global-batch-size", "1", "--step", "0")
    spans = {span["document"]: span for span in told["sequences"][0]["spans"]}
    assert (spans[0]["trained"], spans[0]["removed"]) == (10, False)
    assert (spans[1]["trained"], spans[1]["removed"], spans[1]["text"]) == (0, True, None)
    words = ["--seq-len", "40", "--global-batch-size", "1", "--step", "0"]
    assert run_command_line(["explain", "s", *words]) == 0
    text = capsys.readouterr().out
    assert "10 trained" in text
    assert "removed: served as end tokens without loss" in text


def test_every_rank_of_replicated_data_is_told_what_it_reads(here):
    loader = Loader(
        open_store("dummy:documents=50"),
        seq_len=64,
        global_batch_size=4,
        output="numpy",
        rank=1,
        world_size=2,
    )
    (first, _) = batchloom.explain(loader, 0, rank=1)
    span = first.spans[0]
    ids = loader.store[span.document].ids[span.start : span.stop]
    assert (loader.batch(0)["input_ids"][0][: len(ids)] == ids).all()


def test_a_lone_store_of_made_up_documents_says_so(here, capsys):
    words = ["explain", "dummy:documents=50", *SIZES, "--step", "0"]
    assert asked(capsys, *words)["source"] == "synthetic"
    assert run_command_line(words) == 0
    assert "source=synthetic" in capsys.readouterr().out
