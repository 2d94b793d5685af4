"""Interrupted jobs keep finished units, redo the others and give the same bytes."""

import importlib.metadata
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from batchloom import InputError, OutputError, Recipe
from batchloom.core.errors import StoreConflictError
from batchloom.preparation import Note, Progress, compute_recipe_fingerprint, read_report
from preparation.jobs import run_until_killed
from preparation.stores import SMALL_LIMITS, hash_store_files, prepare_store, read_texts, write_jsonl

RENAMES = {"os.rename", "os.link", "os.remove", "os.rmdir"}


@pytest.fixture
def inputs(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"text": f"document number {i} " * (i % 5)} for i in range(60)])
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write("broken\n")
    (tmp_path / "b.txt").write_text("A paragraph.\n\n" * 200)
    return [tmp_path / "a.jsonl", tmp_path / "b.txt"]


SETTINGS = {"limits": SMALL_LIMITS, "unit_bytes": 1200, "val_fraction": 0.2, "tokens_per_shard": 700}


def prepare_until_killed(events, count, inputs, out, **settings):
    """Prepare in a fork killed at the count-th audit event; return whether it was."""
    return run_until_killed(events, count, lambda: prepare_store(inputs, out, **settings))


# Writing a shard takes three renames. No stride is a multiple of three, so each of them is reached.
@pytest.mark.parametrize("stride", [17, pytest.param(2, marks=pytest.mark.slow)])
def test_killed_at_any_rename_the_result_is_the_same(tmp_path, inputs, stride):
    settings = SETTINGS | {"unit_bytes": 3500, "tokens_per_shard": 3000}
    prepare_store(inputs, tmp_path / "whole", **settings)
    expected = hash_store_files(tmp_path / "whole")
    count, killed = 1 - stride, True
    while killed:
        count += stride
        out = tmp_path / f"out{count}"
        killed = prepare_until_killed(RENAMES, count, inputs, out, **settings)
        if killed:
            # Output of a killed run is never taken for a store.
            assert not (out / "dataset_metadata.json").exists() or hash_store_files(out).items() >= expected.items()
            prepare_store(inputs, out, **settings)
        assert hash_store_files(out) == expected
        assert not (out / ".work").exists()
        shutil.rmtree(out)
    assert count > 40


@pytest.mark.slow
def test_killed_again_and_again_it_gets_there(tmp_path, inputs):
    prepare_store(inputs, tmp_path / "whole", **SETTINGS)
    out, runs = tmp_path / "out", 0
    while prepare_until_killed({"open"}, 130, inputs, out, **SETTINGS):
        runs += 1
        assert runs < 50
    assert runs > 2
    assert hash_store_files(out) == hash_store_files(tmp_path / "whole")


def test_a_listener_that_raises_stops_the_job_and_it_goes_on_later(tmp_path, inputs):
    prepare_store(inputs, tmp_path / "whole", **SETTINGS)
    for phase in ("tokenize", "write"):
        out = tmp_path / phase
        stopped_events = []

        def stop(event, phase=phase, stopped_events=stopped_events):
            stopped_events.append(event)
            if isinstance(event, Progress) and event.phase == phase and event.documents > 50:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            prepare_store(inputs, out, listener=stop, **SETTINGS)
        events = []
        result = prepare_store(inputs, out, listener=events.append, **SETTINGS)
        assert result.resumed_units > 0
        notes = [event.text for event in events if isinstance(event, Note)]
        assert notes[0] == f"Resuming: {result.resumed_units} of 6 units were finished by an earlier run."
        last = [event for event in events if isinstance(event, Progress)][-1]
        assert last.bytes_done == last.bytes_total
        assert hash_store_files(out) == hash_store_files(tmp_path / "whole")


def test_missing_units_are_prepared_again_in_any_order(tmp_path, inputs):
    prepare_store(inputs, tmp_path / "whole", **SETTINGS)

    def stop(event):
        if isinstance(event, Progress) and event.phase == "write":
            raise KeyboardInterrupt

    for number in range(5):
        out = tmp_path / f"out{number}"
        with pytest.raises(KeyboardInterrupt):
            prepare_store(inputs, out, listener=stop, **SETTINGS)
        (out / ".work" / "decision.json").unlink()
        shutil.rmtree(out / ".work" / "shards")
        units = sorted((out / ".work" / "units").iterdir())
        for index, unit in enumerate(units):
            if index == number or not (unit / "documents.rows").exists():
                shutil.rmtree(unit)
        prepare_store(inputs, out, **SETTINGS)
        assert hash_store_files(out) == hash_store_files(tmp_path / "whole")


def test_the_report_content_does_not_depend_on_interruptions(tmp_path):
    rows = [{"text": f"document number {n} of all"} for n in range(60)]
    first = write_jsonl(tmp_path / "a.jsonl", rows[20:])
    second = write_jsonl(tmp_path / "b.jsonl", rows[:40])
    settings = {"limits": SMALL_LIMITS, "unit_bytes": 900, "tokens_per_shard": 700}

    def read_content(out):
        return msgspec.structs.replace(read_report(out).content, stages={})

    prepare_store([first, second], tmp_path / "whole", **settings)
    expected = read_content(tmp_path / "whole")
    (pair,) = expected.duplicates
    assert (pair.dropped_from, pair.kept_in) == ("b.jsonl", "a.jsonl")
    assert pair.examples[0].words.startswith("document number 20 of all")
    for stop_count in range(1, 5):
        write_events = []

        def stop(event, write_events=write_events, stop_count=stop_count):
            write_events.extend([event] * (isinstance(event, Progress) and event.phase == "write"))
            if len(write_events) == stop_count:
                raise KeyboardInterrupt

        out = tmp_path / f"out{stop_count}"
        with pytest.raises(KeyboardInterrupt):
            prepare_store([first, second], out, listener=stop, **settings)
        prepare_store([first, second], out, **settings)
        assert read_content(out) == expected


def test_pairs_of_other_units_are_never_taken(tmp_path, monkeypatch):
    rows = [{"text": f"document number {n}"} for n in range(20)]
    path = write_jsonl(tmp_path / "a.jsonl", [*rows, *rows])
    settings = {"limits": SMALL_LIMITS, "unit_bytes": 300, "clean": ["mojibake"]}

    def stop(event):
        if isinstance(event, Progress) and event.phase == "write":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_store(path, tmp_path / "out", listener=stop, **settings)
    (pairs_file,) = (tmp_path / "out/.work/duplicates/pairs").iterdir()
    pairs_bytes = pairs_file.read_bytes()
    assert b"document number 3" in pairs_bytes
    # Content that another version of the package would have found.
    pairs_file.write_bytes(pairs_bytes.replace(b"document number 3", b"document number X"))
    get_version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "99" if name == "ftfy" else get_version(name))
    prepare_store(path, tmp_path / "out", **settings)
    examples = read_report(tmp_path / "out").content.duplicates[0].examples
    assert [example.words[:17] for example in examples] == [f"document number {n}" for n in range(5)]


def test_the_same_again_says_so_at_once(tmp_path, inputs):
    prepare_store(inputs, tmp_path / "out", **SETTINGS)
    before = hash_store_files(tmp_path / "out")
    events = []
    assert prepare_store(inputs, tmp_path / "out", listener=events.append, **SETTINGS).already_done
    assert not [event for event in events if isinstance(event, Progress)]
    assert hash_store_files(tmp_path / "out") == before
    # Files with the same names that were only touched count as unchanged.
    for path in inputs:
        path.touch()
    assert prepare_store(inputs, tmp_path / "out", **SETTINGS).already_done
    (tmp_path / "out" / "report.json").unlink()
    assert prepare_store(inputs, tmp_path / "out", max_bad=50, **SETTINGS).already_done


def test_relative_and_absolute_names_of_the_same_files_are_the_same_job(tmp_path, inputs, monkeypatch):
    prepare_store(inputs, tmp_path / "out", **SETTINGS)
    monkeypatch.chdir(tmp_path)
    assert prepare_store(["./a.jsonl", "b.txt"], "out", **SETTINGS).already_done


@pytest.mark.parametrize("finished", [True, False])
def test_another_job_is_refused_with_its_differences(tmp_path, inputs, finished):
    out = tmp_path / "out"

    def stop(event):
        if isinstance(event, Progress) and event.phase == "write":
            raise KeyboardInterrupt

    if finished:
        prepare_store(inputs, out, **SETTINGS)
    else:
        with pytest.raises(KeyboardInterrupt):
            prepare_store(inputs, out, listener=stop, **SETTINGS)
    remedy = "choose another --out, or delete" if finished else "give --restart to start over"
    other_settings = SETTINGS | {"tokens_per_shard": 800}
    with pytest.raises(StoreConflictError, match=rf"tokens_per_shard: 700 -> 800.*{remedy}"):
        prepare_store(inputs, out, **other_settings)
    with pytest.raises(StoreConflictError, match="inputs: b.txt is missing"):
        prepare_store(inputs[:1], out, **SETTINGS)
    with pytest.raises(StoreConflictError, match="their order differs"):
        prepare_store(inputs[::-1], out, **SETTINGS)
    text = inputs[1].read_text()
    inputs[1].write_text(text.replace("A", "B"))
    with pytest.raises(StoreConflictError, match="inputs: b.txt (has other content|was rewritten)"):
        prepare_store(inputs, out, **SETTINGS)
    inputs[1].write_text(text + "more")
    with pytest.raises(StoreConflictError, match="inputs: b.txt has 2,804 bytes, had 2,800"):
        prepare_store(inputs, out, **SETTINGS)
    if not finished:
        shutil.rmtree(out / ".work")
        prepare_store(inputs, out, **SETTINGS)


def test_a_tokenizer_file_that_changed_is_another_job(tmp_path, inputs):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "t.py").write_text(Path(__file__).read_text()[:5000])
    for size in (300, 310):
        prepare_store(tmp_path / "text", tmp_path / f"s{size}", tokenizer=f"train:{size}")
    folder = tmp_path / "tok"
    shutil.copytree(tmp_path / "s300", folder)
    settings = SETTINGS | {"tokenizer": str(folder)}
    prepare_store(inputs, tmp_path / "out", **settings)
    assert prepare_store(inputs, tmp_path / "out", **settings).already_done
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "s310", folder)
    with pytest.raises(StoreConflictError, match="tokenizer: .* has changed"):
        prepare_store(inputs, tmp_path / "out", **settings)


def test_a_learned_tokenizer_is_kept_over_a_stop(tmp_path, inputs):
    settings = SETTINGS | {"tokenizer": "train:300"}
    prepare_store(inputs, tmp_path / "whole", **settings)

    def stop(event):
        if isinstance(event, Progress) and event.phase == "write":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_store(inputs, tmp_path / "out", listener=stop, **settings)
    events = []
    prepare_store(inputs, tmp_path / "out", listener=events.append, **settings)
    assert not [event for event in events if isinstance(event, Progress) and event.phase == "sample"]
    assert hash_store_files(tmp_path / "out") == hash_store_files(tmp_path / "whole")


@pytest.mark.slow
def test_a_learned_tokenizer_is_kept_when_it_is_all_there_is(tmp_path, inputs):
    """A run killed before its first finished unit leaves only the tokenizer."""
    settings = SETTINGS | {"tokenizer": "train:300"}
    prepare_store(inputs, tmp_path / "whole", **settings)
    killed = 0
    for count in range(1, 30):
        out = tmp_path / f"out{count}"
        assert prepare_until_killed({"os.rename"}, count, inputs, out, **settings)
        if any((out / ".work").glob("units/*/unit.json")):
            break
        if not (out / ".work" / "tokenizer_state.json").exists():
            continue
        killed += 1
        events = []
        if killed == 1:
            # Another job starts over without --restart, because only a tokenizer exists.
            shutil.copytree(out, tmp_path / "other")
            prepare_store(inputs, tmp_path / "other", listener=events.append, **SETTINGS)
            assert {event.phase for event in events if isinstance(event, Progress)} == {"tokenize", "write"}
            events.clear()
        prepare_store(inputs, out, listener=events.append, **settings)
        phases = [event.phase for event in events if isinstance(event, Progress)]
        assert "sample" not in phases
        assert hash_store_files(out) == hash_store_files(tmp_path / "whole")
    assert killed


def test_a_learned_tokenizer_is_kept_over_an_interrupt(tmp_path, inputs):
    settings = SETTINGS | {"tokenizer": "train:300"}

    def stop(event):
        if isinstance(event, Progress) and event.phase == "tokenize":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_store(inputs, tmp_path / "out", listener=stop, **settings)
    shutil.rmtree(tmp_path / "out" / ".work" / "units")
    events = []
    prepare_store(inputs, tmp_path / "out", listener=events.append, **settings)
    assert "sample" not in [event.phase for event in events if isinstance(event, Progress)]
    with pytest.raises(KeyboardInterrupt):
        prepare_store(inputs, tmp_path / "damaged", listener=stop, **settings)
    (tmp_path / "damaged" / ".work" / "job.json").write_text("{")
    with pytest.raises(StoreConflictError, match=r"job\.json cannot be read"):
        prepare_store(inputs, tmp_path / "damaged", **settings)


def test_an_evaluation_set_that_changes_is_noticed(tmp_path, inputs):
    words = [f"word{n:02}" for n in range(40)]
    path = tmp_path / "quiz.txt"

    def write(quiz_words):
        """Write words as a file of constant size and time."""
        path.write_text(" ".join(quiz_words) + "\n")
        os.utime(path, (1e9, 1e9))

    write_jsonl(inputs[0], [{"text": f"{n} {' '.join(words[n : n + 14])}"} for n in range(26)])
    clean = [{"decontaminate": {"sets": {"quiz": str(path)}}}]
    settings = SETTINGS | {"clean": clean}
    write(words[:20])
    prepare_store(inputs, tmp_path / "out", **settings)
    assert prepare_store(inputs, tmp_path / "out", **settings).already_done
    write(words[20:])
    with pytest.raises(StoreConflictError, match="clean_files"):
        prepare_store(inputs, tmp_path / "out", **settings)

    def change(event):
        if isinstance(event, Progress) and event.phase == "write":
            write(words[:20])

    with pytest.raises(InputError, match=r"quiz\.txt\) was changed while it was used"):
        prepare_store(inputs, tmp_path / "late", listener=change, **settings)
    with pytest.raises(StoreConflictError, match="clean_files"):
        prepare_store(inputs, tmp_path / "late", **settings)
    write(words[20:])
    prepare_store(inputs, tmp_path / "late", **settings)
    write(words[20:])
    prepare_store(inputs, tmp_path / "again", **settings)
    assert hash_store_files(tmp_path / "late") == hash_store_files(tmp_path / "again")
    write(["short"])
    with pytest.raises(InputError, match="holds no text of 8 words"):
        prepare_store(inputs, tmp_path / "useless", **settings)
    assert not (tmp_path / "useless").exists()


def test_two_runs_on_one_folder(tmp_path, inputs):
    refused = []

    def run_again(event):
        if not refused:
            with pytest.raises(
                StoreConflictError,
                match=rf"Another run is preparing into .* \(process {os.getpid()}\)",
            ) as caught:
                prepare_store(inputs, tmp_path / "out", **SETTINGS)
            refused.append(caught)

    prepare_store(inputs, tmp_path / "out", listener=run_again, **SETTINGS)
    assert refused
    assert read_texts(tmp_path / "out")


def test_a_failed_job_leaves_nothing_behind(tmp_path, inputs):
    def stop(event):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_store(inputs[1], tmp_path / "out", listener=stop)
    assert not (tmp_path / "out").exists()
    (tmp_path / "mine").mkdir()
    with pytest.raises(KeyboardInterrupt):
        prepare_store(inputs[1], tmp_path / "mine", listener=stop)
    assert (tmp_path / "mine").exists()
    assert not list((tmp_path / "mine").iterdir())


@pytest.mark.parametrize("limit", [500, 2500])
def test_a_full_disk_gives_one_sentence_and_the_job_resumes(tmp_path, inputs, limit):
    """RLIMIT_FSIZE makes writes of a separate process fail as a full disk does."""
    prepare_store(inputs, tmp_path / "whole", **SETTINGS)
    out = tmp_path / "out"
    read_end, write_end = os.pipe()

    def prepare_on_full_disk():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        try:
            prepare_store(inputs, out, **SETTINGS)
        except OutputError as error:
            os.write(write_end, str(error).encode())

    assert not run_until_killed((), 1, prepare_on_full_disk)
    os.close(write_end)
    with open(read_end) as pipe:
        message = pipe.read()
    assert message.startswith("Cannot write ")
    assert "\n" not in message
    prepare_store(inputs, out, **SETTINGS)
    assert hash_store_files(out) == hash_store_files(tmp_path / "whole")


def test_an_output_that_cannot_be_written(tmp_path, inputs):
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match="a part of the path is a file|a file is in the way"):
        prepare_store(inputs, tmp_path / "file", **SETTINGS)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.doc").write_text("x")
    with pytest.raises(
        StoreConflictError,
        match=r"other is not empty \(thesis.doc\) and is not a store; choose another --out",
    ):
        prepare_store(inputs, tmp_path / "other", **SETTINGS)
    if os.geteuid():
        (tmp_path / "locked").mkdir(mode=0o500)
        with pytest.raises(OutputError, match="permission denied"):
            prepare_store(inputs, tmp_path / "locked" / "out", **SETTINGS)


def test_recipes_are_compared_by_what_they_do():
    first = Recipe(inputs=("a",), val_fraction=0, max_bad=3)
    second = Recipe(inputs=("/b/c",), val_fraction=0.0, max_bad="5%")
    assert compute_recipe_fingerprint(first) == compute_recipe_fingerprint(second)
    assert compute_recipe_fingerprint(first) != compute_recipe_fingerprint(Recipe(inputs=("a",)))


def make_unfinished_store(tmp_path, inputs):
    """Stop a job after its first phase and return its work folder."""

    def stop(event):
        if isinstance(event, Progress) and event.phase == "write":
            raise InterruptedError

    with pytest.raises(InterruptedError):
        prepare_store(inputs, tmp_path / "out", listener=stop, **SETTINGS)
    return tmp_path / "out" / ".work"


DAMAGES = [b"\xff\xfe", b"[" * 100_000, b"{", None]


def damage(path, data):
    """Replace a file by bytes, or by a pipe, which a reader would wait for."""
    path.unlink()
    if data is None:
        os.mkfifo(path)
    else:
        path.write_bytes(data)


@pytest.mark.parametrize(
    "name",
    [
        "job.json",
        "decision.json",
        "tokenizer_state.json",
        "units/*/unit.json",
        "duplicates/pairs/*",
    ],
)
def test_a_damaged_work_folder_is_reported_with_what_to_delete(tmp_path, inputs, name):
    work = make_unfinished_store(tmp_path, inputs)
    path = max(work.glob(name))
    for data in DAMAGES:
        damage(path, data)
        with pytest.raises(StoreConflictError) as error:
            prepare_store(inputs, tmp_path / "out", **SETTINGS)
        assert str(error.value).startswith(f"{path} cannot be read (")
        assert str(error.value).endswith(f"delete {work} to start over.")


@pytest.mark.parametrize("name", ["documents.rows", "tokens.train.bin", "bad.jsonl"])
def test_a_missing_temporary_file_is_reported_with_what_to_delete(tmp_path, inputs, name):
    work = make_unfinished_store(tmp_path, inputs)
    # A unit without documents is not read again, so choose the one with the most rows.
    rows = max(work.glob("units/*/documents.rows"), key=lambda path: path.stat().st_size)
    rows.with_name(name).unlink()
    with pytest.raises(StoreConflictError, match=f"{name} cannot be read .*; delete .*/.work to"):
        prepare_store(inputs, tmp_path / "out", **SETTINGS)


def test_a_damaged_report_is_as_good_as_none(tmp_path, inputs):
    prepare_store(inputs, tmp_path / "out", **SETTINGS)
    for data in DAMAGES:
        damage(tmp_path / "out" / "report.json", data)
        assert prepare_store(inputs, tmp_path / "out", **SETTINGS).already_done


@pytest.mark.slow
def test_the_report_contains_the_memory_of_this_process_alone(tmp_path, inputs):
    """Memory inherited from the parent process does not count."""
    script = (
        "import subprocess, sys\n"
        "large = bytearray(b'x') * (300 << 20)\n"
        "job = 'import batchloom, sys; batchloom.prepare(sys.argv[1], out=sys.argv[2], tokenizer=\"bytes\")'\n"
        "subprocess.run([sys.executable, '-c', job, *sys.argv[1:]], check=True)\n"
    )
    command = [sys.executable, "-c", script, str(inputs[1]), str(tmp_path / "out")]
    subprocess.run(command, check=True, timeout=300)
    report = json.loads((tmp_path / "out" / "report.json").read_bytes())
    assert 10 << 20 < report["peak_memory_bytes"] < 250 << 20


def test_other_read_settings_are_named_by_the_option_that_differs(tmp_path, inputs):
    prepare_store(inputs, tmp_path / "out")
    with pytest.raises(StoreConflictError, match=r"\(normalize: True -> False\)"):
        prepare_store(inputs, tmp_path / "out", normalize=False)


def test_work_of_another_version_is_refused_in_a_sentence(tmp_path, inputs):
    path = make_unfinished_store(tmp_path, inputs) / "job.json"
    job = json.loads(path.read_bytes())
    job["work_version"] -= 1
    del job["kinds"]
    path.write_text(json.dumps(job))
    with pytest.raises(StoreConflictError, match="another version of batchloom"):
        prepare_store(inputs, tmp_path / "out", **SETTINGS)


def test_other_versions_of_packages_make_everything_anew(tmp_path, inputs, monkeypatch):
    """Results after the units are not reused if other package versions made them."""
    settings = SETTINGS | {"clean": "mojibake"}
    prepare_store(inputs, tmp_path / "whole", **settings)

    def stop(event):
        if isinstance(event, Progress) and event.phase == "write" and event.documents > 50:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_store(inputs, tmp_path / "out", listener=stop, **settings)
    get_version = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata,
        "version",
        lambda name: "99" if name == "ftfy" else get_version(name),
    )
    events = []
    result = prepare_store(inputs, tmp_path / "out", listener=events.append, **settings)
    assert result.resumed_units == 0
    assert max(event.bytes_found for event in events if isinstance(event, Progress)) == 0
    assert any("Versions of packages that affect the documents changed" in note for note in result.notes)
    assert hash_store_files(tmp_path / "out") == hash_store_files(tmp_path / "whole")


def test_segment_keys_are_kept_before_a_unit_is_finished(tmp_path, inputs):
    settings = SETTINGS | {"dedup": "lines"}
    prepare_store(inputs, tmp_path / "whole", **settings)
    out = tmp_path / "out"
    assert prepare_until_killed({"os.rename"}, 18, inputs, out, **settings)

    def list_inodes(folder):
        return {path.stat().st_ino for path in (out / ".work" / folder).iterdir()}

    before, seen_inodes = list_inodes("pieces"), set()
    assert len(before) > 2
    assert not (out / ".work/units").exists()
    prepare_store(inputs, out, listener=lambda event: seen_inodes.update(list_inodes("pieces")), **settings)
    assert before <= seen_inodes
    assert hash_store_files(out) == hash_store_files(tmp_path / "whole")
