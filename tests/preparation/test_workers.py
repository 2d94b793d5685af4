"""Several workers: equal results everywhere."""

from dataclasses import replace

import pytest

import batchloom
from batchloom.core.errors import WorkerError
from batchloom.preparation import ExecutionSettings, RunSettings, prepare_run, run_recipe
from batchloom.preparation.phases import sample_phase, worker_setup
from batchloom.preparation.units import UnitTask
from batchloom.preparation.units.units import choose_unit_bytes
from batchloom.preparation.workers.executor_choice import choose_worker_count
from batchloom.store import read_manifest
from preparation.stores import SMALL_LIMITS, hash_store_files, make_recipe, prepare_store, write_jsonl

MIB = 1 << 20


def prepare_in_pool(inputs, out, workers=2, **settings):
    """Prepare small units with a pool of processes."""
    execution = ExecutionSettings(workers=workers)
    return run_recipe(
        make_recipe(inputs=tuple(map(str, inputs)), tokenizer="bytes", **settings),
        out,
        lambda event: None,
        settings=RunSettings(limits=SMALL_LIMITS, unit_bytes=4000, execution=execution),
    )


@pytest.fixture
def inputs(tmp_path):
    """Write two files of several units each."""
    rows = [{"text": f"row {n}\nof text {'x' * (n % 37)}"} for n in range(300)]
    elements = [{"text": f"element {n} " + "y" * (n % 41)} for n in range(250)]
    return [write_jsonl(tmp_path / "a.jsonl", rows), write_jsonl(tmp_path / "b.jsonl", elements)]


@pytest.mark.parametrize("dedup", [pytest.param("exact", marks=pytest.mark.slow), "lines"])
def test_a_pool_writes_the_same_bytes(tmp_path, inputs, dedup):
    settings = {"unit_bytes": 4000, "limits": SMALL_LIMITS, "dedup": dedup}
    prepare_store(inputs, tmp_path / "one", **settings)
    prepare_in_pool(inputs, tmp_path / "pool", dedup=dedup)
    assert hash_store_files(tmp_path / "pool") == hash_store_files(tmp_path / "one")


def test_a_worker_with_another_version_ends_the_job_in_a_sentence(tmp_path, monkeypatch):
    write_jsonl(tmp_path / "a.jsonl", [{"text": f"document {n}"} for n in range(300)])
    collect_versions = sample_phase.collect_versions
    monkeypatch.setattr(
        sample_phase, "collect_versions", lambda steps: collect_versions(steps) | {"tokenizers": "0.0.1"}
    )
    with pytest.raises(WorkerError) as error:
        prepare_in_pool([tmp_path / "a.jsonl"], tmp_path / "out")
    assert str(error.value).startswith("A worker has tokenizers ")
    assert "where the coordinator has 0.0.1: it would write other bytes." in str(error.value)
    monkeypatch.undo()
    prepare_in_pool([tmp_path / "a.jsonl"], tmp_path / "out", workers=1)
    assert not (tmp_path / "out" / ".work").exists()


def test_a_worker_without_a_package_says_so():
    setup = worker_setup.WorkerSetup(*[None] * 8, versions={"no-such-package": "1.2"})
    with pytest.raises(WorkerError, match="no-such-package is missing where the coordinator has 1.2"):
        replace(setup)()


def test_a_task_run_by_two_workers_has_the_same_result(tmp_path, inputs, monkeypatch):
    """A task given up as lost may finish before the one that replaced it."""
    settings = {"unit_bytes": 4000, "limits": SMALL_LIMITS, "dedup": "near"}
    prepare_store(inputs, tmp_path / "once", **settings)
    make_task_function, task_kinds = worker_setup.make_task_function, set()

    def run_twice(task):
        run_task = make_task_function(task)

        def run_task_twice(phase_task, send):
            # Other tasks are functions, whose last argument is the name of the attempt.
            kind = phase_task if isinstance(phase_task, UnitTask) else phase_task.func
            task_kinds.add(getattr(kind, "__name__", "UnitTask"))
            result = run_task(phase_task, send)
            second_result = run_task(phase_task, send)
            assert isinstance(phase_task, UnitTask) or second_result == result
            return second_result

        return run_task_twice

    monkeypatch.setattr(prepare_run, "make_task_function", run_twice)
    prepare_store(inputs, tmp_path / "twice", **settings)
    assert {
        "UnitTask",
        "resolve_unit_duplicates",
        "write_unit_shards",
        "search_key_range",
        "link_components",
    } <= task_kinds
    assert hash_store_files(tmp_path / "twice") == hash_store_files(tmp_path / "once")


@pytest.mark.parametrize(
    ("total_mib", "unit_mib"),
    [(0, 32), (222, 32), (2047, 32), (2048, 64), (4095, 64), (4096, 128), (8191, 128), (8192, 256), (3 << 20, 256)],
)
def test_larger_inputs_have_larger_units(total_mib, unit_mib):
    assert choose_unit_bytes(total_mib * MIB) == unit_mib * MIB


@pytest.mark.parametrize(
    ("total_mib", "units", "cores", "workers"),
    [(10, 1, 2, 1), (40, 2, 2, 1), (65, 3, 2, 2), (222, 7, 2, 2), (222, 7, 16, 7), (9000, 36, 16, 16)],
)
def test_inputs_above_64_mib_use_all_cores(total_mib, units, cores, workers, monkeypatch):
    monkeypatch.setattr("batchloom.preparation.workers.executor_choice.count_cores", lambda: cores)
    monkeypatch.setattr("batchloom.preparation.workers.executor_choice.measure_free_memory", lambda: 1 << 40)
    assert choose_worker_count(ExecutionSettings(), units, total_mib * MIB) == workers


@pytest.mark.slow
def test_an_input_of_some_units_gives_the_same_bytes_with_two_workers(tmp_path):
    rows = [{"text": f"document {number} " + "word " * 4000} for number in range(2000)]
    write_jsonl(tmp_path / "a.jsonl", rows)
    settings = {"tokenizer": "bytes", "dedup": "none", "progress": lambda event: None}
    for workers in (1, 2):
        batchloom.prepare(tmp_path / "a.jsonl", out=tmp_path / f"store-{workers}", workers=workers, **settings)
    one, two = (read_manifest(tmp_path / f"store-{workers}") for workers in (1, 2))
    assert [shard.documents for shard in one.subsets["train"].shards] == [
        shard.documents for shard in two.subsets["train"].shards
    ]
    assert len(one.subsets["train"].shards) == 2
    assert one == two
