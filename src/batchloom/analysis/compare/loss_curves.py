"""Loss curves of finished runs: their logs, verdicts and comparison."""

import csv
import io
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import InputError, InputMissingError
from batchloom.core.settings import quote_value, raise_problems

# Names of the training loss, the most reliable first.
LOSS_NAMES = (
    "loss",
    "train_loss",
    "train/loss",
    "train_loss_step",
    "loss_step",
    "train/loss_step",
    "training_loss",
    "loss/train",
    "Loss/train",
    "lm loss",
)
_STEP_NAMES = ("step", "global_step", "iteration")
# Names of the number of tokens since the start of a run.
_TOKEN_NAMES = ("num_input_tokens_seen", "tokens_seen", "consumed_tokens")
# Columns that name the split of a row, and the values that mark an evaluation.
_SPLIT_COLUMNS = ("split", "mode", "phase", "kind")
_EVALUATION_NAMES = {"eval", "evaluation", "val", "valid", "validation", "test"}
_EVALUATION_PREFIX = re.compile(rf"({'|'.join(sorted(_EVALUATION_NAMES))})[_/ ]")
_SYNTHETIC_LABEL = "source=synthetic"
# The metric of docs/reference/metrics.md.
_SYNTHETIC_METRIC = "data/synthetic"
# Log files of a run folder: the first pattern that matches is used, and its newest file.
_LOG_FILE_PATTERNS = ("log.jsonl", "metrics.csv", "version_*/metrics.csv", "lightning_logs/version_*/metrics.csv")
# Files whose error says how to convert them.
_CONVERTIBLE_PATTERNS = ("trainer_state.json", "checkpoint-*/trainer_state.json")
_EXPECTED = (
    "Expected: a folder or log.jsonl of batchloom train, or JSON lines or a CSV file with step and loss, as "
    "TensorBoard exports them."
)
_MAX_NAME_CHARACTERS = 60
# The first line of a log of batchloom holds all settings of its run.
_HEAD_BYTES = 1 << 16
# Above this a float cannot represent consecutive steps.
_MAX_STEP = 2**53

LogRow = Mapping[str, Any]
LossPoint = tuple[float, float, float | None]


@dataclass(frozen=True, slots=True)
class LossCurve:
    """Loss of a run by step.

    Attributes:
        name: path as it was given.
        kind: format of the log: ``batchloom``, ``jsonl`` or ``csv``.
        steps: steps from 0, ascending. Logs of unknown trainers count as they do. Of a step that occurs twice (a
            resumed run) the later entry is used.
        losses: loss of each step.
        tokens: cumulative tokens, including each step; None if the run does not record them.
        synthetic: whether the run used synthetic data; None if it does not record that.
    """

    name: str
    kind: str
    steps: tuple[int, ...]
    losses: tuple[float, ...]
    tokens: tuple[float, ...] | None
    synthetic: bool | None = None


def read_loss_curve(path: str) -> LossCurve:
    """Read the loss curve of a finished run.

    Args:
        path: log file or run folder, see ``_EXPECTED``.

    Raises:
        InputMissingError: the path does not exist.
        InputError: it is not a run log, or is damaged; lists the expected formats.
    """
    file = find_log_file(Path(path))
    try:
        text = file.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{file} is not the log of a run: it is not text. {_EXPECTED}") from error
    if not text.lstrip().startswith("{"):
        return _make_curve_from_rows(path, "csv", file, _read_csv_rows(file, text))
    try:
        state = json.loads(text)
    except (ValueError, RecursionError):
        state = None
    if isinstance(state, dict):
        if "log_history" in state:
            raise InputError(
                f"{file} is the state of the Hugging Face Trainer. Write its log as JSON lines, with steps from 0: "
                f"jq -c '.log_history[] | .step -= 1' {file} > log.jsonl"
            )
        if _find_first_name(_STEP_NAMES, state) is None or not any(name in state for name in LOSS_NAMES):
            raise _unreadable_log_error(file, f"an object of {_format_names(state)}")
    rows = list(_iter_json_lines(file, text))
    own_rows = [row for row in rows if row.get("kind") == "step" and "origin" in row]
    if own_rows:
        is_synthetic = any(str(row["origin"]).startswith(_SYNTHETIC_LABEL) for row in own_rows)
        return _make_curve(path, "batchloom", _collect_own_log_points(file, own_rows), synthetic=is_synthetic)
    return _make_curve_from_rows(path, "jsonl", file, rows)


def is_run_log(path: str) -> bool:
    """Return whether a local path is the log of a run, or a folder with one.

    A JSON or CSV file that may hold records counts only if its first lines hold a step and a loss.
    """
    try:
        file = find_log_file(Path(path))
    except (InputError, InputMissingError):
        return False
    with file.open("rb") as opened:
        head = opened.read(_HEAD_BYTES)
    first = head.decode("utf-8", "replace").lstrip("\ufeff").split("\n")[0]
    if not first.startswith("{"):
        names = {name.strip() for name in first.split(",")}
        return bool(names & {*_STEP_NAMES}) and bool(names & {*LOSS_NAMES})
    try:
        row = json.loads(first)
    except (ValueError, RecursionError):
        return False
    is_own = row.get("kind") == "start" and "run" in row
    return is_own or (_find_first_name(_STEP_NAMES, row) is not None and any(name in row for name in LOSS_NAMES))


def find_log_file(path: Path) -> Path:
    """Return the log of a run's folder, or the file itself.

    Raises:
        InputMissingError: the path does not exist.
        InputError: the folder holds no log.
    """
    if path.is_file():
        return path
    if not path.is_dir():
        raise InputMissingError(f"There is no run at {path}. {_EXPECTED}")
    for pattern in (*_LOG_FILE_PATTERNS, *_CONVERTIBLE_PATTERNS):
        if matches := list(path.glob(pattern)):
            return max(matches, key=lambda file: file.stat().st_mtime)
    raise InputError(f"{path} is a folder without a run: it has none of {', '.join(_LOG_FILE_PATTERNS)}.")


def _unreadable_log_error(file: Path, contents: str) -> InputError:
    return InputError(f"{file} is not the log of a run: it holds {contents}. {_EXPECTED}")


def _format_names(names: Iterable[Any]) -> str:
    short_names = [str(name)[:_MAX_NAME_CHARACTERS] for name in names]
    return ", ".join(short_names[:12]) + (" ..." if len(short_names) > 12 else "") or "nothing"


def _iter_json_lines(file: Path, text: str) -> Iterator[dict[str, Any]]:
    # splitlines() would also split at U+2028 and similar characters, which may be inside a string.
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                return  # A killed process left the last line unfinished.
            reason = "brackets are nested too deeply" if isinstance(error, RecursionError) else error
            raise InputError(
                f"{file}, line {number} is not JSON: {reason}. Delete that line; the others are read without it."
            ) from error
        if isinstance(row, dict):
            yield row


def _read_csv_rows(file: Path, text: str) -> list[LogRow]:
    """Return the rows of a CSV file, without empty cells."""
    # A row may also hold a long text, so a cell may be as long as the file.
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))
    rows = list(csv.DictReader(io.StringIO(text)))
    if not rows or _find_first_name(_STEP_NAMES, rows[0]) is None:
        first = text.lstrip()[:_MAX_NAME_CHARACTERS].splitlines()
        raise _unreadable_log_error(file, f"no objects and no columns step and loss; it begins {first[:1]}")
    return [{name: cell for name, cell in row.items() if name and cell} for row in rows]


def _find_first_name(names: Sequence[str], row: LogRow) -> str | None:
    """Return the first name under which a row has a value."""
    return next((name for name in names if row.get(name) is not None), None)


def _is_evaluation(row: LogRow) -> bool:
    """Return whether a row belongs to an evaluation.

    A row counts as one if its split says so, or if its only losses are evaluation losses.
    """
    if any(str(row.get(name)).strip().lower() in _EVALUATION_NAMES for name in _SPLIT_COLUMNS):
        return True
    return _find_first_name(LOSS_NAMES, row) is None and any(
        _EVALUATION_PREFIX.match(name) and value is not None for name, value in row.items()
    )


def _collect_points(file: Path, rows: Sequence[LogRow]) -> list[LossPoint]:
    """Return the points of rows with a step and a loss; one loss name for all."""
    training_rows = [row for row in rows if _find_first_name(_STEP_NAMES, row) and not _is_evaluation(row)]

    def rows_with(name: str) -> tuple[int, int]:
        return sum(row.get(name) is not None for row in training_rows), sum(name in row for row in training_rows)

    # On a tie, max() returns the more reliable name, which comes first.
    loss = max(LOSS_NAMES, key=rows_with)
    if not rows_with(loss)[1]:
        names = dict.fromkeys(name for row in rows for name in row)
        raise _unreadable_log_error(file, f"rows with {_format_names(names)}, and none with a step and a loss")
    points = [_parse_point(file, row, loss) for row in training_rows if loss in row]
    _check_unique_steps(file, points, loss)
    return points


def _parse_point(file: Path, row: LogRow, loss: str) -> LossPoint:
    tokens = _find_first_name(_TOKEN_NAMES, row)
    return (
        _parse_step(file, row),
        _parse_loss(file, row, loss),
        _parse_number(file, row, tokens) if tokens else None,
    )


def _check_unique_steps(file: Path, points: Sequence[LossPoint], name: str) -> None:
    """Reject consecutive rows with the same step and different losses.

    A resumed run is allowed: it goes back before it repeats a step.
    """
    for (step, loss, _), (next_step, next_loss, _) in pairwise(points):
        if step == next_step and loss != next_loss and not (math.isnan(loss) and math.isnan(next_loss)):
            raise InputError(
                f"{file} has two losses for step {step:,.0f}, {loss} and {next_loss} for {name}, and does not say "
                "which is the training loss. Remove the other row, or mark it (split: val)."
            )


def _collect_own_log_points(file: Path, rows: Sequence[LogRow]) -> list[LossPoint]:
    """Return the points of a batchloom log, which records tokens per step."""
    latest = {_parse_step(file, row): row for row in rows}
    total = 0.0
    points: list[LossPoint] = []
    for step in sorted(latest):
        total += _parse_number(file, latest[step], "tokens")
        points.append((step, _parse_loss(file, latest[step], "loss"), total))
    return points


def _parse_step(file: Path, row: LogRow) -> float:
    name = _find_first_name(_STEP_NAMES, row) or _STEP_NAMES[0]
    step = _parse_number(file, row, name)
    if not step.is_integer() or abs(step) > _MAX_STEP:
        raise InputError(
            f"{file} has {row.get(name)!r:.40} for {name}, which is not a whole number: write the number of the "
            "optimizer step there."
        )
    return step


def _parse_loss(file: Path, row: LogRow, name: str) -> float:
    """Parse a loss; null means a loss that is not a number."""
    return math.nan if name in row and row[name] is None else _parse_number(file, row, name)


def _parse_number(file: Path, row: LogRow, name: str) -> float:
    value = row.get(name)
    if not isinstance(value, bool):
        try:
            return float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            pass
    raise InputError(
        f"{file} has {quote_value(value):.40} for {name}, which is not a number. Delete its row; the others are read "
        "without it."
    )


def _detect_synthetic(file: Path, rows: Sequence[LogRow]) -> bool | None:
    """Return whether the Meter's metric marks synthetic data; None without it."""
    synthetic_values = [
        _parse_number(file, row, _SYNTHETIC_METRIC) for row in rows if row.get(_SYNTHETIC_METRIC) is not None
    ]
    return any(synthetic_values) if synthetic_values else None


def _make_curve_from_rows(name: str, kind: str, file: Path, rows: Sequence[LogRow]) -> LossCurve:
    return _make_curve(name, kind, _collect_points(file, rows), synthetic=_detect_synthetic(file, rows))


def _make_curve(name: str, kind: str, points: Sequence[LossPoint], *, synthetic: bool | None) -> LossCurve:
    points_by_step = {step: (loss, tokens) for step, loss, tokens in points}
    if not points_by_step:
        raise InputError(f"{name} is a log without a step: nothing was trained, or it was not logged.")
    steps = sorted(points_by_step)
    tokens = [points_by_step[step][1] for step in steps]
    known_tokens = tuple(token_count for token_count in tokens if token_count is not None)
    return LossCurve(
        name,
        kind,
        tuple(int(step) for step in steps),
        tuple(points_by_step[step][0] for step in steps),
        known_tokens if len(known_tokens) == len(steps) else None,
        synthetic,
    )


VerdictKind = Literal["converging", "flat", "diverging", "too short"]
Floats = NDArray[np.float64]

MIN_POINTS = 20
# Change over the second half, relative to its level, below which a curve is flat even if the change is certain.
MIN_RELATIVE_CHANGE = 0.01
# Fall from the first tenth to the second half, relative to the level, below which nothing was learned.
_MIN_RELATIVE_FALL = 0.05
# Width of the interval of the slope, in standard deviations of Kendall's statistic.
_SLOPE_INTERVAL_WIDTH = 3.0
# Points at the end of the curve, and the deviations above the half's median that exclude noise.
_TAIL_POINTS = 5
_TAIL_DEVIATIONS = 6.0
# The slope takes all pairs of points, so more points than this are merged first.
_MAX_POINTS = 256
# Losses above this exceed the logarithm of any vocabulary size.
_MAX_LEVEL = 20.0

CurveAxis = Literal["step", "tokens"]
# Points at the end of a curve whose median is used, so that the noise of one step has no effect.
_COMMON_TAIL_POINTS = 10


@dataclass(frozen=True, slots=True)
class LossVerdict:
    """Verdict on the second half of a loss curve, with its numbers.

    Attributes:
        kind: ``converging``, ``flat``, ``diverging`` or ``too short``.
        reason: the verdict with its numbers, as a sentence.
        points: number of points of the curve.
        since: start of the second half (a step, or tokens).
        level: median loss of the second half.
        fell: median of the first tenth minus ``level``.
        slope: Theil-Sen slope over the second half, per unit of x; None if there are too few points.
        low, high: bounds of the slope given the noise.
        change: slope times the length of the second half.
        least: smallest change that counts: ``MIN_RELATIVE_CHANGE`` of the level.
    """

    kind: VerdictKind
    reason: str
    points: int
    since: float
    level: float
    fell: float
    slope: float | None = None
    low: float | None = None
    high: float | None = None
    change: float | None = None
    least: float | None = None


def judge_loss_curve(xs: Sequence[float], losses: Sequence[float], unit: str = "step") -> LossVerdict:
    """Return the verdict on a loss curve.

    The slope of the second half is the median of the slopes of all pairs of points (Theil 1950, Sen 1968), which a
    quarter of outliers does not move. Its interval is Sen's, three standard deviations from the variance of Kendall's
    statistic. It assumes no noise distribution, only that the noise is independent from point to point. Above 256
    points in the half, blocks of neighbors are replaced by their medians. A curve is ``converging`` if the complete
    interval is below 0 and the change over the half is at least 1 % of its level.
    It is ``diverging`` if the interval is above 0 by as much, if a loss is not finite, or if the last five points are
    far above the rest: a median more than six deviations (1.48 times the median distance from the half's median) and
    1 % of the level above it, which no slope shows. Otherwise it is ``flat``. Fewer than 20 points are ``too short``.

    Args:
        xs: step of each point, or tokens seen; ascending.
        losses: loss of each point, nats per token.
        unit: unit of ``xs``, for the sentence.
    """
    x = np.asarray(xs, np.float64)
    y = np.asarray(losses, np.float64)
    wrong = np.flatnonzero(~np.isfinite(y))
    if wrong.size:
        at = float(x[wrong[0]])
        reason = f"the loss at {unit} {at:,.0f} is {y[wrong[0]]}, which is not finite"
        return LossVerdict("diverging", reason, len(y), at, float(y[wrong[0]]), math.nan)
    half = len(y) // 2
    level = float(np.median(y[half:])) if len(y) else math.nan
    fell = float(np.median(y[: max(1, len(y) // 10)])) - level if len(y) else math.nan
    since = float(x[half]) if len(x) else 0.0
    if len(y) < MIN_POINTS:
        reason = f"{len(y)} points; a verdict needs {MIN_POINTS} or more"
        return LossVerdict("too short", reason, len(y), since, level, fell)
    slope, low, high = compute_theil_sen_slope(*_thin_points(x[half:], y[half:]))
    change = slope * float(x[-1] - x[half])
    least = MIN_RELATIVE_CHANGE * abs(level)
    numbers = (len(y), since, level, fell, slope, low, high, change, least)
    end = float(np.median(y[-_TAIL_POINTS:]))
    spread = 1.4826 * float(np.median(abs(y[half:] - level)))
    if end - level > max(_TAIL_DEVIATIONS * spread, least):
        reason = (
            f"its last {_TAIL_POINTS} points are at {end:.4f}, and the second half (from {unit} {since:,.0f}) at "
            f"{level:.4f} (deviation {spread:.4f})"
        )
        return LossVerdict("diverging", reason, *numbers)
    kind: VerdictKind = "flat"
    if high < 0 and -change >= least:
        kind = "converging"
    elif low > 0 and change >= least:
        kind = "diverging"
    part = f"{MIN_RELATIVE_CHANGE:.0%} of its level ({least:.4f})"
    why = f"{part} or more, and noise does not allow 0"
    if abs(change) < least:
        why = f"less than {part}"
    elif low <= 0 <= high:
        why = "and noise allows 0"
    reason = (
        f"{level:.4f} in the second half (from {unit} {since:,.0f}), where it changes by {change:+.4f}, {why} (slope "
        f"{slope:+.2e} per {unit}, noise allows {low:+.2e} to {high:+.2e}); it fell by {fell:.4f} before"
    )
    if kind == "flat" and 0 < level < _MAX_LEVEL and abs(fell) < _MIN_RELATIVE_FALL * level:
        reason += f"; an even guess among {math.exp(level):,.0f} ids has this loss"
    return LossVerdict(kind, reason, *numbers)


def _thin_points(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Reduce points to at most 256: the medians of blocks of neighbors."""
    if len(x) <= _MAX_POINTS:
        return x, y
    blocks = np.array_split(np.arange(len(x)), _MAX_POINTS)
    return tuple(np.array([np.median(of[block]) for block in blocks]) for of in (x, y))  # type: ignore[return-value]


def compute_theil_sen_slope(x: Floats, y: Floats) -> tuple[float, float, float]:
    """Return the Theil-Sen slope, and lower and upper bound of Sen's interval."""
    first, second = np.triu_indices(len(x), 1)
    apart = x[second] - x[first]
    slopes: NDArray[Any] = np.sort(((y[second] - y[first])[apart > 0]) / apart[apart > 0])
    if not slopes.size:
        return 0.0, -math.inf, math.inf
    count = len(x)
    wide = _SLOPE_INTERVAL_WIDTH * math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    low = max(0, math.floor((slopes.size - wide) / 2) - 1)
    high = min(slopes.size - 1, math.ceil((slopes.size + wide) / 2))
    return float(np.median(slopes)), float(slopes[low]), float(slopes[high])


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """A run compared with the first.

    Attributes:
        curve: loss curve of the run.
        verdict: verdict on the curve.
        at_common: loss at the end of the shortest run: the median of the last ten points up to there; None if the run
            begins later.
        first_apart: first step that differs from the first run by more than the tolerance; None if there is none, or
            no tolerance was given.
        common: number of steps that both runs have.
    """

    curve: LossCurve
    verdict: LossVerdict
    at_common: float | None
    first_apart: int | None
    common: int


@dataclass(frozen=True, slots=True)
class RunComparison:
    """Result of a comparison of runs.

    Attributes:
        by: x axis of the comparison.
        until: end of the shortest run on this axis.
        tolerance: relative tolerance; None if losses were not compared with each other.
        runs: runs in the given order.
    """

    by: CurveAxis
    until: float
    tolerance: float | None
    runs: tuple[ComparedRun, ...]

    @property
    def synthetic(self) -> bool:
        """True if any run records that its data was synthetic."""
        return any(run.curve.synthetic for run in self.runs)

    @property
    def agree(self) -> bool:
        """True if no run differs by more than the tolerance or lacks common steps.

        Without a tolerance it is always True.
        """
        compared = self.tolerance is not None
        return not any(run.first_apart is not None or (compared and not run.common) for run in self.runs)


def compare_runs(curves: Sequence[LossCurve], by: CurveAxis = "step", tolerance: float | None = None) -> RunComparison:
    """Compare loss curves with the first one, and judge each.

    Args:
        curves: curves of the runs, at least one.
        by: x axis of the comparison.
        tolerance: relative tolerance of losses at common steps; None to compare none.

    Raises:
        SettingsError: ``by`` is ``tokens``, and a run has no token counts or invalid ones.
    """
    if by == "tokens":
        raise_problems([problem for curve in curves if (problem := _find_token_problem(curve))])
    until = min(get_curve_positions(curve, by)[-1] for curve in curves)
    first = curves[0]
    runs = []
    for curve in curves:
        xs = np.array(get_curve_positions(curve, by))
        losses = np.array(curve.losses)
        tail_losses = losses[xs <= until][-_COMMON_TAIL_POINTS:]
        at_common = float(np.median(tail_losses)) if tail_losses.size else None
        common_steps = sorted({*curve.steps} & {*first.steps})
        curve_losses, first_losses = (dict(zip(c.steps, c.losses, strict=True)) for c in (curve, first))
        first_apart = None
        if tolerance is not None:
            first_apart = next(
                (s for s in common_steps if not is_close_loss(curve_losses[s], first_losses[s], tolerance)),
                None,
            )
        verdict = judge_loss_curve(get_curve_positions(curve, by), curve.losses, "token" if by == "tokens" else "step")
        runs.append(ComparedRun(curve, verdict, at_common, first_apart, len(common_steps)))
    return RunComparison(by, until, tolerance, tuple(runs))


def _find_token_problem(curve: LossCurve) -> str:
    """Explain why a run cannot be compared by tokens; empty if it can."""
    if curve.tokens is None:
        return f"by: {curve.name} does not say how many tokens it has seen; compare by step"
    previous_tokens = 0.0
    for step, tokens in zip(curve.steps, curve.tokens, strict=True):
        # This form also rejects NaN, which compares false.
        if not previous_tokens <= tokens < np.inf:
            return (
                f"by: {curve.name} says {tokens:,.0f} tokens at step {step:,}, after {previous_tokens:,.0f}; "
                "compare by step"
            )
        previous_tokens = tokens
    return ""


def get_curve_positions(curve: LossCurve, by: CurveAxis) -> tuple[float, ...]:
    """Return the x values of a curve."""
    return curve.tokens if by == "tokens" and curve.tokens is not None else curve.steps


def is_close_loss(loss: float, reference: float, tolerance: float) -> bool:
    """Return whether a loss is within a relative tolerance of the reference.

    A loss that is not finite is close to nothing.
    """
    return bool(np.isfinite(reference) and abs(loss - reference) <= tolerance * abs(reference))
