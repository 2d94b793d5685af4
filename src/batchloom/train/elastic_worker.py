"""One worker of an elastic run: it joins, trains its share, and may leave.

The launcher (torchrun, Ray Train) restarts all workers when their number changes. They resume from the newest
checkpoint: later steps are lost together with their weights, and their sequences are served again. Each worker
has a fixed number of rows per step, so the size of a step depends on the number of workers. A change is an edit
of ``global_batch_size`` in the journal of the run's plan, so the plan still knows the sequences of every step.
"""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import final

import batchloom
from batchloom import Edit
from batchloom.adapters.agreement import require_agreement
from batchloom.batches.loading import is_replicated
from batchloom.core.errors import TrainError
from batchloom.core.settings import as_int
from batchloom.core.wording import format_count
from batchloom.train.distributed import RankGroup, join_ranks
from batchloom.train.loop import is_due, save_run_checkpoint, train
from batchloom.train.request import require_train_packages
from batchloom.train.run import TrainRun, set_up_run
from batchloom.train.run_data import find_initial_generation
from batchloom.train.run_folder import RunFolder
from batchloom.train.train_log import PrintLine, RunLog
from batchloom.train.train_settings import TrainSettings, load_named_config, make_settings
from batchloom.train.worker_config import HUGGINGFACE_TYPE, MODEL_SIZES, LeaveEvent, WorkerConfig

# These may differ between workers: a name, and locations of the same data.
_WORKER_SETTINGS = ("worker_id", "dataset_name", "out", "device")


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """Result of a worker since it joined.

    Attributes:
        rank: rank of the worker.
        world_size: number of workers.
        first_step: number of steps done when it joined.
        step: number of steps done now.
        tokens: tokens it trained on, without padding.
        seconds: seconds of training.
        finished: whether all steps of the run are done; else the worker left, and the same command resumes.
    """

    rank: int
    world_size: int
    first_step: int
    step: int
    tokens: int
    seconds: float
    finished: bool

    @property
    def tokens_per_s(self) -> float:
        """Throughput of the worker, without padding."""
        return self.tokens / max(self.seconds, 1e-9)


def run_worker(
    config: WorkerConfig, print_line: PrintLine, leave: LeaveEvent | None = None, *, alone: bool = False
) -> WorkerReport:
    """Run one worker until the run is done or a worker leaves.

    Args:
        config: settings of the worker.
        print_line: function that prints one line.
        leave: event that, once set, makes all workers save and stop after the current step.
        alone: whether to be the only worker regardless of the environment.

    Raises:
        SettingsError, StateError: the folder holds a run with other settings or data.
        TrainError: workers have different settings, or one of them stopped.
        BatchloomError: any error of prepare, the loader or the loop.
    """
    require_train_packages()
    folder = RunFolder(config.out, prepares=config.dataset_type == HUGGINGFACE_TYPE)
    with join_ranks(config.device, alone=alone, print_line=print_line) as ranks:
        _check_same_settings(config, ranks)
        # Only rank 0 checks, because a late worker would already see the folder that rank 0 has created.
        has_run = bool(ranks.total(float(ranks.first and folder.has_run))[0])
        log = RunLog(folder.log if ranks.first else None, print_line)
        data = _prepare_run_data(config, folder, ranks, log, has_run=has_run)
        settings = _make_train_settings(config, ranks, _read_initial_batch_size(folder) if has_run else None)
        generation = find_initial_generation(data, folder, ranks, {}) if has_run else None
        run = set_up_run(data, settings, folder, ranks, log, open_options={"generation": generation})
        require_agreement(run.loader)
        session = _WorkerSession(config, run, print_line, leave or LeaveEvent())
        try:
            train(run, resume=has_run, between=session.between)
        except _WorkersStopped:
            log.print_line(
                f"A worker leaves: step {session.step} of {config.num_steps} is saved. Continue with the same command."
            )
        return session.end()


@final
class _WorkersStopped(Exception):  # noqa: N818 - it is no error
    """Exception that stops all workers because one was asked to leave."""


@final
class _WorkerSession:
    """State of a worker between joining and leaving."""

    def __init__(self, config: WorkerConfig, run: TrainRun, print_line: PrintLine, leave: LeaveEvent) -> None:
        self._config, self._run, self._print_line, self._leave = config, run, print_line, leave
        self._name = f"worker {config.worker_id} (rank {run.ranks.rank} of {run.ranks.world_size})"
        self._first: int | None = None
        self._start_time = self._seconds = 0.0
        self._tokens = self.step = 0

    def between(self, step: int) -> None:
        """Join before the first step, and count tokens after each later one.

        Every worker calls this after the same steps. If one of them was asked to leave, the step is saved and
        _WorkersStopped is raised.
        """
        run, self.step = self._run, step
        if self._first is None:
            self._join(step)
            return
        self._tokens += run.loader.tokens(step - 1)
        self._seconds = time.perf_counter() - self._start_time
        if step < run.settings.steps and run.ranks.total(float(self._leave.is_set()))[0]:
            if not is_due(step, run.settings.save_interval):
                save_run_checkpoint(run, step)
            raise _WorkersStopped

    def _join(self, step: int) -> None:
        """Adapt the step size to the current number of workers, and print it."""
        run, rows, workers = self._run, self._config.batch_size, self._run.ranks.world_size
        loader, size = run.loader, rows * workers
        previous_size = loader.plan.spec_at(step).global_batch_size
        if previous_size != size and step < run.settings.steps:
            loader.edit(Edit(step=step, global_batch_size=size, note=format_count(workers, "worker")))
            run.log.print_line(
                f"workers  {workers} now: from step {step + 1} on a step has {size} sequences instead of "
                f"{previous_size}"
            )
        self._first, self._start_time = step, time.perf_counter()
        self._leave.heeded = True
        if step >= run.settings.steps:
            return
        share = "the same on every worker" if is_replicated(loader.store) else "on this worker only"
        self._print_line(
            f"{self._name}  {rows} sequences of each step ({share}); effective global batch {size} = {rows} local x "
            f"{format_count(workers, 'worker')}; steps {step + 1} to {run.settings.steps}  {loader.origin}"
        )

    def end(self) -> WorkerReport:
        """Print the results and return the report; every worker must call this."""
        self._leave.heeded = False
        ranks, seconds = self._run.ranks, self._seconds
        first = self.step if self._first is None else self._first
        finished = self.step >= self._run.settings.steps
        report = WorkerReport(*(ranks.rank, ranks.world_size, first, self.step), *(self._tokens, seconds, finished))
        origin, steps = self._run.loader.origin, format_count(self.step - first, "step")
        self._print_line(f"{self._name}  {steps}, {report.tokens:,} tokens, {report.tokens_per_s:,.0f} tok/s  {origin}")
        total_tokens = ranks.total(float(report.tokens))[0]
        self._run.log.print_line(
            f"all {format_count(ranks.world_size, 'worker')}  {total_tokens:,.0f} tokens, "
            f"{total_tokens / max(seconds, 1e-9):,.0f} tok/s"
        )
        return report


def _check_same_settings(config: WorkerConfig, ranks: RankGroup) -> None:
    """Refuse workers with different settings, before they wait for each other.

    The TrainError names each setting, and the rank it belongs to.
    """
    settings = {name: value for name, value in asdict(config).items() if name not in _WORKER_SETTINGS}
    settings_by_rank = [json.loads(message) for message in ranks.all_gather_bytes(json.dumps(settings).encode())]
    for rank, rank_settings in enumerate(settings_by_rank):
        differences = [
            f"{name} is {settings_by_rank[0][name]!r} on rank 0 and {rank_settings[name]!r} on rank {rank}"
            for name in settings
            if settings_by_rank[0][name] != rank_settings[name]
        ]
        if differences:
            raise TrainError(
                f"The workers have different settings: {'; '.join(differences)}. Start all of them with the same "
                "options."
            )


def _prepare_run_data(
    config: WorkerConfig, folder: RunFolder, ranks: RankGroup, log: RunLog, *, has_run: bool
) -> Path | str:
    """Return the store of a run; a data set of the Hub is prepared in its folder once."""
    if config.dataset_type != HUGGINGFACE_TYPE:
        return config.data_source
    # A resumed run must not need network access.
    if not has_run:

        def prepare() -> None:
            log.print_line(f"input  {config.data_source} is prepared in {folder.data}")
            batchloom.prepare(config.data_source, out=folder.data, tokenizer=config.tokenizer_name)

        ranks.run_exclusively(prepare if ranks.first else None)
    return folder.data


def _read_initial_batch_size(folder: RunFolder) -> int:
    """Return the initial sequences per step of a run from ``run.json``."""
    value = as_int(folder.read().get("global_batch_size"))
    if value is None:
        raise folder.make_damaged_error("has no global_batch_size")
    return value


def _make_train_settings(config: WorkerConfig, ranks: RankGroup, first_batch: int | None) -> TrainSettings:
    """Return the settings of the reference trainer.

    ``first_batch`` is the initial sequences per step of an existing run, whose plan starts with it; edits follow.
    """
    changes = {
        "steps": config.num_steps,
        "seq_len": config.seq_len,
        "global_batch_size": first_batch or config.batch_size * ranks.world_size,
        "batch_size": config.batch_size,
        # Step sizes of an earlier number of workers need not divide among the current ones.
        "order": {"overlong": config.overlong, "uneven": "pad"},
        "eval_interval": 0,
        "save_interval": config.save_interval,
    }
    return make_settings(load_named_config(MODEL_SIZES[config.model_size]), changes)
