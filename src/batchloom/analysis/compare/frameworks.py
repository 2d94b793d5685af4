"""The frameworks that can be compared: each an example, and what it needs."""

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
    problem_of,
    require,
)
from batchloom.core.errors import InputError, SettingsError
from batchloom.core.settings import nearest


@dataclass(frozen=True, slots=True)
class Framework:
    """A framework with an example.

    Attributes:
        name: as ``--frameworks`` takes it.
        module: of the example, in ``batchloom.examples``, or anybody's by its dotted name or its file (``.py``); its
            ``train(model, job)`` is called.
        needs: packages that have to be installed.
        started_by: ``torchrun``, or ``itself`` where it starts its own processes.
    """

    name: str
    module: str
    needs: tuple[Requirement, ...]
    started_by: str = "torchrun"


# The examples' model is a transformers one.
_ALL = (TORCH, TRANSFORMERS)
_TRAINER = (*_ALL, ACCELERATE, DATASETS)

FRAMEWORKS = (
    Framework("pytorch", "pytorch", _ALL),
    Framework("hf-trainer", "hf_trainer", _TRAINER),
    Framework("trl-sft", "sft_trainer", (*_TRAINER, TRL)),
    Framework("lightning", "with_lightning", (*_ALL, LIGHTNING)),
    Framework("megatron", "with_megatron", (*_ALL, MEGATRON)),
    Framework("fsdp2", "fsdp2", _ALL),
    Framework("fsdp2-trainer", "fsdp2_sft", _ALL),
    Framework("accelerate", "with_accelerate", (*_ALL, ACCELERATE)),
    Framework("deepspeed", "with_deepspeed", (*_ALL, DEEPSPEED)),
    Framework("ray-train", "with_ray", (*_ALL, RAY, PANDAS), started_by="itself"),
)


def require_packages() -> None:
    """Make sure that what trains and what draws is there, before anything is run.

    Raises:
        MissingDependencyError: names what is missing.
    """
    require(TORCH, Requirement("matplotlib", "3.9", "train"))


def by_name(name: str) -> Framework:
    """The framework of a name that is known, or an example of somebody's own by its module or its file.

    Raises:
        SettingsError: there is none; names the nearest.
    """
    for one in FRAMEWORKS:
        if one.name == name:
            return one
    if name.endswith(".py"):
        if not Path(name).is_file():
            raise SettingsError([f"frameworks: there is no file {name}"])
        return Framework(name, str(Path(name).resolve()), _ALL)
    if "." in name and all(part.isidentifier() for part in name.split(".")):
        return Framework(name, name, _ALL)
    known = [one.name for one in FRAMEWORKS]
    problem = (
        f"frameworks: {name!r} is none of {', '.join(known)}, and no module or file of an example"
    )
    raise SettingsError([problem + nearest(name, known)])


def example_of(framework: Framework) -> ModuleType:
    """The module of an example, imported.

    Raises:
        InputError: there is no such module, or it has no ``train``.
    """
    module = framework.module
    if module.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(module).stem, module)
        if spec is None or spec.loader is None:
            raise InputError(f"{module} cannot be imported as a module")
        found = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
    else:
        known = framework in FRAMEWORKS
        found = importlib.import_module(f"batchloom.examples.{module}" if known else module)
    if not callable(getattr(found, "train", None)):
        raise InputError(
            f"{module} is no example: it has no train(model, job). See examples/pytorch.py."
        )
    return found


def hash_example(framework: Framework) -> str | None:
    """Return the hash of an example's file; None where its module cannot be found."""
    if framework.module.endswith(".py"):
        file = framework.module
    else:
        known = framework in FRAMEWORKS
        try:
            spec = importlib.util.find_spec(
                f"batchloom.examples.{framework.module}" if known else framework.module
            )
        except ImportError:
            return None
        if spec is None or spec.origin is None:
            return None
        file = spec.origin
    return xxhash.xxh3_64_hexdigest(Path(file).read_bytes())


def missing(framework: Framework) -> list[str]:
    """Why a framework cannot run here; empty when it can."""
    return [problem for one in framework.needs if (problem := problem_of(one))]
