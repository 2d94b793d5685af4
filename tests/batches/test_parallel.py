"""Equal steps for every topology: ranks, micro-batches, context, balance."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import batchloom
from batchloom import PlanError, SettingsError
from batchloom.batches import IGNORE_INDEX, add_augment_state
from batchloom.plan import Mesh
from batchloom.testing import write_store
from tiers import examples

SEQ_LEN = 48
KEYS = ("input_ids", "labels", "position_ids")


@pytest.fixture(scope="module", params=["plain", "masked"])
def store(request, tmp_path_factory):
    rng = np.random.default_rng(3)
    documents = [rng.integers(0, 256, rng.integers(1, 70)).tolist() for _ in range(150)]
    trained = [rng.integers(0, 2, len(document)).tolist() for document in documents]
    return write_store(
        tmp_path_factory.mktemp("store"),
        documents,
        documents_per_shard=45,
        trained=trained if request.param == "masked" else None,
    )


def build_loader(store, **options):
    defaults = {"seq_len": SEQ_LEN, "global_batch_size": 12, "rank": 0, "world_size": 1}
    return batchloom.Loader(store, **{**defaults, "output": "numpy", "prefetch": 0, **options})


def list_rows(batches):
    """Return the sorted rows of batches as bytes, and their trained labels."""
    joined = {key: np.concatenate([batch[key] for batch in batches]) for key in KEYS}
    rows = [b"".join(joined[key][r].tobytes() for key in KEYS) for r in range(len(joined["labels"]))]
    targets = joined["labels"]
    return sorted(rows), np.sort(targets[targets != IGNORE_INDEX])


def join_slices(parts, mesh):
    """Return the full rows from the slices of context ranks."""
    rows = {}
    length = parts[0]["labels"].shape[1] * mesh.context
    chunk = length // mesh.chunk_count
    for key in KEYS:
        rows[key] = np.full((len(parts[0][key]), length), -1)
        for c, part in enumerate(parts):
            chunks = [c, 2 * mesh.context - 1 - c] if mesh.slices == "zigzag" else [c]
            for at, number in enumerate(chunks):
                rows[key][:, number * chunk : (number + 1) * chunk] = part[key][:, at * chunk : (at + 1) * chunk]
    return rows


@given(data=st.data())
@settings(max_examples=examples(60))
def test_a_step_is_the_same_for_every_topology(store, data):
    size = data.draw(st.integers(1, 24), "global_batch_size")
    align = data.draw(st.sampled_from([1, 4, 12]), "align")
    context = data.draw(st.sampled_from([1, 2, 3, 4]), "context")
    labels = "shifted" if context > 1 else data.draw(st.sampled_from(["aligned", "shifted"]))
    plan_options = {"global_batch_size": size, "align": align, "labels": labels, "epochs": 2}
    plan_options["lanes"] = data.draw(st.sampled_from([n for n in (1, 2, 3, 4) if size % n == 0]), "lanes")
    plan_options["augment"] = data.draw(
        st.sampled_from([None, {"noise_prob": 0.3}, {"loss_drop_prob": 0.3}]), "augment"
    )
    alone = build_loader(store, **plan_options)
    world = data.draw(st.integers(1, 14), "ranks")
    mesh = Mesh(
        tensor=data.draw(st.integers(1, 2), "tensor"),
        context=context,
        pipeline=data.draw(st.integers(1, 2), "pipeline"),
        slices=data.draw(st.sampled_from(["contiguous", "zigzag"]), "slices"),
    )
    micro = data.draw(st.sampled_from([None, 1, 2, 3]), "micro")
    step = data.draw(st.integers(0, len(alone) - 1), "step")
    processes = world * mesh.processes_per_data_rank
    options = {
        **plan_options,
        "mesh": mesh,
        "uneven": "pad",
        "micro_batch_size": micro,
        "balance": data.draw(st.booleans(), "balance"),
        "world_size": processes,
    }
    held_batches = {}
    for rank in range(processes):
        loader = build_loader(store, **options, rank=rank)
        loader.load_state_dict(add_augment_state(alone.plan.state(step * size), alone.feed.augmentation))
        batch = next(iter(loader))
        assert batch.step == step
        placement = mesh.get_placement(rank, processes)
        first = held_batches.setdefault((placement.rank, placement.context_rank), batch)
        assert all(np.array_equal(first[key], batch[key]) for key in KEYS)
        assert len(loader) == len(alone)
    shapes = {batch["labels"].shape for batch in held_batches.values()}
    assert len(shapes) == 1
    batches = []
    for rank in range(world):
        parts = [held_batches[rank, c] for c in range(mesh.context)]
        micro_batches = [part.split(micro or len(part["labels"])) for part in parts]
        batches += [join_slices(slices, mesh) for slices in zip(*micro_batches, strict=True)]
    rows, trained = list_rows(batches)
    expected, targets = list_rows([alone[step]])
    assert np.array_equal(trained, targets)
    assert len(trained) == alone.trained_tokens(step) == loader.trained_tokens(step)
    for row in expected:
        rows.remove(row)
    empty = build_loader(store, **plan_options, steps=None).batch(10**6)
    assert set(rows) <= set(list_rows([empty])[0])


@given(data=st.data())
@settings(max_examples=examples(15))
def test_a_run_that_changes_its_topology_time_and_again_is_the_same_run(store, data):
    alone = build_loader(store, epochs=2)
    state, step = alone.state_dict(), 0
    while step < len(alone):
        world = data.draw(st.integers(1, 14))
        options = {
            "world_size": world,
            "uneven": "pad",
            "balance": data.draw(st.booleans()),
            "micro_batch_size": data.draw(st.sampled_from([None, 1, 2])),
            "prefetch": data.draw(st.sampled_from([0, 2])),
        }
        loaders = [build_loader(store, epochs=2, **options, rank=rank) for rank in range(world)]
        for loader in loaders:
            loader.load_state_dict(json.loads(json.dumps(state)))
        step_count = data.draw(st.integers(1, 6))
        for batches in itertools.islice(zip(*loaders, strict=True), step_count):
            assert {batch.step for batch in batches} == {step}
            rows, trained = list_rows(batches)
            expected, targets = list_rows([alone[step]])
            assert np.array_equal(trained, targets)
            assert set(expected) <= set(rows)
            step += 1
        # The state of any rank is the state of the run.
        state = loaders[data.draw(st.integers(0, world - 1))].state_dict()
    assert step == len(alone)


@given(data=st.data())
@settings(max_examples=examples(40))
def test_the_varlen_form_is_the_same_for_every_topology(store, data):
    size = data.draw(st.integers(1, 12), "global_batch_size")
    mesh = Mesh(
        context=data.draw(st.sampled_from([1, 2, 3]), "context"),
        slices=data.draw(st.sampled_from(["contiguous", "zigzag"]), "slices"),
    )
    world, micro = data.draw(st.integers(1, 14), "ranks"), data.draw(st.integers(1, 4), "micro")
    plan_options = {"global_batch_size": size, "align": 12, "form": "varlen", "labels": "shifted"}
    alone = build_loader(store, **plan_options)
    step = data.draw(st.integers(0, len(alone) - 1), "step")
    expected = list_documents([alone[step]], Mesh())
    options = {**plan_options, "mesh": mesh, "uneven": "pad", "micro_batch_size": micro}
    received = []
    for rank in range(world):
        parts = []
        for c in range(mesh.context):
            loader = build_loader(store, **options, rank=rank * mesh.context + c, world_size=world * mesh.context)
            parts.append(loader.batch(step).split(micro))
        for micro_batches in zip(*parts, strict=True):
            received += list_documents(micro_batches, mesh)
    padding = [document for document in received if not document[2]]
    documents = [document for document in received if document[2]]
    assert sorted(documents) == sorted(document for document in expected if document[2])
    # Documents without loss are padding, have one token or no trained token.
    assert len(padding) >= len(expected) - len(documents)


def list_documents(parts, mesh):
    """Return (ids, positions, is trained, labels) of each joined document."""
    bounds = parts[0]["cu_seq_lens_q"]
    documents = []
    for part in parts:
        assert np.array_equal(part["cu_seq_lens_q"], bounds)
        assert np.array_equal(part["cu_seq_lens_k"], bounds)
        assert part["max_length_q"] == np.diff(bounds).max()
        assert part["input_ids"].shape[1] * mesh.context == bounds[-1]
        assert np.array_equal(
            part["seq_idx"][0],
            np.repeat(np.arange(len(bounds) - 1), np.diff(bounds) // mesh.context),
        )
    for begin, end in itertools.pairwise(bounds):
        assert (end - begin) % 12 == 0
        own = slice(begin // mesh.context, end // mesh.context)
        slices = [{key: part[key][:, own] for key in KEYS} for part in parts]
        joined = join_slices(slices, mesh)
        ids, labels, positions = (joined[key][0].tolist() for key in KEYS)
        documents.append((ids, positions, any(x != IGNORE_INDEX for x in labels), labels))
    return documents


def test_padding_that_aligns_carries_no_loss_and_belongs_to_its_document(tmp_path):
    small = write_store(tmp_path, [[1, 2, 3], [4, 5, 6, 7, 8]])
    options = {"seq_len": 16, "global_batch_size": 1, "align": 4, "shuffle": False}
    end = small.end_id
    rows = build_loader(small, **options)[0]
    assert rows["input_ids"].tolist() == [[1, 2, 3, end, 4, 5, 6, 7, 8, *[end] * 7]]
    assert rows["labels"].tolist() == [
        [IGNORE_INDEX, 2, 3, IGNORE_INDEX, IGNORE_INDEX, 5, 6, 7, 8, *[IGNORE_INDEX] * 7],
    ]
    assert rows["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]]
    shifted = build_loader(small, **options, labels="shifted")[0]
    assert shifted["labels"].tolist() == [
        [2, 3, IGNORE_INDEX, IGNORE_INDEX, 5, 6, 7, 8, *[IGNORE_INDEX] * 8],
    ]
    flat = build_loader(small, **options, form="varlen")[0]
    assert flat["input_ids"].tolist() == [[1, 2, 3, end, 4, 5, 6, 7, 8, end, end, end]]
    assert flat["cu_seq_lens_q"].tolist() == [0, 4, 12]
    assert flat["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7]]
    assert flat["labels"].tolist() == [
        [IGNORE_INDEX, 2, 3, IGNORE_INDEX, IGNORE_INDEX, 5, 6, 7, 8, *[IGNORE_INDEX] * 3]
    ]
    empty = build_loader(small, **options, form="varlen").batch(5)
    assert empty["input_ids"].tolist() == [[end] * 4]
    assert empty["cu_seq_lens_q"].tolist() == [0, 4]
    assert empty["labels"].tolist() == [[IGNORE_INDEX] * 4]


def test_balancing_evens_out_what_ranks_cost_and_says_by_how_much(tmp_path):
    rng = np.random.default_rng(0)
    lengths = np.minimum(np.exp(rng.normal(3, 1.4, 600)).astype(int) + 1, 256)
    # Spans fill their rows, so that padding adds no span to the counts below.
    skewed = write_store(tmp_path, [[7] * n for n in lengths.tolist()])
    options = {"seq_len": 256, "packing": "wrap", "steps": 4, "world_size": 3}
    plain, loader = build_loader(skewed, **options), build_loader(skewed, **options, balance=True)
    before, after = plain.imbalance(2), loader.imbalance(2)
    assert before.in_order == before.actual == after.in_order
    assert after.actual < 1.05 < 1.1 < after.in_order
    for expected, options["balance"] in ((before.actual, False), (after.actual, True)):
        costs = []
        for rank in range(3):
            positions = build_loader(skewed, **options, rank=rank).batch(2)["position_ids"].ravel()
            spans = np.diff([*np.flatnonzero(positions == 0), positions.size])
            costs.append(int((spans**2).sum()))
            ends = np.flatnonzero(np.cumsum(spans) % 256 == 0) + 1
            rows = [int((row**2).sum()) for row in np.split(spans, ends[:-1])]
            assert len(rows) == 4
            assert not options["balance"] or rows == sorted(rows, reverse=True)
        assert max(costs) / np.mean(costs) == pytest.approx(expected)


def test_parts_of_a_batch_are_views_and_tensors_split_too(store):
    batch = build_loader(store)[0]
    parts = batch.split(4)
    assert [len(part["labels"]) for part in parts] == [4, 4, 4]
    assert all(np.shares_memory(part["labels"], batch["labels"]) for part in parts)
    assert [(part.step, part.origin) for part in parts] == [(0, batch.origin)] * 3
    tensors = build_loader(store, output="torch", form="varlen")[0]
    for part in tensors.split(2):
        assert part["cu_seq_lens_q"].dtype == tensors["cu_seq_lens_q"].dtype
        assert part["position_ids"][0, part["cu_seq_lens_q"][:-1].long()].tolist() == [0] * (
            len(part["cu_seq_lens_q"]) - 1
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world_size": 5}, "World sizes that divide it: .*6.* Or .* uneven='pad'"),
        ({"micro_batch_size": 5}, "A rank's 12 rows .* Sizes that divide it: 1, 2, 3, 4, 6, 12"),
        (
            {"world_size": 6, "mesh": Mesh(tensor=4)},
            "each data-parallel rank takes 4 of them. Numbers that fit: 4 or 8",
        ),
        (
            {"world_size": 5, "mesh": Mesh(context=5)},
            "5 context ranks cut a sequence into 5, but seq_len is 48: give 45 or 50",
        ),
        (
            {
                "world_size": 2,
                "mesh": Mesh(context=2, slices="zigzag"),
                "form": "varlen",
                "align": 2,
            },
            "cut each document into 4 in the varlen form, but align is 2: give align=4",
        ),
    ],
)
def test_what_does_not_divide_is_refused_with_what_does(store, options, message):
    with pytest.raises(PlanError, match=message):
        build_loader(store, labels="shifted", **options)


def test_settings_that_are_none(store):
    with pytest.raises(SettingsError) as caught:
        build_loader(store, uneven="padd", micro_batch_size=0, mesh=2, balance="yes")
    for message in (
        "did you mean 'pad'",
        "micro_batch_size: 0",
        "not a batchloom.plan.Mesh",
        "balance: 'yes'",
    ):
        assert message in str(caught.value)
    with pytest.raises(PlanError, match="12 rows cannot .* micro-batches of 5; 1, 2, 3, 4, 6, 12 can"):
        build_loader(store)[0].split(5)
    with pytest.raises(SettingsError, match="slices of 2 context ranks: give labels='shifted'"):
        build_loader(store, world_size=2, mesh=Mesh(context=2))
    flat = build_loader(store, form="varlen")[0]
    with pytest.raises(PlanError, match="split it before it is moved"):
        type(flat)(dict(flat)).split(4)
    with pytest.raises(PlanError, match="micro-batches of '4'"):
        flat.split("4")


def test_where_every_rank_holds_the_same_data_it_does_in_every_topology():
    store = batchloom.open_store("dummy:documents=100,kind=random")
    assert store.location.replicated
    options = {"world_size": 5, "uneven": "pad", "balance": True, "labels": "shifted"}
    batches = [build_loader(store, **options, rank=rank).batch(1) for rank in range(5)]
    assert all(np.array_equal(batches[0][key], copy[key]) for copy in batches for key in KEYS)
    trained = sum(int((batch["labels"] != IGNORE_INDEX).sum()) for batch in batches)
    assert build_loader(store, **options).trained_tokens(1) == trained


@pytest.mark.parametrize("form", ["rows", "varlen"])
def test_a_model_computes_the_same_loss_whatever_aligns_its_documents(tmp_path, form):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    rng = np.random.default_rng(5)
    small = write_store(tmp_path, [rng.integers(0, 256, n).tolist() for n in range(1, 60)])
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=512, num_attention_heads=2, **sizes)).double()

    def compute_losses(align):
        options = {"epochs": 1, "output": "torch", "labels": "shifted", "form": form}
        losses = []
        for batch in build_loader(small, align=align, **options):
            inputs = {key: batch[key] for key in ("input_ids", "position_ids")}
            with torch.no_grad():
                logits = model(**inputs, attention_mask=None, use_cache=False).logits
            trained = batch["labels"] != IGNORE_INDEX
            losses += torch.nn.functional.cross_entropy(
                logits[trained], batch["labels"][trained], reduction="none"
            ).tolist()
        return sorted(losses)

    alone, aligned = compute_losses(1), compute_losses(12)
    assert len(alone) > 1500
    assert np.allclose(alone, aligned, atol=1e-9)
