import json

import pytest

from batchloom import OutputError
from batchloom.adapters.logging import (
    read_log,
    send_to_all,
    send_to_jsonl,
    send_to_tensorboard,
    send_to_wandb,
)

METRICS = {"perf/tokens_per_s": 1234.5, "data/web/epoch": 0.25, "data/synthetic": 0.0}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_reads_what_was_sent(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer:
        send = send_to_tensorboard(writer)
        send(METRICS, 10)
        send({**METRICS, "data/web/epoch": 0.5}, 20)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) == set(METRICS)
    assert [(e.step, e.value) for e in events.Scalars("data/web/epoch")] == [(10, 0.25), (20, 0.5)]


class Run:
    """W&B run as documented: ``run.log(data, step=None)`` with a dict ``data``."""

    def __init__(self):
        self.logged = []

    def log(self, data, step=None):
        assert type(data) is dict
        self.logged.append((step, data))


def test_several_loggers_get_the_same_and_lines_survive_a_kill(tmp_path):
    run, file = Run(), tmp_path / "run" / "metrics.jsonl"
    send = send_to_all(send_to_wandb(run), send_to_jsonl(file))
    send(METRICS, 1)
    with file.open("a") as out:
        out.write('{"step": 2, "perf/tok')  # a process was killed here
    send(METRICS, 3)
    assert [step for step, _ in run.logged] == [1, 3]
    lines = file.read_text().splitlines()
    assert len(lines) == 3
    assert [json.loads(lines[n]) for n in (0, 2)] == [{"step": n, **METRICS} for n in (1, 3)]


def test_lines_are_json_whatever_a_metric_is(tmp_path):
    metrics = {"loss": float("nan"), "rate": float("inf"), "step": 99.0, "share": 0.5}
    send_to_jsonl(tmp_path / "a")(metrics, 7)
    line = json.loads((tmp_path / "a").read_text(), parse_constant=pytest.fail)
    assert line == {"step": 7, "loss": None, "rate": None, "share": 0.5}
    assert read_log(tmp_path / "a") == [line]


def test_a_file_that_cannot_be_written(tmp_path):
    with pytest.raises(OutputError, match="Is a directory. Free space or name another file"):
        send_to_jsonl(tmp_path)(METRICS, 1)
