"""Supported versions of the adapters' frameworks, and how to install them."""

import importlib.metadata
import re
from dataclasses import dataclass

from batchloom.core.errors import MissingDependencyError

_NUMBER_PATTERN = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Requirement:
    """Package that an adapter needs.

    Attributes:
        package: name on the package index.
        least: oldest version that the adapter works with.
        extra: extra of batchloom that installs it; empty for a framework, which users install themselves.
    """

    package: str
    least: str
    extra: str = ""


TORCH = Requirement("torch", "2.6", "train")
# First version whose Trainer can preserve the data order (train_sampling_strategy).
TRANSFORMERS = Requirement("transformers", "5.2")
DATASETS = Requirement("datasets", "4.0", "hf")
TRL = Requirement("trl", "1.0")
LIGHTNING = Requirement("lightning", "2.4")
ACCELERATE = Requirement("accelerate", "1.4")
DEEPSPEED = Requirement("deepspeed", "0.16")
MEGATRON = Requirement("megatron-core", "0.13")
TORCHTITAN = Requirement("torchtitan", "0.3")
RAY = Requirement("ray", "2.60", "ray")
# ray.train cannot be imported without it, and ray does not depend on it.
PANDAS = Requirement("pandas", "2.2", "ray")


def require_installed(*requirements: Requirement) -> None:
    """Check that packages are installed, in versions that an adapter works with.

    Raises:
        MissingDependencyError: the error names every package that is missing or of another version, the required
            version, and how to install it.
    """
    problems = [problem for requirement in requirements if (problem := find_requirement_problem(requirement))]
    if problems:
        raise MissingDependencyError(" ".join(problems))


def find_requirement_problem(requirement: Requirement) -> str | None:
    """Describe the problem of a package and its remedy; None if it can be used."""
    bound = f">={requirement.least}"
    target = f"batchloom[{requirement.extra}]" if requirement.extra else f"{requirement.package}{bound}"
    remedy = f"pip install '{target}'."
    installed_version = get_installed_version(requirement.package)
    if installed_version is None:
        return f"{requirement.package} is needed and not installed: {remedy}"
    if _release_key(installed_version) < _release_key(requirement.least):
        return f"{requirement.package} {installed_version} is installed and {bound} is needed: {remedy}"
    return None


def get_installed_version(package: str) -> str | None:
    """Return the installed version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _release_key(version: str) -> tuple[int, ...]:
    """Return the numbers of a release for comparison, without suffixes (rc1, +cpu)."""
    release = re.split(r"[^0-9.]", version, maxsplit=1)[0]
    return tuple(int(number) for number in _NUMBER_PATTERN.findall(release))
