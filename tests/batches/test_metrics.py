"""Figures of all ranks from one of them, checked against the batches of all; clocks of others without waiting."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import batchloom
from batchloom import Mixture, PlanError, SettingsError
from batchloom.batches import Batch, Meter, ModelCost, metrics, transformer_cost
from batchloom.batches.metrics_exchange import MetricsExchange
from batchloom.plan import Mesh
from batchloom.testing import write_store
from processes import run_two_ranks
from single_settings import make_loader

SEQ_LEN = 64
WORKER = Path(__file__).with_name("meter_worker.py")


def documents(seed, count=300):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, rng.integers(1, 90)).tolist() for _ in range(count)]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_store(tmp_path_factory.mktemp("store"), documents(0))


@pytest.fixture(scope="module")
def mixture(store, tmp_path_factory):
    other = write_store(tmp_path_factory.mktemp("other"), documents(1))
    return Mixture(
        weights={"web": 0.75, "code": 0.25},
        stores={"web": store, "code": other},
        exhausted="repeat",
    )


def make(data, rank=0, world_size=4, **options):
    sizes = {"seq_len": SEQ_LEN, "global_batch_size": 12, "output": "numpy", "steps": 9}
    return make_loader(data, **{**sizes, **options}, rank=rank, world_size=world_size, prefetch=0)


def done(loader, steps, **options):
    meter = Meter(loader, **options)
    for step in range(steps):
        meter.step(step)
    return meter


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"balance": True}, {"lanes": 4}, {"world_size": 5, "uneven": "pad"}, {"packing": "none"}],
    ids=str,
)
def test_one_rank_tells_what_the_batches_of_all_hold(store, mixture, options, mixed):
    data = mixture if mixed else store
    world = options.get("world_size", 4)
    ranks = [make(data, **{**options, "rank": rank, "form": "varlen"}) for rank in range(world)]
    steps = 3
    batches = [[loader.batch(step) for loader in ranks] for step in range(steps)]
    tokens = np.array([[batch["cu_seq_lens_q"][-1] for batch in step] for step in batches])
    trained = sum(int((batch["labels"] >= 0).sum()) for step in batches for batch in step)
    loader = make(data, **options)
    figures = done(loader, steps).metrics()

    assert figures["perf/tokens"] == tokens.sum()
    assert figures["perf/global_seq_len_avg"] == pytest.approx(tokens.mean())
    assert figures["perf/global_seq_len_min"] == tokens.min()
    assert figures["perf/global_seq_len_max"] == tokens.max()
    assert figures["perf/packing_efficiency"] == tokens.sum() / (steps * 12 * SEQ_LEN)
    places = steps * world * len(make(data, **options).batch(0)["input_ids"]) * SEQ_LEN
    assert figures["perf/padding_share"] == pytest.approx(1 - tokens.sum() / places)
    assert figures["perf/trained_share"] == pytest.approx(trained / tokens.sum())
    assert figures["perf/tokens_per_s_per_gpu"] == figures["perf/tokens_per_s"] / world
    assert figures["perf/imbalance"] == pytest.approx(np.mean([loader.imbalance(step).actual for step in range(steps)]))
    assert (figures["data/step"], figures["data/position"]) == (3, 36)
    names = ["web", "code"] if mixed else ["data"]
    assert sum(figures[f"data/{name}/tokens"] for name in names) == tokens.sum()
    assert figures["data/synthetic"] == 0
    # What was told is told once.
    assert "perf/tokens" not in done(loader, 0).metrics()


def test_an_epoch_is_told_to_the_sequence(store, mixture):
    loader = make(store, world_size=1, steps=400, global_batch_size=1, pool_size=32)
    meter = Meter(loader)
    whole = loader.plan.orders.sequences_per_epoch
    seen = []
    for step in range(2 * whole):
        meter.step(step)
        seen.append(meter.metrics()["data/data/epoch"])
    assert seen == sorted(seen)
    assert (seen[whole - 1], seen[-1]) == (1.0, 2.0)
    assert max(np.diff(seen)) < 3 / whole
    ended = make(store, world_size=1, steps=None, epochs=2)
    assert done(ended, len(ended)).metrics()["data/data/epoch"] == 2
    weighted = done(make(mixture, steps=40), 40).metrics()
    assert weighted["data/web/epoch"] > 2 * weighted["data/code/epoch"] > 0


def test_attention_costs_the_squares_of_true_lengths(store):
    loader = make(store, world_size=1)
    cost = transformer_cost(parameters=1000, layers=2, width=32)
    figures = done(loader, 2, cost=cost, peak_flops=1e12, devices=8).metrics()
    rows = loader.plan.rows(0, 24)
    flops = 6 * 1000 * rows.lengths.sum() + 12 * 2 * 32 * (rows.lengths**2).sum()
    each = flops / figures["perf/seconds"] / 8
    assert figures["perf/flops_per_s_per_gpu"] == pytest.approx(each)
    assert figures["perf/mfu"] == pytest.approx(each / 1e12)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"peak_flops": 0, "cost": ModelCost(per_token=1)}, "peak_flops: 0 is not a number above 0"),
        ({"peak_flops": 1e15}, "cost: missing"),
        ({"devices": 0}, "devices: 0 is not a whole number"),
    ],
)
def test_numbers_that_are_none(store, options, said):
    with pytest.raises(SettingsError, match=said):
        Meter(make(store), **options)
    with pytest.raises(SettingsError, match="per_pair: -1 is not a number of at least 0"):
        ModelCost(per_token=1, per_pair=-1)
    for number in ("x", 10**400, -1, True, float("nan")):
        with pytest.raises(SettingsError, match="parameters: .* is not a number of at least 0"):
            transformer_cost(parameters=number)


@pytest.mark.parametrize("step", [True, 1.0, -1, "3", None])
def test_a_step_is_a_batch_or_a_whole_number(store, step):
    meter = Meter(make(store))
    with pytest.raises(SettingsError, match="step: .* is not a whole number of at least 0; give a step"):
        meter.step(step)
    meter.step(np.int64(2))
    assert meter.metrics()["data/step"] == 3


def test_what_cannot_be_trained_is_refused(store):
    meter = Meter(make(store))
    for number in (float("nan"), -5, float("inf"), "x", True):
        with pytest.raises(SettingsError, match=r"trained: .* is not a number of tokens \(at least 0\)"):
            meter.step(0, trained=number)
    meter.step(0, trained=1e12)
    with pytest.raises(SettingsError, match="trained: 1,000,000,000,000 were reported for step 0"):
        meter.metrics()


@pytest.mark.parametrize("looked", [False, True])
def test_micro_batches_of_a_step_are_one_step(tmp_path, store, looked):
    docs = documents(3)
    masked = write_store(tmp_path, docs, trained=[[n % 3 == 0 for n in range(len(d))] for d in docs])
    for data in (store, masked):
        loader = make(data, world_size=1)
        whole, parts = Meter(loader), Meter(loader)
        trained = Meter(loader)
        for batch in map(loader.batch, range(3)):
            whole.step(batch)
            for part in batch.split(3):
                parts.step(part)
                trained.step(batch.step, trained=int((part["labels"] >= 0).sum()))
        first, second, third = (one.metrics() for one in (whole, parts, trained))
        assert (second["perf/steps"], second["perf/tokens"]) == (3, first["perf/tokens"])
        shares = [one for one in first if one.endswith("trained_share")]
        assert [first[one] for one in shares] == [second[one] for one in shares]
        assert third["perf/trained_share"] == pytest.approx(first[shares[0]])
        if looked:
            # What more is told of a step whose figures were given is none.
            parts.step(2)
            assert "perf/tokens" not in parts.metrics()


@pytest.mark.parametrize("align", [1, 4])
def test_a_rank_without_a_span_computes_padding(tmp_path, align):
    store = write_store(tmp_path, [[1] * 60] * 7)
    sizes = {"form": "varlen", "uneven": "pad", "align": align, "world_size": 4, "steps": None}
    ranks = [make(store, rank, epochs=1, global_batch_size=4, **sizes) for rank in range(4)]
    steps = len(ranks[0])
    batches = [loader.batch(step) for loader in ranks for step in range(steps)]
    assert any((batch["labels"] < 0).all() for batch in batches)
    places = sum(batch["input_ids"].size for batch in batches)
    share = done(ranks[0], steps).metrics()["perf/padding_share"]
    assert share == pytest.approx(1 - 7 * 60 / places)


def test_masks_are_counted_in_this_ranks_labels_or_given(tmp_path):
    docs = documents(2)
    store = write_store(tmp_path, docs, trained=[[n % 3 == 0 for n in range(len(d))] for d in docs])
    loader = make(store, world_size=2)
    meter = Meter(loader)
    batches = [loader.batch(step) for step in range(3)]
    for batch in batches:
        meter.step(batch)
    figures = meter.metrics()
    kept = sum(int((batch["labels"] >= 0).sum()) for batch in batches)
    tokens = sum(loader.tokens(step) for step in range(3))
    assert "perf/trained_share" not in figures
    assert figures["rank/trained_share"] == pytest.approx(kept / tokens)
    for step in range(3):
        meter.step(step, trained=loader.trained_tokens(step))
    figures = meter.metrics()
    whole = sum(loader.trained_tokens(step) for step in range(3))
    assert figures["perf/trained_share"] == pytest.approx(whole / figures["perf/tokens"])


def test_the_wait_for_data_is_measured_and_what_follows_a_step_is_not(store):
    def slow(loader):
        for batch in loader:
            time.sleep(0.05)
            yield batch

    loader = make(store, steps=4)
    meter = Meter(loader)
    for _ in meter.over(slow(loader)):
        pass
    figures = meter.metrics()
    assert figures["perf/steps"] == 4
    assert figures["perf/seconds"] >= 0.2
    assert figures["perf/data_wait_share"] > 0.5
    for batch in meter.over():
        meter.step(batch)
        time.sleep(0.3)
    assert meter.metrics()["perf/seconds"] < 4 * 0.3
    # Without over nobody knows.
    assert "perf/data_wait_share" not in done(loader, 2).metrics()


def test_what_came_before_the_clock_began_is_no_part_of_a_step(store, monkeypatch):
    now = iter([10.0, 20.0, 23.0, 23.0])
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: next(now))
    meter = Meter(make(store))
    meter.begin()
    meter.step(0)
    assert meter.metrics()["perf/seconds"] == 3.0


def test_a_long_while_without_a_look_is_told_of_its_last_steps(store, monkeypatch):
    monkeypatch.setattr(metrics, "_MAX_ROWS", 30)
    meter = done(make(store), 9)
    figures = meter.metrics()
    assert (figures["perf/steps"], figures["data/step"]) == (2, 9)
    rows = make(store).plan.rows(7 * 12, 9 * 12)
    assert figures["perf/tokens"] == rows.lengths.sum()


def test_a_batch_that_does_not_know_its_step(store):
    loader = make(store)
    with pytest.raises(PlanError, match=r"meter\.step\(number\)"):
        Meter(loader).step(Batch(dict(loader.batch(0))))


def test_a_stream_tells_of_this_rank_alone(tmp_path):
    for name in ("a", "b"):
        lines = [f"{n} times {n} is {n * n}." for n in range(400)]
        (tmp_path / f"{name}.txt").write_text("\n\n".join(lines))
    stream = batchloom.stream(
        [tmp_path], tokenizer="bytes", seq_len=64, global_batch_size=4, steps=3, lanes=2, workers=0,
    )  # fmt: skip
    loader = batchloom.Loader(stream, rank=1, world_size=2, output="numpy")
    meter = Meter(loader)
    kept = sum(int((batch["labels"] >= 0).sum()) for batch in meter.over())
    figures = meter.metrics()
    assert {name for name in figures if name.startswith("perf/")} == {"perf/data_wait_share"}
    assert figures["rank/trained_share"] == pytest.approx(kept / figures["rank/tokens"])
    assert figures["rank/packing_efficiency"] == figures["rank/tokens"] / (3 * 2 * 64)
    assert (figures["data/step"], figures["data/position"]) == (3, 12)


def test_what_is_made_up_says_so_and_is_counted_for_all_ranks():
    store = batchloom.open_store("dummy:documents=50,seed=3")
    figures = done(make(store, world_size=2, balance=False), 2).metrics()
    assert figures["data/synthetic"] == 1
    rank = make(store, world_size=2)
    assert figures["perf/tokens"] == 2 * sum(rank.tokens(step) for step in range(2))


def test_mesh_peers_are_devices_and_not_ranks(store):
    mesh = Mesh(tensor=2, context=2)
    figures = done(make(store, world_size=8, mesh=mesh, labels="shifted"), 2).metrics()
    alone = done(make(store, world_size=2), 2).metrics()
    assert figures["perf/global_seq_len_avg"] == alone["perf/global_seq_len_avg"]
    assert figures["perf/tokens_per_s_per_gpu"] == figures["perf/tokens_per_s"] / 8


def until(found, seconds=60):
    end = time.monotonic() + seconds
    while not (what := found()) and time.monotonic() < end:
        time.sleep(0.01)
    return what


def test_a_rank_that_says_nothing_is_not_waited_for():
    torch = pytest.importorskip("torch.distributed")
    store = torch.HashStore()
    first, second = MetricsExchange(store, 0, 3, "run"), MetricsExchange(store, 1, 3, "run")
    assert first.get_rank_metrics() == {}
    second.publish({"step": 7.0})
    assert until(first.get_rank_metrics) == {1: {"step": 7.0}}
    second.publish({"step": 8.0})
    assert until(lambda: first.get_rank_metrics()[1]["step"] == 8.0)


HOST = """
import sys, time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


def test_a_store_whose_host_hangs_or_is_gone_stops_nobody(caplog):
    torch = pytest.importorskip("torch.distributed")
    with subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True) as host:
        try:
            store = torch.TCPStore("127.0.0.1", int(host.stdout.readline()), is_master=False)
            board = MetricsExchange(store, 0, 2, "run")
            board.publish({"step": 1.0})
            assert until(board.get_rank_metrics) == {0: {"step": 1.0}}
            host.send_signal(signal.SIGSTOP)
            begin = time.monotonic()
            for step in range(100):
                board.publish({"step": float(step)})
                assert board.get_rank_metrics() == {0: {"step": 1.0}}
            # The client would wait for five minutes.
            assert time.monotonic() - begin < 30
        finally:
            host.kill()
    assert until(lambda: "Metrics of other ranks are no longer read" in caplog.text)
    board.publish({"step": 2.0})
    # What was heard before is no news any more.
    assert until(lambda: not board.get_rank_metrics())


def test_ranks_that_look_at_other_steps_or_never_hang_nobody(tmp_path, store):
    """Rank 0 looks until it has heard rank 1, which never looks; then rank 1 dies and rank 0 goes on."""
    pytest.importorskip("torch.distributed")
    printed = run_two_ranks(WORKER, store.path, tmp_path)
    assert "heard 2 ranks, the slowest of them rank 1" in printed
    assert "went on after rank 1 had ended" in printed
