"""Check that a model's loss of packed rows equals that of single documents.

The rows are those of a ``Loader``. Each of their documents also goes through the model alone, and a third time
with its row as one long document. The latter shows the size of a leak in this model, so that the verdict does
not depend on the scale of its weights. If documents leak, the tokens of each neighbour are changed in turn
to find the source.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from batchloom.batches import (
    IGNORE_INDEX,
    Loader,
    accepts_argument,
    allow_model_calls,
    compute_token_losses,
    find_unknown_id,
    is_leaking,
)
from batchloom.core.settings import as_int, quote_value, raise_problems
from batchloom.plan.packing import Rows
from batchloom.store import Store

LogitsFunction = Callable[[Mapping[str, Any]], Tensor]
_BATCH_ROWS = 4
_MAX_CHECKED_LENGTHS = 1024
_MIN_SEQ_LEN = 32
_MAX_SEQ_LEN = 4096
# Differences below this share of the tolerance are rounding.
_ROUNDING_SHARE = 0.1
_LEAK_THRESHOLD = 1e-6
_MAX_NEIGHBOURS = 8


class _PackedSpan(NamedTuple):
    """Document, or part of one, in a packed batch.

    Attributes:
        document: number in the store.
        start: first token in the document.
        row: row of the batch.
        position: first token in the row.
        length: number of tokens.
    """

    document: int
    start: int
    row: int
    position: int
    length: int

    def __str__(self) -> str:
        return f"document {self.document} (its tokens {self.start} to {self.start + self.length - 1})"


class _PackedBatch(NamedTuple):
    """Batch, its inputs of the model, its packed spans, and the tokens of a row."""

    batch: Mapping[str, Any]
    inputs: dict[str, Any]
    spans: list[_PackedSpan]
    seq_len: int

    def get_trained_mask(self, span: _PackedSpan) -> Tensor:
        labels: Tensor = self.batch["labels"][span.row, span.position + 1 : span.position + span.length]
        return labels != IGNORE_INDEX


class _SpanComparison(NamedTuple):
    """Loss differences of a span to the document alone: packed, and as one document."""

    span: _PackedSpan
    packed: float
    mixed: float


def assert_packed_equals_unpacked(
    model: nn.Module | LogitsFunction,
    store: Store,
    *,
    seq_len: int | None = None,
    tolerance: float = 1e-4,
    documents: int = 32,
    form: Literal["rows", "varlen"] = "rows",
    arguments: Mapping[str, Any] = MappingProxyType({}),
) -> float:
    """Assert that packing changes no document's loss.

    Args:
        model: a module, called as ``model(**batch, **arguments)``, without labels and keys that its ``forward`` does
            not take. It runs in evaluation mode, on its own device. Or a function from a batch (a mapping of
            tensors on the CPU) to logits [rows, tokens, vocabulary].
        store: store of the documents.
        seq_len: tokens of a row; None for four times the mean document.
        tolerance: maximum mean difference of a document in nats per token; 1e-4 is for float32.
        documents: number of documents to compare.
        form: form of the batches, see docs/how-to/train/loader.md.
        arguments: what your calls of a module give beside the batch, such as ``{"use_cache": False}``.

    Returns:
        The largest difference of a document, in nats per token.

    Raises:
        SettingsError: ``tolerance`` or ``documents`` is invalid.
        AssertionError: documents leak (names the document, the neighbour, the difference and the likely cause), or
            nothing can be compared: the same batch has other logits each time, ids or positions are beyond the
            model's, or the output is not logits.
    """
    if seq_len is None:
        seq_len = _choose_seq_len(store, model)
    problems = []
    if not 0 < tolerance < math.inf:
        problems.append(f"tolerance: {quote_value(tolerance)} is not a number of nats above 0")
    if (as_int(documents) or 0) < 1:
        problems.append(f"documents: {quote_value(documents)} is not a whole number of at least 1")
    raise_problems(problems)
    loader = Loader(
        store,
        seq_len=seq_len,
        global_batch_size=_BATCH_ROWS,
        epochs=1,
        form=form,
        # The check is of the model, so parts of long conversations work as well.
        overlong="split",
        rank=0,
        world_size=1,
        prefetch=0,
    )
    # A call that would be refused is explained here, with documents and numbers.
    with allow_model_calls(), _evaluation_logits(model, arguments) as logits:
        return _compare_documents(_wrap_checked_logits(logits, model), loader, store, tolerance, documents)


def _choose_seq_len(store: Store, model: nn.Module | LogitsFunction) -> int:
    """Return a row length with several documents, within the model's positions."""
    lengths = store.lengths.slice(0, min(len(store), _MAX_CHECKED_LENGTHS))
    target_length = 4 * int(lengths.mean()) if len(lengths) else 0
    config = getattr(model, "config", None)
    max_length = min(getattr(config, "max_position_embeddings", None) or _MAX_SEQ_LEN, _MAX_SEQ_LEN)
    return min(max(_MIN_SEQ_LEN, target_length), max_length)


@contextmanager
def _evaluation_logits(model: nn.Module | LogitsFunction, arguments: Mapping[str, Any]) -> Iterator[LogitsFunction]:
    """Yield the model as a function to logits, in evaluation mode without gradients."""
    if not isinstance(model, nn.Module):
        with torch.no_grad():
            yield model
        return
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    training = model.training

    def logits(batch: Mapping[str, Any]) -> Tensor:
        model_inputs = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()}
        output = model(**{k: v for k, v in model_inputs.items() if accepts_argument(model, k)}, **arguments)
        scores: Tensor = output[0] if isinstance(output, tuple) else getattr(output, "logits", output)
        return scores

    model.eval()
    try:
        with torch.no_grad():
            yield logits
    finally:
        model.train(training)


def _wrap_checked_logits(logits: LogitsFunction, model: nn.Module | LogitsFunction) -> LogitsFunction:
    """Wrap a logits function with checks that explain invalid inputs and outputs."""

    def checked(batch: Mapping[str, Any]) -> Tensor:
        ids = batch["input_ids"]
        if (unknown_id := find_unknown_id(model, ids)) is not None:
            number, rows = unknown_id
            raise AssertionError(
                f"The store holds id {number} and the model has {rows} embeddings, from id 0: give a store of the "
                "model's tokenizer, or enlarge the model (resize_token_embeddings)."
            )
        try:
            scores = logits(batch)
        except IndexError as error:
            raise AssertionError(
                f"The model fails with {error!r} for ids up to {int(ids.max())} and positions up to "
                f"{int(batch['position_ids'].max())}: give a model with embeddings for both, or a smaller seq_len."
            ) from error
        if (problem := _find_scores_problem(scores, ids)) is not None:
            raise AssertionError(problem)
        return scores

    return checked


def _find_scores_problem(scores: Any, ids: Tensor) -> str | None:
    """Describe why these are not logits of every token and id; None if they are."""
    expected = f"[{ids.shape[0]}, {ids.shape[1]}, vocabulary]"
    if not isinstance(scores, Tensor):
        return (
            f"The model gives a {type(scores).__name__}, and a tensor of scores {expected} is expected: return that "
            "(transformers models have it as .logits)."
        )
    if scores.ndim != 3 or scores.shape[:2] != ids.shape:
        return (
            f"The model gives scores {list(scores.shape)} for ids {list(ids.shape)}: return one for every token and "
            f"id, {expected}."
        )
    if int(ids.max()) >= scores.shape[2]:
        return (
            f"The store holds id {int(ids.max())} and the model gives scores for {scores.shape[2]} ids, from 0: give "
            "a store of the model's tokenizer."
        )
    return None


def _check_deterministic(logits: LogitsFunction, inputs: Mapping[str, Any], rounding: float) -> None:
    """Reject a model with random logits for the same batch: they would seem to leak."""
    first = logits(inputs)
    second = logits(inputs)
    distance = max(
        float((compute_token_losses(first_scores, ids) - compute_token_losses(second_scores, ids)).abs().mean())
        for first_scores, second_scores, ids in zip(first, second, inputs["input_ids"], strict=True)
    )
    if distance > rounding:
        raise AssertionError(
            f"The model gives other scores each time it is called with the same batch: its losses are {distance:.2g} "
            "nats per token apart, so nothing can be compared. The likely cause is dropout (call model.eval() first) "
            "or another random operation."
        )


def _compare_documents(logits: LogitsFunction, loader: Loader, store: Store, tolerance: float, most: int) -> float:
    """Compare documents by batch until there are enough; return the worst difference."""
    comparisons: list[_SpanComparison] = []
    looked_at = 0
    step = 0
    worst = None
    while len(comparisons) < most and looked_at < _MAX_CHECKED_LENGTHS and loader.plan.has_step(step):
        rows = loader.plan.rows(*loader.plan.positions_of(step))
        batch = loader.batch(step)
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        packed = _PackedBatch(batch, inputs, _list_packed_spans(rows, loader.spec.form), loader.plan.spec.seq_len)
        compared_spans = packed.spans[: most - len(comparisons)]
        if compared_spans and not looked_at:
            _check_deterministic(logits, inputs, _ROUNDING_SHARE * tolerance)
        batch_comparisons = _compare_spans(logits, packed, compared_spans, store)
        looked_at += len(compared_spans)
        step += 1
        comparisons += batch_comparisons
        for comparison in batch_comparisons:
            # NaN counts as the worst difference.
            if worst is None or not comparison.packed <= worst[0].packed:
                worst = comparison, packed
    if worst is None:
        why = f"no row of {loader.plan.spec.seq_len} tokens holds two of them (raise seq_len)"
        if looked_at:
            why = f"the {looked_at} checked documents have no trained token after their first"
        raise AssertionError(f"There are no packed documents of {store.location.name} to compare: {why}.")
    packed_distance, mixed = (
        sum(values) / len(comparisons)
        for values in zip(*((comparison.packed, comparison.mixed) for comparison in comparisons), strict=True)
    )
    if max(packed_distance, mixed) <= _LEAK_THRESHOLD:
        raise AssertionError(
            "This model cannot be checked: its losses do not change even if a row is treated as one document "
            f"({mixed:.1e} nats per token). The tokens before a token do not affect its scores, as with layers "
            "initialized to zero (give trained or random weights) or a model that attends along another axis than "
            "that of the tokens."
        )
    if not math.isfinite(packed_distance + mixed):
        raise AssertionError(
            f"The losses of {worst[0].span} are not finite ({worst[0].packed:g} nats from the document alone), so "
            "nothing can be compared: check the weights."
        )
    failure_count = sum(not comparison.packed <= tolerance for comparison in comparisons)
    if failure_count or is_leaking(packed_distance, mixed, half=None, noise=_ROUNDING_SHARE * tolerance):
        beyond = f"{failure_count} of {len(comparisons)} documents are beyond the tolerance of {tolerance:g}"
        raise AssertionError(f"{_explain_leak(logits, *worst)} {beyond}.")
    return worst[0].packed


def _list_packed_spans(rows: Rows, form: str) -> list[_PackedSpan]:
    """Return the spans of a batch that share their row with others."""
    spans = []
    flat = 0
    columns = (rows.documents, rows.starts, rows.row_offsets, rows.lengths)
    for row in range(len(rows)):
        first = int(rows.pointers[row])
        stop = int(rows.pointers[row + 1])
        for document, start, position, length in zip(*(c[first:stop].tolist() for c in columns), strict=True):
            if form == "varlen":
                spans.append(_PackedSpan(document, start, 0, flat, length))
            elif stop - first > 1:
                spans.append(_PackedSpan(document, start, row, position, length))
            flat += length
    return spans if len(spans) > 1 else []


def _compare_spans(
    logits: LogitsFunction, packed: _PackedBatch, spans: Sequence[_PackedSpan], store: Store
) -> list[_SpanComparison]:
    """Compare each span that has a trained token."""
    if not spans:
        return []
    # In a flat batch, positions of the one document restart every seq_len tokens: the model may have no higher ones.
    mixed_batch = _make_unpacked_batch(packed.inputs, packed.inputs["input_ids"], packed.seq_len)
    together = logits(packed.inputs), logits(mixed_batch)
    comparisons = []
    for span in spans:
        trained_mask = packed.get_trained_mask(span)
        if not trained_mask.any():
            continue
        span_ids = store[span.document].ids[span.start : span.start + span.length]
        ids = torch.from_numpy(span_ids.astype(np.int64))
        scores_alone = logits(_make_unpacked_batch(packed.inputs, ids[None], len(ids)))
        losses_alone = _compute_span_losses(scores_alone, span._replace(row=0, position=0), ids)
        packed_distance, mixed_distance = (
            float((_compute_span_losses(scores, span, ids) - losses_alone)[trained_mask].abs().mean())
            for scores in together
        )
        comparisons.append(_SpanComparison(span, packed_distance, mixed_distance))
    return comparisons


def _compute_span_losses(scores: Tensor, span: _PackedSpan, ids: Tensor) -> Tensor:
    return compute_token_losses(scores[span.row, span.position : span.position + span.length], ids)


def _make_unpacked_batch(batch: Mapping[str, Any], ids: Tensor, positions: int) -> dict[str, Any]:
    """Return a batch in the form of another, with one document in each row."""
    tokens = ids.shape[1]
    position_ids = (torch.arange(tokens) % positions).repeat(len(ids), 1)
    inputs: dict[str, Any] = {"input_ids": ids, "position_ids": position_ids}
    if "cu_seq_lens_q" in batch:
        bounds = torch.tensor([0, tokens], dtype=torch.int32)
        inputs |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds.clone()}
        inputs |= {"max_length_q": tokens, "max_length_k": tokens}
        inputs["seq_idx"] = torch.zeros_like(ids, dtype=torch.int32)
    return inputs


def _explain_leak(logits: LogitsFunction, worst: _SpanComparison, packed: _PackedBatch) -> str:
    """Describe the document that leaks, from which neighbour, and the likely cause."""
    span = worst.span
    fact = (
        f"Packed documents see each other: the loss of {span} in row {span.row} is {worst.packed:.2g} nats per token "
        f"from that of the document alone ({worst.mixed:.2g} if nothing separates documents)."
    )
    neighbour, change = _find_leaking_neighbour(logits, packed, span)
    scores = logits(packed.inputs)
    if neighbour is None and scores.dtype in (torch.bfloat16, torch.float16):
        return (
            f"The loss of {span} in row {span.row} is {worst.packed:.2g} nats per token from that of the document "
            f"alone, and no neighbour's tokens change it: for scores in {scores.dtype} that is rounding. Compare the "
            "model in float32 (model.float()), or give a tolerance that half precision can meet."
        )
    observation = "No neighbour's tokens change it, so its position in the row does."
    if neighbour is not None and change > _LEAK_THRESHOLD:
        side = "before" if neighbour.position < span.position else "after"
        observation = f"Other tokens in {neighbour}, {side} it in the row, change it by {change:.2g} nats per token."
    altered_inputs = {**packed.inputs, "position_ids": torch.zeros_like(packed.inputs["position_ids"])}
    if bool(((scores - logits(altered_inputs)).abs() <= _LEAK_THRESHOLD).all()):
        cause = (
            "The model does not read position_ids (other values give the same scores): pass them on to its "
            "attention, or train with packing='none'."
        )
    else:
        cause = (
            "Likely causes: attention_mask is given (with a mask of ones all documents of a row see each other: give "
            "None), or use_cache is on (give False), or the attention reads neither restarting position_ids nor "
            "cu_seq_lens (choose sdpa, eager or flex_attention), or the model counts positions itself."
        )
    return f"{fact} {observation} {cause}"


def _find_leaking_neighbour(
    logits: LogitsFunction, packed: _PackedBatch, span: _PackedSpan
) -> tuple[_PackedSpan | None, float]:
    """Return the neighbour whose tokens change a span's losses most, and the change."""
    row = [neighbour for neighbour in packed.spans if neighbour.row == span.row]
    span_index = row.index(span)
    neighbours = [
        *row[max(0, span_index - _MAX_NEIGHBOURS) : span_index],
        *row[span_index + 1 :][:_MAX_NEIGHBOURS],
    ]
    inputs = packed.inputs
    ids = inputs["input_ids"][span.row, span.position : span.position + span.length]
    trained_mask = packed.get_trained_mask(span)
    original_losses = _compute_span_losses(logits(inputs), span, ids)[trained_mask]
    most: tuple[_PackedSpan | None, float] = (None, 0.0)
    for neighbour in neighbours:
        token_slice = slice(neighbour.position, neighbour.position + neighbour.length)
        altered_ids = inputs["input_ids"].clone()
        reversed_ids = altered_ids[neighbour.row, token_slice].flip(0)
        # A palindrome does not change by reversal, so it is overwritten with a token of the span.
        is_palindrome = bool((reversed_ids == altered_ids[neighbour.row, token_slice]).all())
        altered_ids[neighbour.row, token_slice] = ids[0] if is_palindrome else reversed_ids
        altered_losses = _compute_span_losses(logits({**inputs, "input_ids": altered_ids}), span, ids)[trained_mask]
        change = float((altered_losses - original_losses).abs().mean())
        if change > most[1]:
            most = (neighbour, change)
    return most
