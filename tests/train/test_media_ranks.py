"""Two ranks, of which one has no images in a pass, train as one."""

import json

import pytest
import torch

import batchloom
from batchloom.cli import run_command_line
from processes import run_two_ranks
from train.families import Families, losses, weights

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    return Families(tmp_path_factory.mktemp("families"))


def test_two_ranks_of_which_one_has_no_media_train_as_one(families, tmp_path):
    """LLaVA, some weights of whose tower no loss depends on."""
    family = families["llava"]
    sizes = {"global_batch_size": 4, "batch_size": 1, "order": {"packing": "none"}, "steps": 6}
    optim = {"lr": 0.02, "weight_decay": 0.1, "warmup_steps": 2}
    config = {"seq_len": 320, "eval_interval": 0, **sizes, "optim": optim}
    loaders = [
        batchloom.Loader(family.store, seq_len=320, global_batch_size=4, packing="none", rank=rank, world_size=2)
        for rank in (0, 1)
    ]
    seen = [["pixel_values" in loader.batch(step) for loader in loaders] for step in range(6)]
    assert {True, False} in map(set, seen)
    assert [False, False] in seen

    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["train", "--data", family.store.path, "--init", family.folder, "--device", "cpu"]
    words += ["--config-file", tmp_path / "config.json", "--out"]
    printed = run_two_ranks("-m", "batchloom", *words, tmp_path / "two")
    assert "2 ranks x 2 passes x 1 row" in printed
    assert run_command_line([*map(str, words), str(tmp_path / "one")]) == 0
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-4)
    one, two = (weights(tmp_path / out / "model") for out in ("one", "two"))
    for key, weight in one.items():
        assert torch.allclose(weight, two[key], atol=1e-3), key
