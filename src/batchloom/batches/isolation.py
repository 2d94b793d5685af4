"""Measurement of how far a model keeps the documents of a packed row apart.

A row of several documents goes through the model three times: packed as in training,
document by document, and with continuous positions, as if the row were one document. The packed
losses must equal those of single documents. The third pass shows the size of a leak in this model,
so that the verdict does not depend on the scale of its weights.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from batchloom.batches.assembly.array_filling import IGNORE_INDEX
from batchloom.batches.assembly.batch_assembly import TOKEN_AXES, Batch, BatchLayout

LogitsFunction = Callable[[Batch], Tensor]
ScoreFunction = Callable[[Batch], Callable[[int, slice], Tensor]]
# Share of the full-leak distance that counts as a leak, by whether kernels compute in half precision; None is
# unknown.
_LEAK_THRESHOLDS = {False: 0.02, True: 0.2, None: 0.05}
# In nats per token; float32 is exact to about a tenth of it.
_NOISE_FLOOR = 1e-5
_MAX_TOKENS = 256


@torch.no_grad()
def measure_leakage(logits: LogitsFunction, documents: list[Tensor], rows: int) -> tuple[float, float]:
    """Return the distance of packed losses from those of the single documents.

    Args:
        logits: function that returns the scores of a batch in the rows form, [rows, tokens, vocabulary], or its
            rows back to back, [1, rows x tokens, vocabulary]; further tokens are ignored.
        documents: two or more, [tokens] int64 each, on the model's device.
        rows: rows of a pass; some kernels keep documents apart in single rows only.

    Returns:
        The mean distance in nats per token, and the same without any isolation.
    """
    orders = [documents, documents[::-1]][: min(rows, 2)]
    alone = [_compute_losses(logits, [[document]], as_one_document=True) for document in documents]
    expected = torch.cat([torch.cat(order) for order in (alone, alone[::-1])[: len(orders)]])
    packed, mixed = (
        _compute_losses(logits, orders, as_one_document=as_one_document) for as_one_document in (False, True)
    )
    return float((packed - expected).abs().mean()), float((mixed - expected).abs().mean())


@torch.no_grad()
def measure_batch_leakage(scored: ScoreFunction, packed: Batch, alone: Sequence[Batch]) -> tuple[float, float]:
    """Measure the leakage of existing batches, whose documents hold media.

    Args:
        scored: function of a batch that returns a function of (row, slice), which returns the scores of these
            tokens,
            [tokens, vocabulary].
        packed: rows of several complete documents.
        alone: one batch per document, in the order of rows.

    Returns:
        As :func:`measure_leakage`.
    """
    expected = torch.cat([_compute_span_losses(scored, batch) for batch in alone])
    positions = packed["position_ids"].clone()
    # M-RoPE positions begin with those of the text.
    text = positions[0] if positions.ndim > TOKEN_AXES else positions
    text.copy_(torch.arange(text.shape[1]).expand_as(text))
    running = Batch({**packed, "position_ids": positions}, layout=packed.layout)
    together, mixed = (_compute_span_losses(scored, batch) for batch in (packed, running))
    return float((together - expected).abs().mean()), float((mixed - expected).abs().mean())


def _compute_span_losses(scored: ScoreFunction, batch: Batch) -> Tensor:
    layout = batch.layout
    if layout is None:
        raise AssertionError("only for batches that know their spans")
    scores = scored(batch)
    ids = batch["input_ids"]
    owners = np.repeat(np.arange(len(layout.pointers) - 1), np.diff(layout.pointers))
    losses = []
    for row, offset, size in zip(owners.tolist(), layout.offsets.tolist(), layout.lengths.tolist(), strict=True):
        last = offset + size - 1
        for begin in range(offset, last, _MAX_TOKENS):
            part = slice(begin, min(begin + _MAX_TOKENS, last) + 1)
            losses.append(compute_token_losses(scores(row, part), ids[row, part]))
    return torch.cat(losses)


def is_leaking(packed: float, mixed: float, *, half: bool | None, noise: float = _NOISE_FLOOR) -> bool:
    """Return whether the distances show that documents see each other; NaN counts.

    Args:
        packed: distance of the packed documents, in nats per token.
        mixed: the same without any isolation.
        half: whether the model computes in half precision; None if unknown.
        noise: largest distance that counts as noise.
    """
    return not packed <= max(noise, _LEAK_THRESHOLDS[half] * mixed)


def accepts_argument(model: Any, name: str) -> bool:
    """Return whether a model's ``forward`` takes an argument, also by ``**kwargs``."""
    parameters = inspect.signature(model.forward).parameters
    return name in parameters or any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()
    )


def find_unknown_id(model: Any, ids: Tensor) -> tuple[int, int | None] | None:
    """Return an id outside a model's embedding, and the embedding's rows if known.

    Returns None if all ids are valid. Looking up an invalid id raises a traceback or crashes the GPU.
    """
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    rows = getattr(embedding, "num_embeddings", None)
    # Read both at once: each number that is read synchronizes with the GPU.
    lowest, highest = torch.stack(ids.aminmax()).tolist()
    if lowest < 0 or (rows is not None and highest >= rows):
        return (lowest if lowest < 0 else highest), rows
    return None


def _compute_losses(logits: LogitsFunction, orders: list[list[Tensor]], *, as_one_document: bool) -> Tensor:
    """Return the losses of all document tokens but the first, row by row."""
    batch = make_probe_batch(orders, as_one_document=as_one_document)
    rows, tokens = batch["input_ids"].shape
    scores = logits(batch)
    # Rows back to back have one batch entry.
    flat = len(scores) == 1
    own = scores[0, : rows * tokens].reshape(rows, tokens, -1) if flat else scores[:, :tokens]
    return torch.cat(
        [
            compute_token_losses(part, document)
            for row, order in zip(own, orders, strict=True)
            for part, document in zip(row.split([len(document_ids) for document_ids in order]), order, strict=True)
        ]
    )


def make_probe_batch(orders: list[list[Tensor]], *, as_one_document: bool) -> Batch:
    """Build the rows as a loader does; optionally treat each row as one document."""
    lengths = [[sum(map(len, order))] if as_one_document else [len(document) for document in order] for order in orders]
    ids = torch.stack([torch.cat(order) for order in orders])
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    positions = positions.to(ids.device)
    layout = BatchLayout(
        pointers=np.cumsum([0, *map(len, lengths)]),
        lengths=np.concatenate(lengths),
        offsets=np.concatenate([np.cumsum([0, *row[:-1]]) for row in lengths]),
        align=1,
        labels="aligned",
        sliced=False,
    )
    labels = ids.masked_fill(positions == 0, IGNORE_INDEX)
    return Batch({"input_ids": ids, "labels": labels, "position_ids": positions}, layout=layout)


def compute_token_losses(scores: Tensor, document: Tensor) -> Tensor:
    """Return the loss of each token but the first, in nats, float32 [tokens - 1].

    Args:
        scores: next-token scores, [tokens, vocabulary].
        document: token ids, [tokens] int64, on any device.
    """
    targets = document[1:].to(scores.device)
    return functional.cross_entropy(scores[:-1].float(), targets, reduction="none")
