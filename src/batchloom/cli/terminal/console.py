"""The console that all commands print on."""

from rich.console import Console


def plain_console(*, stderr: bool = False) -> Console:
    """Return a console without markup and emoji codes, which names may contain."""
    return Console(stderr=stderr, highlight=False, soft_wrap=True, markup=False, emoji=False)
