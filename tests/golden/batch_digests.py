"""Digests of batches: of every step, and of every key over all steps."""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

_DIGITS = 16
# There are many digests of steps, so they are shorter, and one string joins ten of them.
_STEP_DIGITS, _TOGETHER = 12, 10


def array_bytes(value: Any) -> tuple[str, bytes]:
    """Return the type of a value of a batch, and its shape and content as bytes."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray):
        # Shapes differ between steps; the number of dimensions does not.
        kind = f"{value.dtype.name} {value.ndim}d"
        return kind, f"{value.shape}".encode() + np.ascontiguousarray(value).tobytes()
    return type(value).__name__, repr(value).encode()


def describe_batches(batches: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return digests of batches by step and by key, so that a difference names both.

    Returns:
        ``steps``: digests of the step number, keys and arrays of each batch, ten joined per string;
        ``keys``: the type of each key and its digest over all batches.
    """
    steps, keys, kinds = [], {}, {}
    for batch in batches:
        step_digest = hashlib.sha256(f"{batch.step}".encode())
        for name, key_digest in sorted(batch.items()):
            kind, data = array_bytes(key_digest)
            kinds.setdefault(name, set()).add(kind)
            keys.setdefault(name, hashlib.sha256()).update(data)
            step_digest.update(f"{name} {kind}".encode() + data)
        steps.append(step_digest.hexdigest()[:_STEP_DIGITS])
    key_digests = {
        name: f"{' or '.join(sorted(kinds[name]))} {key_digest.hexdigest()[:_DIGITS]}"
        for name, key_digest in keys.items()
    }
    tens = range(0, len(steps), _TOGETHER)
    return {
        "keys": key_digests,
        "steps": [" ".join(steps[first : first + _TOGETHER]) for first in tens],
    }
