"""Checks of a loader's output against documents, by token ids without a plan."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchloom.batches import IGNORE_INDEX
from batchloom.store import Store

Ints = NDArray[np.int64]
_MAX_LISTED = 3


def split_spans(batch: Mapping[str, Any], name: str = "input_ids") -> list[Ints]:
    """Return the ids of each span of a batch, with padding.

    Spans are cut where positions restart, or at ``cu_seq_lens_q``. ``name`` is the array to cut.
    """
    ids = np.asarray(batch[name])
    if "cu_seq_lens_q" in batch:
        return np.split(ids[0], np.asarray(batch["cu_seq_lens_q"])[1:-1])
    position_ids = np.asarray(batch["position_ids"])
    return [
        span
        for row, row_positions in zip(ids, position_ids, strict=True)
        for span in np.split(row, np.flatnonzero(row_positions[1:] == 0) + 1)
    ]


def check_coverage(batches: Iterable[Mapping[str, Any]], store: Store, epochs: int, left_out: int) -> None:
    """Assert that batches have every token of every document ``epochs`` times.

    It counts ids and adjacent pairs of ids. Spans and documents of only end tokens, such as padding, are not
    counted. ``left_out`` is the reported number of tokens left out in all epochs.
    """
    pad = store.end_id
    spans = [span for batch in batches for span in split_spans(batch) if (span != pad).any()]
    documents = [store[n].ids.astype(np.int64) for n in range(len(store))]
    documents = [ids for ids in documents if (ids != pad).any()] * epochs
    missing, extra = _count_differences(_collect_ids(documents, pad), _collect_ids(spans, pad))
    total = sum(map(len, documents)) - sum(map(len, spans))
    if extra or not missing <= left_out <= max(total, missing):
        raise AssertionError(
            f"In {epochs} epoch(s) of {store.location.name} {missing:,} tokens are missing and {extra:,} occur too "
            f"often; {left_out:,} were announced as left out.{_describe_missing_documents(documents, spans)}"
        )
    apart, strange = _count_differences(_make_adjacent_pairs(documents, pad), _make_adjacent_pairs(spans, pad))
    # Each cut of a document removes the pair across it.
    if strange or apart > max(0, len(spans) - len(documents)) + left_out:
        raise AssertionError(
            f"In {epochs} epoch(s) of {store.location.name} {strange:,} pairs of tokens are adjacent that are "
            f"adjacent in no document, and {apart:,} adjacent pairs were "
            f"separated.{_describe_missing_documents(documents, spans)}"
        )


def check_labels(batches: Iterable[Mapping[str, Any]], store: Store, epochs: int, left_out: int) -> None:
    """Assert that labels train exactly the tokens that the store's masks train.

    A label is its token's id (aligned) or the next one's (shifted), the same in the complete run. It is -100 at
    the first token of a span (or the last), on padding, and on masked tokens. It counts pairs of a trained
    token and its predecessor. ``left_out`` is the reported number of tokens left out in all epochs.
    """
    spans = [
        (ids.astype(np.int64), labels.astype(np.int64))
        for batch in batches
        for ids, labels in zip(split_spans(batch), split_spans(batch, "labels"), strict=True)
    ]
    aligned, shifted = (_make_trained_pairs(spans, shift) for shift in (0, 1))
    trained_pairs = shifted if aligned is None else aligned
    if trained_pairs is None:
        wrong = ([span for span in spans if _make_trained_pairs([span], n) is None] for n in (0, 1))
        ids, labels = min(wrong, key=len)[0]
        raise AssertionError(
            "Labels are neither the ids (aligned, -100 at a span's first token) nor the next ids (shifted, -100 at its "
            f"last): ids {ids[:8].tolist()}... have labels {labels[:8].tolist()}..."
        )
    documents = [store[n].ids.astype(np.int64) for n in range(len(store))]
    expected_pairs = np.tile(_make_expected_pairs(documents, store), epochs)
    pad = store.end_id
    end_token_pairs, other_pairs = (
        [pairs[_has_end_token(pairs, pad) == padded] for pairs in (expected_pairs, trained_pairs)]
        for padded in (True, False)
    )
    (ends, strange), (untrained, more) = (
        _count_differences(*end_token_pairs),
        _count_differences(*other_pairs),
    )
    ids_of_spans = [ids for ids, _ in spans]
    allowed_missing = (
        max(0, _count_real_spans(ids_of_spans, pad) - _count_real_spans(documents, pad) * epochs) + left_out
    )
    # The first token after a cut has no predecessor. A single end token there looks like padding.
    most = allowed_missing + len(spans) - _count_real_spans(ids_of_spans, pad)
    if strange or more or untrained > allowed_missing or ends > most:
        raise AssertionError(
            f"In {epochs} epoch(s) of {store.location.name} {strange + more:,} tokens have a label and are padding "
            f"or masked, and {ends + untrained:,} trained tokens have none; cuts and left-out tokens explain at most "
            f"{most:,} of them."
        )


def _make_expected_pairs(documents: Sequence[Ints], store: Store) -> Ints:
    """Return every token that a store trains, paired with its predecessor."""
    numbers, lengths = np.arange(len(documents)), np.array([*map(len, documents)], np.int64)
    masks = store.mask(numbers, np.zeros_like(numbers), lengths)
    pairs = [_encode_pairs(ids[:-1], ids[1:])[mask[1:]] for ids, mask in zip(documents, masks, strict=True)]
    return np.concatenate([*pairs, np.empty(0, np.int64)])


def _has_end_token(pairs: Ints, pad: int) -> NDArray[np.bool_]:
    """Return a mask of the pairs with an end token."""
    mask: NDArray[np.bool_] = (pairs >> 32 == pad) | (pairs & 0xFFFFFFFF == pad)
    return mask


def _count_real_spans(spans: Sequence[Ints], pad: int) -> int:
    """Return the number of spans with other tokens than end tokens."""
    return sum(bool((ids != pad).any()) for ids in spans)


def _make_trained_pairs(spans: Sequence[tuple[Ints, Ints]], shift: int) -> Ints | None:
    """Return every token with a label, paired with its predecessor.

    The result is None if a label is not the id ``shift`` tokens ahead.
    """
    pairs = [np.empty(0, np.int64)]
    for ids, labels in spans:
        # Labels of the second token on, aligned or shifted.
        token_labels = labels[1 - shift : len(labels) - shift]
        edge_labels = labels[:1] if shift == 0 else labels[-1:]
        trained_mask = token_labels != IGNORE_INDEX
        if (edge_labels != IGNORE_INDEX).any() or (token_labels != ids[1:])[trained_mask].any():
            return None
        pairs.append(_encode_pairs(ids[:-1], ids[1:])[trained_mask])
    return np.concatenate(pairs)


def _encode_pairs(first: Ints, second: Ints) -> Ints:
    """Encode pairs of ids as int64."""
    pairs: Ints = (first << 32) + second
    return pairs


def _collect_ids(spans: Sequence[Ints], pad: int) -> Ints:
    all_ids: Ints = np.concatenate([*spans, np.empty(0, np.int64)])
    content_ids: Ints = all_ids[all_ids != pad]
    return content_ids


def _make_adjacent_pairs(spans: Sequence[Ints], pad: int) -> Ints:
    pairs = [np.stack([span[:-1], span[1:]]) for span in spans]
    first, second = np.concatenate([*pairs, np.empty((2, 0), np.int64)], axis=1)
    content_mask = (first != pad) & (second != pad)
    return _encode_pairs(first[content_mask], second[content_mask])


def _count_differences(expected: Ints, actual: Ints) -> tuple[int, int]:
    """Return the number of missing values and of surplus values."""
    values, value_indices = np.unique(np.concatenate([expected, actual]), return_inverse=True)
    counts = np.bincount(value_indices[: len(expected)], minlength=len(values))
    counts -= np.bincount(value_indices[len(expected) :], minlength=len(values))
    return int(counts.clip(0).sum()), int((-counts).clip(0).sum())


def _describe_missing_documents(documents: Sequence[Ints], spans: Sequence[Ints]) -> str:
    """Describe the documents that do not occur complete as often as expected."""
    span_counts = Counter(span.tobytes() for span in spans)
    missing_documents = []
    for ids in documents:
        if span_counts[ids.tobytes()]:
            span_counts[ids.tobytes()] -= 1
        else:
            missing_documents.append(ids)
    beginnings = "; ".join(f"{ids[:4].tolist()}... of {len(ids)} tokens" for ids in missing_documents[:_MAX_LISTED])
    return f" Documents not served completely (or not often enough): {beginnings}." if missing_documents else ""
