"""DeepSpeed without the C++ operators that it compiles when it starts on CPUs."""

import os


def leave_out_operators():
    """Have DeepSpeed take torch's own operators; compiling its operator for inference takes a minute."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
