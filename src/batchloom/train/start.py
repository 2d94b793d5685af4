"""From what was asked for to a run: which settings, which data, which folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchloom.core.spec import raise_problems
from batchloom.train.folder import RunFolder, step_of
from batchloom.train.log import RunLog, Say
from batchloom.train.loop import Outcome, train
from batchloom.train.ranks import Ranks, joined_ranks
from batchloom.train.run import set_up
from batchloom.train.settings import TrainSettings, named_config, read_config, settings_from
from batchloom.train.temporary import temporary_store

DEFAULT_MODEL = "tiny"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was asked for on the command line.

    Attributes:
        data: a store's folder or a bare Megatron prefix.
        input_file: a file or folder to prepare into a temporary store; excludes ``data``.
        tokenizer: of ``input_file``, as prepare takes it; None for its default.
        model_name: a configuration that ships with the package.
        config_file: a configuration; excludes ``model_name``.
        out: the run's folder; None for ``runs/`` and the configuration's name.
        resume: go on with the run in ``out``, by its own settings where nothing else is asked.
        stop_at: save and stop after this step.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        changes: fields of TrainSettings (and ``lr``) to set over the configuration, None for
            those that stay.
    """

    data: Path | None = None
    input_file: Path | None = None
    tokenizer: str | None = None
    model_name: str | None = None
    config_file: Path | None = None
    out: Path | None = None
    resume: bool = False
    stop_at: int | None = None
    device: str = "auto"
    changes: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problems: list[str] = []
        for pair in (("data", "input_file"), ("model_name", "config_file")):
            if all(getattr(self, name) is not None for name in pair):
                first, second = (f"--{name.replace('_', '-')}" for name in pair)
                problems.append(f"{first} and {second} exclude each other: give one")
        if self.data is None and self.input_file is None:
            problems.append(
                "--data: missing; the folder of a store (batchloom prepare makes one), or "
                "--input-file with a file to prepare in memory"
            )
        if self.tokenizer is not None and self.input_file is None:
            problems.append(
                f"--tokenizer: {self.tokenizer} goes with --input-file only; a store has its own"
            )
        if self.stop_at is not None and self.stop_at < 1:
            problems.append(f"--stop-at: {self.stop_at} is below 1, the first step")
        raise_problems(problems)

    @property
    def folder(self) -> RunFolder:
        """Where the run is written."""
        stem = self.config_file.stem if self.config_file else self.model_name or DEFAULT_MODEL
        return RunFolder(self.out or Path("runs") / stem)

    def settings(self) -> TrainSettings:
        """The configuration, with what was asked for over it.

        Raises:
            SettingsError: whatever is wrong with it, all at once.
        """
        if self.config_file is not None:
            return settings_from(read_config(self.config_file), self.changes, str(self.config_file))
        if self.resume and self.model_name is None:
            before = self.folder.read()
            before.pop("data", None)
            return settings_from(before, self.changes, "run.json")
        return settings_from(named_config(self.model_name or DEFAULT_MODEL), self.changes)


def start(request: Request, say: Say) -> Outcome:
    """Train as asked.

    Args:
        request: what was asked for.
        say: prints one line.

    Raises:
        BatchloomError: whatever prepare, the loader or the loop finds wrong.
    """
    settings = request.settings()
    with joined_ranks(request.device) as ranks, _data(request, ranks, say) as data:
        folder = request.folder
        log = RunLog(folder.log if ranks.first else None, say)
        run = set_up(data, settings, folder, ranks, log)
        return train(run, resume=request.resume, stop_at=request.stop_at)


@contextmanager
def _data(request: Request, ranks: Ranks, say: Say) -> Iterator[Path]:
    if request.input_file is None:
        yield request.data or Path()
        return
    with temporary_store(request.input_file, request.tokenizer, ranks, say) as store:
        yield store


def stopped(folder: RunFolder) -> str:
    """What to say after Ctrl-C: what is left, and how to go on."""
    if not folder.begun:
        return "Stopped before the run began; nothing was left behind."
    newest = folder.newest()
    step = step_of(newest) if newest else 0
    return (
        f"Stopped the run in {folder.path}; its newest checkpoint is of step {step}. "
        "Go on with the same command and --resume."
    )
