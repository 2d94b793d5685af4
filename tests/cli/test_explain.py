"""Commands ``explain`` and ``when``."""

import json
from pathlib import Path

import pytest

import batchloom
from batchloom import Edit, Loader, open_store
from batchloom.batches import read_mixture
from batchloom.cli import run_command_line
from batchloom.testing import append_documents, write_store

SIZES = ["--seq-len", "64", "--global-batch-size", "4"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def prepared_store(folder, capsys):
    """Store of two files with a duplicate, a bad record and a split conversation."""
    lines = [f'{{"text": "story number {n} {"of many " * (n % 7)}"}}' for n in range(40)]
    (folder / "in").mkdir()
    (folder / "in" / "a.jsonl").write_text("\n".join([*lines, lines[3], '{"body": "?"}']) + "\n")
    chat = [
        {"role": "user", "content": "hello " * 30},
        {"role": "assistant", "content": "yes " * 9},
    ]
    chats = [json.dumps({"messages": chat * n}) for n in (1, 3)]
    (folder / "in" / "b.jsonl").write_text("\n".join(chats) + "\n")
    options = ["--tokenizer", "bytes", "--max-bad", "5", "--val-fraction", "0.2"]
    options += ["--max-tokens", "500", "--overlong", "split"]
    assert run_command_line(["prepare", "in", "--out", "store", *options]) == 0, capsys.readouterr().err
    capsys.readouterr()
    return "store"


def run_json(capsys, *arguments):
    assert run_command_line([*arguments, "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def test_explain_names_line_file_and_text(prepared_store, capsys):
    explanation = run_json(capsys, "explain", prepared_store, *SIZES, "--step", "2", "--text", "12")
    store = open_store(prepared_store)
    spans = [span for sequence in explanation["sequences"] for span in sequence["spans"]]
    assert spans
    for span in spans:
        document = store[span["document"]]
        assert span["origin"]["line"] == document.provenance.line
        assert span["origin"]["source"] == document.provenance.source
        assert span["text"] == store.tokenizer.decode(document.ids[span["start"] : span["stop"]])[:12]
    assert [sequence["row"] for sequence in explanation["sequences"]] == [0, 1, 2, 3]
    options = ["--rank", "1", "--world-size", "2", "--row", "1"]
    (sequence,) = run_json(capsys, "explain", prepared_store, *SIZES, "--step", "2", *options)["sequences"]
    assert (sequence["row"], sequence["rank"], sequence["rank_row"]) == (3, 1, 1)
    assert run_command_line(["explain", prepared_store, *SIZES, "--step", "2", "--world-size", "2"]) == 0
    text = capsys.readouterr().out
    assert "row 3, rank 1 row 1, position 11" in text
    assert ".jsonl line " in text


def test_records_of_a_list_are_counted_from_one_as_in_errors_and_previews(folder, capsys):
    (folder / "in.json").write_text(json.dumps([{"text": f"number {n}"} for n in range(9)]))
    options = ["--tokenizer", "bytes", "--val-fraction", "0"]
    assert run_command_line(["prepare", "in.json", "--out", "store", *options]) == 0, capsys.readouterr().err
    assert run_command_line(["doctor", "store", "--preview", "1"]) == 0
    assert "in.json, row 1: " in capsys.readouterr().out
    assert run_command_line(["explain", "store", *SIZES, "--no-shuffle", "--step", "0"]) == 0
    assert "in.json row 1 (byte 1): 'number 0" in capsys.readouterr().out


def test_when_covers_all_documents_of_a_record(prepared_store, capsys):
    answer = run_json(capsys, "when", prepared_store, *SIZES, "--source", "in/b.jsonl", "--record", "1")
    store = open_store(prepared_store)
    documents = [n for n in range(len(store)) if store.provenance.of(n).source.endswith("b.jsonl")]
    documents = [n for n in documents if store.provenance.of(n).record == 1]
    assert len(documents) > 1
    assert {showing["document"] for showing in answer["showings"]} == set(documents)
    steps = {showing["step"] for showing in answer["showings"]}
    explanations = [run_json(capsys, "explain", prepared_store, *SIZES, "--step", str(step)) for step in steps]
    explained_documents = {
        span["document"]
        for explanation in explanations
        for sequence in explanation["sequences"]
        for span in sequence["spans"]
    }
    assert set(documents) <= explained_documents


def test_records_without_a_document_are_explained(prepared_store, capsys):
    store = open_store(prepared_store)
    train_records = {
        store.provenance.of(n).record for n in range(len(store)) if "a.jsonl" in store.provenance.of(n).source
    }
    validation_record = next(n for n in range(40) if n not in train_records)
    for record, reason in (
        (40, "a duplicate, dropped by a cleaning step"),
        (41, "is in quarantine.jsonl, because no field 'text'"),
        (validation_record, "of subset 'val', which the plan does not serve"),
        (42, "in/a.jsonl has no record 42 (line or row 43): 42 records of it were read"),
    ):
        arguments = ["when", prepared_store, *SIZES, "--source", "in/a.jsonl", "--record", str(record)]
        assert run_command_line(arguments) == 1
        assert reason in capsys.readouterr().err


def test_unserved_documents_are_reported_with_the_reason(folder, capsys):
    write_store(folder / "s", [[65] * 20] * 30 + [[], [66] * 70])
    write_store(folder / "t", [[65] * 64] * 30)
    (folder / "mix.yaml").write_text("weights: {s: 1}\nstores: {s: s, t: t}\nstages: [{step: 6, weights: {t: 1}}]\n")
    mixture = ["--mixture", "mix.yaml", "--source", "t", "--document", "1"]
    for options, reason in (
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
        answer = run_json(capsys, "when", *options, *SIZES)
        assert answer["showings"] == []
        (unserved,) = answer["unserved"]
        assert reason in unserved["reason"]
        assert run_command_line(["when", *options, *SIZES]) == 0
        assert reason in capsys.readouterr().out
    assert run_json(capsys, "when", "s", "--document", "31", *SIZES)["unserved"] == []


def test_an_absolute_input_path_is_matched_with_its_source(prepared_store, capsys):
    arguments = ["when", prepared_store, *SIZES, "--source", "/data/of/mine/b.jsonl", "--record", "1"]
    assert run_command_line(arguments) == 1
    assert "did you mean 'in/b.jsonl'?" in capsys.readouterr().err


def test_a_run_on_a_stream_cannot_be_explained(folder, capsys):
    (folder / "a.jsonl").write_text('{"text": "word after word"}\n' * 50)
    stream = batchloom.stream("a.jsonl", tokenizer="bytes", seq_len=16, global_batch_size=2, steps=4, workers=0)
    loader = Loader(stream, output="numpy", rank=0, world_size=1)
    (folder / "state.json").write_text(json.dumps(loader.state_dict()))
    write_store(folder / "s", [[65] * 20] * 30)
    for arguments in (
        ["plan", "--journal", "state.json"],
        ["plan", "s", "--checkpoint", "state.json"],
        ["explain", "s", "--checkpoint", "state.json", "--step", "1"],
        ["when", "--mixture", "s=1", "--checkpoint", "state.json", "--document", "1"],
    ):
        assert run_command_line(arguments) == 1
        assert "was on a stream: streams take no edits, and explain" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", "s", *SIZES, "--step", "999"], "There is no step 999: the run has "),
        (["explain", "s", *SIZES, "--step", "-1"], "is not a step"),
        (["explain", "s", *SIZES, "--step", "0", "--rank", "1"], "--world-size: missing"),
        (["explain", "s", *SIZES, "--step", "0", "--rank", "2", "--world-size", "2"], "rank 2 of"),
        (["explain", "s", *SIZES, "--step", "0", "--world-size", "3"], "cannot be divided evenly"),
        (["explain", "s", *SIZES, "--step", "0", "--row", "4"], "There is no row 4: there are 4"),
        (["explain", "s", *SIZES, "--step", "0", "--text", "-1"], "not a number of characters"),
        (["when", "s", *SIZES], "give a document (--document), or a record"),
        (
            ["when", "s", *SIZES, "--document", "1", "--record", "1"],
            "give a document (--document), or a record",
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
def test_invalid_questions_are_refused(folder, capsys, arguments, message):
    write_store(folder / "s", [[65] * 20] * 30)
    assert run_command_line(arguments) in (1, 2)
    assert message in capsys.readouterr().err


def test_documents_of_a_bare_prefix_are_named_by_number(folder, capsys):
    write_store(folder / "s", [[65] * 20] * 30)
    for end in (".bin", ".idx"):
        (folder / f"bare{end}").write_bytes((folder / "s/train" / f"shard_00000{end}").read_bytes())
    explanation = run_json(capsys, "explain", "bare", *SIZES, "--step", "0")
    span = explanation["sequences"][0]["spans"][0]
    assert (span["origin"], span["text"]) == (None, None)
    assert run_json(capsys, "when", "bare", *SIZES, "--document", str(span["document"]))["showings"]
    assert run_command_line(["when", "bare", *SIZES, "--record", "1", "--source", "x"]) == 1
    assert "a bare prefix does not say which records" in capsys.readouterr().err


def test_a_checkpoint_suffices_to_explain_a_run(folder, capsys):
    write_store(folder / "s", {"train": [[n % 200] * (9 + n % 30) for n in range(90)]})
    arguments = ["train", "--data", "s", "--out", "run", "--max-iters", "6", "--save-interval", "2"]
    arguments += ["--seq-len", "32", "--global-batch-size", "4", "--seed", "5", "--device", "cpu"]
    assert run_command_line(arguments) == 0, capsys.readouterr().err
    capsys.readouterr()
    append_documents(folder / "s", [[7] * 9] * 20)
    plan_options = ["--seq-len", "32", "--global-batch-size", "4", "--seed", "5", "--steps", "6"]
    for checkpoint in ("run", "run/checkpoints/step_00000004"):
        from_checkpoint = run_json(capsys, "explain", "s", "--checkpoint", checkpoint, "--step", "3")
        from_options = run_json(capsys, "explain", "s", "--generation", "1", *plan_options, "--step", "3")
        assert from_checkpoint == from_options
    checkpoint = "run/checkpoints/step_00000004"
    assert run_command_line(["when", "s", "--checkpoint", checkpoint, "--document", "3"]) == 0
    text = capsys.readouterr().out
    assert "(past)" in text or "(to come)" in text
    for run in (["run"], ["--checkpoint", "run"]):
        assert run_json(capsys, "explain", *run, "--step", "3") == from_checkpoint
    Path("s").rename("moved")
    assert run_command_line(["explain", "run", "--step", "3"]) == 1
    assert f"There is no file or folder {folder / 's'}" in capsys.readouterr().err
    Path("moved").rename("s")
    assert run_command_line(["explain", "s", "--checkpoint", "run", "--step", "6"]) == 1
    assert "the run has 6" in capsys.readouterr().err
    write_store(folder / "other", [[3] * 9] * 40)
    assert run_command_line(["explain", "other", "--checkpoint", "run", "--step", "3"]) == 1
    error = capsys.readouterr().err
    assert "The state belongs to another plan: " in error
    assert "sources.data.documents was 90 and is 40" in error
    assert "Give the settings and the store the state was made with" in error
    assert run_command_line(["plan", "s", "--checkpoint", "run"]) == 0
    assert "6 steps of 4 sequences of 32 tokens" in capsys.readouterr().out


def test_the_state_of_a_mixture_with_edits_is_explained(folder, capsys):
    for name, size in (("web", 40), ("code", 25)):
        write_store(folder / name, [[65 + n % 50] * (5 + n % 40) for n in range(size)])
    mixture = read_mixture("web=0.7,code=0.3")
    loader = Loader(mixture, seq_len=64, global_batch_size=4, steps=60, output="numpy", rank=0, world_size=2)
    loader.edit(Edit(step=10, weights={"web": 1, "code": 2}, note="more code"))
    loader.edit(Edit(step=20, seq_len=32, ban={"web": [1]}))
    (folder / "state.json").write_text(json.dumps(loader.state_dict()))
    append_documents(folder / "web", [[7] * 9] * 20)
    options = ["--mixture", "web=1,code=1", "--checkpoint", "state.json"]
    explanation = run_json(capsys, "explain", *options, "--step", "25", "--world-size", "2", "--steps", "60")
    expected = batchloom.explain(loader, 25)
    assert explanation["fingerprint"] == loader.plan.fingerprint
    assert [sequence["position"] for sequence in explanation["sequences"]] == [
        sequence.position for sequence in expected
    ]
    assert [[span["document"] for span in sequence["spans"]] for sequence in explanation["sequences"]] == [
        [span.document for span in sequence.spans] for sequence in expected
    ]
    when_arguments = ["when", *options, "--source", "web", "--document", "1", "--steps", "60"]
    assert {showing["banned"] for showing in run_json(capsys, *when_arguments)["showings"]} == {False, True}
    assert run_command_line(["explain", "web", "--checkpoint", "state.json", "--step", "1"]) == 1
    assert "one store is given. Give --mixture" in capsys.readouterr().err
    assert run_command_line(["explain", "--mixture", "web=1", "--checkpoint", "state.json", "--step", "1"]) == 1
    assert "no store is given for code" in capsys.readouterr().err


def test_removed_and_masked_tokens_are_marked(folder, capsys):
    write_store(
        folder / "s",
        [[65] * 20, [66] * 20],
        trained=[[0] * 10 + [1] * 10, [1] * 20],
    )
    assert run_command_line(["remove", "s", "--source", "given", "--dry-run"]) == 0
    (folder / "list").write_text("train:1\n")
    assert run_command_line(["remove", "s", "--documents-file", "list"]) == 0
    capsys.readouterr()
    explanation = run_json(capsys, "explain", "s", "--seq-len", "40", "--global-batch-size", "1", "--step", "0")
    spans = {span["document"]: span for span in explanation["sequences"][0]["spans"]}
    assert (spans[0]["trained"], spans[0]["removed"]) == (10, False)
    assert (spans[1]["trained"], spans[1]["removed"], spans[1]["text"]) == (0, True, None)
    options = ["--seq-len", "40", "--global-batch-size", "1", "--step", "0"]
    assert run_command_line(["explain", "s", *options]) == 0
    text = capsys.readouterr().out
    assert "10 trained" in text
    assert "removed: served as end tokens without loss" in text
    sizes = ["--seq-len", "40", "--global-batch-size", "1"]
    for document, is_removed in ((0, False), (1, True)):
        arguments = ["when", "s", "--document", str(document), *sizes]
        assert {showing["removed"] for showing in run_json(capsys, *arguments)["showings"]} == {is_removed}
        assert run_command_line(arguments) == 0
        assert ("removed: served as end tokens" in capsys.readouterr().out) is is_removed


def test_explain_reports_rows_of_any_rank(folder):
    loader = Loader(
        open_store("dummy:documents=50"),
        seq_len=64,
        global_batch_size=4,
        output="numpy",
        rank=1,
        world_size=2,
    )
    (sequence, _) = batchloom.explain(loader, 0, rank=1)
    span = sequence.spans[0]
    ids = loader.store[span.document].ids[span.start : span.stop]
    assert (loader.batch(0)["input_ids"][0][: len(ids)] == ids).all()


def test_a_synthetic_store_is_marked_as_synthetic(folder, capsys):
    arguments = ["explain", "dummy:documents=50", *SIZES, "--step", "0"]
    assert run_json(capsys, *arguments)["source"] == "synthetic"
    assert run_command_line(arguments) == 0
    assert "source=synthetic" in capsys.readouterr().out
