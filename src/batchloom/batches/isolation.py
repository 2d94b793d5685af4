"""Whether a model keeps the documents of a packed row apart, shown on documents of the store.

A row of several documents is put through the model three times: packed as in training,
document by document, and with positions that run on, as if nothing kept them apart. Packed
must be as alone; how far apart the third is says what a leak would look like in this model,
so that the verdict does not depend on the scale of its weights.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from batchloom.batches.assembly import IGNORE_INDEX, Batch, BatchLayout
from batchloom.store import Store

LogitsFunction = Callable[[Batch], Tensor]
ScoreFunction = Callable[[Batch], Callable[[int, slice], Tensor]]
# Of what no isolation would do, the part that is a leak: in float32, in kernels of half precision, and where nobody
# says which of the two it is.
_LEAK_THRESHOLDS = {False: 0.02, True: 0.2, None: 0.05}
# In nats a token; float32 is exact to about a tenth of it.
_NOISE_FLOOR = 1e-5
_PROBE_DOCUMENTS = 4
_MAX_TOKENS = 256
_MAX_CANDIDATES = 1 << 20
_PLAIN_NDIM = 2


def select_probe_documents(store: Store, seq_len: int) -> list[Tensor]:
    """The beginnings of a few documents that fit into a row together, [tokens] int64 each.

    Args:
        store: with at least one document of two tokens.
        seq_len: of the rows in training.
    """
    longest = max(2, min(_MAX_TOKENS, seq_len // 2))
    count = max(2, min(_PROBE_DOCUMENTS, seq_len // longest))
    numbers = [number for number, _ in zip(_iter_probe_documents(store), range(count), strict=False)]
    documents = [torch.from_numpy(store[number].ids[:longest].astype(np.int64)) for number in numbers]
    return documents if len(documents) > 1 else documents * 2


def _iter_probe_documents(store: Store) -> Iterator[int]:
    for start in range(0, len(store), _MAX_CANDIDATES):
        lengths = store.lengths.slice(start, min(len(store), start + _MAX_CANDIDATES))
        yield from (start + int(number) for number in np.flatnonzero(lengths > 1))


@torch.no_grad()
def measure_leakage(logits: LogitsFunction, documents: list[Tensor], rows: int) -> tuple[float, float]:
    """How far the losses of packed tokens are from those of the documents one by one.

    Args:
        logits: scores of a batch in the rows form, [rows, tokens, vocabulary], or its rows back to back,
            [1, rows x tokens, vocabulary]; tokens behind them are not looked at.
        documents: two or more, [tokens] int64 each, on the model's device.
        rows: of a pass; some kernels keep apart what lies in a single row only.

    Returns:
        The mean distance in nats a token, and the same where nothing keeps them apart.
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
    """The same of batches that are there already, whose documents hold media.

    Args:
        scored: gives of a batch what gives the scores of some tokens of a row, [tokens, vocabulary].
        packed: rows of several whole documents.
        alone: each of these in a batch of its own, in the order of rows.

    Returns:
        As :func:`measure_leakage`.
    """
    expected = torch.cat([_compute_span_losses(scored, batch) for batch in alone])
    positions = packed["position_ids"].clone()
    # Of models with positions in time, height and width those of the text come first.
    text = positions[0] if positions.ndim > _PLAIN_NDIM else positions
    text.copy_(torch.arange(text.shape[1]).expand_as(text))
    running = Batch({**packed, "position_ids": positions}, layout=packed.layout)
    together, mixed = (_compute_span_losses(scored, batch) for batch in (packed, running))
    return float((together - expected).abs().mean()), float((mixed - expected).abs().mean())


def _compute_span_losses(scored: ScoreFunction, batch: Batch) -> Tensor:
    """The losses of the tokens of all spans but their firsts, row by row, of a bounded number at a time."""
    layout = batch.layout
    if layout is None:
        raise AssertionError("asked of batches that know their spans")
    scores, ids = scored(batch), batch["input_ids"]
    owners = np.repeat(np.arange(len(layout.pointers) - 1), np.diff(layout.pointers))
    losses = []
    for row, offset, size in zip(owners.tolist(), layout.offsets.tolist(), layout.lengths.tolist(), strict=True):
        last = offset + size - 1
        for begin in range(offset, last, _MAX_TOKENS):
            part = slice(begin, min(begin + _MAX_TOKENS, last) + 1)
            losses.append(compute_token_losses(scores(row, part), ids[row, part]))
    return torch.cat(losses)


def is_leaking(packed: float, mixed: float, *, half: bool | None, noise: float = _NOISE_FLOOR) -> bool:
    """Whether such distances say that documents see each other; those that are no numbers do.

    Args:
        packed: of the documents in their rows, in nats a token.
        mixed: the same where nothing keeps them apart.
        half: whether it was computed in half precision; None where that is not known.
        noise: a distance that is not worth a name.
    """
    return not packed <= max(noise, _LEAK_THRESHOLDS[half] * mixed)


def accepts_argument(model: Any, name: str) -> bool:
    """Whether a model can be called with an argument of a name, be it as one of ``**kwargs``."""
    parameters = inspect.signature(model.forward).parameters
    return name in parameters or any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()
    )


def find_unknown_id(model: Any, ids: Tensor) -> tuple[int, int | None] | None:
    """An id that the embedding of a model has no row for, and its rows where that is known; None where it has all.

    A look-up of it ends in a traceback, or in a dead GPU.
    """
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    rows = getattr(embedding, "num_embeddings", None)
    # Both at once: each number that is read has a GPU waited for.
    lowest, highest = torch.stack(ids.aminmax()).tolist()
    if lowest < 0 or (rows is not None and highest >= rows):
        return (lowest if lowest < 0 else highest), rows
    return None


def _compute_losses(logits: LogitsFunction, orders: list[list[Tensor]], *, as_one_document: bool) -> Tensor:
    """The losses of the tokens of all documents but their firsts, row by row."""
    batch = _make_probe_batch(orders, as_one_document=as_one_document)
    rows, tokens = batch["input_ids"].shape
    scores = logits(batch)
    # Rows back to back are one.
    flat = len(scores) == 1
    own = scores[0, : rows * tokens].reshape(rows, tokens, -1) if flat else scores[:, :tokens]
    return torch.cat(
        [
            compute_token_losses(part, document)
            for row, order in zip(own, orders, strict=True)
            for part, document in zip(row.split([len(document_ids) for document_ids in order]), order, strict=True)
        ]
    )


def _make_probe_batch(orders: list[list[Tensor]], *, as_one_document: bool) -> Batch:
    """Rows of these documents as a loader gives them; each row as if it were one document, where asked for."""
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
    """The loss of each token of a document but the first, in nats, [tokens - 1] float32.

    Args:
        scores: of every next token, [tokens, vocabulary].
        document: its ids, [tokens] int64, on any device.
    """
    targets = document[1:].to(scores.device)
    return functional.cross_entropy(scores[:-1].float(), targets, reduction="none")
