"""Several workers: what each needs to know of parts that others read, and what must be the same everywhere."""

import json
from dataclasses import replace

import pytest

from batchloom.core.errors import WorkerError
from batchloom.preparation import ExecutionSettings, RunSettings, run_recipe
from batchloom.preparation.phases import phase_runner as making, worker_setup as hand
from batchloom.preparation.units import UnitTask
from batchloom.sources.formats import SequentialCuts
from preparation.stores import SMALL, jsonl, make, recipe_of, tree


def in_pool(inputs, out, workers=2, **settings):
    """Prepare small units with a pool of processes."""
    execution = ExecutionSettings(workers=workers)
    return run_recipe(
        recipe_of(inputs=tuple(map(str, inputs)), tokenizer="bytes", **settings),
        out,
        lambda event: None,
        settings=RunSettings(limits=SMALL, unit_bytes=4000, execution=execution),
    )


@pytest.fixture
def ordered(tmp_path):
    """A CSV file and a JSON list of several units each."""
    rows = [f'{n},"row {n}\nof ""quoted"" text {"x" * (n % 37)}"' for n in range(600)]
    (tmp_path / "a.csv").write_text("id,text\n" + "\n".join(rows) + "\n")
    listed = [{"text": f"element {n} " + "y" * (n % 41)} for n in range(500)]
    (tmp_path / "b.json").write_text(json.dumps(listed, indent=1))
    return [tmp_path / "a.csv", tmp_path / "b.json"]


@pytest.mark.parametrize("dedup", ["exact", "lines"])
def test_parts_that_are_read_in_order_give_the_same_bytes_in_a_pool(tmp_path, ordered, dedup):
    settings = {"unit_bytes": 4000, "limits": SMALL, "dedup": dedup}
    make(ordered, tmp_path / "one", **settings)
    in_pool(ordered, tmp_path / "pool", dedup=dedup)
    assert tree(tmp_path / "pool") == tree(tmp_path / "one")


def test_where_parts_meet_is_looked_up_once_for_all_workers(tmp_path, ordered, monkeypatch):
    """Every place is asked for by one pass, and no unit asks again."""
    asked = []
    at = SequentialCuts.get_cut
    monkeypatch.setattr(
        SequentialCuts,
        "get_cut",
        lambda self, place: asked.append((self.source.path, place)) or at(self, place),
    )
    make(ordered, tmp_path / "out", unit_bytes=4000, limits=SMALL)
    places = {str(path): range(4000, path.stat().st_size, 4000) for path in ordered}
    assert asked == [(path, place) for path, some in places.items() for place in some]


def test_a_worker_with_another_version_ends_the_job_in_a_sentence(tmp_path, monkeypatch):
    jsonl(tmp_path / "a.jsonl", [{"text": f"document {n}"} for n in range(2000)])
    real = making.collect_versions
    monkeypatch.setattr(making, "collect_versions", lambda steps: real(steps) | {"tokenizers": "0.0.1"})
    with pytest.raises(WorkerError) as error:
        in_pool([tmp_path / "a.jsonl"], tmp_path / "out")
    assert str(error.value).startswith("A worker has tokenizers ")
    assert "where the coordinator has 0.0.1: it would write other bytes." in str(error.value)
    monkeypatch.undo()
    in_pool([tmp_path / "a.jsonl"], tmp_path / "out")
    assert not (tmp_path / "out" / ".work").exists()


def test_a_worker_without_a_package_says_so():
    some = hand.WorkerSetup(*[None] * 8, versions={"no-such-package": "1.2"})
    with pytest.raises(WorkerError, match="no-such-package is missing where the coordinator has 1.2"):
        replace(some)()


def test_an_order_that_two_workers_do_comes_to_the_same(tmp_path, ordered, monkeypatch):
    """One that was given up for lost may get to its end before the one that took its place."""
    settings = {"unit_bytes": 4000, "limits": SMALL, "dedup": "near"}
    make(ordered, tmp_path / "once", **settings)
    real, kinds = hand.make_task_function, set()

    def doing_twice(task):
        work = real(task)

        def twice(order, tell):
            kinds.add(type(order).__name__)
            first = work(order, tell)
            again = work(order, tell)
            assert isinstance(order, UnitTask) or again == first
            return again

        return twice

    monkeypatch.setattr(making, "make_task_function", doing_twice)
    make(ordered, tmp_path / "twice", **settings)
    assert {
        "UnitTask",
        "ResolveDuplicatesTask",
        "WriteShardsTask",
        "FindDuplicatesTask",
        "LinkComponentsTask",
    } <= kinds
    assert tree(tmp_path / "twice") == tree(tmp_path / "once")
