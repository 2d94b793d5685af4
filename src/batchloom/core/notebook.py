"""Display of stores, plans and batches in notebooks."""

import importlib

from batchloom.core.errors import MissingDependencyError


def make_notebook_html(value: object) -> str | None:
    """Return the display of a value, made by ``batchloom.view``.

    Without the packages of the pages it is None, and a notebook shows the ``repr``.
    """
    try:
        # By name, so that the packages of these values do not depend on the pages. Only a notebook comes here.
        pages = importlib.import_module("batchloom.view")
    except MissingDependencyError:
        return None
    display: str | None = pages.make_notebook_html(value)
    return display
