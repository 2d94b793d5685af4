"""Workers that die of a document: it is found and kept aside, and the rest is as if it had never been."""

import json
import random
import re

import pytest

from batchloom.store import read_manifest
from preparation.jobs import job, run_job
from preparation.stores import texts, tree

MARK = "DEADLY"
POOL = {"workers": 2}


def write(folder, deadly):
    """Two files with such documents, and two others where these are no JSON, of as many bytes."""
    rows = [{"text": f"document {n}\nline {n % 20}\nnumber {n % 7}{'x' * n}"} for n in range(400)]
    for number in deadly:
        rows[number] = {"text": f"{MARK} {number}\nline 3\nline new"}
    for name in ("in", "broken"):
        (folder / name).mkdir()
        lines = [json.dumps(row) + "\n" for row in rows]
        for number in deadly if name == "broken" else ():
            lines[number] = "!" + lines[number][1:]
        (folder / name / "a.jsonl").write_text("".join(lines[:250]))
        (folder / name / "b.jsonl").write_text("".join(lines[250:]))
    return folder / "in", folder / "broken"


def shards(out):
    return {name: hash_ for name, hash_ in tree(out).items() if "/" in name}


def quarantine(out):
    return [json.loads(line) for line in (out / "quarantine.jsonl").read_text().splitlines()]


def mortal(mark=MARK, step="encode", once=""):
    return {"mark": mark, "step": step, "once": str(once)}


@pytest.mark.parametrize(
    ("dedup", "step", "deadly"),
    [
        ("exact", "encode", [130]),
        ("lines", "clean", [20]),
        pytest.param("lines", "clean", [20, 300], marks=pytest.mark.slow),
        pytest.param("exact", "clean", [130, 140], marks=pytest.mark.slow),
        pytest.param("near", "encode", [0, 399], marks=pytest.mark.slow),
        pytest.param("lines", "encode", [20], marks=pytest.mark.slow),
    ],
)
def test_a_document_that_kills_is_kept_aside(dedup, step, deadly, tmp_path):
    given, broken = write(tmp_path, deadly)
    how = {"dedup": dedup, "clean": ["control"], "max_bad": 2, "unit_bytes": 20_000}
    told = run_job(job([given], tmp_path / "out", execution=POOL, mortal=mortal(step=step), **how))
    assert "error" not in told, told
    given.rename(tmp_path / "before")
    run_job(job([broken.rename(tmp_path / "in")], tmp_path / "without", **how))
    assert shards(tmp_path / "out") == shards(tmp_path / "without")
    counts = [read_manifest(tmp_path / name).counts for name in ("out", "without")]
    assert counts[0] == counts[1]
    assert counts[0].quarantined == len(deadly)
    for number, row in zip(deadly, quarantine(tmp_path / "out"), strict=True):
        name, before = ("in/a.jsonl", 0) if number < 250 else ("in/b.jsonl", 250)
        assert (row["source"], row["line"]) == (name, number - before + 1)
        assert row["reason"].startswith("the worker that processed it was killed by signal 9 (out of memory?), ")
        assert MARK in row["snippet"]
    aside = [note for note in told["notes"] if "is quarantined" in note]
    assert len(aside) == len(deadly)


def test_a_worker_killed_once_leaves_no_trace(tmp_path):
    given, _ = write(tmp_path, [130])
    how = {"dedup": "lines", "clean": ["control"], "unit_bytes": 20_000}
    once = mortal(step="clean", once=tmp_path / "once")
    told = run_job(job([given], tmp_path / "out", execution=POOL, mortal=once, **how))
    assert (tmp_path / "once").exists()
    assert [note for note in told["notes"] if note.endswith(": the unit is retried.")]
    run_job(job([given], tmp_path / "whole", **how))
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_a_worker_killed_where_parts_are_told_apart(tmp_path):
    rows = "".join(f'{n},"line {n % 7}\nof {n}"\n' for n in range(3000))
    (tmp_path / "a.csv").write_text("id,text\n" + rows)
    how = {"dedup": "exact", "unit_bytes": 20_000}
    once = mortal("", "make", once=tmp_path / "once")
    told = run_job(job([tmp_path / "a.csv"], tmp_path / "out", execution=POOL, mortal=once, **how))
    assert "error" not in told, told
    assert (tmp_path / "once").exists()
    run_job(job([tmp_path / "a.csv"], tmp_path / "whole", **how))
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_documents_that_kill_count_as_bad(tmp_path):
    given, _ = write(tmp_path, [130])
    told = run_job(job([given], tmp_path / "out", execution=POOL, mortal=mortal(), max_bad=0))
    assert told["error"].startswith("1 bad record in the first ")
    assert "a.jsonl, line 131: the worker that processed it was killed" in told["error"]


@pytest.mark.slow
def test_workers_that_die_of_anything_end_the_job_in_a_sentence(tmp_path):
    given, _ = write(tmp_path, [])
    out, how = tmp_path / "out", {"unit_bytes": 20_000, "max_bad": 0}
    told = run_job(job([given], out, execution=POOL, mortal=mortal("", "begin"), **how))
    assert re.match(
        r"13 workers died at unit \d \(in/[ab].jsonl\), and no single record causes it; the last",
        told["error"],
    )
    assert told["error"].endswith("then give the same command again to resume.")
    assert "error" not in run_job(job([given], out, execution=POOL, **how))
    assert len(texts(out)) == 400


@pytest.mark.slow
def test_a_document_that_takes_too_much_memory_is_kept_aside(tmp_path):
    given, _ = write(tmp_path, [])
    drawn = random.Random(1)
    words = " ".join("".join(drawn.choices("abcdefgh", k=5)) for _ in range(2_000_000))
    how = {"max_bad": 1, "clean": [{"repetition": {}}]}
    run_job(job([given], tmp_path / "without", **how))
    with (given / "b.jsonl").open("a") as file:
        file.write(json.dumps({"text": words}) + "\n")
    execution = {"workers": 2, "memory": 110 << 20}
    told = run_job(job([given], tmp_path / "out", execution=execution, **how))
    assert "error" not in told, told
    assert texts(tmp_path / "out") == texts(tmp_path / "without")
    (row,) = quarantine(tmp_path / "out")
    assert row["line"] == 151
    assert "more than the 110 MiB that a worker may use" in row["reason"]
