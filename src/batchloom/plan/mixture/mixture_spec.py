"""Specification of a mixture: named sources and their weights."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from batchloom.core.errors import PlanError
from batchloom.core.settings import coerce_int_fields, is_positive_number, is_text, quote_value, raise_problems, suggest
from batchloom.plan.packing.plan_spec import OverlongMode, list_choice_problems
from batchloom.plan.packing.pools import DocumentLengths

WeightUnit = Literal["tokens", "documents", "epochs"]
ExhaustedPolicy = Literal["repeat", "stop", "redistribute"]
# A value is a number, or for a group a mapping of its weight and its sources.
Weights = Mapping[str, Any] | Literal["size"]

MAX_SOURCES = 1000
# Bounds of weights above 0, so that their products and sums neither underflow nor overflow.
MIN_WEIGHT, MAX_WEIGHT = 1e-100, 1e100
_GROUP_KEYS = {"weight", "sources"}
_MAX_SEED, _MAX_START = (1 << 128) - 1, (1 << 62) - 1
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
