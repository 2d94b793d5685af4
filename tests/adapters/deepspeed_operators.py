"""DeepSpeed without the C++ operators that it compiles at start on CPUs."""

import os


def leave_out_operators():
    """Make DeepSpeed use torch's operators; compiling its own takes a minute."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
