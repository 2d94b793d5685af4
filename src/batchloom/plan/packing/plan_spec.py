"""The settings of a plan."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from batchloom.core.settings import coerce_int_fields, is_bool, raise_problems, suggest, to_plain
from batchloom.plan.packing.strategies import STRATEGIES, is_strategy, strategy_to_identity

OverlongMode = Literal["split", "drop", "truncate", "error"]
LastStepPolicy = Literal["fill", "drop"]

# Membership and order change with this number; docs/order.md describes each version.
ORDER_VERSION = 1

POOL_SIZE = 65_536
# Of many sources or lanes each has a pool in memory: they are smaller.
SMALL_POOL_SIZE, MANY_SOURCES = 8_192, 16
# A pool is packed in memory, and its sort keys hold (row, hash, span) in 64 bits.
MAX_POOL_SIZE = 1 << 24
MAX_LANES = 4096
# The rows of a window are in memory, each in 52 bytes.
MAX_GROUPED_ROWS = 1 << 22
# Steps of a window where nobody chooses: little padding is left, and transformers' sampler takes as many.
DEFAULT_GROUPED_STEPS = 50
# From this many documents on, what is permuted is blocks of neighbours (docs/order.md).
MIN_BLOCKED_DOCUMENTS = 4_000_000
BLOCK_DOCUMENTS = 64
# A position is a 64-bit number wherever it is kept.
MAX_POSITIONS = (1 << 63) - 1
_MAX_SEED = (1 << 128) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingOptions:
    """The settings of an order that most runs leave as they are; ``PlanSpec`` documents and checks them."""

    last: LastStepPolicy = "fill"
    pool_size: int = 0
    block: int = 0
    lanes: int = 1
    align: int = 1
    group_by_length: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSpec(PackingOptions):
    """Everything that fixes an order, besides the lengths of the documents.

    Attributes:
        seq_len: tokens of a sequence, at most 2**24.
        global_batch_size: sequences of a step, over all ranks, at most 2**24.
        packing: ``best_fit``, ``wrap``, ``first_fit``, ``window_N`` (``window_N@1`` for its first version) or ``none``.
        overlong: what becomes of a document longer than ``seq_len``: ``split`` cuts it,
            ``drop`` leaves it out, ``truncate`` keeps its first ``seq_len`` tokens, ``error``
            refuses the plan. (``wrap`` splits at the end of each sequence whatever the length.)
        seed: any integer of at most 128 bits.
        shuffle: False gives the order of the store, the same in every epoch.
        epochs: passes over the data, at most 2**24; 1 when neither this nor ``steps`` is given.
        steps: steps in all, over as many epochs as they take; at most 2**48.
        last: the last step of a run that ends inside it is filled (``fill``) with sequences
            that carry no loss, or left out (``drop``).
        pool_size: documents packed together, at most 2**24; 0 chooses: 65,536, or 8,192 where there are
            more than 16 sources or lanes.
        block: neighbouring documents that are permuted as one; 0 chooses by the number of
            documents alone: 1 below 4 million, else 64.
        lanes: what pools are dealt to, so that on object storage a rank touches only those of its own
            lanes; ``global_batch_size`` is a multiple of it. 1 deals nothing.
        align: every document begins at a multiple of so many tokens of its sequence, and padding
            without loss fills what is left behind it: 2 x C for C context-parallel ranks. 1 for none.
        group_by_length: steps of a window whose rows are dealt to its steps by length, so that those of a step are
            about equally long; of ``packing='none'`` alone, whose rows are padded. 0 for none.
        bounds: least and most of each number, the same for every spec.
    """

    bounds: ClassVar[Mapping[str, tuple[int, int]]] = MappingProxyType(
        {
            "seq_len": (1, 1 << 24),
            "global_batch_size": (1, 1 << 24),
            "seed": (-_MAX_SEED, _MAX_SEED),
            "epochs": (1, 1 << 24),
            "steps": (1, 1 << 48),
            "pool_size": (0, MAX_POOL_SIZE),
            "block": (0, MAX_POOL_SIZE),
            "lanes": (1, MAX_LANES),
            "align": (1, 1 << 24),
            "group_by_length": (0, 1 << 16),
        }
    )

    seq_len: int
    global_batch_size: int
    packing: str = "best_fit"
    overlong: OverlongMode = "split"
    seed: int = 0
    shuffle: bool = True
    epochs: int | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        problems = coerce_int_fields(self, self.bounds)
        if not is_bool(self.shuffle):
            problems.append(f"shuffle: {self.shuffle!r} is neither True nor False")
        if self.epochs is not None and self.steps is not None:
            problems.append(f"steps: {self.steps} and epochs: {self.epochs} exclude each other; give one")
        if not isinstance(self.packing, str) or not is_strategy(self.packing):
            hint = suggest(str(self.packing), STRATEGIES)
            problems.append(f"packing: {self.packing!r} is none of {', '.join(STRATEGIES)}{hint}")
        for name, literal_type in (("overlong", OverlongMode), ("last", LastStepPolicy)):
            value, options = getattr(self, name), literal_type.__args__  # type: ignore[attr-defined]
            if value not in options:
                problems.append(f"{name}: {value!r} is none of {', '.join(options)}{suggest(str(value), options)}")
        invalid_fields = {problem.split(":")[0] for problem in problems}
        if not invalid_fields & {"pool_size", "block"} and self.block and self.pool_size % self.block:
            problems.append(f"pool_size: {self.pool_size} is not a multiple of block {self.block}")
        if not invalid_fields & {"lanes", "global_batch_size"} and self.global_batch_size % self.lanes:
            problems.append(
                f"lanes: {self.lanes} does not divide global_batch_size {self.global_batch_size}; the largest "
                f"below it that does is {find_nearest_divisor(self.global_batch_size, self.lanes)}"
            )
        if not invalid_fields & {"align", "seq_len"} and self.seq_len % self.align:
            lower_multiple = self.seq_len // self.align * self.align
            fitting = " or ".join(str(n) for n in (lower_multiple, lower_multiple + self.align) if n)
            problems.append(f"seq_len: {self.seq_len} is not a multiple of align {self.align}; {fitting} is")
        if self.steps is not None and not invalid_fields & {"steps", "global_batch_size"}:
            positions = self.steps * self.global_batch_size
            if positions > MAX_POSITIONS:
                problems.append(
                    f"steps: {self.steps} of global_batch_size {self.global_batch_size} are {positions} sequences, "
                    f"more than {MAX_POSITIONS}; lower one of the two"
                )
        if self.group_by_length and "group_by_length" not in invalid_fields:
            problems += self._list_grouping_problems(invalid_fields)
        raise_problems(problems)

    def _list_grouping_problems(self, invalid_fields: set[str]) -> list[str]:
        """Why rows cannot be grouped by their length."""
        problems = []
        if self.packing != "none" and "packing" not in invalid_fields:
            problems.append(
                f"group_by_length: rows packed by {self.packing!r} are full, so there is nothing to group; give "
                "packing='none', or leave it out"
            )
        if self.lanes > 1 and "lanes" not in invalid_fields:
            problems.append(
                f"group_by_length: with {self.lanes} lanes a position belongs to a lane and cannot be moved; give "
                "lanes=1, or leave it out"
            )
        if "global_batch_size" not in invalid_fields:
            problems += list_window_problems(self.group_by_length, self.global_batch_size)
        return problems

    def identity_fields(self) -> dict[str, Any]:
        """Return all fields as plain values, as the identity of an order names them."""
        plain = to_plain(self)
        # States that were written before list the options behind the others.
        options = {field.name: plain.pop(field.name) for field in fields(PackingOptions)}
        return {**plain, **options, "packing": strategy_to_identity(self.packing)}

    def with_pools_for(self, sources: int) -> "PlanSpec":
        """The same with the size of its pools chosen, for so many sources."""
        if self.pool_size:
            return self
        size = SMALL_POOL_SIZE if max(sources, self.lanes) > MANY_SOURCES else POOL_SIZE
        # A block that was asked for is never cut.
        return replace(self, pool_size=-(-size // max(self.block, 1)) * max(self.block, 1))

    def with_source_settings(self, seq_len: int, seed: int | None, overlong: OverlongMode | None) -> "PlanSpec":
        """The same for one source, with what is said of it alone."""
        source_spec = replace(self, seq_len=seq_len, overlong=overlong or self.overlong)
        return source_spec if seed is None else replace(source_spec, seed=seed)

    def block_for(self, documents: int) -> int:
        """The block used for a source of so many documents."""
        if self.block:
            return self.block
        return BLOCK_DOCUMENTS if documents >= MIN_BLOCKED_DOCUMENTS and self.pool_size % BLOCK_DOCUMENTS == 0 else 1


def list_window_problems(steps: int, global_batch_size: int) -> list[str]:
    """What is said of a window whose rows would take too much memory."""
    rows = steps * global_batch_size
    if rows <= MAX_GROUPED_ROWS:
        return []
    max_steps = MAX_GROUPED_ROWS // global_batch_size
    sizes = f"{steps} steps of global_batch_size {global_batch_size}"
    return [f"group_by_length: {sizes} are {rows} rows, more than {MAX_GROUPED_ROWS}; give at most {max_steps}"]


def describe_window_conflict(step: int, steps: int) -> str:
    """What is said of a step at which nothing can change, and which can."""
    following = -(-step // steps) * steps
    return (
        f"inside a window of {steps} steps (group_by_length): its rows come by their length, so that what was served "
        f"of it is no beginning of the run. Give step={following}, or another multiple of {steps}."
    )


def find_nearest_divisor(number: int, most: int) -> int:
    """The largest divisor of ``number`` that is at most ``most``."""
    return max(n for n in range(1, min(most, number) + 1) if number % n == 0)
