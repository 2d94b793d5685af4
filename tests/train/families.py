"""Stores of conversations with media, and folders of small models for them."""

import json

from safetensors.torch import load_file

from batchloom.train import PretrainedSettings
from media.models import make_model
from media.sample_media import make_messages, write_images, write_sounds
from media.test_batches import make_store, save_with_template
from train.runs import read_steps, run_training

SIZES = {"steps": 6, "seq_len": 200, "global_batch_size": 4, "batch_size": 2}
SIZES |= {"optim": {"lr": 0.02, "warmup_steps": 2}}


class Family:
    """Store of a few conversations, some with media, and the folder of a model."""

    def __init__(self, name, folder):
        settings = {"chunk_length": 2} if name == "qwen2_audio" else {}
        self.made, _, self.processor = save_with_template(name, folder / "processor", **settings)
        write_source = write_sounds if name == "qwen2_audio" else write_images
        file = write_source(folder / "in", 3)
        conversations = [{"messages": make_messages(f"Say {n}.", f"{n} it is.")} for n in range(6)]
        file.write_text(json.dumps([*json.loads(file.read_text()), *conversations]))
        self.store = make_store(file, folder / "store", self.processor)
        self.folder = folder / "model"
        make_model(name, self.made).save_pretrained(self.folder)

    def train(self, out, changes=None, **run_options):
        settings = {**SIZES, "model": PretrainedSettings(str(self.folder)), **(changes or {})}
        return run_training(self.store, out, settings, **run_options)


class Families(dict):
    """Families by name, made in a folder at the first access."""

    def __init__(self, folder):
        self.folder = folder

    def __missing__(self, name):
        self[name] = Family(name, self.folder / name)
        return self[name]


def read_losses(out):
    return [loss for _, loss, *_ in read_steps(out)]


def load_weights(folder):
    return load_file(folder / "model.safetensors")
