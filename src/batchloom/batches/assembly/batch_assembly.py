"""Batches of plan rows: their arrays and the layout of their spans."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from batchloom.batches.assembly.array_filling import (
    IGNORE_INDEX,
    BatchArrays,
    Ids,
    RowForm,
    TokenReader,
    fill_arrays,
)
from batchloom.core.errors import PlanError
from batchloom.core.report_output import make_notebook_html
from batchloom.core.settings import as_int, quote_value
from batchloom.plan.order import list_divisors
from batchloom.plan.packing import Rows, align_lengths

# Bytes between the arrays of a batch.
_ARRAY_GAP = 512
_INT64 = np.dtype(np.int64)
# Axes of token arrays: rows and tokens. M-RoPE positions have one more, and begin with those of the text.
TOKEN_AXES = 2
# Prefixes that processors use for feature names.
_MEDIA_PREFIXES = ("pixel_", "image_", "input_features", "feature_", "audio_")


class BatchKey(NamedTuple):
    """A key of a batch, with its shape in both forms; empty where a form lacks it.

    R is the number of rows, S is ``seq_len``, T the number of tokens of all spans and N the number of spans.
    ``per_token`` marks an array with an entry for each token.
    """

    name: str
    dtype: str
    rows_shape: str
    varlen_shape: str
    presence: str
    meaning: str
    per_token: bool = False


# docs/reference/batch-keys.md is made from this table.
BATCH_KEYS = (
    BatchKey("input_ids", "int64", "[R, S]", "[1, T]", "always", "token ids; padding is the end token", per_token=True),
    BatchKey(
        "labels",
        "int64",
        "[R, S]",
        "[1, T]",
        "always",
        'targets, -100 where there is no loss: the id at the same position (`labels="aligned"`), or that of the next '
        'token (`labels="shifted"`)',
        per_token=True,
    ),
    BatchKey(
        "loss_weights",
        "float32",
        "[R, S]",
        "[1, T]",
        "if the data has loss weights",
        "weight of each label; 0 where the label is -100",
        per_token=True,
    ),
    BatchKey(
        "position_ids",
        "int64",
        "[R, S]",
        "[1, T]",
        "always",
        "position in the span, from 0; the padding of a row counts as one more span. Models with M-RoPE get "
        "[4, R, S] or [4, 1, T]: text, time, height, width",
        per_token=True,
    ),
    BatchKey("seq_idx", "int32", "", "[1, T]", "always", "number of each token's span, from 0", per_token=True),
    BatchKey(
        "token_type_ids",
        "int64",
        "[R, S]",
        "[1, T]",
        "with Gemma 3's processor",
        "1 for the tokens of images, else 0",
        per_token=True,
    ),
    BatchKey("cu_seq_lens_q", "int32", "", "[N + 1]", "always", "start of each span, and T at the end"),
    BatchKey("cu_seq_lens_k", "int32", "", "[N + 1]", "always", "start of each span, and T at the end"),
    BatchKey("max_length_q", "int", "", "scalar", "always", "length of the longest span"),
    BatchKey("max_length_k", "int", "", "scalar", "always", "length of the longest span"),
)
TOKEN_KEYS = tuple(key.name for key in BATCH_KEYS if key.per_token)

# Takes the highest id of a batch, or 2**63 - 1 if one is negative, and raises if it is not valid.
IdCheck = Callable[[int], None]


class MediaOffsets(NamedTuple):
    """Offsets of the media features of each of R rows in an array."""

    axis: int  # axis along which the features of the rows are concatenated
    pointers: Ids  # row r holds entries pointers[r] to pointers[r + 1] - 1, int64 [R + 1]
    media: Ids  # number of media before each row, and in total, int64 [R + 1]


MediaOffsetsByName = Mapping[str, MediaOffsets]


# The step of a rebuilt batch. With -2, ``batch.step + 1`` is invalid as well, and is refused.
_UNKNOWN_STEP = -2


ArrayName: TypeAlias = Literal[
    "input_ids",
    "labels",
    "loss_weights",
    "position_ids",
    "seq_idx",
    "token_type_ids",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
]


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
        self.step = step
        self.origin = origin
        self.layout = layout

    if TYPE_CHECKING:
        # Editors complete the keys. An array is of numpy or torch, as ``output`` says.
        @overload
        def __getitem__(self, key: Literal["max_length_q", "max_length_k"], /) -> int: ...
        @overload
        def __getitem__(self, key: ArrayName, /) -> Any: ...
        @overload
        def __getitem__(self, key: str, /) -> Any: ...
        def __getitem__(self, key: str, /) -> Any: ...

    def __missing__(self, key: str) -> NoReturn:
        raise KeyError(f"{key!r} is no key of a batch; it has {', '.join(self)}")

    def __getattr__(self, name: str) -> NoReturn:
        remedy = f"; write batch[{name!r}]" if name in self else ""
        raise AttributeError(f"a batch has no attribute {name!r}{remedy}", name=name, obj=self)

    def __repr__(self) -> str:
        arrays = ", ".join(f"{name}: {_describe_array(value)}" for name, value in self.items())
        return f"Batch(step {self.step}: {arrays})"

    def _repr_html_(self) -> str | None:
        return make_notebook_html(self)

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
        first = int(self.pointers[start])
        last = int(self.pointers[stop])
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
            "Loader(micro_batch_size=..., uneven='pad') fills up with rows that carry no loss."
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
    bounds = layout.bounds
    starts = batch["cu_seq_lens_q"]
    # With C context ranks, each rank holds 1/C of every span.
    context = int(bounds[-1]) // batch["input_ids"].shape[1]
    from_span = int(layout.pointers[first])
    to_span = int(layout.pointers[stop])
    empty = from_span == to_span
    if empty:
        begin = 0
        end = layout.align // context
        longest = layout.align
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


def assemble_rows(
    store: TokenReader,
    rows: Rows,
    seq_len: int,
    labels: str,
    align: int = 1,
    *,
    dtype: np.dtype[Any] = _INT64,
    check_ids: IdCheck | None = None,
) -> dict[str, NDArray[Any]]:
    """Assemble a padded batch of R rows.

    Args:
        store: reader of the tokens.
        rows: R rows with their spans.
        seq_len: tokens of a row.
        labels: ``aligned`` or ``shifted``.
        align: number of tokens that each span is padded to a multiple of.
        dtype: int64 or int32, of ids and labels.
        check_ids: takes the highest id, or 2**63 - 1 if one is negative, and raises if it is not valid.

    Returns:
        ``input_ids`` and ``labels`` of ``dtype`` and ``position_ids`` int64, each [R, seq_len], and of a weighted
        store ``loss_weights``, float32 [R, seq_len]: the weight of each label, 0 without loss. Positions
        restart at 0 with each span. Padding counts as one more span, holds the end token
        and carries no loss. Alignment padding belongs to its span: positions continue there.
    """
    arrays = _allocate_arrays(len(rows), seq_len, dtype, weighted=store.weighted)
    highest_id = fill_arrays(store, rows, RowForm(rows.pointers, seq_len, align, labels), arrays)
    if check_ids is not None:
        check_ids(highest_id)
    return _name_arrays(arrays)


def assemble_varlen(
    store: TokenReader,
    rows: Rows,
    labels: str,
    align: int = 1,
    *,
    dtype: np.dtype[Any] = _INT64,
    check_ids: IdCheck | None = None,
) -> dict[str, Any]:
    """Concatenate the spans of R rows without padding, as HF's flattening collator.

    With ``align`` each span is padded to a multiple of it. The padding holds the end token, carries no loss
    and counts as part of the span: under a causal mask no token sees it. Arguments are those of
    :func:`assemble_rows`.

    Returns:
        ``input_ids`` and ``labels`` of ``dtype`` and ``position_ids`` int64, each [1, T]; ``seq_idx`` int32 [1, T],
        the index of each token's span; ``cu_seq_lens_q`` and ``cu_seq_lens_k`` int32 [N + 1], the start of each span
        and T at the end; ``max_length_q`` and ``max_length_k``, the length of the longest span (int); of a
        weighted store ``loss_weights`` float32 [1, T].
    """
    # A step without spans (at the end of a run) is one token of padding: models take no empty input.
    lengths = align_lengths(rows.lengths if rows.lengths.size else np.ones(1, np.int64), align)
    cumulative = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=cumulative[1:])
    total = int(cumulative[-1])
    longest = int(lengths.max())
    arrays = _allocate_arrays(1, total, dtype, weighted=store.weighted)
    arrays = arrays._replace(span_numbers=np.empty((1, total), np.int32))
    one_row = RowForm(np.array([0, rows.lengths.size]), total, align, labels)
    highest_id = fill_arrays(store, rows, one_row, arrays)
    if check_ids is not None:
        check_ids(highest_id)
    return {
        **_name_arrays(arrays),
        "cu_seq_lens_q": cumulative,
        "cu_seq_lens_k": cumulative.copy(),
        "max_length_q": longest,
        "max_length_k": longest,
    }


def _allocate_arrays(rows: int, row_length: int, dtype: np.dtype[Any], *, weighted: bool) -> BatchArrays:
    """Allocate the arrays of a batch at once; the allocator reuses the block.

    Reuse avoids page faults. The gaps between the arrays give them different page offsets: copies between arrays with
    equal ones stall each other.
    """
    shape = (rows, row_length)
    size = rows * row_length
    labels_begin = dtype.itemsize * size + _ARRAY_GAP
    block = np.empty(2 * labels_begin + _INT64.itemsize * size, np.uint8)
    return BatchArrays(
        np.ndarray(shape, dtype, block),
        np.ndarray(shape, dtype, block, labels_begin),
        np.ndarray(shape, _INT64, block, 2 * labels_begin),
        np.empty(shape, np.float32) if weighted else None,
    )


def _name_arrays(arrays: BatchArrays) -> dict[str, NDArray[Any]]:
    named_arrays = {"input_ids": arrays.ids, "labels": arrays.labels, "position_ids": arrays.positions}
    if arrays.span_numbers is not None:
        named_arrays["seq_idx"] = arrays.span_numbers
    if arrays.loss_weights is not None:
        named_arrays["loss_weights"] = arrays.loss_weights
    return named_arrays
