"""The frameworks that can be compared: each an example, and what it needs."""

from dataclasses import dataclass

from batchloom.adapters.requirements import (
    PANDAS,
    RAY,
    TORCH,
    TRANSFORMERS,
    Requirement,
    problem_of,
)


@dataclass(frozen=True, slots=True)
class Framework:
    """A framework with an example.

    Attributes:
        name: as ``--frameworks`` takes it.
        module: of the example, in ``batchloom.examples``; its ``train(model, job)`` is called.
        needs: packages that have to be installed.
        started_by: ``torchrun``, or ``itself`` where it starts its own processes.
    """

    name: str
    module: str
    needs: tuple[Requirement, ...]
    started_by: str = "torchrun"


# The examples' model is a transformers one.
_ALL = (TORCH, TRANSFORMERS)

FRAMEWORKS = (
    Framework("pytorch", "pytorch", _ALL),
    Framework("ray-train", "with_ray", (*_ALL, RAY, PANDAS), started_by="itself"),
)


def by_name(name: str) -> Framework:
    """The framework of a name that is known."""
    return next(one for one in FRAMEWORKS if one.name == name)


def missing(framework: Framework) -> list[str]:
    """Why a framework cannot run here; empty when it can."""
    return [problem for one in framework.needs if (problem := problem_of(one))]
