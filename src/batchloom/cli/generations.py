"""``batchloom log``, ``remove`` and ``compact``: the generations of a store."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from batchloom.cli.terminal import plain_console
from batchloom.core.wording import escape_unprintable, format_count
from batchloom.store import compact_store, read_log, remove_documents
from batchloom.store.maintain import GenerationLogEntry, RemovalResult

_MAX_LISTED = 10
_STORE_ARGUMENT = typer.Argument(help="A store's folder.")


def log(
    path: Annotated[Path, _STORE_ARGUMENT],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False,
) -> None:
    """List the generations of a store: what made each, and what it holds."""
    found = read_log(path)
    if as_json:
        print(json.dumps([dataclasses.asdict(one) for one in found], ensure_ascii=False))
        return
    console = plain_console()
    for one in found:
        console.print(_format_log_entry(one))


def _format_log_entry(one: GenerationLogEntry) -> str:
    documents, tokens = sum(one.documents.values()), sum(one.tokens.values())
    facts = [format_count(documents, "document"), format_count(tokens, "token")]
    if one.sources:
        more = f" and {len(one.sources) - 1:,} more" if len(one.sources) > 1 else ""
        facts.append(
            f"{format_count(len(one.sources), 'source')} added ({escape_unprintable(one.sources[0])}{more})"
        )
    if one.selected:
        facts.append("sources " + ", ".join(map(escape_unprintable, one.selected)))
    if one.recipe_fingerprint:
        facts.append(f"recipe {one.recipe_fingerprint[:12]}")
    if one.when:
        facts.append(escape_unprintable(one.when))
    if not one.readable:
        facts.append("compacted away")
    return f"{one.number:>4}  {one.made:<9}  {', '.join(facts)}"


def remove(
    path: Annotated[Path, _STORE_ARGUMENT],
    *,
    source: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Remove the documents of the source or data set of this name, or of all that a glob fits; several "
            "times for several.",
        ),
    ] = None,
    documents_file: Annotated[
        Path | None,
        typer.Option(
            help="Remove the documents that the lines of this file name: train:17 (a number), 32 hex digits (a "
            "hash), or the name of a source and the number of a record, counted from 0.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would go, and change nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Take documents out of a store, as its next generation."""
    done = remove_documents(
        path, sources=source or (), documents_file=documents_file, dry_run=dry_run
    )
    if as_json:
        print(json.dumps(dataclasses.asdict(done), default=str, ensure_ascii=False))
        return
    _print_removal(done, dry_run=dry_run)


def _format_first_lines(lines: Sequence[str]) -> str:
    """The first of some lines, and how many there are besides."""
    more = f" and {len(lines) - _MAX_LISTED:,} more" if len(lines) > _MAX_LISTED else ""
    return ", ".join(map(escape_unprintable, lines[:_MAX_LISTED])) + more


def _print_removal(done: RemovalResult, *, dry_run: bool) -> None:
    console = plain_console()
    if done.absent:
        console.print(f"not in the store: {_format_first_lines(done.absent)}")
    if done.left_out:
        console.print(
            f"read, but without a document in the store: {_format_first_lines(done.left_out)}. Such a record was "
            f"left out when the "
            "store was made (a duplicate, dropped, empty or bad) or is compacted away. The text of a duplicate still "
            "stands under another record: the hash of the text (32 hex digits of XXH3-128) in place of the line "
            "removes it there."
        )
    if done.before:
        console.print(f"{format_count(done.before, 'document')} had been removed before.")
    if not done.documents:
        console.print("Nothing to remove; the store stays as it is.")
        return
    for name, documents, tokens in done.by_source:
        console.print(f"{documents:>12,} {tokens:>15,} tokens  {escape_unprintable(name)}")
    what = f"{format_count(done.documents, 'document')} of {done.tokens:,} tokens"
    place = escape_unprintable(str(done.path))
    if dry_run:
        left = " No document would be left." if done.emptied else ""
        console.print(f"{what} would be removed from {place}; nothing was changed.{left}")
        return
    console.print(
        f"{what} removed from {place}, which is generation {done.generation} now: they read as end tokens without loss."
    )
    if done.emptied:
        console.print(
            f"No document is left: batchloom compact refuses a store without any, so delete {place} where the text is "
            "to go for good."
        )
        return
    console.print(
        f"Older generations and the shards themselves still hold the text: batchloom compact {place} deletes it, and "
        "runs on older generations cannot go on then."
    )


def compact(
    path: Annotated[Path, _STORE_ARGUMENT],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Make one generation of a store: removed documents go for good, and older generations with them.

    Let no training read the store meanwhile.
    """
    done = compact_store(path)
    if as_json:
        print(json.dumps(dataclasses.asdict(done), default=str, ensure_ascii=False))
        return
    console, place = plain_console(), escape_unprintable(str(done.path))
    if not done.made:
        left = f"; {format_count(done.files, 'file')} left over deleted" if done.files else ""
        console.print(
            f"Nothing to compact: {place} is one generation, and no document of it is removed{left}."
        )
        return
    ended = ", ".join(map(str, done.ended))
    console.print(
        f"{place} is generation {done.generation} now; {ended} can be opened no longer. "
        f"{format_count(done.documents, 'removed document')} left for good, {format_count(done.shards, 'shard')} "
        f"written anew, "
        f"{format_count(done.files, 'file')} deleted."
    )
