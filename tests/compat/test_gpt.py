"""``GPTDataLoader`` over texts, stores and headerless shards."""

from types import SimpleNamespace

import numpy as np
import pytest

from batchloom import StoreError
from batchloom.compat import GPTDataLoader
from batchloom.testing import write_store

CONFIG = {"block_size": 16, "batch_size": 4, "output": "numpy", "val_fraction": 0.0}


def write_shards(folder, tokens, sizes, dtype="<u4"):
    folder.mkdir(parents=True)
    at = 0
    for number, size in enumerate(sizes):
        tokens[at : at + size].astype(dtype).tofile(folder / f"shard_{number:05d}.bin")
        at += size
    return folder


def read_batches(loader, count, split="train"):
    """Return the inputs and targets of ``count`` batches, in their order."""
    batches = [loader.get_batch(split) for _ in range(count)]
    return np.concatenate([x for x, _ in batches]), np.concatenate([y for _, y in batches])


def test_each_position_is_a_target_once_an_epoch(tmp_path):
    folder = write_shards(tmp_path / "d", np.arange(1601), [300, 7, 1, 1293])
    loader = GPTDataLoader(CONFIG, dataset_dir=folder)
    assert loader.batches_per_epoch() == 25
    first_targets = []
    for _ in range(3):
        x, y = read_batches(loader, 25)
        assert x.shape == (100, 16)
        assert (y == x + 1).all()
        assert sorted(y.ravel().tolist()) == list(range(1, 1601))
        first_targets.append(y[:, 0].tolist())
    assert first_targets[0] != first_targets[1] != first_targets[2]
    same_seed = GPTDataLoader(CONFIG, dataset_dir=folder)
    assert read_batches(same_seed, 25)[1][:, 0].tolist() == first_targets[0]
    other_seed = GPTDataLoader({**CONFIG, "seed": 1}, dataset_dir=folder)
    assert read_batches(other_seed, 25)[1][:, 0].tolist() != first_targets[0]


def test_what_fills_no_window_is_another_part_in_each_epoch(tmp_path):
    folder = write_shards(tmp_path / "d", np.arange(170), [170])
    loader = GPTDataLoader({**CONFIG, "batch_size": 2}, dataset_dir=folder)
    unused = []
    for _ in range(60):
        _, y = read_batches(loader, 5)
        flat = sorted(y.ravel().tolist())
        assert len(set(flat)) == 160
        unused.append(set(range(1, 170)) - set(flat))
        assert len(unused[-1]) == 9
    assert set.intersection(*unused) == set()


def test_epochs_follow_each_other_inside_a_batch(tmp_path):
    folder = write_shards(tmp_path / "d", np.arange(16 * 6 + 1), [97])
    _, y = read_batches(GPTDataLoader(CONFIG, dataset_dir=folder), 3)
    for epoch in range(2):
        rows = y[6 * epoch : 6 * epoch + 6]
        assert sorted(rows.ravel().tolist()) == list(range(1, 97))


def test_ranks_share_an_epoch(tmp_path, monkeypatch):
    folder = write_shards(tmp_path / "d", np.arange(1601), [1601])
    targets = []
    for rank in range(5):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "5")
        loader = GPTDataLoader(CONFIG, dataset_dir=folder)
        assert loader.batches_per_epoch() == 5
        targets += read_batches(loader, 5)[1].ravel().tolist()
    assert sorted(targets) == list(range(1, 1601))


def test_texts_and_objects_and_tensors():
    import torch

    config = SimpleNamespace(block_size=8, batch_size=2, n_layer=12)
    loader = GPTDataLoader(config, "bytes")
    text = "To be, or not to be, that is the question. " * 50
    assert loader.prepare_data(text) == {"train": 1935, "val": 215}
    x, y = loader.get_batch("train")
    assert x.dtype == y.dtype == torch.int64
    assert x.shape == (2, 8)
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert bytes(x[0].tolist()).decode() in text
    assert bytes(loader.get_batch("validation")[0][1].tolist()).decode() in text[1935 - 44 :]


@pytest.mark.parametrize("layout", ["subfolders", "files", "root"])
def test_layouts_of_headerless_folders(tmp_path, layout):
    train, val = np.arange(1000), np.arange(2000, 2200)
    folder = tmp_path / "d"
    if layout == "subfolders":
        write_shards(folder / "train", train, [600, 400], "<u2")
        write_shards(folder / "val", val, [200], "<u2")
    elif layout == "files":
        folder.mkdir()
        train.astype("<u2").tofile(folder / "train.bin")
        val.astype("<u2").tofile(folder / "val.bin")
    else:
        write_shards(folder, np.concatenate([train, val]), [700, 500], "<u2")
    fraction = 200.5 / 1200
    config = {**CONFIG, "dtype": "uint16", "val_fraction": fraction if layout == "root" else 0.1}
    loader = GPTDataLoader(config, dataset_dir=folder)
    assert set(read_batches(loader, 20)[1].ravel().tolist()) < set(range(1000))
    assert set(read_batches(loader, 4, "val")[1].ravel().tolist()) < set(range(2000, 2200))


def test_stores(tmp_path):
    documents = [[n % 250] * 40 + [256] for n in range(60)]
    store = write_store(tmp_path / "s", {"train": documents[:50], "val": documents[50:]}, documents_per_shard=7)
    assert len(store.shards) == 8
    stream = np.concatenate(documents[:50])
    for path in (tmp_path / "s", tmp_path / "s" / "train"):
        loader = GPTDataLoader(CONFIG, store.tokenizer, path)
        x, y = read_batches(loader, loader.batches_per_epoch())
        tokens = stream.tolist()
        for row_x, row_y in zip(x[:128].tolist(), y[:128].tolist(), strict=True):
            assert row_x[1:] == row_y[:-1]
            assert any(tokens[a : a + 17] == [*row_x, row_y[-1]] for a in range(len(tokens)))
    assert GPTDataLoader(CONFIG, "bytes", tmp_path / "s").get_batch("val")[0].min() >= 50


def test_what_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path, tmp_path / "empty"):
        with pytest.raises(FileNotFoundError, match=f"No training shards found in {folder}: "):
            GPTDataLoader(CONFIG, "bytes", folder)
    with pytest.raises(FileNotFoundError, match="There is no file or folder"):
        GPTDataLoader(CONFIG, "bytes", tmp_path / "nowhere")
    narrow = write_shards(tmp_path / "narrow", np.arange(1001), [1001], "<u2")
    with pytest.raises(ValueError, match=r"2,002 bytes, not a multiple of the 4 of uint32"):
        GPTDataLoader(CONFIG, "bytes", narrow)
    wide = write_shards(tmp_path / "wide", np.arange(1000), [1000], "<u2")
    with pytest.raises(ValueError, match=r"they are not uint32 \(config.dtype\)"):
        GPTDataLoader(CONFIG, "bytes", wide).get_batch("train")
    write_store(tmp_path / "masked", [[1, 2, 3]] * 40, trained=[[0, 1, 1]] * 40)
    for path in (tmp_path / "masked", tmp_path / "masked" / "train"):
        with pytest.raises(ValueError, match=r"tokens that are not trained.*batchloom.Loader"):
            GPTDataLoader(CONFIG, "bytes", path)
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "shard_00000.bin").touch()
    with pytest.raises(FileNotFoundError, match="shard_00000.bin is empty: it has 0 bytes"):
        GPTDataLoader(CONFIG, "bytes", tmp_path / "none")


@pytest.mark.parametrize("pattern", ["train/shard_00001.idx", "*/*.idx", "*.json"])
def test_shards_of_a_damaged_store_are_never_read_as_headerless(tmp_path, pattern):
    # An even number of ids could be read as half as many ids of twice the size.
    write_store(tmp_path, {"train": [[1, 2, 3, 256]] * 40, "val": [[5]] * 2}, documents_per_shard=7)
    for path in tmp_path.glob(pattern):
        path.unlink()
    for folder in (tmp_path, tmp_path / "train"):
        try:
            loader = GPTDataLoader(CONFIG, dataset_dir=folder)
        except StoreError:
            continue
        x, _ = read_batches(loader, loader.batches_per_epoch())
        assert set(x.ravel().tolist()) == {1, 2, 3, 256}
        assert "json" in pattern


def test_misuse_is_reported_at_once():
    with pytest.raises(
        ValueError,
        match=r"config.block_size: missing.*config.batch_size: 'x'.*config.dtype: 'float32' is not one of",
    ):
        GPTDataLoader({"batch_size": "x", "dtype": "float32"}, "bytes")
    loader = GPTDataLoader(CONFIG, "bytes")
    with pytest.raises(ValueError, match=r"There is no data yet: call prepare_data\(text\)"):
        loader.get_batch("train")
    with pytest.raises(ValueError, match="split: 'trian' is not one of train, val; did you mean"):
        loader.get_batch("trian")
    for split in (None, ["train"]):
        with pytest.raises(ValueError, match="split: .* is not one of train, val"):
            loader.get_batch(split)
    for text in (b"short", None, ["short"]):
        with pytest.raises(ValueError, match="text: .* is not a text; give one str"):
            loader.prepare_data(text)
    with pytest.raises(ValueError, match="config.dtype: '>u4' is not one of uint16, uint32, int32"):
        GPTDataLoader({**CONFIG, "dtype": ">u4"}, "bytes")
    loader.prepare_data("short")
    with pytest.raises(ValueError, match="train has 5 tokens, and block_size 16 needs 17"):
        loader.get_batch("train")
