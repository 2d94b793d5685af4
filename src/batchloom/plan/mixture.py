"""Mixtures: named sources, their weights, and the schedule that realizes them.

In the schedule of a mixture each source has a number of slots in a period. Its j-th slot is released at floor(j P / c)
and due at ceil((j + 1) P / c). Among released slots the one due first is served (earliest deadline first, the chairman
assignment of Tijdeman: The Chairman Assignment Problem, Discrete Mathematics 32, 1980; by Liu and Layland one server
can always meet these deadlines). So after t positions a source has had floor(t c / P) or ceil(t c / P) of them: always
within one of its share.
"""

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Protocol, final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import PlanError
from batchloom.core.settings import coerce_int_fields, is_positive_number, is_text, quote_value, raise_problems, suggest
from batchloom.plan.packing.plan_spec import OverlongMode, PlanSpec, list_choice_problems
from batchloom.plan.packing.pools import DocumentLengths, Pools
from batchloom.plan.packing.rows import Ints

WeightUnit = Literal["tokens", "documents", "epochs"]
ExhaustedPolicy = Literal["repeat", "stop", "redistribute"]
# A value is a number, or for a group a mapping of its weight and its sources.
Weights = Mapping[str, Any] | Literal["size"]

MAX_SOURCES = 1000
# Bounds of weights above 0, so that their products and sums neither underflow nor overflow.
MIN_WEIGHT = 1e-100
MAX_WEIGHT = 1e100
_GROUP_KEYS = {"weight", "sources"}
_MAX_SEED = (1 << 128) - 1
_MAX_START = (1 << 62) - 1
_POSITIVE_DESCRIPTION = f"a number from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}"


class PlanStore(Protocol):
    """Properties of a store that a plan reads."""

    @property
    def lengths(self) -> DocumentLengths:
        """Lengths of the documents in tokens."""

    @property
    def tokens(self) -> int:
        """Total tokens of all documents."""

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the store's content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSpec:
    """Settings of a single source.

    Attributes:
        epochs: maximum passes over the source; None for no bound (with ``exhausted`` ``stop`` and
            ``redistribute``: 1).
        seed: seed of its order; None for the plan's.
        overlong: policy for its overlong documents; None for the plan's.
    """

    epochs: int | None = None
    seed: int | None = None
    overlong: OverlongMode | None = None

    def __post_init__(self) -> None:
        problems = coerce_int_fields(self, {"epochs": (1, 1 << 24), "seed": (-_MAX_SEED, _MAX_SEED)})
        if self.overlong is not None:
            problems += list_choice_problems(self, {"overlong": OverlongMode})
        raise_problems(problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Weights that apply from a step or a number of tokens on.

    Attributes:
        weights: weights in the form of :class:`Mixture`.
        step: first step of the stage; or
        tokens: tokens before the stage, counted as ``seq_len`` per sequence; it begins with the next full step.
    """

    weights: Weights
    step: int | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        problems = coerce_int_fields(self, {"step": (1, _MAX_START), "tokens": (1, _MAX_START)})
        if (self.step is None) == (self.tokens is None):
            problems.append("step: a stage begins at a step or after a number of tokens; give exactly one of the two")
        raise_problems(problems)


@dataclass(frozen=True, slots=True)
class Mixture:
    """Named stores and their weights.

    Attributes:
        weights: a number of at least 0 per source, in any scale, or for a group a mapping ``{"weight": 0.3,
            "sources": {"python": 2, "rust": 1}}`` (a list of sources instead weighs them by their sizes).
            ``"size"`` weighs all sources by their tokens.
        stores: open store of each source by name. One without a weight is unused until a later stage or edit.
        unit: unit of the weights: ``tokens``, ``documents``, or ``epochs`` (passes over the source).
        temperature: temperature of weights by size: tokens to the power 1 / temperature.
        most_epochs: maximum passes over a source in the run's ``steps``, for weights by size. Below it sources
            are weighted equally (UniMax: Chung et al., Fairer and More Effective Language Sampling for
            Large-Scale Multilingual Pretraining, ICLR 2023).
        exhausted: policy for a source that has had its epochs: ``repeat`` (restart it), ``stop`` (end the run) or
            ``redistribute`` (give its share to the other sources).
        sources: settings of single sources by name.
        stages: weights that replace these later in the run, in order.
    """

    weights: Weights
    stores: Mapping[str, PlanStore] = field(kw_only=True)
    unit: WeightUnit = field(default="tokens", kw_only=True)
    temperature: float = field(default=1.0, kw_only=True)
    most_epochs: float | None = field(default=None, kw_only=True)
    exhausted: ExhaustedPolicy = field(default="repeat", kw_only=True)
    sources: Mapping[str, SourceSpec] = field(default_factory=dict, kw_only=True)
    stages: Sequence[Stage] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        problems = self._stores_problems()
        problems += list_choice_problems(self, {"unit": WeightUnit, "exhausted": ExhaustedPolicy})
        if not is_positive_weight(self.temperature):
            problems.append(f"temperature: {quote_value(self.temperature)} is not {_POSITIVE_DESCRIPTION}")
        if self.most_epochs is not None and not is_positive_weight(self.most_epochs):
            problems.append(f"most_epochs: {quote_value(self.most_epochs)} is not {_POSITIVE_DESCRIPTION}")
        problems += _list_kind_problems(self.sources, self.stages)
        problems = problems or self._idle_problems()
        if not problems:
            problems += list_weight_problems(self.weights, self.stores, "weights")
            for number, stage in enumerate(self.stages):
                problems += list_weight_problems(stage.weights, self.stores, f"stages[{number}].weights")
            problems += _list_order_problems(self.stages)
        raise_problems(problems)
        _refuse_other_tokenizers(self.stores)

    def __repr__(self) -> str:
        stores = ", ".join(f"{name} ({store.tokens:,} tokens)" for name, store in self.stores.items())
        weights = self.weights if isinstance(self.weights, str) else dict(self.weights)
        stages = f", {len(self.stages)} later stages" if self.stages else ""
        return f"Mixture({weights!r} in {self.unit} of {stores}, exhausted {self.exhausted}{stages})"

    def _idle_problems(self) -> list[str]:
        """List settings that would have no effect in combination with the others."""
        problems = []
        sized = any(uses_size_weights(weights) for weights in (self.weights, *(s.weights for s in self.stages)))
        problems += [
            f"{name}: applies only to weights by size, and explicit weights are given; use weights='size'"
            for name, idle in (("temperature", self.temperature == 1), ("most_epochs", self.most_epochs is None))
            if not (idle or sized)
        ]
        if self.exhausted == "repeat":
            problems += [
                f"sources.{name}.epochs: not allowed with exhausted='repeat', where sources repeat without end; give "
                "exhausted='stop' or 'redistribute'"
                for name, source_spec in self.sources.items()
                if source_spec.epochs is not None
            ]
        return problems

    def _stores_problems(self) -> list[str]:
        if not isinstance(self.stores, Mapping) or not self.stores:
            return ["stores: must be a mapping of at least one name to an open store"]
        problems = [f"stores: {quote_value(name)} is not a name" for name in self.stores if not is_text(name)]
        if len(self.stores) > MAX_SOURCES:
            problems.append(f"stores: {len(self.stores)} sources are more than the maximum of {MAX_SOURCES}")
        problems += [
            f"stores.{name}: {quote_value(store)} is a path; open it: open_store({quote_value(store)})"
            if isinstance(store, str) or hasattr(store, "__fspath__")
            else f"stores.{name}: {type(store).__name__} is not an open store"
            for name, store in self.stores.items()
            if not hasattr(store, "lengths")
        ]
        problems += [
            f"sources.{name}: unknown source{suggest(str(name), self.stores)}"
            for name in (self.sources if isinstance(self.sources, Mapping) else ())
            if name not in self.stores
        ]
        return problems


def _list_kind_problems(sources: object, stages: object) -> list[str]:
    problems = []
    if not isinstance(sources, Mapping):
        problems.append(f"sources: {quote_value(sources)} is not a mapping of names to SourceSpec")
    else:
        problems += [
            f"sources.{name}: {quote_value(source_spec)} is not a SourceSpec"
            for name, source_spec in sources.items()
            if not isinstance(source_spec, SourceSpec)
        ]
    if not isinstance(stages, Sequence) or isinstance(stages, (str, bytes)):
        return [*problems, f"stages: {quote_value(stages)} is not a list of Stage"]
    return problems + [
        f"stages[{number}]: {quote_value(stage)} is not a Stage"
        for number, stage in enumerate(stages)
        if not isinstance(stage, Stage)
    ]


def uses_size_weights(weights: object) -> bool:
    """Return whether weights, or those inside a group, are given by source sizes."""
    if not isinstance(weights, Mapping):
        return weights == "size"
    return any(isinstance(w, Mapping) and not isinstance(w.get("sources"), Mapping) for w in weights.values())


def list_weighted_sources(weights: Weights, names: Iterable[str]) -> set[str]:
    """Return the sources that have a weight above 0; ``names`` are all sources."""
    if isinstance(weights, str):
        return set(names)
    weighted_sources: set[str] = set()
    for name, weight in weights.items():
        if not isinstance(weight, Mapping):
            weighted_sources |= {name} if weight > 0 else set()
        elif weight["weight"] > 0:
            inner = weight["sources"]
            weighted_sources |= {n for n in inner if not isinstance(inner, Mapping) or inner[n] > 0}
    return weighted_sources


def is_positive_weight(value: object) -> bool:
    """Return whether a value is a number from 1e-100 to 1e+100."""
    return is_weight(value) and value != 0


def is_weight(value: object) -> bool:
    """Return whether a value is 0 or a number from 1e-100 to 1e+100."""
    if not isinstance(value, int | float) or not is_positive_number(value, zero=True):
        return False
    return value == 0 or MIN_WEIGHT <= value <= MAX_WEIGHT


def list_weight_problems(weights: object, stores: Mapping[str, object], path: str) -> list[str]:
    """List all problems of weights.

    These are unknown sources, duplicates, values that are not weights, and weights that are all 0.
    """
    if weights == "size":
        return []
    if not isinstance(weights, Mapping) or not weights:
        return [f"{path}: {quote_value(weights)} is neither a mapping of names to numbers nor 'size'"]
    problems: list[str] = []
    weighted_names: set[str] = set()
    for name, weight in weights.items():
        weight_path = f"{path}.{name}"
        if isinstance(weight, Mapping):
            problems += _list_group_problems(weight, stores, weight_path, weighted_names)
        else:
            problems += _list_number_problems(weight, weight_path) + _list_name_problems(
                name, stores, weight_path, weighted_names
            )
    top_weights = [w.get("weight") if isinstance(w, Mapping) else w for w in weights.values()]
    if not problems and not any(top_weights):
        problems.append(f"{path}: all weights are 0; at least one source needs a weight above 0")
    return problems


def _list_group_problems(
    group: Mapping[str, Any], stores: Mapping[str, object], path: str, weighted_names: set[str]
) -> list[str]:
    problems = [
        f"{path}.{key}: unknown setting{suggest(str(key), _GROUP_KEYS)}" for key in group if key not in _GROUP_KEYS
    ]
    problems += [f"{path}.{key}: missing" for key in sorted(_GROUP_KEYS - set(group))]
    if problems:
        return problems
    problems += _list_number_problems(group["weight"], f"{path}.weight")
    inner = group["sources"]
    if not isinstance(inner, (Mapping, list, tuple)) or not inner:
        return [
            *problems,
            f"{path}.sources: {quote_value(inner)} is neither a mapping of names to numbers nor a list of names",
        ]
    for name in inner:
        problems += _list_name_problems(name, stores, f"{path}.sources.{name}", weighted_names)
    if isinstance(inner, Mapping):
        for name, weight in inner.items():
            problems += _list_number_problems(weight, f"{path}.sources.{name}")
        if not problems and not any(inner.values()):
            problems.append(f"{path}.sources: all weights are 0; at least one source needs a weight above 0")
    return problems


def _list_number_problems(weight: object, path: str) -> list[str]:
    return [] if is_weight(weight) else [f"{path}: {quote_value(weight)} is neither 0 nor {_POSITIVE_DESCRIPTION}"]


def _list_name_problems(name: object, stores: Mapping[str, object], path: str, weighted_names: set[str]) -> list[str]:
    if not isinstance(name, str) or name not in stores:
        return [f"{path}: unknown source; the sources are {', '.join(map(str, stores))}{suggest(str(name), stores)}"]
    if name in weighted_names:
        return [f"{path}: the source already has a weight"]
    weighted_names.add(name)
    return []


def _list_order_problems(stages: Sequence[Stage]) -> list[str]:
    units = {"step" if stage.step is not None else "tokens" for stage in stages}
    if len(units) > 1:
        return ["stages: some begin at a step and some after tokens; use one of the two for all"]
    stage_starts = [stage.step if stage.step is not None else stage.tokens for stage in stages]
    if stage_starts != sorted(set(stage_starts)):  # type: ignore[type-var]
        return [f"stages: their starts {stage_starts} are not in ascending order"]
    return []


def _refuse_other_tokenizers(stores: Mapping[str, PlanStore]) -> None:
    fingerprints = {
        name: str(manifest.tokenizer.fingerprint)
        for name, store in stores.items()
        if (manifest := getattr(store, "manifest", None)) is not None
    }
    first = next(iter(fingerprints.items()), None)
    for name, fingerprint in fingerprints.items():
        if first and fingerprint != first[1]:
            raise PlanError(
                f"Sources {first[0]!r} and {name!r} were prepared with different tokenizers ({first[1][:12]} and "
                f"{fingerprint[:12]}): one id would stand for different text. Prepare one of them again with the "
                "tokenizer of the other."
            )


MIN_PERIOD = 1 << 16
MAX_PERIOD = 1 << 20
_MAX_SHARE_ERROR = 0.01
# A source is measured on this many documents, or on a full pool if they make few sequences. With many sources the
# measurement takes most of the time to the first batch.
_SAMPLE_DOCUMENTS = 2048
_MIN_SEQUENCES = 256


@lru_cache(maxsize=16)
def build_period(counts: tuple[int, ...]) -> NDArray[np.int32]:
    """Return the source of each slot of a period of ``sum(counts)`` slots, int32."""
    period = sum(counts)
    sources = len(counts)
    share = np.array(counts, np.int64)
    owner = np.repeat(np.arange(sources), share)
    number = np.arange(period) - np.repeat(np.cumsum(share) - share, share)
    owner_counts = share[owner]
    deadlines = -(-(number + 1) * period // owner_counts) * sources + owner
    order = np.argsort(number * period // owner_counts, kind="stable")
    # The heap holds (deadline, source) as one integer, because a million of them are pushed and popped.
    heap: list[int] = []
    dates = deadlines[order].tolist()
    ends = np.cumsum(np.bincount(number * period // owner_counts, minlength=period)).tolist()
    push = heapq.heappush
    pop = heapq.heappop
    push_pop = heapq.heappushpop
    served = []
    begin = 0
    for end in ends:
        if begin == end:
            served.append(pop(heap))
            continue
        for date in dates[begin : end - 1]:
            push(heap, date)
        served.append(push_pop(heap, dates[end - 1]))
        begin = end
    slots = (np.array(served, np.int64) % sources).astype(np.int32)
    slots.flags.writeable = False
    return slots


@lru_cache(maxsize=4)
def make_schedule(counts: tuple[int, ...]) -> "Schedule":
    return Schedule(counts)


@final
class Schedule:
    """Endless repetition of one period; turns count from its beginning.

    Args:
        counts: turns of each source in a period, each at least 1.

    Attributes:
        counts: as given.
        period: turns of a period.
    """

    __slots__ = ("_begins", "_keys", "_occurrence", "_share", "counts", "period")

    def __init__(self, counts: tuple[int, ...]) -> None:
        self.counts = counts
        self.period = sum(counts)
        self._share = np.array(counts, np.int64)
        # Slots of the period by source, ascending in each, as source * period + slot.
        slots = np.argsort(build_period(counts), kind="stable")
        self._keys = np.repeat(np.arange(len(counts)), self._share) * self.period + slots
        self._begins = np.cumsum(self._share) - self._share
        self._occurrence = np.empty(self.period, np.int32)
        self._occurrence[slots] = np.arange(self.period) - np.repeat(self._begins, self._share)

    def at(self, turns: Ints) -> tuple[Ints, Ints]:
        """Return the source of each turn, and its number among the source's turns."""
        period_index, slot = np.divmod(turns, self.period)
        sources = build_period(self.counts)[slot].astype(np.int64)
        return sources, period_index * self._share[sources] + self._occurrence[slot]

    def count(self, turn: int) -> Ints:
        """Count the earlier turns of each source, int64 [sources]."""
        period_index, slot = divmod(turn, self.period)
        inside = self._keys.searchsorted(np.arange(len(self.counts)) * self.period + slot) - self._begins
        counts: Ints = period_index * self._share + inside
        return counts

    def find(self, source: int, number: int) -> int:
        """Return a turn of a source by its number; inverse of :meth:`at`."""
        period_index, slot_index = divmod(number, self.counts[source])
        return (period_index - source) * self.period + int(self._keys[self._begins[source] + slot_index])


class SourceStatistics(NamedTuple):
    """Statistics of a source that are estimated before its pools are counted."""

    # Totals of an epoch, scaled by the fraction that ``overlong`` leaves of the first pool.
    tokens: float
    documents: float
    # Mean (tokens, documents) of a sequence over the first documents of the first pool that has sequences.
    per_sequence: tuple[float, float]


def measure_source(name: str, store: PlanStore, spec: PlanSpec) -> SourceStatistics:
    """Measure a source by its first pool with sequences."""
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
                store.tokens * served_shares[0], pools.documents * served_shares[1], (tokens, documents)
            )
    raise PlanError(
        f"Source {name!r} gives no sequence: all of its documents are empty, or longer than seq_len {spec.seq_len} "
        "with overlong='drop'. Leave it out, raise seq_len or use overlong='split' (not for documents with images "
        "or audio)."
    )


def flatten_weights(
    weights: Weights, names: Sequence[str], size: Callable[[str], float], temperature: float, caps: "EpochCap | None"
) -> dict[str, float]:
    """Return the weight of each source with one above 0; the weights sum to 1."""
    if weights == "size":
        return _weigh_by_size({name: size(name) for name in names}, temperature, caps)
    flat_weights: dict[str, float] = {}
    total = sum(float(entry["weight"] if isinstance(entry, Mapping) else entry) for entry in weights.values())
    for name, weight in weights.items():
        if isinstance(weight, Mapping):
            inner = weight["sources"]
            group_weight = float(weight["weight"])
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
    remaining_tokens = float(caps.tokens)
    shares = {}
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


def apportion(shares: Mapping[str, float], *, near: bool = False) -> dict[str, int]:
    """Return the slots of each source in the shortest period accurate within 1 %.

    Periods are the powers of two from 2**16 to 2**20. Slots are apportioned by largest remainders, ties by name, and
    each source has at least one. With ``near`` the longest period is accepted whatever its error.
    """
    if len(shares) == 1:
        return dict.fromkeys(shares, 1)
    names = sorted(shares)
    target_shares = np.array([shares[name] for name in names])
    period = MIN_PERIOD
    while True:
        counts = _apply_largest_remainders(target_shares, period)
        relative_errors = np.abs(counts / period / target_shares - 1)
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
