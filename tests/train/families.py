"""Stores of talks about images and sounds, and small models in folders that were made for them."""

import json

from safetensors.torch import load_file

from media.made import talk, write_images, write_sounds
from media.models import make
from media.test_batches import saved, stored
from train.runs import run_training, steps_of

SIZES = {"steps": 6, "seq_len": 320, "global_batch_size": 4, "batch_size": 2}
SIZES |= {"optim": {"lr": 0.02, "warmup_steps": 2}}


class Family:
    """A store of a few talks, with media and without, and the folder of a model made for it."""

    def __init__(self, name, folder):
        settings = {"chunk_length": 2} if name == "qwen2_audio" else {}
        self.made, _, self.processor = saved(name, folder / "processor", **settings)
        write = write_sounds if name == "qwen2_audio" else write_images
        file = write(folder / "in", 3)
        texts = [{"messages": talk(f"Say {n}.", f"{n} it is.")} for n in range(6)]
        file.write_text(json.dumps([*json.loads(file.read_text()), *texts]))
        self.store = stored(file, folder / "store", self.processor)
        self.folder = folder / "model"
        make(name, self.made).save_pretrained(self.folder)

    def train(self, out, changes=None, **course):
        asked = {**SIZES, "model": {"init": str(self.folder)}, **(changes or {})}
        return run_training(self.store, out, asked, **course)


class Families(dict):
    """Of each name, made in a folder when it is first asked for."""

    def __init__(self, folder):
        self.folder = folder

    def __missing__(self, name):
        self[name] = Family(name, self.folder / name)
        return self[name]


def losses(out):
    return [loss for _, loss, *_ in steps_of(out)]


def weights(folder):
    return load_file(folder / "model.safetensors")
