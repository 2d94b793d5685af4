"""``prepare --append``: a store grows by the inputs that are new to it, and nothing that was there changes."""

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
from preparation.stores import SMALL, jsonl, make, recipe_of, tree
from preparation.test_resume import RENAMES, run_killed
from train.runs import PLAIN, steps_of


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(name, numbers, text="document number {}"):
    return jsonl(name, [{"text": text.format(n)} for n in numbers])


def append(inputs, out="s", **settings):
    """Append as ``make`` prepares: with the tokenizer ``bytes`` and units of any size."""
    how = {
        name: settings.pop(name)
        for name in ("limits", "unit_bytes", "dry_run", "execution", "hash_inputs")
        if name in settings
    }
    listener = settings.pop("listener", None)
    settings.setdefault("tokenizer", "bytes")
    inputs = [inputs] if isinstance(inputs, (str, Path)) else inputs
    return run_recipe(
        recipe_of(inputs=tuple(map(str, inputs)), **settings),
        Path(out),
        listener or (lambda event: None),
        settings=RunSettings(append=True, **how),
    )


def ids(folder, generation=None):
    """Every document by subset, in the order of numbers."""
    subsets = read_manifest(Path(folder), generation).subsets
    stores = {name: open_store(folder, name, generation=generation) for name in subsets}
    return {name: [one.ids.tolist() for one in store] for name, store in stores.items()}


def texts_of(folder):
    return sorted(bytes(one[:-1]).decode() for some in ids(folder).values() for one in some)


def test_what_is_new_comes_behind_and_all_else_stays(tmp_path):
    write("a.jsonl", range(100))
    write("b.jsonl", range(90, 150))
    by_hash = {"val_fraction": 0.1, "balance_subsets": False}
    make("a.jsonl", "s", **by_hash)
    before, files, print_ = ids("s"), tree("s"), open_store("s").fingerprint
    result = append(["a.jsonl", "b.jsonl"], **by_hash)
    assert (result.generation, result.counts.documents, result.counts.records) == (2, 50, 60)
    assert result.counts.dropped == {"exact duplicate": 10}
    assert result.in_all == (150, sum(len(one) for some in ids("s").values() for one in some))
    assert result.input_files == 1
    assert sum(subset.documents for subset in result.subsets.values()) == 50
    for name, documents in ids("s").items():
        assert documents[: len(before[name])] == before[name]
    assert texts_of("s") == sorted(f"document number {n}" for n in range(150))
    # Files that were there are as they were, and the older generation is the same store.
    after = tree("s")
    assert {name: after[name] for name in files if name != "dataset_metadata.json"} == {
        name: data for name, data in files.items() if name != "dataset_metadata.json"
    }
    assert ids("s", 1) == before
    assert open_store("s", generation=1).fingerprint == print_
    assert check("s").sound, check("s").faults
    assert check("s", generation=1).sound
    # In which subset a document stands is a matter of its hash alone.
    make(["a.jsonl", "b.jsonl"], "once", **by_hash)
    assert {name: sorted(some) for name, some in ids("s").items()} == {
        name: sorted(some) for name, some in ids("once").items()
    }
    assert [entry.made for entry in read_manifest(Path("s")).all_history] == [
        "prepared",
        "appended",
    ]
    origin = open_store("s").provenance.of(len(before["train"]))
    assert origin.source == "b.jsonl"


def test_to_nothing_it_makes_the_store_and_of_nothing_new_it_says_so(capsys):
    write("a.jsonl", range(30))
    words = ["prepare", "a.jsonl", "--out", "s", "--tokenizer", "bytes", "--append"]
    assert run_command_line(words) == 0
    told = capsys.readouterr()
    assert "There is no store at s yet: it is made, with the tokenizer " in told.err
    assert "documents kept" in told.out
    before = tree("s")
    assert run_command_line(words) == 0
    told = capsys.readouterr()
    assert "1 input of 1 is in s already." in told.err
    assert "s holds all of this already; nothing to append." in told.out
    assert "generation 1, with 30 documents" in told.out
    assert tree("s") == before
    write("b.jsonl", range(30, 40))
    assert run_command_line(["prepare", "b.jsonl", "--out", "s", "--append", "--profile"]) == 0
    told = capsys.readouterr()
    assert re.search("documents added +10\n", told.out)
    assert "s is generation 2, with 40 documents and " in told.out
    assert run_command_line(["prepare", "--out", "s", "--append", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["generation"], told["already_done"], told["in_all"][0]) == (2, True, 40)


def test_inputs_are_known_by_place_or_by_content(tmp_path):
    write("a.jsonl", range(100, 120))
    make("a.jsonl", "s")
    os.utime("a.jsonl", (1, 1))
    assert append("a.jsonl").already_done
    other = tmp_path / "d" / "a.jsonl"
    other.parent.mkdir()
    Path("a.jsonl").rename(other)
    assert append(other).already_done
    Path("s/report.json").unlink()
    assert append(other).already_done
    # Of two sources of one name and size in two generations both are known.
    first = other.read_bytes()
    write(other, range(110, 130))
    assert append(other).counts.documents == 10
    for path in Path("s").glob("report*"):
        path.unlink()
    assert append(other).already_done
    other.write_bytes(first)
    assert append(other).already_done
    assert [source.name for source in read_manifest(Path("s")).sources] == ["a.jsonl", "a.jsonl"]
    assert check("s").sound


def test_inputs_are_known_by_their_contents_alone_where_that_is_asked_for(monkeypatch):
    write("a.jsonl", range(100, 120))
    write("b.jsonl", range(200, 220))
    make(["a.jsonl", "b.jsonl"], "s")
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
    # Under another name, and at another time, it is the same file in its place.
    Path("d").mkdir()
    monkeypatch.chdir("d")
    os.utime("../b.jsonl", (1, 1))
    assert append("../b.jsonl", "../s", hash_inputs=True).already_done
    assert check("../s").sound


def test_a_file_that_grew_is_looked_at_as_a_whole():
    write("a.jsonl", range(20))
    make("a.jsonl", "s")
    write("a.jsonl", range(25))
    result = append("a.jsonl")
    assert any("a.jsonl changed since it was read for s" in note for note in result.notes)
    assert (result.counts.documents, result.counts.dropped) == (5, {"exact duplicate": 20})


@pytest.mark.parametrize(("dedup", "documents"), [("none", 4), ("exact", 2), ("lines", 2), ("near", 2)])
def test_duplicates_of_what_is_there_go_as_the_recipe_says(dedup, documents):
    jsonl("a.jsonl", [{"text": "menu\nfirst"}, {"text": "menu\nsecond"}])
    jsonl("b.jsonl", [{"text": t} for t in ("menu\nfirst", "third\nline", "fourth", "fourth")])
    make("a.jsonl", "s", dedup="exact", val_fraction=0)
    result = append("b.jsonl", dedup=dedup, val_fraction=0)
    assert result.counts.documents == documents
    # Lines are compared with those of the same job alone.
    left = [bytes(one[:-1]).decode() for one in ids("s")["train"]]
    assert left[:2] == ["menu\nfirst", "menu\nsecond"]


def test_a_run_goes_on_with_its_generation_exactly(tmp_path, capsys):
    jsonl("a.jsonl", [{"text": f"document number {n} " * 6} for n in range(200)])
    write("b.jsonl", range(500, 600))
    make("a.jsonl", "s", val_fraction=0.05)
    Path("small.json").write_text(json.dumps({**PLAIN, "steps": 6}))
    words = ["--data", "s", "--config-file", "small.json", "--device", "cpu"]
    assert run_command_line(["train", *words, "--out", "whole"]) == 0
    assert run_command_line(["train", *words, "--out", "halves", "--stop-at", "3"]) == 0
    append("b.jsonl", val_fraction=0.05)
    capsys.readouterr()
    assert run_command_line(["train", "--data", "s", "--out", "halves", "--resume", "--device", "cpu"]) == 0
    assert "started on generation 1 of s and continues with it" in capsys.readouterr().out
    assert steps_of(tmp_path / "halves") == steps_of(tmp_path / "whole")


def test_a_subset_that_was_empty_is_filled_and_settled_ones_stay():
    jsonl("a.jsonl", [{"text": "alone"}])
    jsonl("b.jsonl", [{"text": "alone"}, {"text": "two"}, {"text": "three"}])
    make("a.jsonl", "s", dedup="none")
    assert list(ids("s")) == ["train"]
    append("b.jsonl", dedup="none")
    both = ids("s")
    assert {name: len(some) for name, some in both.items()} == {"train": 3, "val": 1}
    # Equal documents are on one side, also where the hash was the smallest of the new ones.
    assert not [one for one in both["val"] if one in both["train"]]
    assert check("s").sound


def test_what_was_moved_to_a_subset_once_goes_there_ever_after():
    jsonl("a.jsonl", [{"text": "one"}, {"text": "two"}])
    make("a.jsonl", "s", dedup="none")
    moved = ids("s")["val"]
    assert len(moved) == 1
    jsonl("b.jsonl", [{"text": t} for t in ("one", "two", "one", "two", "three")])
    append("b.jsonl", dedup="none", limits=SMALL)
    assert ids("s")["val"] == moved * 3
    assert check("s").sound


PAIRS = [{"prompt": f"q{n}", "chosen": f"good {n}", "rejected": f"bad {n}"} for n in range(40)]
LABELS = [{"prompt": f"q{n}", "completion": f"answer {n}", "label": n % 2 == 0} for n in range(40)]
CHATS = [
    {"messages": [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": f"a{n}"}]} for n in range(40)
]


@pytest.mark.parametrize("records", [PAIRS, LABELS, CHATS], ids=["pairs", "labels", "chats"])
def test_conversations_and_preferences(records):
    jsonl("a.jsonl", records[:30])
    jsonl("b.jsonl", records[20:])
    make("a.jsonl", "s", val_fraction=0.1)
    before = ids("s")
    result = append("b.jsonl", val_fraction=0.1)
    per_record = 2 if records is PAIRS else 1
    assert result.counts.documents == 10 * per_record
    assert result.counts.dropped == {"exact duplicate": 10 * per_record}
    assert ids("s", 1) == before
    store = open_store("s")
    assert store.masked
    assert check("s").sound, check("s").faults
    jsonl("c.jsonl", [{"text": "plain"}])
    if records is not CHATS:
        with pytest.raises(InputError, match="c.jsonl holds documents that are not preferences, and s (pref|lab)"):
            append("c.jsonl", val_fraction=0.1)
        assert not Path("s/.work").exists()


def test_another_label_of_an_answer_that_is_there_is_no_duplicate():
    jsonl("a.jsonl", LABELS[:2])
    jsonl("b.jsonl", [one | {"label": not one["label"]} for one in LABELS[:2]] + LABELS[:2])
    make("a.jsonl", "s", val_fraction=0)
    assert append("b.jsonl", val_fraction=0).counts.documents == 2
    store = open_store("s")
    assert [side for n in range(len(store.shards)) for side in store.shards.sides(n).sides.tolist()] == [
        *(GOOD, BAD, BAD, GOOD)
    ]


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (
            {"val_fraction": 0.5},
            "was prepared with val_fraction 0.01, but 0.5 is requested",
        ),
        ({"dtype": "int32"}, "s has dtype uint16, but dtype int32 is requested"),
        ({"tokenizer": "gpt2"}, "s has tokenizer bytes, but gpt2 is requested"),
        ({"tokenizer": "train:300"}, "s has tokenizer bytes, but train:300 is requested"),
    ],
)
def test_what_does_not_fit_the_store_is_refused_at_once(setting, said):
    write("a.jsonl", range(20))
    write("b.jsonl", range(20, 30))
    make("a.jsonl", "s")
    before = tree("s")
    with pytest.raises(StoreConflictError, match=said):
        batchloom.prepare("b.jsonl", out="s", append=True, **setting)
    assert tree("s") == before
    with pytest.raises(SettingsError, match="only a store of this machine is appended to"):
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
    # The store's tokenizer is not learned again, so a job that ends before a unit is done keeps nothing.
    with pytest.raises(InputError, match="bad"):
        batchloom.prepare("bad.jsonl", out="s", append=True)
    assert not Path("s/.work").exists()
    batchloom.prepare("b.jsonl", out="s", append=True)
    assert Path("s/tokenizer_state.json").read_bytes() == state
    assert open_store("s")[50].text.startswith("others, quite unlike them 0")


def test_what_is_said_of_an_input_alone_is_said_of_it_again_and_of_no_other():
    Path("d").mkdir()
    jsonl("d/a.jsonl", [{"body": f"a{n}"} for n in range(9)])
    jsonl("b.jsonl", [{"content": f"b{n}"} for n in range(9)])
    Path("m.yaml").write_text(
        "datasets:\n  - path: d\n    mapping: {text: body}\n    name: dee\n  - path: b.jsonl\n    mapping: {text: content}\n"
    )
    batchloom.prepare("m.yaml", out="s", tokenizer="bytes", val_fraction=0)
    jsonl("c.jsonl", [{"text": f"c{n}"} for n in range(9)])
    batchloom.prepare("c.jsonl", out="s", append=True)
    jsonl("d/e.jsonl", [{"body": f"e{n}", "text": "not this"} for n in range(9)])
    batchloom.prepare("m.yaml", out="s", append=True)
    jsonl("d/f.jsonl", [{"body": f"f{n}", "text": "not this"} for n in range(9)])
    batchloom.prepare("d", out="s", append=True)
    assert texts_of("s") == sorted(f"{x}{n}" for x in "abcef" for n in range(9))
    assert [one.dataset for one in read_manifest(Path("s")).sources] == [
        "dee",
        "",
        "",
        "dee",
        "dee",
    ]


def test_after_removal_and_after_compaction():
    for name, numbers in (("a", range(20)), ("b", range(20, 40)), ("c", range(10, 50))):
        write(f"{name}.jsonl", numbers)
    make(["a.jsonl", "b.jsonl"], "s", val_fraction=0.1)
    remove_documents("s", sources=["a.jsonl"])
    # What was removed is not there; another source that has it brings it back.
    assert append("c.jsonl", val_fraction=0.1).counts.documents == 20
    assert append("a.jsonl", val_fraction=0.1).already_done
    assert check("s").sound, check("s").faults
    compact_store("s")
    write("d.jsonl", range(60))
    result = append(["a.jsonl", "d.jsonl"], val_fraction=0.1)
    assert (result.counts.documents, result.generation) == (20, 5)
    assert texts_of("s") == sorted(f"document number {n}" for n in range(60))
    assert check("s").sound, check("s").faults
    assert [one.made for one in read_log(Path("s"))] == [*("prepared", "removed", "appended", "compacted", "appended")]


def test_the_commands_read_what_was_appended(capsys):
    write("a.jsonl", range(40))
    write("b.jsonl", range(40, 60))
    with Path("b.jsonl").open("a") as file:
        file.write("broken\n")
    make("a.jsonl", "s")
    append("b.jsonl")
    assert {"report.00002.json", "report.00002.html", "quarantine.00002.jsonl"} <= {
        path.name for path in Path("s").iterdir()
    }
    report = json.loads(Path("s/report.00002.json").read_text())
    assert [one["name"] for one in report["sources"]] == ["b.jsonl"]
    for words in (
        ["check", "s"],
        ["log", "s"],
        ["inspect", "s"],
        ["doctor", "s"],
        ["export", "s", "--to", "flat", "--out", "flat"],
    ):
        assert run_command_line(words) == 0, words
    assert "59 documents of subset train" in capsys.readouterr().out


def test_a_dry_run_writes_nothing_and_the_next_goes_on():
    write("a.jsonl", range(40))
    write("b.jsonl", range(30, 60))
    make("a.jsonl", "s")
    before = tree("s")
    result = append("b.jsonl", dry_run=True)
    assert result.counts.documents == 20
    work = {name for name in tree("s") if name.startswith(".work/")}
    assert {name: data for name, data in tree("s").items() if name not in work} == before
    # What is unfinished is in nobody's way, and only who appends it may go on.
    assert check("s").sound
    assert len(open_store("s")) + len(open_store("s", "val")) == 40
    assert make("a.jsonl", "s").already_done
    assert append("a.jsonl").already_done
    result = append("b.jsonl")
    assert (result.resumed_units, result.counts.documents, result.generation) == (1, 20, 2)


def test_a_pool_appends_the_same_bytes():
    write("a.jsonl", range(300))
    write("b.jsonl", range(250, 700))
    for out in ("one", "pool"):
        make("a.jsonl", out, dedup="near", unit_bytes=3000)
    append("b.jsonl", "one", dedup="near", unit_bytes=3000)
    append("b.jsonl", "pool", dedup="near", unit_bytes=3000, execution=ExecutionSettings(workers=2))
    assert tree("pool") == tree("one")


FEW = {"limits": SMALL, "unit_bytes": 3000, "val_fraction": 0.2, "tokens_per_shard": 3000}


@pytest.fixture
def two():
    """A store of one generation, one of two, and the input that makes the second."""
    write("a.jsonl", range(100))
    write("b.jsonl", range(60, 220), "document number {}")
    with Path("b.jsonl").open("a") as file:
        file.write("broken\n")
    make("a.jsonl", "first", dedup="near", **FEW)
    shutil.copytree("first", "whole")
    append("b.jsonl", "whole", dedup="near", **FEW)
    return tree("whole")


def kill(count, events=RENAMES):
    """Append in a process that is killed at the count-th of these events; whether it was."""
    import preparation.test_resume as module

    real, module.make = module.make, append
    try:
        return run_killed(events, count, "b.jsonl", "s", dedup="near", **FEW)
    finally:
        module.make = real


# A shard is three renames, and no stride is a multiple of three: each of them has its turn.
@pytest.mark.parametrize("stride", [13, pytest.param(2, marks=pytest.mark.slow)])
def test_killed_at_any_rename_the_store_is_the_old_one_or_the_new_one(two, stride):
    expected = {n: ids("whole", n) for n in (1, 2)}
    count, killed = 4 - stride, True
    while killed:
        count += stride
        shutil.copytree("first", "s")
        killed = kill(count)
        number = read_manifest(Path("s")).generation
        assert ids("s") == expected[number]
        append("b.jsonl", "s", dedup="near", **FEW)
        assert tree("s") == two
        assert not Path("s/.work").exists()
        shutil.rmtree("s")
    assert count > 40


def test_killed_behind_the_new_manifest_other_inputs_follow(two, monkeypatch):
    """What a finished job left behind is no unfinished one."""
    shutil.copytree("first", "s")
    from batchloom.preparation import WorkFolder

    with monkeypatch.context() as patch:
        patch.setattr(WorkFolder, "remove", lambda self: (_ for _ in ()).throw(InterruptedError))
        with pytest.raises(InterruptedError):
            append("b.jsonl", "s", dedup="near", **FEW)
    assert read_manifest(Path("s")).generation == 2
    assert Path("s/.work/job.json").exists()
    write("c.jsonl", range(500, 510), "quite another text of number {}")
    assert append(["b.jsonl", "c.jsonl"], "s", dedup="near", **FEW).generation == 3
    assert check("s").sound


def test_changed_inputs_and_a_second_run_are_told(two):
    shutil.copytree("first", "s")
    assert kill(30)
    write("c.jsonl", range(500, 510))
    with pytest.raises(StoreConflictError, match=r"inputs: c.jsonl is new.*give --restart"):
        append(["b.jsonl", "c.jsonl"], "s", dedup="near", **FEW)
    with pytest.raises(StoreConflictError, match="holds an unfinished job"):
        remove_documents("s", sources=["a.jsonl"])

    def again(event):
        if isinstance(event, Progress):
            with pytest.raises(StoreConflictError, match="Another run is preparing into s"):
                append("b.jsonl", "s", dedup="near", **FEW)

    append("b.jsonl", "s", dedup="near", listener=again, **FEW)
    assert tree("s") == two


def test_the_command_that_made_a_store_says_so_when_it_has_grown():
    write("a.jsonl", range(20))
    write("b.jsonl", range(20, 30))
    make("a.jsonl", "s")
    append("b.jsonl", dedup="none")
    assert make("a.jsonl", "s").already_done
    assert make("b.jsonl", "s", dedup="none").already_done
    with pytest.raises(StoreConflictError, match="tokens_per_shard.*to add new inputs to it, give --append"):
        make("a.jsonl", "s", tokens_per_shard=7)


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
    steps = [word.strip(" .,") for word in str(error.value).split("with ")[1].replace("then", "and").split("and ")]
    assert steps == [
        "--recipe s/generations/00001.json",
        "--append --recipe s/generations/00002.json",
        "--append --recipe s",
    ]
    for step in steps:
        assert run_command_line(["prepare", *step.split(), "--out", "again"]) == 0
    assert "again is identical to s, byte for byte." in capsys.readouterr().err
    assert tree("again") == tree("s")
    # With inputs in place of its own, or as a value, it is a recipe like any other.
    assert batchloom.prepare("b.jsonl", recipe="s", out="other").counts.documents == 15
    assert read_recipe("s").inputs == (str(tmp_path / "c.jsonl"),)
    compact_store("s")
    with pytest.raises(InputError, match="compaction removed the others. Give the inputs of all jobs as arguments"):
        batchloom.prepare(recipe="s", out="again2")
    # What is appended by no recipe of its own is read by the newest.
    assert texts_of("s").count("document number 16") == 3


def alike(number, changed=""):
    """A long text; with another word at its end it is like itself and nothing else."""
    return {"text": "".join(random.Random(number).choices(ascii_letters, k=600)) + changed}


def near(inputs, out="s", **settings):
    return append(inputs, out, dedup=settings.pop("dedup", "near"), val_fraction=0.1, **settings)


def test_near_duplicates_of_older_generations_go_by_the_signatures_that_are_kept():
    jsonl("a.jsonl", [alike(n) for n in range(20)])
    jsonl("b.jsonl", [alike(n, "changed") for n in range(15, 30)] + [alike(29, "again")])
    jsonl("c.jsonl", [alike(n, "anew") for n in range(10, 40)])
    make("a.jsonl", "s", dedup="near", val_fraction=0.1, limits=SMALL, unit_bytes=4000)
    manifest = read_manifest(Path("s"))
    shards = [f"{name}/{one.name}.bands" for name, two in manifest.subsets.items() for one in two.shards]
    assert len(shards) > 2
    assert {name for name in tree("s") if name.endswith(".bands")} == set(shards)
    assert near("b.jsonl").counts.dropped == {"near duplicate": 6}
    result = near("c.jsonl")
    assert (result.counts.documents, result.notes) == (10, ())
    assert check("s").sound, check("s").faults
    assert check("s", generation=2).sound
    # What was removed has no copies, and shards that are written anew keep what they know.
    remove_documents("s", sources=["c.jsonl"])
    assert near(jsonl("d.jsonl", [alike(35, "one"), alike(5, "two")])).counts.documents == 1
    compact_store("s")
    assert check("s").sound, check("s").faults
    assert near(jsonl("e.jsonl", [alike(n, "three") for n in (1, 20, 35, 36)])).counts.documents == 1
    assert check("s").sound, check("s").faults


def test_where_the_store_keeps_none_new_ones_are_compared_among_themselves():
    jsonl("a.jsonl", [alike(n) for n in range(20)])
    jsonl("b.jsonl", [alike(n, "b") for n in range(10, 25)] + [alike(24, "c")])
    for out, dedup in (
        ("exact", "exact"),
        ("other", {"mode": "near", "bands": 10, "rows": 8}),
        ("bare", {"mode": "near", "keep_signatures": False}),
    ):
        make("a.jsonl", out, dedup=dedup, val_fraction=0.1)
        assert any(name.endswith(".bands") for name in tree(out)) == (out == "other")
        result = near("b.jsonl", out)
        assert result.counts.dropped == {"near duplicate": 1}
        assert any("holds signatures of this kind for 0 of its 2 shards" in note for note in result.notes)
        # Now it keeps some.
        result = near(jsonl("c.jsonl", [alike(3, "d"), alike(24, "d")]), out)
        assert result.counts.dropped == {"near duplicate": 1}
        assert check(out).sound, check(out).faults


@pytest.mark.parametrize("dropped", [False, True])
def test_bands_stand_beside_their_documents_however_a_shard_is_written(dropped):
    """Linked as it is, or copied without what was left out, into shards of any size."""
    records = [alike(n) for n in range(40)] + ([alike(3), alike(7, "x")] if dropped else [])
    jsonl("a.jsonl", records)
    make("a.jsonl", "whole", dedup="near", val_fraction=0.1)
    make("a.jsonl", "cut", dedup="near", val_fraction=0.1, tokens_per_shard=2000)
    found = {}
    for out in ("whole", "cut"):
        for name, subset in read_manifest(Path(out)).subsets.items():
            for shard in subset.shards:
                bands = map_signature_file(Path(out, name, f"{shard.name}.bands"), shard.documents)
                origins = map_provenance(Path(out, name, f"{shard.name}.docs"))
                pairs = zip(map(tuple, origins.hashes.tolist()), bands.keys.tolist(), strict=True)
                found.setdefault(out, {}).update(pairs)
    assert found["whole"] == found["cut"]
    assert len(found["cut"]) == 40


def test_bands_that_are_damaged_are_found():
    jsonl("a.jsonl", [alike(n) for n in range(4)])
    make("a.jsonl", "s", dedup="near", val_fraction=0)
    path = Path("s/train/shard_00000.bands")
    data = path.read_bytes()
    assert data[:24] == b"BLMBAND\x00" + np.array([1, 4], "<u8").tobytes()
    assert np.frombuffer(data, "<u2", 4, 24).tolist() == [5, 8, 14, 1]
    assert len(data) == 32 + 4 * 14 * 8
    for harm, said in (
        (data[:-1] + bytes([data[-1] ^ 1]), "checksum differs"),
        (data[:-8], "declares 4 documents with 14 bands in 472 bytes"),
        (b"X" + data[1:], "is not a .bands file of version 1"),
        (None, "missing|No such file"),
    ):
        path.unlink()
        if harm is not None:
            path.write_bytes(harm)
        assert re.search(said, " ".join(check("s").faults)), check("s").faults
        path.write_bytes(data)
    assert check("s").sound
    make("a.jsonl", "t", val_fraction=0)
    shutil.copy(path, "t/train/shard_00000.bands")
    assert "the manifest lists no MinHash signatures of this shard" in " ".join(check("t").faults)
