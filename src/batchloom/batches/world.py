"""This process's rank, where nobody gave it."""

import os
import sys

from batchloom.core.errors import PlanError

# (rank, size) as set by torchrun; by srun for a job step; by Open MPI; by MPICH and Intel MPI.
# SLURM_NTASKS is not read: it is also set in a batch script, which is one process.
_VARIABLES = (
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)


def find_world() -> tuple[int, int]:
    """(rank, world_size): from an initialised torch.distributed, then the launcher's variables.

    Without either it is rank 0 of 1.

    Raises:
        PlanError: a launcher's variables are not numbers, or only one of the two is set.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank()), int(distributed.get_world_size())
    for rank_name, size_name in _VARIABLES:
        rank, size = os.environ.get(rank_name), os.environ.get(size_name)
        if rank is None and size is None:
            continue
        if rank_name != "RANK" and (rank is None or size is None):
            continue
        if rank is None or size is None or not (rank.isdecimal() and size.isdecimal()):
            raise PlanError(
                f"The environment says {rank_name}={rank!r} and {size_name}={size!r}, which is no rank of a "
                "world. Set both to numbers, unset both, or give rank= and world_size=."
            )
        return int(rank), int(size)
    return 0, 1
