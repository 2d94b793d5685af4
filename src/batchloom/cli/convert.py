"""``batchloom convert``."""

from typing import Annotated

from batchloom.chat import parse_mapping
from batchloom.cli.options import Argument, AsJson, Option
from batchloom.cli.prepare import ProgressDisplay, unescape_marker
from batchloom.cli.terminal import print_escaped, print_json, print_note
from batchloom.core.errors import SettingsError
from batchloom.core.wording import format_count
from batchloom.preparation import ConversionResult, convert as convert_rows


def convert(
    inputs: Annotated[
        list[str],
        Argument(metavar="INPUT", help="Files, folders, globs, URLs and data sets that prepare reads."),
    ],
    *,
    out: Annotated[
        str,
        Option(
            help="File to write: .jsonl, .jsonl.zst, .jsonl.gz, .json or .parquet; - for JSON lines on standard output."
        ),
    ],
    map_: Annotated[
        str | None,
        Option("--map", help="Columns to rename to a role: prompt=q,response=a.", show_default="no column"),
    ] = None,
    columns: Annotated[
        str | None,
        Option(metavar="A,B,C", help="Columns to write, in this order.", show_default="all columns"),
    ] = None,
    text_field: Annotated[
        str | None,
        Option(help="Column that holds the text; the other columns are left out.", show_default="all columns"),
    ] = None,
    input_split: Annotated[
        str | None,
        Option(help="Split of the data sets in folders and archives, as prepare takes it.", show_default="train"),
    ] = None,
    encoding: Annotated[
        str | None,
        Option(help="Encoding of text, JSON and CSV files: gb18030, cp1252, utf-16.", show_default="utf-8"),
    ] = None,
    include: Annotated[
        str | None, Option(help="Globs of the files to read, as prepare takes them.", show_default="all")
    ] = None,
    exclude: Annotated[str | None, Option(help="Globs of the files to leave out.", show_default="none")] = None,
    split_on: Annotated[
        str,
        Option(help="Part of a text file that becomes a row, in the form prepare takes."),
    ] = "auto",
    max_bad: Annotated[
        str,
        Option(
            help="Maximum bad records: a number, or a share of all records, which allows at least 10. Bad records are "
            "written to OUT.quarantine.jsonl."
        ),
    ] = "0.1%",
    force: Annotated[bool, Option("--force", help="Replace the output file if it exists.")] = False,
    follow_links: Annotated[
        bool,
        Option(
            "--follow-links",
            help="Follow symbolic links that lead out of an input folder.",
        ),
    ] = False,
    allow_skipped: Annotated[
        bool,
        Option("--allow-skipped", help="Go on if data files of a folder or archive are in forms that are not read."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write the rows of any input as JSON Lines, JSON or Parquet."""
    if as_json and out == "-":
        raise SettingsError(["json: standard output holds the rows; leave --json out, or give --out a file"])
    with ProgressDisplay() as display:
        result = convert_rows(
            inputs,
            out=out,
            mapping=parse_mapping(map_) if map_ is not None else None,
            columns=[name.strip() for name in columns.split(",")] if columns is not None else None,
            text_field=text_field,
            input_split=input_split,
            encoding=encoding,
            include=include or (),
            exclude=exclude or (),
            split_on=unescape_marker(split_on),
            max_bad=max_bad,
            force=force,
            follow_links=follow_links,
            allow_skipped=allow_skipped,
            listener=display.show,
        )
    if as_json:
        print_json(result)
    elif result.path is None:
        # Standard output holds the rows.
        print_note(_format_summary(result))
    else:
        print_escaped(_format_summary(result))


def _format_summary(result: ConversionResult) -> str:
    size = f", {result.bytes / 1e6:,.1f} MB" if result.path else ""
    bad = f"; {format_count(result.quarantined, 'bad record')} left out" if result.quarantined else ""
    quarantine_note = f" (see {result.quarantine})" if result.quarantine else ""
    return f"{result.path or 'standard output'}: {format_count(result.rows, 'row')}{size}{bad}{quarantine_note}."
