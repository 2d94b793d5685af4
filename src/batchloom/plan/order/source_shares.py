"""Shares of the sources of a plan: from weights to slots of the schedule."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import final

from batchloom.core.errors import SettingsError
from batchloom.plan.mixture import (
    EpochCap,
    Mixture,
    PlanStore,
    SourceSpec,
    SourceStatistics,
    Weights,
    apportion,
    compute_sequence_shares,
    flatten_weights,
    measure_source,
)
from batchloom.plan.packing.plan_spec import PlanSpec

# Name of the only source of a plan of one store.
SOURCE = "data"


@final
class SourceShares:
    """Settings, measures and shares of the sources of a plan.

    Args:
        data: store or mixture of the plan.
        stores: stores by source name, in the order of their numbers.
        spec: settings of the plan.
        seq_lens: tokens of a sequence in each era.

    Attributes:
        statistics: measures by era and number of the source.
    """

    def __init__(
        self, data: PlanStore | Mixture, stores: Mapping[str, PlanStore], spec: PlanSpec, seq_lens: Sequence[int]
    ) -> None:
        self._mixture = data if isinstance(data, Mixture) else None
        self._stores = stores
        self._names = tuple(stores)
        self._spec = spec
        self._seq_lens = seq_lens
        self.statistics: dict[tuple[int, int], SourceStatistics] = {}

    def get_source_spec(self, number: int) -> SourceSpec:
        """Return the mixture's settings of one source."""
        source_specs = self._mixture.sources if self._mixture else {}
        return source_specs.get(self._names[number], SourceSpec())

    def get_spec(self, number: int, era: int) -> PlanSpec:
        """Return the settings of a source in an era."""
        source_spec = self.get_source_spec(number)
        return replace(
            self._spec,
            seq_len=self._seq_lens[era],
            seed=self._spec.seed if source_spec.seed is None else source_spec.seed,
            overlong=source_spec.overlong or self._spec.overlong,
        )

    def get_epoch_limit(self, number: int) -> int | None:
        """Return the maximum passes through a source; None for no bound."""
        if self._mixture is None or self._mixture.exhausted == "repeat":
            return None
        return self.get_source_spec(number).epochs or 1

    def measure(self, number: int, era: int) -> SourceStatistics:
        """Return the measures of a source in an era, from the first call on."""
        statistics = self.statistics.get((era, number))
        if statistics is None:
            name = self._names[number]
            statistics = measure_source(name, self._stores[name], self.get_spec(number, era))
            self.statistics[era, number] = statistics
        return statistics

    def compute(self, weights: Weights, era: int = 0) -> dict[str, float]:
        """Return the weight of each source with one above 0; the weights sum to 1."""
        mixture = self._mixture
        if mixture is None:
            return {SOURCE: 1.0}
        caps = None
        if mixture.most_epochs is not None:
            if self._spec.steps is None:
                raise SettingsError(["steps: missing; most_epochs needs a run with a known number of steps"])
            caps = EpochCap(mixture.most_epochs, self._spec.steps * self._spec.global_batch_size * self._spec.seq_len)

        def size(name: str) -> float:
            return self.measure(self._names.index(name), era).tokens

        return flatten_weights(weights, self._names, size, mixture.temperature, caps)

    def count_slots(self, weights: Weights, exhausted: frozenset[int], era: int) -> dict[int, int]:
        """Return the slots of a period by source number; none if no source is left."""
        if self._mixture is None:
            return {0: 1}
        flat = {
            name: weight
            for name, weight in self.compute(weights, era).items()
            if self._names.index(name) not in exhausted
        }
        if not flat:
            return {}
        statistics = {name: self.measure(self._names.index(name), era) for name in flat}
        shares = compute_sequence_shares(flat, self._mixture.unit, statistics)
        # The shares that remain when others are exhausted were not chosen by the user, so they need not be met
        # exactly.
        counts = apportion(shares, near=bool(exhausted))
        return {self._names.index(name): count for name, count in counts.items()}
