"""Whether what came out of a loader is what documents hold: told by token ids alone, without asking a plan."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchloom.store.reader import Store

Ints = NDArray[np.int64]
_SHOWN = 3


def spans_of(batch: Mapping[str, Any]) -> list[Ints]:
    """The ids of each span of a batch, padding too: cut where positions restart, or at ``cu_seq_lens_q``."""
    ids = np.asarray(batch["input_ids"])
    if "cu_seq_lens_q" in batch:
        return np.split(ids[0], np.asarray(batch["cu_seq_lens_q"])[1:-1])
    places = np.asarray(batch["position_ids"])
    return [
        span
        for row, at in zip(ids, places, strict=True)
        for span in np.split(row, np.flatnonzero(at[1:] == 0) + 1)
    ]


def check_coverage(
    batches: Iterable[Mapping[str, Any]], store: Store, epochs: int, left_out: int
) -> None:
    """Assert that batches hold every token of every document ``epochs`` times, and nothing else.

    Counted are ids, and pairs of ids that stand side by side. What has only the end token, as padding has, counts on
    neither side.

    Args:
        batches: of all ranks, in any order.
        store: the documents.
        epochs: how often.
        left_out: tokens that were announced as left out, over all epochs.
    """
    pad = store.end_id
    spans = [span for batch in batches for span in spans_of(batch) if (span != pad).any()]
    documents = [store[n].ids.astype(np.int64) for n in range(len(store))]
    documents = [ids for ids in documents if (ids != pad).any()] * epochs
    missing, extra = _differ(_ids(documents, pad), _ids(spans, pad))
    total = sum(map(len, documents)) - sum(map(len, spans))
    if extra or not missing <= left_out <= max(total, missing):
        raise AssertionError(
            f"In {epochs} epoch(s) of {store.place} {missing:,} tokens are missing and {extra:,} come too often, and "
            f"{left_out:,} were announced as left out.{_lost(documents, spans)}"
        )
    apart, strange = _differ(_pairs(documents, pad), _pairs(spans, pad))
    # Each cut of a document takes the pair that stood across it.
    if strange or apart > max(0, len(spans) - len(documents)) + left_out:
        raise AssertionError(
            f"In {epochs} epoch(s) of {store.place} {strange:,} pairs of tokens stand side by side that do not in any "
            f"document, and {apart:,} that do were parted.{_lost(documents, spans)}"
        )


def _ids(spans: Sequence[Ints], pad: int) -> Ints:
    held: Ints = np.concatenate([*spans, np.empty(0, np.int64)])
    kept: Ints = held[held != pad]
    return kept


def _pairs(spans: Sequence[Ints], pad: int) -> Ints:
    pairs = [np.stack([span[:-1], span[1:]]) for span in spans]
    first, second = np.concatenate([*pairs, np.empty((2, 0), np.int64)], axis=1)
    kept = (first != pad) & (second != pad)
    joined: Ints = (first[kept] << 32) + second[kept]
    return joined


def _differ(wanted: Ints, found: Ints) -> tuple[int, int]:
    """How many values are missing, and how many are there too often."""
    values, places = np.unique(np.concatenate([wanted, found]), return_inverse=True)
    counts = np.bincount(places[: len(wanted)], minlength=len(values))
    counts -= np.bincount(places[len(wanted) :], minlength=len(values))
    return int(counts.clip(0).sum()), int((-counts).clip(0).sum())


def _lost(documents: Sequence[Ints], spans: Sequence[Ints]) -> str:
    """Which documents do not come as a whole as often as they should, as a sentence."""
    whole = Counter(span.tobytes() for span in spans)
    lost = []
    for ids in documents:
        if whole[ids.tobytes()]:
            whole[ids.tobytes()] -= 1
        else:
            lost.append(ids)
    begins = "; ".join(f"{ids[:4].tolist()}... of {len(ids)} tokens" for ids in lost[:_SHOWN])
    return f" Not (or not often enough) there as a whole: {begins}." if lost else ""
