"""Filling of batch arrays with the token ranges of spans.

The native kernel and numpy give the same bytes; numpy's way is the specification. ``kernel.c`` defines what each
address points to. ctypes releases the interpreter lock during a call.
"""

import ctypes
import functools
import struct
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import StoreError
from batchloom.core.loss_weights import LOSS_WEIGHTS, LossFlags
from batchloom.core.native import KERNEL_SOURCE, find_library
from batchloom.plan.packing import Rows, align_lengths
from batchloom.store.format import LossWeights, get_address
from batchloom.store.read import MappedSpans, collect_addresses, make_mapped_shard

IGNORE_INDEX = -100
_HIGHEST_ID = (1 << 63) - 1
_HIGHEST_INT32 = (1 << 31) - 1
_INT64_BYTES = 8
_NO_IDS = np.zeros(0, np.int64)
_DECODED_ADDRESS = get_address(LOSS_WEIGHTS)

# ``Batch`` of kernel.c.
_BATCH = struct.Struct("=12q")

Ids = NDArray[np.int64]
# ``batchloom_fill``, with its arrays as bytes: taking the address of a numpy array costs more than their copies.
Kernel = Callable[[bytes, bytes, bytes, bytes | None, bytes, bytes, bytes, bytes], int]


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

    def locate(self, documents: Ids) -> MappedSpans | None:
        """Return where documents are mapped; None if they have to be read."""

    def read(self, documents: Ids, starts: Ids, lengths: Ids) -> list[NDArray[np.generic]]:
        """Return the ids of document spans."""

    def flags(self, documents: Ids, starts: Ids, lengths: Ids) -> list[LossFlags]:
        """Return the loss flags of each span."""


class RowForm(NamedTuple):
    """Form of R rows; the varlen form is one row."""

    pointers: Ids  # row r holds the spans pointers[r] to pointers[r + 1] - 1, int64 [R + 1]
    row_length: int
    align: int  # number of tokens that each span is padded to a multiple of
    labels: str  # ``aligned`` or ``shifted``


class BatchArrays(NamedTuple):
    """Arrays of a batch [R, row_length], to be filled; contiguous."""

    ids: NDArray[Any]  # int64 or int32
    labels: NDArray[Any]  # as ``ids``
    positions: Ids
    loss_weights: NDArray[np.float32] | None = None  # None if the store has no weights
    span_numbers: NDArray[np.int32] | None = None  # None unless requested


def fill_arrays(store: TokenReader, rows: Rows, form: RowForm, arrays: BatchArrays) -> int:
    """Fill all arrays and return the highest id, at least the end id.

    If an id is negative, it returns 2**63 - 1.

    Raises:
        StoreError: a span is not inside its document, or int32 arrays cannot hold an id.
    """
    kernel = find_kernel()
    if kernel is None:
        highest = fill_with_numpy(store, rows, form, arrays)
    else:
        highest = fill_with_kernel(kernel, store, rows, form, arrays)
    if arrays.ids.itemsize < _INT64_BYTES and highest > _HIGHEST_INT32:
        raise StoreError(
            "A batch holds a token id that is negative or 2**31 or more, and dtype='int32' is for ids from 0 to "
            "2**31 - 1: leave dtype out."
        )
    return highest


@functools.cache
def find_kernel() -> Kernel | None:
    """Return the kernel of this installation; None without a usable one.

    The reason is logged, once.
    """
    library = find_library(KERNEL_SOURCE, "Batches are assembled by numpy, which is slower and gives the same bytes")
    return None if library is None else get_kernel(library)


def get_kernel(library: ctypes.CDLL) -> Kernel:
    """Return the function ``batchloom_fill`` of a library of ``kernel.c``."""
    fill: Any = library.batchloom_fill
    fill.argtypes = [ctypes.c_char_p] * 8
    fill.restype = ctypes.c_int64
    kernel: Kernel = fill
    return kernel


def fill_with_kernel(kernel: Kernel, store: TokenReader, rows: Rows, form: RowForm, arrays: BatchArrays) -> int:
    """Fill all arrays as :func:`fill_arrays`, by the native kernel."""
    # The spans hold the memory that the kernel reads until it returns.
    spans = store.locate(rows.documents)
    starts = rows.starts
    if spans is None:
        spans = _read_spans(store, rows)
        starts = np.zeros_like(starts)
    batch = _BATCH.pack(
        len(form.pointers) - 1,
        form.row_length,
        form.align,
        form.labels == "shifted",
        store.end_id,
        arrays.ids.itemsize == _INT64_BYTES,
        _get_output_address(arrays.ids),
        _get_output_address(arrays.labels),
        _get_output_address(arrays.positions),
        _get_output_address(arrays.loss_weights),
        _DECODED_ADDRESS,
        _get_output_address(arrays.span_numbers),
    )
    highest = kernel(
        batch,
        form.pointers.tobytes(),
        spans.addresses.shards,
        spans.addresses.flags,
        spans.numbers.tobytes(),
        spans.documents.tobytes(),
        starts.tobytes(),
        rows.lengths.tobytes(),
    )
    if highest < 0:
        # Reading names the document of a span that ends beyond it.
        store.read(rows.documents, rows.starts, rows.lengths)
        raise StoreError("The spans of a batch do not fit its documents and rows: the plan belongs to another store.")
    return highest


def _get_output_address(array: NDArray[Any] | None) -> int:
    """Return the address of a writable array; 0 for None."""
    return 0 if array is None else ctypes.addressof(ctypes.c_char.from_buffer(array.data))


def _read_spans(store: TokenReader, rows: Rows) -> MappedSpans:
    """Read spans into memory, as the documents of one shard."""
    tokens = store.read(rows.documents, rows.starts, rows.lengths)
    flags = _read_flags(store, rows)
    joined = np.concatenate(tokens) if tokens else _NO_IDS
    bounds = (np.cumsum(rows.lengths) - rows.lengths) * joined.itemsize
    shard = make_mapped_shard(bounds, rows.lengths.astype(np.uint32), joined)
    codes = LossFlags.join(flags).codes if flags else None
    addresses = collect_addresses([shard], [] if codes is None else [LossWeights(0, codes)])
    return MappedSpans(addresses, np.zeros(len(tokens), np.int64), np.arange(len(tokens)))


def _read_flags(store: TokenReader, rows: Rows) -> list[LossFlags]:
    """Return the loss flags of spans; nothing if all are trained."""
    if not (store.masked or store.weighted) or not rows.lengths.size:
        return []
    return store.flags(rows.documents, rows.starts, rows.lengths)


def fill_with_numpy(store: TokenReader, rows: Rows, form: RowForm, arrays: BatchArrays) -> int:
    """Fill all arrays as :func:`fill_arrays`, by numpy."""
    arrays = BatchArrays._make(None if array is None else array.reshape(-1) for array in arrays)
    span_tokens = store.read(rows.documents, rows.starts, rows.lengths)
    sizes = align_lengths(rows.lengths, form.align)
    begins, paddings = _find_padding(rows.lengths, sizes, form)
    ramp = _position_ramp(form.row_length.bit_length())
    ramps = [ramp[:length] for length in rows.lengths.tolist()]
    for span_index, begin, end, first in reversed(paddings):
        span_tokens.insert(span_index, np.full(end - begin, store.end_id))
        ramps.insert(span_index, ramp[first : first + end - begin])
    # int32 would hold other ids than a store with larger ones.
    ids = arrays.ids if arrays.ids.itemsize == _INT64_BYTES else np.empty(arrays.ids.size, np.int64)
    # Concatenating views copies each span once, without a Python assignment per span.
    np.concatenate(span_tokens, out=ids)
    if ids is not arrays.ids:
        arrays.ids[:] = ids
    np.concatenate(ramps, out=arrays.positions)
    _fill_labels(arrays, begins, rows.lengths, form.labels)
    flags = _read_flags(store, rows)
    for span_index, begin, end, _ in reversed(paddings if flags else []):
        flags.insert(span_index, LossFlags.none_trained(end - begin))
    cell_flags = LossFlags.join(flags) if flags else LossFlags.all_trained(arrays.labels.size)
    _mask_labels(arrays.labels, cell_flags, form.labels)
    for _, begin, end, _ in paddings:
        arrays.labels[begin:end] = IGNORE_INDEX
    if arrays.loss_weights is not None:
        _fill_loss_weights(arrays.loss_weights, arrays.labels, cell_flags, form.labels)
    if arrays.span_numbers is not None:
        arrays.span_numbers[:] = 0
        arrays.span_numbers[: int(sizes.sum())] = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    return _HIGHEST_ID if int(ids.min()) < 0 else max(int(ids.max()), store.end_id)


def _find_padding(lengths: Ids, sizes: Ids, form: RowForm) -> tuple[Ids, list[tuple[int, int, int, int]]]:
    """Return the first cell of each span, and the ranges of padding.

    A range is (index of the next span, begin, end, first position), in ascending order: alignment padding, whose
    positions continue those of its span, and the unused end of each row.
    """
    filled = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=filled[1:])
    row_begins = np.arange(0, (len(form.pointers) - 1) * form.row_length, form.row_length)
    firsts = filled[form.pointers]
    begins = filled[:-1] + (row_begins - firsts[:-1]).repeat(np.diff(form.pointers))
    used = np.diff(firsts)
    short = np.flatnonzero(used < form.row_length)
    gaps = np.flatnonzero(lengths < sizes)
    ends_of_rows = zip(
        form.pointers[1:][short].tolist(),
        (row_begins + used)[short].tolist(),
        (row_begins + form.row_length)[short].tolist(),
        [0] * short.size,
        strict=True,
    )
    alignment_gaps = zip(
        (gaps + 1).tolist(),
        (begins + lengths)[gaps].tolist(),
        (begins + sizes)[gaps].tolist(),
        lengths[gaps].tolist(),
        strict=True,
    )
    return begins, sorted([*ends_of_rows, *alignment_gaps], key=lambda padding: padding[1])


@functools.lru_cache(maxsize=4)
def _position_ramp(bits: int) -> Ids:
    """Return 0 to ``2**bits - 1``; the array is shared and must not be changed."""
    return np.arange(1 << bits)


def _fill_labels(arrays: BatchArrays, begins: Ids, lengths: Ids, labels: str) -> None:
    """Fill the labels of spans, with -100 for tokens without loss.

    Aligned labels have no loss at the first token of each span, shifted labels at the last: the
    first token of a span is never predicted from its neighbour, and both train the same tokens.
    """
    if labels == "shifted":
        arrays.labels[:-1] = arrays.ids[1:]
        arrays.labels[begins + lengths - 1] = IGNORE_INDEX
    else:
        arrays.labels[:] = arrays.ids
        arrays.labels[begins] = IGNORE_INDEX


def _mask_labels(targets: NDArray[Any], flags: LossFlags, labels: str) -> None:
    """Remove the loss of untrained tokens from a flat batch."""
    if flags.is_plain:
        return
    masked = ~flags.trained
    if labels == "shifted":
        targets[:-1][masked[1:]] = IGNORE_INDEX
    else:
        targets[masked] = IGNORE_INDEX


def _fill_loss_weights(weights: NDArray[np.float32], targets: NDArray[Any], flags: LossFlags, labels: str) -> None:
    """Fill in the weight of each label of a flat batch, 0 without loss."""
    if labels == "shifted":
        weights[:-1] = flags.weights[1:]
        weights[-1:] = 0
    else:
        weights[:] = flags.weights
    weights[targets == IGNORE_INDEX] = 0
