"""Which positions a rank holds: arithmetic, the same on every machine."""

from math import isqrt

from batchloom.core.errors import PlanError


def check_world(global_batch_size: int, rank: int, world_size: int) -> None:
    """Refuse a rank or a world size the batch cannot be dealt to.

    Raises:
        PlanError: names the world sizes that would fit.
    """
    if world_size < 1 or not 0 <= rank < world_size:
        raise PlanError(
            f"rank {rank} of world_size {world_size} does not exist; ranks run from 0 to world_size - 1."
        )
    if global_batch_size % world_size:
        small = [n for n in range(1, isqrt(global_batch_size) + 1) if global_batch_size % n == 0]
        fits = {*small, *(global_batch_size // n for n in small)}
        near = sorted(sorted(fits, key=lambda n: abs(n - world_size))[:6])
        below = global_batch_size // world_size * world_size
        sizes = [str(s) for s in (below, below + world_size) if s]
        raise PlanError(
            f"global_batch_size {global_batch_size} cannot be dealt evenly to {world_size} ranks. World sizes that "
            f"divide it: {', '.join(map(str, near))}; global batch sizes near it that would: {', '.join(sizes)}."
        )


def rank_positions(
    step: int, global_batch_size: int, rank: int, world_size: int
) -> tuple[int, int]:
    """First and last + 1 of the positions that a rank holds of a step."""
    share = global_batch_size // world_size
    start = step * global_batch_size + rank * share
    return start, start + share
