"""Loss curves of finished runs, from whatever trainer wrote them; what a file is, is told from what it holds."""

import csv
import io
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from batchloom.analysis.compare.tensorboard_events import read_events
from batchloom.core.errors import InputError, InputMissingError
from batchloom.core.settings import shown

# Names of the training loss, the surest first.
LOSSES = (
    *("loss", "train_loss", "train/loss", "train_loss_step", "loss_step", "train/loss_step"),
    *("training_loss", "loss/train", "Loss/train", "lm loss"),
)
_STEPS = ("step", "global_step", "iteration")
# Tokens since the beginning of a run.
_TOKENS = ("num_input_tokens_seen", "tokens_seen", "consumed_tokens")
# Where a row says what it is of, and what it says of an evaluation.
_OF = ("split", "mode", "phase", "kind")
_EVALUATIONS = {"eval", "evaluation", "val", "valid", "validation", "test"}
_EVALUATED = re.compile(rf"({'|'.join(sorted(_EVALUATIONS))})[_/ ]")
_EVENTS, _EVENT_FILES = b"brain.Event:", "*tfevents*"
_SYNTHETIC = "source=synthetic"
# The figure of docs/metrics.md.
_MADE_UP = "data/synthetic"
# Lightning logs it with all that has its own count of steps, which is 0 after the first optimizer step where the other
# trainers here say 1; what has a count of the user's comes without.
_COUNTED = "epoch"
# What of a folder is its run, the first that is there; of several the newest.
_INSIDE = (
    *("log.jsonl", "trainer_state.json", "checkpoint-*/trainer_state.json", "metrics.csv"),
    *("version_*/metrics.csv", "lightning_logs/version_*/metrics.csv", _EVENT_FILES),
    *("runs/*/*tfevents*", "version_*/*tfevents*", "lightning_logs/version_*/*tfevents*"),
)
_EXPECTED = (
    "Expected: a folder or log.jsonl of batchloom train, JSON lines with step and loss, trainer_state.json of the "
    "Hugging Face Trainer, a CSV file with step and loss (Lightning's CSVLogger), or event files of TensorBoard."
)
_SHOWN = 60
# Above it a float does not tell two steps apart.
_MOST_STEP = 2**53

Row = Mapping[str, Any]
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
        InputError: it is no such run, or not to be read to its end; says what was expected.
        MissingDependencyError: event files, and tensorboard is not installed.
    """
    file = _file_of(Path(path))
    head = file.read_bytes()[:4096]
    lightning = "lightning" if _of_lightning(file) else ""
    if _EVENTS in head[:200]:
        # A run that went on has begun another file in its folder; their names hold the time, and a count in a process.
        found = sorted(file.parent.glob(_EVENT_FILES), key=lambda one: _counted(one.name))
        beside = found if Path(path).is_dir() else [file]
        return _curve_of(path, lightning or "tensorboard", file, read_events(beside))
    try:
        text = file.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{file} is no log of a run: it is no text. {_EXPECTED}") from error
    if not text.lstrip().startswith("{"):
        return _curve_of(path, lightning or "csv", file, [_table(file, text)])
    state = _whole(text)
    if state is not None:
        if "log_history" not in state and not _has_loss(state):
            raise _other(file, f"an object of {_listed(state)}")
        if "log_history" in state:
            return _curve_of(path, "trainer", file, [_history(file, state["log_history"])])
    rows = list(_lines(file, text))
    ours = [row for row in rows if row.get("kind") == "step" and "origin" in row]
    if ours:
        made_up = any(str(row["origin"]).startswith(_SYNTHETIC) for row in ours)
        return _curve(path, "batchloom", _summed(file, ours), synthetic=made_up)
    return _curve_of(path, "jsonl", file, [rows])


def _counted(name: str) -> list[str | int]:
    """A name by which 10 comes after 9."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


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


def _json(text: str) -> Any:
    """What a text holds.

    Raises:
        ValueError: it is no JSON, or none that can be read: so many digits, or brackets in brackets.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("too many brackets in brackets") from error


def _whole(text: str) -> dict[str, Any] | None:
    """The one object that a text is; None where it is lines, or none."""
    try:
        found = _json(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _lines(file: Path, text: str) -> Iterator[dict[str, Any]]:
    # Not at U+2028 and such, which may stand inside a string.
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = _json(line)
        except ValueError as error:
            if number == 1 and line.strip() == "{":
                raise InputError(
                    f"{file} is one object over many lines that cannot be read to its end: it was cut off, or is "
                    "damaged. Give that of an earlier checkpoint, or copy the file anew."
                ) from error
            if number == len(lines):
                return  # A killed process left it unfinished.
            raise InputError(
                f"{file}, line {number} is no JSON: {error}. Delete that line; the others are read without it."
            ) from error
        if isinstance(row, dict):
            yield row


def _history(file: Path, told: Any) -> list[Row]:
    """The rows of a ``trainer_state.json``."""
    if not isinstance(told, list):
        raise InputError(
            f"{file} has {told!r:.40} for log_history, no list as the Trainer writes it. Give that of another "
            "checkpoint."
        )
    return [row for row in told if isinstance(row, dict)]


def _table(file: Path, text: str) -> list[Row]:
    """The rows of a CSV file, of each the cells that hold something."""
    # A cell may be as long as the file: beside the loss may stand a text.
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))
    rows = list(csv.DictReader(io.StringIO(text)))
    if not rows or _name(_STEPS, rows[0]) is None:
        first = text.lstrip()[:_SHOWN].splitlines()
        raise _other(file, f"no objects and no columns step and loss; it begins {first[:1]}")
    return [{name: cell for name, cell in row.items() if name and cell} for row in rows]


def _has_loss(row: Row) -> bool:
    return _name(_STEPS, row) is not None and any(name in row for name in LOSSES)


def _name(known: Sequence[str], row: Row) -> str | None:
    """The first of some names under which a row has something."""
    return next((name for name in known if row.get(name) is not None), None)


def _is_evaluation(row: Row) -> bool:
    """Whether a row is of an evaluation: by what it says of itself, or since that alone is what it has a number of."""
    if any(str(row.get(name)).strip().lower() in _EVALUATIONS for name in _OF):
        return True
    return _name(LOSSES, row) is None and any(
        _EVALUATED.match(name) and value is not None for name, value in row.items()
    )


def _points(file: Path, parts: Sequence[Sequence[Row]]) -> list[Point]:
    """The points of rows of which some hold a step and a loss, by one name for all.

    Args:
        file: that errors name.
        parts: rows of each file of a run.
    """
    held = [
        [row for row in rows if _name(_STEPS, row) and not _is_evaluation(row)] for rows in parts
    ]
    every = [row for rows in held for row in rows]

    def rows_with(name: str) -> tuple[int, int]:
        return sum(row.get(name) is not None for row in every), sum(name in row for row in every)

    # Of as many the surer.
    loss = max(LOSSES, key=rows_with)
    if not rows_with(loss)[1]:
        names = dict.fromkeys(name for rows in parts for row in rows for name in row)
        raise _other(file, f"rows with {_listed(names)}, and none with a step and a loss")
    found = [[_point(file, row, loss) for row in rows if loss in row] for rows in held]
    for points in found:
        _refuse_two(file, points, loss)
    return [point for points in found for point in points]


def _point(file: Path, row: Row, loss: str) -> Point:
    tokens = _name(_TOKENS, row)
    return _step(file, row), _loss(file, row, loss), _number(file, row, tokens) if tokens else None


def _refuse_two(file: Path, points: Sequence[Point], name: str) -> None:
    """Refuse two losses of a step one after the other: a run that went on has gone back before it tells again."""
    for (step, loss, _), (following, other, _) in pairwise(points):
        if step == following and loss != other and not (math.isnan(loss) and math.isnan(other)):
            raise InputError(
                f"{file} has two losses for step {step:,.0f}, {loss} and {other} for {name}, and which is the "
                "training's cannot be told. Leave the other out, or let its row say so (split: val)."
            )


def _summed(file: Path, rows: Sequence[Row]) -> list[Point]:
    """Those of our own log, where each step has its own tokens."""
    latest = {_step(file, row): row for row in rows}
    total = 0.0
    points: list[Point] = []
    for step in sorted(latest):
        total += _number(file, latest[step], "tokens")
        points.append((step, _loss(file, latest[step], "loss"), total))
    return points


def _step(file: Path, row: Row) -> float:
    name = _name(_STEPS, row) or _STEPS[0]
    step = _number(file, row, name)
    if not step.is_integer() or abs(step) > _MOST_STEP:
        raise InputError(
            f"{file} has {row.get(name)!r:.40} for {name}, no whole number: write the number of the optimizer step "
            "there."
        )
    return step


def _loss(file: Path, row: Row, name: str) -> float:
    """A loss; null is how loggers write one that is no number."""
    return math.nan if name in row and row[name] is None else _number(file, row, name)


def _number(file: Path, row: Row, name: str) -> float:
    value = row.get(name)
    if not isinstance(value, bool):
        try:
            return float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            pass
    raise InputError(
        f"{file} has {shown(value):.40} for {name}, no number. Delete its row; the others are read without it."
    )


def _made_up(file: Path, parts: Sequence[Sequence[Row]]) -> bool | None:
    """What a run says by the figure that the Meter gives for it; None where it does not."""
    told = [
        _number(file, row, _MADE_UP)
        for rows in parts
        for row in rows
        if row.get(_MADE_UP) is not None
    ]
    return any(told) if told else None


def _curve_of(name: str, kind: str, file: Path, parts: Sequence[Sequence[Row]]) -> Curve:
    if kind == "lightning":
        parts = [
            [_from_one(file, row) if _COUNTED in row else row for row in rows] for rows in parts
        ]
    return _curve(name, kind, _points(file, parts), synthetic=_made_up(file, parts))


def _from_one(file: Path, row: Row) -> Row:
    name = _name(_STEPS, row)
    return {**row, name: _step(file, row) + 1} if name else row


def _curve(name: str, kind: str, points: Sequence[Point], *, synthetic: bool | None) -> Curve:
    at = {step: (loss, tokens) for step, loss, tokens in points}
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
