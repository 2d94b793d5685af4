"""Conversion of weights to the number of sequences per source in a period."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import PlanError
from batchloom.plan.mixture.mixture_spec import MIN_WEIGHT, PlanStore, Weights, WeightUnit
from batchloom.plan.packing.plan_spec import PlanSpec
from batchloom.plan.packing.pools import Pools

MIN_PERIOD, MAX_PERIOD = 1 << 16, 1 << 20
_MAX_SHARE_ERROR = 0.01
# A source is measured on this many documents, or on a full pool if they make few sequences. With many sources the
# measurement takes most of the time to the first batch.
_SAMPLE_DOCUMENTS, _MIN_SEQUENCES = 2048, 256


class SourceStatistics(NamedTuple):
    """Statistics of a source that are estimated before its pools are counted.

    Attributes:
        tokens, documents: totals of an epoch, scaled by the fraction that ``overlong`` leaves of the first pool.
        per_sequence: mean (tokens, documents) of a sequence over the first documents of the first pool that has
            sequences.
    """

    tokens: float
    documents: float
    per_sequence: tuple[float, float]


def measure_source(name: str, store: PlanStore, spec: PlanSpec) -> SourceStatistics:
    """Measure a source by its first pool with sequences.

    Raises:
        PlanError: no pool has a sequence.
    """
    pools = Pools(store.lengths, spec, name)
    for pool in range(pools.count):
        # With one document per sequence the tokens per sequence are those of the documents, and a sample would be
        # too rough.
        members = pools.members(pool, None if spec.packing == "none" else _SAMPLE_DOCUMENTS)
        lengths = pools.fit_members(members)
        count = pools.count_packed(lengths)
        if count < _MIN_SEQUENCES and spec.pool_size > _SAMPLE_DOCUMENTS:
            members = pools.members(pool)
            lengths = pools.fit_members(members)
            count = pools.count_packed(lengths)
        if count:
            tokens = float(lengths.sum()) / count
            documents = float((lengths > 0).sum()) / count
            if spec.overlong == "split" and store.tokens:
                # Nothing is left out, so the mean document length is known exactly.
                documents = tokens * pools.served_documents / store.tokens
            if spec.overlong == "split":
                return SourceStatistics(store.tokens, pools.served_documents, (tokens, documents))
            raw = store.lengths.take(members).astype(np.int64)
            served_shares = float(lengths.sum() / raw.sum()), float((lengths > 0).sum() / len(raw))
            return SourceStatistics(
                store.tokens * served_shares[0],
                pools.documents * served_shares[1],
                (tokens, documents),
            )
    raise PlanError(
        f"Source {name!r} gives no sequence: all of its documents are empty, or longer than seq_len {spec.seq_len} "
        "with overlong='drop'. Leave it out, raise seq_len or use overlong='split' (not for documents with images "
        "or audio)."
    )


def flatten_weights(
    weights: Weights,
    names: Sequence[str],
    size: Callable[[str], float],
    temperature: float,
    caps: "EpochCap | None",
) -> dict[str, float]:
    """Return the weight of each source with one above 0; the weights sum to 1.

    The weight of a group is divided among its sources.

    Args:
        weights: validated weights of a mixture.
        names: names of all sources.
        size: function from a source name to the tokens of an epoch.
        temperature: temperature of weights by size.
        caps: maximum epochs of weights by size, or None.

    Raises:
        PlanError: the sources are too small for the run under ``caps``.
    """
    if weights == "size":
        return _weigh_by_size({name: size(name) for name in names}, temperature, caps)
    flat_weights: dict[str, float] = {}
    total = sum(float(entry["weight"] if isinstance(entry, Mapping) else entry) for entry in weights.values())
    for name, weight in weights.items():
        if isinstance(weight, Mapping):
            inner, group_weight = weight["sources"], float(weight["weight"])
            if not group_weight:
                continue
            if isinstance(inner, Mapping):
                inside = _normalize_weights(inner)
            else:
                part = caps and caps._replace(tokens=round(caps.tokens * group_weight / total))
                inside = _weigh_by_size({name: size(name) for name in inner}, temperature, part)
            flat_weights.update({source: group_weight * share for source, share in inside.items()})
        else:
            flat_weights[name] = float(weight)
    return _normalize_weights(flat_weights)


class EpochCap(NamedTuple):
    """Maximum number of epochs for a run of this many tokens."""

    most_epochs: float
    tokens: int


def _weigh_by_size(sizes: Mapping[str, float], temperature: float, caps: EpochCap | None) -> dict[str, float]:
    if caps is None:
        largest = max(sizes.values())
        # Every source gets a weight, however small; ``apportion`` refuses it if no period can meet it.
        return _normalize_weights(
            {name: max((size / largest) ** (1 / temperature), MIN_WEIGHT) for name, size in sizes.items()}
        )
    max_tokens = sum(size * caps.most_epochs for size in sizes.values())
    if max_tokens < caps.tokens:
        raise PlanError(
            f"most_epochs {caps.most_epochs:g} allows {max_tokens:,.0f} tokens of {', '.join(sizes)}, and the run "
            f"needs {caps.tokens:,}. Give fewer steps, or a most_epochs of at least "
            f"{caps.tokens / (max_tokens / caps.most_epochs):.3g}."
        )
    remaining_tokens, shares = float(caps.tokens), {}
    ascending = sorted(sizes, key=lambda name: (sizes[name], name))
    for number, name in enumerate(ascending):
        shares[name] = min(remaining_tokens / (len(ascending) - number), sizes[name] * caps.most_epochs)
        remaining_tokens -= shares[name]
    return _normalize_weights(shares)


def _normalize_weights(weights: Mapping[str, float]) -> dict[str, float]:
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items() if weight > 0}


def compute_sequence_shares(
    weights: Mapping[str, float], unit: WeightUnit, measured: Mapping[str, SourceStatistics]
) -> dict[str, float]:
    """Return the shares of sequences that realize the weights; they sum to 1."""
    shares = {}
    for name, weight in weights.items():
        tokens, documents = measured[name].per_sequence
        if unit == "tokens":
            shares[name] = weight / tokens
        elif unit == "documents":
            shares[name] = weight / documents
        else:
            shares[name] = weight * measured[name].documents / documents
    return _normalize_weights(shares)


def apportion(shares: Mapping[str, float], lanes: int = 1, *, near: bool = False) -> dict[str, int]:
    """Return the slots of each source in the shortest period accurate within 1 %.

    Periods are the powers of two from 2**16 to 2**20, rounded up to a multiple of ``lanes``. Slots are
    apportioned by largest remainders, ties by name, and each source has at least one. With ``near`` the longest
    period is accepted whatever its error.

    Raises:
        PlanError: no period is accurate enough and ``near`` is False; names the source and the smallest share
            that would work.
    """
    if len(shares) == 1:
        return dict.fromkeys(shares, 1)
    names = sorted(shares)
    target_shares = np.array([shares[name] for name in names])
    period = MIN_PERIOD
    while True:
        slots = -(-period // lanes) * lanes
        counts = _apply_largest_remainders(target_shares, slots)
        relative_errors = np.abs(counts / slots / target_shares - 1)
        if relative_errors.max() <= _MAX_SHARE_ERROR or (near and period >= MAX_PERIOD):
            return dict(zip(names, counts.tolist(), strict=True))
        if period >= MAX_PERIOD:
            break
        period *= 2
    worst = int(relative_errors.argmax())
    raise PlanError(
        f"Source {names[worst]!r} has {target_shares[worst]:.2g} of the sequences. No period of at most "
        f"{MAX_PERIOD:,} sequences meets this share within 1 %. Give it at least "
        f"{1 / (2 * _MAX_SHARE_ERROR * MAX_PERIOD):.2g}, or weight 0."
    )


def _apply_largest_remainders(shares: NDArray[np.float64], slots: int) -> NDArray[np.int64]:
    exact = shares * slots
    counts = np.maximum(np.floor(exact).astype(np.int64), 1)
    order = np.argsort(-(exact - np.floor(exact)), kind="stable")
    missing = slots - int(counts.sum())
    if missing > 0:
        counts[order[:missing]] += 1
    for _ in range(-missing):
        counts[int((counts - exact).argmax())] -= 1
    return counts
