"""Loss curves of finished runs; the log format is detected from the content."""

import csv
import io
import json
import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from batchloom.core.errors import InputError, InputMissingError, MissingDependencyError
from batchloom.core.settings import quote_value

# Header of a record: its length (8 bytes) and the checksum of the length (4).
_RECORD_HEADER = struct.Struct("<QI")
_RECORD_CHECKSUM = struct.Struct("<I")

# Names of the training loss, the most reliable first.
LOSS_NAMES = (
    *("loss", "train_loss", "train/loss", "train_loss_step", "loss_step", "train/loss_step"),
    *("training_loss", "loss/train", "Loss/train", "lm loss"),
)
_STEP_NAMES = ("step", "global_step", "iteration")
# Names of the number of tokens since the start of a run.
_TOKEN_NAMES = ("num_input_tokens_seen", "tokens_seen", "consumed_tokens")
# Columns that name the split of a row, and the values that mark an evaluation.
_SPLIT_COLUMNS = ("split", "mode", "phase", "kind")
_EVALUATION_NAMES = {"eval", "evaluation", "val", "valid", "validation", "test"}
_EVALUATION_PREFIX = re.compile(rf"({'|'.join(sorted(_EVALUATION_NAMES))})[_/ ]")
_EVENT_MAGIC, _EVENT_FILE_PATTERN = b"brain.Event:", "*tfevents*"
_SYNTHETIC_LABEL = "source=synthetic"
# The metric of docs/reference/metrics.md.
_SYNTHETIC_METRIC = "data/synthetic"
# Lightning adds this column to rows that use its own step count, which is 0 after the first optimizer step; other
# trainers count 1 there. Rows with a user's own count lack it.
_EPOCH_COLUMN = "epoch"
# Log files of a run folder: the first pattern that matches is used, and its newest file.
_LOG_FILE_PATTERNS = (
    *("log.jsonl", "trainer_state.json", "checkpoint-*/trainer_state.json", "metrics.csv"),
    *("version_*/metrics.csv", "lightning_logs/version_*/metrics.csv", _EVENT_FILE_PATTERN),
    *("runs/*/*tfevents*", "version_*/*tfevents*", "lightning_logs/version_*/*tfevents*"),
)
_EXPECTED = (
    "Expected: a folder or log.jsonl of batchloom train, JSON lines with step and loss, trainer_state.json of the "
    "Hugging Face Trainer, a CSV file with step and loss (Lightning's CSVLogger), or event files of TensorBoard."
)
_MAX_NAME_CHARACTERS = 60
# The first line of a log of batchloom holds all settings of its run.
_HEAD_BYTES = 1 << 16
# Above this a float cannot represent consecutive steps.
_MAX_STEP = 2**53

LogRow = Mapping[str, Any]
LossPoint = tuple[float, float, float | None]


def read_events(files: Sequence[Path]) -> list[list[dict[str, Any]]]:
    """Return the rows of the event files of one run, in written order, file by file.

    A row has ``step`` and the scalars written consecutively for it, by tag. If a run restarts at a step, rows from that
    step on are removed. An unfinished end, left by a killed process, is no damage.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # noqa: PLC0415 - it is optional
    except ImportError as error:
        raise MissingDependencyError(
            f"{files[0]} holds TensorBoard events, and tensorboard is not installed: pip install tensorboard."
        ) from error
    parts: list[list[dict[str, Any]]] = []
    for file in files:
        rows: list[dict[str, Any]] = []
        parts.append(rows)
        for record in _iter_event_records(file):
            event = Event.FromString(record)
            if event.HasField("session_log") and event.session_log.status == SessionLog.START:
                for part in parts:
                    part[:] = [row for row in part if row["step"] < event.step]
            for value in event.summary.value:
                kind = value.WhichOneof("value")
                if kind in ("simple_value", "tensor"):
                    scalar = value.simple_value if kind == "simple_value" else _tensor_to_scalar(value.tensor)
                    if not rows or rows[-1]["step"] != event.step or value.tag in rows[-1]:
                        rows.append({})
                    # The step comes last, so that a tag named "step" cannot replace it.
                    rows[-1] |= {value.tag: scalar, "step": event.step}
    return parts


def _tensor_to_scalar(tensor: Any) -> Any:
    from tensorboard.util.tensor_util import make_ndarray  # noqa: PLC0415 - it is optional

    array = make_ndarray(tensor)
    return array.item() if array.size == 1 else array


def _iter_event_records(file: Path) -> Iterator[bytes]:
    """Yield the records of a file.

    A record is its length, the checksum of the length, the bytes, and the checksum of the bytes.
    """
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c  # noqa: PLC0415 - it is optional

    data, offset = file.read_bytes(), 0
    while offset + _RECORD_HEADER.size <= len(data):
        size, length_checksum = _RECORD_HEADER.unpack_from(data, offset)
        begin = offset + _RECORD_HEADER.size
        has_valid_length = masked_crc32c(data[offset : offset + 8]) == length_checksum
        if has_valid_length and begin + size + _RECORD_CHECKSUM.size > len(data):
            return
        record = data[begin : begin + size]
        if not has_valid_length or masked_crc32c(record) != _RECORD_CHECKSUM.unpack_from(data, begin + size)[0]:
            raise InputError(
                f"{file} is damaged at byte {offset:,} of {len(data):,}: a checksum does not match its bytes, and "
                "the rest cannot be read. Copy the file again from where it was written."
            )
        yield record
        offset = begin + size + _RECORD_CHECKSUM.size


@dataclass(frozen=True, slots=True)
class LossCurve:
    """Loss of a run by step.

    Attributes:
        name: path as it was given.
        kind: source of the log: ``batchloom``, ``jsonl``, ``trainer``, ``lightning``, ``csv`` or ``tensorboard``.
        steps: steps as the log counts them (Lightning's from 1), ascending; of a step that occurs twice (a resumed
            run) the later entry is used.
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
        MissingDependencyError: it holds event files, and tensorboard is not installed.
    """
    file = find_log_file(Path(path))
    head = file.read_bytes()[:_HEAD_BYTES]
    is_lightning = file.absolute().parent.name.startswith("version_") or file.with_name("hparams.yaml").exists()
    lightning = "lightning" if is_lightning else ""
    if _EVENT_MAGIC in head[:200]:
        # A resumed run starts another file in its folder; names hold the time and a count per process.
        event_files = sorted(file.parent.glob(_EVENT_FILE_PATTERN), key=lambda one: _natural_sort_key(one.name))
        run_files = event_files if Path(path).is_dir() else [file]
        return _make_curve_from_rows(path, lightning or "tensorboard", file, read_events(run_files))
    try:
        text = file.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{file} is not the log of a run: it is not text. {_EXPECTED}") from error
    if not text.lstrip().startswith("{"):
        return _make_curve_from_rows(path, lightning or "csv", file, [_read_csv_rows(file, text)])
    try:
        state = json.loads(text)
    except (ValueError, RecursionError):
        state = None
    if isinstance(state, dict):
        if "log_history" in state:
            history = state["log_history"]
            if not isinstance(history, list):
                raise InputError(
                    f"{file} has {history!r:.40} for log_history, which is not a list as the Trainer writes it. Give "
                    "the file of another checkpoint."
                )
            history_rows = [row for row in history if isinstance(row, dict)]
            return _make_curve_from_rows(path, "trainer", file, [history_rows])
        if _find_first_name(_STEP_NAMES, state) is None or not any(name in state for name in LOSS_NAMES):
            raise _unreadable_log_error(file, f"an object of {_format_names(state)}")
    rows = list(_iter_json_lines(file, text))
    own_rows = [row for row in rows if row.get("kind") == "step" and "origin" in row]
    if own_rows:
        is_synthetic = any(str(row["origin"]).startswith(_SYNTHETIC_LABEL) for row in own_rows)
        return _make_curve(path, "batchloom", _collect_own_log_points(file, own_rows), synthetic=is_synthetic)
    return _make_curve_from_rows(path, "jsonl", file, [rows])


def _natural_sort_key(name: str) -> list[str | int]:
    """Return a sort key by which 10 comes after 9."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


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
    if _EVENT_MAGIC in head[:200] or file.name == "trainer_state.json":
        return True
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
    for pattern in _LOG_FILE_PATTERNS:
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
            if number == 1 and line.strip() == "{":
                raise InputError(
                    f"{file} is one object over many lines that cannot be read to its end: it is truncated or "
                    "damaged. Give the file of an earlier checkpoint, or copy the file again."
                ) from error
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


def _collect_points(file: Path, parts: Sequence[Sequence[LogRow]]) -> list[LossPoint]:
    """Return the points of rows with a step and a loss; one loss name for all.

    ``parts`` holds the rows of each file of a run; errors name ``file``.
    """
    training_parts = [
        [row for row in rows if _find_first_name(_STEP_NAMES, row) and not _is_evaluation(row)] for rows in parts
    ]
    training_rows = [row for rows in training_parts for row in rows]

    def rows_with(name: str) -> tuple[int, int]:
        return sum(row.get(name) is not None for row in training_rows), sum(name in row for row in training_rows)

    # On a tie, max() returns the more reliable name, which comes first.
    loss = max(LOSS_NAMES, key=rows_with)
    if not rows_with(loss)[1]:
        names = dict.fromkeys(name for rows in parts for row in rows for name in row)
        raise _unreadable_log_error(file, f"rows with {_format_names(names)}, and none with a step and a loss")
    part_points = [[_parse_point(file, row, loss) for row in rows if loss in row] for rows in training_parts]
    for points in part_points:
        _check_unique_steps(file, points, loss)
    return [point for points in part_points for point in points]


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


def _detect_synthetic(file: Path, parts: Sequence[Sequence[LogRow]]) -> bool | None:
    """Return whether the Meter's metric marks synthetic data; None without it."""
    synthetic_values = [
        _parse_number(file, row, _SYNTHETIC_METRIC)
        for rows in parts
        for row in rows
        if row.get(_SYNTHETIC_METRIC) is not None
    ]
    return any(synthetic_values) if synthetic_values else None


def _make_curve_from_rows(name: str, kind: str, file: Path, parts: Sequence[Sequence[LogRow]]) -> LossCurve:
    if kind == "lightning":
        parts = [[_count_from_one(file, row) for row in rows] for rows in parts]
    return _make_curve(name, kind, _collect_points(file, parts), synthetic=_detect_synthetic(file, parts))


def _count_from_one(file: Path, row: LogRow) -> LogRow:
    name = _find_first_name(_STEP_NAMES, row) if _EPOCH_COLUMN in row else None
    return {**row, name: _parse_step(file, row) + 1} if name else row


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
