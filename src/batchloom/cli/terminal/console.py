"""The console all commands print on."""

from rich.console import Console


def plain_console(*, stderr: bool = False) -> Console:
    """A console that prints text as it is: names and documents may spell markup and emoji codes."""
    return Console(stderr=stderr, highlight=False, soft_wrap=True, markup=False, emoji=False)
