import itertools
import json
import os
import stat
import subprocess
import sys

import numpy as np
import pytest

import batchloom
from batchloom import StoreError
from batchloom.batches.loading import (
    load_table,
    lock_table,
    make_table_name,
    pool_tables as tables_module,
    wait_for_table,
    write_table,
)
from batchloom.testing import append_documents, write_store
from waiting import wait_until

SPEC = {
    "seq_len": 16,
    "global_batch_size": 4,
    "pool_size": 8,
    "rank": 0,
    "world_size": 1,
    "output": "numpy",
}


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    return write_store(tmp_path / "s", [[1] * int(n) for n in rng.integers(1, 30, 400)])


def find_tables(folder):
    return sorted(folder.rglob("*.counts"))


def test_a_long_plan_is_served_at_once_and_counted_in_another_process(store):
    loader = batchloom.Loader(store, **SPEC)
    assert loader.plan.orders.pools.count == 50
    iterator = iter(loader)
    next(iterator)
    assert not loader.plan.orders.is_counted
    next(iterator)
    wait_until(lambda: find_tables(store.path), "the table of counts")
    assert len(find_tables(store.path)) == 1
    iterator.close()
    reopened = batchloom.Loader(store, **SPEC)
    assert reopened.plan.orders.is_counted
    assert len(reopened) == len(list(reopened)) == len(loader)


def test_the_other_process_counts_the_open_generation(store):
    loader = batchloom.Loader(store, **SPEC)
    append_documents(store.path, [[1] * 9] * 30)
    iterator = iter(loader)
    next(iterator)
    next(iterator)
    wait_until(lambda: find_tables(store.path), "the table of counts")
    iterator.close()
    assert [path.name for path in find_tables(store.path)] == [make_table_name(loader.plan.orders.order(0))]
    grown = batchloom.Loader(batchloom.open_store(store.path), **SPEC)
    assert not grown.plan.orders.is_counted
    assert len(grown) == len(list(grown)) > len(loader)


def test_the_table_is_the_plans_own_counts(store):
    counted = batchloom.Loader(store, **SPEC).plan
    path = write_table(counted.orders.order(0))
    assert path.parent == store.path / "plans"
    adopted = batchloom.Loader(store, **SPEC).plan
    assert load_table(adopted.orders.order(0))
    assert [adopted.run.locate(p) for p in range(200)] == [counted.run.locate(p) for p in range(200)]
    assert (
        make_table_name(batchloom.Loader(store, **SPEC | {"global_batch_size": 8, "epochs": 3}).plan.orders.order(0))
        == path.name
    )
    assert make_table_name(batchloom.Loader(store, **SPEC | {"seed": 1}).plan.orders.order(0)) != path.name


def test_a_distant_step_waits_for_the_table_and_is_right(store):
    loader = batchloom.Loader(store, **SPEC)
    last = loader[-1]
    assert np.array_equal(list(batchloom.Loader(store, **SPEC))[-1]["input_ids"], last["input_ids"])


def test_a_read_only_store_uses_the_users_cache(store, tmp_path, monkeypatch):
    plan = batchloom.Loader(store, **SPEC).plan
    blocked = tmp_path / "file"
    blocked.write_text("")
    folders = [blocked / "plans", tmp_path / "cache" / "batchloom" / "plans"]
    monkeypatch.setattr(tables_module, "list_table_folders", lambda _store: folders)
    path = write_table(plan.orders.order(0))
    assert path.parent == tmp_path / "cache" / "batchloom" / "plans"
    fresh = batchloom.Loader(store, **SPEC).plan
    assert load_table(fresh.orders.order(0))
    del folders[1]
    with pytest.raises(StoreError, match="set XDG_CACHE_HOME"):
        write_table(plan.orders.order(0))


def test_a_damaged_table_is_counted_again(store, caplog):
    plan = batchloom.Loader(store, **SPEC).plan
    path = write_table(plan.orders.order(0))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    reopened = batchloom.Loader(store, **SPEC)
    assert not reopened.plan.orders.is_counted
    assert "is damaged; it is counted again" in caplog.text
    assert len(reopened) == len(list(reopened))
    assert load_table(batchloom.Loader(store, **SPEC).plan.orders.order(0))


def test_one_process_counts_and_the_lock_dies_with_it(store):
    plan = batchloom.Loader(store, **SPEC).plan
    code = (
        "import sys, time, batchloom;"
        "from batchloom.batches.loading.pool_tables import *;"
        f"p = batchloom.Loader(batchloom.open_store({str(store.path)!r}), **{SPEC!r}).plan;"
        "c = lock_table(p.orders.order(0)); print(c.__enter__(), flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline().strip() == "True"
        with lock_table(plan.orders.order(0)) as acquired:
            assert not acquired
    finally:
        holder.kill()
        holder.communicate()
    wait_for_table(plan.orders.order(0))
    assert plan.orders.is_counted


def test_a_store_without_write_permission_is_counted(store, tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    store.path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        assert len(batchloom.Loader(store, **SPEC)) > 0
        assert find_tables(tmp_path / "cache")
    finally:
        store.path.chmod(stat.S_IRWXU)


@pytest.mark.parametrize(
    ("variables", "counters"),
    [({}, 1), ({"LOCAL_RANK": "0"}, 1), ({"LOCAL_RANK": "1"}, 0), ({"SLURM_LOCALID": "3"}, 0)],
)
def test_one_process_of_a_node_starts_the_counter(store, monkeypatch, variables, counters):
    started = []
    monkeypatch.setattr(tables_module, "start_counting_process", lambda *request: started.append(request))
    for name in ("LOCAL_RANK", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    iterator = iter(batchloom.Loader(store, **SPEC))
    next(iterator)
    next(iterator)
    iterator.close()
    assert len(started) == counters


def test_a_table_is_replaced_as_a_whole(store):
    """Readers of the old table can go on reading it."""
    plan = batchloom.Loader(store, **SPEC).plan
    path = write_table(plan.orders.order(0))
    with path.open("rb") as old:
        write_table(plan.orders.order(0))
        assert os.fstat(old.fileno()).st_ino != path.stat().st_ino
        assert old.read() == path.read_bytes()
    assert os.listdir(path.parent) == [path.name]


def test_a_run_over_many_pools_goes_on_with_any_number_of_ranks(store):
    spec = {**SPEC, "global_batch_size": 12, "epochs": 2}
    full_run = list(batchloom.Loader(store, **spec))
    step, state = 0, None
    for world, steps in ((1, 7), (3, 13), (2, 20), (12, 9), (4, 1000)):
        loaders = [batchloom.Loader(store, **{**spec, "rank": rank, "world_size": world}) for rank in range(world)]
        for loader in loaders:
            if state:
                loader.load_state_dict(state)
        for parts in itertools.islice(zip(*loaders, strict=True), steps):
            for key, expected in full_run[step].items():
                assert np.array_equal(np.concatenate([part[key] for part in parts]), expected)
            step += 1
        state = json.loads(json.dumps(loaders[-1].state_dict()))
    assert step == len(full_run)
    assert step > 60
