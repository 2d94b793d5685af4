"""All forms train the same tokens and equal what their consumers make."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import batchloom
from batchloom import PlanError, SettingsError
from batchloom.batches import IGNORE_INDEX, Batch, forms, masks
from batchloom.plan import Mesh
from batchloom.testing import write_store
from oracles import build_gpt_dataset, import_megatron as megatron_core, write_megatron_pair
from tiers import examples

DOCUMENTS = st.lists(
    st.lists(st.tuples(st.integers(0, 255), st.booleans()), min_size=1, max_size=40),
    min_size=1,
    max_size=12,
)


@pytest.fixture(scope="module")
def make_folder(tmp_path_factory):
    return lambda: tmp_path_factory.mktemp("store") / "s"


def make_store(make_folder, documents):
    """Write a store of (id, is trained) pairs."""
    ids = [[token for token, _ in document] for document in documents]
    return write_store(make_folder(), ids, trained=[[int(t) for _, t in d] for d in documents])


def build_loader(store, **options):
    return batchloom.Loader(
        store,
        **{
            "seq_len": 32,
            "global_batch_size": 4,
            "output": "numpy",
            "rank": 0,
            "world_size": 1,
            "prefetch": 0,
            **options,
        },
    )


def to_numpy(batch):
    """Return the arrays of a batch as numpy arrays."""
    return {k: v.numpy() if hasattr(v, "numpy") else v for k, v in batch.items()}


def assert_same_batches(actual, expected):
    actual, expected = to_numpy(actual), to_numpy(expected)
    assert set(actual) == set(expected)
    for key, value in expected.items():
        assert np.array_equal(actual[key], value), key
        if isinstance(value, np.ndarray):
            assert (actual[key].dtype, actual[key].shape) == (value.dtype, value.shape), key


def list_trained_pairs(ids, labels, *, shifts):
    """Return the sorted (token, next token) pairs of trained positions.

    ``shifts`` is true if the consumer shifts the labels.
    """
    if shifts:
        ids, labels = ids[:, :-1], labels[:, 1:]
    trained = labels != IGNORE_INDEX
    return sorted(zip(ids[trained].tolist(), labels[trained].tolist(), strict=True))


@given(
    documents=DOCUMENTS,
    options=st.fixed_dictionaries(
        {
            "labels": st.sampled_from(["aligned", "shifted"]),
            "packing": st.sampled_from(["none", "best_fit", "wrap"]),
            "align": st.sampled_from([1, 4]),
            "output": st.sampled_from(["numpy", "torch"]),
            "seed": st.integers(0, 5),
        }
    ),
)
@settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
def test_all_forms_train_the_same_tokens(make_folder, documents, options):
    store = make_store(make_folder, documents)
    loader = build_loader(store, **options)
    shifted_options = {**options, "labels": "shifted"}
    varlen, shifted = build_loader(store, **options, form="varlen"), build_loader(store, **shifted_options)
    shifts = options["labels"] == "aligned"
    # The last step has rows without documents.
    for is_full_batch, step in [(True, 0), (True, len(loader) - 1), (False, len(loader) - 1)]:
        batch = loader[step] if is_full_batch else loader[step].split(2)[1]
        expected = list_trained_pairs(to_numpy(batch)["input_ids"], to_numpy(batch)["labels"], shifts=shifts)
        flat, moved, megatron = (
            to_numpy(form(batch)) for form in (forms.to_varlen, forms.to_shifted, forms.to_megatron)
        )
        if is_full_batch:
            assert_same_batches(forms.to_varlen(batch), varlen[step])
            assert_same_batches(forms.to_shifted(batch), shifted[step])
        assert list_trained_pairs(flat["input_ids"], flat["labels"], shifts=shifts) == expected
        assert list_trained_pairs(moved["input_ids"], moved["labels"], shifts=False) == expected
        trained_labels = np.where(megatron["loss_mask"] == 1, megatron["labels"], IGNORE_INDEX)
        assert list_trained_pairs(megatron["tokens"], trained_labels, shifts=False) == expected
        assert (megatron["labels"] >= 0).all()
        if options["packing"] == "none":
            padded = to_numpy(forms.to_padded(batch))
            assert list_trained_pairs(padded["input_ids"], padded["labels"], shifts=shifts) == expected


@pytest.mark.parametrize("output", ["numpy", "torch"])
def test_padded_is_cut_to_its_longest_document(make_folder, output):
    documents = [[7] * 3, [8] * 9, [9] * 5]
    store = write_store(make_folder(), documents)
    options = {"packing": "none", "output": output, "shuffle": False}
    batch = build_loader(store, **options)[0]
    padded = forms.to_padded(batch, multiple_of=4)
    assert (padded.step, padded.origin) == (batch.step, batch.origin)
    arrays = to_numpy(padded)
    assert {(v.shape, v.dtype.name) for v in arrays.values()} == {((4, 12), "int64")}
    # The row without a document attends to one token and has no loss.
    assert arrays["attention_mask"].sum(1).tolist() == [3, 9, 5, 1]
    assert arrays["input_ids"][1].tolist() == [8] * 9 + [store.end_id] * 3
    assert (arrays["labels"][3] == IGNORE_INDEX).all()
    assert arrays["position_ids"].tolist() == [list(range(12))] * 4
    assert to_numpy(forms.to_padded(batch))["labels"].shape == (4, 16)
    assert to_numpy(forms.to_padded(batch, multiple_of=100))["labels"].shape == (4, 32)
    parts = [to_numpy(forms.to_padded(part, multiple_of=1)) for part in batch.split(2)]
    assert [part["input_ids"].shape for part in parts] == [(2, 9), (2, 5)]


def test_grouping_saves_what_padded_would_pad(make_folder):
    rng = np.random.default_rng(0)
    store = write_store(make_folder(), [[7] * n for n in rng.integers(2, 250, 400).tolist()])
    slots = {}
    for window in (0, 20):
        loader = build_loader(store, seq_len=256, packing="none", group_by_length=window)
        padded = [forms.to_padded(batch) for batch in loader]
        slots[window] = sum(batch["attention_mask"].size for batch in padded)
        assert sum(int(batch["attention_mask"].sum()) for batch in padded) == store.tokens
    assert 1 - store.tokens / slots[0] > 0.35
    assert 1 - store.tokens / slots[20] < 0.08


def test_flattened_is_what_transformers_collates(make_folder):
    from transformers import DataCollatorWithFlattening

    store = write_store(make_folder(), [[n] * n for n in range(3, 30)])
    loader = build_loader(store, output="torch")
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    for batch in loader:
        rows = loader.plan.rows(*loader.plan.positions_of(batch.step))
        spans = store.read(rows.documents, rows.starts, rows.lengths)
        theirs = collate([{"input_ids": span.astype(np.int64).tolist()} for span in spans])
        assert_same_batches(forms.to_varlen(batch), theirs)


def test_a_flattened_batch_is_split_as_the_loaders_is(make_folder):
    store = write_store(make_folder(), [[n] * n for n in range(3, 30)])
    parts = forms.to_varlen(build_loader(store)[0]).split(2)
    for actual, expected in zip(parts, build_loader(store, form="varlen")[0].split(2), strict=True):
        assert_same_batches(actual, expected)


@pytest.mark.parametrize("packing", ["best_fit", "none"])
def test_masks_are_the_ones_of_the_reference_model(make_folder, packing):
    import torch
    from torch.nn.attention.flex_attention import create_mask

    from batchloom.train import make_attention_mask

    store = write_store(make_folder(), [[n] * n for n in range(3, 30)])
    batch = build_loader(store, output="torch", packing=packing)[0]
    expected = make_attention_mask(batch["position_ids"])
    dense = masks.add_dense_mask(batch)
    assert dense["attention_mask"].dtype == torch.bool
    assert torch.equal(dense["attention_mask"], expected)
    numpy_mask = masks.add_dense_mask(build_loader(store, packing=packing)[0])["attention_mask"]
    assert np.array_equal(numpy_mask, expected.numpy())
    blocks = masks.add_block_mask(batch)["attention_mask"]
    assert torch.equal(create_mask(blocks.mask_mod, 4, 1, 32, 32, device="cpu"), expected)
    assert masks.add_block_mask(batch).step == dense.step == 0


def make_llama(attention):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        attn_implementation=attention,
        use_cache=False,
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize(
    ("attention", "packing", "form"),
    [
        ("sdpa", "best_fit", masks.add_dense_mask),
        ("eager", "best_fit", lambda batch: masks.add_dense_mask(batch, additive="float32")),
        ("sdpa", "none", forms.to_padded),
        ("eager", "none", forms.to_padded),
    ],
)
def test_a_model_gives_the_loss_of_the_documents_alone(make_folder, attention, packing, form):
    import torch

    documents = [[(7 * n + k) % 256 for k in range(n)] for n in range(3, 30)]
    store = write_store(make_folder(), documents)
    model = make_llama(attention)

    def compute_loss(batch):
        arrays = {k: v for k, v in batch.items() if k != "labels"}
        scores = model(**arrays).logits[:, :-1].flatten(0, 1)
        return torch.nn.functional.cross_entropy(scores, batch["labels"][:, 1:].flatten(), reduction="sum")

    alone = [torch.tensor(document)[None] for document in documents]
    with torch.no_grad():
        expected = sum(float(compute_loss({"input_ids": ids, "labels": ids})) for ids in alone)
        losses = [compute_loss(form(batch)) for batch in build_loader(store, output="torch", packing=packing)]
    assert all(torch.isfinite(loss) for loss in losses)
    assert sum(map(float, losses)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("mask", ["additive", "bool"])
def test_a_batch_without_any_loss_has_a_finite_one(make_folder, mask):
    import torch

    document = [(n, False) for n in range(20)]
    store = make_store(make_folder, [document, [(n, True) for n in range(3)]])
    batch = build_loader(store, output="torch", packing="none", global_batch_size=1, shuffle=False)[0]
    additive = "float32" if mask == "additive" else None
    for converted in (forms.to_padded(batch), masks.add_dense_mask(batch, additive=additive)):
        assert (converted["labels"] == IGNORE_INDEX).all()
        arrays = {k: v for k, v in converted.items() if k != "labels"}
        assert torch.isfinite(make_llama("eager" if additive else "sdpa")(**arrays).logits).all()
    assert not forms.to_megatron(batch)["loss_mask"].any()
    assert (forms.to_varlen(batch)["labels"] == IGNORE_INDEX).all()


def test_additive_masks_have_the_type_that_is_asked_for(make_folder):
    import torch

    batch = build_loader(write_store(make_folder(), [[1, 2], [3]]), output="torch")[0]
    for name in ("float32", "bfloat16", "float16", "float64"):
        mask = masks.add_dense_mask(batch, additive=name)["attention_mask"]
        assert mask.dtype == getattr(torch, name)
        assert set(mask.unique().tolist()) == {torch.finfo(mask.dtype).min, 0.0}
    numpy_batch = build_loader(write_store(make_folder(), [[1, 2], [3]]))[0]
    expected = masks.add_dense_mask(batch, additive="float16")["attention_mask"].numpy()
    assert np.array_equal(masks.add_dense_mask(numpy_batch, additive="float16")["attention_mask"], expected)
    with pytest.raises(SettingsError, match="additive: 'bfloat16' is none of float32, float16"):
        masks.add_dense_mask(numpy_batch, additive="bfloat16")


@pytest.fixture
def process_group(tmp_path):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.filterwarnings("ignore")
def test_megatron_reads_the_same_tokens_and_labels(make_folder, tmp_path):
    document = [int(n) for n in np.random.default_rng(0).permutation(16 * 6 + 1)]
    blend = ([str(write_megatron_pair(tmp_path / "theirs", [[document]]))], None)
    dataset = build_gpt_dataset(blend, tmp_path / "cache", seq_len=16, samples=6, resets=True)
    theirs = {tuple(sample["tokens"].tolist()): sample for sample in (dataset[n] for n in range(6))}
    store = write_store(make_folder(), [document])
    loader = build_loader(store, seq_len=16, packing="wrap", output="torch", shuffle=False)
    ours = [forms.to_megatron(batch, attention_mask=True) for batch in loader]
    rows = [{key: value[row] for key, value in batch.items()} for batch in ours for row in range(4)]
    for row in rows[:6]:
        expected = theirs[tuple(row["tokens"].tolist())]
        both_trained = (row["loss_mask"] * expected["loss_mask"]).bool()
        assert both_trained.sum() == 15
        assert (row["labels"][both_trained] == expected["labels"][both_trained]).all()
        for key in ("tokens", "labels", "loss_mask", "position_ids", "attention_mask"):
            assert (row[key].dtype, row[key].shape) == (expected[key].dtype, expected[key].shape)
        assert (row["position_ids"] == expected["position_ids"]).all()
        assert (row["attention_mask"] == expected["attention_mask"]).all()


@pytest.mark.filterwarnings("ignore")
def test_packed_rows_have_the_positions_and_masks_megatron_resets(make_folder):
    store = write_store(make_folder(), [[*range(n), 256] for n in range(1, 40)])
    loader = build_loader(store, packing="wrap", output="torch", shuffle=False)
    resets = megatron_core("gpt_dataset")._get_ltor_masks_and_position_ids
    # The last step is left out: Megatron takes the end tokens of its padding for documents.
    for batch in [loader[step] for step in range(len(loader) - 1)]:
        ours = forms.to_megatron(batch, attention_mask=True)
        for tokens, mask, positions in zip(ours["tokens"], ours["attention_mask"], ours["position_ids"], strict=True):
            theirs = resets(tokens, 256, True, True, False, True)
            assert (positions == theirs[2]).all()
            assert (mask == theirs[0]).all()


def test_forms_are_made_behind_a_dataloader_and_not_of_rebuilt_batches(make_folder):
    from torch.utils.data import DataLoader

    from batchloom.adapters.pytorch import LoaderIterable

    store = write_store(make_folder(), [[n] * n for n in range(3, 30)])
    loader = build_loader(store, output="torch")
    items = DataLoader(LoaderIterable(loader), batch_size=None, num_workers=1)
    for received, batch in zip(items, loader, strict=True):
        assert_same_batches(forms.to_varlen(received), forms.to_varlen(batch))
    for form in (forms.to_padded, forms.to_shifted, forms.to_varlen, forms.to_megatron):
        with pytest.raises(PlanError, match=f"rebuilt.*which {form.__name__} needs: apply it"):
            form(Batch(dict(batch)))


def test_what_a_form_cannot_take_is_refused(make_folder):
    store = write_store(make_folder(), [[n] * n for n in range(3, 30)])
    with pytest.raises(PlanError, match=r"holds \d documents.*packing='none'.*to_varlen"):
        forms.to_padded(build_loader(store)[0])
    with pytest.raises(SettingsError, match="multiple_of: 0 is not a whole number"):
        forms.to_padded(build_loader(store, packing="none")[0], multiple_of=0)
    varlen = build_loader(store, form="varlen")[0]
    for form in (forms.to_padded, forms.to_varlen):
        with pytest.raises(PlanError, match="the batch is varlen.*form='rows'"):
            form(varlen)
    options = {"labels": "shifted", "mesh": Mesh(context=2), "output": "torch"}
    sliced = build_loader(store, **options, world_size=2)[0]
    for form in (forms.to_padded, forms.to_varlen, masks.add_dense_mask, masks.add_block_mask):
        with pytest.raises(PlanError, match=f"{form.__name__} takes whole rows.*rank's slice"):
            form(sliced)
    assert forms.to_megatron(sliced)["loss_mask"].shape == (4, 16)
    with pytest.raises(SettingsError, match="give Loader\\(output='torch'\\)"):
        masks.add_block_mask(build_loader(store)[0])
    rebuilt = dict(build_loader(store, output="torch")[0])
    for form in (masks.add_dense_mask, masks.add_block_mask):
        with pytest.raises(PlanError, match=f"rebuilt.*which {form.__name__} needs: apply it"):
            form(rebuilt)


def test_masks_of_parts(make_folder):
    torch = pytest.importorskip("torch")
    batch = build_loader(write_store(make_folder(), [[n] * n for n in range(3, 30)]), output="torch")[0]
    with pytest.raises(PlanError, match="split first, then add_block_mask to each part"):
        masks.add_block_mask(batch).split(2)
    full_mask = masks.add_dense_mask(batch)["attention_mask"]
    for part, dense in zip(batch.split(2), masks.add_dense_mask(batch).split(2), strict=True):
        block_mask = masks.add_block_mask(part)["attention_mask"]
        size, seq_len = part["input_ids"].shape
        rows, columns = torch.arange(size)[:, None, None], torch.arange(seq_len)
        actual = block_mask.mask_mod(rows, 0, columns[:, None], columns)
        assert torch.equal(actual, dense["attention_mask"][:, 0])
    assert torch.equal(dense["attention_mask"], full_mask[2:])


def test_forms_of_forms(make_folder):
    store = write_store(make_folder(), [[n] * n for n in range(3, 30)])
    batch = build_loader(store, packing="none")[0]
    padded = forms.to_padded(batch)
    assert_same_batches(forms.to_varlen(padded), forms.to_varlen(batch))
    moved = forms.to_shifted(padded)
    assert list_trained_pairs(padded["input_ids"], padded["labels"], shifts=True) == list_trained_pairs(
        moved["input_ids"], moved["labels"], shifts=False
    )
    assert_same_batches(forms.to_shifted(moved), moved)
    assert all(a <= b for a, b in pairwise(forms.to_varlen(padded)["cu_seq_lens_q"]))


@pytest.mark.parametrize("form", ["rows", "varlen"])
def test_a_batch_is_moved_with_its_step_and_its_rows(make_folder, form):
    documents = [[(n % 256, True) for n in range(k)] for k in range(3, 40)]
    loader = build_loader(make_store(make_folder, documents), output="torch", form=form)
    batch = loader[2]
    moved = batch.to("meta", non_blocking=True)
    assert (moved.step, moved.origin) == (2, batch.origin)
    assert {value.device.type for value in moved.values() if hasattr(value, "device")} == {"meta"}
    assert set(moved) == set(batch)
    for ours, theirs in zip(batch.split(2), batch.to("cpu").split(2), strict=True):
        assert_same_batches(theirs, ours)


def test_masks_are_moved_with_their_batch_and_arrays_are_not(make_folder):
    store = make_store(make_folder, [[(n % 256, True) for n in range(20)]] * 9)
    batch = build_loader(store, output="torch")[0]
    masked = Batch(
        {
            **batch,
            "attention_mask": {"full_attention": masks.add_dense_mask(batch)["attention_mask"]},
        }
    )
    assert masked.to("meta")["attention_mask"]["full_attention"].device.type == "meta"
    moved = masks.add_block_mask(batch).to("cpu")["attention_mask"]
    assert moved.shape == masks.add_block_mask(batch)["attention_mask"].shape
    assert_same_batches(build_loader(store)[0].to("cpu"), batch)
