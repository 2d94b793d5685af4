"""Announcement of what takes seconds to load, such as transformers."""

import contextlib
from collections.abc import Callable

Display = Callable[[str], contextlib.AbstractContextManager[object]]

_display: Display = contextlib.nullcontext


def set_load_display(display: Display) -> None:
    """Set the function that shows what is being loaded: the command line has a spinner."""
    global _display  # noqa: PLW0603 - a property of the process
    _display = display


def announce_load(name: str) -> contextlib.AbstractContextManager[object]:
    """Show that ``name`` is being loaded, inside the block."""
    return _display(name)
