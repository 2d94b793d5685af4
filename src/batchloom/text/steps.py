"""Types of a cleaning step, which maps a text to a text or to a drop."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class CleanStep:
    """A step as named in a recipe.

    Attributes:
        name: name of the step.
        settings: settings that differ from the step's defaults, by name.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DroppedText:
    """A document that a step removes.

    Attributes:
        reason: rule from a closed list, without numbers (``gopher: too few words``); drops
            are counted by it.
        detail: measured and required value (``31 words, at least 50``).
    """

    reason: str
    detail: str


CleanFunction = Callable[[str], str | DroppedText]
