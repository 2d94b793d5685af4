"""The asynchronous worker: a live event loop, stops at a step, and errors."""

import asyncio

import pytest

from batchloom.compat import WorkerClient, WorkerConfig
from batchloom.core.errors import StoreMissingError, TrainError
from batchloom.core.run_files import read_checkpoint_step
from batchloom.train import RunFolder


def make_config(tmp_path, **changes):
    settings = {"dataset_name": "vocab=300", "num_steps": 10**6, "device": "cpu", "batch_size": 1}
    settings |= {"out": tmp_path / "run", "save_interval": 0, **changes}
    return WorkerConfig("w", **{"dataset_type": "distributed_dummy", **settings})


async def train_until_a_step(client, lines):
    """Train until a step is logged, counting turns of the event loop; then stop."""
    await client.start()
    training, beats = asyncio.create_task(client.run_training(use_distributed=False)), 0
    while not any(line.startswith("step ") and "loss" in line for line in lines):
        await asyncio.sleep(0.01)
        beats += 1
    with pytest.raises(TrainError, match="is already training"):
        await client.run_training(use_distributed=False)
    await client.stop()
    assert training.done()
    return await training, beats


@pytest.mark.slow
def test_it_stops_at_a_step_and_goes_on(tmp_path):
    lines = []
    client = WorkerClient(make_config(tmp_path), lines.append)
    report, beats = asyncio.run(train_until_a_step(client, lines))
    assert beats > 2
    assert not report.finished
    assert report.step >= 1
    assert read_checkpoint_step(RunFolder(tmp_path / "run").find_newest_checkpoint()) == report.step
    last = WorkerClient(make_config(tmp_path, num_steps=report.step + 2), lines.append)

    async def finish():
        await last.start()
        return await last.run_training(use_distributed=False)

    after = asyncio.run(finish())
    assert (after.first_step, after.step, after.finished) == (report.step, report.step + 2, True)


def test_errors_are_raised_to_the_caller(tmp_path):
    missing_store = make_config(tmp_path, dataset_type="store", dataset_name=str(tmp_path / "nothing"))

    async def begin(*, started):
        client = WorkerClient(missing_store)
        if started:
            await client.start()
        try:
            await client.run_training(use_distributed=False)
        finally:
            await client.stop()

    with pytest.raises(TrainError, match="was not started: await start"):
        asyncio.run(begin(started=False))
    with pytest.raises(StoreMissingError, match="nothing"):
        asyncio.run(begin(started=True))


def test_a_wait_that_is_cancelled_leaves_a_checkpoint(tmp_path):
    lines = []
    client = WorkerClient(make_config(tmp_path), lines.append)

    async def cancel_training():
        await client.start()
        training = asyncio.create_task(client.run_training(use_distributed=False))
        while not any("loss" in line for line in lines):
            await asyncio.sleep(0.01)
        training.cancel()
        with pytest.raises(asyncio.CancelledError):
            await training

    asyncio.run(cancel_training())
    assert RunFolder(tmp_path / "run").find_newest_checkpoint() is not None
