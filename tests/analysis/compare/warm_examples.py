"""Examples in processes that are forked from a warm interpreter."""

import json
from pathlib import Path

from batchloom.analysis.compare import read_record
from processes import run_ranks

MODULE = "batchloom.analysis.compare.frameworks"


def run_warm(name, job, record, processes=1):
    """Run an example like ``run_example``, without a launcher."""
    record.mkdir()
    Path(job["out"]).mkdir(exist_ok=True)
    # Without workers Ray trains in the calling process.
    settings = {**job, "workers": 0} if name == "ray-train" else job
    results = run_ranks("-m", MODULE, name, record, json.dumps(settings), "250", ranks=processes)
    failed = [result.stderr[-4000:] for result in results if result.returncode]
    assert not failed, "\n".join(failed)
    return read_record(record)
