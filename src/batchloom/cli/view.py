"""``batchloom view``."""

from typing import Annotated, Any

import typer

from batchloom.cli.terminal import print_escaped, with_settings
from batchloom.view import ViewSpec, serve_view


@with_settings(ViewSpec)
def view(
    data: Annotated[
        list[str],
        typer.Argument(
            metavar="DATA",
            help="Folder or URL of a store, a Megatron prefix, the name of synthetic data, a mixture's YAML file, the "
            "folder or log of a run, or raw inputs as prepare takes them.",
        ),
    ],
    *,
    settings: dict[str, Any],
) -> None:
    """Look at documents, masks, packed rows, plans and runs in a browser."""
    serve_view(ViewSpec(data=data, **settings), print_escaped)
