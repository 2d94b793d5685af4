"""The settings of a plan."""

from dataclasses import dataclass
from typing import Literal

from batchloom.core.spec import is_switch, nearest, raise_problems
from batchloom.plan.pack import STRATEGIES, is_strategy

Overlong = Literal["split", "drop", "truncate", "error"]
Last = Literal["fill", "drop"]

# Membership and order change with this number; docs/order.md describes each version.
ORDER_VERSION = 1

POOL_SIZE = 65_536
# A pool is packed in memory, and its sort keys hold (row, hash, span) in 64 bits.
MOST_POOL_SIZE = 1 << 24
# From this many documents on, what is permuted is blocks of neighbours (docs/order.md).
BLOCKS_FROM = 4_000_000
BLOCK = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSpec:
    """Everything that fixes an order, besides the lengths of the documents.

    Attributes:
        seq_len: tokens of a sequence.
        global_batch_size: sequences of a step, over all ranks.
        packing: ``best_fit``, ``wrap``, ``first_fit``, ``window_N`` or ``none``.
        overlong: what becomes of a document longer than ``seq_len``: ``split`` cuts it,
            ``drop`` leaves it out, ``truncate`` keeps its first ``seq_len`` tokens, ``error``
            refuses the plan. (``wrap`` splits at the end of each sequence whatever the length.)
        seed: any integer.
        shuffle: False gives the order of the store, the same in every epoch.
        epochs: passes over the data; 1 when neither this nor ``steps`` is given.
        steps: steps in all, over as many epochs as they take.
        last: the last step of a run that ends inside it is filled (``fill``) with sequences
            that carry no loss, or left out (``drop``).
        pool_size: documents packed together.
        block: neighbouring documents that are permuted as one; 0 chooses by the number of
            documents alone: 1 below 4 million, else 64.
    """

    seq_len: int
    global_batch_size: int
    packing: str = "best_fit"
    overlong: Overlong = "split"
    seed: int = 0
    shuffle: bool = True
    epochs: int | None = None
    steps: int | None = None
    last: Last = "fill"
    pool_size: int = POOL_SIZE
    block: int = 0

    def __post_init__(self) -> None:
        problems = [
            f"{name}: {getattr(self, name)!r} is not a whole number of at least {least}"
            for name, least in (
                ("seq_len", 1),
                ("global_batch_size", 1),
                ("pool_size", 1),
                ("block", 0),
            )
            if not _is_whole(getattr(self, name), least)
        ]
        problems += [
            f"{name}: {value!r} is not a whole number of at least 1 (or None)"
            for name, value in (("epochs", self.epochs), ("steps", self.steps))
            if value is not None and not _is_whole(value, 1)
        ]
        if not is_switch(self.shuffle):
            problems.append(f"shuffle: {self.shuffle!r} is neither True nor False")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            problems.append(f"seed: {self.seed!r} is not a whole number")
        if self.epochs is not None and self.steps is not None:
            problems.append(
                f"steps: {self.steps} and epochs: {self.epochs} exclude each other; give one"
            )
        if not isinstance(self.packing, str) or not is_strategy(self.packing):
            hint = nearest(str(self.packing), STRATEGIES)
            problems.append(f"packing: {self.packing!r} is none of {', '.join(STRATEGIES)}{hint}")
        for name, known in (("overlong", Overlong), ("last", Last)):
            value, options = getattr(self, name), known.__args__  # type: ignore[attr-defined]
            if value not in options:
                problems.append(
                    f"{name}: {value!r} is none of {', '.join(options)}{nearest(str(value), options)}"
                )
        if _is_whole(self.pool_size, MOST_POOL_SIZE + 1):
            problems.append(f"pool_size: {self.pool_size} is more than {MOST_POOL_SIZE}")
        if (
            _is_whole(self.block, 1)
            and _is_whole(self.pool_size, 1)
            and self.pool_size % self.block
        ):
            problems.append(f"pool_size: {self.pool_size} is not a multiple of block {self.block}")
        raise_problems(problems)

    def block_for(self, documents: int) -> int:
        """The block used for a source of so many documents."""
        if self.block:
            return self.block
        return BLOCK if documents >= BLOCKS_FROM and self.pool_size % BLOCK == 0 else 1


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
