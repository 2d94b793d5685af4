"""``batchloom log``, ``remove`` and ``compact``: the generations of a store."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from batchloom.cli.options import Argument, AsJson, DryRun, Option
from batchloom.cli.terminal import report
from batchloom.core.wording import format_count, format_list
from batchloom.store import compact_store, read_log, remove_documents
from batchloom.store.maintain import GenerationLogEntry, RemovalResult

_MAX_LISTED = 10
_STORE_ARGUMENT = Argument(metavar="STORE", help="Folder of the store.")


def log(
    path: Annotated[Path, _STORE_ARGUMENT],
    *,
    as_json: AsJson = False,
) -> None:
    """List the generations of a store."""
    entries = read_log(path)
    report(entries, map(_format_log_entry, entries), as_json=as_json)


def _format_log_entry(entry: GenerationLogEntry) -> str:
    documents = sum(entry.documents.values())
    tokens = sum(entry.tokens.values())
    left = " left" if entry.made == "removed" else ""
    facts = [format_count(documents, "document") + left, format_count(tokens, "token")]
    if entry.sources:
        facts.append(f"{format_count(len(entry.sources), 'source')} added ({format_list(entry.sources, 1)})")
    if entry.selected:
        facts.append("sources " + ", ".join(entry.selected))
    if entry.recipe_fingerprint:
        facts.append(f"recipe {entry.recipe_fingerprint[:12]}")
    if entry.when:
        facts.append(entry.when)
    if not entry.readable:
        facts.append("compacted away")
    return f"{entry.number:>4}  {entry.made:<9}  {', '.join(facts)}"


def remove(
    path: Annotated[Path, _STORE_ARGUMENT],
    *,
    source: Annotated[
        list[str] | None,
        Option(
            metavar="NAME",
            help="Source or data set whose documents are removed; may be a glob. Repeatable.",
        ),
    ] = None,
    documents_file: Annotated[
        Path | None,
        Option(
            help="File that names a document to remove in each line: train:17 (subset and number), 32 hex digits (hash "
            "of the text), or the name of a source and the number of a record, from 0.",
        ),
    ] = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Remove documents from a store, in its next generation."""
    result = remove_documents(path, sources=source or (), documents_file=documents_file, dry_run=dry_run)
    report(result, _iter_removal_lines(result, dry_run=dry_run), as_json=as_json)


def _iter_removal_lines(result: RemovalResult, *, dry_run: bool) -> Iterator[str]:
    if result.absent:
        yield f"not in the store: {format_list(result.absent, _MAX_LISTED)}"
    if result.left_out:
        yield (
            f"read, but without a document in the store: {format_list(result.left_out, _MAX_LISTED)}. Such a record "
            "was left out when the store was made (a duplicate, dropped, empty or bad), or is compacted away. The text "
            "of a duplicate is stored under another record; to remove it there, write the hash of the text (32 hex "
            "digits of XXH3-128) instead of this line."
        )
    if result.before:
        yield f"{format_count(result.before, 'document')} had been removed before."
    if not result.documents:
        yield "Nothing to remove; the store stays as it is."
        return
    for name, documents, tokens in result.by_source:
        yield f"{documents:>12,} {tokens:>15,} tokens  {name}"
    removed_text = f"{format_count(result.documents, 'document')} of {result.tokens:,} tokens"
    if dry_run:
        empty_note = " No document would be left." if result.emptied else ""
        yield f"{removed_text} would be removed from {result.path}; nothing was changed.{empty_note}"
        return
    yield (
        f"{removed_text} removed from {result.path}, which is generation {result.generation} now: they read as end "
        "tokens without loss."
    )
    if result.emptied:
        yield (
            f"No document is left: batchloom compact refuses a store without any, so delete {result.path} to delete "
            "the text for good."
        )
        return
    yield (
        f"Older generations and the shards themselves still hold the text: batchloom compact {result.path} deletes it. "
        "Runs on older generations cannot continue then."
    )


def compact(
    path: Annotated[Path, _STORE_ARGUMENT],
    *,
    as_json: AsJson = False,
) -> None:
    """Delete removed documents and older generations for good.

    No training may read the store meanwhile.
    """
    result = compact_store(path)
    if result.made:
        ended_generations = ", ".join(map(str, result.ended))
        text = (
            f"{result.path} is generation {result.generation} now; {ended_generations} can no longer be opened. "
            f"{format_count(result.documents, 'removed document')} deleted for good, "
            f"{format_count(result.shards, 'shard')} rewritten, {format_count(result.files, 'file')} deleted."
        )
    else:
        leftover_note = f"; {format_count(result.files, 'file')} left over deleted" if result.files else ""
        text = f"Nothing to compact: {result.path} is one generation, and no document of it is removed{leftover_note}."
    report(result, [text], as_json=as_json)
