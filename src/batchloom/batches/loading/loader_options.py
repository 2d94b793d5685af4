"""Settings of a loader's data order: the option group, and all values as given."""

from dataclasses import dataclass, fields
from typing import Literal

from batchloom.batches.assembly.batch_spec import BatchOptions, BatchSpec
from batchloom.core.errors import SettingsError
from batchloom.core.settings import quote_value, raise_problems
from batchloom.plan import PlanSpec
from batchloom.plan.packing import DEFAULT_GROUPED_STEPS, OverlongMode, PackingOptions

Order = Literal["pools", "lanes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions(PackingOptions):
    """Settings of a ``Loader``'s data order that most runs leave at their defaults.

    Attributes:
        last: ``fill`` an incomplete last step with rows that carry no loss, or ``drop`` it.
        pool_size: number of documents packed together; 0 chooses.
        block: number of neighbouring documents that are permuted as one; 0 chooses by the number of documents.
        lanes: number of parallel read streams the pools are distributed over; 1 for a single stream.
        align: every document begins at a multiple of this many tokens in its sequence; 1 for none.
        group_by_length: steps of a window whose rows are assigned to its steps by length; True is 50 steps, 0 none.
        order: ``pools``; or ``lanes`` to repeat the order and settings of a stream on the store that it wrote.
    """

    order: Order = "pools"


DEFAULT_PLAN_OPTIONS = PlanOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanArguments:
    """Data order settings as a ``Loader`` received them; None is unset."""

    seq_len: int | None
    global_batch_size: int | None
    packing: str
    overlong: OverlongMode | None
    seed: int
    shuffle: bool
    epochs: int | None
    steps: int | None
    options: PlanOptions

    def list_changed_settings(self) -> list[str]:
        """Return the names of the settings that differ from their defaults."""
        names = [
            name
            for name in ("packing", "overlong", "seed", "shuffle", "epochs", "steps")
            if getattr(self, name) != getattr(_DEFAULTS, name)
        ]
        names += [field.name for field in fields(self.options) if getattr(self.options, field.name) != field.default]
        sizes = ("seq_len", "global_batch_size")
        return names + [name for name in sizes if getattr(self, name) is not None]

    def spec(self, overlong: OverlongMode) -> PlanSpec:
        """Return the checked settings of the plan."""
        if self.seq_len is None or self.global_batch_size is None:
            sizes = {"seq_len": self.seq_len, "global_batch_size": self.global_batch_size}
            raise SettingsError(
                [f"{name}: missing; a whole number of at least 1" for name, size in sizes.items() if size is None]
            )
        options, grouped = self.options, self.options.group_by_length
        return PlanSpec(
            seq_len=self.seq_len,
            global_batch_size=self.global_batch_size,
            packing=self.packing,
            overlong=overlong if self.overlong is None else self.overlong,
            seed=self.seed,
            shuffle=self.shuffle,
            epochs=self.epochs,
            steps=self.steps,
            last=options.last,
            pool_size=options.pool_size,
            block=options.block,
            lanes=options.lanes,
            align=options.align,
            group_by_length=(DEFAULT_GROUPED_STEPS if grouped else 0) if isinstance(grouped, bool) else grouped,
        )


_DEFAULTS = PlanArguments(
    seq_len=None,
    global_batch_size=None,
    packing="best_fit",
    overlong=None,
    seed=0,
    shuffle=True,
    epochs=None,
    steps=None,
    options=DEFAULT_PLAN_OPTIONS,
)


def refuse_other_types(plan: object, batch: object) -> None:
    """Reject option groups of other types."""
    problems = []
    if not isinstance(plan, PlanOptions):
        problems.append(f"plan: {quote_value(plan)} is not a PlanOptions; give PlanOptions(last='drop')")
    # A BatchSpec has all batch settings, but only those of BatchOptions would apply.
    if not isinstance(batch, BatchOptions) or isinstance(batch, BatchSpec):
        problems.append(f"batch: {quote_value(batch)} is not a BatchOptions; give BatchOptions(uneven='pad')")
    raise_problems(problems)
