"""The weights of a batch are those of its labels, in every form, output and mixture."""

import numpy as np
import pytest
import torch

import batchloom
from batchloom import Mixture
from batchloom.batches import IGNORE_INDEX, Augment, forms
from batchloom.batches.media import collate_rows, take_single_row
from batchloom.plan import Mesh
from batchloom.testing import write_store
from preparation.stores import write_jsonl

SETTINGS = {"seq_len": 32, "global_batch_size": 4, "output": "numpy", "rank": 0, "world_size": 1, "prefetch": 0}
# The weight of a token is a function of its id, so that each label says its weight.
WEIGHT_OF_ID = np.array([0, 0.5, 1, 2, 0.25])


def write_weighted_store(folder, seed=0, count=80):
    rng = np.random.default_rng(seed)
    documents = [rng.integers(1, 5, int(rng.integers(1, 50))).tolist() for _ in range(count)]
    weights = [[WEIGHT_OF_ID[token] for token in ids] for ids in documents]
    return write_store(folder, documents, trained=weights)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_weighted_store(tmp_path_factory.mktemp("weights") / "s")


def assert_weights_of_labels(batch):
    labels, weights = batch["labels"], batch["loss_weights"]
    assert weights.dtype == (np.float32 if isinstance(weights, np.ndarray) else torch.float32)
    assert weights.shape == labels.shape
    labels, weights = np.asarray(labels), np.asarray(weights)
    assert np.array_equal(weights, np.where(labels == IGNORE_INDEX, 0, WEIGHT_OF_ID[labels.clip(0)]))
    return float(weights.sum())


@pytest.mark.parametrize("form", ["rows", "varlen"])
@pytest.mark.parametrize("labels", ["aligned", "shifted"])
@pytest.mark.parametrize("align", [1, 8])
@pytest.mark.parametrize("packing", ["best_fit", "none", "wrap"])
def test_every_label_has_its_weight(store, form, labels, align, packing):
    settings = {**SETTINGS, "form": form, "labels": labels, "packing": packing, "align": align}
    totals = [assert_weights_of_labels(batch) for batch in batchloom.Loader(store, **settings)]
    assert sum(totals) > 0
    for batch in batchloom.Loader(store, **{**settings, "output": "torch"}):
        assert_weights_of_labels(batch)
        for part in batch.split(2):
            assert_weights_of_labels(part)


def test_both_kinds_of_labels_have_the_same_weights(store):
    aligned, shifted = (batchloom.Loader(store, **{**SETTINGS, "labels": labels}) for labels in ("aligned", "shifted"))
    for first, second in zip(aligned, shifted, strict=True):
        assert np.array_equal(first["loss_weights"][:, 1:], second["loss_weights"][:, :-1])
        assert np.array_equal(forms.to_shifted(first)["loss_weights"], second["loss_weights"])


def test_the_forms_pass_the_weights_on(store):
    for batch in batchloom.Loader(store, **SETTINGS):
        flat = forms.to_varlen(batch)
        assert_weights_of_labels(flat)
        assert flat["loss_weights"].sum() == batch["loss_weights"].sum()
        megatron = forms.to_megatron(batch)
        shifted = forms.to_shifted(batch)
        assert megatron["loss_mask"].dtype == np.float32
        assert np.array_equal(megatron["loss_mask"], shifted["loss_weights"])
        assert not megatron["labels"][megatron["loss_mask"] == 0].any()
    for batch in batchloom.Loader(store, **SETTINGS, packing="none"):
        assert_weights_of_labels(forms.to_padded(batch))
        rows = [take_single_row(part, by_row=False) for part in batch.split(1)]
        assert np.array_equal(collate_rows(rows, by_row=False)["loss_weights"], batch["loss_weights"])


def test_context_parallel_slices_have_their_weights(store):
    whole = batchloom.Loader(store, **{**SETTINGS, "labels": "shifted"})[0]
    parts = [
        batchloom.Loader(
            store,
            **{**SETTINGS, "labels": "shifted", "rank": rank, "world_size": 2},
            mesh=Mesh(context=2),
        )[0]
        for rank in range(2)
    ]
    for part in parts:
        assert_weights_of_labels(part)
    assert sum(part["loss_weights"].sum() for part in parts) == whole["loss_weights"].sum()


def test_rows_without_spans_have_no_weight(tmp_path):
    store = write_weighted_store(tmp_path / "s", count=3)
    loader = batchloom.Loader(store, **{**SETTINGS, "form": "varlen", "packing": "none"}, last="fill")
    for part in loader[0].split(1):
        assert_weights_of_labels(part)


def test_a_dropped_loss_has_weight_0(store):
    batches = list(batchloom.Loader(store, **SETTINGS, augment=Augment(loss_drop_prob=0.5)))
    plain = list(batchloom.Loader(store, **SETTINGS))
    totals = [assert_weights_of_labels(batch) for batch in batches]
    assert 0 < sum(totals) < sum(batch["loss_weights"].sum() for batch in plain)


def test_a_mixture_has_ones_for_the_stores_without_weights(store, tmp_path):
    rng = np.random.default_rng(3)
    documents = [rng.integers(10, 20, 20).tolist() for _ in range(60)]
    masks = [[n % 2 for n in range(20)] for _ in documents]
    masked = write_store(tmp_path / "masked", documents, trained=masks)
    plain = write_store(tmp_path / "plain", [[token + 20 for token in ids] for ids in documents])
    mixture = Mixture({"a": 1, "b": 1, "c": 1}, stores={"a": store, "b": masked, "c": plain})
    seen = set()
    for batch in batchloom.Loader(mixture, **SETTINGS, steps=30):
        labels, weights = batch["labels"], batch["loss_weights"]
        trained = labels != IGNORE_INDEX
        expected = np.where(labels < 10, WEIGHT_OF_ID[labels.clip(0, 4)], 1)
        assert np.array_equal(weights, np.where(trained, expected, 0))
        seen |= {int(token) // 10 for token in labels[trained]}
    assert seen == {0, 1, 3}
    unweighted = Mixture({"b": 1, "c": 1}, stores={"b": masked, "c": plain})
    assert "loss_weights" not in batchloom.Loader(unweighted, **SETTINGS, steps=2)[0]


def test_the_count_of_trained_tokens_does_not_depend_on_weights(store):
    loader = batchloom.Loader(store, **SETTINGS)
    for batch in loader:
        assert loader.trained_tokens(batch.step) == (batch["labels"] != IGNORE_INDEX).sum()


def test_a_loader_says_that_its_batches_have_weights(store, caplog):
    next(iter(batchloom.Loader(store, **SETTINGS)))
    assert [record.getMessage() for record in caplog.records if "loss_weights" in record.getMessage()] == [
        f"Batches have loss_weights, which the loss must apply (docs/how-to/train/loader.md): those of {store.location.name}."
    ]


def test_a_stream_has_the_weights_of_its_records(tmp_path):
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"q{n}"},
                {"role": "assistant", "content": "one", "loss_weight": 0.5},
                {"role": "user", "content": "next"},
                {"role": "assistant", "content": f"two {n}", "loss_weight": 2},
            ]
        }
        for n in range(200)
    ]
    write_jsonl(tmp_path / "in.jsonl", rows)
    plan = {"seq_len": 256, "global_batch_size": 2, "steps": 4}
    stream = batchloom.stream(str(tmp_path / "in.jsonl"), tokenizer="bytes", keep=tmp_path / "kept", workers=0, **plan)
    batches = list(batchloom.Loader(stream, output="numpy", rank=0, world_size=1))
    for batch in batches:
        weights, labels = batch["loss_weights"], batch["labels"]
        assert ((weights > 0) == (labels != IGNORE_INDEX)).all()
        for row_weights, row_ids in zip(weights, batch["input_ids"], strict=True):
            halves = bytes(row_ids[(row_weights == 0.5) & (row_ids < 256)].astype(np.uint8))
            assert halves == b"one" * (len(halves) // 3)
            assert set(row_weights.tolist()) == {0, 0.5, 2}


def test_a_stream_has_the_weights_of_its_texts(tmp_path):
    rows = [{"text": "ab"[n % 2] * 9, "weight": [0.5, 2][n % 2]} for n in range(400)]
    write_jsonl(tmp_path / "in.jsonl", rows)
    plan = {"seq_len": 64, "global_batch_size": 2, "steps": 4}
    stream = batchloom.stream(str(tmp_path / "in.jsonl"), tokenizer="bytes", keep=tmp_path / "kept", workers=0, **plan)
    for batch in batchloom.Loader(stream, output="numpy", rank=0, world_size=1):
        for letter, weight in ((b"a", 0.5), (b"b", 2)):
            # The first label of a document is not trained.
            assert set(batch["loss_weights"][batch["labels"] == letter[0]].tolist()) == {weight}
