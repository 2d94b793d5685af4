"""Metrics of all ranks computed on one rank, and exchange without waiting."""

import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import batchloom
from batchloom import Mixture, PlanError, SettingsError
from batchloom.batches import METRICS, Batch, Meter, ModelCost, metrics as metrics_module, transformer_cost
from batchloom.batches.metrics import MetricsExchange
from batchloom.plan import Mesh
from batchloom.testing import write_store
from processes import run_two_ranks, start_processes
from waiting import LIMIT_S, wait_until

SEQ_LEN = 64
WORKER = Path(__file__).with_name("meter_worker.py")


def make_documents(seed, count=300):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, rng.integers(1, 90)).tolist() for _ in range(count)]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_store(tmp_path_factory.mktemp("store"), make_documents(0))


@pytest.fixture(scope="module")
def mixture(store, tmp_path_factory):
    code_store = write_store(tmp_path_factory.mktemp("other"), make_documents(1))
    return Mixture(
        weights={"web": 0.75, "code": 0.25},
        stores={"web": store, "code": code_store},
        exhausted="repeat",
    )


def build_loader(data, rank=0, world_size=4, **options):
    sizes = {"seq_len": SEQ_LEN, "global_batch_size": 12, "output": "numpy", "steps": 9}
    return batchloom.Loader(data, **{**sizes, **options}, rank=rank, world_size=world_size, prefetch=0)


def run_meter(loader, steps, **options):
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
def test_one_rank_reports_the_batches_of_all_ranks(store, mixture, options, mixed):
    data = mixture if mixed else store
    world = options.get("world_size", 4)
    ranks = [build_loader(data, **{**options, "rank": rank, "form": "varlen"}) for rank in range(world)]
    steps = 3
    batches = [[loader.batch(step) for loader in ranks] for step in range(steps)]
    tokens = np.array([[batch["cu_seq_lens_q"][-1] for batch in step] for step in batches])
    trained = sum(int((batch["labels"] >= 0).sum()) for step in batches for batch in step)
    loader = build_loader(data, **options)
    metrics = run_meter(loader, steps).metrics()

    assert metrics["perf/tokens"] == tokens.sum()
    assert metrics["perf/global_seq_len_avg"] == pytest.approx(tokens.mean())
    assert metrics["perf/global_seq_len_min"] == tokens.min()
    assert metrics["perf/global_seq_len_max"] == tokens.max()
    assert metrics["perf/packing_efficiency"] == tokens.sum() / (steps * 12 * SEQ_LEN)
    slots = steps * world * len(build_loader(data, **options).batch(0)["input_ids"]) * SEQ_LEN
    assert metrics["perf/padding_share"] == pytest.approx(1 - tokens.sum() / slots)
    assert metrics["perf/trained_share"] == pytest.approx(trained / tokens.sum())
    assert metrics["perf/tokens_per_s_per_gpu"] == metrics["perf/tokens_per_s"] / world
    assert metrics["perf/imbalance"] == pytest.approx(np.mean([loader.imbalance(step).actual for step in range(steps)]))
    assert (metrics["data/step"], metrics["data/position"]) == (3, 36)
    names = ["web", "code"] if mixed else ["data"]
    assert sum(metrics[f"data/{name}/tokens"] for name in names) == tokens.sum()
    assert metrics["data/synthetic"] == 0
    # Each step is reported once.
    assert "perf/tokens" not in run_meter(loader, 0).metrics()


def test_epochs_are_counted_to_the_sequence(store, mixture):
    loader = build_loader(store, world_size=1, steps=400, global_batch_size=1, pool_size=32)
    meter = Meter(loader)
    epoch_length = loader.plan.orders.sequences_per_epoch
    epochs = []
    for step in range(2 * epoch_length):
        meter.step(step)
        epochs.append(meter.metrics()["data/data/epoch"])
    assert epochs == sorted(epochs)
    assert (epochs[epoch_length - 1], epochs[-1]) == (1.0, 2.0)
    assert max(np.diff(epochs)) < 3 / epoch_length
    finite = build_loader(store, world_size=1, steps=None, epochs=2)
    assert run_meter(finite, len(finite)).metrics()["data/data/epoch"] == 2
    weighted = run_meter(build_loader(mixture, steps=40), 40).metrics()
    assert weighted["data/web/epoch"] > 2 * weighted["data/code/epoch"] > 0


def test_attention_costs_the_squares_of_true_lengths(store):
    loader = build_loader(store, world_size=1)
    cost = transformer_cost(parameters=1000, layers=2, width=32)
    metrics = run_meter(loader, 2, cost=cost, peak_flops=1e12, devices=8).metrics()
    rows = loader.plan.rows(0, 24)
    flops = 6 * 1000 * rows.lengths.sum() + 12 * 2 * 32 * (rows.lengths**2).sum()
    flops_per_device = flops / metrics["perf/seconds"] / 8
    assert metrics["perf/flops_per_s_per_gpu"] == pytest.approx(flops_per_device)
    assert metrics["perf/mfu"] == pytest.approx(flops_per_device / 1e12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"peak_flops": 0, "cost": ModelCost(per_token=1)}, "peak_flops: 0 is not a number above 0"),
        ({"peak_flops": 1e15}, "cost: missing"),
        ({"devices": 0}, "devices: 0 is not a whole number"),
    ],
)
def test_numbers_that_are_none(store, options, message):
    with pytest.raises(SettingsError, match=message):
        Meter(build_loader(store), **options)
    with pytest.raises(SettingsError, match="per_pair: -1 is not a number of at least 0"):
        ModelCost(per_token=1, per_pair=-1)
    for number in ("x", 10**400, -1, True, float("nan")):
        with pytest.raises(SettingsError, match="parameters: .* is not a number of at least 0"):
            transformer_cost(parameters=number)


@pytest.mark.parametrize("step", [True, 1.0, -1, "3", None])
def test_a_step_is_a_batch_or_a_whole_number(store, step):
    meter = Meter(build_loader(store))
    with pytest.raises(SettingsError, match="step: .* is not a whole number of at least 0; give a step"):
        meter.step(step)
    meter.step(np.int64(2))
    assert meter.metrics()["data/step"] == 3


def test_what_cannot_be_trained_is_refused(store):
    meter = Meter(build_loader(store))
    for number in (float("nan"), -5, float("inf"), "x", True):
        with pytest.raises(SettingsError, match=r"trained: .* is not a number of tokens \(at least 0\)"):
            meter.step(0, trained=number)
    meter.step(0, trained=1e12)
    with pytest.raises(SettingsError, match="trained: 1,000,000,000,000 were reported for step 0"):
        meter.metrics()


@pytest.mark.parametrize("reads_after", [False, True])
def test_micro_batches_of_a_step_are_one_step(tmp_path, store, reads_after):
    docs = make_documents(3)
    masked = write_store(tmp_path, docs, trained=[[n % 3 == 0 for n in range(len(d))] for d in docs])
    for data in (store, masked):
        loader = build_loader(data, world_size=1)
        full_meter, part_meter = Meter(loader), Meter(loader)
        trained_meter = Meter(loader)
        for batch in map(loader.batch, range(3)):
            full_meter.step(batch)
            for part in batch.split(3):
                part_meter.step(part)
                trained_meter.step(batch.step, trained=int((part["labels"] >= 0).sum()))
        first, second, third = (meter.metrics() for meter in (full_meter, part_meter, trained_meter))
        assert (second["perf/steps"], second["perf/tokens"]) == (3, first["perf/tokens"])
        shares = [name for name in first if name.endswith("trained_share")]
        assert [first[name] for name in shares] == [second[name] for name in shares]
        assert third["perf/trained_share"] == pytest.approx(first[shares[0]])
        if reads_after:
            # Further parts of a reported step are not counted.
            part_meter.step(2)
            assert "perf/tokens" not in part_meter.metrics()


@pytest.mark.parametrize("align", [1, 4])
def test_a_rank_without_a_span_computes_padding(tmp_path, align):
    store = write_store(tmp_path, [[1] * 60] * 7)
    sizes = {"form": "varlen", "uneven": "pad", "align": align, "world_size": 4, "steps": None}
    ranks = [build_loader(store, rank, epochs=1, global_batch_size=4, **sizes) for rank in range(4)]
    steps = len(ranks[0])
    batches = [loader.batch(step) for loader in ranks for step in range(steps)]
    assert any((batch["labels"] < 0).all() for batch in batches)
    slots = sum(batch["input_ids"].size for batch in batches)
    share = run_meter(ranks[0], steps).metrics()["perf/padding_share"]
    assert share == pytest.approx(1 - 7 * 60 / slots)


def test_masks_are_counted_in_this_ranks_labels_or_given(tmp_path):
    docs = make_documents(2)
    store = write_store(tmp_path, docs, trained=[[n % 3 == 0 for n in range(len(d))] for d in docs])
    loader = build_loader(store, world_size=2)
    meter = Meter(loader)
    batches = [loader.batch(step) for step in range(3)]
    for batch in batches:
        meter.step(batch)
    metrics = meter.metrics()
    trained = sum(int((batch["labels"] >= 0).sum()) for batch in batches)
    tokens = sum(loader.tokens(step) for step in range(3))
    assert "perf/trained_share" not in metrics
    assert metrics["rank/trained_share"] == pytest.approx(trained / tokens)
    for step in range(3):
        meter.step(step, trained=loader.trained_tokens(step))
    metrics = meter.metrics()
    all_trained = sum(loader.trained_tokens(step) for step in range(3))
    assert metrics["perf/trained_share"] == pytest.approx(all_trained / metrics["perf/tokens"])


@pytest.fixture
def clock(monkeypatch):
    """Clock of the meters, which only the test moves on: ``clock.now`` in seconds."""
    clock = SimpleNamespace(now=10.0, perf_counter=lambda: clock.now, monotonic=lambda: clock.now)
    monkeypatch.setattr(metrics_module, "time", clock)
    return clock


def test_the_wait_for_data_is_measured_and_what_follows_a_step_is_not(store, clock):
    def iter_slowly(loader):
        for batch in loader:
            clock.now += 3
            yield batch

    loader = build_loader(store, steps=4)
    meter = Meter(loader)
    for _ in meter.over(iter_slowly(loader)):
        clock.now += 1
    metrics = meter.metrics()
    assert (metrics["perf/steps"], metrics["perf/seconds"]) == (4, 4 * (3 + 1))
    assert metrics["perf/data_wait_share"] == 3 / 4
    for batch in meter.over():
        clock.now += 1
        meter.step(batch)
        clock.now += 100
    assert meter.metrics()["perf/seconds"] == 4
    # The wait is measured only by over().
    assert "perf/data_wait_share" not in run_meter(loader, 2).metrics()


def test_what_came_before_the_clock_began_is_no_part_of_a_step(store, clock):
    meter = Meter(build_loader(store))
    clock.now += 10
    meter.begin()
    clock.now += 3
    meter.step(0)
    assert meter.metrics()["perf/seconds"] == 3.0


def test_metrics_read_after_many_steps_cover_the_last_ones(store, monkeypatch):
    monkeypatch.setattr(metrics_module, "_MAX_ROWS", 30)
    meter = run_meter(build_loader(store), 9)
    metrics = meter.metrics()
    assert (metrics["perf/steps"], metrics["data/step"]) == (2, 9)
    rows = build_loader(store).plan.rows(7 * 12, 9 * 12)
    assert metrics["perf/tokens"] == rows.lengths.sum()


def test_a_batch_that_does_not_know_its_step(store):
    loader = build_loader(store)
    with pytest.raises(PlanError, match=r"meter\.step\(number\)"):
        Meter(loader).step(Batch(dict(loader.batch(0))))


def test_a_stream_reports_this_rank_alone(tmp_path):
    for name in ("a", "b"):
        lines = [f"{n} times {n} is {n * n}." for n in range(400)]
        (tmp_path / f"{name}.txt").write_text("\n\n".join(lines))
    stream = batchloom.stream(
        [tmp_path], tokenizer="bytes", seq_len=64, global_batch_size=4, steps=3, lanes=2, workers=0,
    )  # fmt: skip
    loader = batchloom.Loader(stream, rank=1, world_size=2, output="numpy")
    meter = Meter(loader)
    trained = sum(int((batch["labels"] >= 0).sum()) for batch in meter.over())
    metrics = meter.metrics()
    assert {name for name in metrics if name.startswith("perf/")} == {"perf/data_wait_share"}
    assert metrics["rank/trained_share"] == pytest.approx(trained / metrics["rank/tokens"])
    assert metrics["rank/packing_efficiency"] == metrics["rank/tokens"] / (3 * 2 * 64)
    assert (metrics["data/step"], metrics["data/position"]) == (3, 12)
    declared = {metric.name for metric in METRICS}
    assert set(metrics) <= declared
    assert {name for name in declared if name.startswith("rank/")} <= set(metrics)


def test_the_metrics_of_a_mixture_are_the_declared_ones(mixture):
    meter = Meter(build_loader(mixture), cost=transformer_cost(parameters=1000), peak_flops=1e12)
    for _ in meter.over():
        pass
    metrics = {re.sub("/(web|code)/", "/NAME/", name) for name in meter.metrics()}
    others = {metric.name for metric in METRICS if metric.scope == "ranks heard" or metric.name.startswith("rank/")}
    assert metrics == {metric.name for metric in METRICS} - others - {"data/banned"}


def test_synthetic_data_is_marked_and_counted_for_all_ranks():
    store = batchloom.open_store("dummy:documents=50,seed=3")
    metrics = run_meter(build_loader(store, world_size=2, balance=False), 2).metrics()
    assert metrics["data/synthetic"] == 1
    rank = build_loader(store, world_size=2)
    assert metrics["perf/tokens"] == 2 * sum(rank.tokens(step) for step in range(2))


def test_mesh_peers_are_devices_and_not_ranks(store):
    mesh = Mesh(tensor=2, context=2)
    metrics = run_meter(build_loader(store, world_size=8, mesh=mesh, labels="shifted"), 2).metrics()
    alone = run_meter(build_loader(store, world_size=2), 2).metrics()
    assert metrics["perf/global_seq_len_avg"] == alone["perf/global_seq_len_avg"]
    assert metrics["perf/tokens_per_s_per_gpu"] == metrics["perf/tokens_per_s"] / 8


def test_a_rank_that_says_nothing_is_not_waited_for():
    torch = pytest.importorskip("torch.distributed")
    store = torch.HashStore()
    first, second = MetricsExchange(store, 0, 3, "run"), MetricsExchange(store, 1, 3, "run")
    assert first.get_rank_metrics() == {}
    second.publish({"step": 7.0})
    assert wait_until(first.get_rank_metrics, "metrics of rank 1") == {1: {"step": 7.0}}
    second.publish({"step": 8.0})
    wait_until(lambda: first.get_rank_metrics()[1]["step"] == 8.0, "the next metrics of rank 1")


def test_a_store_whose_host_hangs_or_is_missing_blocks_nothing(caplog):
    torch = pytest.importorskip("torch.distributed")
    with start_processes("-m", "batches.store_host") as (host,):
        port = wait_until(lambda: host.out.read_text().strip(), "the port of the store")
        store = torch.TCPStore("127.0.0.1", int(port), is_master=False)
        exchange = MetricsExchange(store, 0, 2, "run")
        exchange.publish({"step": 1.0})
        assert wait_until(exchange.get_rank_metrics, "metrics of this rank") == {0: {"step": 1.0}}
        host.send_signal(signal.SIGSTOP)
        begin = time.monotonic()
        for step in range(100):
            exchange.publish({"step": float(step)})
            assert exchange.get_rank_metrics() == {0: {"step": 1.0}}
        # The client of the store would wait for five minutes.
        assert time.monotonic() - begin < LIMIT_S
    wait_until(lambda: "Metrics of other ranks are no longer read" in caplog.text, "the warning")
    exchange.publish({"step": 2.0})
    # Earlier metrics are no longer returned.
    wait_until(lambda: not exchange.get_rank_metrics(), "earlier metrics are gone")
    # Requests do not pile up although nothing answers them.
    wait_until(exchange._requests.empty, "requests are dropped")


def test_ranks_that_read_metrics_at_other_steps_or_never_do_not_block(tmp_path, store):
    """Rank 0 waits for metrics of rank 1, which then dies; rank 0 goes on."""
    pytest.importorskip("torch.distributed")
    printed = run_two_ranks(WORKER, store.path, tmp_path)
    assert "heard 2 ranks, the slowest of them rank 1" in printed
    assert "went on after rank 1 had ended" in printed
