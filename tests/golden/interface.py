"""Names of batchloom that the golden tests use beyond ``batchloom.__all__``.

A rename in the product touches this file alone.
"""

import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass

from batchloom.batches import (
    Augment,
    MediaOptions,
    add_dense_mask as dense_mask,
    read_mixture as mixture_from,
    to_padded as padded,
    to_varlen as flattened,
)
from batchloom.batches.forms import to_megatron as megatron, to_shifted as shifted
from batchloom.cli import run_command_line as _run
from batchloom.plan import Mesh, SourceSpec, Stage
from batchloom.store import LabelledAnswers as Labels, PreferencePairs as Pairs
from batchloom.streaming import merge_states
from single_settings import make_loader

__all__ = [
    "Augment",
    "Labels",
    "MediaOptions",
    "Mesh",
    "Output",
    "Pairs",
    "SourceSpec",
    "Stage",
    "dense_mask",
    "flattened",
    "make_loader",
    "megatron",
    "merge_states",
    "mixture_from",
    "padded",
    "run_command",
    "shifted",
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
        code = _run(list(words))
    for stream in (out, err):
        stream.flush()
    texts = [stream.buffer.getvalue().decode() for stream in (out, err)]
    return Output(code, *texts)
