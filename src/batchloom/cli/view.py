"""``batchloom view``."""

import sys
from typing import Annotated, Any

from batchloom.cli.options import Argument, with_settings
from batchloom.cli.terminal import print_escaped
from batchloom.view import ViewSpec, serve_view, write_view


@with_settings(ViewSpec)
def view(
    data: Annotated[
        list[str],
        Argument(
            metavar="DATA",
            help="Folder or URL of a store, a Megatron prefix, the name of synthetic data, a mixture's YAML file, the "
            "folder or log of a run, or raw inputs as prepare takes them.",
        ),
    ],
    *,
    settings: dict[str, Any],
) -> None:
    """Look at data, masks, packing, plans and runs in a browser."""
    spec = ViewSpec(data=data, **settings)
    if spec.out is None:
        serve_view(spec, _print_at_once)
    else:
        print_escaped(f"Wrote {write_view(spec, spec.out)} to {spec.out}.")


def _print_at_once(line: str) -> None:
    """Print a line at once, also into a pipe: the server goes on until it ends."""
    print_escaped(line)
    sys.stdout.flush()
