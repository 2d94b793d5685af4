"""Other people's readers, imported without what they say while being imported."""

import importlib
import warnings
from itertools import chain, pairwise
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest


def megatron(module: str) -> ModuleType:
    """A module of megatron-core, which warns of what else could be installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(f"megatron.core.datasets.{module}")


def megatron_prefix(prefix: Path, documents, dtype=np.uint16, modes=None) -> Path:
    """A pair written by Megatron's own builder.

    Args:
        prefix: its path without ending.
        documents: lists of sequences, each a list of ids.
        dtype: of a token on disk.
        modes: the mode of each sequence, for a multimodal pair.
    """
    import torch

    builder = megatron("indexed_dataset").IndexedDatasetBuilder(
        f"{prefix}.bin", dtype=dtype, multimodal=modes is not None
    )
    kinds = iter(modes or [])
    for document in documents:
        for sequence in document:
            builder.add_item(torch.tensor(sequence, dtype=torch.int64), next(kinds, 0))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return prefix


def megatron_documents(prefix: Path) -> list[list[int]]:
    """The documents of a pair as Megatron's own reader gives them."""
    data = megatron("indexed_dataset").IndexedDataset(str(prefix))
    bounds = data.document_indices.tolist()
    sequences = [data[n].tolist() for n in range(len(data))]
    return [list(chain.from_iterable(sequences[a:b])) for a, b in pairwise(bounds)]


def datatrove(module: str) -> ModuleType:
    """A module of datatrove, or the test that asks is skipped; spaCy tells its words apart."""
    for name in ("datatrove", "spacy"):
        pytest.importorskip(name, reason=f"{name} is not installed: it is in the test extra")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("spacy")
        return importlib.import_module(f"datatrove.{module}")
