"""The folder of a run: its settings, its log, its checkpoints.

``run.json`` says what the run is; ``run.lock`` is held by the process that writes here; ``edits/`` has the
edits that were handed to a run while it trained; ``log.jsonl`` has one object a line; ``loss.png`` is drawn
from it; ``checkpoints/step_00000040/`` is one of the two newest checkpoints; ``model/`` is a
finetuned model as transformers loads it. They are written aside, synced and renamed: what has
its name is whole.
"""

import fcntl
import logging
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import torch
from safetensors import SafetensorError
from torch import nn

from batchloom.core.errors import OutputError, StateError, StoreConflictError, TrainError
from batchloom.core.locks import lock_exclusively
from batchloom.train.checkpoint import (
    PARTIAL_SUFFIX,
    fsync_path,
    read_checkpoint_state,
    read_checkpoint_step,
    write_checkpoint,
    write_json,
    write_state,
)
from batchloom.train.json_files import MAX_RUN_FILE_BYTES, read_json_object

RETAINED_CHECKPOINTS = 2
_LOG = logging.getLogger("batchloom")
_CHECKPOINT_NAME = re.compile(r"step_\d{8,}")


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is called as a checkpoint of a run is."""
    return _CHECKPOINT_NAME.fullmatch(path.name) is not None


@final
class RunFolder:
    """The files of one run.

    Args:
        path: the folder.
        prepares: whether the run prepares its data in it, so that it may hold data before the run.

    Attributes:
        path: the folder.
        data: the store of a run that prepares its data.
        log: one JSON object a line: what was trained on, every step, every look at val.
        curve: the loss curve.
        edits: requests of edits, made while the run trained.
        model: a finetuned model as of the newest checkpoint.
    """

    def __init__(self, path: Path, *, prepares: bool = False) -> None:
        self.path = path
        self.data = path / "data"
        self.edits = path / "edits"
        self._lock = path / "run.lock"
        self._own_names = {self._lock.name, *([self.data.name] if prepares else [])}
        self.log = path / "log.jsonl"
        self.curve = path / "loss.png"
        self.model = path / "model"
        self._run = path / "run.json"
        self._checkpoints = path / "checkpoints"

    @property
    def has_run(self) -> bool:
        """Whether the folder holds a run."""
        with self._wrap_errors():
            return self._run.is_file()

    def check_new(self) -> None:
        """Refuse to start a run where something lies already.

        Raises:
            TrainError: the folder holds a run, or anything else.
            OutputError: the folder cannot be looked into.
        """
        if self.has_run:
            newest = self.find_newest_checkpoint()
            progress_note = f"up to step {read_checkpoint_step(newest)}" if newest else "without a checkpoint yet"
            raise TrainError(
                f"{self.path} holds a run already ({progress_note}). Go on with it: --resume; "
                "or start another one: --out with another folder."
            )
        with self._wrap_errors():
            is_occupied = self.path.exists() and (
                not self.path.is_dir() or any(path.name not in self._own_names for path in self.path.iterdir())
            )
        if is_occupied:
            raise TrainError(f"{self.path} is not an empty folder and holds no run. Give --out a new folder.")

    def read(self) -> dict[str, Any]:
        """What ``begin`` wrote.

        Raises:
            TrainError: there is no run here.
            StateError: ``run.json`` is damaged.
        """
        if not self.has_run:
            raise TrainError(
                f"--resume: {self.path} holds no run. Give --out the folder of a run, "
                "or leave --resume away to start one there."
            )
        try:
            return read_json_object(self._run, MAX_RUN_FILE_BYTES)
        except ValueError as error:
            raise self.make_damaged_error(str(error)) from error

    def make_damaged_error(self, fault: str) -> StateError:
        """The error for a ``run.json`` that does not say what the run is."""
        return StateError(
            f"{self._run} {fault}. Write into it what the last line of kind start in "
            f"{self.log.name} has under run, or start another run: --out with another folder."
        )

    def begin(self, run: dict[str, Any]) -> None:
        """Write what the run is, and make its folder where there is none.

        Raises:
            OutputError: it cannot be written.
        """
        with self._wrap_errors():
            self._checkpoints.mkdir(parents=True, exist_ok=True)
            write_json(self._run, run)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Be the one process that writes in the folder: until the end of this, or of the process.

        Raises:
            StoreConflictError: another one is; names it.
            TrainError: the folder holds something else than a run.
            OutputError: it cannot be written.
        """
        if not self.has_run:
            self.check_new()
        with self._wrap_errors():
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            self._acquire_lock(descriptor)
            yield
        finally:
            os.close(descriptor)

    def _acquire_lock(self, descriptor: int) -> None:
        try:
            lock_exclusively(
                descriptor,
                self._lock,
                busy=lambda: (
                    f"{self.path} is in use by {self.read_holder()}, and two would write over each other's "
                    "checkpoints. "
                    "Wait until it ends, or stop it; for another run give another --out."
                ),
                ended=f"{self._lock} was just deleted or replaced; give the command again.",
            )
        except StoreConflictError:
            raise
        except OSError as error:
            _LOG.warning(
                "%s cannot be locked (%s), and nothing tells whether another process trains this run. Two that train "
                "write over each other's checkpoints. An edit of a run that trains goes into a checkpoint which that "
                "run never reads again, and is lost with its next one: stop a run to edit it.",
                self.path,
                error.strerror,
            )
        with self._wrap_errors():
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())

    def is_locked(self) -> bool:
        """Whether another process trains or edits the run, as far as locks tell; nothing is written."""
        try:
            descriptor = os.open(self._lock, os.O_RDONLY)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            return isinstance(error, BlockingIOError)
        finally:
            os.close(descriptor)
        return False

    def read_holder(self) -> str:
        """Which process holds the folder, or held it last."""
        try:
            return self._lock.read_text("utf-8", "replace") or "another process"
        except OSError:
            return "another process"

    def find_newest_checkpoint(self) -> Path | None:
        """The checkpoint of the highest step, None before the first."""
        checkpoints = self._list_finished_checkpoints()
        return checkpoints[-1] if checkpoints else None

    def _list_finished_checkpoints(self) -> list[Path]:
        """Checkpoints that have their name, by step."""
        checkpoints = (p for p in self._checkpoints.glob("step_*") if _CHECKPOINT_NAME.fullmatch(p.name))
        return sorted(checkpoints, key=read_checkpoint_step)

    @contextmanager
    def _wrap_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OutputError(
                f"{self.path} cannot be written: {error.strerror}. Give --out a folder you may "
                "write to, on a disk with room."
            ) from error

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, loader: dict[str, Any]) -> Path:
        """Write the checkpoint after ``step``, then delete all but the newest two.

        Raises:
            OutputError: it cannot be written; older checkpoints stay.
        """
        path = self._checkpoints / f"step_{step:08d}"
        partial_path = path.with_suffix(PARTIAL_SUFFIX)
        try:
            self._clear_partial()
            partial_path.mkdir(parents=True)
            write_checkpoint(partial_path, step, model, optimizer, loader)
            partial_path.rename(path)
            fsync_path(self._checkpoints)
            for old in self._list_finished_checkpoints()[:-RETAINED_CHECKPOINTS]:
                # What has its name is whole at every moment, also while it is deleted.
                old.rename(old.with_suffix(PARTIAL_SUFFIX))
        except (OSError, SafetensorError) as error:
            raise OutputError(
                f"The checkpoint of step {step} cannot be written to {path}: {error}. Make room or "
                "mend the folder, then go on from the checkpoint before it with --resume."
            ) from error
        finally:
            self._clear_partial()
        return path

    def save_edits(self, loader: dict[str, Any]) -> None:
        """Have the newest checkpoint, where there is one, hold a loader's state with edits that came after it.

        Raises:
            StateError: the checkpoint is damaged.
            OutputError: it cannot be written, and stays as it was.
        """
        newest = self.find_newest_checkpoint()
        if newest is None:
            return
        step, _, checksums = read_checkpoint_state(newest)
        with self._wrap_errors():
            write_state(newest, step, loader, checksums)

    def write_model(self, write: Callable[[Path], None]) -> None:
        """Replace ``model/`` by what ``write`` puts into an empty folder.

        Raises:
            OutputError: it cannot be written.
        """
        partial_path, old = (
            self.path / f"model{PARTIAL_SUFFIX}",
            self.path / f"model.old{PARTIAL_SUFFIX}",
        )
        try:
            for folder in (partial_path, old):
                shutil.rmtree(folder, ignore_errors=True)
            partial_path.mkdir()
            write(partial_path)
            for file in (*partial_path.iterdir(), partial_path):
                fsync_path(file)
            if self.model.exists():
                self.model.rename(old)
            partial_path.rename(self.model)
            fsync_path(self.path)
        except (OSError, SafetensorError) as error:
            raise OutputError(
                f"The model cannot be written to {self.model}: {error}. Make room or mend the folder; "
                "--resume writes it again."
            ) from error
        finally:
            for folder in (partial_path, old):
                shutil.rmtree(folder, ignore_errors=True)

    def _clear_partial(self) -> None:
        for partial in list(self._checkpoints.glob(f"*{PARTIAL_SUFFIX}")):
            shutil.rmtree(partial, ignore_errors=True)
