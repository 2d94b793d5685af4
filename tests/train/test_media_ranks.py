"""Two ranks, one without images in a pass, train like one rank."""

import json
from pathlib import Path

import pytest
import torch

import batchloom
from batchloom.cli import run_command_line
from processes import make_rank_environments, start_processes
from train.families import Families, load_weights, read_losses

STEPS = 3
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    return Families(tmp_path_factory.mktemp("families"))


@pytest.mark.slow
def test_two_ranks_of_which_one_has_no_media_train_like_one(families, tmp_path):
    """LLaVA has encoder weights that no loss depends on."""
    family = families["llava"]
    sizes = {"global_batch_size": 4, "batch_size": 1, "order": {"packing": "none"}, "steps": STEPS}
    optim = {"lr": 0.02, "weight_decay": 0.1, "warmup_steps": 2}
    config = {"seq_len": 320, "eval_interval": 0, **sizes, "optim": optim}
    loaders = [
        batchloom.Loader(family.store, seq_len=320, global_batch_size=4, packing="none", rank=rank, world_size=2)
        for rank in (0, 1)
    ]
    has_media = [["pixel_values" in loader.batch(step) for loader in loaders] for step in range(STEPS)]
    assert {True, False} in map(set, has_media)
    assert [False, False] in has_media

    (tmp_path / "config.json").write_text(json.dumps(config))
    args = ["train", "--data", family.store.path, "--init", family.folder, "--device", "cpu"]
    args += ["--config-file", tmp_path / "config.json", "--out"]
    worker = Path(__file__).with_name("media_ranks_worker.py")
    with start_processes(worker, *args, tmp_path / "two", environments=make_rank_environments()[:1]) as (process,):
        result = process.wait()
    assert result.returncode == 0, result.stderr
    assert "2 ranks x 2 passes x 1 row" in result.stdout
    assert run_command_line([*map(str, args), str(tmp_path / "one")]) == 0
    assert read_losses(tmp_path / "two") == pytest.approx(read_losses(tmp_path / "one"), abs=1e-4)
    single_weights, rank_weights = (load_weights(tmp_path / out / "model") for out in ("one", "two"))
    for key, weight in single_weights.items():
        assert torch.allclose(weight, rank_weights[key], atol=1e-3), key
