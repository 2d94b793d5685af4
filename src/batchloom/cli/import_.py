"""``batchloom import``."""

from pathlib import Path
from typing import Annotated

from batchloom.cli.options import Argument, AsJson, Option
from batchloom.cli.prepare import ProgressDisplay, parse_shard_tokens, print_result
from batchloom.cli.terminal import plain_console, print_json
from batchloom.core.errors import SettingsError
from batchloom.preparation.imports import ImportSpec, LinkMode, run_import


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
    tokenizer: Annotated[
        str | None, Option(help="Tokenizer that made the ids, in the form prepare takes; not train:N.")
    ] = None,
    end_token: Annotated[
        str | None,
        Option(
            help="End-of-document token; config for the eos_token of tokenizer_config.json.",
            show_default="the tokenizer's",
        ),
    ] = None,
    vocab_size: Annotated[
        int | None, Option(help="Exclusive upper bound of the ids, if no tokenizer is given.")
    ] = None,
    dtype: Annotated[
        str | None, Option(help="Type of the ids of a flat file: uint16, uint32, int32, ... A .npy file has its own.")
    ] = None,
    eod: Annotated[
        int | None,
        Option(help="Id that ends each document of a flat file.", show_default="the tokenizer's end token"),
    ] = None,
    document_tokens: Annotated[
        int | None,
        Option(help="Number of tokens after which a flat file is cut into documents, instead of --eod."),
    ] = None,
    val_fraction: Annotated[
        float,
        Option(help="With --copy, share of the documents for the subset val, chosen by hash."),
    ] = 0.0,
    tokens_per_shard: Annotated[
        str, Option(metavar="SIZE", help="With --copy, maximum tokens of a shard (100M, 1G).")
    ] = "100M",
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
        tokens_per_shard=parse_shard_tokens(tokens_per_shard),
        how=link_mode,
    )
    with ProgressDisplay() as display:
        result = run_import(spec, out, display.show)
    if as_json:
        print_json(result)
    else:
        print_result(plain_console(), result)
