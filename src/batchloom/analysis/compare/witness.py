"""Batches a model received, by hooks on it, and how they differ from the plan."""

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import batchloom
from batchloom import Loader
from batchloom.analysis.explanation import ExplainedSequence
from batchloom.core.files import replace_file
from batchloom.core.process_state import measure_peak_memory
from batchloom.core.wording import format_count, format_list

BatchEntry = Mapping[str, Any]
# Steps past the end of the run that are searched as well, since a trainer may prefetch.
LOOKAHEAD_STEPS = 8
_MAX_LISTED = 4
_TEXT_CHARACTERS = 40


def measure_peak_bytes() -> dict[str, int]:
    """Return peak bytes of this process: ``resident``, and ``device`` with a GPU."""
    peak_bytes = {"resident": measure_peak_memory()}
    if uses_gpu():
        peak_bytes["device"] = torch.cuda.max_memory_allocated()
    return peak_bytes


def uses_gpu() -> bool:
    """Return whether this process has initialized CUDA."""
    return bool(torch.cuda.is_available() and torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


@final
class StepHash:
    """Hash of the input of a model in one step.

    Ids and positions are two streams of int64, so that the split into passes does not matter.
    """

    __slots__ = ("_ids", "_positions", "_row_hashes", "passes", "rows", "token_slots")

    def __init__(self) -> None:
        self._ids = xxhash.xxh3_128()
        self._positions = xxhash.xxh3_128()
        self._row_hashes: list[list[Any]] = []
        self.passes = self.rows = self.token_slots = 0

    def add(self, input_ids: Any, position_ids: Any) -> None:
        """Add the ids and positions of a pass, both [R, S]; tensors or arrays."""
        ids = _to_int64_array(input_ids)
        positions = _to_int64_array(position_ids)
        if ids.shape != positions.shape:
            raise ValueError(f"ids of shape {ids.shape} have positions of shape {positions.shape}")
        self._ids.update(ids.tobytes())
        self._positions.update(positions.tobytes())
        width = ids.shape[-1]
        self._row_hashes += [
            [width, hash_row(row), hash_row(own)]
            for row, own in zip(ids.reshape(-1, width), positions.reshape(-1, width), strict=True)
        ]
        self.passes = self.passes + 1
        self.rows = self.rows + len(ids)
        self.token_slots += ids.size

    def to_entry(self) -> dict[str, Any]:
        """Return the entry: ``hash``, ``passes``, ``rows``, ``places`` and ``each``.

        ``hash`` has 32 hex digits. ``places`` is the number of token slots. ``each`` has the width of every row and the
        hashes of its ids and positions, which identify a row that is in the wrong batch.
        """
        digests = f"{self._ids.hexdigest()} {self._positions.hexdigest()}"
        return {
            "hash": xxhash.xxh3_128_hexdigest(digests.encode()),
            "passes": self.passes,
            "rows": self.rows,
            "places": self.token_slots,
            "each": self._row_hashes,
        }


def hash_row(values: np.ndarray[Any, np.dtype[np.int64]]) -> str:
    """Hash one row of ids or positions, int64; 16 hex digits."""
    return xxhash.xxh3_64_hexdigest(values.tobytes())


def _to_int64_array(values: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    return np.ascontiguousarray(array, np.int64)


@final
class BatchWitness:
    """Recorder of the training input of a model, with an entry per optimizer step.

    The passes before an optimizer step belong to that step. Passes of evaluation are ignored.

    Args:
        model: module that is called with ``input_ids`` and ``position_ids`` as keyword arguments.

    Attributes:
        entries: one per step: :meth:`StepHash.to_entry`; ``waited``, seconds from the end of the previous optimizer
            step to the first pass of this one (fetching and moving the batch, and everything else between two steps:
            clearing gradients, logging, checkpoints); ``took``, seconds from that same end to the end of this step;
            both None in the first entry; ``memory``, see
            :func:`~batchloom.analysis.compare.witness.measure_peak_bytes`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.entries: list[dict[str, Any]] = []
        self._hash = StepHash()
        self._stepped = False
        self._previous_end: float | None = None
        self._last_end: float | None = None
        self._times: dict[str, float | None] = {}
        self._memory: dict[str, int] = {}
        self._hooks = [
            model.register_forward_pre_hook(self._record_pass, with_kwargs=True),
            register_optimizer_step_post_hook(self._record_step),
        ]

    def _record_pass(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not model.training:
            return
        self._close()
        if not self._hash.passes:
            self._times = {"waited": None if self._last_end is None else _synchronized_time() - self._last_end}
        if args or "input_ids" not in kwargs or kwargs.get("position_ids") is None:
            argument_text = f"{len(args)} values and {', '.join(kwargs)}"
            raise ValueError(
                f"The model was called with {argument_text}; input_ids and position_ids were expected by name"
            )
        mask = kwargs.get("attention_mask")
        if mask is not None and mask.ndim == 2:
            raise ValueError(
                "The model was given an attention_mask of two dimensions: documents of a packed row see each other"
            )
        self._hash.add(kwargs["input_ids"], kwargs["position_ids"])

    def _record_step(self, *_: object) -> None:
        # An optimizer of several parts steps more than once, and the last one ends the step.
        if not self._stepped:
            self._previous_end = self._last_end
            self._stepped = True
        self._last_end = _synchronized_time()
        self._memory = measure_peak_bytes()

    def _close(self) -> None:
        """Append the entry of the finished step, if there is one."""
        if self._stepped and self._hash.passes:
            took = None if self._previous_end is None or self._last_end is None else self._last_end - self._previous_end
            timed = {**self._times, "took": took, "memory": self._memory}
            self.entries.append({**self._hash.to_entry(), **timed})
            self._hash = StepHash()
        self._stepped = False

    def end(self) -> list[dict[str, Any]]:
        """Remove the hooks and return the entries of all steps."""
        self._close()
        for hook in self._hooks:
            hook.remove()
        return self.entries


def _synchronized_time() -> float:
    """Return the time in seconds after pending GPU work has finished.

    Otherwise the work would count for a later step.
    """
    if uses_gpu():
        torch.cuda.synchronize()
    return time.perf_counter()


@final
class WitnessRecorder:
    """Recorder of one rank of an example, which writes ``rank_N.json``.

    A job carries it into spawned processes.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._losses: list[tuple[int, float]] = []

    def record_loss(self, step: int, loss: float) -> None:
        self._losses.append((step, loss))

    @contextmanager
    def observe(self, model: nn.Module) -> Iterator[None]:
        """Record the model's input; write the record even if training fails."""
        witness = BatchWitness(model)
        rank = int(os.environ.get("RANK", "0"))
        try:
            yield
        finally:
            # A launcher reports that a rank failed, but not why.
            error = sys.exception()
            fault = f"{type(error).__name__}: {error}" if error else None
            record = {"rank": rank, "steps": witness.end(), "losses": self._losses, "fault": fault}
            # Another rank's failure may kill this one while it writes, so write to a partial file first.
            with replace_file(self._folder / f"rank_{rank}.json") as partial_file:
                partial_file.write_text(json.dumps(record))


def iter_expected_entries(loader: Loader, steps: int) -> Iterator[dict[str, Any]]:
    """Yield the entries of a trainer that receives the loader's batches unchanged.

    Each batch is one pass.
    """
    for step in range(steps):
        step_hash = StepHash()
        batch = loader.batch(step)
        step_hash.add(batch["input_ids"], batch["position_ids"])
        yield step_hash.to_entry()


@dataclass(frozen=True, slots=True, order=True)
class RowLocation:
    """Location of a row in a run: step, rank, and row in the batch of that rank."""

    step: int
    rank: int
    row: int

    def __str__(self) -> str:
        return f"row {self.row} of step {self.step} on rank {self.rank}"


@dataclass(frozen=True, slots=True)
class BatchDifference:
    """The first batch that differs from the plan.

    Attributes:
        step, rank: step and rank of the batch.
        kind: ``ended`` (the run stopped before this step), ``more`` (steps past the run's), ``positions``, ``cut``,
            ``width``, ``order`` (the plan's rows, in another order), ``batch`` (another batch of the run), ``dropped``,
            ``repeated``, ``rows`` (other rows of the run) or ``unknown`` (rows that are nowhere in the run).
        sentence: description of the difference.
        rows: row numbers of the plan's batch that did not arrive unchanged.
        found: location of each received row in the run; None if it has none.
        planned: documents of the first of ``rows``, as in ``batchloom explain``.
        came: documents of the rows received instead, if they are in the run.
    """

    step: int
    rank: int
    kind: str
    sentence: str
    rows: tuple[int, ...]
    found: tuple[RowLocation | None, ...]
    planned: tuple[ExplainedSequence, ...]
    came: tuple[ExplainedSequence, ...]


@final
class ExpectedBatches:
    """Batches of the plain loader on every rank, and the location of each row.

    Batches reach ``LOOKAHEAD_STEPS`` past the end.
    The loaders, one per rank, have ``output="numpy"`` and a run that is longer than ``steps`` by ``LOOKAHEAD_STEPS``.
    """

    def __init__(self, loaders: Sequence[Loader], steps: int) -> None:
        self._loaders = loaders
        self.steps = steps
        self.entries = [list(iter_expected_entries(loader, steps + LOOKAHEAD_STEPS)) for loader in loaders]
        self._rows: dict[str, list[RowLocation]] = defaultdict(list)
        self._batches: dict[str, list[RowLocation]] = defaultdict(list)
        for rank, rank_entries in enumerate(self.entries):
            for step, entry in enumerate(rank_entries):
                self._batches[entry["hash"]].append(RowLocation(step, rank, 0))
                for row, (_, ids, _) in enumerate(entry["each"]):
                    self._rows[ids].append(RowLocation(step, rank, row))

    def find_row(self, ids: str, near: RowLocation) -> RowLocation | None:
        """Return the nearest location of a row by the hash of its ids; None if unknown."""
        return _find_nearest(self._rows.get(ids, []), near)

    def find_batch(self, name: str, near: RowLocation) -> RowLocation | None:
        """Return the nearest location of a batch by its hash; None if unknown."""
        return _find_nearest(self._batches.get(name, []), near)

    def ids(self, step: int, rank: int) -> Any:
        """Return the ids of a batch, int64 [R, S]."""
        return np.asarray(self._loaders[rank].batch(step)["input_ids"], np.int64)

    def explain(
        self, step: int, rank: int, row: int | None = None, text: int = _TEXT_CHARACTERS
    ) -> tuple[ExplainedSequence, ...]:
        """Return the documents of a batch, or of one of its rows."""
        return batchloom.explain(self._loaders[rank], step, rank=rank, row=row, text=text)


def _find_nearest(locations: Sequence[RowLocation], near: RowLocation) -> RowLocation | None:
    def far(location: RowLocation) -> tuple[int, int, int]:
        return (
            abs(location.step - near.step),
            abs(location.rank - near.rank),
            abs(location.row - near.row),
        )

    return min(locations, key=far, default=None)


def find_differing_batches(
    expected: ExpectedBatches, recorded_ranks: Sequence[Sequence[BatchEntry]]
) -> list[tuple[int, int]]:
    """Return (step, rank) of every batch that differs or is missing, in order."""
    last = max([expected.steps, *(len(entries) for entries in recorded_ranks)])
    differing_batches = []
    for step in range(last):
        for rank, planned in enumerate(expected.entries):
            entries = recorded_ranks[rank] if rank < len(recorded_ranks) else []
            name = entries[step]["hash"] if step < len(entries) else None
            if name != (planned[step]["hash"] if step < expected.steps else None):
                differing_batches.append((step, rank))
    return differing_batches


def explain_difference(
    expected: ExpectedBatches, recorded_ranks: Sequence[Sequence[BatchEntry]], step: int, rank: int
) -> BatchDifference:
    """Explain a differing batch: the expected rows, and the received ones."""
    entries = recorded_ranks[rank] if rank < len(recorded_ranks) else []
    if step >= len(entries):
        step_text = f"{format_count(len(entries), 'step')} of {expected.steps:,}"
        sentence = f"it made {step_text}" if rank < len(recorded_ranks) else "this rank recorded nothing"
        planned = expected.explain(step, rank)[:_MAX_LISTED]
        rows = tuple(range(len(expected.entries[rank][step]["each"])))
        return BatchDifference(step, rank, "ended", sentence, rows, (), planned, ())
    if step >= expected.steps:
        sentence = f"it made {format_count(len(entries), 'step')}; the run has {expected.steps:,}"
        return BatchDifference(step, rank, "more", sentence, (), (), (), ())
    return _BatchComparison(expected, step, rank, entries[step]).describe()


@final
class _BatchComparison:
    """Comparison of one received batch with the expected one."""

    def __init__(self, expected: ExpectedBatches, step: int, rank: int, entry: BatchEntry) -> None:
        self._expected = expected
        self._step = step
        self._rank = rank
        self._entry = entry
        self._expected_rows = [tuple(row_hashes) for row_hashes in expected.entries[rank][step]["each"]]
        self._recorded_rows = [tuple(row_hashes) for row_hashes in entry["each"]]
        self._expected_ids = [ids for _, ids, _ in self._expected_rows]
        self._recorded_ids = [ids for _, ids, _ in self._recorded_rows]
        self._locations = tuple(
            expected.find_row(ids, RowLocation(step, rank, row)) for row, ids in enumerate(self._recorded_ids)
        )

    def describe(self) -> BatchDifference:
        kind, sentence = (
            self._describe_positions()
            or self._describe_width()
            or self._describe_order()
            or self._describe_other_batch()
            or self._describe_missing_or_repeated()
            or self._describe_rows()
        )
        pairs = enumerate(self._expected_rows)
        rows = tuple(
            row
            for row, row_hashes in pairs
            if row >= len(self._recorded_rows) or self._recorded_rows[row] != row_hashes
        )
        planned: list[ExplainedSequence] = []
        replacements: list[ExplainedSequence] = []
        for row in rows[:_MAX_LISTED]:
            planned += self._expected.explain(self._step, self._rank, row)
            location = self._locations[row] if row < len(self._locations) else None
            if location is not None and location != RowLocation(self._step, self._rank, row):
                replacements += self._expected.explain(location.step, location.rank, location.row)
        sequences = (tuple(planned), tuple(replacements))
        return BatchDifference(self._step, self._rank, kind, sentence, rows, self._locations, *sequences)

    def _describe_positions(self) -> tuple[str, str] | None:
        if [row_hashes[:2] for row_hashes in self._expected_rows] != [
            row_hashes[:2] for row_hashes in self._recorded_rows
        ]:
            return None
        rows = [row for row, row_hashes in enumerate(self._expected_rows) if row_hashes != self._recorded_rows[row]]
        message = f"the ids are the plan's; the positions of {_format_row_numbers(rows)}"
        if all(self._recorded_rows[row][2] == hash_row(np.arange(self._expected_rows[row][0])) for row in rows):
            return (
                "positions",
                f"{message} do not restart where documents begin: documents of a row see each other",
            )
        return "positions", f"{message} differ"

    def _describe_width(self) -> tuple[str, str] | None:
        """Describe rows that differ from the plan only in width."""
        planned = self._expected_rows[0][0]
        widths = {row_hashes[0] for row_hashes in self._recorded_rows}
        if len(self._expected_rows) != len(self._recorded_rows) or widths == {planned}:
            return None
        widths_text = " and ".join(f"{width:,}" for width in sorted(widths))
        ids = self._expected.ids(self._step, self._rank)
        is_prefix = all(
            width <= planned and hash_row(ids[row][:width]) == name
            for row, (width, name, _) in enumerate(self._recorded_rows)
        )
        if not is_prefix:
            return "width", f"its rows are {widths_text} wide; the plan's are {planned:,}"
        explained = self._expected.explain(self._step, self._rank, text=0)
        cut_tokens = sum(
            max(0, sequence.seq_len - sequence.padding - self._recorded_rows[row][0])
            for row, sequence in enumerate(explained)
        )
        subject = f"{format_count(cut_tokens, 'token')} of documents were" if cut_tokens else "padding was"
        return (
            "cut",
            f"{subject} cut off: its rows are {widths_text} wide; the plan's are {planned:,}",
        )

    def _describe_order(self) -> tuple[str, str] | None:
        expected_ids = self._expected_ids
        recorded_ids = self._recorded_ids
        if sorted(expected_ids) != sorted(recorded_ids):
            return None
        moved = [row for row, name in enumerate(recorded_ids) if name != expected_ids[row]]
        row_texts = [f"its row {row} is the plan's row {expected_ids.index(recorded_ids[row])}" for row in moved]
        return "order", f"the plan's rows arrived in another order: {format_list(row_texts, _MAX_LISTED)}"

    def _describe_other_batch(self) -> tuple[str, str] | None:
        location = self._expected.find_batch(self._entry["hash"], RowLocation(self._step, self._rank, 0))
        if location is None:
            return None
        location_parts = [f"step {location.step}"] if location.step != self._step else []
        location_parts += [f"rank {location.rank}"] if location.rank != self._rank else []
        return "batch", f"it got the batch of {' on '.join(location_parts)}"

    def _describe_missing_or_repeated(self) -> tuple[str, str] | None:
        """Describe a batch that lacks or repeats planned rows and has no others."""
        expected_ids = self._expected_ids
        recorded_ids = self._recorded_ids
        if not set(recorded_ids) <= set(expected_ids):
            return None
        missing_rows = [row for row, name in enumerate(expected_ids) if name not in recorded_ids]
        repeated_rows = [
            row for row, name in enumerate(expected_ids) if recorded_ids.count(name) > expected_ids.count(name)
        ]
        repeated_text = f"{_format_row_numbers(repeated_rows)} of the plan arrived again" if repeated_rows else ""
        missing_text = f"{_format_row_numbers(missing_rows)} of the plan did not arrive" if missing_rows else ""
        return "repeated" if repeated_rows else "dropped", "; ".join(filter(None, (repeated_text, missing_text)))

    def _describe_rows(self) -> tuple[str, str]:
        last = self._expected.steps + LOOKAHEAD_STEPS - 1
        if not any(self._locations):
            rows = format_count(len(self._recorded_rows), "row")
            sentence = f"none of its {rows} is in any step from 0 to {last}: other data, or changed tokens"
            return "unknown", sentence
        row_texts = []
        for row, location in enumerate(self._locations):
            if location is None:
                row_texts.append(f"its row {row} is in no step from 0 to {last}")
            elif (location.step, location.rank) != (self._step, self._rank):
                row_texts.append(f"its row {row} is {location}")
        missing = len(self._expected_rows) - len(self._recorded_rows)
        missing_text = f"; {format_count(missing, 'row')} fewer than the plan has" if missing > 0 else ""
        return "rows", format_list(row_texts, _MAX_LISTED) + missing_text


def _format_row_numbers(rows: Sequence[int]) -> str:
    """Format row numbers: ``row 1``; ``rows 1, 2 and 5 more``."""
    listed = format_list([str(row) for row in rows], _MAX_LISTED)
    return f"row {listed}" if len(rows) == 1 else f"rows {listed}"
