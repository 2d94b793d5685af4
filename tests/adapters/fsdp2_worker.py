"""Two ranks with different initial weights train and write the model."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from batchloom import InputError, StateError, open_store
from batchloom.adapters import FSDP2Arguments, FSDP2SFTTrainer
from batchloom.examples.job import tiny_model

if __name__ == "__main__":
    data, out, settings = sys.argv[1:]
    store = open_store(data)
    model = tiny_model(store, seed=int(os.environ["RANK"]))
    args = FSDP2Arguments(**{**json.loads(settings), "output_dir": out})
    trainer = FSDP2SFTTrainer(model=model, args=args, train_dataset=store)
    trainer.train()
    trainer.save_model(Path(out) / "model")
    other_args = FSDP2Arguments(**{**json.loads(settings), "output_dir": out, "seed": 9})
    resumed_trainer = FSDP2SFTTrainer(model=tiny_model(store), args=other_args, train_dataset=store)
    with pytest.raises(StateError, match="spec.seed was 42 and is 9"):
        resumed_trainer.train(resume_from_checkpoint=True)
    with pytest.raises(InputError, match="already sharded"):
        FSDP2SFTTrainer(model=model, args=replace(args, bf16=True), train_dataset=store)
