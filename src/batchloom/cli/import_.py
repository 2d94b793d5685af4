"""``batchloom import``."""

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from batchloom.cli.prepare import ProgressDisplay, parse_size, print_result
from batchloom.cli.terminal.console import plain_console
from batchloom.core.errors import SettingsError
from batchloom.preparation.imports import ImportSpec, LinkMode, run_import


def import_(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="PREFIX|FILE...",
            help="Megatron prefixes, flat files of ids, .npy files, folders of prefixes.",
        ),
    ],
    *,
    out: Annotated[Path, typer.Option(help="Folder of the store.")],
    val: Annotated[list[str] | None, typer.Option(help="A prefix or file of the subset val (repeatable).")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="What made the ids, as for prepare (but for train:N).")] = None,
    end_token: Annotated[
        str | None,
        typer.Option(help="End-of-document token, where the tokenizer does not say."),
    ] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Without a tokenizer: every id is below this.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Of the ids of a flat file: uint16, uint32, int32, ...")] = None,
    eod: Annotated[
        int | None,
        typer.Option(help="Id that ends each document of a flat file (the tokenizer's, when not given)."),
    ] = None,
    document_tokens: Annotated[
        int | None,
        typer.Option(help="Cut a flat file into documents of so many tokens instead."),
    ] = None,
    val_fraction: Annotated[
        float,
        typer.Option(help="Share of documents, by hash, for validation; only with --copy."),
    ] = 0.0,
    tokens_per_shard: Annotated[str, typer.Option(help="With --copy: a shard has at most so many tokens.")] = "100M",
    copy: Annotated[bool, typer.Option("--copy", help="Write shards anew instead of linking the files.")] = False,
    symlink: Annotated[
        bool,
        typer.Option(
            "--symlink",
            help="Link by name, where hard links are impossible; the store needs the files where they are.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False,
) -> int:
    """Make a store around existing files of token ids, without copying them."""
    if copy and symlink:
        raise SettingsError(["how: --copy and --symlink exclude each other"])
    link_mode: LinkMode = "copy" if copy else "symlink" if symlink else "link"
    spec = ImportSpec(
        inputs=tuple(inputs),
        val=tuple(val or ()),
        tokenizer=tokenizer,
        end_token=end_token,
        vocab_size=vocab_size,
        dtype=dtype,
        eod=eod,
        document_tokens=document_tokens,
        val_fraction=val_fraction,
        tokens_per_shard=parse_size(tokens_per_shard),
        how=link_mode,
    )
    with ProgressDisplay() as display:
        result = run_import(spec, out, display.show)
    if as_json:
        sys.stdout.buffer.write(msgspec.json.encode(result, enc_hook=str) + b"\n")
    else:
        print_result(plain_console(), result)
    return 0
