"""Loaders with flat settings: tests vary one setting, whatever its group."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from batchloom.batches import BatchOptions, Loader, PlanOptions

_GROUPS = {"plan": PlanOptions, "batch": BatchOptions}


def grouped(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of a ``Loader``, with settings moved into their groups."""
    rest = dict(settings)
    for group, options in _GROUPS.items():
        own = {one.name: rest.pop(one.name) for one in fields(options) if one.name in rest}
        if own:
            assert group not in rest, f"{group} is given, and {', '.join(own)} besides"
            rest[group] = options(**own)
    return rest


def make_loader(data: Any, **settings: Any) -> Loader:
    """Make a loader from flat settings."""
    return Loader(data, **grouped(settings))
