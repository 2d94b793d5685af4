"""``batchloom import``."""

from pathlib import Path
from typing import Annotated, Any

from batchloom.cli.options import Argument, AsJson, Option, with_settings
from batchloom.cli.prepare import ProgressDisplay, print_result
from batchloom.cli.terminal import plain_console, print_json
from batchloom.core.errors import SettingsError
from batchloom.preparation import ImportSpec, LinkMode, run_import


@with_settings(ImportSpec)
def import_(
    inputs: Annotated[
        list[str],
        Argument(
            metavar="PREFIX|FILE",
            help="Megatron prefixes, folders of prefixes, and flat or .npy files of token ids.",
        ),
    ],
    *,
    out: Annotated[Path, Option(help="Folder of the store to make.")],
    val: Annotated[list[str] | None, Option(help="Prefix or file for the subset val. Repeatable.")] = None,
    settings: dict[str, Any],
    copy: Annotated[bool, Option("--copy", help="Write new shards instead of linking the files.")] = False,
    symlink: Annotated[
        bool,
        Option(
            "--symlink",
            help="Use symbolic links, for files on another file system, which must stay there.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make a store around existing files of token ids."""
    if copy and symlink:
        raise SettingsError(["how: --copy and --symlink exclude each other"])
    link_mode: LinkMode = "copy" if copy else "symlink" if symlink else "link"
    spec = ImportSpec(inputs=tuple(inputs), val=tuple(val or ()), how=link_mode, **settings)
    with ProgressDisplay() as display:
        result = run_import(spec, out, display.show)
    if as_json:
        print_json(result)
    else:
        print_result(plain_console(), result)
