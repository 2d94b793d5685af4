"""Documents with which a model is tried before a run."""

import math
from collections.abc import Iterable
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchloom.batches.loading.document_rows import iter_short_documents
from batchloom.store import Store

_PROBE_DOCUMENTS = 4
_MAX_TOKENS = 256


def select_probe_documents(data: Store | Iterable[NDArray[Any]], seq_len: int) -> list[Tensor]:
    """Return the starts of documents that fit into one row, each int64 [tokens].

    Args:
        data: a store with at least one document of two tokens, or the ids of such documents.
        seq_len: tokens of a row in training.
    """
    if isinstance(data, Store):
        numbers = iter_short_documents(data, 0, math.inf, np.empty(0, np.int64))
        documents = (data[number].ids for number in numbers)
    else:
        documents = (ids for ids in data if len(ids) > 1)
    longest = max(2, min(_MAX_TOKENS, seq_len // 2))
    count = max(2, min(_PROBE_DOCUMENTS, seq_len // longest))
    probes = [torch.from_numpy(ids[:longest].astype(np.int64)) for ids in islice(documents, count)]
    return probes if len(probes) > 1 else probes * 2
