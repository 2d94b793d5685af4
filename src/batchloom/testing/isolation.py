"""Whether a model keeps the documents of a packed row apart, shown on documents of the store.

A row of several documents is put through the model three times: packed as in training,
document by document, and with positions that run on, as if nothing kept them apart. Packed
must be as alone; how far apart the third is says what a leak would look like in this model,
so that the verdict does not depend on the scale of its weights.
"""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from batchloom.store.reader import Store

Logits = Callable[[Tensor, Tensor], Tensor]
_DOCUMENTS = 4
_MOST_TOKENS = 256
_LOOKED_AT = 1 << 20


def probes(store: Store, seq_len: int) -> list[Tensor]:
    """The beginnings of a few documents that fit into a row together, [tokens] int64 each.

    Args:
        store: with at least one document of two tokens.
        seq_len: of the rows in training.
    """
    longest = max(2, min(_MOST_TOKENS, seq_len // 2))
    count = max(2, min(_DOCUMENTS, seq_len // longest))
    numbers = [number for number, _ in zip(_of_two_tokens(store), range(count), strict=False)]
    found = [torch.from_numpy(store[number].ids[:longest].astype(np.int64)) for number in numbers]
    return found if len(found) > 1 else found * 2


def _of_two_tokens(store: Store) -> Iterator[int]:
    for start in range(0, len(store), _LOOKED_AT):
        lengths = store.lengths.slice(start, min(len(store), start + _LOOKED_AT))
        yield from (start + int(number) for number in np.flatnonzero(lengths > 1))


@torch.no_grad()
def leakage(logits: Logits, documents: list[Tensor], rows: int) -> tuple[float, float]:
    """How far the losses of packed tokens are from those of the documents one by one.

    Args:
        logits: scores [rows, tokens, vocabulary] of ids and positions [rows, tokens].
        documents: two or more, [tokens] int64 each, on the model's device.
        rows: of a pass; some kernels keep apart what lies in a single row only.

    Returns:
        The mean distance in nats a token, and the same where nothing keeps them apart.
    """
    orders = [documents, documents[::-1]][: min(rows, 2)]
    ids = torch.stack([torch.cat(order) for order in orders])
    positions = torch.stack(
        [torch.cat([torch.arange(len(d), device=d.device) for d in order]) for order in orders]
    )
    alone = [
        token_losses(logits(d[None], torch.arange(len(d), device=d.device)[None])[0], d)
        for d in documents
    ]
    wanted = torch.cat([torch.cat(order) for order in (alone, alone[::-1])[: len(orders)]])
    running = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    packed, mixed = (
        torch.cat(
            [
                token_losses(part, document)
                for row, order in zip(logits(ids, at), orders, strict=True)
                for part, document in zip(row.split([len(d) for d in order]), order, strict=True)
            ]
        )
        for at in (positions, running)
    )
    return float((packed - wanted).abs().mean()), float((mixed - wanted).abs().mean())


def token_losses(scores: Tensor, document: Tensor) -> Tensor:
    """The loss of each token of a document but the first, in nats, [tokens - 1] float32.

    Args:
        scores: of every next token, [tokens, vocabulary].
        document: its ids, [tokens] int64.
    """
    return functional.cross_entropy(scores[:-1].float(), document[1:], reduction="none")
