"""Checks that commands run before they load torch: required packages, time limits."""

from importlib.util import find_spec

from batchloom.core.errors import MissingDependencyError

# Seconds in which a run takes a step and evaluates, so that a running job answers an edit within them.
STARTUP_TIMEOUT_S = 300.0


def require_train_packages() -> None:
    """Check that the packages training needs are installed, before hours are spent.

    Raises:
        MissingDependencyError: names all missing packages.
    """
    missing = [name for name in ("torch", "safetensors", "matplotlib") if find_spec(name) is None]
    if missing:
        raise MissingDependencyError(
            f"Training needs {', '.join(missing)}, not installed: pip install 'batchloom[train]'."
        )
