import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from batchloom import Loader, Plan, PlanSpec
from batchloom.batches import BATCH_KEYS, IGNORE_INDEX, assemble_rows, assemble_varlen
from batchloom.testing import write_store
from tiers import examples

DOCUMENTS = st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=30), min_size=1, max_size=20)


@pytest.fixture(scope="module")
def make_folder(tmp_path_factory):
    """Factory of folders, as hypothesis shares function-scoped fixtures of examples."""
    return lambda: tmp_path_factory.mktemp("store")


def list_spans(rows):
    """Return (row, document, start, stop) of each span, row by row."""
    row = np.repeat(np.arange(len(rows)), np.diff(rows.pointers))
    stops = rows.starts + rows.lengths
    return list(zip(row.tolist(), rows.documents.tolist(), rows.starts.tolist(), stops.tolist(), strict=True))


def assemble_by_token(store, rows, seq_len, labels, trained=None):
    """Assemble a batch token by token; ``trained`` is per document, None for all."""
    shape = (len(rows), seq_len)
    ids, positions = np.full(shape, store.end_id), np.zeros(shape, int)
    targets = np.full(shape, IGNORE_INDEX)
    filled = [0] * len(rows)
    for row, document, start, stop in list_spans(rows):
        span = store[document].ids[start:stop].tolist()
        at = filled[row]
        for k, token in enumerate(span):
            ids[row, at + k], positions[row, at + k] = token, k
            if k > 0 and (trained is None or trained[document][start + k]):
                targets[row, at + k - (labels == "shifted")] = token
        filled[row] += len(span)
    for row, at in enumerate(filled):
        positions[row, at:] = range(seq_len - at)
    return ids, targets, positions


@given(
    documents=DOCUMENTS,
    seq_len=st.integers(1, 40),
    labels=st.sampled_from(["aligned", "shifted"]),
    packing=st.sampled_from(["best_fit", "wrap", "none"]),
)
@settings(max_examples=examples(60))
def test_rows_are_the_contract(make_folder, documents, seq_len, labels, packing):
    store = write_store(make_folder(), documents, documents_per_shard=7)
    rows = Plan(store, PlanSpec(seq_len=seq_len, global_batch_size=1, packing=packing)).rows(0, 9)
    batch = assemble_rows(store.reader, rows, seq_len, labels)
    expected = assemble_by_token(store, rows, seq_len, labels)
    for key, array in zip(("input_ids", "labels", "position_ids"), expected, strict=True):
        assert batch[key].dtype == np.int64
        assert np.array_equal(batch[key], array), key


@given(
    data=st.data(),
    documents=DOCUMENTS,
    seq_len=st.integers(1, 40),
    labels=st.sampled_from(["aligned", "shifted"]),
    packing=st.sampled_from(["best_fit", "wrap"]),
)
@settings(max_examples=examples(60))
def test_masked_tokens_carry_no_loss(make_folder, data, documents, seq_len, labels, packing):
    trained = [data.draw(st.lists(st.integers(0, 1), min_size=len(d), max_size=len(d))) for d in documents]
    store = write_store(make_folder(), documents, documents_per_shard=7, trained=trained)
    assert store.contents.trained_tokens == sum(map(sum, trained))
    rows = Plan(store, PlanSpec(seq_len=seq_len, global_batch_size=1, packing=packing)).rows(0, 9)
    ids, targets, _ = assemble_by_token(store, rows, seq_len, labels, trained)
    batch = assemble_rows(store.reader, rows, seq_len, labels)
    assert np.array_equal(batch["labels"], targets)
    assert np.array_equal(batch["input_ids"], ids)
    flat = assemble_varlen(store.reader, rows, labels)
    assert flat["labels"].size == max(1, rows.lengths.sum())
    assert np.array_equal(flat["labels"][flat["labels"] != IGNORE_INDEX], targets[targets != IGNORE_INDEX])


@given(documents=DOCUMENTS, seq_len=st.integers(2, 40))
@settings(max_examples=examples(40))
def test_aligned_and_shifted_labels_train_the_same_set(make_folder, documents, seq_len):
    store = write_store(make_folder(), documents)
    rows = Plan(store, PlanSpec(seq_len=seq_len, global_batch_size=1)).rows(0, 9)
    aligned = assemble_rows(store.reader, rows, seq_len, "aligned")["labels"]
    shifted = assemble_rows(store.reader, rows, seq_len, "shifted")["labels"]
    assert np.array_equal(aligned[:, 1:], shifted[:, :-1])
    assert (aligned[:, 0] == IGNORE_INDEX).all()
    assert (shifted[:, -1] == IGNORE_INDEX).all()


@given(documents=DOCUMENTS, seq_len=st.integers(1, 40))
@settings(max_examples=examples(40))
def test_varlen_is_what_hf_flattening_gives(make_folder, documents, seq_len):
    from transformers import DataCollatorWithFlattening

    store = write_store(make_folder(), documents)
    rows = Plan(store, PlanSpec(seq_len=seq_len, global_batch_size=1)).rows(0, 5)
    spans = [store[d].ids[a:b].astype(np.int64).tolist() for _, d, a, b in list_spans(rows)]
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True, return_tensors="np")
    theirs = collate([{"input_ids": span, "labels": span} for span in spans])
    ours = assemble_varlen(store.reader, rows, "aligned")
    assert set(ours) == set(theirs)
    for key, value in theirs.items():
        assert np.array_equal(ours[key], value), key
        if isinstance(value, np.ndarray):
            assert ours[key].dtype == value.dtype
            assert ours[key].shape == value.shape


def test_a_row_without_spans_carries_no_loss(make_folder):
    store = write_store(make_folder(), [[1, 2, 3]])
    rows = Plan(store, PlanSpec(seq_len=4, global_batch_size=3)).rows(0, 3)
    batch = assemble_rows(store.reader, rows, 4, "aligned")
    assert (batch["labels"][1:] == IGNORE_INDEX).all()
    assert (batch["input_ids"][1:] == store.end_id).all()
    assert batch["position_ids"][1:].tolist() == [[0, 1, 2, 3]] * 2


def test_int32_stores_give_the_same_batches(make_folder):
    documents = [[1, 2, 3, 256], [4, 5, 256]]
    batches = []
    for dtype in ("uint16", "int32"):
        store = write_store(make_folder(), documents, dtype=dtype)
        rows = Plan(store, PlanSpec(seq_len=8, global_batch_size=1)).rows(0, 1)
        batches.append(assemble_rows(store.reader, rows, 8, "aligned")["input_ids"])
    # Keys come from the seed alone, so two stores of equal lengths share an order.
    assert np.array_equal(*batches)


def test_a_varlen_step_without_spans_is_one_token_of_padding(make_folder):
    store = write_store(make_folder(), [[1, 2, 3]])
    rows = Plan(store, PlanSpec(seq_len=4, global_batch_size=2)).rows(1, 2)
    batch = assemble_varlen(store.reader, rows, "shifted")
    assert batch["input_ids"].tolist() == [[store.end_id]]
    assert batch["labels"].tolist() == [[IGNORE_INDEX]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 1]


@pytest.mark.parametrize("form", ["rows", "varlen"])
@pytest.mark.parametrize("weighted", [False, True])
def test_batches_have_the_declared_keys(make_folder, form, weighted):
    trained = [[0.5] * n for n in range(1, 9)] if weighted else None
    store = write_store(make_folder(), [[n] * n for n in range(1, 9)], trained=trained)
    batch = Loader(store, seq_len=16, global_batch_size=2, form=form, output="numpy")[0]
    spans = int((batch["position_ids"] == 0).sum())
    sizes = {"R": 2, "S": 16, "T": batch["input_ids"].shape[1], "N + 1": spans + 1}
    presence = {"always", "if the data has loss weights"} if weighted else {"always"}
    expected = {}
    for key in BATCH_KEYS:
        shape = key.rows_shape if form == "rows" else key.varlen_shape
        if shape and key.presence in presence:
            axes = shape.strip("[]").split(", ")
            expected[key.name] = key.dtype if shape == "scalar" else (
                key.dtype, tuple(sizes.get(axis) or int(axis) for axis in axes)
            )  # fmt: skip
    assert expected == {
        name: type(value).__name__ if isinstance(value, int) else (str(value.dtype), value.shape)
        for name, value in batch.items()
    }
