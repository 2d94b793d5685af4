"""One of two processes of a Trainer on a store with media.

``torchrun hf_media_worker.py STORE MODEL OUT``
"""

import json
import sys
from pathlib import Path

from transformers import AutoModelForMultimodalLM

import batchloom
from adapters.test_hugging_face import get_losses, make_args
from adapters.test_hugging_face_media import STEPS, TWO_RANK_SIZES, RecordingTrainer
from batchloom.adapters.hugging_face import make_trainer_parts
from batchloom.examples.job import adamw


def main(data: str, folder: str, out: str) -> None:
    sizes = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    args = make_args(out, max_steps=STEPS, **sizes)
    loader = batchloom.Loader(batchloom.open_store(data), **TWO_RANK_SIZES, steps=STEPS)
    parts = make_trainer_parts(loader, args)
    model = AutoModelForMultimodalLM.from_pretrained(folder)
    trainer = RecordingTrainer(
        model,
        args,
        train_dataset=parts.dataset,
        data_collator=parts.collator,
        compute_loss_func=parts.loss,
        callbacks=[parts.callback],
        optimizers=(adamw(model.parameters(), 0.01), None),
    )
    trainer.train()
    if args.process_index == 0:
        Path(out, "losses.json").write_text(json.dumps(list(get_losses(trainer).values())))
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
