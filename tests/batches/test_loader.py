import json
import os
import pickle
import threading
import time
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import batchloom
from batchloom import InputError, PlanError, SettingsError, StateError, StoreError
from batchloom.batches import BatchSpec, find_world
from batchloom.batches.loading import announcements, pool_tables as tables_module
from batchloom.batches.producer_thread import PrefetchIterator
from batchloom.testing import write_store
from processes import run_python
from tiers import examples
from waiting import wait_until

KEYS = ("input_ids", "labels", "position_ids")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    rng = np.random.default_rng(0)
    documents = [[*rng.integers(0, 256, rng.integers(1, 90)).tolist(), 256] for _ in range(400)]
    return write_store(tmp_path_factory.mktemp("store"), documents, documents_per_shard=150)


def make_loader(store, **options):
    return batchloom.Loader(
        store,
        **{
            "seq_len": 64,
            "global_batch_size": 12,
            "output": "numpy",
            "rank": 0,
            "world_size": 1,
            **options,
        },
    )


def have_same_arrays(first, second):
    return all(np.array_equal(first[key], second[key]) for key in KEYS)


def test_the_length_is_exact_and_every_step_can_be_had_alone(store):
    loader = make_loader(store, epochs=2)
    batches = list(loader)
    assert len(batches) == len(loader)
    assert [batch.step for batch in batches] == list(range(len(loader)))
    assert all(have_same_arrays(loader[step], batch) for step, batch in enumerate(batches))
    assert have_same_arrays(loader[-1], batches[-1])
    for step in (len(loader), -len(loader) - 1):
        with pytest.raises(IndexError):
            loader[step]


def test_every_iteration_starts_over(store):
    loader = make_loader(store)
    first = next(iter(loader))
    assert have_same_arrays(first, next(iter(loader)))
    assert len(list(loader)) == len(list(loader))


@given(data=st.data(), prefetch=st.sampled_from([0, 1, 4]))
@settings(max_examples=examples(25))
def test_resuming_at_any_step_equals_no_interruption(store, data, prefetch):
    full_run = list(make_loader(store, epochs=2))
    stop = data.draw(st.integers(0, len(full_run)))
    loader = make_loader(store, epochs=2, prefetch=prefetch)
    iterator = iter(loader)
    for _ in range(stop):
        next(iterator)
    state = json.loads(json.dumps(loader.state_dict()))
    iterator.close()
    worlds = [1, 2, 3, 4, 6, 12]
    world = data.draw(st.sampled_from(worlds))
    parts = []
    for rank in range(world):
        resumed = make_loader(store, epochs=2, rank=rank, world_size=world, prefetch=prefetch)
        resumed.load_state_dict(state)
        parts.append(list(resumed))
    assert {len(part) for part in parts} == {len(full_run) - stop}
    for offset, expected in enumerate(full_run[stop:]):
        for key in KEYS:
            together = np.concatenate([part[offset][key] for part in parts])
            assert np.array_equal(together, expected[key])


def test_the_state_is_one_small_json_value(store):
    loader = make_loader(store)
    assert len(json.dumps(loader.state_dict())) < 1500
    assert loader.state_dict()["position"] == 0


def test_a_state_of_another_loader_is_refused_by_field(store, tmp_path):
    state = make_loader(store).state_dict()
    with pytest.raises(StateError, match="spec.seq_len was 64 and is 32"):
        make_loader(store, seq_len=32).load_state_dict(state)
    with pytest.raises(StateError, match="spec.seed was 0 and is 1"):
        make_loader(store, seed=1).load_state_dict(state)
    with pytest.raises(StateError, match=r"sources.data.store was"):
        make_loader(write_store(tmp_path, [[1, 2, 3]])).load_state_dict(state)
    with pytest.raises(StateError, match="inside step 0"):
        make_loader(store).load_state_dict(make_loader(store).plan.state(5))


def test_another_tokenizer_is_another_store(tmp_path, store):
    from batchloom.tokens import train_tokenizer

    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(train_tokenizer(["ab ab ab"], 258).state()["tokenizer"]))
    first = write_store(tmp_path / "a", [[1, 2, 3]])
    second = write_store(tmp_path / "b", [[1, 2, 3]], tokenizer=str(path))
    with pytest.raises(StateError, match="store was"):
        make_loader(second).load_state_dict(make_loader(first).state_dict())


def test_more_epochs_continue_the_same_run(store):
    short, long = make_loader(store, epochs=1), make_loader(store, epochs=3)
    long.load_state_dict(short.state_dict())
    assert short.plan.fingerprint == long.plan.fingerprint
    batches = list(short)
    assert all(have_same_arrays(long[step], batch) for step, batch in enumerate(batches[:-1]))
    # The short run filled its last step with empty sequences; the longer run repeats that step.
    resumed = make_loader(store, epochs=3)
    resumed.load_state_dict(short.state_dict())
    remaining = list(resumed)
    assert remaining[0].step == len(batches) - 1
    assert len(remaining) == len(long) - len(batches) + 1


def test_a_look_at_the_first_batch_moves_nothing(store):
    loader = make_loader(store, epochs=2)
    running = iter(loader)
    for _ in range(5):
        next(running)
    assert next(iter(loader)).step == 0
    assert loader.state_dict()["position"] == 5 * 12
    assert next(running).step == 5
    resumed = make_loader(store, epochs=2)
    resumed.load_state_dict(loader.state_dict())
    assert next(iter(resumed)).step == 6
    assert next(iter(resumed)).step == 6
    assert [batch.step for batch in resumed][:2] == [6, 7]
    assert next(iter(resumed)).step == 0


def test_frameworks_may_rebuild_a_batch(store):
    import torch
    from torch.distributed.utils import _recursive_to

    batch = make_loader(store, output="torch")[0]
    rebuilt = type(batch)({key: value + 0 for key, value in batch.items()})
    assert set(rebuilt) == set(batch)
    moved = _recursive_to((batch,), torch.device("cpu"), use_side_stream_for_tensor_copies=False)
    assert set(moved[0][0]) == set(batch)


def test_a_forked_child_has_locks_of_its_own(store):
    loader = make_loader(store)
    iterator = iter(loader)
    next(iterator)
    loader.plan.orders.lock.acquire()
    try:
        child = os.fork()
        if not child:
            os._exit(0 if loader.batch(3)["input_ids"].shape == (12, 64) else 1)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        loader.plan.orders.lock.release()
    iterator.close()


def test_a_store_opened_by_a_relative_path_survives_a_change_of_folder(tmp_path, monkeypatch):
    write_store(tmp_path / "s", [[1, 2, 3]])
    monkeypatch.chdir(tmp_path)
    opened = batchloom.open_store("s")
    monkeypatch.chdir("/")
    assert opened[0].ids.tolist() == [1, 2, 3]


def test_a_ready_plan(store):
    plan = batchloom.Plan(store, batchloom.PlanSpec(seq_len=64, global_batch_size=12))
    loader = batchloom.Loader(plan, output="numpy", rank=0, world_size=1)
    assert have_same_arrays(loader[3], make_loader(store)[3])
    with pytest.raises(SettingsError, match="seed: belongs to the plan"):
        batchloom.Loader(plan, seed=3, output="numpy")


def test_torch_tensors_share_the_arrays_and_the_batch_names_its_source(store):
    import torch

    batch = make_loader(store, output="torch")[0]
    assert all(isinstance(batch[key], torch.Tensor) and batch[key].dtype == torch.int64 for key in KEYS)
    assert batch.origin.startswith("source=real ")
    assert set(batch) == set(KEYS)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"seq_len": None}, "seq_len: missing"),
        (
            {"labels": "shift"},
            "labels: 'shift' is none of aligned, shifted; did you mean 'shifted'",
        ),
        ({"output": "jax"}, "output: 'jax' is none of"),
        ({"rank": 1, "world_size": None}, "go together"),
        ({"prefetch": -1}, "prefetch: -1 is not a whole number from 0 to 1024"),
        ({"rank": "0"}, "rank: '0' is not a whole number from 0 to"),
        ({"rank": True, "world_size": 2}, "rank: True is not"),
        ({"world_size": "1"}, "world_size: '1' is not a whole number from 1 to 16777216"),
        ({"world_size": 1.0}, "world_size: 1.0 is not"),
        ({"rank": -1}, "rank: -1 is not"),
        ({"packing": "wrapp"}, "did you mean 'wrap'"),
    ],
)
def test_settings_that_cannot_be(store, options, sentence):
    with pytest.raises(SettingsError, match=sentence):
        make_loader(store, **options)


def test_problems_of_all_groups_are_reported_at_once(store):
    with pytest.raises(SettingsError) as error:
        make_loader(store, packing="wrapp", pool_size=-1, last="fil")
    assert [problem.split(":")[0] for problem in error.value.problems] == [*("pool_size", "packing", "last")]
    with pytest.raises(SettingsError) as error:
        make_loader(store, labels="shift", uneven="pat", micro_batch_size=0)
    assert [problem.split(":")[0] for problem in error.value.problems] == [*("micro_batch_size", "labels", "uneven")]


def test_settings_given_as_a_whole(store):
    plan = batchloom.PlanSpec(seq_len=64, global_batch_size=12, last="drop")
    spec = BatchSpec(rank=1, world_size=2, uneven="pad", output="numpy")
    loader = batchloom.Loader(store, plan, spec)
    assert loader.plan.spec == batchloom.Plan(store, plan).spec
    assert loader.spec == spec
    with pytest.raises(SettingsError) as error:
        batchloom.Loader(store, {"last": "drop"}, "pad")
    assert error.value.problems == (
        "plan: {'last': 'drop'} is not a PlanSpec; give its fields one by one, as last='drop'",
        "batch: 'pad' is not a BatchSpec; give its fields one by one, as uneven='pad'",
    )
    with pytest.raises(SettingsError, match="seed: is a field of the PlanSpec, which was given as plan"):
        batchloom.Loader(store, plan, spec, seed=3)
    with pytest.raises(SettingsError, match="rank: is a field of the BatchSpec, which was given as batch"):
        batchloom.Loader(store, plan, spec, rank=0)
    with pytest.raises(SettingsError, match="plan: belongs to the plan, and a finished plan was given"):
        batchloom.Loader(batchloom.Plan(store, plan), plan)
    with pytest.raises(SettingsError, match=r"media: 4 is not a MediaOptions"):
        make_loader(store, media=4)


def test_settings_of_the_order_are_those_of_its_spec(store):
    plan = {"last": "drop", "pool_size": 16, "block": 4, "lanes": 2, "align": 2}
    loader = make_loader(store, **plan)
    spec = loader.plan.spec
    assert [getattr(spec, field.name) for field in fields(spec)][-6:] == ["drop", 16, 4, 2, 2, 0]
    # The order of the fields in written states.
    assert list(spec.identity_fields()) == [
        *("seq_len", "global_batch_size", "packing", "overlong", "seed", "shuffle", "epochs"),
        *("steps", "last", "pool_size", "block", "lanes", "align", "group_by_length"),
    ]
    ready = batchloom.Plan(store, spec)
    assert ready.fingerprint == loader.plan.fingerprint
    with pytest.raises(SettingsError) as error:
        batchloom.Loader(ready, **plan, output="numpy")
    assert [problem.split(":")[0] for problem in error.value.problems] == [
        *("last", "pool_size", "block", "lanes", "align")
    ]


def test_ranks_that_cannot_be(store):
    with pytest.raises(PlanError, match="cannot be divided evenly among 5 ranks"):
        make_loader(store, rank=0, world_size=5)
    with pytest.raises(PlanError, match="rank 3 of world_size 3 does not exist"):
        make_loader(store, rank=3, world_size=3)
    with pytest.raises(InputError, match="open a path with open_store"):
        make_loader("some/path")


def test_numbers_of_numpy_are_numbers(store):
    counts = {"seq_len": 64, "global_batch_size": 12, "seed": 3, "rank": 1, "world_size": 2}
    loader = make_loader(store, **{name: np.int64(value) for name, value in counts.items()})
    assert have_same_arrays(loader[2], make_loader(store, **counts)[2])
    assert loader.plan.fingerprint == make_loader(store, **counts).plan.fingerprint
    assert json.dumps(loader.state_dict())
    assert (loader.spec.rank, loader.spec.world_size) == (1, 2)


def test_a_batch_that_cannot_be_counted_is_refused(store):
    with pytest.raises(PlanError, match="holds 2147483648, more than 2147483647: lower"):
        make_loader(store, seq_len=1 << 20, global_batch_size=1 << 11)
    make_loader(store, seq_len=1 << 20, global_batch_size=1 << 11, world_size=2)


@pytest.mark.parametrize(
    ("overlong", "sentence"),
    [
        ("drop", "overlong='drop' leaves 2 of 4 documents and 19 tokens out of every epoch because they are longer than seq_len 8"),
        ("truncate", "overlong='truncate' leaves 0 of 4 documents and 3 tokens out of every epoch"),
    ],
)  # fmt: skip
def test_documents_left_out_are_logged_once_by_rank_0(tmp_path, caplog, overlong, sentence):
    store = write_store(tmp_path, [[1] * n for n in (3, 9, 10, 8)])
    loader = make_loader(store, seq_len=8, global_batch_size=2, overlong=overlong)
    iterator = iter(loader)
    next(iterator)
    assert sentence in caplog.text
    list(loader)
    list(make_loader(store, seq_len=8, global_batch_size=2, overlong=overlong, rank=1, world_size=2))
    list(make_loader(store, seq_len=16, global_batch_size=2, overlong=overlong))
    list(make_loader(store, seq_len=8, global_batch_size=2))
    assert len(caplog.records) == 1


def test_what_a_large_store_leaves_out_is_counted_after_the_first_batch(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(announcements, "_MAX_INLINE_COUNT", 3)
    store = write_store(tmp_path, [[1] * n for n in (3, 9, 10, 8)])
    iterator = iter(make_loader(store, seq_len=8, global_batch_size=1, overlong="drop"))
    next(iterator)
    first = "leaves out documents longer than seq_len 8; plan.left_out() counts them"
    assert first in caplog.records[0].getMessage()
    next(iterator)
    wait_until(lambda: len(caplog.records) >= 2, "the count of what is left out")
    assert "leaves 2 of 4 documents and 19 tokens" in caplog.records[1].getMessage()


def test_inspect_shows_what_would_be_left_out(tmp_path):
    write_store(tmp_path, [[1] * n for n in (3, 9, 10, 8)])
    left_out = batchloom.inspect(tmp_path, seq_len=8).left_out
    assert (left_out["drop"].documents, left_out["drop"].tokens) == (2, 19)
    assert (left_out["truncate"].documents, left_out["truncate"].tokens) == (0, 3)
    for seq_len in (0, 2**24 + 1, "8"):
        with pytest.raises(SettingsError, match="seq_len: .* is not a whole number from 1 to"):
            batchloom.inspect(tmp_path, seq_len=seq_len)


def wait_for_producers():
    wait_until(lambda: not [t for t in threading.enumerate() if t.name == "batchloom-producer"], "producer threads end")


class BuildError(RuntimeError):
    pass


def test_errors_arrive_in_order_and_the_thread_ends():
    def build(number):
        if number == 3:
            raise BuildError("three")
        return number

    items = []
    with pytest.raises(BuildError, match="three"):
        for item in PrefetchIterator(build, int, 0, 2):
            items.append(item)  # noqa: PERF402 - items before the error count
    assert items == [0, 1, 2]
    wait_for_producers()


def test_the_producer_stays_a_bounded_number_ahead_and_stops_when_left():
    built = []
    iterator = iter(PrefetchIterator(lambda n: built.append(n) or n, int, 0, 3))
    assert next(iterator) == 0
    wait_until(lambda: len(built) >= 3, "items made ahead")
    # A thread without a bound would go on.
    time.sleep(0.05)
    assert built in ([0, 1, 2, 3], [0, 1, 2])
    iterator.close()
    wait_for_producers()


def test_items_come_in_order_from_both_threads():
    def build_slowly(number):
        time.sleep(0.0002 * (number % 3))
        return number if number < 500 else None

    items = []
    for item in PrefetchIterator(build_slowly, int, 0, 4):
        if item % 7 == 0:
            time.sleep(0.001)
        items.append(item)
    assert items == list(range(500))


def test_a_store_damaged_on_the_way_stops_the_run(tmp_path):
    write_store(tmp_path, [[n, 256] for n in range(100)], documents_per_shard=10)
    loader = make_loader(batchloom.open_store(tmp_path), seq_len=2, global_batch_size=1)
    (tmp_path / "train" / "shard_00004.bin").write_bytes(b"")
    with pytest.raises(StoreError, match="shard_00004.bin has 0 bytes"):
        list(loader)


@pytest.mark.parametrize(
    ("variables", "world"),
    [
        ({}, (0, 1)),
        ({"RANK": "3", "WORLD_SIZE": "8"}, (3, 8)),
        ({"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4"}, (2, 4)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, (0, 1)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, (1, 2)),
        ({"PMI_RANK": "5", "PMI_SIZE": "6"}, (5, 6)),
        ({"RANK": "1", "WORLD_SIZE": "2", "PMI_RANK": "5", "PMI_SIZE": "6"}, (1, 2)),
    ],
)
def test_the_rank_comes_from_the_launcher(monkeypatch, variables, world):
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "PMI_")) or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert find_world() == world


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "1"},
        {"WORLD_SIZE": "2"},
        {"RANK": "x", "WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "1.0"},
        {"RANK": "-1", "WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "9" * 5000},
    ],
)
def test_half_a_rank_is_refused(monkeypatch, variables):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match="which are not a rank and a world size; set both to numbers"):
        find_world()


def test_torch_missing_is_one_sentence(store):
    code = "import batchloom, sys; batchloom.Loader(batchloom.open_store(sys.argv[1]), seq_len=64, global_batch_size=4)"
    result = run_python(code, store.path, missing=["torch"])
    assert result.returncode == 1
    assert "pip install 'batchloom[train]', or give output='numpy'" in result.stderr.splitlines()[-1]


def test_a_step_that_is_none(store):
    loader = make_loader(store)
    methods = (loader.trained_tokens, loader.tokens, loader.imbalance, loader.show)
    for read_step in (loader.__getitem__, *methods):
        match = f"There is no step {len(loader)}: .*, numbered from 0 to {len(loader) - 1}"
        with pytest.raises(IndexError, match=match):
            read_step(len(loader))
    assert loader.batch(len(loader)).step == len(loader)
    with pytest.raises(TypeError, match="must be a whole number, not 2.5"):
        loader[2.5]


def test_small_plans_start_no_process(store, monkeypatch):
    monkeypatch.setattr(
        tables_module,
        "start_counting_process",
        lambda *_: pytest.fail("a process for 400 documents"),
    )
    assert list(make_loader(store))


def test_rows_grouped_by_length_are_the_same_on_any_ranks(tmp_path):
    rng = np.random.default_rng(3)
    store = write_store(tmp_path / "s", [[65] * n for n in rng.integers(1, 60, 300).tolist()])
    sizes = {"seq_len": 64, "global_batch_size": 8, "packing": "none", "steps": 33}
    options = {**sizes, "group_by_length": 5}

    def make_ranks(world_size, **batch_options):
        return [
            make_loader(store, **options, **batch_options, rank=r, world_size=world_size) for r in range(world_size)
        ]

    (alone,) = make_ranks(1)
    for world_size in (2, 4):
        ranks = make_ranks(world_size)
        for step in range(33):
            ids = np.concatenate([rank[step]["input_ids"] for rank in ranks])
            assert (ids == alone[step]["input_ids"]).all()
    uneven = [rank[7]["labels"] for rank in make_ranks(3, uneven="pad")]
    balanced = [rank[7]["labels"] for rank in make_ranks(2, balance=True)]
    for labels in (uneven, balanced):
        trained = sorted((np.concatenate(labels) != -100).sum(1).tolist())
        expected = sorted((alone[7]["labels"] != -100).sum(1).tolist())
        assert trained[-8:] == expected
        assert not any(trained[:-8])


def test_rows_are_grouped_without_a_number(tmp_path):
    rng = np.random.default_rng(3)
    store = write_store(tmp_path / "s", [[65] * n for n in rng.integers(1, 60, 900).tolist()])
    sizes = {"seq_len": 64, "global_batch_size": 8, "packing": "none", "epochs": 2}

    def make_grouped(value):
        return make_loader(store, **sizes, group_by_length=value)

    loader, fifty = make_grouped(True), make_grouped(50)
    assert loader.plan.spec.group_by_length == 50
    assert loader.plan.fingerprint == fifty.plan.fingerprint
    assert make_grouped(False).plan.fingerprint == make_loader(store, **sizes).plan.fingerprint
    assert make_grouped(1).plan.spec.group_by_length == 1
    state = loader.state_at(61)
    resumed = make_grouped(True)
    resumed.load_state_dict(json.loads(json.dumps(state)))
    assert (next(iter(resumed))["input_ids"] == fifty[61]["input_ids"]).all()
    with pytest.raises(SettingsError, match="rows packed by 'best_fit' are full.*packing='none'"):
        make_loader(store, **{**sizes, "packing": "best_fit"}, group_by_length=True)
    with pytest.raises(SettingsError, match="group_by_length: belongs to the plan"):
        batchloom.Loader(loader.plan, group_by_length=True)


def test_an_edit_of_grouped_rows_begins_at_the_next_window(tmp_path):
    store = write_store(tmp_path / "s", [[65] * n for n in range(1, 60)])
    sizes = {"seq_len": 64, "global_batch_size": 4, "packing": "none", "steps": 30}
    loader = make_loader(store, **sizes, group_by_length=5, prefetch=0)
    batches = iter(loader)
    next(batches)
    assert loader.first_editable_step == 5
    with pytest.raises(PlanError, match="step 7 is inside a window of 5 steps.*step=10"):
        loader.edit(batchloom.Edit(step=7, seq_len=32))
    loader.edit(batchloom.Edit(step=5, seq_len=32))
    assert [batch["input_ids"].shape[1] for batch in batches] == [64] * 4 + [32] * 25


def test_arrays_as_attributes_and_a_state_of_none(tmp_path):
    loader = batchloom.Loader(write_store(tmp_path / "s", [[1, 256]]), seq_len=8, global_batch_size=1)
    batch = next(iter(loader))
    with pytest.raises(KeyError, match=r"'input_id' is no key of a batch; it has input_ids, labels, position_ids"):
        batch["input_id"]
    assert batch.get("input_id") is None
    with pytest.raises(AttributeError, match=r"write batch\['input_ids'\]"):
        batch.input_ids  # noqa: B018 - raises
    assert pickle.loads(pickle.dumps(batch)).step == 0
    with pytest.raises(StateError, match=r"None is not a loader's state: give the dict that state_dict\(\) returned"):
        loader.load_state_dict(None)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("batch_size", "give global_batch_size, the rows of a step over all ranks"),
        ("sequence_length", "give seq_len"),
        ("num_workers", "give prefetch, the number of batches that are made ahead"),
        ("drop_last", "give last='drop'"),
        ("workers", r"give media=MediaOptions\(workers=\.\.\.\)"),
        ("epoch", "did you mean 'epochs'"),
        ("split", r"give it open_store\(path, split\)"),
        ("tokenizer", "leave it out: the store has it"),
        ("colour", r"$"),
    ],
)
def test_arguments_of_other_libraries_are_refused_with_the_one_that_is_meant(tmp_path, name, meant):
    store = write_store(tmp_path / "s", [[1, 256]])
    with pytest.raises(TypeError, match=rf"Loader\(\) has no argument '{name}'.*{meant}"):
        batchloom.Loader(store, seq_len=8, global_batch_size=1, **{name: 1})
