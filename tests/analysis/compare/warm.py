"""Examples in processes that are forked from a warm interpreter."""

import json
from pathlib import Path

from batchloom.analysis.compare import read_record
from processes import run_ranks

SCRIPT = Path(__file__).with_name("example_process.py")


def run_warm(name, job, record, processes=1):
    """Run an example as ``run_example`` does; without a launcher."""
    record.mkdir()
    Path(job["out"]).mkdir(exist_ok=True)
    # Without workers Ray trains in the process it is called in.
    asked = {**job, "workers": 0} if name == "ray-train" else job
    done = run_ranks(SCRIPT, name, record, json.dumps(asked), ranks=processes)
    failed = [one.stderr[-4000:] for one in done if one.returncode]
    assert not failed, "\n".join(failed)
    return read_record(record)
