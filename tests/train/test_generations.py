"""Runs on stores whose generations change between start and resume."""

import json
import re
import shutil
from pathlib import Path

import pytest

from batchloom import Loader, Mixture, open_store
from batchloom.adapters.logging import read_log
from batchloom.cli import run_command_line
from batchloom.store import compact_store, remove_documents
from batchloom.testing import append_documents
from train.runs import BASE_SETTINGS, counting_documents, read_steps, small_store


@pytest.fixture
def store(tmp_path):
    return small_store(tmp_path / "s").path


@pytest.fixture
def args(store, tmp_path):
    (tmp_path / "small.json").write_text(json.dumps({**BASE_SETTINGS, "steps": 6}))
    return ["--data", store, "--config-file", tmp_path / "small.json"]


def train(*args):
    return run_command_line(["train", "--device", "cpu", *map(str, args)])


def grow(store):
    append_documents(store, {"train": counting_documents(60, 7), "val": counting_documents(9, 8)})


def test_a_run_resumes_with_the_generation_it_was_begun_on(store, args, tmp_path, capsys):
    reference, resumed = tmp_path / "whole", tmp_path / "halves"
    assert train(*args, "--out", reference) == 0
    assert train(*args, "--out", resumed, "--stop-at", 3) == 0
    grow(store)
    capsys.readouterr()
    assert train("--data", store, "--out", resumed, "--resume") == 0
    output = capsys.readouterr()
    assert f"The run was started on generation 1 of {store} and continues with it; the newest is 2." in output.out
    assert "150 documents" in output.out
    assert "removed" not in output.err
    assert read_steps(resumed) == read_steps(reference)


def take_down(store, numbers):
    file = store.with_name("takedown.txt")
    file.write_text("".join(f"train:{number}\n" for number in numbers))
    remove_documents(store, documents_file=file)


def read_trained_counts(out):
    return [entry["trained"] for entry in read_log(out / "log.jsonl") if entry["kind"] == "step"]


def list_trained_counts(store, **options):
    sizes = {name: BASE_SETTINGS[name] for name in ("seq_len", "global_batch_size")}
    loader = Loader(open_store(store, **options), **sizes, steps=6)
    return [loader.trained_tokens(step) for step in range(6)]


def explain_trained_count(out, step, capsys):
    capsys.readouterr()
    assert run_command_line(["explain", str(out), "--step", str(step), "--json"]) == 0
    sequences = json.loads(capsys.readouterr().out)["sequences"]
    return sum(span["trained"] for sequence in sequences for span in sequence["spans"])


REMOVED = range(0, 150, 3)


def test_documents_removed_since_are_padding_from_the_resume_on(store, args, tmp_path, capsys):
    out = tmp_path / "run"
    before = list_trained_counts(store)
    assert train(*args, "--out", out, "--stop-at", 3) == 0
    grow(store)
    take_down(store, REMOVED)
    after = list_trained_counts(store, generation=1, removals=3)
    assert sum(after) < sum(before)
    capsys.readouterr()
    assert train("--data", store, "--out", out, "--stop-at", 4, "--resume", "--quiet") == 0
    assert f"50 documents (1,148 tokens) of {store}/train are removed: from here on padding" in capsys.readouterr().err
    # Another removal takes effect at the next start.
    take_down(store, [1, 4, 7])
    assert train("--data", store, "--out", out, "--resume", "--quiet") == 0
    assert "53 documents" in capsys.readouterr().err
    last = list_trained_counts(store, generation=1, removals=4)
    assert read_trained_counts(out) == [*before[:3], after[3], *last[4:]]
    # What was removed later was trained.
    assert [explain_trained_count(out, step, capsys) for step in range(6)] == read_trained_counts(out)


def test_removed_documents_are_trained_only_if_their_generation_is_chosen(store, args, tmp_path, capsys):
    reference, out = tmp_path / "whole", tmp_path / "run"
    assert train(*args, "--out", reference) == 0
    assert train(*args, "--out", out, "--stop-at", 3) == 0
    take_down(store, REMOVED)
    assert train("--data", store, "--out", out, "--resume", "--generation", 2) == 1
    assert "The run was started on generation 1 of" in capsys.readouterr().err
    assert train("--data", store, "--out", out, "--resume", "--generation", 1) == 0
    assert "removed" not in capsys.readouterr().err
    assert read_steps(out) == read_steps(reference)
    assert explain_trained_count(out, 4, capsys) == read_trained_counts(out)[4]


def test_a_chosen_generation_needs_no_path(store, args, tmp_path, capsys):
    reference, out = tmp_path / "whole", tmp_path / "run"
    assert train(*args, "--out", reference) == 0
    assert train(*args, "--out", out, "--stop-at", 3) == 0
    take_down(store, REMOVED)
    assert train("--out", out, "--resume", "--generation", 1) == 0
    assert read_steps(out) == read_steps(reference)


def test_removed_documents_are_not_evaluated(store, args, tmp_path, capsys):
    out = tmp_path / "run"
    assert train(*args, "--out", out, "--stop-at", 3) == 0
    (store.with_name("takedown.txt")).write_text("val:0\nval:3\n")
    remove_documents(store, documents_file=store.with_name("takedown.txt"))
    capsys.readouterr()
    assert train("--out", out, "--resume", "--quiet") == 0
    assert re.search(
        rf"2 documents \(\d+ tokens\) of {store}/val are removed: .* are evaluated", capsys.readouterr().err
    )


def test_a_source_that_an_edit_added_loses_its_removed_documents(store, args, tmp_path, capsys):
    other, out = small_store(tmp_path / "other").path, tmp_path / "run"
    assert train("--mixture", f"{store}=1,{other}", *args[2:], "--out", out, "--stop-at", 2) == 0
    assert run_command_line(["edit", str(out), "--at-step", "2", "--weights", "s=0.4,other=0.6"]) == 0
    assert train("--out", out, "--resume", "--stop-at", 4) == 0
    take_down(other, REMOVED)
    capsys.readouterr()
    assert train("--out", out, "--resume", "--quiet") == 0
    assert f"50 documents (1,148 tokens) of {other}/train are removed" in capsys.readouterr().err
    assert run_command_line(["explain", str(out), "--step", "5"]) == 0
    assert "removed: served as end tokens without loss since then" in capsys.readouterr().out


def test_a_source_is_added_by_the_edit_that_a_refused_resume_names(store, args, tmp_path, capsys):
    other, out = small_store(tmp_path / "other").path, tmp_path / "run"
    assert train("--mixture", f"{store}=1", *args[2:], "--out", out, "--stop-at", 2) == 0
    capsys.readouterr()
    assert train("--mixture", f"{store}=0.4,{other}=0.6", *args[2:], "--out", out, "--resume") == 1
    remedy = "to add a store, give edit a --mixture of the weights that the run was started with and the new store"
    error = capsys.readouterr().err
    assert (
        f"mixture of s, and the mixture of other, s is given. Sources are added by an edit: batchloom edit {out}"
        in error
    )
    assert f" --at-step STEP --weights WEIGHTS; {remedy}" in error
    assert run_command_line(["edit", str(out), "--at-step", "3", "--weights", "s=0.4,other=0.6"]) == 2
    error = capsys.readouterr().err
    assert f"weights.other: unknown source; the sources are s; {remedy}" in error
    edit = ["edit", str(out), "--mixture", f"{store}=1,{other}", "--at-step", "3", "--weights", "s=0.4,other=0.6"]
    assert run_command_line(edit) == 0
    assert train("--out", out, "--resume") == 0
    assert [step for step, *_ in read_steps(out)] == list(range(6))


def test_removals_of_a_mixture(store, args, tmp_path, capsys):
    other, mixture = small_store(tmp_path / "other").path, tmp_path / "mixture.yaml"
    mixture.write_text(f"stores: {{a: {store}, b: {other}}}\nweights: {{a: 1, b: 1}}\n")
    command = ["--mixture", mixture, *args[2:], "--out", tmp_path / "run"]
    assert train(*command, "--stop-at", 3) == 0
    take_down(store, REMOVED)
    chosen = mixture.with_name("chosen.yaml")
    chosen.write_text(f"stores: {{a: {{path: {store}, generation: 2}}, b: {other}}}\nweights: {{a: 1, b: 1}}\n")
    assert train("--mixture", chosen, *command[2:], "--resume") == 1
    assert f"The run was started on generation 1 of {store}, and generation 2 is given" in capsys.readouterr().err
    later = [*command[2:-1], tmp_path / "later"]
    assert train("--mixture", chosen, *later, "--stop-at", 3) == 0
    chosen.write_text(chosen.read_text().replace("generation: 2", "generation: 1"))
    assert train("--mixture", chosen, *later, "--resume") == 1
    assert f"The run was started on generation 2 of {store}, and generation 1 is given" in capsys.readouterr().err
    assert train("--data", other, *later, "--resume") == 1
    error = capsys.readouterr().err
    assert f"was started on the mixture of a, b, and {other} is given. Give the data it was started on" in error
    assert "fingerprint" not in error
    assert train(*command, "--resume") == 0
    assert "50 documents (1,148 tokens)" in capsys.readouterr().err
    stores = {"a": open_store(store, generation=1, removals=2), "b": open_store(other)}
    loader = Loader(Mixture(stores=stores, weights={"a": 1, "b": 1}), seq_len=32, global_batch_size=4, steps=6)
    trained = read_trained_counts(tmp_path / "run")
    assert trained[3:] == [loader.trained_tokens(step) for step in range(3, 6)]
    assert [explain_trained_count(tmp_path / "run", step, capsys) for step in (0, 2, 3)] == [trained[0], *trained[2:4]]


def test_a_run_remembers_where_its_data_are(store, args, tmp_path, capsys):
    other, folder = small_store(tmp_path / "other").path, tmp_path / "run"
    for data in (args[:2], ["--mixture", f"{store}=0.7,{other}=0.3"]):
        assert train(*data, *args[2:], "--out", folder, "--stop-at", 3) == 0
        assert run_command_line(["edit", str(folder), "--at-step", "4", "--skip", "1"]) == 0
        assert train("--out", folder, "--resume", "--max-iters", 5) == 0
        assert [step for step, *_ in read_steps(folder)] == [0, 1, 2, 3, 4]
        assert (
            run_command_line(["when", str(folder), "--document", "3"] + ["--source", "s"] * (data[0] == "--mixture"))
            == 0
        )
        assert run_command_line(["explain", str(folder), "--step", "3", "--json"]) == 0
        sequences = json.loads(capsys.readouterr().out.splitlines()[-1])["sequences"]
        logged = next(
            entry for entry in read_log(folder / "log.jsonl") if entry["kind"] == "step" and entry["step"] == 3
        )
        assert sum(span["stop"] - span["start"] for row in sequences for span in row["spans"]) == logged["tokens"]
        shutil.rmtree(folder)
    assert train(*args, "--out", folder, "--stop-at", 3) == 0
    described = json.loads((folder / "run.json").read_text())
    del described["data"]["path"]
    (folder / "run.json").write_text(json.dumps(described))
    assert train("--out", folder, "--resume") == 2
    assert "does not say where its data are" in capsys.readouterr().err
    shutil.rmtree(folder)
    assert train(*args, "--out", folder, "--stop-at", 3) == 0
    store.rename(store.with_name("moved"))
    assert train("--out", folder, "--resume") == 1
    assert f"are no longer at {store}: name their place with --data" in capsys.readouterr().err
    (tmp_path / "text.txt").write_text("some words " * 900)
    assert train("--input-file", tmp_path / "text.txt", *args[2:], "--out", tmp_path / "own", "--stop-at", 2) == 0
    assert train("--out", tmp_path / "own", "--resume") == 2
    assert "give what it was started on" in capsys.readouterr().err


def test_an_edit_bans_the_documents_of_a_list(store, args, tmp_path, capsys):
    out, listed = tmp_path / "run", tmp_path / "listed.txt"
    assert train(*args, "--out", out, "--stop-at", 3) == 0
    digest = open_store(store).provenance.of(5).hash
    listed.write_text(f"# a list\ntrain:17\n{digest}\ngiven 9\nnowhere 3\n")
    command = ["edit", str(out), "--data", str(store), "--at-step", "3", "--documents-file", str(listed)]
    assert run_command_line([*command, "--ban", "1", "--json"]) == 0
    output = capsys.readouterr()
    assert json.loads(output.out.splitlines()[-1])["entry"]["ban"] == {"data": [1, 5, 9, 17]}
    assert "not in the train subset of the run: nowhere 3" in output.err
    listed.write_text("nowhere 3\n")
    assert run_command_line(command) == 1
    assert "names no document that the run trains" in capsys.readouterr().err


def test_a_run_on_a_generation_that_was_compacted_away_is_refused(store, args, tmp_path, capsys):
    out = tmp_path / "run"
    assert train(*args, "--out", out, "--stop-at", 3) == 0
    grow(store)
    compact_store(store)
    assert train("--data", store, "--out", out, "--resume") == 1
    error = capsys.readouterr().err
    assert "Generation 1 of" in error
    assert "was compacted away when generation 3 was made" in error


def test_a_generation_can_be_asked_for(store, args, tmp_path, capsys):
    grow(store)
    assert train(*args, "--out", tmp_path / "new", "--stop-at", 2) == 0
    assert "210 documents" in capsys.readouterr().out
    assert json.loads((tmp_path / "new/run.json").read_text())["data"]["generation"] == 2
    assert train(*args, "--out", tmp_path / "old", "--stop-at", 2, "--generation", 1) == 0
    assert "150 documents" in capsys.readouterr().out
    assert train(*args, "--out", tmp_path / "old", "--resume") == 0
    # Resuming finds its generation, and refuses another one.
    assert train(*args, "--out", tmp_path / "old", "--resume", "--generation", 2) == 1
    assert "The run was started on generation 1 of" in capsys.readouterr().err
    assert train(*args, "--out", tmp_path / "other", "--generation", 7) == 1
    assert "has no generation 7; it has: 1, 2" in capsys.readouterr().err


def test_a_run_keeps_its_val_subset_when_only_val_changed(store, args, tmp_path, capsys):
    assert train(*args, "--out", tmp_path / "one", "--stop-at", 3) == 0
    append_documents(store, {"val": counting_documents(9, 8)})
    assert train(*args, "--out", tmp_path / "two", "--stop-at", 3) == 0
    capsys.readouterr()
    assert train("--data", store, "--out", tmp_path / "one", "--resume") == 0
    assert "was started on generation 1" in capsys.readouterr().out
    assert train("--data", store, "--out", tmp_path / "two", "--resume") == 0
    assert "was started on" not in capsys.readouterr().out


def test_generations_are_of_stores(args, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("text")
    assert train("--input-file", tmp_path / "a.txt", "--generation", 1) == 2
    assert "--generation: 1 requires --data" in capsys.readouterr().err
    assert train("--data", Path("dummy"), "--generation", 1, "--out", tmp_path / "r") == 2
    assert "only stores have generations" in capsys.readouterr().err
