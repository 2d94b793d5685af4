"""Recording of the batches a model receives, by hooks on the model itself."""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from batchloom import Loader
from batchloom.core.files import replace_file
from batchloom.core.process_state import measure_peak_memory


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
        self._ids, self._positions = xxhash.xxh3_128(), xxhash.xxh3_128()
        self._row_hashes: list[list[Any]] = []
        self.passes = self.rows = self.token_slots = 0

    def add(self, input_ids: Any, position_ids: Any) -> None:
        """Add the ids and positions of a pass, both [R, S]; tensors or arrays."""
        ids, positions = _to_int64_array(input_ids), _to_int64_array(position_ids)
        if ids.shape != positions.shape:
            raise ValueError(f"ids of shape {ids.shape} have positions of shape {positions.shape}")
        self._ids.update(ids.tobytes())
        self._positions.update(positions.tobytes())
        width = ids.shape[-1]
        self._row_hashes += [
            [width, hash_row(row), hash_row(own)]
            for row, own in zip(ids.reshape(-1, width), positions.reshape(-1, width), strict=True)
        ]
        self.passes, self.rows = self.passes + 1, self.rows + len(ids)
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
        self._hash, self._stepped = StepHash(), False
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
            self._previous_end, self._stepped = self._last_end, True
        self._last_end, self._memory = _synchronized_time(), measure_peak_bytes()

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
        witness, rank = BatchWitness(model), int(os.environ.get("RANK", "0"))
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
        step_hash, batch = StepHash(), loader.batch(step)
        step_hash.add(batch["input_ids"], batch["position_ids"])
        yield step_hash.to_entry()
