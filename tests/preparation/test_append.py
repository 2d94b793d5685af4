"""``prepare --append``: new inputs extend a store, and its existing files stay."""

import json
import os
import random
import re
import shutil
from pathlib import Path
from string import ascii_letters

import numpy as np
import pytest

import batchloom
from batchloom import InputError, SettingsError, check, open_store
from batchloom.cli import run_command_line
from batchloom.core.errors import StoreConflictError
from batchloom.preparation import ExecutionSettings, Progress, RunSettings, read_recipe, run_recipe
from batchloom.store import (
    BAD,
    GOOD,
    compact_store,
    map_provenance,
    map_signature_file,
    read_log,
    read_manifest,
    remove_documents,
)
from batchloom.testing import write_store
from preparation.jobs import run_until_killed
from preparation.stores import INLINE, SMALL_LIMITS, hash_store_files, make_recipe, prepare_store, write_jsonl
from preparation.test_resume import RENAMES


@pytest.fixture(autouse=True)
def work_in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(name, numbers, text="document number {}"):
    return write_jsonl(name, [{"text": text.format(n)} for n in numbers])


def append(inputs, out="s", **settings):
    """Append with the defaults of ``make``: tokenizer ``bytes``, units of any size."""
    run_settings = {
        name: settings.pop(name)
        for name in ("limits", "unit_bytes", "dry_run", "execution", "hash_inputs")
        if name in settings
    }
    listener = settings.pop("listener", None)
    settings.setdefault("tokenizer", "bytes")
    inputs = [inputs] if isinstance(inputs, (str, Path)) else inputs
    return run_recipe(
        make_recipe(inputs=tuple(map(str, inputs)), **settings),
        Path(out),
        listener or (lambda event: None),
        settings=RunSettings(append=True, **{"execution": INLINE, **run_settings}),
    )


def read_ids(folder, generation=None):
    """Return the token ids of every document by subset, in order of numbers."""
    subsets = read_manifest(Path(folder), generation).subsets
    stores = {name: open_store(folder, name, generation=generation) for name in subsets}
    return {name: [document.ids.tolist() for document in store] for name, store in stores.items()}


def read_sorted_texts(folder):
    return sorted(
        bytes(document[:-1]).decode() for subset_documents in read_ids(folder).values() for document in subset_documents
    )


def test_new_documents_are_appended_and_existing_ones_stay(tmp_path):
    write("a.jsonl", range(100))
    write("b.jsonl", range(90, 150))
    settings = {"val_fraction": 0.1, "balance_subsets": False}
    prepare_store("a.jsonl", "s", **settings)
    before, files, fingerprint = read_ids("s"), hash_store_files("s"), open_store("s").fingerprint
    result = append(["a.jsonl", "b.jsonl"], **settings)
    assert (result.generation, result.counts.documents, result.counts.records) == (2, 50, 60)
    assert result.counts.dropped == {"exact duplicate": 10}
    assert result.in_all == (
        150,
        sum(len(document) for subset_documents in read_ids("s").values() for document in subset_documents),
    )
    assert result.input_files == 1
    assert sum(subset.documents for subset in result.subsets.values()) == 50
    for name, documents in read_ids("s").items():
        assert documents[: len(before[name])] == before[name]
    assert read_sorted_texts("s") == sorted(f"document number {n}" for n in range(150))
    # Existing files are unchanged, and the older generation is the same store.
    after = hash_store_files("s")
    assert {name: after[name] for name in files if name != "dataset_metadata.json"} == {
        name: data for name, data in files.items() if name != "dataset_metadata.json"
    }
    assert read_ids("s", 1) == before
    assert open_store("s", generation=1).fingerprint == fingerprint
    assert check("s").sound, check("s").faults
    assert check("s", generation=1).sound
    # The hash alone decides the subset of a document.
    prepare_store(["a.jsonl", "b.jsonl"], "once", **settings)
    assert {name: sorted(subset_documents) for name, subset_documents in read_ids("s").items()} == {
        name: sorted(subset_documents) for name, subset_documents in read_ids("once").items()
    }
    assert [entry.made for entry in read_manifest(Path("s")).all_history] == [
        "prepared",
        "appended",
    ]
    origin = open_store("s").provenance.of(len(before["train"]))
    assert origin.source == "b.jsonl"


def test_append_creates_a_missing_store_and_reports_that_nothing_is_new(capsys):
    write("a.jsonl", range(30))
    command = ["prepare", "a.jsonl", "--out", "s", "--tokenizer", "bytes", "--append"]
    assert run_command_line(command) == 0
    captured = capsys.readouterr()
    assert "There is no store at s yet: it is made, with the tokenizer " in captured.err
    assert "documents kept" in captured.out
    before = hash_store_files("s")
    assert run_command_line(command) == 0
    captured = capsys.readouterr()
    assert "1 input of 1 is in s already." in captured.err
    assert "s holds all of this already; nothing to append." in captured.out
    assert "generation 1, with 30 documents" in captured.out
    assert hash_store_files("s") == before
    write("b.jsonl", range(30, 40))
    assert run_command_line(["prepare", "b.jsonl", "--out", "s", "--append", "--profile"]) == 0
    captured = capsys.readouterr()
    assert re.search("documents added +10\n", captured.out)
    assert "s is generation 2, with 40 documents and " in captured.out
    assert run_command_line(["prepare", "--out", "s", "--append", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["generation"], report["already_done"], report["in_all"][0]) == (2, True, 40)


def test_inputs_are_recognized_by_path_or_by_content(tmp_path):
    write("a.jsonl", range(100, 120))
    prepare_store("a.jsonl", "s")
    os.utime("a.jsonl", (1, 1))
    assert append("a.jsonl").already_done
    moved = tmp_path / "d" / "a.jsonl"
    moved.parent.mkdir()
    Path("a.jsonl").rename(moved)
    assert append(moved).already_done
    Path("s/report.json").unlink()
    assert append(moved).already_done
    # Two sources of the same name and size in two generations are both recognized.
    first = moved.read_bytes()
    write(moved, range(110, 130))
    assert append(moved).counts.documents == 10
    for path in Path("s").glob("report*"):
        path.unlink()
    assert append(moved).already_done
    moved.write_bytes(first)
    assert append(moved).already_done
    assert [source.name for source in read_manifest(Path("s")).sources] == ["a.jsonl", "a.jsonl"]
    assert check("s").sound


def test_inputs_are_recognized_by_content_alone_with_hash_inputs(monkeypatch):
    write("a.jsonl", range(100, 120))
    write("b.jsonl", range(200, 220))
    prepare_store(["a.jsonl", "b.jsonl"], "s")
    assert append(["a.jsonl", "b.jsonl"], hash_inputs=True).already_done
    times = Path("a.jsonl").stat()
    write("a.jsonl", range(115, 135))
    os.utime("a.jsonl", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert append(["a.jsonl", "b.jsonl"]).already_done
    notes = []
    result = append(["a.jsonl", "b.jsonl"], hash_inputs=True, listener=lambda event: notes.append(str(event)))
    assert (result.generation, result.counts.documents) == (2, 15)
    assert any("1 input of 2 is in s already" in note for note in notes)
    assert any("a.jsonl changed since it was read for s" in note for note in notes)
    assert append(["a.jsonl", "b.jsonl"], hash_inputs=True).already_done
    # With another relative path and time it is still the same file.
    Path("d").mkdir()
    monkeypatch.chdir("d")
    os.utime("../b.jsonl", (1, 1))
    assert append("../b.jsonl", "../s", hash_inputs=True).already_done
    assert check("../s").sound


def test_a_file_that_grew_is_read_completely():
    write("a.jsonl", range(20))
    prepare_store("a.jsonl", "s")
    write("a.jsonl", range(25))
    result = append("a.jsonl")
    assert any("a.jsonl changed since it was read for s" in note for note in result.notes)
    assert (result.counts.documents, result.counts.dropped) == (5, {"exact duplicate": 20})


@pytest.mark.parametrize(("dedup", "documents"), [("none", 4), ("exact", 2), ("lines", 2), ("near", 2)])
def test_duplicates_of_stored_documents_are_removed_as_the_recipe_says(dedup, documents):
    write_jsonl("a.jsonl", [{"text": "menu\nfirst"}, {"text": "menu\nsecond"}])
    write_jsonl("b.jsonl", [{"text": text} for text in ("menu\nfirst", "third\nline", "fourth", "fourth")])
    prepare_store("a.jsonl", "s", dedup="exact", val_fraction=0)
    result = append("b.jsonl", dedup=dedup, val_fraction=0)
    assert result.counts.documents == documents
    # Lines are compared only with lines of the same job.
    texts = [bytes(document[:-1]).decode() for document in read_ids("s")["train"]]
    assert texts[:2] == ["menu\nfirst", "menu\nsecond"]


def test_an_empty_subset_is_filled_and_assigned_documents_stay():
    write_jsonl("a.jsonl", [{"text": "alone"}])
    write_jsonl("b.jsonl", [{"text": "alone"}, {"text": "two"}, {"text": "three"}])
    prepare_store("a.jsonl", "s", dedup="none")
    assert list(read_ids("s")) == ["train"]
    append("b.jsonl", dedup="none")
    documents = read_ids("s")
    assert {name: len(ids_of_subset) for name, ids_of_subset in documents.items()} == {"train": 3, "val": 1}
    # Equal documents are in one subset, even if their hash is the smallest of the new ones.
    assert not [document for document in documents["val"] if document in documents["train"]]
    assert check("s").sound


def test_documents_moved_to_a_subset_stay_in_it():
    write_jsonl("a.jsonl", [{"text": "one"}, {"text": "two"}])
    prepare_store("a.jsonl", "s", dedup="none")
    moved = read_ids("s")["val"]
    assert len(moved) == 1
    write_jsonl("b.jsonl", [{"text": text} for text in ("one", "two", "one", "two", "three")])
    append("b.jsonl", dedup="none", limits=SMALL_LIMITS)
    assert read_ids("s")["val"] == moved * 3
    assert check("s").sound


PAIRS = [{"prompt": f"q{n}", "chosen": f"good {n}", "rejected": f"bad {n}"} for n in range(40)]
LABELS = [{"prompt": f"q{n}", "completion": f"answer {n}", "label": n % 2 == 0} for n in range(40)]
CHATS = [
    {"messages": [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": f"a{n}"}]} for n in range(40)
]


@pytest.mark.parametrize("records", [PAIRS, LABELS, CHATS], ids=["pairs", "labels", "chats"])
def test_conversations_and_preferences(records):
    write_jsonl("a.jsonl", records[:30])
    write_jsonl("b.jsonl", records[20:])
    prepare_store("a.jsonl", "s", val_fraction=0.1)
    before = read_ids("s")
    result = append("b.jsonl", val_fraction=0.1)
    per_record = 2 if records is PAIRS else 1
    assert result.counts.documents == 10 * per_record
    assert result.counts.dropped == {"exact duplicate": 10 * per_record}
    assert read_ids("s", 1) == before
    store = open_store("s")
    assert store.masked
    assert check("s").sound, check("s").faults
    write_jsonl("c.jsonl", [{"text": "plain"}])
    if records is not CHATS:
        with pytest.raises(InputError, match="c.jsonl holds documents for language modelling, and s (pref|lab)"):
            append("c.jsonl", val_fraction=0.1)
        assert not Path("s/.work").exists()


def test_another_label_of_an_answer_that_is_there_is_no_duplicate():
    write_jsonl("a.jsonl", LABELS[:2])
    write_jsonl("b.jsonl", [record | {"label": not record["label"]} for record in LABELS[:2]] + LABELS[:2])
    prepare_store("a.jsonl", "s", val_fraction=0)
    assert append("b.jsonl", val_fraction=0).counts.documents == 2
    store = open_store("s")
    assert [side for n in range(len(store.shards)) for side in store.shards.sides(n).sides.tolist()] == [
        *(GOOD, BAD, BAD, GOOD)
    ]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            {"val_fraction": 0.5},
            "was prepared with val_fraction 0.01, but 0.5 is requested",
        ),
        ({"dtype": "int32"}, "s has dtype uint16, but dtype int32 is requested"),
        pytest.param({"tokenizer": "gpt2"}, "s has tokenizer bytes, but gpt2 is requested", marks=pytest.mark.slow),
        ({"tokenizer": "train:300"}, "s has tokenizer bytes, but train:300 is requested"),
    ],
)
def test_settings_that_do_not_fit_the_store_are_refused_at_once(setting, message):
    write("a.jsonl", range(20))
    write("b.jsonl", range(20, 30))
    prepare_store("a.jsonl", "s")
    before = hash_store_files("s")
    with pytest.raises(StoreConflictError, match=message):
        batchloom.prepare("b.jsonl", out="s", append=True, **setting)
    assert hash_store_files("s") == before
    with pytest.raises(SettingsError, match="only a store on this machine can be appended to"):
        batchloom.prepare("b.jsonl", out="s3://bucket/s", append=True)
    with pytest.raises(SettingsError, match="out: 5 is no path"):
        batchloom.prepare("b.jsonl", out=5, append=True)


def test_stores_that_hold_no_recipe():
    write("b.jsonl", range(10))
    write_store("w", [[72, 105, 256]] * 3)
    with pytest.raises(InputError, match=r"w was imported.*give one with --recipe FILE"):
        batchloom.prepare("b.jsonl", out="w", append=True)
    Path("r.yaml").write_text("inputs: [b.jsonl]\ntokenizer: w\n")
    assert batchloom.prepare(out="w", append=True, recipe="r.yaml").in_all[0] == 13
    assert check("w").sound
    batchloom.prepare("dummy:documents=50", out="d")
    with pytest.raises(StoreConflictError, match="d holds synthetic data"):
        batchloom.prepare("b.jsonl", out="d", append=True)


def test_a_learned_tokenizer_stays():
    write("a.jsonl", range(50), "words of the first kind {}")
    write("b.jsonl", range(50), "others, quite unlike them {}")
    batchloom.prepare("a.jsonl", out="s", tokenizer="train:300", val_fraction=0)
    state = Path("s/tokenizer_state.json").read_bytes()
    Path("bad.jsonl").write_text('{"text": "words"}\n' + "no JSON\n" * 20)
    # The store's tokenizer is not trained again, so a job that ends before its first unit keeps nothing.
    with pytest.raises(InputError, match="bad"):
        batchloom.prepare("bad.jsonl", out="s", append=True)
    assert not Path("s/.work").exists()
    batchloom.prepare("b.jsonl", out="s", append=True)
    assert Path("s/tokenizer_state.json").read_bytes() == state
    assert open_store("s")[50].text.startswith("others, quite unlike them 0")


def test_settings_of_one_input_apply_to_it_again_and_to_no_other():
    Path("d").mkdir()
    write_jsonl("d/a.jsonl", [{"body": f"a{n}"} for n in range(9)])
    write_jsonl("b.jsonl", [{"content": f"b{n}"} for n in range(9)])
    Path("m.yaml").write_text(
        "datasets:\n  - path: d\n    mapping: {text: body}\n    name: dee\n  - path: b.jsonl\n    mapping: {text: content}\n"
    )
    batchloom.prepare("m.yaml", out="s", tokenizer="bytes", val_fraction=0)
    write_jsonl("c.jsonl", [{"text": f"c{n}"} for n in range(9)])
    batchloom.prepare("c.jsonl", out="s", append=True)
    write_jsonl("d/e.jsonl", [{"body": f"e{n}", "text": "not this"} for n in range(9)])
    batchloom.prepare("m.yaml", out="s", append=True)
    write_jsonl("d/f.jsonl", [{"body": f"f{n}", "text": "not this"} for n in range(9)])
    batchloom.prepare("d", out="s", append=True)
    assert read_sorted_texts("s") == sorted(f"{letter}{n}" for letter in "abcef" for n in range(9))
    assert [source.dataset for source in read_manifest(Path("s")).sources] == [
        "dee",
        "",
        "",
        "dee",
        "dee",
    ]


def test_after_removal_and_after_compaction():
    for name, numbers in (("a", range(20)), ("b", range(20, 40)), ("c", range(10, 50))):
        write(f"{name}.jsonl", numbers)
    prepare_store(["a.jsonl", "b.jsonl"], "s", val_fraction=0.1)
    remove_documents("s", sources=["a.jsonl"])
    # Removed documents do not count as present; another source that contains them adds them again.
    assert append("c.jsonl", val_fraction=0.1).counts.documents == 20
    assert append("a.jsonl", val_fraction=0.1).already_done
    assert check("s").sound, check("s").faults
    compact_store("s")
    write("d.jsonl", range(60))
    result = append(["a.jsonl", "d.jsonl"], val_fraction=0.1)
    assert (result.counts.documents, result.generation) == (20, 5)
    assert read_sorted_texts("s") == sorted(f"document number {n}" for n in range(60))
    assert check("s").sound, check("s").faults
    assert [entry.made for entry in read_log(Path("s"))] == [
        *("prepared", "removed", "appended", "compacted", "appended")
    ]


def test_the_commands_read_what_was_appended(capsys):
    write("a.jsonl", range(40))
    write("b.jsonl", range(40, 60))
    with Path("b.jsonl").open("a") as file:
        file.write("broken\n")
    prepare_store("a.jsonl", "s")
    append("b.jsonl")
    assert {"report.00002.json", "report.00002.html", "quarantine.00002.jsonl"} <= {
        path.name for path in Path("s").iterdir()
    }
    report = json.loads(Path("s/report.00002.json").read_text())
    assert [source["name"] for source in report["sources"]] == ["b.jsonl"]
    for command in (
        ["check", "s"],
        ["log", "s"],
        ["inspect", "s"],
        ["doctor", "s"],
        ["export", "s", "--to", "flat", "--out", "flat"],
    ):
        assert run_command_line(command) == 0, command
    assert "59 documents of subset train" in capsys.readouterr().out


def test_a_dry_run_writes_nothing_and_the_next_goes_on():
    write("a.jsonl", range(40))
    write("b.jsonl", range(30, 60))
    prepare_store("a.jsonl", "s")
    before = hash_store_files("s")
    result = append("b.jsonl", dry_run=True)
    assert result.counts.documents == 20
    work_files = {name for name in hash_store_files("s") if name.startswith(".work/")}
    assert {name: data for name, data in hash_store_files("s").items() if name not in work_files} == before
    # Unfinished work does not affect readers, and only the same append resumes it.
    assert check("s").sound
    assert len(open_store("s")) + len(open_store("s", "val")) == 40
    assert prepare_store("a.jsonl", "s").already_done
    assert append("a.jsonl").already_done
    result = append("b.jsonl")
    assert (result.resumed_units, result.counts.documents, result.generation) == (1, 20, 2)


@pytest.mark.slow
def test_a_pool_appends_the_same_bytes():
    write("a.jsonl", range(60))
    write("b.jsonl", range(50, 140))
    for out in ("one", "pool"):
        prepare_store("a.jsonl", out, dedup="near", unit_bytes=1000)
    append("b.jsonl", "one", dedup="near", unit_bytes=1000)
    append("b.jsonl", "pool", dedup="near", unit_bytes=1000, execution=ExecutionSettings(workers=2))
    assert hash_store_files("pool") == hash_store_files("one")


SMALL_JOB = {"limits": SMALL_LIMITS, "unit_bytes": 3000, "val_fraction": 0.2, "tokens_per_shard": 3000}


@pytest.fixture
def grown_files():
    """Make a store, a copy with a second generation, and the input that was appended."""
    write("a.jsonl", range(40))
    write("b.jsonl", range(24, 88), "document number {}")
    with Path("b.jsonl").open("a") as file:
        file.write("broken\n")
    prepare_store("a.jsonl", "first", dedup="near", **SMALL_JOB)
    shutil.copytree("first", "whole")
    append("b.jsonl", "whole", dedup="near", **SMALL_JOB)
    return hash_store_files("whole")


def append_killed(count, events=RENAMES):
    """Append in a process that is killed at the count-th event; return whether it was."""
    return run_until_killed(events, count, lambda: append("b.jsonl", "s", dedup="near", **SMALL_JOB))


# Writing a shard takes three renames. No stride is a multiple of three, so each of them is reached.
@pytest.mark.parametrize("stride", [26, pytest.param(2, marks=pytest.mark.slow)])
def test_killed_at_any_rename_the_store_is_the_old_one_or_the_new_one(grown_files, stride):
    expected = {n: read_ids("whole", n) for n in (1, 2)}
    count, killed = 4 - stride, True
    while killed:
        count += stride
        shutil.copytree("first", "s")
        killed = append_killed(count)
        number = read_manifest(Path("s")).generation
        assert read_ids("s") == expected[number]
        append("b.jsonl", "s", dedup="near", **SMALL_JOB)
        assert hash_store_files("s") == grown_files
        assert not Path("s/.work").exists()
        shutil.rmtree("s")
    assert count > 40


def test_killed_behind_the_new_manifest_other_inputs_follow(grown_files, monkeypatch):
    """Leftovers of a finished job do not count as an unfinished job."""
    shutil.copytree("first", "s")
    from batchloom.preparation import WorkFolder

    with monkeypatch.context() as patch:
        patch.setattr(WorkFolder, "remove", lambda self: (_ for _ in ()).throw(InterruptedError))
        with pytest.raises(InterruptedError):
            append("b.jsonl", "s", dedup="near", **SMALL_JOB)
    assert read_manifest(Path("s")).generation == 2
    assert Path("s/.work/job.json").exists()
    write("c.jsonl", range(500, 510), "quite another text of number {}")
    assert append(["b.jsonl", "c.jsonl"], "s", dedup="near", **SMALL_JOB).generation == 3
    assert check("s").sound


def test_a_new_file_that_cannot_be_read_is_left_out_of_every_append():
    Path("in").mkdir()
    for number in range(200):
        write(f"in/{number:03}.jsonl", [number])
    prepare_store("in", "s")
    write("in/new.jsonl", [500])
    Path("in/unknown.jsonl").write_text('{"a": 1, "b": 2}\n')
    for known, documents in ((200, 1), (201, 0)):
        result = append("in")
        assert result.counts.documents == documents
        assert result.notes[0] == f"{known} inputs of 202 are in s already."
        assert result.notes[1] == "Left out of in: 1 file that cannot be read:"
        assert result.notes[2].startswith("  in/unknown.jsonl")
        assert len(result.notes) == 3
    assert result.already_done


def test_changed_inputs_and_a_second_run_are_reported(grown_files):
    shutil.copytree("first", "s")
    assert append_killed(30)
    write("c.jsonl", range(500, 510))
    with pytest.raises(StoreConflictError, match=r"inputs: c.jsonl is new.*give --restart"):
        append(["b.jsonl", "c.jsonl"], "s", dedup="near", **SMALL_JOB)
    with pytest.raises(StoreConflictError, match="holds an unfinished job"):
        remove_documents("s", sources=["a.jsonl"])

    def run_again(event):
        if isinstance(event, Progress):
            with pytest.raises(StoreConflictError, match="Another run is preparing into s"):
                append("b.jsonl", "s", dedup="near", **SMALL_JOB)

    append("b.jsonl", "s", dedup="near", listener=run_again, **SMALL_JOB)
    assert hash_store_files("s") == grown_files


def test_the_first_command_still_recognizes_a_store_that_has_grown():
    write("a.jsonl", range(20))
    write("b.jsonl", range(20, 30))
    prepare_store("a.jsonl", "s")
    append("b.jsonl", dedup="none")
    assert prepare_store("a.jsonl", "s").already_done
    with pytest.raises(StoreConflictError, match="to add new inputs to it, give --append"):
        prepare_store("b.jsonl", "s", dedup="none")
    with pytest.raises(StoreConflictError, match="tokens_per_shard.*to add new inputs to it, give --append"):
        prepare_store("a.jsonl", "s", tokens_per_shard=7)


def test_a_store_of_several_jobs_is_made_again_one_after_the_other(tmp_path, capsys):
    for name, numbers in (("a", range(20)), ("b", range(15, 30)), ("c", range(40))):
        write(f"{name}.jsonl", numbers)
    batchloom.prepare("a.jsonl", out="s", tokenizer="bytes")
    batchloom.prepare("b.jsonl", out="s", append=True, dedup="none")
    batchloom.prepare(str(tmp_path / "c.jsonl"), out="s", append=True)
    with pytest.raises(InputError) as error:
        batchloom.prepare(recipe="s", out="again")
    assert "s was made by 3 jobs, and its recipe is only that of the last one: run all jobs again" in str(error.value)
    assert not Path("again").exists()
    steps = [text.strip(" .,") for text in str(error.value).split("with ")[1].replace("then", "and").split("and ")]
    assert steps == [
        "--recipe s/generations/00001.json",
        "--append --recipe s/generations/00002.json",
        "--append --recipe s",
    ]
    for step in steps:
        assert run_command_line(["prepare", *step.split(), "--out", "again"]) == 0
    assert "again is identical to s, byte for byte." in capsys.readouterr().err
    assert hash_store_files("again") == hash_store_files("s")
    # With other inputs, or as a value, the recipe of the store is usable.
    assert batchloom.prepare("b.jsonl", recipe="s", out="other").counts.documents == 15
    assert read_recipe("s").inputs == (str(tmp_path / "c.jsonl"),)
    compact_store("s")
    with pytest.raises(InputError, match="compaction removed the others. Give the inputs of all jobs as arguments"):
        batchloom.prepare(recipe="s", out="again2")
    # Without a recipe of its own, an append uses the newest one.
    assert read_sorted_texts("s").count("document number 16") == 3


def make_long_text(number, suffix=""):
    """Make a long text; variants with another suffix are near duplicates of it alone."""
    return {"text": "".join(random.Random(number).choices(ascii_letters, k=600)) + suffix}


def append_near(inputs, out="s", **settings):
    return append(inputs, out, dedup=settings.pop("dedup", "near"), val_fraction=0.1, **settings)


def test_near_duplicates_of_older_generations_are_found_by_stored_signatures():
    write_jsonl("a.jsonl", [make_long_text(n) for n in range(20)])
    write_jsonl("b.jsonl", [make_long_text(n, "changed") for n in range(15, 30)] + [make_long_text(29, "again")])
    write_jsonl("c.jsonl", [make_long_text(n, "anew") for n in range(10, 40)])
    prepare_store("a.jsonl", "s", dedup="near", val_fraction=0.1, limits=SMALL_LIMITS, unit_bytes=4000)
    manifest = read_manifest(Path("s"))
    signature_files = [
        f"{name}/{shard.name}.bands" for name, subset in manifest.subsets.items() for shard in subset.shards
    ]
    assert len(signature_files) > 2
    assert {name for name in hash_store_files("s") if name.endswith(".bands")} == set(signature_files)
    assert append_near("b.jsonl").counts.dropped == {"near duplicate": 6}
    result = append_near("c.jsonl")
    assert (result.counts.documents, result.notes) == (10, ())
    assert check("s").sound, check("s").faults
    assert check("s", generation=2).sound
    # Removed documents have no duplicates, and rewritten shards keep their signatures.
    remove_documents("s", sources=["c.jsonl"])
    assert (
        append_near(write_jsonl("d.jsonl", [make_long_text(35, "one"), make_long_text(5, "two")])).counts.documents == 1
    )
    compact_store("s")
    assert check("s").sound, check("s").faults
    assert (
        append_near(write_jsonl("e.jsonl", [make_long_text(n, "three") for n in (1, 20, 35, 36)])).counts.documents == 1
    )
    assert check("s").sound, check("s").faults


def test_without_stored_signatures_new_documents_are_compared_among_themselves():
    write_jsonl("a.jsonl", [make_long_text(n) for n in range(20)])
    write_jsonl("b.jsonl", [make_long_text(n, "b") for n in range(10, 25)] + [make_long_text(24, "c")])
    for out, dedup in (
        ("exact", "exact"),
        ("other", {"mode": "near", "bands": 10, "rows": 8}),
        ("bare", {"mode": "near", "keep_signatures": False}),
    ):
        prepare_store("a.jsonl", out, dedup=dedup, val_fraction=0.1)
        assert any(name.endswith(".bands") for name in hash_store_files(out)) == (out == "other")
        result = append_near("b.jsonl", out)
        assert result.counts.dropped == {"near duplicate": 1}
        assert any("holds signatures of this kind for 0 of its 2 shards" in note for note in result.notes)
        # The store has signatures of the appended documents now.
        result = append_near(write_jsonl("c.jsonl", [make_long_text(3, "d"), make_long_text(24, "d")]), out)
        assert result.counts.dropped == {"near duplicate": 1}
        assert check(out).sound, check(out).faults


@pytest.mark.parametrize("dropped", [False, True])
def test_signatures_match_their_documents_however_a_shard_is_written(dropped):
    """Check shards that are linked, copied without dropped documents, or cut smaller."""
    records = [make_long_text(n) for n in range(40)] + ([make_long_text(3), make_long_text(7, "x")] if dropped else [])
    write_jsonl("a.jsonl", records)
    prepare_store("a.jsonl", "whole", dedup="near", val_fraction=0.1)
    prepare_store("a.jsonl", "cut", dedup="near", val_fraction=0.1, tokens_per_shard=2000)
    keys_by_store = {}
    for out in ("whole", "cut"):
        for name, subset in read_manifest(Path(out)).subsets.items():
            for shard in subset.shards:
                signatures = map_signature_file(Path(out, name, f"{shard.name}.bands"), shard.documents)
                provenance = map_provenance(Path(out, name, f"{shard.name}.docs"))
                pairs = zip(map(tuple, provenance.hashes.tolist()), signatures.keys.tolist(), strict=True)
                keys_by_store.setdefault(out, {}).update(pairs)
    assert keys_by_store["whole"] == keys_by_store["cut"]
    assert len(keys_by_store["cut"]) == 40


def test_damaged_signature_files_are_found():
    write_jsonl("a.jsonl", [make_long_text(n) for n in range(4)])
    prepare_store("a.jsonl", "s", dedup="near", val_fraction=0)
    path = Path("s/train/shard_00000.bands")
    data = path.read_bytes()
    assert data[:24] == b"BLMBAND\x00" + np.array([1, 4], "<u8").tobytes()
    assert np.frombuffer(data, "<u2", 4, 24).tolist() == [5, 8, 14, 1]
    assert len(data) == 32 + 4 * 14 * 8
    for damaged, message in (
        (data[:-1] + bytes([data[-1] ^ 1]), "checksum differs"),
        (data[:-8], "declares 4 documents with 14 bands in 472 bytes"),
        (b"X" + data[1:], "is not a .bands file of version 1"),
        (None, "missing|No such file"),
    ):
        path.unlink()
        if damaged is not None:
            path.write_bytes(damaged)
        assert re.search(message, " ".join(check("s").faults)), check("s").faults
        path.write_bytes(data)
    assert check("s").sound
    prepare_store("a.jsonl", "t", val_fraction=0)
    shutil.copy(path, "t/train/shard_00000.bands")
    assert ".bands: the manifest does not list it" in " ".join(check("t").faults)
