"""The versions of what decides bytes: every worker of a job is to have those of its coordinator."""

import importlib.metadata
from collections.abc import Mapping, Sequence
from functools import lru_cache

from batchloom.core.errors import WorkerError
from batchloom.text import CleanStep, get_step_packages

_VERSIONED_PACKAGES = ("batchloom", "fastokens", "tokenizers")


def collect_versions(steps: Sequence[CleanStep]) -> dict[str, str]:
    """The versions that are installed here, by package; empty where one is not.

    Args:
        steps: the steps of cleaning, of which some use packages of their own.
    """
    return {name: _get_installed_version(name) for name in _VERSIONED_PACKAGES} | get_step_packages(steps)


def check_versions(expected: Mapping[str, str]) -> None:
    """Make sure that this process writes the bytes that the coordinator would.

    Args:
        expected: the versions of the coordinator.

    Raises:
        WorkerError: names the packages that are of another version here.
    """
    installed_versions = {name: _get_installed_version(name) for name in expected}
    differing = [
        f"{name} {installed_versions[name] or 'is missing'} where the coordinator has {version or 'none'}"
        for name, version in expected.items()
        if installed_versions[name] != version
    ]
    if differing:
        raise WorkerError(
            f"A worker has {', '.join(differing)}: it would write other bytes. Install the same versions on every "
            "node, then give the same command again: it goes on."
        )


@lru_cache(maxsize=64)
def _get_installed_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
