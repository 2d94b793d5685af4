"""Output arrays as tensors or numpy arrays."""

from typing import Any

import numpy as np

from batchloom.batches.assembly import require_torch, to_torch
from batchloom.core.settings import quote_value, raise_problems, suggest

OUTPUTS = ("torch", "numpy")


def check_output(output: str) -> None:
    """Raise SettingsError for an unknown output, MissingDependencyError without torch."""
    if output not in OUTPUTS:
        hint = suggest(str(output), OUTPUTS)
        raise_problems([f"output: {quote_value(output)} is not one of {', '.join(OUTPUTS)}{hint}"])
    if output == "torch":
        require_torch()


def as_asked(arrays: dict[str, Any], output: str) -> dict[str, Any]:
    """Return the arrays as int64, as tensors if ``output`` is ``torch``."""
    plain = {name: np.asarray(values, np.int64) for name, values in arrays.items()}
    return to_torch(plain) if output == "torch" else plain
