"""Names of batchloom that the golden tests use beyond ``batchloom.__all__``.

A rename in the product changes this file and its importers only.
"""

import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass

from batchloom.batches import (
    Augment,
    MediaOptions,
    add_dense_mask,
    read_mixture,
    to_padded,
    to_varlen,
)
from batchloom.batches.forms import to_megatron, to_shifted
from batchloom.cli import run_command_line
from batchloom.plan import Mesh, SourceSpec, Stage
from batchloom.store import LabelledAnswers, PreferencePairs
from batchloom.streaming import merge_states

__all__ = [
    "Augment",
    "LabelledAnswers",
    "MediaOptions",
    "Mesh",
    "Output",
    "PreferencePairs",
    "SourceSpec",
    "Stage",
    "add_dense_mask",
    "merge_states",
    "read_mixture",
    "run_command",
    "to_megatron",
    "to_padded",
    "to_shifted",
    "to_varlen",
]


@dataclass(frozen=True, slots=True)
class Output:
    """Exit code of a command, and what it wrote to its two streams."""

    code: int
    out: str
    err: str


def run_command(words: Sequence[str]) -> Output:
    """Run one command line of ``batchloom`` in this process."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="") for _ in range(2))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run_command_line(list(words))
    for stream in (out, err):
        stream.flush()
    texts = [stream.buffer.getvalue().decode() for stream in (out, err)]
    return Output(code, *texts)
