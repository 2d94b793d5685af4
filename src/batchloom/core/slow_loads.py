"""Announcement of slow loads, such as that of transformers."""

import contextlib
from collections.abc import Callable

Display = Callable[[str], contextlib.AbstractContextManager[object]]

_display: Display = contextlib.nullcontext


def set_load_display(display: Display) -> None:
    """Set the function that shows loads, such as the command line's spinner."""
    global _display  # noqa: PLW0603 - a property of the process
    _display = display


def announce_load(name: str) -> contextlib.AbstractContextManager[object]:
    """Show that ``name`` is being loaded, inside the block."""
    return _display(name)
