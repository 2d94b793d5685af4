"""The native kernel gives the bytes of numpy, and numpy takes over where the kernel cannot be used."""

from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import batchloom
from batchloom import Mixture, Plan, PlanSpec
from batchloom.batches import assemble_rows, assemble_varlen
from batchloom.batches.assembly import get_kernel
from batchloom.core.errors import SettingsError, StoreError
from batchloom.core.native import KERNEL_SOURCE, compile_library, find_compiler, get_library_path, load_library
from batchloom.store.format import encode_index
from batchloom.testing import write_store
from tiers import examples

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C compiler")
INTEGERS = [np.dtype(name) for name in ("u1", "i1", "<i2", "<i4", "<i8", "<u2")]
SETTINGS = {"seq_len": 32, "global_batch_size": 4, "output": "numpy", "rank": 0, "world_size": 1, "prefetch": 0}


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    try:
        library = load_library(get_library_path(KERNEL_SOURCE, KERNEL_SOURCE.parent), KERNEL_SOURCE)
    except OSError:
        # None is installed, or one of another version of the source.
        library = load_library(compile_library(KERNEL_SOURCE, tmp_path_factory.mktemp("kernel")), KERNEL_SOURCE)
    return get_kernel(library)


@pytest.fixture(scope="module")
def make_folder(tmp_path_factory):
    return lambda: tmp_path_factory.mktemp("store")


@contextmanager
def using(way):
    """Use a kernel, or numpy if it is None."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("batchloom.batches.assembly.array_filling.find_kernel", lambda: way)
        yield


def assert_same(kernel, reader, rows, seq_len, labels, align, dtype):
    """Assemble the rows and the varlen form by the kernel and by numpy, and compare."""
    options, highest_ids = {"dtype": np.dtype(dtype)}, []
    options["check_ids"] = highest_ids.append
    forms = []
    for way in (kernel, None):
        with using(way):
            forms.append(
                {
                    "rows": assemble_rows(reader, rows, seq_len, labels, align, **options),
                    "varlen": assemble_varlen(reader, rows, labels, align, **options),
                }
            )
    assert highest_ids[:2] == highest_ids[2:]
    for form, arrays in forms[0].items():
        assert list(arrays) == list(forms[1][form])
        for name, array in arrays.items():
            ours, expected = np.asarray(array), np.asarray(forms[1][form][name])
            assert (ours.dtype, ours.shape) == (expected.dtype, expected.shape)
            assert ours.tobytes() == expected.tobytes(), (form, name)


@needs_compiler
@given(
    data=st.data(),
    documents=st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=70), min_size=1, max_size=20),
    dtype=st.sampled_from(["uint16", "int32"]),
    loss=st.sampled_from([None, (0, 1), (0, 0.5, 1, 3)]),
    seq_len=st.sampled_from([4, 8, 36, 128]),
    labels=st.sampled_from(["aligned", "shifted"]),
    packing=st.sampled_from(["best_fit", "wrap", "none"]),
    align=st.sampled_from([1, 4]),
    ids=st.sampled_from([np.int64, np.int32]),
    verify=st.sampled_from(["off", "full"]),
)
@settings(max_examples=examples(150), deadline=None)
def test_kernel_and_numpy_give_the_same_bytes(
    kernel, make_folder, data, documents, dtype, loss, seq_len, labels, packing, align, ids, verify
):
    trained = None
    if loss is not None:
        trained = [data.draw(st.lists(st.sampled_from(loss), min_size=len(d), max_size=len(d))) for d in documents]
    folder = make_folder() / "s"
    write_store(folder, documents, documents_per_shard=7, dtype=dtype, trained=trained)
    # Verified stores are read into memory first, and others in place.
    reader = batchloom.open_store(folder, verify=verify).reader
    assert (reader.locate(np.zeros(1, np.int64)) is None) == (verify == "full")
    plan = Plan(
        batchloom.open_store(folder), PlanSpec(seq_len=seq_len, global_batch_size=1, packing=packing, align=align)
    )
    # The last rows may be beyond the end of the run, and empty.
    assert_same(kernel, reader, plan.rows(0, 9), seq_len, labels, align, ids)
    assert_same(kernel, reader, plan.rows(10_000, 10_002), seq_len, labels, align, ids)


@needs_compiler
@pytest.mark.parametrize("loss", [(0, 1), (0, 0.5, 1)], ids=["mask", "weights"])
@pytest.mark.parametrize("labels", ["aligned", "shifted"])
def test_runs_of_equal_flags(kernel, make_folder, loss, labels):
    rng, documents, trained = np.random.default_rng(6), [], []
    for _ in range(40):
        runs = rng.integers(1, 40, 12)
        trained.append(np.repeat(rng.choice(loss, 12), runs).tolist())
        documents.append(rng.integers(0, 256, runs.sum()).tolist())
    store = write_store(make_folder() / "s", documents, documents_per_shard=9, trained=trained)
    rows = Plan(store, PlanSpec(seq_len=128, global_batch_size=1)).rows(0, 60)
    for ids in (np.int64, np.int32):
        assert_same(kernel, store.reader, rows, 128, labels, 1, ids)


@needs_compiler
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@given(data=st.data())
@settings(max_examples=examples(20), deadline=None)
def test_prefixes_of_every_dtype(kernel, make_folder, dtype, data):
    info, folder = np.iinfo(dtype), make_folder()
    lengths = np.array(data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=9)), np.uint32)
    total = int(lengths.sum())
    bound = min(info.max, 2**31 - 1)
    lowest = data.draw(st.sampled_from([0, max(info.min, -(2**31))]))
    ids = data.draw(st.lists(st.integers(lowest, bound), min_size=total, max_size=total))
    (folder / "p.bin").write_bytes(np.array(ids, dtype).tobytes())
    (folder / "p.idx").write_bytes(encode_index(lengths, dtype))
    store = batchloom.open_store(folder / "p")
    rows = Plan(store, PlanSpec(seq_len=64, global_batch_size=1)).rows(0, 4)
    for cell in (np.int64, np.int32) if min(ids) >= 0 else (np.int64,):
        assert_same(kernel, store.reader, rows, 64, "aligned", 1, cell)


@needs_compiler
def test_int32_batches_refuse_wide_ids(kernel, make_folder):
    folder = make_folder()
    # As int32, the first id would be 5.
    (folder / "p.bin").write_bytes(np.array([2**32 + 5, 6, 7], "<i8").tobytes())
    (folder / "p.idx").write_bytes(encode_index(np.array([3], np.uint32), np.dtype("<i8")))
    store = batchloom.open_store(folder / "p")
    rows = Plan(store, PlanSpec(seq_len=4, global_batch_size=1)).rows(0, 1)
    for way in (kernel, None):
        with using(way), pytest.raises(StoreError, match="2\\*\\*31 or more"):
            assemble_rows(store.reader, rows, 4, "aligned", dtype=np.dtype(np.int32))


@pytest.fixture(scope="module")
def mixture(make_folder):
    rng = np.random.default_rng(5)
    stores = {}
    for name, dtype, loss in (("a", "uint16", [1]), ("b", "int32", [0, 1]), ("c", "uint16", [0, 0.5, 1])):
        documents = [rng.integers(0, 256, n).tolist() for n in rng.integers(1, 60, 40)]
        trained = [rng.choice(loss, len(document)).tolist() for document in documents]
        stores[name] = write_store(make_folder() / name, documents, documents_per_shard=9, dtype=dtype, trained=trained)
    return Mixture({"a": 1, "b": 1, "c": 1}, stores=stores)


@needs_compiler
@pytest.mark.parametrize("form", ["rows", "varlen"])
def test_loaders_of_mixtures_give_the_same_batches(kernel, mixture, form):
    batches = []
    for way in (kernel, None):
        with using(way):
            loader = batchloom.Loader(mixture, **SETTINGS, form=form, steps=60, align=4)
            # After the ban, some batches have documents that are not read from their shards. All shards are mapped by
            # the end of each part.
            batches.append([loader.batch(step) for step in range(30)])
            loader.edit(batchloom.Edit(step=loader.first_editable_step, ban={"a": tuple(range(0, 40, 3))}))
            batches[-1] += [loader.batch(step) for step in range(30, 60)]
    for batch, expected in zip(*batches, strict=True):
        assert list(batch) == list(expected)
        assert all(np.array_equal(batch[name], expected[name]) for name in batch)


@needs_compiler
def test_ids_outside_the_vocabulary_and_wrong_spans_are_the_same_errors(kernel, make_folder):
    folder = make_folder() / "s"
    store = write_store(folder, [[1, 2, 3, 4]] * 9)
    path = next((folder / "train").glob("*.bin"))
    data = np.fromfile(path, "<u2")
    data[17] = 300
    path.write_bytes(data.tobytes())
    rows = Plan(store, PlanSpec(seq_len=4, global_batch_size=1)).rows(0, 2)
    rows.lengths[1] = 5
    messages = []
    for way in (kernel, None):
        with using(way), pytest.raises(StoreError) as wrong_id:
            list(batchloom.Loader(store, **SETTINGS))
        with using(way), pytest.raises(StoreError, match="has 4 tokens, and a span of it ends at 5") as wrong_span:
            assemble_rows(store.reader, rows, 32, "aligned")
        messages.append((str(wrong_id.value), str(wrong_span.value)))
    assert messages[0] == messages[1]
    assert "holds token id 300 in document 4" in messages[0][0]


@pytest.mark.parametrize("form", ["rows", "varlen"])
def test_int32_ids_and_labels(mixture, form):
    wide = batchloom.Loader(mixture, **SETTINGS, form=form, steps=4, augment={"noise_prob": 0.2, "vocab_size": 257})
    narrow_settings = {**SETTINGS, "dtype": "int32", "augment": wide.feed.augmentation.settings}
    narrow = batchloom.Loader(mixture, **narrow_settings, form=form, steps=4)
    for batch, expected in zip(narrow, wide, strict=True):
        for name, array in expected.items():
            narrowed = name in ("input_ids", "labels")
            assert np.array_equal(batch[name], array)
            assert not narrowed or batch[name].dtype == np.int32
            assert narrowed or np.asarray(batch[name]).dtype == np.asarray(array).dtype


def test_dtypes_that_do_not_hold_the_ids_are_refused(mixture, make_folder):
    with pytest.raises(SettingsError, match="dtype: 'int16' is none of int64, int32"):
        batchloom.Loader(mixture, **SETTINGS, steps=4, dtype="int16")
    folder = make_folder()
    (folder / "p.bin").write_bytes(np.array([1, 2**40]).tobytes())
    (folder / "p.idx").write_bytes(encode_index(np.array([2], np.uint32), np.dtype("<i8")))
    with pytest.raises(StoreError, match="2\\*\\*31 or more, and dtype='int32'"):
        list(batchloom.Loader(batchloom.open_store(folder / "p"), **SETTINGS, dtype="int32"))
