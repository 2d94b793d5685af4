"""Folder of a run: its settings, log and checkpoints.

``run.json`` describes the run; ``run.lock`` is held by the process that writes here; ``edits/`` has the edit
requests of the running job; ``log.jsonl`` has one object per line; ``loss.png`` is drawn from it;
``checkpoints/step_00000040/`` is one of the two newest checkpoints; ``model/`` is a finetuned model in
transformers' format. They are written to a temporary name, synced and renamed, so a file with its final name is
complete.
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

from batchloom.adapters.checkpoints import replace_folder
from batchloom.core.errors import OutputError, StateError, StoreConflictError, TrainError
from batchloom.core.files import PARTIAL_SUFFIX, lock_exclusively
from batchloom.train.checkpoint import read_checkpoint_state, read_checkpoint_step, write_checkpoint, write_state
from batchloom.train.json_files import MAX_RUN_FILE_BYTES, read_json_object, write_json

RETAINED_CHECKPOINTS = 2
_LOG = logging.getLogger("batchloom")
_CHECKPOINT_NAME = re.compile(r"step_\d{8,}")


def is_checkpoint(path: Path) -> bool:
    return _CHECKPOINT_NAME.fullmatch(path.name) is not None


@final
class RunFolder:
    """Files of one run.

    Args:
        path: the folder.
        prepares: whether the run prepares its data in the folder, which may then hold data before the run.

    Attributes:
        path: the folder.
        data: store of a run that prepares its data.
        log: log with one JSON object per line: settings, every step, every evaluation.
        curve: plot of the loss.
        edits: folder of edit requests.
        model: finetuned model of the newest checkpoint.
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
        """True if the folder holds a run."""
        with self._wrap_errors():
            return self._run.is_file()

    def check_new(self) -> None:
        """Refuse to start a run in a folder that is not empty.

        Raises:
            TrainError: the folder holds a run, or anything else.
            OutputError: the folder cannot be read.
        """
        if self.has_run:
            newest = self.find_newest_checkpoint()
            progress_note = f"up to step {read_checkpoint_step(newest)}" if newest else "without a checkpoint yet"
            raise TrainError(
                f"{self.path} holds a run already ({progress_note}). Continue it with --resume, or start another "
                "run: --out with another folder."
            )
        with self._wrap_errors():
            is_occupied = self.path.exists() and (
                not self.path.is_dir() or any(path.name not in self._own_names for path in self.path.iterdir())
            )
        if is_occupied:
            raise TrainError(f"{self.path} is not an empty folder and holds no run. Give --out a new folder.")

    def read(self) -> dict[str, Any]:
        """Return the description that :meth:`begin` wrote.

        Raises:
            TrainError: there is no run in the folder.
            StateError: ``run.json`` is damaged.
        """
        if not self.has_run:
            raise TrainError(
                f"--resume: {self.path} holds no run. Give --out the folder of a run, or leave out --resume to start "
                "one there."
            )
        try:
            return read_json_object(self._run, MAX_RUN_FILE_BYTES)
        except ValueError as error:
            raise self.make_damaged_error(str(error)) from error

    def read_settings(self) -> dict[str, Any]:
        """Return the plain settings of the run, without the identity of data and model."""
        return {name: value for name, value in self.read().items() if name not in ("data", "init")}

    def make_damaged_error(self, fault: str) -> StateError:
        """Return the error for a ``run.json`` that does not describe a run."""
        return StateError(
            f"{self._run} {fault}. Copy the value of run from the last line of kind start in {self.log.name} into "
            "it, or start another run: --out with another folder."
        )

    def begin(self, run: dict[str, Any]) -> None:
        """Write the description of the run, and create its folder if needed.

        Raises:
            OutputError: it cannot be written.
        """
        with self._wrap_errors():
            self._checkpoints.mkdir(parents=True, exist_ok=True)
            write_json(self._run, run)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the lock of the folder until the context or the process ends.

        Raises:
            StoreConflictError: another process holds it; names it.
            TrainError: the folder holds something other than a run.
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
                    f"{self.path} is in use by {self.read_holder()}, and two processes would write over each other's "
                    "checkpoints. Wait until it ends, or stop it; for another run give another --out."
                ),
                ended=f"{self._lock} was just deleted or replaced; run the command again.",
            )
        except StoreConflictError:
            raise
        except OSError as error:
            _LOG.warning(
                "%s cannot be locked (%s), so batchloom cannot detect another process that trains this run. Two "
                "such processes overwrite each other's checkpoints. An edit of a training run goes into a "
                "checkpoint that the run never reads again, and is lost with its next one: stop a run before you "
                "edit it.",
                self.path,
                error.strerror,
            )
        with self._wrap_errors():
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())

    def is_locked(self) -> bool:
        """Return whether another process trains or edits the run, without writing.

        The result relies on file locks, which some file systems lack.
        """
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
        """Return the name of the process that holds the folder, or held it last."""
        try:
            return self._lock.read_text("utf-8", "replace") or "another process"
        except OSError:
            return "another process"

    def find_newest_checkpoint(self) -> Path | None:
        """Return the checkpoint of the highest step; None without any."""
        checkpoints = self._list_finished_checkpoints()
        return checkpoints[-1] if checkpoints else None

    def _list_finished_checkpoints(self) -> list[Path]:
        checkpoints = (p for p in self._checkpoints.glob("step_*") if _CHECKPOINT_NAME.fullmatch(p.name))
        return sorted(checkpoints, key=read_checkpoint_step)

    @contextmanager
    def _wrap_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OutputError(
                f"{self.path} cannot be written: {error.strerror}. Give --out a writable folder, on a disk with free "
                "space."
            ) from error

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, loader: dict[str, Any]) -> Path:
        """Write the checkpoint after ``step``, then delete all but the newest two.

        Raises:
            OutputError: it cannot be written; older checkpoints are kept.
        """
        path = self._checkpoints / f"step_{step:08d}"
        try:
            self._clear_partial()
            with replace_folder(path) as partial_folder:
                write_checkpoint(partial_folder, step, model, optimizer, loader)
            for old in self._list_finished_checkpoints()[:-RETAINED_CHECKPOINTS]:
                # Rename before deleting, so that a folder with its final name is complete at every moment.
                old.rename(old.with_suffix(PARTIAL_SUFFIX))
        except (OSError, SafetensorError) as error:
            raise OutputError(
                f"The checkpoint of step {step} cannot be written to {path}: {error}. Make room or fix the folder, "
                "then continue from the checkpoint before it with --resume."
            ) from error
        finally:
            self._clear_partial()
        return path

    def save_edits(self, loader: dict[str, Any]) -> None:
        """Write a loader's state with later edits into the newest checkpoint, if any.

        Raises:
            StateError: the checkpoint is damaged.
            OutputError: it cannot be written, and is unchanged.
        """
        newest = self.find_newest_checkpoint()
        if newest is None:
            return
        step, _, checksums = read_checkpoint_state(newest)
        with self._wrap_errors():
            write_state(newest, step, loader, checksums)

    def write_model(self, write: Callable[[Path], None]) -> None:
        """Replace ``model/`` by the files that ``write`` creates in an empty folder.

        Raises:
            OutputError: it cannot be written.
        """
        try:
            with replace_folder(self.model) as partial_folder:
                write(partial_folder)
        except (OSError, SafetensorError) as error:
            raise OutputError(
                f"The model cannot be written to {self.model}: {error}. Make room or fix the folder; --resume writes "
                "it again."
            ) from error

    def _clear_partial(self) -> None:
        for partial in list(self._checkpoints.glob(f"*{PARTIAL_SUFFIX}")):
            shutil.rmtree(partial, ignore_errors=True)
