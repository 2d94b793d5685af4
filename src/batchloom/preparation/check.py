"""``check``: is a path sound? A store, a bare Megatron prefix, or raw input."""

import os
from pathlib import Path

from batchloom.core.document import BadRecord
from batchloom.core.errors import InputError, InputMissingError
from batchloom.preparation.units import plan_units
from batchloom.sources.cuts import RecordBounds
from batchloom.sources.hub import hub_name
from batchloom.sources.listing import Listing, list_sources
from batchloom.sources.parts import PartReader
from batchloom.sources.places import is_far, labels_of
from batchloom.sources.rules import Part, ReadRules
from batchloom.sources.spool import Spool
from batchloom.store.format import MANIFEST_NAME
from batchloom.store.verify import Verdict, verify_prefix, verify_store

_SHOWN = 10
_SAMPLE = 200


def check(path: str | os.PathLike[str], *, text_field: str = "text") -> Verdict:
    """Verify a store, a bare Megatron prefix, or raw text and JSONL.

    A store: checksums, counts, ids within the vocabulary, the tokenizer's fingerprint, a decoded
    sample, that tokens are not uniform noise. Raw input: that every record can be read.

    Args:
        path: what to check.
        text_field: field of a raw JSONL record that holds the text.

    Raises:
        InputMissingError: there is nothing at ``path``.
        InputError: it is of a kind that cannot be checked.
    """
    given, place = os.fspath(path), Path(path)
    if is_far(given) or (hub_name(given) and not place.exists()):
        return _check_raw(given, text_field)
    if (place / MANIFEST_NAME).exists():
        return verify_store(place)
    stem = place.with_suffix("") if place.suffix in (".bin", ".idx") else place
    if not place.is_dir() and stem.name and stem.with_name(stem.name + ".idx").is_file():
        return verify_prefix(stem)
    if not place.exists():
        raise InputMissingError(
            f"There is nothing at {place}: no store, no Megatron prefix, no file."
        )
    if (place / ".work").is_dir():
        raise InputError(
            f"{place} is an unfinished store; give its prepare command again: it goes on."
        )
    return _check_raw(str(place), text_field)


def _check_raw(given: str, text_field: str) -> Verdict:
    with Spool() as spool:
        return _check_listed(list_sources([given], spool=spool), labels_of([given])[0], text_field)


def _check_listed(listing: Listing, path: str, text_field: str) -> Verdict:
    verdict = Verdict(path, "file")
    rules = ReadRules(text_field=text_field)
    bounds = RecordBounds(rules)
    earlier: dict[str, int] = {}
    records = documents = empty = bad = 0
    for unit in plan_units(listing.sources, rules):
        for part in unit.parts:
            before = earlier.get(part.source.name, 0)
            seen = 0
            try:
                with PartReader(part, rules, bounds) as reader:
                    for batch in reader:
                        empty += sum(not text.strip() for text in batch.texts)
                        documents += len(batch.texts)
                        seen += batch.seen
                        bad += len(batch.bad)
                        _note(verdict, part, batch.bad, before)
                        if not verdict.sample and batch.texts:
                            verdict.sample = batch.texts[0][:_SAMPLE]
                    reader.finish()
            except InputError as error:
                verdict.faults.append(str(error))
            earlier[part.source.name] = before + seen
            records += seen
    verdict.facts["files"] = len(listing.sources)
    verdict.facts["records"] = (
        f"{records:,} ({documents - empty:,} documents, {empty:,} empty, {bad:,} bad)"
    )
    if bad > _SHOWN:
        verdict.faults.append(f"{path}: and {bad - _SHOWN:,} more bad records.")
    if not documents - empty:
        verdict.faults.append(f"{path}: holds no document.")
    return verdict


def _note(verdict: Verdict, part: Part, bad: list[BadRecord], before: int) -> None:
    for record in bad[: max(0, _SHOWN - len(verdict.faults))]:
        place = (
            f"line {before + record.record + 1}"
            if part.source.kind == "jsonl"
            else f"byte {record.offset}"
        )
        column = f", column {record.column}" if record.column else ""
        verdict.faults.append(f"{part.source.name}, {place}{column}: {record.reason}")
