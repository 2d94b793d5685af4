"""Loaders whose settings are named one by one, as tests vary them, whatever group they belong to."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from batchloom.batches import BatchOptions, Loader, PlanOptions

_GROUPS = {"plan": PlanOptions, "batch": BatchOptions}


def grouped(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of a ``Loader``: settings that belong to a group of options are in it."""
    rest = dict(settings)
    for group, options in _GROUPS.items():
        own = {one.name: rest.pop(one.name) for one in fields(options) if one.name in rest}
        if own:
            assert group not in rest, f"{group} is given, and {', '.join(own)} besides"
            rest[group] = options(**own)
    return rest


def make_loader(data: Any, **settings: Any) -> Loader:
    """A loader of such settings."""
    return Loader(data, **grouped(settings))
