"""One of several Trainer processes: resumes from one process's checkpoint.

It evaluates and writes a report of its batches and losses.

``torchrun hf_worker.py STORE CHECKPOINT OUT``
"""

import json
import sys
from pathlib import Path

import batchloom
from adapters.hf_runs import STEPS, make_args
from adapters.test_hugging_face import HELD_OUT, SIZES, RecordingTrainer, make_trainer
from batchloom.adapters import compute_row_losses, compute_token_loss
from batchloom.adapters.hugging_face import make_trainer_parts
from batchloom.core.errors import TrainError
from batchloom.examples.job import adamw, tiny_model


def main(data: str, checkpoint: str, out: str) -> None:
    sizes = {"gradient_accumulation_steps": 2, "per_device_eval_batch_size": 2}
    args = make_args(out, dataloader_num_workers=1, **sizes)
    store = batchloom.open_store(data)
    loader = batchloom.Loader(store, **SIZES, steps=STEPS)
    held_out = batchloom.Loader(store.subset("val"), **HELD_OUT)
    other_evaluation = batchloom.Loader(store.subset("val"), **HELD_OUT, seed=loader.spec.rank)
    try:
        make_trainer_parts(loader, args, evaluation=other_evaluation)
    except TrainError as error:
        evaluation_error = str(error)
    shorter_args = make_args(out, max_steps=STEPS - loader.spec.rank, **sizes)
    try:
        make_trainer(store, out, parts=make_trainer_parts(loader, shorter_args), args=shorter_args).train()
    except TrainError as error:
        steps_error = str(error)
    parts = make_trainer_parts(loader, args, evaluation=held_out)
    model = tiny_model(store)
    trainer = RecordingTrainer(
        model,
        args,
        train_dataset=parts.dataset,
        eval_dataset=parts.eval_dataset,
        data_collator=parts.collator,
        compute_loss_func=parts.loss,
        callbacks=[parts.callback],
        optimizers=(adamw(model.parameters(), 1e-3), None),
        preprocess_logits_for_metrics=compute_row_losses,
        compute_metrics=compute_token_loss,
    )
    trainer.train(resume_from_checkpoint=checkpoint)
    report = {
        "ids": [batch["input_ids"].tolist() for batch in trainer.recorded],
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "evaluation": trainer.evaluate(),
        "refused": evaluation_error,
        "unlike": steps_error,
    }
    Path(out, f"report_{args.process_index}.json").write_text(json.dumps(report))
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
