"""Detection of this process's rank and the world size."""

import os
import re
import sys

from batchloom.core.errors import SettingsError

# (rank, size) as set by torchrun; by srun for a job step; by Open MPI; by MPICH and Intel MPI.
# SLURM_NTASKS is not read: it is also set in a batch script, which is one process.
_RANK_VARIABLES = (
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)
_RANK_PATTERN = re.compile(r"[0-9]{1,9}")


def find_world(rank: int | None = None, world_size: int | None = None) -> tuple[int, int]:
    """Return (rank, world_size) as given, or from torch.distributed or the launcher.

    An initialised torch.distributed takes precedence over the launcher's variables. The default is rank 0 of 1.

    Raises:
        SettingsError: only one of the two is given or set, or a launcher's variables are not numbers.
    """
    if rank is not None and world_size is not None:
        return rank, world_size
    if rank is not None or world_size is not None:
        raise SettingsError([f"rank: {rank!r} and world_size: {world_size!r} go together; give both or neither"])
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank()), int(distributed.get_world_size())
    for rank_name, size_name in _RANK_VARIABLES:
        rank_text, size_text = os.environ.get(rank_name), os.environ.get(size_name)
        if rank_text is None and size_text is None:
            continue
        if rank_name != "RANK" and (rank_text is None or size_text is None):
            continue
        if (
            rank_text is None
            or size_text is None
            or not (_RANK_PATTERN.fullmatch(rank_text) and _RANK_PATTERN.fullmatch(size_text))
        ):
            variables = f"{rank_name}={rank_text!r} and {size_name}={size_text!r}"
            remedy = "set both to numbers, unset both, or give rank= and world_size="
            raise SettingsError(
                [f"rank: the environment has {variables}, which are not a rank and a world size; {remedy}"]
            )
        return int(rank_text), int(size_text)
    return 0, 1
