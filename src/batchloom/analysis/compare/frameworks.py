"""The frameworks that can be compared, with their examples and requirements."""

import importlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import xxhash

from batchloom.adapters.requirements import (
    ACCELERATE,
    DATASETS,
    DEEPSPEED,
    LIGHTNING,
    MEGATRON,
    PANDAS,
    RAY,
    TORCH,
    TRANSFORMERS,
    TRL,
    Requirement,
    find_requirement_problem,
    require_installed,
)
from batchloom.core.errors import InputError, SettingsError
from batchloom.core.settings import suggest


@dataclass(frozen=True, slots=True)
class Framework:
    """A framework with an example.

    Attributes:
        name: name as ``--frameworks`` accepts it.
        module: module of the example in ``batchloom.examples``, or a user's own dotted name or file (``.py``); its
            ``train(model, job)`` is called.
        requirements: packages that must be installed.
        started_by: ``torchrun``, or ``itself`` if the example starts its own processes.
    """

    name: str
    module: str
    requirements: tuple[Requirement, ...]
    started_by: str = "torchrun"


# The model of the examples comes from transformers.
_TORCH_PACKAGES = (TORCH, TRANSFORMERS)
_TRAINER_PACKAGES = (*_TORCH_PACKAGES, ACCELERATE, DATASETS)

FRAMEWORKS = (
    Framework("pytorch", "pytorch", _TORCH_PACKAGES),
    Framework("hf-trainer", "hf_trainer", _TRAINER_PACKAGES),
    Framework("trl-sft", "sft_trainer", (*_TRAINER_PACKAGES, TRL)),
    Framework("lightning", "with_lightning", (*_TORCH_PACKAGES, LIGHTNING)),
    Framework("megatron", "with_megatron", (*_TORCH_PACKAGES, MEGATRON)),
    Framework("fsdp2", "fsdp2", _TORCH_PACKAGES),
    Framework("fsdp2-trainer", "fsdp2_sft", _TORCH_PACKAGES),
    Framework("accelerate", "with_accelerate", (*_TORCH_PACKAGES, ACCELERATE)),
    Framework("deepspeed", "with_deepspeed", (*_TORCH_PACKAGES, DEEPSPEED)),
    Framework("ray-train", "with_ray", (*_TORCH_PACKAGES, RAY, PANDAS), started_by="itself"),
)


def require_compare_packages() -> None:
    """Check that the training and plotting packages are installed before any run.

    Raises:
        MissingDependencyError: names the missing package.
    """
    require_installed(TORCH, Requirement("matplotlib", "3.9", "train"))


def find_framework(name: str) -> Framework:
    """Return the framework of a name, or of a user's own example module or file.

    Raises ``SettingsError`` for an unknown name; it suggests the nearest.
    """
    for framework in FRAMEWORKS:
        if framework.name == name:
            return framework
    if name.endswith(".py"):
        if not Path(name).is_file():
            raise SettingsError([f"frameworks: there is no file {name}"])
        return Framework(name, str(Path(name).resolve()), _TORCH_PACKAGES)
    if "." in name and all(part.isidentifier() for part in name.split(".")):
        return Framework(name, name, _TORCH_PACKAGES)
    framework_names = [framework.name for framework in FRAMEWORKS]
    problem = f"frameworks: {name!r} is neither one of {', '.join(framework_names)} nor a module or file of an example"
    raise SettingsError([problem + suggest(name, framework_names)])


def import_example(framework: Framework) -> ModuleType:
    """Import the module of an example.

    Raises ``InputError`` if it cannot be imported or has no ``train``.
    """
    module = framework.module
    if module.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(module).stem, module)
        if spec is None or spec.loader is None:
            raise InputError(f"{module} cannot be imported as a module")
        example_module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(example_module)
    else:
        is_bundled = framework in FRAMEWORKS
        example_module = importlib.import_module(f"batchloom.examples.{module}" if is_bundled else module)
    if not callable(getattr(example_module, "train", None)):
        raise InputError(f"{module} is not an example: it has no train(model, job). See examples/pytorch.py.")
    return example_module


def hash_example(framework: Framework) -> str | None:
    """Return the hash of an example's file; None if its module cannot be found."""
    if framework.module.endswith(".py"):
        file = framework.module
    else:
        is_bundled = framework in FRAMEWORKS
        try:
            spec = importlib.util.find_spec(
                f"batchloom.examples.{framework.module}" if is_bundled else framework.module
            )
        except ImportError:
            return None
        if spec is None or spec.origin is None:
            return None
        file = spec.origin
    return xxhash.xxh3_64_hexdigest(Path(file).read_bytes())


def find_missing_packages(framework: Framework) -> list[str]:
    """Return a message per package that is missing or unsuitable."""
    return [problem for requirement in framework.requirements if (problem := find_requirement_problem(requirement))]
