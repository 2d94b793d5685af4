"""One process of an example: ``example_process.py NAME RECORD JOB SECONDS``.

The arguments are those of ``batchloom.analysis.compare.example_process``.
"""

import runpy
import sys

from adapters.deepspeed_operators import leave_out_operators

if __name__ == "__main__":
    if sys.argv[1] == "deepspeed":
        leave_out_operators()
    runpy.run_module("batchloom.analysis.compare.example_process", run_name="__main__", alter_sys=True)
