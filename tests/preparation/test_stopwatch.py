"""The stopwatch adds up time per stage, from any thread, also after errors."""

import threading
import time

import pytest

from batchloom.preparation import RunSettings, StageTime, read_report, run_recipe
from batchloom.preparation.units.unit_report import STAGES, Stopwatch, add_stage_times
from preparation.stores import INLINE, make_recipe


@pytest.fixture
def clock(monkeypatch):
    """Return a list whose last number is the time in seconds."""
    times = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: times[-1])
    return times


def test_time_counts_also_where_the_work_fails(clock):
    watch = Stopwatch()
    with watch.time("encode", 100, 2):
        clock.append(2)
    with pytest.raises(ValueError), watch.time("encode", 10, 1):
        raise ValueError
    stage_time = watch.get_stage_times()["encode"]
    assert stage_time.seconds == 2
    assert (stage_time.bytes, stage_time.documents) == (110, 3)


def test_what_is_done_with_an_item_is_not_counted(clock):
    watch = Stopwatch()

    def yield_slowly():
        for number in range(3):
            clock.append(clock[-1] + 1)
            yield number

    numbers = []
    for number in watch.time_each("read", yield_slowly()):
        clock.append(clock[-1] + 50)
        numbers.append(number)
    assert numbers == [0, 1, 2]
    assert watch.get_stage_times()["read"].seconds == 3


def test_threads_lose_nothing():
    watch = Stopwatch()
    threads = [threading.Thread(target=lambda: [watch.add("hash", 0.5, 1, 1) for _ in range(1000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert watch.get_stage_times() == {"hash": StageTime(2000.0, 4000, 4000)}


def test_stages_come_in_the_order_of_a_job():
    watch = Stopwatch()
    for stage in reversed(STAGES):
        watch.add(stage, 1)
    assert tuple(watch.get_stage_times()) == STAGES
    total = add_stage_times(watch.get_stage_times(), {"of a later version": StageTime(1.0), "list": StageTime(2.0)})
    assert list(total) == [*STAGES, "of a later version"]
    assert total["list"].seconds == 3


def test_a_batch_costs_next_to_nothing():
    watch = Stopwatch()
    start = time.process_time()
    for _ in range(1000):
        with watch.time("clean"):
            pass
    assert time.process_time() - start < 1


@pytest.mark.parametrize("dry_run", [False, True])
def test_every_stage_of_a_job_is_reported_and_no_other(dry_run, tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"one line {n}\n" for n in range(500)))
    settings = RunSettings(unit_bytes=4000, dry_run=dry_run, execution=INLINE)
    recipe = make_recipe(inputs=(str(tmp_path / "a.txt"),), tokenizer="train:300", dedup="lines")
    run_recipe(recipe, tmp_path / "out", lambda event: None, settings=settings)
    report = read_report(tmp_path / "out/.work" if dry_run else tmp_path / "out")
    missing_stages = {"write shards", "finish"} if dry_run else set()
    assert list(report.content.stages) == [name for name in STAGES if name not in missing_stages]
    phases, stages = report.seconds_by_phase, report.content.stages
    assert {name for name in phases if name not in stages} == {"tokenize"}
    assert all(phases[name] == stages[name].seconds for name in phases if name in stages)


def test_the_phases_cover_the_complete_time_of_a_job(tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"one line {n}\n" for n in range(500)))
    recipe = make_recipe(inputs=(str(tmp_path / "a.txt"),), tokenizer="train:300", dedup="lines")
    shares = [0.0]
    # A busy machine may stop the process between two phases; a missing phase is missing each time.
    while shares[-1] < 0.8:
        number = len(shares)
        assert number < 100, shares
        out = tmp_path / f"out{number}"
        run_recipe(recipe, out, lambda event: None, settings=RunSettings(unit_bytes=4000, execution=INLINE))
        report = read_report(out)
        shares.append(sum(report.seconds_by_phase.values()) / report.seconds)
    assert all(share < 1.05 for share in shares)
