"""``FSDP2SFTTrainer``: ``python examples/fsdp2_sft.py STORE OUT``, or torchrun."""

import os
from typing import Any

from batchloom import open_store
from batchloom.adapters import FSDP2Arguments, FSDP2SFTTrainer
from batchloom.examples.job import Job, main


def train(model: Any, job: Job) -> None:
    """Train for the steps of a job."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    args = FSDP2Arguments(
        output_dir=job.out,
        max_length=job.seq_len,
        per_device_train_batch_size=job.batch_size,
        gradient_accumulation_steps=job.global_batch_size // ranks // job.batch_size,
        max_steps=job.steps,
        learning_rate=job.lr,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        max_grad_norm=0.0,
        logging_steps=1,
        save_steps=job.save_every,
        seed=job.seed,
        use_cpu=True,
    )
    trainer = FSDP2SFTTrainer(model=model, args=args, train_dataset=open_store(job.data))
    trainer.train(resume_from_checkpoint=job.resume)
    if trainer.loader.spec.rank == 0:
        for entry in trainer.log_history:
            job.tell(entry["step"], entry["loss"])


if __name__ == "__main__":
    main(train)
