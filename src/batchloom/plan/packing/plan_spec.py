"""Settings of a plan."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, get_args

from batchloom.core.settings import Setting, convert_int_settings, is_bool, raise_problems, suggest, to_plain
from batchloom.plan.packing.strategies import STRATEGIES, is_strategy

OverlongMode = Literal["split", "drop", "truncate", "error"]
LastStepPolicy = Literal["fill", "drop"]

# Any change to pool membership or order increments this number; docs/reference/order.md describes each version.
ORDER_VERSION = 1

POOL_SIZE = 65_536
# With many sources or lanes the pools are smaller, because each source or lane has one in memory.
SMALL_POOL_SIZE = 8_192
MANY_SOURCES = 16
# A pool is packed in memory, and its sort keys hold (row, hash, span) in 64 bits.
MAX_POOL_SIZE = 1 << 24
MAX_LANES = 4096
MAX_STEPS = 1 << 48
# The rows of a window are in memory, at 52 bytes each.
MAX_GROUPED_ROWS = 1 << 22
# Default window in steps: little padding is left, and transformers' sampler uses the same number.
_DEFAULT_GROUPED_STEPS = 50
# From this many documents on, blocks of neighbouring documents are permuted (docs/reference/order.md).
MIN_BLOCKED_DOCUMENTS = 4_000_000
BLOCK_DOCUMENTS = 64
# Positions are stored as signed 64-bit integers.
MAX_POSITIONS = (1 << 63) - 1
_MAX_SEED = (1 << 128) - 1
# Of a sequence, a step and the number of epochs.
_MAX_SIZE = 1 << 24

# Heading of the options of a plan.
PANEL = "Plan"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSpec:
    """All settings that determine a data order, besides the lengths of the documents.

    Attributes:
        seq_len: tokens of a sequence, at most 2**24.
        global_batch_size: sequences of a step, over all ranks, at most 2**24.
        packing: ``best_fit``, ``wrap``, ``first_fit``, ``window_N`` or
            ``none``.
        overlong: policy for documents longer than ``seq_len``: ``split`` cuts them, ``drop`` leaves them out,
            ``truncate`` keeps their first ``seq_len`` tokens, ``error`` refuses the plan. (``wrap`` splits at the
            end of each sequence whatever the length.)
        seed: any integer of at most 128 bits.
        shuffle: False reads documents in store order, the same in every epoch.
        epochs: passes over the data, at most 2**24; 1 when neither this nor ``steps`` is given.
        steps: total number of steps, over as many epochs as they need; at most 2**48.
        last: policy for an incomplete last step: ``fill`` adds sequences without loss, ``drop`` leaves the step
            out.
        pool_size: documents packed together, at most 2**24; 0 chooses 65,536, or 8,192 for more than 16 sources
            or lanes.
        block: neighbouring documents that are permuted as one; 0 chooses by the number of documents alone: 1
            below 4 million, else 64.
        lanes: number of parallel read streams the pools are distributed over, so that a node reads only the pools
            of its own lane from object storage: give the number of nodes. It must divide ``global_batch_size``. In
            a mixture, a source is served in runs of this many sequences.
        align: each document begins at a multiple of this many tokens of its sequence, with padding without loss
            in between: 2 x C for C context-parallel ranks. 1 for no padding.
        group_by_length: steps of a window inside which rows of similar length are grouped into steps; only for
            ``packing='none'``, whose rows are padded. True for 50 steps, 0 for no grouping.
    """

    seq_len: Annotated[int, Setting(help="Number of tokens of a sequence.", minimum=1, maximum=_MAX_SIZE, panel=PANEL)]
    global_batch_size: Annotated[
        int, Setting(help="Number of sequences of a step over all ranks.", minimum=1, maximum=_MAX_SIZE, panel=PANEL)
    ]
    packing: Annotated[str, Setting(help=f"Packing strategy: {', '.join(STRATEGIES)}.", panel=PANEL)] = "best_fit"
    overlong: Annotated[
        OverlongMode,
        Setting(
            help="Policy for documents longer than a sequence: split, drop, truncate or error.",
            shown_default="split; drop for conversations and media",
            panel=PANEL,
        ),
    ] = "split"
    seed: Annotated[
        int, Setting(help="Seed of the data order.", minimum=-_MAX_SEED, maximum=_MAX_SEED, panel=PANEL)
    ] = 0
    shuffle: Annotated[
        bool, Setting(help="Shuffle documents. Without it they are read in store order.", panel=PANEL)
    ] = True
    epochs: Annotated[
        int | None,
        Setting(
            help="Number of passes over the data.",
            minimum=1,
            maximum=_MAX_SIZE,
            shown_default="1 without --steps",
            panel=PANEL,
        ),
    ] = None
    steps: Annotated[
        int | None,
        Setting(
            help="Number of steps of the run, over as many epochs as they need.",
            minimum=1,
            maximum=MAX_STEPS,
            panel=PANEL,
        ),
    ] = None

    last: Annotated[
        LastStepPolicy,
        Setting(help="Policy for an incomplete last step: fill (with rows that carry no loss) or drop.", panel=PANEL),
    ] = "fill"
    pool_size: Annotated[
        int,
        Setting(
            help="Number of documents packed together.",
            maximum=MAX_POOL_SIZE,
            shown_default="65,536, or 8,192 for more than 16 sources or lanes",
            panel=PANEL,
        ),
    ] = 0
    block: Annotated[
        int,
        Setting(
            help="Number of neighbouring documents that are shuffled as one.",
            maximum=MAX_POOL_SIZE,
            shown_default="1 below 4 million documents, else 64",
            panel=PANEL,
        ),
    ] = 0
    lanes: Annotated[
        int,
        Setting(
            help="Number of parallel read streams the pools are distributed over.",
            minimum=1,
            maximum=MAX_LANES,
            panel=PANEL,
        ),
    ] = 1
    align: Annotated[
        int,
        Setting(
            help="Begin each document at a multiple of this many tokens, with padding in between.",
            minimum=1,
            maximum=_MAX_SIZE,
            panel=PANEL,
        ),
    ] = 1
    group_by_length: Annotated[
        int,
        Setting(
            help="Number of steps among which rows of similar length are grouped; only for packing none.",
            maximum=1 << 16,
            panel=PANEL,
        ),
    ] = 0

    def __post_init__(self) -> None:
        if is_bool(self.group_by_length):
            object.__setattr__(self, "group_by_length", _DEFAULT_GROUPED_STEPS if self.group_by_length else 0)
        problems = convert_int_settings(self)
        if not is_bool(self.shuffle):
            problems.append(f"shuffle: {self.shuffle!r} is neither True nor False")
        if self.epochs is not None and self.steps is not None:
            problems.append(f"steps: {self.steps} and epochs: {self.epochs} exclude each other; give one")
        if not isinstance(self.packing, str) or not is_strategy(self.packing):
            hint = suggest(str(self.packing), STRATEGIES)
            problems.append(f"packing: {self.packing!r} is none of {', '.join(STRATEGIES)}{hint}")
        problems += list_choice_problems(self, {"overlong": OverlongMode, "last": LastStepPolicy})
        invalid_fields = {problem.split(":")[0] for problem in problems}
        if not invalid_fields & {"pool_size", "block"} and self.block and self.pool_size % self.block:
            problems.append(f"pool_size: {self.pool_size} is not a multiple of block {self.block}")
        if not invalid_fields & {"lanes", "global_batch_size"} and self.global_batch_size % self.lanes:
            divisor = next(n for n in range(self.lanes, 0, -1) if self.global_batch_size % n == 0)
            problems.append(
                f"lanes: {self.lanes} does not divide global_batch_size {self.global_batch_size}; the largest "
                f"smaller number that does is {divisor}"
            )
        if not invalid_fields & {"align", "seq_len"} and self.seq_len % self.align:
            fitting = format_near_multiples(self.seq_len, self.align)
            problems.append(f"seq_len: {self.seq_len} is not a multiple of align {self.align}; give {fitting}")
        if self.steps is not None and not invalid_fields & {"steps", "global_batch_size"}:
            positions = self.steps * self.global_batch_size
            if positions > MAX_POSITIONS:
                problems.append(
                    f"steps: {self.steps} of global_batch_size {self.global_batch_size} are {positions} sequences, "
                    f"more than the maximum of {MAX_POSITIONS}; lower one of the two"
                )
        if self.group_by_length and "group_by_length" not in invalid_fields:
            problems += self._list_grouping_problems(invalid_fields)
        raise_problems(problems)

    def _list_grouping_problems(self, invalid_fields: set[str]) -> list[str]:
        problems = []
        if self.packing != "none" and "packing" not in invalid_fields:
            problems.append(
                f"group_by_length: rows packed by {self.packing!r} are full, so grouping has no effect; give "
                "packing='none', or leave group_by_length out"
            )
        if self.lanes > 1 and "lanes" not in invalid_fields:
            problems.append(
                f"group_by_length: with {self.lanes} lanes a position belongs to a lane and cannot be moved; give "
                "lanes=1, or leave group_by_length out"
            )
        if "global_batch_size" not in invalid_fields:
            problems += list_window_problems(self.group_by_length, self.global_batch_size)
        return problems

    def identity_fields(self) -> dict[str, Any]:
        """Return all fields as plain values for the identity of a plan."""
        return to_plain(self)

    def with_pools_for(self, sources: int) -> "PlanSpec":
        """Return a copy with the default pool size for this many sources filled in."""
        if self.pool_size:
            return self
        size = SMALL_POOL_SIZE if max(sources, self.lanes) > MANY_SOURCES else POOL_SIZE
        # Round up to a multiple of the block, because a block must not span two pools.
        return replace(self, pool_size=-(-size // max(self.block, 1)) * max(self.block, 1))

    def block_for(self, documents: int) -> int:
        """Return the block size for a source of this many documents."""
        if self.block:
            return self.block
        return BLOCK_DOCUMENTS if documents >= MIN_BLOCKED_DOCUMENTS and self.pool_size % BLOCK_DOCUMENTS == 0 else 1


def list_window_problems(steps: int, global_batch_size: int) -> list[str]:
    """Return the problem of a window whose rows take too much memory, if any."""
    rows = steps * global_batch_size
    if rows <= MAX_GROUPED_ROWS:
        return []
    max_steps = MAX_GROUPED_ROWS // global_batch_size
    sizes = f"{steps} steps of global_batch_size {global_batch_size}"
    return [f"group_by_length: {sizes} are {rows} rows, more than {MAX_GROUPED_ROWS}; give at most {max_steps}"]


def describe_window_conflict(step: int, steps: int) -> str:
    """Return the error text for a step inside a window, with one that fits."""
    following = -(-step // steps) * steps
    return (
        f"inside a window of {steps} steps (group_by_length), whose rows are ordered by length: the part already "
        f"served is not a prefix of the run. Give step={following}, or another multiple of {steps}."
    )


def list_choice_problems(spec: object, choices: Mapping[str, Any]) -> list[str]:
    """List the problems of fields whose value is not in their ``Literal`` type."""
    values = {name: getattr(spec, name) for name in choices}
    return [
        f"{name}: {value!r} is none of {', '.join(options)}{suggest(str(value), options)}"
        for name, value in values.items()
        if value not in (options := get_args(choices[name]))
    ]


def format_near_multiples(number: int, factor: int) -> str:
    """Return the multiples of ``factor`` next to a number, as ``8 or 16``."""
    lower = number // factor * factor
    return " or ".join(str(n) for n in (lower, lower + factor) if n)
