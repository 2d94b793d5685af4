"""Versions of packages that decide output bytes, equal in all workers."""

import importlib.metadata
from collections.abc import Mapping, Sequence
from functools import lru_cache

from batchloom.core.errors import WorkerError
from batchloom.text import CleanStep, get_step_packages

_VERSIONED_PACKAGES = ("batchloom", "fastokens", "splintr-rs", "tokenizers")


def collect_versions(steps: Sequence[CleanStep]) -> dict[str, str]:
    """Return the installed versions by package; empty for a missing one."""
    return {name: _get_installed_version(name) for name in _VERSIONED_PACKAGES} | get_step_packages(steps)


def check_versions(expected: Mapping[str, str]) -> None:
    """Raise WorkerError if packages differ from those of the coordinator."""
    installed_versions = {name: _get_installed_version(name) for name in expected}
    differing = [
        f"{name} {installed_versions[name] or 'is missing'} where the coordinator has {version or 'none'}"
        for name, version in expected.items()
        if installed_versions[name] != version
    ]
    if differing:
        raise WorkerError(
            f"A worker has {', '.join(differing)}: it would write other bytes. Install the same versions on every "
            "node, then give the same command again to resume."
        )


@lru_cache(maxsize=64)
def _get_installed_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
