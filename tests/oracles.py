"""Readers of other projects as test oracles, imported without their warnings."""

import importlib
import warnings
from itertools import chain, pairwise
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest


def import_megatron(module: str) -> ModuleType:
    """Import a module of megatron-core, without warnings about optional packages."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(f"megatron.core.datasets.{module}")


def build_gpt_dataset(blend, cache: Path, *, seq_len: int, samples: int, resets: bool = False):
    """Build Megatron's ``GPTDataset`` over file pairs; needs torch.distributed.

    ``blend`` holds prefixes and their weights, or None; ``cache`` is the folder of its indices. With ``resets``,
    positions and masks restart with each document.
    """

    class Tokenizer:
        vocab_size, eod, pad = 257, 256, -1
        unique_identifiers = {"class": "test"}  # noqa: RUF012

    gpt = import_megatron("gpt_dataset")
    config = gpt.GPTDatasetConfig(
        random_seed=1,
        sequence_length=seq_len,
        blend=blend,
        split="1,0,0",
        path_to_cache=str(cache),
        tokenizer=Tokenizer(),
        reset_position_ids=resets,
        reset_attention_mask=resets,
        eod_mask_loss=False,
        create_attention_mask=resets,
        mid_level_dataset_surplus=0.005,
    )
    builder = import_megatron("blended_megatron_dataset_builder").BlendedMegatronDatasetBuilder
    return builder(gpt.GPTDataset, [samples, 0, 0], lambda: True, config).build()[0]


def write_megatron_pair(prefix: Path, documents, dtype=np.uint16, modes=None) -> Path:
    """Write a file pair with Megatron's builder and return its prefix.

    ``documents`` are lists of sequences, each a list of ids. ``modes`` holds the mode of each sequence for a
    multimodal pair.
    """
    import torch

    builder = import_megatron("indexed_dataset").IndexedDatasetBuilder(
        f"{prefix}.bin", dtype=dtype, multimodal=modes is not None
    )
    sequence_modes = iter(modes or [])
    for document in documents:
        for sequence in document:
            builder.add_item(torch.tensor(sequence, dtype=torch.int64), next(sequence_modes, 0))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return prefix


def read_megatron_documents(prefix: Path) -> list[list[int]]:
    """Return the documents of a pair as read by Megatron's reader."""
    data = import_megatron("indexed_dataset").IndexedDataset(str(prefix))
    bounds = data.document_indices.tolist()
    sequences = [data[n].tolist() for n in range(len(data))]
    return [list(chain.from_iterable(sequences[a:b])) for a, b in pairwise(bounds)]


def import_datatrove(module: str) -> ModuleType:
    """Import a module of datatrove, or skip the test; its word splitting needs spaCy."""
    for name in ("datatrove", "spacy"):
        pytest.importorskip(name, reason=f"{name} is not installed: it is in the test extra")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("spacy")
        return importlib.import_module(f"datatrove.{module}")
