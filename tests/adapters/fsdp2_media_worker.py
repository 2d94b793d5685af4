"""Two ranks that train image models; often one has no image in a pass."""

import json
import os
import sys
from pathlib import Path

import torch
from transformers import AutoModelForMultimodalLM

from batchloom import open_store
from batchloom.adapters import FSDP2Arguments, FSDP2SFTTrainer


def train_model(data, folder, out, settings):
    """Train a model; return its trainer."""
    model = AutoModelForMultimodalLM.from_pretrained(folder)
    args = FSDP2Arguments(**{**settings, "output_dir": str(out)})
    trainer = FSDP2SFTTrainer(model=model, args=args, train_dataset=open_store(data))
    trainer.train()
    return trainer


if __name__ == "__main__":
    torch.set_num_threads(1)
    settings = json.loads(sys.argv[1])
    for family_folder in map(Path, sys.argv[2:]):
        has_images = []
        trainer = train_model(family_folder / "store", family_folder / "model", family_folder / "two", settings)
        for step in range(trainer.steps):
            parts = trainer.loader.batch(step).split(settings["per_device_train_batch_size"])
            has_images.append(["pixel_values" in part for part in parts])
        trainer.save_model(family_folder / "two" / "model")
        (family_folder / f"has_images_{os.environ['RANK']}.json").write_text(json.dumps(has_images))
