"""``python -m batchloom.comparison.process NAME RECORD JOB``: one process of an example, with a witness at its model.

RECORD is a folder, where each rank leaves ``rank_N.json`` when it ends; JOB the settings of an
``examples.job.Job`` as a JSON object.
"""

import json
import os
import sys
from pathlib import Path

from batchloom import open_store
from batchloom.comparison.frameworks import by_name, example_of
from batchloom.comparison.witness import Witness
from batchloom.examples.job import Job, tiny_model


def main(name: str, record: str, asked: str) -> None:
    """Run the example and leave the record, whatever ends it."""
    losses: list[tuple[int, float]] = []
    job = Job(**json.loads(asked), tell=lambda step, loss: losses.append((step, loss)))
    model = tiny_model(open_store(job.data), job.seed)
    witness = Witness(model)
    rank, fault = int(os.environ.get("RANK", "0")), None
    try:
        example_of(by_name(name)).train(model, job)
    except BaseException as error:
        # A launcher says that a rank failed, and not why.
        fault = f"{type(error).__name__}: {error}"
        raise
    finally:
        told = {"rank": rank, "steps": witness.end(), "losses": losses, "fault": fault}
        # Another rank's failure may end this one in the middle of it.
        aside = Path(record) / f"rank_{rank}.partial"
        aside.write_text(json.dumps(told))
        aside.rename(aside.with_suffix(".json"))


if __name__ == "__main__":
    main(*sys.argv[1:])
