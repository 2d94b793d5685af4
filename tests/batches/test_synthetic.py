"""Loaders over synthetic data."""

import logging
import pickle

import numpy as np
import pytest

import batchloom
from batchloom import StateError
from batchloom.testing import write_store
from waiting import wait_until

SETTINGS = "documents=300,vocab=90,lengths=2-50,seed=4"
GOLDEN_FIRST = [[83, 69, 32, 19, 86, 17], [37, 89, 89, 89, 89, 89], [16, 4, 6, 78, 75, 23]]
KEYS = ("input_ids", "labels", "position_ids")


def build_loader(name="distributed_dummy", rank=0, world_size=1, **options):
    sizes = {"seq_len": 64, "global_batch_size": 12, "output": "numpy", "epochs": 2}
    store = batchloom.open_store(f"{name}:{SETTINGS}")
    return batchloom.Loader(store, rank=rank, world_size=world_size, **{**sizes, **options})


def have_same_arrays(first, second, keys=KEYS):
    return all(np.array_equal(first[key], second[key]) for key in keys)


def list_documents(batch):
    """Return the documents of a batch as tuples of ids, cut where positions restart."""
    ids, positions = batch["input_ids"].ravel(), batch["position_ids"].ravel()
    documents = np.split(ids, np.flatnonzero(positions == 0)[1:])
    return [tuple(document.tolist()) for document in documents if len(document) > 1]


def test_the_first_batch_is_pinned():
    batch = build_loader(packing="none", shuffle=False)[0]
    assert batch["input_ids"][:3, :6].tolist() == GOLDEN_FIRST


@pytest.mark.parametrize("kind", ["random", "text"])
def test_every_document_is_served_once_an_epoch_by_all_ranks_together(kind):
    store = batchloom.open_store(f"distributed_dummy:{SETTINGS},kind={kind}")
    expected = sorted(tuple(store[n].ids.tolist()) for n in range(len(store)))
    options = {"seq_len": 64, "global_batch_size": 12, "output": "numpy", "world_size": 3}
    ranks = [batchloom.Loader(store, rank=rank, **options) for rank in range(3)]
    shares = [[d for batch in loader for d in list_documents(batch)] for loader in ranks]
    padding = (store.end_id,) * 2
    served = sorted(d for share in shares for d in share if d[:2] != padding)
    assert served == [d for d in expected if d[:2] != padding]


def test_a_share_for_each_rank_or_the_same_for_all():
    for step in range(3):
        alone = build_loader()[step]["input_ids"]
        shares = [build_loader(rank=rank, world_size=4)[step]["input_ids"] for rank in range(4)]
        assert np.concatenate(shares).tolist() == alone.tolist()
        copies = [build_loader("dummy", rank=rank, world_size=4)[step]["input_ids"] for rank in range(4)]
        assert copies[0].shape == (3, 64)
        assert all((copy == copies[0]).all() for copy in copies)
        assert not (shares[0] == shares[1]).all()
    assert [build_loader("dummy", rank=r, world_size=4).spec.rank for r in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize("form", ["rows", "varlen"])
@pytest.mark.parametrize("name", ["dummy", "distributed_dummy"])
def test_resuming_goes_on_exactly_on_another_number_of_ranks(form, name):
    full_run = list(build_loader(name, form=form))
    assert len(full_run) == len(build_loader(name, form=form))
    first = build_loader(name, form=form)
    for step, batch in zip(range(3), first, strict=False):
        assert have_same_arrays(batch, full_run[step], ("input_ids",))
    state = first.state_dict()
    resumed = build_loader(name, form=form)
    resumed.load_state_dict(state)
    remaining = list(resumed)
    assert [batch.step for batch in remaining] == list(range(3, len(full_run)))
    assert all(have_same_arrays(batch, full_run[batch.step], ("input_ids", "labels")) for batch in remaining)
    rank_1_loader = build_loader(name, rank=1, world_size=2, form=form)
    rank_1_loader.load_state_dict(state)
    assert next(iter(rank_1_loader)).step == 3


def test_a_state_of_other_data_is_refused(tmp_path):
    real = write_store(tmp_path / "s", [[1, 2, 256]] * 300)
    options = {"seq_len": 64, "global_batch_size": 12, "output": "numpy"}
    state = batchloom.Loader(real, **options).state_dict()
    with pytest.raises(StateError, match="store"):
        build_loader(epochs=None).load_state_dict(state)
    with pytest.raises(StateError, match="store"):
        build_loader("dummy").load_state_dict(build_loader("distributed_dummy").state_dict())


def test_every_batch_says_what_it_is(tmp_path):
    batchloom.prepare(f"dummy:{SETTINGS}", out=tmp_path / "s", val_fraction=0.0)
    written = batchloom.open_store(tmp_path / "s")
    sizes = {"seq_len": 64, "global_batch_size": 12, "output": "numpy"}
    for loader in (build_loader("dummy"), build_loader(), batchloom.Loader(written, **sizes)):
        assert all(batch.origin.startswith("source=synthetic ") for batch in loader)
    assert build_loader("dummy").origin.startswith(f"source=synthetic dummy:{SETTINGS},kind=random")
    real = write_store(tmp_path / "r", [[1, 2, 256]])
    assert batchloom.Loader(real, **sizes)[0].origin.startswith("source=real r/train")


def test_every_log_line_says_what_it_is(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO, "batchloom")
    monkeypatch.setattr("batchloom.batches.loading.pool_tables._PROGRESS_SECONDS", -1.0)
    loader = build_loader(overlong="drop", seq_len=32, pool_size=8)
    assert len(loader)
    next(iter(loader))
    assert len(caplog.messages) > 10
    assert all("source=synthetic" in message for message in caplog.messages)
    # There is no store folder, so the table of counts is in the cache.
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_a_large_plan_is_counted_by_another_process_into_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    store = batchloom.open_store("dummy:documents=2000,lengths=2-9")
    options = {
        "seq_len": 64,
        "global_batch_size": 4,
        "output": "numpy",
        "pool_size": 50,
    }
    loader = batchloom.Loader(store, rank=0, world_size=1, **options)
    batches = iter(loader)
    next(batches)
    wait_until(lambda: list(tmp_path.rglob("*.counts")), "the table of counts")
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
    assert len(list(tmp_path.rglob("*.counts"))) == 1
    assert len(list(batches)) == len(loader) - 1


def test_it_crosses_processes():
    loader = build_loader("dummy")
    plan = pickle.loads(pickle.dumps(loader.plan))
    assert plan.fingerprint == loader.plan.fingerprint
    assert plan.orders.store.location.replicated
