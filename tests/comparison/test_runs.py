"""Logs of finished runs, recognised from what they hold."""

import json
import math

import pytest

from batchloom.cli.main import run
from batchloom.comparison.against import beside, near
from batchloom.comparison.runs import read_run
from batchloom.comparison.told import rows_of, sentences_of
from batchloom.core.errors import InputError, InputMissingError
from batchloom.testing.stores import write_store


def jsonl(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_run_of_batchloom_train(tmp_path):
    store = write_store(tmp_path / "s", [[n % 250 for n in range(40)] for _ in range(50)])
    words = ["--seq-len", "32", "--global-batch-size", "4", "--batch-size", "4", "--max-iters", "2"]
    for data, name in ((str(store.path), "a"), ("distributed_dummy:vocab=300", "b")):
        assert run(["train", "--data", data, "--out", str(tmp_path / name), *words]) == 0
    one, other = (read_run(str(tmp_path / name)) for name in "ab")
    assert (one.kind, one.steps, one.synthetic) == ("batchloom", (1, 2), False)
    assert one.tokens[1] > one.tokens[0] > 0
    assert other.synthetic is True


def test_json_lines_of_anybody(tmp_path):
    rows = [{"step": 10, "loss": 3.5}, {"step": 20, "eval_loss": 3.0}, {"step": 20, "loss": 3.25}]
    # What went on from step 10 once more, and a line that was never finished.
    file = jsonl(tmp_path / "x.log", [*rows, {"step": 20, "loss": 3.125}])
    with open(file, "a") as more:
        more.write('{"step": 30, "lo')
    curve = read_run(file)
    assert (curve.kind, curve.steps, curve.losses) == ("jsonl", (10, 20), (3.5, 3.125))
    assert (curve.tokens, curve.synthetic) == (None, None)


def test_the_state_of_the_hugging_face_trainer(tmp_path):
    from transformers import TrainerState

    history = [
        {"step": 1, "loss": 4.5, "num_input_tokens_seen": 64},
        {"step": 1, "eval_loss": 4.0},
        {"step": 2, "loss": 4.25, "num_input_tokens_seen": 128},
        {"step": 2, "train_loss": 4.4, "train_runtime": 1.0},
    ]
    folder = tmp_path / "out" / "checkpoint-2"
    folder.mkdir(parents=True)
    TrainerState(log_history=history).save_to_json(str(folder / "trainer_state.json"))
    curve = read_run(str(tmp_path / "out"))
    assert (curve.kind, curve.losses, curve.tokens) == ("trainer", (4.5, 4.25), (64.0, 128.0))


def test_the_csv_of_lightning(tmp_path):
    loggers = pytest.importorskip("lightning.pytorch.loggers")
    logger = loggers.CSVLogger(str(tmp_path), name="", version="version_0")
    for step in (0, 1, 2):
        logger.log_metrics({"train_loss": 3.0 - step}, step=step)
        logger.log_metrics({"val_loss": 3.0}, step=step)
    logger.save()
    curve = read_run(str(tmp_path))
    assert (curve.kind, curve.steps, curve.losses) == ("lightning", (0, 1, 2), (3.0, 2.0, 1.0))


@pytest.mark.filterwarnings("ignore")
def test_steps_that_lightning_counts_from_0_are_counted_as_others_count_them(tmp_path):
    """Its own trainer, with both of its loggers: the loss of the first optimizer step is that of step 1."""
    torch = pytest.importorskip("torch")
    lightning = pytest.importorskip("lightning.pytorch")

    class Counts(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def training_step(self, batch, number):
            loss = self.weight.sum() * 0 + batch.sum()
            self.log("train_loss", loss)
            # By a count of his own, and no epoch beside it.
            self.loggers[0].log_metrics({"train/loss": 0.5}, step=number + 10)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    loggers = [
        lightning.loggers.CSVLogger(tmp_path, name="csv"),
        lightning.loggers.TensorBoardLogger(tmp_path, name="events"),
    ]
    trainer = lightning.Trainer(
        max_steps=6,
        accelerator="cpu",
        logger=loggers,
        log_every_n_steps=2,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Counts(), torch.utils.data.DataLoader(torch.arange(1.0, 9.0), batch_size=1))
    for name in ("csv", "events"):
        curve = read_run(str(tmp_path / name))
        assert (curve.kind, curve.steps) == ("lightning", (2, 4, 6))
        assert curve.losses == (2.0, 4.0, 6.0)
    # What was logged by hand has the count that it was given.
    own = tmp_path / "csv" / "version_0" / "metrics.csv"
    own.write_text(own.read_text().replace("train_loss", "other"))
    assert read_run(str(own)).steps == tuple(range(10, 16))
    elsewhere = tmp_path / "steps.csv"
    elsewhere.write_text("epoch,step,loss\n0,0,3.0\n0,1,2.0\n")
    assert (read_run(str(elsewhere)).kind, read_run(str(elsewhere)).steps) == ("csv", (0, 1))


def test_events_of_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    for scalars in (True, False):
        folder = tmp_path / str(scalars)
        with SummaryWriter(str(folder)) as writer:
            for step in (1, 2):
                writer.add_scalar("train/loss", 2.5 / step, step, new_style=not scalars)
        curve = read_run(str(folder))
        assert (curve.kind, curve.steps, curve.losses) == ("tensorboard", (1, 2), (2.5, 1.25))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "it begins []"),
        (b"hello there\nyou\n", "it begins ['hello there']"),
        (b"epoch,loss\n1,2\n", "it begins ['epoch,loss']"),
        (b"step,accuracy\n1,2\n", "rows with step, accuracy, and none with a step and a loss"),
        (b'{"a": 1, "b": 2}', "an object of a, b"),
        (b'{"step": 1, "acc": 2}\n{"step": 2}\n', "rows with step, acc"),
        (b"\x89PNG\r\n\x1a\n\xff", "it is no text"),
        (b'{"step": 1, "loss": "low"}\n{"step": 2, "loss": 1}\n', "has 'low' for loss, no number"),
        (b'{"step": 1,\n{"step": 2, "loss": 1}\n', "line 1 is no JSON"),
    ],
)
def test_what_is_no_log_is_told_what_was_expected(tmp_path, content, said):
    file = tmp_path / "x"
    file.write_bytes(content)
    with pytest.raises(InputError) as error:
        read_run(str(file))
    assert said in str(error.value)
    assert "no number" in said or "no JSON" in said or "Expected: a folder or" in str(error.value)


def test_there_is_none(tmp_path):
    with pytest.raises(InputMissingError, match="There is no run at"):
        read_run(str(tmp_path / "gone"))
    with pytest.raises(InputError, match="a folder without a run: it has none of log.jsonl"):
        read_run(str(tmp_path))


def made(tmp_path, name, losses, tokens=None, first=1):
    rows = [
        {"step": first + n, "loss": loss} | ({"tokens_seen": tokens * (n + 1)} if tokens else {})
        for n, loss in enumerate(losses)
    ]
    return read_run(jsonl(tmp_path / name, rows))


def test_runs_stand_beside_each_other_by_step_or_tokens(tmp_path):
    short = made(tmp_path, "a", [4.0, 3.0, 2.0], tokens=10)
    long = made(tmp_path, "b", [4.0, 3.5, 3.0, 2.5, 2.0, 1.5], tokens=5)
    by_step, by_tokens = (beside([short, long], by) for by in ("step", "tokens"))
    assert (by_step.until, by_tokens.until) == (3, 30)
    assert [one.at_common for one in by_step.runs] == [3.0, 3.5]
    assert [one.at_common for one in by_tokens.runs] == [3.0, 2.75]
    assert by_step.agree
    late = beside([short, made(tmp_path, "c", [1.0, 0.5], first=7)])
    assert (late.runs[1].at_common, late.runs[1].common) == (None, 0)
    assert [row[3] for row in rows_of(late)] == ["3.0000", "begins later"]
    lost = beside([short, made(tmp_path, "d", [math.nan] * 3)])
    assert [row[3] for row in rows_of(lost)] == ["3.0000", "nan"]
    strict = beside([short, long], tolerance=0.1)
    assert [one.first_apart for one in strict.runs] == [None, 2]
    assert not strict.agree
    strangers = beside([short, made(tmp_path, "e", [4.0, 3.0], first=9)], tolerance=0.1)
    assert not strangers.agree
    assert any("no step in common with" in said for said in sentences_of(strangers))


@pytest.mark.parametrize(
    ("loss", "reference", "agrees"),
    [
        (1.0, 1.0, True),
        (1.00009, 1.0, True),
        (1.0002, 1.0, False),
        (float("nan"), 1.0, False),
        (float("nan"), float("nan"), False),
        (float("inf"), float("inf"), False),
    ],
)
def test_losses_that_are_near(loss, reference, agrees):
    assert near(loss, reference, 1e-4) == agrees
