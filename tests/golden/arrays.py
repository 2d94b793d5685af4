"""Digests of batches: of every step, and of every key over all steps."""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

_DIGITS = 16
# Digests of steps are many: they are shorter, and ten stand in one text.
_STEP_DIGITS, _TOGETHER = 12, 10


def array_bytes(value: Any) -> tuple[str, bytes]:
    """Return the type of a batch's value and its content, shape included."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray):
        # Shapes differ from step to step; number of dimensions does not.
        kind = f"{value.dtype.name} {value.ndim}d"
        return kind, f"{value.shape}".encode() + np.ascontiguousarray(value).tobytes()
    return type(value).__name__, repr(value).encode()


def describe_batches(batches: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return digests of batches that name the step and the keys of a difference.

    Returns:
        ``steps``: a digest for each batch of its step number, its keys and their arrays, ten of them
        in each text; ``keys``: for each key its type and a digest over all batches.
    """
    steps, keys, kinds = [], {}, {}
    for batch in batches:
        whole = hashlib.sha256(f"{batch.step}".encode())
        for name, value in sorted(batch.items()):
            kind, data = array_bytes(value)
            kinds.setdefault(name, set()).add(kind)
            keys.setdefault(name, hashlib.sha256()).update(data)
            whole.update(f"{name} {kind}".encode() + data)
        steps.append(whole.hexdigest()[:_STEP_DIGITS])
    described = {
        name: f"{' or '.join(sorted(kinds[name]))} {value.hexdigest()[:_DIGITS]}" for name, value in keys.items()
    }
    tens = range(0, len(steps), _TOGETHER)
    return {
        "keys": described,
        "steps": [" ".join(steps[first : first + _TOGETHER]) for first in tens],
    }
