"""Records that kill workers are quarantined, and all others are prepared normally."""

import json
import random
import re

import pytest

from batchloom.store import read_manifest
from preparation.jobs import make_job, run_job
from preparation.stores import hash_store_files, read_texts

MARK = "DEADLY"
POOL = {"workers": 2}
UNIT_BYTES = 5_000
DOCUMENTS = 120
# Number of the first document of the second file.
FIRST_OF_B = 70


def write(folder, deadly):
    """Write two files with deadly records, and copies with invalid JSON instead."""
    rows = [{"text": f"document {n}\nline {n % 20}\nnumber {n % 7}{'x' * n}"} for n in range(DOCUMENTS)]
    for number in deadly:
        rows[number] = {"text": f"{MARK} {number}\nline 3\nline new"}
    for name in ("in", "broken"):
        (folder / name).mkdir()
        lines = [json.dumps(row) + "\n" for row in rows]
        for number in deadly if name == "broken" else ():
            lines[number] = "!" + lines[number][1:]
        (folder / name / "a.jsonl").write_text("".join(lines[:FIRST_OF_B]))
        (folder / name / "b.jsonl").write_text("".join(lines[FIRST_OF_B:]))
    return folder / "in", folder / "broken"


def hash_shards(out):
    return {name: hash_ for name, hash_ in hash_store_files(out).items() if "/" in name}


def read_quarantine(out):
    return [json.loads(line) for line in (out / "quarantine.jsonl").read_text().splitlines()]


def make_crash(mark=MARK, step="encode", once_file=""):
    return {"mark": mark, "step": step, "once_file": str(once_file)}


@pytest.mark.parametrize(
    ("dedup", "step", "deadly"),
    [
        ("near", "encode", [40]),
        pytest.param("exact", "encode", [40], marks=pytest.mark.slow),
        pytest.param("lines", "clean", [20], marks=pytest.mark.slow),
        pytest.param("lines", "clean", [20, 90], marks=pytest.mark.slow),
        pytest.param("exact", "clean", [40, 50], marks=pytest.mark.slow),
        pytest.param("near", "encode", [0, DOCUMENTS - 1], marks=pytest.mark.slow),
        pytest.param("lines", "encode", [20], marks=pytest.mark.slow),
    ],
)
def test_a_document_that_kills_is_quarantined(dedup, step, deadly, tmp_path):
    input_folder, broken_folder = write(tmp_path, deadly)
    settings = {"dedup": dedup, "clean": ["control"], "max_bad": 2, "unit_bytes": UNIT_BYTES}
    report = run_job(
        make_job([input_folder], tmp_path / "out", execution=POOL, crash=make_crash(step=step), **settings)
    )
    assert "error" not in report, report
    input_folder.rename(tmp_path / "before")
    run_job(make_job([broken_folder.rename(tmp_path / "in")], tmp_path / "without", **settings))
    assert hash_shards(tmp_path / "out") == hash_shards(tmp_path / "without")
    counts = [read_manifest(tmp_path / name).counts for name in ("out", "without")]
    assert counts[0] == counts[1]
    assert counts[0].quarantined == len(deadly)
    for number, row in zip(deadly, read_quarantine(tmp_path / "out"), strict=True):
        name, first_number = ("in/a.jsonl", 0) if number < FIRST_OF_B else ("in/b.jsonl", FIRST_OF_B)
        assert (row["source"], row["line"]) == (name, number - first_number + 1)
        assert row["reason"].startswith("the worker that processed it was killed by signal 9 (out of memory?), ")
        assert MARK in row["snippet"]
    notes = [note for note in report["notes"] if "is quarantined" in note]
    assert len(notes) == len(deadly)


@pytest.mark.slow
def test_a_worker_killed_once_leaves_no_trace(tmp_path):
    input_folder, _ = write(tmp_path, [40])
    settings = {"dedup": "lines", "clean": ["control"], "unit_bytes": UNIT_BYTES}
    crash = make_crash(step="clean", once_file=tmp_path / "once")
    report = run_job(make_job([input_folder], tmp_path / "out", execution=POOL, crash=crash, **settings))
    assert (tmp_path / "once").exists()
    assert [note for note in report["notes"] if note.endswith(": the unit is retried.")]
    run_job(make_job([input_folder], tmp_path / "whole", **settings))
    assert hash_store_files(tmp_path / "out") == hash_store_files(tmp_path / "whole")


@pytest.mark.slow
def test_a_worker_killed_at_its_first_task_leaves_no_trace(tmp_path):
    input_folder, _ = write(tmp_path, [])
    settings = {"dedup": "exact", "unit_bytes": UNIT_BYTES}
    crash = make_crash("", "make", once_file=tmp_path / "once")
    report = run_job(make_job([input_folder], tmp_path / "out", execution=POOL, crash=crash, **settings))
    assert "error" not in report, report
    assert (tmp_path / "once").exists()
    run_job(make_job([input_folder], tmp_path / "whole", **settings))
    assert hash_store_files(tmp_path / "out") == hash_store_files(tmp_path / "whole")


@pytest.mark.slow
def test_documents_that_kill_count_as_bad(tmp_path):
    input_folder, _ = write(tmp_path, [40])
    report = run_job(make_job([input_folder], tmp_path / "out", execution=POOL, crash=make_crash(), max_bad=0))
    assert report["error"].startswith("1 bad record in the first ")
    assert "a.jsonl, line 41: the worker that processed it was killed" in report["error"]


@pytest.mark.slow
def test_workers_that_die_of_anything_end_the_job_in_a_sentence(tmp_path):
    input_folder, _ = write(tmp_path, [])
    out, settings = tmp_path / "out", {"unit_bytes": UNIT_BYTES, "max_bad": 0}
    report = run_job(make_job([input_folder], out, execution=POOL, crash=make_crash("", "begin"), **settings))
    assert re.match(
        r"13 workers died at unit \d \(in/[ab].jsonl\), and no single record causes it; the last",
        report["error"],
    )
    assert report["error"].endswith("then give the same command again to resume.")
    assert "error" not in run_job(make_job([input_folder], out, execution=POOL, **settings))
    assert len(read_texts(out)) == DOCUMENTS


@pytest.mark.slow
def test_a_document_that_takes_too_much_memory_is_quarantined(tmp_path):
    input_folder, _ = write(tmp_path, [])
    rng = random.Random(1)
    text = " ".join("".join(rng.choices("abcdefgh", k=5)) for _ in range(2_000_000))
    settings = {"max_bad": 1, "clean": [{"repetition": {}}]}
    run_job(make_job([input_folder], tmp_path / "without", **settings))
    with (input_folder / "b.jsonl").open("a") as file:
        file.write(json.dumps({"text": text}) + "\n")
    execution = {"workers": 2, "memory_per_worker": 110 << 20}
    report = run_job(make_job([input_folder], tmp_path / "out", execution=execution, **settings))
    assert "error" not in report, report
    assert read_texts(tmp_path / "out") == read_texts(tmp_path / "without")
    (row,) = read_quarantine(tmp_path / "out")
    assert row["line"] == DOCUMENTS - FIRST_OF_B + 1
    assert "more than the 110 MiB that a worker may use" in row["reason"]
