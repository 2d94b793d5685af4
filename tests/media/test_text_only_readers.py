"""Readers of text refuse a store with media instead of training on placeholders."""

import pytest

import batchloom
from batchloom import InputError, PlanError
from batchloom.batches import add_dense_mask, add_image_masks, check_text_only, forms
from batchloom.cli import run_command_line
from batchloom.compat import GPTDataLoader, PretrainingDataset
from batchloom.store import export_store
from media.processors import PROCESSORS, save_processor
from media.sample_media import write_images

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
MESSAGE = "holds images or audio"


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("refused")
    processor = str(save_processor(PROCESSORS["qwen2_vl"](), folder / "processor"))
    batchloom.prepare(
        write_images(folder / "in", 3),
        out=folder / "store",
        tokenizer=processor,
        media={"processor": processor},
        val_fraction=0,
    )
    return batchloom.open_store(folder / "store")


def test_readers_of_tokens_refuse_it(store, tmp_path):
    for to in ("megatron", "flat", "parquet"):
        with pytest.raises(InputError, match=MESSAGE):
            export_store(store.path, to=to, out=tmp_path / to)
    with pytest.raises(InputError, match=MESSAGE):
        PretrainingDataset(store.path, seq_length=64, tokenizer=str(store.path))
    with pytest.raises(InputError, match=MESSAGE):
        GPTDataLoader({"block_size": 64, "batch_size": 2}, dataset_dir=store.path)
    with pytest.raises(InputError, match="is a shard of a store of documents with images or audio"):
        batchloom.open_store(store.path / "train" / "shard_00000")


def test_forms_of_tokens_refuse_it(store):
    batch = batchloom.Loader(store, seq_len=600, global_batch_size=2)[0]
    for form in (forms.to_padded, forms.to_varlen, forms.to_megatron):
        with pytest.raises(PlanError, match="holds images or audio"):
            form(batch)
    with pytest.raises(PlanError, match="the batch has no token_type_ids"):
        add_image_masks(batch, 4)
    assert add_dense_mask(batch)["attention_mask"].shape == (2, 1, 600, 600)


def test_text_trainers_refuse_it(store, tmp_path, capsys):
    loader = batchloom.Loader(store, seq_len=600, global_batch_size=2)
    assert loader.holds_media
    with pytest.raises(InputError, match=f"{MESSAGE}, which a trainer does not pass on yet"):
        check_text_only(loader, "a trainer")
    commands = (
        ["train", "--data", str(store.path), "--out", str(tmp_path / "run"), "--seq-len", "600"],
        ["compare", str(store.path), "--steps", "1"],
    )
    for command in commands:
        assert run_command_line(command) == 1, command
        assert MESSAGE in capsys.readouterr().err
