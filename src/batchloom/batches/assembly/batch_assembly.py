"""Assembly of plan rows into batch arrays, with one copy per span."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import PlanError
from batchloom.core.loss_weights import TokenFlags, decode_loss_weights
from batchloom.core.settings import as_int, quote_value
from batchloom.plan.order import list_divisors
from batchloom.plan.packing import Rows, align_lengths

IGNORE_INDEX = -100
_ARRAY_GAP = 64
# Axes of token arrays: rows and tokens. M-RoPE positions have one more, and begin with those of the text.
TOKEN_AXES = 2
# Prefixes that processors use for feature names.
_MEDIA_PREFIXES = ("pixel_", "image_", "input_features", "feature_", "audio_")
# Arrays of a batch with an entry per token.
TOKEN_KEYS = ("input_ids", "labels", "loss_weights", "position_ids", "seq_idx", "token_type_ids")
# Longer sequences hold few spans for their tokens, so creating the views costs little.
_MAX_CACHED_RAMPS = 8192

Ids = NDArray[np.int64]


class MediaOffsets(NamedTuple):
    """Offsets of the media features of each of R rows in an array."""

    axis: int  # axis along which the features of the rows are concatenated
    pointers: Ids  # row r holds entries pointers[r] to pointers[r + 1] - 1, int64 [R + 1]
    media: Ids  # number of media before each row, and in total, int64 [R + 1]


MediaOffsetsByName = Mapping[str, MediaOffsets]


# The step of a rebuilt batch. With -2, ``batch.step + 1`` is invalid as well, and is refused.
_UNKNOWN_STEP = -2


class Batch(dict[str, Any]):
    """A dict of arrays, as models take it, with its step and origin.

    Attributes:
        step: optimizer step of the batch; -2 for a batch that was rebuilt from its arrays.
        origin: origin of the data, as in log lines.
        layout: spans of its rows; None for a batch that was rebuilt.
    """

    def __init__(
        self,
        arrays: Mapping[str, Any],
        step: int = _UNKNOWN_STEP,
        origin: str = "",
        layout: "BatchLayout | None" = None,
    ) -> None:
        # Frameworks move a batch by rebuilding it from its items alone: type(batch)({...}).
        super().__init__(arrays)
        self.step, self.origin, self.layout = step, origin, layout

    def __repr__(self) -> str:
        arrays = ", ".join(f"{name}: {_describe_array(value)}" for name, value in self.items())
        return f"Batch(step {self.step}: {arrays})"

    def to(self, device: Any, *, non_blocking: bool = False) -> "Batch":
        """Return the batch with its tensors on a device.

        Accelerate and Lightning move a batch with this method. Without it they rebuild it from its arrays and
        lose ``step``.

        Args:
            device: any device that ``torch.Tensor.to`` takes.
            non_blocking: whether copies from pinned memory may run asynchronously.
        """
        moved = {name: _move(value, device, non_blocking=non_blocking) for name, value in self.items()}
        return Batch(moved, self.step, self.origin, self.layout)

    def split(self, micro_batch_size: int) -> list["Batch"]:
        """Split the batch by rows into micro-batches that are views of the same memory.

        In the varlen form, a part whose rows hold no span is padding without loss, since models
        take no empty input. The split does not synchronize with the GPU: the row bounds are on the CPU.

        Raises:
            PlanError: a size that does not divide the rows (names those that do), a varlen batch
                that was rebuilt and no longer knows its rows, or a mask that cannot be cut.
        """
        layout = self.layout
        # A slice of a flex_attention mask keeps the mask function, which counts the rows of the full batch.
        if hasattr(self.get("attention_mask"), "mask_mod"):
            raise PlanError("The BlockMask of a batch cannot be cut: split first, then add_block_mask to each part.")
        if "cu_seq_lens_q" not in self:
            rows = len(next(iter(self.values())))
            return [
                Batch(
                    _slice_rows(self, layout, first, first + micro_batch_size),
                    self.step,
                    self.origin,
                    layout and layout.part(first, first + micro_batch_size),
                )
                for first in _part_starts(rows, micro_batch_size)
            ]
        if layout is None:
            raise PlanError(
                "A varlen batch that was rebuilt from its arrays does not know where its rows end: split it before it "
                "is moved, and move the parts."
            )
        firsts = _part_starts(len(layout.pointers) - 1, micro_batch_size)
        parts = [_slice_varlen(self, layout, first, first + micro_batch_size) for first in firsts]
        return [Batch(part, self.step, self.origin) for part in parts]


def _move(value: Any, device: Any, *, non_blocking: bool) -> Any:
    """Move tensors, including those in a dict of masks; numpy arrays stay."""
    if isinstance(value, Mapping):
        return {name: _move(part, device, non_blocking=non_blocking) for name, part in value.items()}
    if hasattr(value, "mask_mod"):
        # A flex_attention mask takes no other argument.
        return value.to(device)
    return value.to(device, non_blocking=non_blocking) if hasattr(value, "to") else value


def _describe_array(value: Any) -> str:
    """Return the dtype and shape of an array, or the repr of any other value."""
    if not hasattr(value, "shape"):
        return repr(value)
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """Spans of the rows of a batch."""

    pointers: Ids  # row r holds the spans pointers[r] to pointers[r + 1] - 1, int64 [R + 1]
    lengths: Ids  # tokens of each span without alignment padding, int64 [N]
    offsets: Ids  # offset of each span in its row, int64 [N]
    align: int  # number of tokens that each span is padded to a multiple of
    labels: str  # ``aligned`` or ``shifted``
    sliced: bool  # whether the batch is a context-parallel rank's slice of these rows
    media: MediaOffsetsByName = field(default_factory=dict)  # offsets of the media features of each row, by array name

    @property
    def bounds(self) -> Ids:
        """Span boundaries of the varlen form before context slicing, int64 [N + 1]."""
        bounds = np.zeros(len(self.lengths) + 1, np.int64)
        np.cumsum(align_lengths(self.lengths, self.align), out=bounds[1:])
        return bounds if len(bounds) > 1 else np.array([0, self.align])

    def part(self, start: int, stop: int) -> "BatchLayout":
        """Return the layout of rows ``start`` to ``stop - 1``."""
        first, last = int(self.pointers[start]), int(self.pointers[stop])
        return replace(
            self,
            pointers=self.pointers[start : stop + 1] - first,
            lengths=self.lengths[first:last],
            offsets=self.offsets[first:last],
            media={
                name: MediaOffsets(
                    media_offsets.axis,
                    media_offsets.pointers[start : stop + 1] - media_offsets.pointers[start],
                    media_offsets.media[start : stop + 1] - media_offsets.media[start],
                )
                for name, media_offsets in self.media.items()
            },
        )


def _part_starts(rows: int, size: int) -> range:
    if (as_int(size) or 0) < 1 or rows % size:
        fitting = ", ".join(map(str, list_divisors(rows)))
        raise PlanError(
            f"A batch of {rows} rows cannot be cut into micro-batches of {quote_value(size)}; {fitting} can. "
            "Loader(batch=BatchOptions(micro_batch_size=..., uneven='pad')) fills up with rows that carry no loss."
        )
    return range(0, rows, size)


def _slice_rows(batch: Batch, layout: BatchLayout | None, first: int, stop: int) -> dict[str, Any]:
    """Slice rows of a batch; leave out media features that these rows do not hold."""
    media = layout.media if layout is not None else {}
    if layout is None and _has_media_features(batch):
        raise PlanError(
            "A batch with media that was rebuilt from its arrays does not know which features its rows hold: split it "
            "before it is moved, and move the parts."
        )
    part = {
        # M-RoPE positions have time, height and width as their first axis.
        key: value[:, first:stop] if key == "position_ids" and value.ndim > TOKEN_AXES else value[first:stop]
        for key, value in batch.items()
        if key not in media
    }
    return part | _slice_media(batch, media, first, stop)


def _has_media_features(batch: Batch) -> bool:
    """Return whether a batch without a layout holds media features."""
    positions = batch.get("position_ids")
    if positions is not None and positions.ndim > TOKEN_AXES:
        return True
    return any(name.startswith(_MEDIA_PREFIXES) for name in batch)


def _slice_media(batch: Batch, media: MediaOffsetsByName, first: int, stop: int) -> dict[str, Any]:
    part = {}
    for name, media_offsets in media.items():
        if media_offsets.media[first] < media_offsets.media[stop]:
            inside = slice(int(media_offsets.pointers[first]), int(media_offsets.pointers[stop]))
            part[name] = batch[name][(slice(None),) * media_offsets.axis + (inside,)]
    return part


def _slice_varlen(batch: Batch, layout: BatchLayout, first: int, stop: int) -> dict[str, Any]:
    """Slice rows of a varlen batch, also of a context-parallel rank's slice."""
    # The bounds come from the layout: reading them from the tensors would synchronize with the GPU.
    bounds, starts = layout.bounds, batch["cu_seq_lens_q"]
    # With C context ranks, each rank holds 1/C of every span.
    context = int(bounds[-1]) // batch["input_ids"].shape[1]
    from_span, to_span = int(layout.pointers[first]), int(layout.pointers[stop])
    empty = from_span == to_span
    if empty:
        begin, end, longest = 0, layout.align // context, layout.align
        own = starts[:2] - starts[:2]
        own[1] = layout.align
    else:
        own = starts[from_span : to_span + 1] - starts[from_span]
        begin, end = (int(bounds[span]) // context for span in (from_span, to_span))
        longest = int(np.diff(bounds[from_span : to_span + 1]).max())
    part = {name: batch[name][..., begin:end] for name in TOKEN_KEYS if name in batch}
    part |= _slice_media(batch, layout.media, first, stop)
    if empty:
        part["labels"] = part["labels"] * 0 + IGNORE_INDEX
        if "loss_weights" in part:
            part["loss_weights"] = part["loss_weights"] * 0
    part["seq_idx"] = part["seq_idx"] - part["seq_idx"][0, 0]
    lengths = {"max_length_q": longest, "max_length_k": longest}
    return {**part, "cu_seq_lens_q": own, "cu_seq_lens_k": own + 0, **lengths}


class TokenReader(Protocol):
    """Interface of a store for batch assembly."""

    @property
    def end_id(self) -> int:
        """Id that fills padding."""

    @property
    def masked(self) -> bool:
        """True if some tokens carry no loss."""

    @property
    def weighted(self) -> bool:
        """True if some tokens have another loss weight than 0 and 1."""

    def read(self, documents: Ids, starts: Ids, lengths: Ids) -> list[NDArray[np.generic]]:
        """Return the ids of document spans."""

    def mask(self, documents: Ids, starts: Ids, lengths: Ids) -> list[NDArray[np.bool_]]:
        """Return for each span whether each of its tokens carries a loss."""

    def flags(self, documents: Ids, starts: Ids, lengths: Ids) -> list[TokenFlags]:
        """Return for each span the trained flag or weight code of each token."""


def assemble_rows(store: TokenReader, rows: Rows, seq_len: int, labels: str, align: int = 1) -> dict[str, NDArray[Any]]:
    """Assemble a padded batch of R rows.

    Returns:
        ``input_ids``, ``labels`` and ``position_ids``, each int64 [R, seq_len], and of a weighted store
        ``loss_weights``, float32 [R, seq_len]: the weight of each label, 0 without loss. Positions
        restart at 0 with each span. Padding counts as one more span, holds the end token
        and carries no loss. Alignment padding belongs to its span: positions continue there.
    """
    count = len(rows)
    span_tokens = store.read(rows.documents, rows.starts, rows.lengths)
    ramps = _position_ramps(rows.lengths, seq_len)
    # Most batches are full and need no search for padding.
    full = int(rows.lengths.sum()) == count * seq_len
    paddings = [] if full else _find_padding(rows, seq_len, align)
    if paddings:
        ends, ramp = _padding_row(store.end_id, seq_len), _position_ramp(seq_len)
        for span_index, begin, end, first in reversed(paddings):
            span_tokens.insert(span_index, ends[: end - begin])
            ramps.insert(span_index, ramp[first : first + end - begin])
    ids, targets, positions = _allocate_arrays(count * seq_len)
    # Concatenating views copies each span once, without a Python assignment per span.
    np.concatenate(span_tokens, out=ids)
    np.concatenate(ramps, out=positions)
    begins = _span_starts(rows, seq_len)
    _fill_labels(targets, ids, begins, rows.lengths, labels)
    flags = _read_flags(store, rows)
    for span_index, begin, end, _ in reversed(paddings if flags else []):
        flags.insert(span_index, np.zeros(end - begin, bool))
    _mask_labels(targets, flags, labels)
    for _, begin, end, _ in paddings:
        targets[begin:end] = IGNORE_INDEX
    arrays: dict[str, NDArray[Any]] = {"input_ids": ids, "labels": targets, "position_ids": positions}
    if store.weighted:
        arrays["loss_weights"] = _make_loss_weights(targets, flags, labels)
    return {name: array.reshape(count, seq_len) for name, array in arrays.items()}


def _read_flags(store: TokenReader, rows: Rows) -> list[TokenFlags]:
    """Return the trained flags or weight codes of spans; nothing if all are trained."""
    if not (store.masked or store.weighted) or not rows.lengths.size:
        return []
    return store.flags(rows.documents, rows.starts, rows.lengths)


def _span_starts(rows: Rows, seq_len: int) -> Ids:
    """Return the offset of each span in the flat batch."""
    begins = np.arange(0, len(rows) * seq_len, seq_len)
    begins = begins.repeat(rows.pointers[1:] - rows.pointers[:-1])
    begins += rows.row_offsets
    return begins


def _position_ramps(lengths: Ids, seq_len: int) -> list[Ids]:
    """Return 0, 1, 2, ... for each length, all as views of one array."""
    if seq_len <= _MAX_CACHED_RAMPS:
        return list(map(_make_ramps(seq_len).__getitem__, lengths.tolist()))
    ramp = _position_ramp(seq_len)
    return [ramp[:length] for length in lengths.tolist()]


@functools.lru_cache(maxsize=4)
def _make_ramps(seq_len: int) -> list[Ids]:
    """Return the ramps of every length up to ``seq_len``.

    Creating a view takes longer than looking it up.
    """
    ramp = _position_ramp(seq_len)
    return [ramp[:length] for length in range(seq_len + 1)]


@functools.lru_cache(maxsize=4)
def _position_ramp(seq_len: int) -> Ids:
    """Return 0 to ``seq_len - 1``; the array is shared and must not be changed."""
    return np.arange(seq_len)


@functools.lru_cache(maxsize=4)
def _padding_row(end_id: int, seq_len: int) -> Ids:
    """Return a row of padding; the array is shared and must not be changed."""
    return np.full(seq_len, end_id)


def _allocate_arrays(size: int) -> tuple[Ids, Ids, Ids]:
    """Allocate three arrays of ``size`` at once; the allocator reuses the block.

    Reuse avoids page faults. The arrays are offset from each other by 512 bytes: copies between arrays with equal
    page offsets stall each other.
    """
    block = np.empty(3 * size + 2 * _ARRAY_GAP, np.int64)
    second, third = size + _ARRAY_GAP, 2 * (size + _ARRAY_GAP)
    return block[:size], block[second : second + size], block[third:]


def assemble_varlen(store: TokenReader, rows: Rows, labels: str, align: int = 1) -> dict[str, Any]:
    """Concatenate the spans of R rows without padding, as HF's flattening collator.

    With ``align`` each span is padded to a multiple of it. The padding holds the end token, carries no loss
    and counts as part of the span: under a causal mask no token sees it.

    Returns:
        ``input_ids``, ``labels``, ``position_ids`` int64 [1, T]; ``seq_idx`` int32 [1, T], the index of
        each token's span; ``cu_seq_lens_q`` and ``cu_seq_lens_k`` int32 [N + 1], the start of each span
        and T at the end; ``max_length_q`` and ``max_length_k``, the length of the longest span (int); of a
        weighted store ``loss_weights`` float32 [1, T].
    """
    span_tokens = store.read(rows.documents, rows.starts, rows.lengths)
    # A step without spans (at the end of a run) is one token of padding: models take no empty input.
    true = rows.lengths if span_tokens else np.zeros(1, np.int64)
    lengths = align_lengths(np.maximum(true, 1), align)
    total = int(lengths.sum())
    bounds = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=bounds[1:])
    longest = int(lengths.max())
    cumulative = bounds.astype(np.int32)
    positions = np.arange(total) - np.repeat(bounds[:-1], lengths)
    gaps = _find_gaps(bounds[:-1] + true, bounds[1:])
    for span_index, begin, end in reversed(gaps):
        span_tokens.insert(span_index, np.full(end - begin, store.end_id))
    ids = np.concatenate(span_tokens, dtype=np.int64)
    targets = np.empty_like(ids)
    _fill_labels(targets, ids, bounds[:-1], np.maximum(true, 1), labels)
    flags = _read_flags(store, rows)
    for span_index, begin, end in reversed(gaps if flags else []):
        flags.insert(span_index, np.zeros(end - begin, bool))
    _mask_labels(targets, flags, labels)
    for _, begin, end in gaps:
        targets[begin:end] = IGNORE_INDEX
    weights = {"loss_weights": _make_loss_weights(targets, flags, labels)[None]} if store.weighted else {}
    return {
        "input_ids": ids[None],
        "labels": targets[None],
        "position_ids": positions[None],
        "seq_idx": np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)[None],
        "cu_seq_lens_q": cumulative,
        "cu_seq_lens_k": cumulative.copy(),
        "max_length_q": longest,
        "max_length_k": longest,
        **weights,
    }


def _find_gaps(begins: Ids, ends: Ids) -> list[tuple[int, int, int]]:
    """Return (index of the next span, begin, end) of each non-empty gap behind a span."""
    short = np.flatnonzero(begins < ends)
    columns = (short + 1, begins[short], ends[short])
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _find_padding(rows: Rows, seq_len: int, align: int) -> list[tuple[int, int, int, int]]:
    """Return (index of next span, begin, end, first position) of each padding range.

    Begin and end are offsets in the flat batch, in ascending order. The ranges are alignment padding and the
    unused end of each row.
    """
    aligned_lengths = align_lengths(rows.lengths, align)
    filled = np.zeros(len(aligned_lengths) + 1, np.int64)
    np.cumsum(aligned_lengths, out=filled[1:])
    filled = filled[rows.pointers]
    used = filled[1:] - filled[:-1]
    short = (used < seq_len).nonzero()[0]
    ends_of_rows = [
        (span_index, row * seq_len + inside, (row + 1) * seq_len, 0)
        for row, span_index, inside in zip(
            short.tolist(), rows.pointers[1:][short].tolist(), used[short].tolist(), strict=True
        )
    ]
    if align == 1:
        return ends_of_rows
    begins = _span_starts(rows, seq_len)
    lengths = rows.lengths.tolist()
    gaps = [
        (span_index, begin, end, lengths[span_index - 1])
        for span_index, begin, end in _find_gaps(begins + rows.lengths, begins + aligned_lengths)
    ]
    return sorted(gaps + ends_of_rows, key=lambda gap: gap[1])


def _fill_labels(targets: Ids, ids: Ids, begins: Ids, lengths: Ids, labels: str) -> None:
    """Fill the labels of a flat batch of spans, with -100 for tokens without loss.

    Aligned labels have no loss at the first token of each span, shifted labels at the last: the
    first token of a span is never predicted from its neighbour, and both train the same tokens.
    """
    if labels == "shifted":
        targets[:-1] = ids[1:]
        targets[begins + lengths - 1] = IGNORE_INDEX
    else:
        targets[:] = ids
        targets[begins] = IGNORE_INDEX


def _mask_labels(targets: Ids, flags: list[TokenFlags], labels: str) -> None:
    """Remove the loss of untrained tokens from a flat batch."""
    if not flags:
        return
    masked = np.concatenate(flags) == 0
    if labels == "shifted":
        targets[:-1][masked[1:]] = IGNORE_INDEX
    else:
        targets[masked] = IGNORE_INDEX


def _make_loss_weights(targets: Ids, flags: list[TokenFlags], labels: str) -> NDArray[np.float32]:
    """Return the weight of each label of a flat batch, 0 without loss."""
    weights = np.zeros(targets.size, np.float32)
    if flags:
        token_weights = decode_loss_weights(np.concatenate(flags))
        if labels == "shifted":
            weights[:-1] = token_weights[1:]
        else:
            weights[:] = token_weights
    weights[targets == IGNORE_INDEX] = 0
    return weights
