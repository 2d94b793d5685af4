"""What a step of cleaning is: a text in, a text or a drop with its reason out."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class CleanStep:
    """One step as a recipe names it.

    Attributes:
        name: of the step.
        settings: what differs from the step's defaults, by name.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DroppedText:
    """A document that a step leaves out.

    Attributes:
        reason: the rule, one of a closed list without figures (``gopher: too few words``); drops
            are counted by it.
        detail: what was found and what is asked for (``31 words, at least 50``).
    """

    reason: str
    detail: str


CleanFunction = Callable[[str], str | DroppedText]
