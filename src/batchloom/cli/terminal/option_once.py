"""Refusal of repeated options: click would silently use the last value."""

from collections import Counter
from typing import Any, final

import typer
from typer.core import TyperCommand


@final
class SingleOptionCommand(TyperCommand):
    """A command that refuses repetition of an option with a single value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments as click's ``Command.parse_args``.

        Raises:
            BadParameter: an option is given more than once.
        """
        _, _, order = self.make_parser(ctx).parse_args(args=list(args))
        counts: Counter[Any] = Counter(param for param in order if param.param_type_name == "option")
        for param, times in counts.items():
            if times > 1 and not (param.multiple or param.count or param.is_eager):
                name = max(param.opts, key=len)
                raise typer.BadParameter(f"it is given {times} times, and has one value: give it once", param_hint=name)
        return super().parse_args(ctx, args)
