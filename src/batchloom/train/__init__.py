"""The reference trainer: a small GPT on the batches of a loader, and the demo.

Importing this package loads no torch; its modules do.
"""

from importlib.util import find_spec

from batchloom.core.errors import MissingDependencyError

# Seconds in which a run makes a step, and looks at its val subset: what an edit is handed to answers within them.
PATIENCE = 300.0


def require_packages() -> None:
    """Make sure that what training needs is installed, before hours are spent.

    Raises:
        MissingDependencyError: names everything that is missing.
    """
    missing = [name for name in ("torch", "safetensors", "matplotlib") if find_spec(name) is None]
    if missing:
        raise MissingDependencyError(
            f"Training needs {', '.join(missing)}, not installed: pip install 'batchloom[train]'."
        )
