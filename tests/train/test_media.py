"""Finetuning of multimodal models on stores of images and sounds."""

import json
import shutil

import pytest
import torch

import batchloom
from batchloom.cli import run_command_line
from batchloom.core.errors import TrainError
from batchloom.train import RunFolder
from media.models import make_model
from media.sample_media import make_messages
from media.test_batches import save_with_template
from train.families import SIZES, Families, load_weights, read_losses
from train.runs import read_steps, run_training

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    return Families(tmp_path_factory.mktemp("families"))


@pytest.mark.parametrize(
    "name", ["qwen2_vl", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2_audio", "llava"))]
)
def test_a_few_conversations_are_learned(families, tmp_path, name):
    from transformers import AutoModelForMultimodalLM

    family = families[name]
    outcome, lines = family.train(tmp_path / "run", {"steps": 14, "global_batch_size": 2, "batch_size": 2})
    loss_curve = read_losses(tmp_path / "run")
    assert loss_curve[-1] < loss_curve[0] / 2
    assert any("packed documents do not see each other" in line for line in lines)
    before, after = load_weights(family.folder), load_weights(tmp_path / "run" / "model")
    changed = {key for key in after if not torch.equal(before[key], after[key])}
    # Both the encoder and the projector to the text model learned.
    parts = {part for key in changed for part in key.split(".")}
    assert parts & {"visual", "vision_tower", "audio_tower"}
    assert parts & {"merger", "multi_modal_projector"}

    model = AutoModelForMultimodalLM.from_pretrained(tmp_path / "run" / "model")
    for key, weight in model.named_parameters():
        assert torch.equal(weight, outcome.model.model.get_parameter(key)), key


@pytest.mark.slow
def test_a_model_with_image_masks_learns(families, tmp_path):
    """Gemma 3, whose images attend across documents without masks."""
    family = families["gemma3"]
    family.train(tmp_path / "run", {"steps": 8})
    assert read_losses(tmp_path / "run")[-1] < read_losses(tmp_path / "run")[0] - 1
    # Eager attention adds boolean masks to the scores.
    eager = {"model": {"init": str(family.folder), "attn_implementation": "eager"}}
    with pytest.raises(TrainError, match="with eager attention lets packed documents see each"):
        family.train(tmp_path / "other", eager)
    assert not (tmp_path / "other").exists()


SHORT = {"eval_interval": 0, "steps": 3}


@pytest.mark.slow
def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one(families, tmp_path):
    family = families["qwen2_vl"]
    family.train(tmp_path / "whole", SHORT)
    family.train(tmp_path / "run", SHORT, stop_at=2)
    family.train(tmp_path / "run", SHORT, resume=True)
    assert read_steps(tmp_path / "run") == read_steps(tmp_path / "whole")
    newest = [RunFolder(tmp_path / name).find_newest_checkpoint() for name in ("whole", "run")]
    full_weights, resumed_weights = (folder / "model.safetensors" for folder in newest)
    assert full_weights.read_bytes() == resumed_weights.read_bytes()


@pytest.mark.slow
def test_the_saved_model_has_the_processor(families, tmp_path):
    """The folder also has the model's own tokenizer, or else that of the store."""
    from transformers import AutoProcessor

    family = families["llava"]
    with_processor = shutil.copytree(family.processor, tmp_path / "whole")
    shutil.copytree(family.folder, with_processor, dirs_exist_ok=True)
    for folder in (family.folder, with_processor):
        out = tmp_path / f"{folder.name}_run"
        family.train(out, {"model": {"init": str(folder)}, "steps": 1})
        written = AutoProcessor.from_pretrained(out / "model", local_files_only=True)
        assert written.image_processor.to_dict() == family.made.image_processor.to_dict()
        messages = make_messages("Who is it?", "A cat.")
        ids = [
            processor.tokenizer(processor.apply_chat_template(messages, tokenize=False))["input_ids"]
            for processor in (written, AutoProcessor.from_pretrained(family.processor))
        ]
        assert ids[0] == ids[1]


@pytest.mark.slow
def test_texts_and_conversations_with_images_are_trained_together(families, tmp_path):
    family = families["qwen2_vl"]
    file = tmp_path / "text.jsonl"
    file.write_text("".join(json.dumps({"text": f"Line {n}. " * 9}) + "\n" for n in range(30)))
    result = batchloom.prepare(
        [file, family.processor.parent / "in"],
        out=tmp_path / "both",
        tokenizer=str(family.processor),
        media={"processor": str(family.processor)},
        val_fraction=0.2,
    )
    store = batchloom.open_store(result.path)
    settings = {**SIZES, "model": {"init": str(family.folder)}, "steps": 8}
    outcome, _ = run_training(store, tmp_path / "run", settings)
    assert outcome.val_loss < read_losses(tmp_path / "run")[0]
    assert read_losses(tmp_path / "run")[-1] < read_losses(tmp_path / "run")[0] - 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_audio"])
def test_real_conversations_are_learned_by_the_commands_alone(real_data, tmp_path, capsys, name):
    settings = {"chunk_length": 6} if name == "qwen2_audio" else {}
    processor = save_with_template(name, tmp_path / "processor", **settings)
    make_model(name, processor[0]).save_pretrained(tmp_path / "model")
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
    for args in commands:
        assert run_command_line(list(map(str, args))) == 0, args
    assert f"batchloom train --data {store} --init FOLDER" in " ".join(capsys.readouterr().out.split())
    loss_curve = read_losses(tmp_path / "run")
    assert loss_curve[-1] < loss_curve[0] / 2


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--stream", "--input-file"])
def test_raw_conversations_are_learned_as_they_are_read(families, tmp_path, option):
    """A run on raw inputs needs no prepared store, and resumes exactly."""
    family = families["qwen2_vl"]
    shutil.copytree(family.processor.parent / "in", tmp_path / "in")
    source = write_lines(tmp_path / "in")
    args = ["train", option, source, "--processor", family.processor, "--tokenizer", family.processor]
    args += ["--init", family.folder, "--device", "cpu", "--seq-len", 200, "--lr", 0.1]
    args += ["--global-batch-size", 2, "--max-iters", 4, "--save-interval", 0]
    args += ["--stream-workers", 0] if option == "--stream" else []
    for out, run_args in (("whole", []), ("run", ["--stop-at", 2]), ("run", ["--resume"])):
        command = [*args, "--out", tmp_path / out, *run_args]
        assert run_command_line(list(map(str, command))) == 0, command
    assert read_steps(tmp_path / "run") == read_steps(tmp_path / "whole")
    assert read_losses(tmp_path / "whole")[-1] < read_losses(tmp_path / "whole")[0] - 1
    assert (tmp_path / "run" / "model" / "preprocessor_config.json").exists()


def write_lines(folder):
    """Write the conversations of a folder as JSON lines; return the file."""
    rows = json.loads((folder / "talks.json").read_text())
    (folder / "talks.json").unlink()
    file = folder / "talks.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_moved_media_and_missing_media(families, tmp_path, capsys):
    family = families["qwen2_vl"]
    source = shutil.copytree(family.processor.parent / "in", tmp_path / "in") / "talks.json"
    args = ["prepare", source, "--processor", family.processor, "--out", tmp_path / "store"]
    assert run_command_line(list(map(str, [*args, "--val-fraction", "0"]))) == 0
    (tmp_path / "in").rename(tmp_path / "moved")
    train = ["train", "--data", tmp_path / "store", "--init", family.folder, "--device", "cpu"]
    train += ["--seq-len", 640, "--global-batch-size", 2, "--max-iters", 1, "--eval-interval", 0]
    capsys.readouterr()
    assert run_command_line(list(map(str, [*train, "--out", tmp_path / "no"]))) == 1
    assert "--data-folder of prepare and train" in capsys.readouterr().err
    train_moved = [*train, "--data-folder", tmp_path / "moved"]
    assert run_command_line(list(map(str, [*train_moved, "--out", tmp_path / "a"]))) == 0
    missing = tmp_path / "gone.json"
    (tmp_path / "moved").rename(tmp_path / "in")
    next((tmp_path / "in" / "pictures").iterdir()).unlink()
    run_command_line(list(map(str, ["check", tmp_path / "store", "--missing-media", missing])))
    assert run_command_line(list(map(str, [*train, "--out", tmp_path / "no"]))) == 1
    assert run_command_line(list(map(str, [*train, "--missing-media", missing, "--out", tmp_path / "b"]))) == 0
