"""Two processes of a Trainer on a store with media.

``hf_media_worker.py STORE MODEL OUT``
"""

import json
import sys
from pathlib import Path

from transformers import AutoModelForMultimodalLM

import batchloom
from adapters.forked_ranks import fork_second_rank
from adapters.hf_runs import MEDIA_RANK_SIZES, MEDIA_STEPS, InputRecordingTrainer, get_losses, make_args
from batchloom.adapters.hugging_face import make_trainer_parts
from batchloom.examples.job import adamw


def main(data: str, out: str, model) -> None:
    sizes = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    args = make_args(out, max_steps=MEDIA_STEPS, **sizes)
    loader = batchloom.Loader(batchloom.open_store(data), **MEDIA_RANK_SIZES, steps=MEDIA_STEPS)
    parts = make_trainer_parts(loader, args)
    trainer = InputRecordingTrainer(
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
    data, folder, out = sys.argv[1:]
    model = AutoModelForMultimodalLM.from_pretrained(folder)
    with fork_second_rank():
        main(data, out, model)
