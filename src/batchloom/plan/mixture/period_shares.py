"""From weights to whole numbers: how many sequences each source has in a period."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import PlanError
from batchloom.plan.mixture.mixture_spec import MIN_WEIGHT, PlanStore, Weights, WeightUnit
from batchloom.plan.packing import PlanSpec, Pools

MIN_PERIOD, MAX_PERIOD = 1 << 16, 1 << 20
_MAX_SHARE_ERROR = 0.01
# A source is measured by so many documents, or by a whole pool where they make few sequences: with many sources
# that is most of what a first batch waits for.
_SAMPLE_DOCUMENTS, _MIN_SEQUENCES = 2048, 256


class SourceStatistics(NamedTuple):
    """What is known of a source before it is counted.

    Attributes:
        tokens, documents: of an epoch; where some are left out as too long, all by the part that its first pool keeps.
        per_sequence: (tokens, documents) of a sequence: a mean over the first documents of the first pool that has
            sequences.
    """

    tokens: float
    documents: float
    per_sequence: tuple[float, float]


def measure_source(name: str, store: PlanStore, spec: PlanSpec) -> SourceStatistics:
    """Measure a source by its first pool with sequences.

    Raises:
        PlanError: it has none.
    """
    pools = Pools(store.lengths, spec, name)
    for pool in range(pools.count):
        # Where documents stand alone, how many tokens a sequence has is theirs: a sample would be too rough.
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
                # Nothing is left out: how long documents are on average is known of all of them.
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
        f"Source {name!r} gives no sequence: its documents are all empty, or longer than seq_len "
        f"{spec.seq_len} with overlong='drop'. Leave it out, raise seq_len or use overlong='split' (not for "
        "documents with images or audio)."
    )


def flatten_weights(
    weights: Weights,
    names: Sequence[str],
    size: Callable[[str], float],
    temperature: float,
    caps: "EpochCap | None",
) -> dict[str, float]:
    """The weight of every source that has one above 0, adding up to 1; groups are divided among theirs.

    Args:
        weights: as of a mixture, checked.
        names: of all sources.
        size: tokens of an epoch of a source.
        temperature: of weights by size.
        caps: the bound of epochs of weights by size.

    Raises:
        PlanError: with that bound the sources are too small for the run.
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
    """A bound of epochs for a run of so many tokens."""

    most_epochs: float
    tokens: int


def _weigh_by_size(sizes: Mapping[str, float], temperature: float, caps: EpochCap | None) -> dict[str, float]:
    if caps is None:
        largest = max(sizes.values())
        # However small: what has tokens has a weight, and it is refused where no period meets it.
        return _normalize_weights(
            {name: max((size / largest) ** (1 / temperature), MIN_WEIGHT) for name, size in sizes.items()}
        )
    max_tokens = sum(size * caps.most_epochs for size in sizes.values())
    if max_tokens < caps.tokens:
        raise PlanError(
            f"most_epochs {caps.most_epochs:g} allows {max_tokens:,.0f} tokens of {', '.join(sizes)}, and the run "
            "asks for "
            f"{caps.tokens:,} of them. Give fewer steps, or a most_epochs of at least "
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
    """Shares of the sequences that give the weights in their unit, adding up to 1."""
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
    """Slots of each source in the shortest period that keeps every share within 1 %.

    Periods are the powers of two from 2**16 to 2**20, rounded up to a multiple of ``lanes``; slots are
    apportioned by largest remainders, the first name first, and none is left without. With ``near`` the longest does
    as well as it can.

    Raises:
        PlanError: no period does, and that is not ``near`` enough; names the source, and the least share that would do.
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
        f"Source {names[worst]!r} has {target_shares[worst]:.2g} of the sequences, which no period of at most "
        f"{MAX_PERIOD:,} "
        f"meets within 1 %. Give it at least {1 / (2 * _MAX_SHARE_ERROR * MAX_PERIOD):.2g}, or weight 0."
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
