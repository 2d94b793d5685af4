"""Wording of the notes of ``prepare``."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from batchloom.core.document import BadRecord
from batchloom.core.wording import format_count, format_list
from batchloom.preparation.documents.record_parsers import PLAIN_TEXT_NOTE, WHOLE_TEXTS, RecordParsers
from batchloom.preparation.documents.subsets import SubsetRule, describe_missed_shares
from batchloom.preparation.phases.base_generations import BaseGenerations
from batchloom.preparation.report.progress import Note
from batchloom.preparation.report.report import ReportContent
from batchloom.preparation.settings.read_recipe import describe_unused_weights
from batchloom.preparation.settings.recipe import Recipe
from batchloom.preparation.settings.run_settings import ExecutionSettings
from batchloom.preparation.units.work_folder import Decision, TokenizedUnit, UnitDedupCounts
from batchloom.sources import ReadRules, SourceListing, format_record_name
from batchloom.sources.files import Source
from batchloom.sources.formats import choose_read_method

RESUMED_MOVE = Note("Resuming: the store was complete and only had to be moved into --out.")
OTHER_VERSIONS = Note(
    "Versions of packages that affect the documents changed since this job was stopped: all units are prepared again."
)


def describe_listing(listing: SourceListing) -> list[Note]:
    """Return the notes of a listing, in order."""
    return [Note(text, is_warning=text in listing.warnings) for text in listing.notes]


def describe_first_append(out: Path, recipe: Recipe) -> str:
    """Describe that an append makes a new store."""
    return f"There is no store at {out} yet: it is made, with the tokenizer {recipe.tokenizer}."


def describe_work_folder(folder: Path, location: str) -> Note:
    """Describe where a remote store is made, and what happens to that folder."""
    return Note(
        f"The store is written to the work folder {folder} (--work) and uploaded to {location}. The work folder is "
        "deleted after the upload."
    )


def describe_reading(sources: Sequence[Source], record_parsers: RecordParsers, recipe: Recipe) -> list[Note]:
    """Describe how the sources are read, and which settings do not apply to them."""
    notes = []
    if weights := describe_unused_weights(recipe.sources):
        notes.append(Note(weights, is_warning=True))
    names_by_schema: dict[str, list[str]] = {}
    text_names: list[str] = []
    other_names: list[str] = []
    for source in sources:
        record_parser = record_parsers.get_parser(source)
        (text_names if record_parser.record_kind == "text" else other_names).append(source.name)
        # A column called text needs no note.
        if record_parser.detected and record_parser.detected != PLAIN_TEXT_NOTE:
            names_by_schema.setdefault(record_parser.detected, []).append(source.name)
    for detected, source_names in names_by_schema.items():
        notes.append(Note(f"Detected {detected} in {format_list(source_names, 1)}."))
    if other_names and recipe.reading.clean:
        text = f"Cleaning applies only to texts and does not change {format_list(other_names, 1)}."
        notes.append(Note(text, is_warning=True))
    if text_names and recipe.chat.max_tokens is not None:
        notes.append(Note(f"{WHOLE_TEXTS} {format_list(text_names, 1)}.", is_warning=True))
    if recipe.dedup.repeat_unit:
        notes += _describe_repeat_removal(recipe.dedup.repeat_unit, other_names)
    return notes


def _describe_repeat_removal(repeat_unit: str, other_names: Sequence[str]) -> list[Note]:
    notes = [
        Note(
            f"Repeated {repeat_unit} are removed from texts, except for the first copy, also in verse, "
            f"tables and code (--dedup {repeat_unit}). --dedup exact does not change texts."
        )
    ]
    if other_names:
        text = (
            f"Repeated {repeat_unit} are removed only from texts. From {format_list(other_names, 1)} "
            "only equal documents are removed."
        )
        notes.append(Note(text, is_warning=True))
    return notes


def describe_executor(execution: ExecutionSettings, units: int) -> list[Note]:
    """Describe workers that are not used, and a slow start."""
    notes = []
    if isinstance(execution.workers, int) and execution.workers > units:
        text = (
            f"The input makes {format_count(units, 'unit')} of work, so at most {units:,} of "
            f"{execution.workers:,} workers are used."
        )
        notes.append(Note(text))
    if execution.engine == "ray" and execution.address is None:
        notes.append(Note("Starting Ray on this machine, which takes some seconds."))
    return notes


def describe_unused_columns(columns: Sequence[str]) -> list[Note]:
    """Name the columns that nothing reads."""
    return [Note(f"Unused columns: {', '.join(columns)}")] if columns else []


def describe_adopted_units(adopted: int, units: int) -> list[Note]:
    """Describe the units that a stream has read."""
    return [Note(f"Resuming: {adopted:,} of {units:,} units were already read by a stream.")] if adopted else []


def describe_resumed_units(resumed: int, units: int) -> list[Note]:
    """Describe the units that an earlier run has finished."""
    return [Note(f"Resuming: {resumed:,} of {units:,} units were finished by an earlier run.")] if resumed else []


def describe_missing_signatures(base: BaseGenerations, out: Path) -> list[Note]:
    """Describe the shards of a store in which near duplicates are not searched."""
    if not base.without_signatures:
        return []
    text = (
        f"{out} holds signatures of this kind for {len(base.signatures) - base.without_signatures:,} of "
        f"its {len(base.signatures):,} shards (prepare with --dedup near writes them): near "
        "duplicates of documents in the other shards are not removed."
    )
    return [Note(text, is_warning=True)]


def describe_subsets(
    membership: SubsetRule,
    decision: Decision,
    base: BaseGenerations,
    documents: int,
    sources: Sequence[Source],
    record_parsers: RecordParsers,
    *,
    balance: bool,
) -> list[Note]:
    """Describe subsets that stay empty, and those that miss their share of the tokens.

    ``documents`` counts all documents of the store.
    """
    missed_shares = describe_missed_shares(
        membership.shares,
        decision.tokens,
        documents,
        balance=balance,
        texts=all(record_parsers.get_parser(source).record_kind == "text" for source in sources),
        splits=any(source.kind in ("text", "code") for source in sources),
    )
    texts = [*membership.empty_notes(decision.shards, base.nonempty_subsets), *missed_shares]
    return [Note(text, is_warning=True) for text in texts]


def describe_long_documents(
    units: Sequence[TokenizedUnit], dedup_counts: Sequence[UnitDedupCounts], rules: ReadRules, tokens_per_shard: int
) -> list[Note]:
    """Describe documents longer than a shard, with the position of the longest."""
    count = sum(counts.long for counts in dedup_counts)
    if not count:
        return []
    number = max(range(len(dedup_counts)), key=lambda number: dedup_counts[number].longest[0])
    length, part, record, offset = dedup_counts[number].longest
    longest_part = units[number].unit.parts[part]
    bound = (units[number].unit.number, longest_part.start)
    records_before = 0
    for unit in units[: number + 1]:
        for other_part, facts in zip(unit.unit.parts, unit.facts.parts, strict=True):
            if other_part.source.path == longest_part.source.path and (unit.unit.number, other_part.start) < bound:
                records_before += facts.records
    bad_record = BadRecord(record, offset, None, "", "")
    record_name = format_record_name(longest_part.source, rules, records_before, bad_record)
    documents_phrase = "1 document is" if count == 1 else f"{count:,} documents are"
    text = (
        f"{documents_phrase} longer than a shard ({tokens_per_shard:,} tokens, --tokens-per-shard), so some shards "
        f"are larger. The longest has {length:,} tokens: {record_name}. Raise --tokens-per-shard, or cut texts "
        "into smaller documents (--split-on paragraph)."
    )
    return [Note(text, is_warning=True)]


def describe_altered_texts(content: ReportContent, repeat_unit: str | None) -> list[Note]:
    """Describe the number of altered texts, which document counts do not show."""
    notes = []
    for flow in content.flows:
        if flow.step == "tokenize" and flow.altered:
            text = (
                f"Fill-in-the-middle: {flow.altered:,} of {format_count(flow.documents_out, 'document')} were "
                "rearranged (counted before duplicates are removed)."
            )
            notes.append(Note(text))
        if flow.step == repeat_unit and flow.bytes_in:
            text = (
                f"Removed {flow.bytes_in - flow.bytes_out:,} bytes of repeated {repeat_unit}: from "
                f"{format_count(flow.altered, 'document')} that remain, and from "
                f"{format_count(flow.documents_in - flow.documents_out, 'document')} without any other text."
            )
            notes.append(Note(text))
    return notes


def describe_cut_texts(units: Sequence[TokenizedUnit], record_parsers: RecordParsers) -> list[Note]:
    """Describe the long texts that the default rule cut into documents."""
    counts: Counter[str] = Counter()
    for unit in units:
        for part, part_counts in zip(unit.unit.parts, unit.facts.parts, strict=True):
            if choose_read_method(part.source, record_parsers.rules) == "cut":
                counts[part.source.name] += part_counts.records
    names = [name for name, count in counts.items() if count > 1]
    if not names:
        return []
    others = f" and {format_count(len(names) - 1, 'other text')}" if len(names) > 1 else ""
    total = sum(counts[name] for name in names)
    text = (
        f"{names[0]}{others}: cut at blank lines into {format_count(total, 'document')} (--split-on file keeps "
        "a text whole)."
    )
    return [Note(text)]


def describe_dry_run(page: Path) -> Note:
    """Describe where the result of a dry run is, and how it is used."""
    return Note(
        f"Dry run: no store was written. {page} shows which documents would be left out. The same command without "
        "--dry-run reuses this work."
    )
