"""TRL's SFTTrainer: ``python examples/sft_trainer.py STORE OUT``, or ``torchrun``."""

import os
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from batchloom import Loader, open_store
from batchloom.adapters.hugging_face import make_trainer_parts
from batchloom.examples.job import Job, adamw, leave_group, main


def train(model: Any, job: Job) -> None:
    """Train for the steps of a job."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    args = SFTConfig(
        job.out,
        per_device_train_batch_size=job.batch_size,
        gradient_accumulation_steps=job.global_batch_size // job.batch_size // ranks,
        max_steps=job.steps,
        train_sampling_strategy="sequential",
        dataset_kwargs={"skip_prepare_dataset": True},
        lr_scheduler_type="constant",
        max_grad_norm=0,
        logging_steps=1,
        save_steps=job.save_every,
        report_to="none",
        use_cpu=True,
        bf16=False,
    )
    store = open_store(job.data)
    size = job.global_batch_size
    loader = Loader(store, seq_len=job.seq_len, global_batch_size=size, seed=job.seed, steps=job.steps)
    parts = make_trainer_parts(loader, args)
    # For your model use AutoTokenizer.from_pretrained(...). The rows have ids, so it is only saved with the
    # model.
    words = Tokenizer(WordLevel({"<end>": 0}))
    trainer = SFTTrainer(
        model,
        args,
        train_dataset=parts.dataset,
        data_collator=parts.collator,
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words),
        callbacks=[parts.callback],
        optimizers=(adamw(model.parameters(), job.lr), None),
    )
    trainer.train(resume_from_checkpoint=job.resume)
    for log_entry in trainer.state.log_history:
        if "loss" in log_entry and (step := int(log_entry["step"])) > parts.callback.first:
            job.tell(step - 1, log_entry["loss"])
    leave_group()


if __name__ == "__main__":
    main(train)
