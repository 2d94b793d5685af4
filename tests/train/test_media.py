"""Finetuning models that see and hear on stores of images and sounds, by the loop's own promises."""

import json
import shutil

import pytest
import torch

import batchloom
from batchloom.cli import run_command_line
from batchloom.core.errors import TrainError
from batchloom.train import RunFolder
from media.made import talk
from media.models import make
from media.test_batches import saved
from train.families import SIZES, Families, losses, weights
from train.runs import run_training, steps_of

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    return Families(tmp_path_factory.mktemp("families"))


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_audio", pytest.param("llava", marks=pytest.mark.slow)])
def test_a_handful_of_talks_is_learned(families, tmp_path, name):
    from transformers import AutoModelForMultimodalLM

    family = families[name]
    outcome, said = family.train(tmp_path / "run", {"steps": 24, "global_batch_size": 2, "batch_size": 1})
    found = losses(tmp_path / "run")
    assert found[-1] < found[0] / 2
    assert any("packed documents do not see each other" in line for line in said)
    before, after = weights(family.folder), weights(tmp_path / "run" / "model")
    moved = {key for key in after if not torch.equal(before[key], after[key])}
    # What sees or hears learned, and so did what brings it to the text.
    parts = {part for key in moved for part in key.split(".")}
    assert parts & {"visual", "vision_tower", "audio_tower"}
    assert parts & {"merger", "multi_modal_projector"}

    model = AutoModelForMultimodalLM.from_pretrained(tmp_path / "run" / "model")
    for key, weight in model.named_parameters():
        assert torch.equal(weight, outcome.model.model.get_parameter(key)), key


def test_a_model_with_masks_of_its_own_learns(families, tmp_path):
    """Gemma 3, in whose packed rows images would see what is not theirs."""
    family = families["gemma3"]
    family.train(tmp_path / "run", {"steps": 8})
    assert losses(tmp_path / "run")[-1] < losses(tmp_path / "run")[0] - 1
    # Masks of True and False are added to scores there.
    eager = {"model": {"init": str(family.folder), "attn_implementation": "eager"}}
    with pytest.raises(TrainError, match="with eager attention lets packed documents see each"):
        family.train(tmp_path / "other", eager)
    assert not (tmp_path / "other").exists()


def test_a_run_that_goes_on_has_the_losses_of_one_that_was_not_stopped(families, tmp_path):
    family = families["qwen2_vl"]
    family.train(tmp_path / "whole", {"eval_interval": 0})
    family.train(tmp_path / "run", {"eval_interval": 0}, stop_at=3)
    family.train(tmp_path / "run", {"eval_interval": 0}, resume=True)
    assert steps_of(tmp_path / "run") == steps_of(tmp_path / "whole")
    newest = [RunFolder(tmp_path / name).find_newest_checkpoint() for name in ("whole", "run")]
    first, second = (folder / "model.safetensors" for folder in newest)
    assert first.read_bytes() == second.read_bytes()


def test_the_folder_that_is_written_has_the_processor(families, tmp_path):
    """Beside the model's own tokenizer, or the one of the store where it has none."""
    from transformers import AutoProcessor

    family = families["llava"]
    whole = shutil.copytree(family.processor, tmp_path / "whole")
    shutil.copytree(family.folder, whole, dirs_exist_ok=True)
    for folder in (family.folder, whole):
        out = tmp_path / f"{folder.name}_run"
        family.train(out, {"model": {"init": str(folder)}, "steps": 1})
        made = AutoProcessor.from_pretrained(out / "model", local_files_only=True)
        assert made.image_processor.to_dict() == family.made.image_processor.to_dict()
        messages = talk("Who is it?", "A cat.")
        ids = [
            one.tokenizer(one.apply_chat_template(messages, tokenize=False))["input_ids"]
            for one in (made, AutoProcessor.from_pretrained(family.processor))
        ]
        assert ids[0] == ids[1]


def test_texts_are_trained_beside_talks_with_images(families, tmp_path):
    family = families["qwen2_vl"]
    file = tmp_path / "text.jsonl"
    file.write_text("".join(json.dumps({"text": f"Line {n}. " * 9}) + "\n" for n in range(30)))
    made = batchloom.prepare(
        [file, family.processor.parent / "in"],
        out=tmp_path / "both",
        tokenizer=str(family.processor),
        media={"processor": str(family.processor)},
        val_fraction=0.2,
    )
    both = batchloom.open_store(made.path)
    asked = {**SIZES, "model": {"init": str(family.folder)}, "steps": 8}
    outcome, _ = run_training(both, tmp_path / "run", asked)
    assert outcome.val_loss < losses(tmp_path / "run")[0]
    assert losses(tmp_path / "run")[-1] < losses(tmp_path / "run")[0] - 1


@pytest.mark.parametrize("name", ["qwen2_vl", pytest.param("qwen2_audio", marks=pytest.mark.slow)])
def test_real_conversations_are_learned_by_the_commands_alone(real_data, tmp_path, capsys, name):
    settings = {"chunk_length": 6} if name == "qwen2_audio" else {}
    processor = saved(name, tmp_path / "processor", **settings)
    make(name, processor[0]).save_pretrained(tmp_path / "model")
    file = "mllm_audio_demo.json" if name == "qwen2_audio" else "mllm_demo.json"
    source, folder, store = real_data / "multimodal" / file, processor[2], tmp_path / "store"
    train = ["train", "--data", store, "--init", tmp_path / "model", "--device", "cpu"]
    commands = [
        ["prepare", source, "--processor", folder, "--tokenizer", folder, "--out", store],
        ["doctor", store],
        ["inspect", store],
        [
            *train,
            "--out",
            tmp_path / "run",
            "--lr",
            0.02,
            "--seq-len",
            640,
            "--max-iters",
            30,
            "--global-batch-size",
            2,
        ],
    ]
    for words in commands:
        assert run_command_line(list(map(str, words))) == 0, words
    assert f"batchloom train --data {store} --init FOLDER" in " ".join(capsys.readouterr().out.split())
    found = losses(tmp_path / "run")
    assert found[-1] < found[0] / 2


@pytest.mark.parametrize("way", ["--stream", pytest.param("--input-file", marks=pytest.mark.slow)])
def test_raw_conversations_are_learned_as_they_are_read(families, tmp_path, way):
    """Without a store that anybody prepared, and a run that was stopped goes on exactly."""
    family = families["qwen2_vl"]
    shutil.copytree(family.processor.parent / "in", tmp_path / "in")
    source = lines_of(tmp_path / "in")
    words = ["train", way, source, "--processor", family.processor, "--tokenizer", family.processor]
    words += ["--init", family.folder, "--device", "cpu", "--seq-len", 640, "--lr", 0.02]
    words += ["--global-batch-size", 2, "--max-iters", 12, "--save-interval", 0]
    words += ["--stream-workers", 0] if way == "--stream" else []
    for out, more in (("whole", []), ("run", ["--stop-at", 5]), ("run", ["--resume"])):
        asked = [*words, "--out", tmp_path / out, *more]
        assert run_command_line(list(map(str, asked))) == 0, asked
    assert steps_of(tmp_path / "run") == steps_of(tmp_path / "whole")
    assert losses(tmp_path / "whole")[-1] < losses(tmp_path / "whole")[0] - 1
    assert (tmp_path / "run" / "model" / "preprocessor_config.json").exists()


def lines_of(folder):
    """The conversations of a folder, as lines."""
    rows = json.loads((folder / "talks.json").read_text())
    (folder / "talks.json").unlink()
    file = folder / "talks.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_media_that_moved_and_media_that_are_gone(families, tmp_path, capsys):
    family = families["qwen2_vl"]
    source = shutil.copytree(family.processor.parent / "in", tmp_path / "in") / "talks.json"
    words = ["prepare", source, "--processor", family.processor, "--out", tmp_path / "store"]
    assert run_command_line(list(map(str, [*words, "--val-fraction", "0"]))) == 0
    (tmp_path / "in").rename(tmp_path / "moved")
    train = ["train", "--data", tmp_path / "store", "--init", family.folder, "--device", "cpu"]
    train += ["--seq-len", 640, "--global-batch-size", 2, "--max-iters", 3, "--eval-interval", 0]
    capsys.readouterr()
    assert run_command_line(list(map(str, [*train, "--out", tmp_path / "no"]))) == 1
    assert "--data-folder of prepare and train" in capsys.readouterr().err
    moved = [*train, "--data-folder", tmp_path / "moved"]
    assert run_command_line(list(map(str, [*moved, "--out", tmp_path / "a"]))) == 0
    gone = tmp_path / "gone.json"
    (tmp_path / "moved").rename(tmp_path / "in")
    next((tmp_path / "in" / "pictures").iterdir()).unlink()
    run_command_line(list(map(str, ["check", tmp_path / "store", "--missing-media", gone])))
    assert run_command_line(list(map(str, [*train, "--out", tmp_path / "no"]))) == 1
    assert run_command_line(list(map(str, [*train, "--missing-media", gone, "--out", tmp_path / "b"]))) == 0
