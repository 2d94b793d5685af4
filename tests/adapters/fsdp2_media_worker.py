"""Two ranks, of which one often has no image in a pass, train models that see."""

import json
import os
import sys
from pathlib import Path

import torch
from transformers import AutoModelForMultimodalLM

from batchloom import open_store
from batchloom.adapters import FSDP2Arguments, FSDP2SFTTrainer


def trained(data, folder, out, settings):
    """The trainer of a run that is done."""
    model = AutoModelForMultimodalLM.from_pretrained(folder)
    args = FSDP2Arguments(**{**settings, "output_dir": str(out)})
    trainer = FSDP2SFTTrainer(model=model, args=args, train_dataset=open_store(data))
    trainer.train()
    return trainer


if __name__ == "__main__":
    torch.set_num_threads(1)
    settings = json.loads(sys.argv[1])
    for place in map(Path, sys.argv[2:]):
        held = []
        trainer = trained(place / "store", place / "model", place / "two", settings)
        for step in range(trainer.steps):
            parts = trainer.loader.batch(step).split(settings["per_device_train_batch_size"])
            held.append(["pixel_values" in part for part in parts])
        trainer.save_model(place / "two" / "model")
        (place / f"held{os.environ['RANK']}.json").write_text(json.dumps(held))
