"""The first place where torch is allowed: numpy arrays to tensors, without a copy."""

from typing import Any

import numpy as np

from batchloom.core.errors import MissingDependencyError


def require_torch() -> None:
    """Raise MissingDependencyError when torch cannot be imported."""
    try:
        import torch  # noqa: F401, PLC0415 - torch is optional and slow to import
    except ImportError as error:
        raise MissingDependencyError(
            "output='torch' needs torch, which is not installed: pip install 'batchloom[train]', "
            "or give output='numpy'."
        ) from error


def to_torch(arrays: dict[str, Any]) -> dict[str, Any]:
    """The same batch with tensors that share the arrays' memory; plain numbers stay."""
    import torch  # noqa: PLC0415 - torch is optional and slow to import

    return {
        key: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        for key, value in arrays.items()
    }
