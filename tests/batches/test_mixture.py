"""Loaders of mixtures: topologies, resume, edits, bans and errors."""

import contextlib
import json
import logging
import os
import sys
import time

import numpy as np
import pytest

import batchloom
from batches.small_tokenizer import write_tokenizer
from batchloom import (
    Edit,
    InputError,
    Loader,
    Mixture,
    Plan,
    PlanError,
    PlanSpec,
    SettingsError,
    StateError,
    open_store,
)
from batchloom.batches import IGNORE_INDEX
from batchloom.plan import SourceSpec
from batchloom.store import MANIFEST_NAME, encode_manifest, remove_documents
from batchloom.store.format import seal_manifest
from batchloom.testing import append_documents, write_store
from processes import run_module
from tiers import examples

SEQ_LEN = 32
KEYS = ("input_ids", "labels", "position_ids")


def make_documents(seed, count=120, longest=50):
    """Return documents with ids that tell their source: 40 k to 40 k + 39."""
    rng = np.random.default_rng(seed)
    return [(40 * seed + rng.integers(0, 40, rng.integers(1, longest))).tolist() for _ in range(count)]


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores")
    a, b, c = (make_documents(seed) for seed in range(3))
    chat = [np.random.default_rng(9).integers(0, 2, len(document)).tolist() for document in b]
    return {
        "a": write_store(folder / "a", a, documents_per_shard=25),
        # A masked store of another dtype.
        "b": write_store(folder / "b", b, trained=chat, dtype="int32"),
        "c": write_store(folder / "c", c),
    }


WEIGHTS = {"a": 2, "b": 1, "c": 1}


def build_loader(data, **options):
    defaults = {"rank": 0, "world_size": 1, "output": "numpy", "prefetch": 0}
    if not isinstance(data, Plan):
        defaults |= {"seq_len": SEQ_LEN, "global_batch_size": 8}
    if isinstance(data, Mixture):
        defaults["steps"] = 40
    return batchloom.Loader(data, **{**defaults, **options})


def make_mixture(stores, **options):
    return Mixture(WEIGHTS, stores=stores, **options)


def have_same_arrays(first, second):
    return all(np.array_equal(first[key], second[key]) for key in first)


def assemble_expected(loader, step):
    """Assemble a batch span by span from the documents of the stores."""
    rows = loader.plan.rows(*loader.plan.positions_of(step))
    spec = loader.plan.spec_at(step)
    shape = (len(rows), spec.seq_len)
    stores = list(loader.plan.stores.values())
    ids = np.full(shape, stores[0].end_id)
    labels, positions = np.full(shape, IGNORE_INDEX), np.zeros(shape, np.int64)
    for row in range(len(rows)):
        filled = 0
        for at in range(rows.pointers[row], rows.pointers[row + 1]):
            store, number = stores[rows.sources[at]], int(rows.documents[at])
            offset, start, length = (int(array[at]) for array in (rows.row_offsets, rows.starts, rows.lengths))
            span = (np.array([number]), np.array([start]), np.array([length]))
            tokens, trained = store.read(*span)[0].astype(np.int64), store.mask(*span)[0]
            if rows.banned is not None and rows.banned[at]:
                tokens, trained = np.full(length, store.end_id), np.zeros(length, bool)
            ids[row, offset : offset + length] = tokens
            targets = np.where(trained, tokens, IGNORE_INDEX)
            targets[0] = IGNORE_INDEX
            labels[row, offset : offset + length] = targets
            positions[row, offset : offset + length] = np.arange(length)
            filled = offset + length
        positions[row, filled:] = np.arange(spec.seq_len - filled)
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def test_a_batch_holds_the_documents_its_plan_names(stores):
    loader = build_loader(make_mixture(stores))
    for batch in loader:
        assert have_same_arrays(assemble_expected(loader, batch.step), batch)
    assert loader.origin.startswith("source=real a/train ")
    assert all(f"{name}/train {stores[name].fingerprint[:12]}" in loader.origin for name in stores)


@pytest.mark.parametrize("lanes", [1, 4])
def test_every_topology_has_the_same_steps(stores, lanes):
    alone = list(build_loader(make_mixture(stores), lanes=lanes))
    for world in (2, 4):
        ranks = [
            build_loader(make_mixture(stores), lanes=lanes, rank=r, world_size=world, prefetch=2) for r in range(world)
        ]
        for whole_batch, *parts in zip(alone, *ranks, strict=True):
            rows = [np.concatenate([part[key] for part in parts]) for key in KEYS]
            joined = sorted(b"".join(array[r].tobytes() for array in rows) for r in range(8))
            assert joined == sorted(b"".join(whole_batch[key][r].tobytes() for key in KEYS) for r in range(8))
    varlen = build_loader(make_mixture(stores), lanes=lanes, form="varlen")[3]
    targets = alone[3]["labels"]
    assert np.array_equal(varlen["labels"][varlen["labels"] >= 0], targets[targets >= 0])


def test_workers_and_forks_give_the_same(stores):
    torch = pytest.importorskip("torch")
    from batchloom.adapters.pytorch import LoaderDataset, LoaderIterable

    loader = build_loader(make_mixture(stores))
    loader.edit(Edit(step=5, weights={"c": 1, "a": 1}, ban={"a": [3, 4]}))
    alone = list(loader)
    for dataset_class in (LoaderIterable, LoaderDataset):
        batches = torch.utils.data.DataLoader(dataset_class(make_edited(stores)), batch_size=None, num_workers=2)
        assert all(have_same_arrays(expected, actual) for expected, actual in zip(alone, batches, strict=True))
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        is_same = all(have_same_arrays(alone[step], loader.batch(step)) for step in (0, 7, 39))
        os.write(write_end, b"1" if is_same else b"0")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read_end, 1) == b"1"


def make_edited(stores):
    loader = build_loader(make_mixture(stores), output="torch")
    loader.edit(Edit(step=5, weights={"c": 1, "a": 1}, ban={"a": [3, 4]}))
    return loader


@pytest.mark.parametrize("prefetch", [0, 3])
def test_a_run_goes_on_from_its_state_with_its_journal(stores, prefetch):
    loader = build_loader(make_mixture(stores), prefetch=prefetch)
    edits = [
        Edit(step=12, weights={"a": 1, "b": 3}, note="more of b"),
        Edit(step=20, seq_len=48, global_batch_size=4),
        Edit(step=25, skip=2, ban={"b": range(30)}),
    ]
    for edit in edits:
        loader.edit(edit)
    alone = list(loader)
    assert all(have_same_arrays(assemble_expected(loader, batch.step), batch) for batch in alone)
    for stop in (3, 12, 22):
        loader = build_loader(make_mixture(stores), prefetch=prefetch)
        for edit in edits:
            loader.edit(edit)
        batches = iter(loader)
        for _ in range(stop):
            next(batches)
        state = json.loads(json.dumps(loader.state_dict()))
        batches.close()
        resumed = build_loader(make_mixture(stores), prefetch=prefetch)
        resumed.load_state_dict(state)
        assert resumed.plan.journal == loader.plan.journal
        remaining = list(resumed)
        assert [batch.step for batch in remaining] == list(range(stop, 40))
        assert all(have_same_arrays(expected, actual) for expected, actual in zip(alone[stop:], remaining, strict=True))


def test_an_edit_in_mid_run_changes_what_was_not_made_and_nothing_before(stores):
    loader = build_loader(make_mixture(stores), prefetch=3)
    plain = list(build_loader(make_mixture(stores)))
    batches = iter(loader)
    assert have_same_arrays(plain[0], next(batches))
    with pytest.raises(PlanError, match=r"Step 4 was delivered, .* the first step that can change is 5\."):
        loader.edit(Edit(step=4, weights={"c": 1}))
    loader.edit(Edit(step=10, weights={"c": 1}))
    remaining = list(batches)
    assert all(have_same_arrays(expected, actual) for expected, actual in zip(plain[1:10], remaining[:9], strict=True))
    assert all((batch["input_ids"][batch["labels"] >= 0] >= 80).all() for batch in remaining[9:])
    with pytest.raises(SettingsError, match=r"ban\.a: document 120 does not exist; the source has 120"):
        loader.edit(Edit(step=60, ban={"a": [120]}))


def test_an_edit_of_the_next_step_that_can_change_is_in_it(stores):
    """The edit and the producer thread alternate quickly."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    change = {"weights": {"a": 1}, "ban": {"a": range(0, 120, 2)}}
    try:
        for _ in range(examples(80)):
            loader, served = build_loader(make_mixture(stores), prefetch=4, global_batch_size=32), {}
            for batch in loader:
                served[batch.step] = batch
                if batch.step == 10:
                    for _ in range(400):
                        with contextlib.suppress(PlanError):
                            loader.edit(Edit(step=loader.first_editable_step, **change))
                            break
            fresh = build_loader(loader.plan)
            wrong = [s for s, batch in served.items() if not have_same_arrays(batch, fresh.batch(s))]
            assert (loader.plan.edits[0].step, wrong) == (loader.plan.edits[0].step, [])
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize("prefetch", [0, 4])
def test_the_first_step_to_edit_is_the_same_however_fast_a_rank_is(stores, prefetch):
    def list_editable_steps(rank, wait):
        loader = build_loader(make_mixture(stores), prefetch=prefetch, rank=rank, world_size=2)
        loader.edit(Edit(step=0, weights={"a": 1, "b": 1}))
        steps = [loader.first_editable_step]
        for _ in loader:
            time.sleep(wait)
            steps.append(loader.first_editable_step)
            with pytest.raises(PlanError, match=f"the first step that can change is {steps[-1]}"):
                loader.edit(Edit(step=steps[-1] - 1, skip=1))
        return [*steps, loader.first_editable_step]

    fast, slow = list_editable_steps(0, 0), list_editable_steps(1, 0.003)
    assert fast == slow == [0, *(step + 2 + prefetch for step in range(40)), 40]
    loader = build_loader(make_mixture(stores), prefetch=prefetch)
    next(iter(loader))
    assert loader.first_editable_step == 1


@pytest.mark.parametrize("form", ["rows", "varlen"])
@pytest.mark.parametrize("labels", ["aligned", "shifted"])
def test_a_ban_is_padding_in_place(stores, form, labels):
    plain, banned = (build_loader(make_mixture(stores), form=form, labels=labels) for _ in range(2))
    banned.edit(Edit(step=0, ban={"a": range(0, 120, 2), "b": range(60)}))
    changed_tokens = 0
    for original, changed_batch in zip(plain, banned, strict=True):
        for key in original:
            if key not in ("input_ids", "labels"):
                assert np.array_equal(original[key], changed_batch[key])
        changed = original["input_ids"] != changed_batch["input_ids"]
        changed_tokens += changed.sum()
        assert (changed_batch["input_ids"][changed] == stores["a"].end_id).all()
        differ = original["labels"] != changed_batch["labels"]
        assert (changed_batch["labels"][differ] == IGNORE_INDEX).all()
    assert changed_tokens
    assert banned.trained_tokens(3) == (banned[3]["labels"] >= 0).sum() < plain.trained_tokens(3)


def test_a_single_store_takes_bans_and_other_sizes(stores):
    loader = build_loader(stores["a"], steps=20)
    loader.edit(Edit(step=4, ban={"data": range(60)}))
    loader.edit(Edit(step=8, seq_len=16, global_batch_size=16))
    for batch in loader:
        assert have_same_arrays(assemble_expected(loader, batch.step), batch)
    with pytest.raises(SettingsError, match="a single store has no weights; start with a Mixture"):
        loader.edit(Edit(step=30, weights={"data": 1}))


def test_removed_documents_generations_and_prefixes_mix(tmp_path, stores):
    write_store(tmp_path / "d", make_documents(3), documents_per_shard=50)
    append_documents(tmp_path / "d", make_documents(3, 10))
    (tmp_path / "gone").write_text("train:1\ntrain:7\n")
    remove_documents(tmp_path / "d", documents_file=tmp_path / "gone")
    older = open_store(tmp_path / "d", generation=1)
    newer = open_store(tmp_path / "d")
    prefix = open_store(next((stores["c"].path / "train").glob("*.bin")))
    mixture = Mixture(
        {"older": 1, "newer": 1, "prefix": 1, "a": 1},
        stores={"older": older, "newer": newer, "prefix": prefix, "a": stores["a"]},
    )
    loader = build_loader(mixture)
    assert all(have_same_arrays(assemble_expected(loader, batch.step), batch) for batch in loader)
    assert loader.store.masked
    state = loader.state_dict()
    newer_loader = build_loader(Mixture(mixture.weights, stores={**mixture.stores, "older": newer}))
    with pytest.raises(StateError, match=r"generation 1 of .*generation=1, removals="):
        newer_loader.load_state_dict(state)


def test_synthetic_stores_mix_and_say_so():
    synthetic_stores = {name: open_store(f"dummy:documents={n}") for name, n in (("x", 50), ("y", 80))}
    loader = build_loader(Mixture({"x": 1, "y": 3}, stores=synthetic_stores))
    assert all(have_same_arrays(assemble_expected(loader, batch.step), batch) for batch in loader)
    assert loader.origin.startswith("source=synthetic ")


def test_long_conversations_are_left_out_and_texts_cut(tmp_path, stores, caplog):
    chats = write_store(tmp_path / "chat", make_documents(4, 60), trained=None)
    changed = seal_manifest(mark_conversations(chats.manifest))
    (chats.path / MANIFEST_NAME).write_bytes(encode_manifest(changed))
    chats = open_store(chats.path)
    with caplog.at_level(logging.WARNING, "batchloom"):
        loader = build_loader(Mixture({"a": 1, "chat": 1}, stores={"a": stores["a"], "chat": chats}))
        list(loader)
    assert loader.plan.orders.shares.get_source_spec(1) == SourceSpec(overlong="drop")
    assert loader.plan.orders.shares.get_source_spec(0) == SourceSpec()
    long = sum(len(document) > SEQ_LEN for document in make_documents(4, 60))
    assert f"leaves {long} of 60 documents" in caplog.text
    assert "of 'chat'" in caplog.text
    split_loader = build_loader(Mixture({"chat": 1}, stores={"chat": chats}), overlong="split")
    assert split_loader.plan.orders.shares.get_source_spec(0) == SourceSpec()


def mark_conversations(manifest):
    from msgspec.structs import replace

    return replace(
        manifest,
        sources=tuple(replace(source, conversations=True) for source in manifest.sources),
    )


def test_what_cannot_be_mixed_is_refused_by_name(tmp_path, stores):
    other_tokenizer = write_tokenizer(tmp_path / "tokenizer.json")
    other_store = write_store(tmp_path / "other", [[1, 2, 3]] * 9, tokenizer=other_tokenizer)
    with pytest.raises(PlanError, match="'a' and 'other' were prepared with different tokenizers"):
        Mixture({"a": 1, "other": 1}, stores={"a": stores["a"], "other": other_store})
    with pytest.raises(SettingsError, match="stores.a: '/data/a' is a path; open it"):
        Mixture({"a": 1}, stores={"a": "/data/a"})
    with pytest.raises(InputError, match="Mixture"):
        build_loader({"a": stores["a"]})


def test_a_mixture_of_one_is_read_as_its_store(stores):
    loader = build_loader(Mixture({"a": 5}, stores={"a": stores["a"]}))
    assert all(have_same_arrays(assemble_expected(loader, batch.step), batch) for batch in loader)


def test_the_tables_of_several_stores_are_counted_in_another_process(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("LOCAL_RANK", "0")
    written = {name: write_store(tmp_path / name, make_documents(seed, 200)) for seed, name in enumerate("ab")}
    mixture = Mixture({"a": 1, "b": 1}, stores=written, exhausted="stop")
    loader = build_loader(mixture, steps=None, pool_size=8)
    steps = len(loader)
    tables = [path for name in "ab" for path in (tmp_path / name / "plans").glob("*.counts")]
    assert len(tables) == 2
    reopened = build_loader(mixture, steps=None, pool_size=8)
    assert reopened.plan.orders.is_counted
    assert len(list(reopened)) == len(reopened) == steps


@pytest.mark.slow
def test_many_stores_share_the_descriptors_of_a_process(tmp_path):
    for number in range(30):
        write_store(tmp_path / f"s{number}", make_documents(0, 40), documents_per_shard=4)
    result = run_module("batches.few_descriptors", tmp_path)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout)


def test_a_plan_of_a_mixture_can_be_given(stores):
    plan = Plan(make_mixture(stores), PlanSpec(seq_len=SEQ_LEN, global_batch_size=8, steps=40))
    assert all(
        have_same_arrays(a, b) for a, b in zip(build_loader(plan), build_loader(make_mixture(stores)), strict=True)
    )


def test_an_edit_past_the_end_would_let_none_come_before_it(tmp_path):
    store = write_store(tmp_path / "s", [[7] * 9] * 60)
    loader = Loader(store, seq_len=16, global_batch_size=2, steps=10, rank=0, world_size=1)
    with pytest.raises(PlanError, match="The run has 10 steps, and after an edit at step 11"):
        loader.edit(Edit(step=11, skip=1))
    loader.edit(Edit(step=10, skip=1))
    with pytest.raises(SettingsError, match=r"edit: {'skip': 1} is not an Edit; give Edit\(step="):
        loader.edit({"skip": 1})


def test_a_state_is_of_a_whole_number_of_any_kind(tmp_path):
    store = write_store(tmp_path / "s", [[7] * 9] * 60)
    loader = Loader(store, seq_len=16, global_batch_size=2, steps=10, rank=0, world_size=1)
    state = loader.state_at(np.int64(2))
    assert json.loads(json.dumps(state)) == loader.state_at(2)
    for method in (loader.state_at, loader.feed.share_at):
        with pytest.raises(SettingsError, match="step: 1000.* is not a step number"):
            method(10**20)


@pytest.mark.parametrize("step", [-1, 1.5, "1", True, None])
def test_a_step_is_a_whole_number_from_0_on(tmp_path, step):
    store = write_store(tmp_path / "s", [[7] * 9] * 60)
    loader = Loader(store, seq_len=16, global_batch_size=2, steps=10, rank=0, world_size=1)
    for method in (loader.batch, loader.tokens, loader.imbalance, loader.feed.share_at, loader.state_at):
        with pytest.raises(SettingsError, match="step: .* is not a step number"):
            method(step)
