"""The folder of a run: its settings, its log, its checkpoints. Nothing in it is a pickle.

``run.json`` says what the run is; ``log.jsonl`` has one object a line; ``loss.png`` is drawn
from it; ``checkpoints/step_00000040/`` holds ``model.safetensors``, ``optimizer.safetensors``
and ``state.json``. A checkpoint is written aside, synced and renamed: one that has its name
is whole. There is no state of random generators: the order of the data is the plan's, the
model has no dropout, and only the first weights are drawn.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any, final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from batchloom.core.errors import OutputError, StateError, TrainError

KEPT = 2
_PARTIAL = ".partial"
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


@final
class RunFolder:
    """The files of one run.

    Attributes:
        path: the folder.
        log: one JSON object a line: what was trained on, every step, every look at val.
        curve: the loss curve.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log = path / "log.jsonl"
        self.curve = path / "loss.png"
        self._run = path / "run.json"
        self._checkpoints = path / "checkpoints"

    @property
    def begun(self) -> bool:
        """Whether the folder holds a run."""
        return self._run.is_file()

    def check_new(self) -> None:
        """Refuse to start a run where something lies already.

        Raises:
            TrainError: the folder holds a run, or anything else.
        """
        if self.begun:
            newest = self.newest()
            done = f"up to step {step_of(newest)}" if newest else "without a checkpoint yet"
            raise TrainError(
                f"{self.path} holds a run already ({done}). Go on with it: --resume; "
                "or start another one: --out with another folder."
            )
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise TrainError(
                f"{self.path} is not an empty folder and holds no run. Give --out a new folder."
            )

    def read(self) -> dict[str, Any]:
        """What ``begin`` wrote.

        Raises:
            TrainError: there is no run here.
            StateError: ``run.json`` is damaged.
        """
        if not self.begun:
            raise TrainError(
                f"--resume: {self.path} holds no run. Give --out the folder of a run, "
                "or leave --resume away to start one there."
            )
        return _read_json(self._run)

    def begin(self, run: dict[str, Any]) -> None:
        """Write what the run is, and make its folder where there is none."""
        try:
            self._checkpoints.mkdir(parents=True, exist_ok=True)
            _write_json(self._run, run)
        except OSError as error:
            raise OutputError(
                f"{self.path} cannot be written: {error.strerror}. Give --out a folder you may "
                "write to, on a disk with room."
            ) from error

    def newest(self) -> Path | None:
        """The checkpoint of the highest step, None before the first."""
        found = sorted(p for p in self._checkpoints.glob("step_*") if p.suffix != _PARTIAL)
        return found[-1] if found else None

    def save(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, loader: dict[str, Any]
    ) -> Path:
        """Write the checkpoint after ``step``, then delete all but the newest two.

        Raises:
            OutputError: it cannot be written; older checkpoints stay.
        """
        path = self._checkpoints / f"step_{step:08d}"
        aside = path.with_suffix(_PARTIAL)
        try:
            self._clear_partial()
            aside.mkdir(parents=True)
            save_file(model.state_dict(), aside / "model.safetensors")
            save_file(_optimizer_tensors(model, optimizer), aside / "optimizer.safetensors")
            _write_json(aside / "state.json", {"step": step, "loader": loader})
            for file in (*aside.iterdir(), aside):
                _sync(file)
            aside.rename(path)
            _sync(self._checkpoints)
            for old in sorted(self._checkpoints.glob("step_*"))[:-KEPT]:
                # What has its name is whole at every moment, also while it is deleted.
                old.rename(old.with_suffix(_PARTIAL))
        except (OSError, SafetensorError) as error:
            raise OutputError(
                f"The checkpoint of step {step} cannot be written to {path}: {error}. Make room or "
                "mend the folder, then go on from the checkpoint before it with --resume."
            ) from error
        finally:
            self._clear_partial()
        return path

    def _clear_partial(self) -> None:
        for partial in list(self._checkpoints.glob(f"*{_PARTIAL}")):
            shutil.rmtree(partial, ignore_errors=True)


def load_checkpoint(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[int, dict[str, Any]]:
    """Fill model and optimizer from a checkpoint.

    Returns:
        The step it was taken after, and the loader's state there.

    Raises:
        StateError: a file is damaged, or of another model.
    """
    state = _read_json(path / "state.json")
    try:
        model.load_state_dict(load_file(path / "model.safetensors"))
        _fill_optimizer(model, optimizer, load_file(path / "optimizer.safetensors"))
        return int(state["step"]), dict(state["loader"])
    except (OSError, SafetensorError, KeyError, RuntimeError) as error:
        raise StateError(
            f"The checkpoint {path} is damaged ({str(error).splitlines()[0]}). Delete this folder; "
            "--resume then goes on from the checkpoint before it."
        ) from error


def step_of(checkpoint: Path) -> int:
    """The step a checkpoint was taken after."""
    return int(checkpoint.name.removeprefix("step_"))


def _optimizer_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    """AdamW's moments by the name of their weight: ``exp_avg.layers.0...``."""
    return {
        f"{moment}.{name}": optimizer.state[weight][moment]
        for name, weight in model.named_parameters()
        for moment in _MOMENTS
    }


def _fill_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]
) -> None:
    numbers = {
        id(weight): number
        for number, weight in enumerate(
            weight for group in optimizer.param_groups for weight in group["params"]
        )
    }
    moments = {
        numbers[id(weight)]: {moment: tensors[f"{moment}.{name}"] for moment in _MOMENTS}
        for name, weight in model.named_parameters()
    }
    plain = optimizer.state_dict()
    optimizer.load_state_dict({**plain, "state": moments})


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise StateError(f"{path} cannot be read: {error}. The run cannot go on.") from error


def _write_json(path: Path, value: dict[str, Any]) -> None:
    aside = path.with_name(path.name + _PARTIAL)
    aside.write_text(json.dumps(value, indent=2) + "\n", "utf-8")
    _sync(aside)
    aside.rename(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
