"""Layout of a training run's folder, which the trainer writes and reports read."""

import re
from pathlib import Path

# File of a checkpoint with the state of its loader.
STATE_NAME = "state.json"
_CHECKPOINT_NAME = re.compile(r"step_\d{8,}")


class RunFiles:
    """Paths in the folder of a run.

    Attributes:
        path: the folder.
        description: JSON file of the run's settings; a folder with it is a run.
        data: store of a run that prepares its data.
        log: log with one JSON object per line: settings, every step, every evaluation.
        curve: plot of the loss.
        edits: folder of edit requests.
        model: finetuned model of the newest checkpoint.
        checkpoints: folder of the checkpoints.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.description = path / "run.json"
        self.data = path / "data"
        self.log = path / "log.jsonl"
        self.curve = path / "loss.png"
        self.edits = path / "edits"
        self.model = path / "model"
        self.checkpoints = path / "checkpoints"

    def name_checkpoint(self, step: int) -> Path:
        """Return the folder of the checkpoint after a number of steps."""
        return self.checkpoints / f"step_{step:08d}"

    def list_checkpoints(self) -> list[Path]:
        """Return the complete checkpoints, oldest first."""
        checkpoints = [path for path in self.checkpoints.glob("step_*") if is_checkpoint(path)]
        return sorted(checkpoints, key=read_checkpoint_step)

    def find_newest_checkpoint(self) -> Path | None:
        """Return the checkpoint of the highest step; None without any."""
        checkpoints = self.list_checkpoints()
        return checkpoints[-1] if checkpoints else None


def is_checkpoint(path: Path) -> bool:
    """Return whether a path has the name of a checkpoint."""
    return _CHECKPOINT_NAME.fullmatch(path.name) is not None


def read_checkpoint_step(checkpoint: Path) -> int:
    """Return the number of steps done before a checkpoint, read from its name."""
    return int(checkpoint.name.removeprefix("step_"))


def get_run_folder(checkpoint: Path) -> Path:
    """Return the folder of the run of a checkpoint."""
    return checkpoint.parent.parent
