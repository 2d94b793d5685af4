"""One worker of an elastic run: it joins, trains its share, and may leave.

The launcher (torchrun, Ray Train) restarts all workers when their number changes. They resume from the newest
checkpoint: later steps are lost together with their weights, and their sequences are served again. Each worker
has a fixed number of rows per step, so the size of a step depends on the number of workers. A change is an edit
of ``global_batch_size`` in the journal of the run's plan, so the plan still knows the sequences of every step.
"""

import time
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import batchloom
from batchloom import Edit
from batchloom.adapters.agreement import find_disagreement
from batchloom.adapters.rank_group import RankGroup, join_ranks
from batchloom.batches.loading import is_replicated
from batchloom.core.errors import TrainError
from batchloom.core.synthetic_data import SYNTHETIC, SYNTHETIC_NAMES
from batchloom.core.wording import format_count
from batchloom.train.loop import check_steps, is_due, iter_training, save_run_checkpoint
from batchloom.train.request import MODEL_SIZES, LeaveEvent, WorkerConfig, require_train_packages
from batchloom.train.run import TrainRun, set_up_run
from batchloom.train.run_data import open_source
from batchloom.train.run_folder import PrintLine, RunFolder, RunLog
from batchloom.train.train_settings import TrainSettings, load_named_config, make_settings

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
        source: ``real``, or ``synthetic`` for made-up tokens.
    """

    rank: int
    world_size: int
    first_step: int
    step: int
    tokens: int
    seconds: float
    finished: bool
    source: str = "real"

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
    folder = RunFolder(config.out, prepares=config.dataset_type == "huggingface")
    with join_ranks(config.device, alone=alone, print_line=print_line) as ranks:
        # Workers with different settings would wait for each other.
        shared_settings = {name: value for name, value in asdict(config).items() if name not in _WORKER_SETTINGS}
        description = {"place": [ranks.rank, ranks.world_size], "equal": shared_settings}
        problem = find_disagreement(
            ranks.all_gather(description),
            problem="The workers have different settings",
            remedy="Start all of them with the same options.",
        )
        if problem is not None:
            raise TrainError(problem)
        # Only rank 0 checks, because a late worker would already see the folder that rank 0 has created.
        has_run = bool(ranks.total(float(ranks.first and folder.has_run))[0])
        log = RunLog(folder.log if ranks.first else None, print_line)
        if _get_source(config) == SYNTHETIC:
            log.print_line("synthetic data (source=synthetic): dataset_type huggingface or store reads real data")
        data = _prepare_run_data(config, folder, ranks, log, has_run=has_run)
        size = config.batch_size * ranks.world_size
        if has_run:
            # The settings of a run have its initial step size; changes are edits of its plan.
            size = folder.read_settings().global_batch_size
            check_steps(folder, config.num_steps, option="--num-steps")
        settings = _make_train_settings(config, size)
        source = open_source(data, folder, ranks, resume=has_run)
        run = set_up_run(source, settings, folder, ranks, log)
        leave = leave or LeaveEvent()
        tokens = 0
        seconds = 0.0
        with closing(iter_training(run, resume=has_run)) as steps:
            first_step = step = next(steps)
            start_time = time.perf_counter()
            _adapt_batch_size(config, run, first_step, print_line)
            leave.heeded = True
            for step in steps:
                tokens += run.loader.tokens(step - 1)
                seconds = time.perf_counter() - start_time
                # If one worker was asked to leave, all of them save this step and stop.
                if step < settings.steps and ranks.total(float(leave.is_set()))[0]:
                    if not is_due(step, settings.save_interval):
                        save_run_checkpoint(run, step)
                    log.print_line(
                        f"A worker leaves: {step} of {settings.steps} steps are saved. Continue with the same command."
                    )
                    break
        leave.heeded = False
        report = WorkerReport(
            rank=ranks.rank,
            world_size=ranks.world_size,
            first_step=first_step,
            step=step,
            tokens=tokens,
            seconds=seconds,
            finished=step >= settings.steps,
            source=_get_source(config),
        )
        _print_report(config, run, report, print_line)
        return report


def _adapt_batch_size(config: WorkerConfig, run: TrainRun, step: int, print_line: PrintLine) -> None:
    """Adapt the step size to the current number of workers, and print it."""
    rows = config.batch_size
    workers = run.ranks.world_size
    loader = run.loader
    size = rows * workers
    previous_size = loader.plan.spec_at(step).global_batch_size
    if step >= run.settings.steps:
        return
    if previous_size != size:
        loader.edit(Edit(step=step, global_batch_size=size, note=format_count(workers, "worker")))
        run.log.print_line(
            f"workers  {workers} now: from step {step} on a step has {size} sequences instead of {previous_size}"
        )
    share = "the same on every worker" if is_replicated(loader.store) else "on this worker only"
    print_line(
        f"{_describe_worker(config, run.ranks)}  {rows} sequences of each step ({share}); effective global batch "
        f"{size} = {rows} local x {format_count(workers, 'worker')}; steps {step} to {run.settings.steps - 1}  "
        f"{loader.origin}"
    )


def _print_report(config: WorkerConfig, run: TrainRun, report: WorkerReport, print_line: PrintLine) -> None:
    """Print the tokens and throughput of this worker, and on rank 0 those of all."""
    print_line(
        f"{_describe_worker(config, run.ranks)}  {format_count(report.step - report.first_step, 'step')}, "
        f"{report.tokens:,} tokens, {report.tokens_per_s:,.0f} tok/s  {run.loader.origin}"
    )
    total_tokens = run.ranks.total(float(report.tokens))[0]
    run.log.print_line(
        f"all {format_count(report.world_size, 'worker')}  {total_tokens:,.0f} tokens, "
        f"{total_tokens / max(report.seconds, 1e-9):,.0f} tok/s"
    )


def _get_source(config: WorkerConfig) -> str:
    return SYNTHETIC if config.dataset_type in SYNTHETIC_NAMES else "real"


def _describe_worker(config: WorkerConfig, ranks: RankGroup) -> str:
    return f"worker {config.worker_id} (rank {ranks.rank} of {ranks.world_size})"


def _prepare_run_data(
    config: WorkerConfig, folder: RunFolder, ranks: RankGroup, log: RunLog, *, has_run: bool
) -> Path | str:
    """Return the store of a run; a data set of the Hub is prepared in its folder once."""
    if config.dataset_type != "huggingface":
        return config.data_source
    # A resumed run must not need network access.
    if not has_run:

        def prepare() -> None:
            log.print_line(f"input  {config.data_source} is prepared in {folder.data}")
            batchloom.prepare(config.data_source, out=folder.data, tokenizer=config.tokenizer_name, for_loader=True)

        ranks.run_exclusively(prepare if ranks.first else None)
    return folder.data


def _make_train_settings(config: WorkerConfig, global_batch_size: int) -> TrainSettings:
    changes = {
        "steps": config.num_steps,
        "seq_len": config.seq_len,
        "global_batch_size": global_batch_size,
        "batch_size": config.batch_size,
        # Step sizes of an earlier number of workers need not divide among the current ones.
        "order": {"overlong": config.overlong, "uneven": "pad"},
        "eval_interval": 0,
        "save_interval": config.save_interval,
    }
    return make_settings(load_named_config(MODEL_SIZES[config.model_size]), changes)
