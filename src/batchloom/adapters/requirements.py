"""Which versions of frameworks the adapters were written for, and how to install them."""

import importlib.metadata
import re
from dataclasses import dataclass

from batchloom.core.errors import MissingDependencyError

_NUMBER_PATTERN = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Requirement:
    """A package an adapter needs.

    Attributes:
        package: its name on the package index.
        least: the oldest version the adapter works with.
        extra: of batchloom, that installs it.
        below: the first version that is known not to work; empty for none.
    """

    package: str
    least: str
    extra: str
    below: str = ""


TORCH = Requirement("torch", "2.6", "train")
# The first whose Trainer can leave the order of the data alone (train_sampling_strategy).
TRANSFORMERS = Requirement("transformers", "5.2", "trainer")
DATASETS = Requirement("datasets", "4.0", "hf")
TRL = Requirement("trl", "1.0", "trl")
LIGHTNING = Requirement("lightning", "2.4", "lightning")
ACCELERATE = Requirement("accelerate", "1.4", "accelerate")
DEEPSPEED = Requirement("deepspeed", "0.16", "deepspeed")
MEGATRON = Requirement("megatron-core", "0.13", "megatron")
TORCHTITAN = Requirement("torchtitan", "0.3", "torchtitan")
RAY = Requirement("ray", "2.60", "ray")
# ray.train cannot be imported without it, and ray itself does not ask for it.
PANDAS = Requirement("pandas", "2.2", "ray-train")


def require_installed(*requirements: Requirement) -> None:
    """Make sure that packages are installed, in versions an adapter works with.

    Raises:
        MissingDependencyError: names every package that is missing or of another version, which one is
            needed, and how to install it.
    """
    problems = [problem for requirement in requirements if (problem := find_requirement_problem(requirement))]
    if problems:
        raise MissingDependencyError(" ".join(problems))


def find_requirement_problem(requirement: Requirement) -> str | None:
    """What is wrong with a package as it is installed, and the remedy; None when it can be used."""
    bound = f">={requirement.least}" + (f",<{requirement.below}" if requirement.below else "")
    remedy = f"pip install 'batchloom[{requirement.extra}]' (or '{requirement.package}{bound}')."
    installed_version = get_installed_version(requirement.package)
    if installed_version is None:
        return f"{requirement.package} is needed and not installed: {remedy}"
    if _release_key(installed_version) < _release_key(requirement.least) or (
        requirement.below and _release_key(installed_version) >= _release_key(requirement.below)
    ):
        return f"{requirement.package} {installed_version} is installed and {bound} is needed: {remedy}"
    return None


def get_installed_version(package: str) -> str | None:
    """The version of a package that is installed; None where there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _release_key(version: str) -> tuple[int, ...]:
    """The numbers of a release, to compare; what stands behind them (rc1, +cpu) is left aside."""
    release = re.split(r"[^0-9.]", version, maxsplit=1)[0]
    return tuple(int(number) for number in _NUMBER_PATTERN.findall(release))
