"""One process of an example, with a witness at its model.

``python -m batchloom.analysis.compare.example_process NAME RECORD JOB``

RECORD is a folder, where each rank leaves ``rank_N.json`` when it ends; JOB the settings of an
``examples.job.Job`` as a JSON object.
"""

import json
import sys
from contextlib import nullcontext
from pathlib import Path

from batchloom import open_store
from batchloom.analysis.compare.frameworks import find_framework, import_example
from batchloom.analysis.compare.witness import WitnessRecorder
from batchloom.examples.job import Job, tiny_model


def run_example_process(name: str, record: str, asked: str) -> None:
    """Run the example and leave the record, whatever ends it."""
    recording, framework = WitnessRecorder(Path(record)), find_framework(name)
    job = Job(**json.loads(asked), tell=recording.tell, within=recording.within)
    model = tiny_model(open_store(job.data), job.seed)
    here = framework.started_by == "torchrun"
    with recording.within(model) if here else nullcontext():
        import_example(framework).train(model, job)


if __name__ == "__main__":
    run_example_process(*sys.argv[1:])
