"""Loss curves of finished runs, from whatever trainer wrote them; what a file is, is told from what it holds."""

import csv
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchloom.core.errors import InputError, InputMissingError, MissingDependencyError

# Names of the training loss, the surest first.
LOSSES = (
    *("loss", "train_loss", "train/loss", "train_loss_step", "loss_step", "train/loss_step"),
    *("training_loss", "loss/train", "Loss/train", "lm loss"),
)
_STEPS = ("step", "global_step", "iteration")
# Tokens since the beginning of a run.
_TOKENS = ("num_input_tokens_seen", "tokens_seen", "consumed_tokens")
_EVENTS = b"brain.Event:"
_SYNTHETIC = "source=synthetic"
# Lightning logs it with all that has its own count of steps, which is 0 after the first optimizer step where the other
# trainers here say 1; what has a count of the user's comes without.
_COUNTED = "epoch"
# What of a folder is its run, the first that is there; of several the newest.
_INSIDE = (
    *("log.jsonl", "trainer_state.json", "checkpoint-*/trainer_state.json", "metrics.csv"),
    *("version_*/metrics.csv", "lightning_logs/version_*/metrics.csv", "*tfevents*"),
    *("runs/*/*tfevents*", "version_*/*tfevents*", "lightning_logs/version_*/*tfevents*"),
)
_EXPECTED = (
    "Expected: a folder or log.jsonl of batchloom train, JSON lines with step and loss, trainer_state.json of the "
    "Hugging Face Trainer, a CSV file with step and loss (Lightning's CSVLogger), or event files of TensorBoard."
)
_SHOWN = 60

Point = tuple[float, float, float | None]


@dataclass(frozen=True, slots=True)
class Curve:
    """The loss of a run, step by step.

    Attributes:
        name: what was given.
        kind: what wrote it: ``batchloom``, ``jsonl``, ``trainer``, ``lightning``, ``csv`` or ``tensorboard``.
        steps: as the log counts them, those of Lightning from 1; ascending; of a step that is told of twice (a run
            that went on) the later one.
        losses: of each step.
        tokens: seen up to and with each step; None where the run does not say.
        synthetic: whether the run says that it was on made-up data; None where it says nothing of its data.
    """

    name: str
    kind: str
    steps: tuple[int, ...]
    losses: tuple[float, ...]
    tokens: tuple[float, ...] | None
    synthetic: bool | None = None


def read_run(path: str) -> Curve:
    """The loss curve of a finished run.

    Args:
        path: a file or a folder, see ``_EXPECTED``.

    Raises:
        InputMissingError: there is nothing.
        InputError: it is no such run; says what was expected.
        MissingDependencyError: event files, and tensorboard is not installed.
    """
    file = _file_of(Path(path))
    head = file.read_bytes()[:4096]
    lightning = _of_lightning(file)
    if _EVENTS in head[:200]:
        kind = "lightning" if lightning else "tensorboard"
        return _curve(path, kind, _events(file, lightning=lightning), synthetic=None)
    try:
        text = file.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{file} is no log of a run: it is no text. {_EXPECTED}") from error
    if not text.lstrip().startswith("{"):
        kind = "lightning" if lightning else "csv"
        return _curve(path, kind, _table(file, text, lightning=lightning), synthetic=None)
    state = _whole(text)
    if state is not None:
        if "log_history" not in state and not _has_loss(state):
            raise _other(file, f"an object of {_listed(state)}")
        if "log_history" in state:
            rows = [row for row in state["log_history"] if isinstance(row, dict)]
            return _curve(path, "trainer", _points(file, rows), synthetic=None)
    rows = list(_lines(file, text))
    ours = [row for row in rows if row.get("kind") == "step" and "origin" in row]
    if ours:
        made_up = any(str(row["origin"]).startswith(_SYNTHETIC) for row in ours)
        return _curve(path, "batchloom", _summed(file, ours), synthetic=made_up)
    return _curve(path, "jsonl", _points(file, rows), synthetic=None)


def _file_of(path: Path) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        raise InputMissingError(f"There is no run at {path}. {_EXPECTED}")
    for pattern in _INSIDE:
        if found := list(path.glob(pattern)):
            return max(found, key=lambda file: file.stat().st_mtime)
    raise InputError(f"{path} is a folder without a run: it has none of {', '.join(_INSIDE)}.")


def _of_lightning(file: Path) -> bool:
    """Whether it lies where Lightning's loggers write: in ``version_N``, or beside the settings they keep."""
    named = file.absolute().parent.name
    return named.startswith("version_") or file.with_name("hparams.yaml").exists()


def _other(file: Path, what: str) -> InputError:
    return InputError(f"{file} is no log of a run: it holds {what}. {_EXPECTED}")


def _listed(names: Iterable[Any]) -> str:
    shown = [str(name)[:_SHOWN] for name in names]
    return ", ".join(shown[:12]) + (" ..." if len(shown) > 12 else "") or "nothing"


def _whole(text: str) -> dict[str, Any] | None:
    """The one object that a text is; None where it is lines, or none."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None


def _lines(file: Path, text: str) -> Iterator[dict[str, Any]]:
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines) and not text.endswith("\n"):
                return  # A killed process left it unfinished.
            raise InputError(
                f"{file}, line {number} is no JSON: {error}. Delete that line; the others are read without it."
            ) from error
        if isinstance(row, dict):
            yield row


def _table(file: Path, text: str, *, lightning: bool) -> list[Point]:
    rows = list(csv.DictReader(io.StringIO(text)))
    if not rows or _name(_STEPS, rows[0]) is None:
        first = text.lstrip()[:_SHOWN].splitlines()
        raise _other(file, f"no objects and no columns step and loss; it begins {first[:1]}")
    plain: list[dict[str, Any]] = [
        {name: cell for name, cell in row.items() if name and cell} for row in rows
    ]
    if lightning:
        plain = [
            row | {"step": _number(file, row, "step") + 1} if _COUNTED in row else row
            for row in plain
        ]
    return _points(file, plain)


def _has_loss(row: Mapping[str, Any]) -> bool:
    return _name(_STEPS, row) is not None and _name(LOSSES, row) is not None


def _name(known: Sequence[str], row: Mapping[str, Any]) -> str | None:
    return next((name for name in known if name in row), None)


def _points(file: Path, rows: Sequence[Mapping[str, Any]]) -> list[Point]:
    """The points of rows of which some hold a step and a loss, by one name for all."""
    held = [row for row in rows if _name(_STEPS, row)]
    loss = next((name for name in LOSSES if any(name in row for row in held)), None)
    if loss is None:
        names = dict.fromkeys(name for row in rows for name in row)
        raise _other(file, f"rows with {_listed(names)}, and none with a step and a loss")
    return [
        (
            _number(file, row, _name(_STEPS, row) or ""),
            _number(file, row, loss),
            _number(file, row, tokens) if (tokens := _name(_TOKENS, row)) else None,
        )
        for row in held
        if loss in row
    ]


def _summed(file: Path, rows: Sequence[Mapping[str, Any]]) -> list[Point]:
    """Those of our own log, where each step has its own tokens."""
    latest = {_number(file, row, "step"): row for row in rows}
    total = 0.0
    points: list[Point] = []
    for step in sorted(latest):
        total += _number(file, latest[step], "tokens")
        points.append((step, _number(file, latest[step], "loss"), total))
    return points


def _number(file: Path, row: Mapping[str, Any], name: str) -> float:
    value = row.get(name)
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise InputError(f"{file} has {value!r:.40} for {name}, no number.") from None


def _events(file: Path, *, lightning: bool) -> list[Point]:
    try:
        from tensorboard.backend.event_processing.event_accumulator import (  # noqa: PLC0415 - slow
            EventAccumulator,
        )
    except ImportError as error:
        raise MissingDependencyError(
            f"{file} holds events of TensorBoard, and tensorboard is not installed: pip install tensorboard."
        ) from error
    events = EventAccumulator(str(file), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    tags = events.Tags()
    known = {*tags["scalars"], *tags["tensors"]}
    name = next((one for one in LOSSES if one in known), None)
    if name is None:
        raise _other(file, f"events of {_listed(sorted(known))}, and of no loss by a known name")
    counted = lightning and _COUNTED in tags["scalars"]
    own = {one.step for one in events.Scalars(_COUNTED)} if counted else set()
    found = (
        [(one.step, one.value) for one in events.Scalars(name)]
        if name in tags["scalars"]
        else [(one.step, one.tensor_proto.float_val[0]) for one in events.Tensors(name)]
    )
    return [(float(step + (step in own)), float(loss), None) for step, loss in found]


def _curve(name: str, kind: str, points: Sequence[Point], *, synthetic: bool | None) -> Curve:
    at = {step: (loss, tokens) for step, loss, tokens in points if math.isfinite(step)}
    if not at:
        raise InputError(
            f"{name} is a log without a step: nothing was trained, or it was not logged."
        )
    steps = sorted(at)
    tokens = [at[step][1] for step in steps]
    known = tuple(one for one in tokens if one is not None)
    return Curve(
        name,
        kind,
        tuple(int(step) for step in steps),
        tuple(at[step][0] for step in steps),
        known if len(known) == len(steps) else None,
        synthetic,
    )
