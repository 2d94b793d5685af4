"""One process of an example, with a witness at its model.

``python -m batchloom.analysis.compare.example_process NAME RECORD JOB SECONDS``

RECORD is the folder in which each rank writes ``rank_N.json`` when it ends; JOB is the settings of an
``examples.job.Job`` as a JSON object. After SECONDS the launcher kills the process.
"""

import faulthandler
import json
import sys
from contextlib import nullcontext
from pathlib import Path

from batchloom import open_store
from batchloom.analysis.compare.frameworks import find_framework, import_example
from batchloom.analysis.compare.witness import WitnessRecorder
from batchloom.examples.job import Job, tiny_model


def run_example_process(name: str, record: str, job_settings: str, seconds: str) -> None:
    """Run the example and write the record, even if the example fails.

    After three quarters of its time it writes the stacks of its threads, which show where it hangs.
    """
    faulthandler.dump_traceback_later(0.75 * float(seconds))
    recorder, framework = WitnessRecorder(Path(record)), find_framework(name)
    job = Job(**json.loads(job_settings), tell=recorder.record_loss, within=recorder.observe)
    model = tiny_model(open_store(job.data), job.seed)
    is_rank_process = framework.started_by == "torchrun"
    with recorder.observe(model) if is_rank_process else nullcontext():
        import_example(framework).train(model, job)


if __name__ == "__main__":
    run_example_process(*sys.argv[1:])
