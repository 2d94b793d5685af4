"""``batchloom view``."""

from typing import Annotated, Any

import typer

from batchloom.cli.terminal import print_escaped, with_settings
from batchloom.view import ViewSpec, serve_view


@with_settings(ViewSpec)
def view(
    path: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help="Folder or URL of a store, a Megatron prefix, the name of synthetic data, or a mixture's YAML file.",
        ),
    ],
    *,
    settings: dict[str, Any],
) -> None:
    """Look at documents, masks and packed rows in a browser."""
    serve_view(ViewSpec(path=path, **settings), print_escaped)
