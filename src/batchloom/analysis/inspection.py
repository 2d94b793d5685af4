"""Contents of a store, and how full its sequences would be."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from batchloom.analysis.plan_forecast import measure_pools
from batchloom.core.errors import InputError, SettingsError
from batchloom.core.loss_weights import LossFlags
from batchloom.core.medium import MediumKind
from batchloom.core.settings import as_int, quote_value
from batchloom.plan import Plan, PlanSpec
from batchloom.plan.packing import CUTTING_STRATEGIES, ExcludedDocuments, OverlongMode
from batchloom.store import Store, StoreMedia, decode_beginning, open_store
from batchloom.store.format import SIDE_NAMES, mask_removed
from batchloom.store.read import MediaCount, choose_default_overlong, has_media

INSPECTED_PACKINGS = ("best_fit", "wrap", "first_fit", "window_1000", "none")
_SAMPLED_POOLS = 4
_DROPPING_POLICIES: tuple[OverlongMode, ...] = ("drop", "truncate")
# Tokens of a document in its snippet.
_SNIPPET_TOKENS = 48
_COUNTED_WEIGHTS = 1_000_000


@dataclass(frozen=True, slots=True)
class PackingEfficiency:
    """Efficiency of a packing strategy.

    Attributes:
        packing: the strategy.
        sequences: sequences of an epoch (an estimate unless ``exact``).
        fill: tokens / (sequences x seq_len), 0 to 1.
        cut: share of the documents that are cut (longer than seq_len, or by ``wrap``), 0 to 1.
        exact: whether every pool was packed; otherwise a few of them.
    """

    packing: str
    sequences: int
    fill: float
    cut: float
    exact: bool


@dataclass(frozen=True, slots=True)
class PackingMeasure:
    """Efficiency of a packing strategy, and what it leaves out.

    Attributes:
        efficiency: how full its sequences are.
        dropped, lost: documents and tokens of an epoch that ``overlong`` leaves out (estimates as ``efficiency``).
    """

    efficiency: PackingEfficiency
    dropped: int
    lost: int


@dataclass(frozen=True, slots=True)
class Inspection:
    """Result of :func:`inspect`.

    Attributes:
        path: the store or prefix; split: the subset.
        documents, tokens, shards: counts of the subset.
        dtype: dtype of a token on disk.
        shortest, median, mean, longest: document lengths in tokens.
        histogram: (from, below, documents) with bounds that double.
        efficiencies: one per packing strategy, at ``seq_len``.
        seq_len: tokens of a sequence.
        left_out: documents that ``overlong`` ``drop`` and ``truncate`` would leave out at ``seq_len``.
        overlong: default policy of a loader for longer documents.
        first: beginning of the first documents, decoded (empty for a bare prefix).
        objective: ``pairs``, ``labels``, ``prompts`` or ``steps``; empty for other documents.
        sides: number of these documents by side: ``chosen``, ``rejected``, ``good``, ``bad``, ``prompt``, ``steps``.
        processor: class of the processor for the media of the documents, otherwise empty.
        media: by kind (``image``, ``audio``) the number of items, of documents with some and of placeholder tokens;
            empty for a remote store, whose media are not read.
        generation: generation of the store; None for a prefix.
        removed: number of removed documents; they are included in ``documents`` until the store is compacted.
        loss_weights: trained tokens by loss weight, ascending, of the first documents with together at least a
            million tokens; empty if the store has no weights.
    """

    path: str
    split: str
    documents: int
    tokens: int
    shards: int
    dtype: str
    shortest: int
    median: float
    mean: float
    longest: int
    histogram: tuple[tuple[int, int, int], ...]
    efficiencies: tuple[PackingEfficiency, ...]
    seq_len: int
    left_out: dict[OverlongMode, ExcludedDocuments]
    overlong: OverlongMode
    first: tuple[str, ...]
    objective: str = ""
    sides: dict[str, int] = field(default_factory=dict)
    processor: str = ""
    media: dict[MediumKind, MediaCount] = field(default_factory=dict)
    generation: int | None = None
    removed: int = 0
    loss_weights: dict[float, int] = field(default_factory=dict)


def inspect(
    path: str | Path,
    *,
    split: str = "train",
    seq_len: int = 2048,
    first: int = 3,
    generation: int | None = None,
) -> Inspection:
    """Inspect one subset of a store (or a bare prefix) without changing anything.

    Args:
        path: a store's folder or URL, or a Megatron prefix.
        split: the subset.
        seq_len: tokens of a sequence, for the packing efficiencies.
        first: number of documents to decode.
        generation: generation of the store; None for the newest.

    Raises:
        StoreMissingError, StoreError: as :func:`batchloom.open_store`.
        SettingsError: ``seq_len`` or ``first`` is invalid.
        InputError: the subset does not exist or is empty.
    """
    spec = PlanSpec(seq_len=seq_len, global_batch_size=1)
    count = as_int(first)
    if count is None or count < 0:
        raise SettingsError([f"first: {quote_value(first)} is not a number of documents"])
    store = open_store(path, split, generation=generation)
    if not len(store):
        raise InputError(f"{path} holds no documents; there is nothing to inspect.")
    lengths = store.lengths.slice(0, len(store))
    spec = replace(spec, overlong=choose_default_overlong(store))
    texts = [_decode_beginning(store, number) for number in range(min(first, len(store)))] if store.manifest else []
    sides = np.zeros(len(SIDE_NAMES), np.int64)
    for shard in range(len(store.shards) if store.contents.objective else 0):
        sides += np.bincount(store.shards.sides(shard).sides, minlength=len(SIDE_NAMES))
    return Inspection(
        path=str(path),
        split=store.split,
        documents=len(store),
        tokens=store.tokens,
        shards=len(store.shards),
        dtype=store.dtype.name,
        shortest=int(lengths.min()),
        median=float(np.median(lengths)),
        mean=float(lengths.mean()),
        longest=int(lengths.max()),
        histogram=_compute_histogram(lengths),
        efficiencies=tuple(
            measure_packing(store, packing=packing, seq_len=spec.seq_len).efficiency for packing in list_packings(store)
        ),
        seq_len=spec.seq_len,
        left_out={
            overlong: Plan(store, replace(spec, overlong=overlong)).left_out() for overlong in _DROPPING_POLICIES
        },
        overlong=spec.overlong,
        first=tuple(texts),
        objective=store.contents.objective,
        sides={name: count for name, count in zip(SIDE_NAMES, sides.tolist(), strict=True) if count},
        processor=store.manifest.processor.name if store.manifest and store.manifest.processor else "",
        media=StoreMedia(store).counts(),
        generation=store.location.generation,
        removed=int(store.contents.removed.size),
        loss_weights=_count_weights(store, lengths) if store.reader.weighted else {},
    )


def _count_weights(store: Store, lengths: NDArray[np.uint32]) -> dict[float, int]:
    """Return the trained tokens of the first documents by their loss weight."""
    count = min(int(np.searchsorted(np.cumsum(lengths, dtype=np.int64), _COUNTED_WEIGHTS)) + 1, len(store))
    sizes = lengths[:count].astype(np.int64)
    flags = store.reader.flags(np.arange(count), np.zeros(count, np.int64), sizes)
    return LossFlags.join(flags).count_weights()


def _decode_beginning(store: Store, number: int) -> str:
    if mask_removed(store.contents.removed, np.array([number]))[0]:
        return "(removed)"
    return decode_beginning(store.tokenizer, store[number].ids, _SNIPPET_TOKENS)


def _compute_histogram(lengths: NDArray[np.uint32]) -> tuple[tuple[int, int, int], ...]:
    bounds = [0, *(1 << k for k in range(int(lengths.max()).bit_length() + 1))]
    counts, _ = np.histogram(lengths, bounds)
    rows = [(bounds[k], bounds[k + 1], int(count)) for k, count in enumerate(counts)]
    filled = [k for k, row in enumerate(rows) if row[2]]
    return tuple(rows[filled[0] : filled[-1] + 1])


def list_packings(store: Store) -> list[str]:
    """Return the common packing strategies that a store allows.

    Documents with media are never cut, so ``wrap`` does not apply to them.
    """
    return [name for name in INSPECTED_PACKINGS if name not in CUTTING_STRATEGIES or not has_media(store)]


def measure_packing(store: Store, *, packing: str, seq_len: int, most_pools: int = _SAMPLED_POOLS) -> PackingMeasure:
    """Measure how full the sequences of a store would be, on a few of its pools.

    Args:
        store: an open store.
        packing: the strategy.
        seq_len: tokens of a sequence.
        most_pools: number of pools that are packed; a larger store is estimated.

    Raises:
        SettingsError: a setting is invalid.
    """
    spec = PlanSpec(seq_len=seq_len, global_batch_size=1, packing=packing, overlong=choose_default_overlong(store))
    order = Plan(store, spec).orders.order(0)
    statistics = measure_pools(order, most_pools)
    efficiency = PackingEfficiency(
        packing=spec.packing,
        sequences=round(statistics.sequences),
        fill=statistics.tokens / (statistics.sequences * spec.seq_len) if statistics.sequences else 0.0,
        cut=statistics.split / max(order.pools.documents, 1),
        exact=statistics.exact,
    )
    return PackingMeasure(efficiency, round(statistics.dropped), round(statistics.dropped_tokens))
