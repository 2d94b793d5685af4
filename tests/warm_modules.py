"""Modules that a warm interpreter imports; see ``processes.py``."""

import importlib
import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for name in (
        "accelerate",
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "transformers.models.llama.modeling_llama",
        "transformers.trainer",
        "batchloom.batches.loading.loader",
        "batchloom.preparation.prepare_job",
        "batchloom.train.loop",
    ):
        importlib.import_module(name)
