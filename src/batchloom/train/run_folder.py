"""Folder of a run: its settings, log and checkpoints.

``run.json`` describes the run; ``run.lock`` is held by the process that writes here; ``edits/`` has the edit
requests of the running job; ``log.jsonl`` has one object per line; ``loss.png`` is drawn from it;
``checkpoints/step_00000040/`` is one of the two newest checkpoints; ``model/`` is a finetuned model in
transformers' format. They are written to a temporary name, synced and renamed, so a file with its final name is
complete.

A checkpoint has weights, AdamW's moments and a position; no file is a pickle. Its ``state.json`` holds the step, the
loader's state, the XXH3-128 of the two other files, which are read only if it matches, and ``check``, the fingerprint
of all this. There is no state of random generators: the data order is the plan's, the model has no dropout, and only
the initial weights are random.
"""

import fcntl
import hashlib
import json
import logging
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn, final

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from batchloom.adapters.checkpoints import replace_folder
from batchloom.adapters.logging import read_log
from batchloom.core.errors import OutputError, SettingsError, StateError, StoreConflictError, TrainError
from batchloom.core.files import (
    PARTIAL_SUFFIX,
    lock_exclusively,
    read_json_object,
    replace_file,
    sync_path,
    wrap_os_errors,
)
from batchloom.core.fingerprint import fingerprint
from batchloom.core.report_output import escape_plot_text, save_figure
from batchloom.core.run_files import STATE_NAME, RunFiles, read_checkpoint_step
from batchloom.core.wording import format_list
from batchloom.train.train_settings import TrainSettings, make_settings

_ADAM_STATE_KEYS = ("step", "exp_avg", "exp_avg_sq")
_MODEL_FILE = "model.safetensors"
_OPTIMIZER_FILE = "optimizer.safetensors"
RETAINED_CHECKPOINTS = 2
_LOG = logging.getLogger("batchloom")
PrintLine = Callable[[str], None]
MAX_LISTED = 6


@final
class RunFolder(RunFiles):
    """Files of one run, as the trainer writes them.

    Args:
        path: the folder.
        prepares: whether the run prepares its data in the folder, which may then hold data before the run.

    Methods that write raise OutputError if they cannot.

    Attributes:
        is_data_temporary: whether the data are deleted with the process that reads them.
    """

    def __init__(self, path: Path, *, prepares: bool = False) -> None:
        super().__init__(path)
        self._lock = path / "run.lock"
        self._own_paths = {self._lock, self.data} if prepares else {self._lock}
        self.is_data_temporary = False

    @property
    def has_run(self) -> bool:
        """True if the folder holds a run."""
        with wrap_os_errors("read", self.path):
            return self.description.is_file()

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
        with wrap_os_errors("write", self.path):
            is_occupied = self.path.exists() and (
                not self.path.is_dir() or any(path not in self._own_paths for path in self.path.iterdir())
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
            return read_json_object(self.description, None)
        except ValueError as error:
            raise self._make_damaged_error(str(error)) from error

    def read_settings(self) -> TrainSettings:
        """Return the settings of the run; raises as :meth:`read` does."""
        plain = {name: value for name, value in self.read().items() if name not in ("data", "init")}
        try:
            return make_settings(plain, {})
        except SettingsError as error:
            raise self._make_damaged_error(f"does not hold the settings of a run ({error})") from error

    def _make_damaged_error(self, fault: str) -> StateError:
        return StateError(
            f"{self.description} {fault}. Copy the value of run from the last line of kind start in {self.log.name} "
            "into it, or start another run: --out with another folder."
        )

    def begin(self, run: dict[str, Any]) -> None:
        """Write the description of the run, and create its folder if needed."""
        with wrap_os_errors("write", self.path):
            self.checkpoints.mkdir(parents=True, exist_ok=True)
        write_json(self.description, run)

    def withdraw(self) -> None:
        """Remove what :meth:`begin` and the log wrote, unless a step was trained.

        The same command then starts the run again.
        """
        with suppress(OSError):
            with self.log.open("rb") as file:
                # After the line that describes the run, each step has one.
                if len(list(islice(file, 2))) > 1:
                    return
            self.checkpoints.rmdir()
            self.log.unlink()
            self.description.unlink()

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the lock of the folder until the context or the process ends.

        Raises:
            StoreConflictError: another process holds it; names it.
            TrainError: the folder holds something other than a run.
        """
        if not self.has_run:
            self.check_new()
        with wrap_os_errors("write", self.path):
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
                "%s cannot be locked (%s), so batchloom cannot detect another process that trains this run: stop the "
                "run before you resume or edit it.",
                self.path,
                error.strerror,
            )
        with wrap_os_errors("write", self.path):
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

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, loader: dict[str, Any]) -> Path:
        """Write the checkpoint after ``step``, then delete all but the newest two."""
        path = self.name_checkpoint(step)
        self._clear_partial()
        try:
            with wrap_tensor_errors(path):
                with replace_folder(path) as partial_folder:
                    write_checkpoint(partial_folder, step, model, optimizer, loader)
                for old in self.list_checkpoints()[:-RETAINED_CHECKPOINTS]:
                    # Rename before deleting, so that a folder with its final name is complete at every moment.
                    shutil.rmtree(old.rename(old.with_suffix(PARTIAL_SUFFIX)), ignore_errors=True)
        finally:
            # Ctrl-C may have interrupted the deletion.
            self._clear_partial()
        return path

    def _clear_partial(self) -> None:
        for partial in list(self.checkpoints.glob(f"*{PARTIAL_SUFFIX}")):
            shutil.rmtree(partial, ignore_errors=True)

    def save_edits(self, loader: dict[str, Any]) -> None:
        """Write a loader's state with later edits into the newest checkpoint, if any."""
        newest = self.find_newest_checkpoint()
        if newest is None:
            return
        step, _, checksums = read_checkpoint_state(newest)
        write_state(newest, step, loader, checksums)

    def write_model(self, write: Callable[[Path], None]) -> None:
        """Replace ``model/`` by the files that ``write`` creates in an empty folder."""
        with wrap_tensor_errors(self.model), replace_folder(self.model) as partial_folder:
            write(partial_folder)


def write_checkpoint(
    folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, loader: dict[str, Any]
) -> None:
    """Write the files of a checkpoint into an empty folder."""
    save_file(_collect_weights(model), folder / _MODEL_FILE)
    moments = {name: moment.contiguous() for name, moment in _collect_moments(model, optimizer).items()}
    save_file(moments, folder / _OPTIMIZER_FILE)
    checksums = {name: _compute_checksum(folder / name) for name in (_MODEL_FILE, _OPTIMIZER_FILE)}
    write_state(folder, step, loader, checksums)


def write_state(folder: Path, step: int, loader: dict[str, Any], checksums: dict[str, Any]) -> None:
    """Replace ``state.json`` of a checkpoint."""
    state = {"step": step, "loader": loader, "checksums": checksums}
    write_json(folder / STATE_NAME, {**state, "check": fingerprint(state)})


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, dict[str, Any]]:
    """Load model and optimizer from a checkpoint; return its step and loader state.

    A damaged checkpoint raises StateError and leaves both unchanged.
    """
    step, loader, checksums = read_checkpoint_state(path)
    weights = _read_tensors(path / _MODEL_FILE, checksums, _collect_weights(model))
    tensors = _read_tensors(path / _OPTIMIZER_FILE, checksums, _collect_moments(model, optimizer))
    # Shared weights are stored under the first of their names, and loading it fills all of them.
    model.load_state_dict(weights, strict=False)
    names = {id(weight): name for name, weight in model.named_parameters()}
    optimizer_names = [names[id(weight)] for group in optimizer.param_groups for weight in group["params"]]
    moments = {
        number: {moment: tensors[f"{moment}.{name}"] for moment in _ADAM_STATE_KEYS}
        for number, name in enumerate(optimizer_names)
    }
    optimizer.load_state_dict({**optimizer.state_dict(), "state": moments})
    return step, loader


def raise_damaged_file(file: Path, fault: object) -> NoReturn:
    """Raise StateError for a damaged file of a checkpoint, with a remedy."""
    raise StateError(
        f"The checkpoint cannot be used: {file} {fault}. Delete the folder {file.parent}; --resume then continues "
        "from the checkpoint before it, or from the start if there is none."
    )


def read_checkpoint_state(path: Path) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Return the step, the loader's state and the checksums of a checkpoint.

    The other files are not read.

    Raises:
        StateError: ``state.json`` is damaged or was changed by hand.
    """
    file = path / STATE_NAME
    try:
        state = read_json_object(file, None)
        is_intact = state.pop("check", None) == fingerprint(state)
    except ValueError as error:
        raise_damaged_file(file, error)
    step, loader, checksums = (state.get(name) for name in ("step", "loader", "checksums"))
    if not (is_intact and isinstance(loader, dict) and isinstance(checksums, dict)):
        raise_damaged_file(
            file,
            "was changed after it was written: its check does not match its fields (to add edits, use batchloom edit)",
        )
    if step != read_checkpoint_step(path):
        raise_damaged_file(file, f"says step {step!r} and is in the folder {path.name}")
    return read_checkpoint_step(path), loader, checksums


def _read_tensors(file: Path, checksums: dict[str, Any], expected_tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Load the tensors of a file after checking checksum, names, shapes and dtypes."""
    try:
        checksum = _compute_checksum(file)
        if checksum != checksums.get(file.name):
            fault = f"has the checksum {checksum}, {STATE_NAME} says {checksums.get(file.name)!r:.40}"
            raise_damaged_file(file, f"{fault}: its bytes changed after they were written")
        tensors = load_file(file)
    except OSError as error:
        raise_damaged_file(file, f"cannot be read: {error.strerror or error}")
    except SafetensorError as error:
        raise_damaged_file(file, f"is not a safetensors file: {error}")
    for name in sorted({*tensors, *expected_tensors}):
        actual, expected = (_describe_tensor(group.get(name)) for group in (tensors, expected_tensors))
        if actual != expected:
            raise_damaged_file(file, f"has {actual} for {name}, the model has {expected}")
    return tensors


def _describe_tensor(tensor: Tensor | None) -> str:
    if tensor is None:
        return "nothing"
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _compute_checksum(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, xxhash.xxh3_128).hexdigest()


def _collect_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model; shared tensors appear under their first name."""
    first_names: dict[int, str] = {}
    return {
        name: tensor
        for name, tensor in model.state_dict(keep_vars=True).items()
        if first_names.setdefault(id(tensor), name) == name
    }


def _collect_moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return AdamW's moments by the name of their weight: ``exp_avg.layers.0...``.

    A weight without a gradient so far (an expert that was never selected) has AdamW's initial values, in tensors that
    take no memory.
    """
    return {
        f"{moment}.{name}": optimizer.state[weight][moment]
        if weight in optimizer.state
        else torch.zeros(()).expand(() if moment == "step" else weight.shape)
        for name, weight in model.named_parameters()
        for moment in _ADAM_STATE_KEYS
    }


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Replace a file by a JSON object that is on disk when this returns."""
    with replace_file(path) as partial_path:
        partial_path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")
        sync_path(partial_path)
    sync_path(path.parent)


@contextmanager
def wrap_tensor_errors(path: Path) -> Iterator[None]:
    """Turn errors of writing a checkpoint or a model into an OutputError."""
    with wrap_os_errors("write", path):
        try:
            yield
        except SafetensorError as error:
            # safetensors reports a full disk in this way.
            raise OutputError(f"Cannot write {path}: {error}. Free some space, then continue with --resume.") from error


@final
class RunLog:
    """Writer of ``log.jsonl`` that also prints a summary of each entry.

    Args:
        path: path of the log; None on ranks without output.
        print_line: function that prints one line.
        print_every: interval of printed step lines (every step is logged).

    Attributes:
        mark: suffix of every printed line, which marks synthetic data.
    """

    mark = ""

    def __init__(self, path: Path | None, print_line: PrintLine, print_every: int = 1) -> None:
        self._path = path
        self._print_line = print_line
        self._print_every = print_every

    @property
    def is_enabled(self) -> bool:
        """True on the rank that logs and prints."""
        return self._path is not None

    def print_line(self, line: str) -> None:
        """Print a line that is not logged."""
        if self._path is not None:
            self._print_line(line if "source=" in line else line + self.mark)

    def write(self, entry: dict[str, Any]) -> None:
        """Append one object to the log."""
        if self._path is None:
            return
        with wrap_os_errors("write", self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def step(self, entry: dict[str, Any], steps: int) -> None:
        """Log a step and print its loss, speed, padding and data wait."""
        self.write({"kind": "step", **entry})
        step = entry["step"]
        if step % self._print_every == 0 or step == steps - 1:
            uneven = f"  imbalance {entry['imbalance']:.3f}" if "imbalance" in entry else ""
            self.print_line(
                f"step {step:>{len(str(steps))}}/{steps}  loss {entry['loss']:.4f}  "
                f"lr {entry['lr']:.2e}  {entry['tokens_per_s']:,.0f} tok/s  "
                f"trained {entry['trained_share']:.2%}  padding {entry['padding']:.2%}  "
                f"data wait {entry['data_wait']:.2%}{uneven}"
            )

    def val(self, step: int, steps: int, loss: float, origin: str, sources: dict[str, float]) -> None:
        """Log and print the val loss, and for a mixture the loss of each source."""
        entry: dict[str, Any] = {"kind": "val", "step": step, "loss": loss, "origin": origin}
        self.write({**entry, "sources": sources} if sources else entry)
        source_losses = [f"{name} {source_loss:.4f}" for name, source_loss in sources.items()]
        source_note = f"  ({format_list(source_losses, MAX_LISTED)})" if source_losses else ""
        self.print_line(f"step {step:>{len(str(steps))}}/{steps}  val loss {loss:.4f}{source_note}")


def draw_loss_curve(log: Path, png: Path, title: str) -> None:
    """Plot the losses of a log against the step; OutputError if it cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # A loss that is not finite is null.
    entries = [entry for entry in read_log(log) if entry.get("loss") is not None]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for kind, style, label in (("step", "-", "train"), ("val", "o-", "val")):
        points = [(entry["step"], entry["loss"]) for entry in entries if entry.get("kind") == kind]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label, linewidth=1, markersize=4)
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=escape_plot_text(title))
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(figure, png)
