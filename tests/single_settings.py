"""Loaders with flat settings: tests vary one setting, whatever its group."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from batchloom.batches import BatchOptions, Loader, PlanOptions

_GROUPS = {"plan": PlanOptions, "batch": BatchOptions}


def group_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of a ``Loader``, with settings moved into their groups."""
    loader_settings = dict(settings)
    for group, options in _GROUPS.items():
        group_values = {
            field.name: loader_settings.pop(field.name) for field in fields(options) if field.name in loader_settings
        }
        if group_values:
            assert group not in loader_settings, f"{group} is given, and {', '.join(group_values)} besides"
            loader_settings[group] = options(**group_values)
    return loader_settings


def make_loader(data: Any, **settings: Any) -> Loader:
    """Make a loader from flat settings."""
    return Loader(data, **group_settings(settings))
