"""``check``: is a path sound? A store, a bare Megatron prefix, or raw input."""

import os
from dataclasses import replace
from pathlib import Path

from batchloom.core.addresses import is_far, is_url, label_of, local_path, shown
from batchloom.core.document import BadRecord
from batchloom.core.errors import (
    BatchloomError,
    DownloadError,
    InputError,
    InputMissingError,
    NoRangesError,
    SettingsError,
    StoreError,
    StoreMissingError,
)
from batchloom.core.files import because
from batchloom.core.synthetic_data import parse_synthetic
from batchloom.core.wording import counted
from batchloom.preparation import ReadRecipe, Recipe
from batchloom.preparation.dedup import Duplicates
from batchloom.preparation.documents import Readings, document_keys, texts_in, tidy, walk
from batchloom.preparation.request import list_inputs, read_inputs
from batchloom.preparation.units import plan_units
from batchloom.remote import is_web
from batchloom.sources import (
    Limits,
    Listing,
    Part,
    ReadRules,
    RecordBounds,
    error_of,
    not_found,
    read_ahead,
)
from batchloom.sources.files import Spool, find_hub_name
from batchloom.store import MANIFEST_NAME, verify_prefix, verify_store
from batchloom.store.format import half_a_store
from batchloom.store.maintain import Verdict, verify_far, verify_synthetic
from batchloom.store.read import read_far_manifest

_SHOWN = 10
_SAMPLE = 200


def check(
    path: str | os.PathLike[str],
    *,
    text_field: str | None = None,
    vocab_size: int | None = None,
    generation: int | None = None,
) -> Verdict:
    """Verify a store, a bare Megatron prefix, or raw input of any kind, and say whether it is real data.

    A store, also behind a URL: checksums, counts, ids within the vocabulary, the tokenizer's fingerprint, a decoded
    sample, that tokens are not uniform noise. Raw input, also what a manifest names: that every
    record can be read, as ``prepare`` would.

    Args:
        path: what to check.
        text_field: field of a raw record that holds the text; None where its schema is told from
            the records.
        vocab_size: every id of a bare prefix must be below it; a store knows its own.
        generation: of a store, an older one; None for the newest.

    Raises:
        InputMissingError: there is nothing at ``path``: the data is absent.
        InputError: it is of a kind that cannot be checked, or a manifest that names no data sets.
        SettingsError: settings of synthetic data, or of a manifest, that are none; a generation of what has none.
        GenerationError: the store has no such generation.
    """
    given = local_path(os.fspath(path))
    place = Path(given)
    if is_url(given):
        return _check_far(given, text_field, generation)
    if is_far(given) and generation is None:
        return _check_raw(given, text_field)
    try:
        verdict = _check_prepared(given, vocab_size, generation)
    except BatchloomError:
        raise
    except OSError as error:
        raise InputError(f"{place} cannot be read: {because(error)}.") from error
    return verdict or _check_raw(given, text_field)


def _check_far(url: str, text_field: str | None, generation: int | None) -> Verdict:
    """The verdict on what lies at a URL: a store where there is a manifest, else raw input."""
    is_store, strange = generation is not None, None
    # What has an ending is a file; its server may answer anything to what lies below it.
    if not is_store and not Path(shown(url)).suffix:
        try:
            read_far_manifest(url)
            is_store = True
        except StoreMissingError:
            pass
        except StoreError:
            is_store = True  # A damaged one.
        except NoRangesError:
            raise  # A manifest is there, and so the store that was meant.
        except InputError as error:
            # What cannot be reached is told by who looks for records, but for what a server answered instead.
            strange = error if is_web(url) and isinstance(error, DownloadError) else None
    if is_store:
        return verify_far(url, generation=generation)
    try:
        verdict = _check_raw(url, text_field)
    except InputMissingError:
        if strange is not None:
            raise strange from None
        raise
    if strange is not None:
        verdict.facts["no store"] = str(strange)
    return verdict


def _check_prepared(given: str, vocab_size: int | None, generation: int | None) -> Verdict | None:
    """The verdict on a store or a prefix; None where there is something else."""
    place = Path(given)
    if (place / MANIFEST_NAME).exists():
        return verify_store(place, generation=generation)
    if generation is not None:
        raise SettingsError([f"generation: only stores have generations, and {place} is none"])
    stem = place.with_suffix("") if place.suffix in (".bin", ".idx") else place
    if not place.is_dir() and stem.name and stem.with_name(stem.name + ".idx").is_file():
        return verify_prefix(stem, vocab_size)
    if stem == place and find_hub_name(given):
        return None
    if not place.exists():
        if not os.path.lexists(place) and parse_synthetic(str(place)):
            return verify_synthetic(str(place))
        raise InputMissingError(not_found(given))
    if half := half_a_store(place):
        raise InputError(half)
    return None


def _check_raw(given: str, text_field: str | None) -> Verdict:
    found = read_inputs(given, ReadRecipe(text_field=text_field), None)
    recipe = Recipe(
        inputs=found.inputs,
        sources=found.sources,
        reading=found.reading,
        follow_links=found.follow_links,
    )
    with Spool() as spool:
        listing = list_inputs(recipe, spool)
        listing = replace(listing, notes=(*found.notes, *listing.notes))
        path = label_of(given) if is_far(given) else given
        return _check_listed(listing, path, Readings(recipe, Limits()))


def _check_listed(listing: Listing, path: str, readings: Readings) -> Verdict:
    with Duplicates() as duplicates:
        verdict = _check_documents(listing, path, readings, duplicates)
        again = duplicates.repeated()
    if again:
        verdict.facts["duplicates"] = (
            f"{counted(again, 'document')} stood there before: prepare leaves such out (--no-dedup keeps them)"
        )
    return verdict


def _check_documents(
    listing: Listing, path: str, readings: Readings, duplicates: Duplicates
) -> Verdict:
    verdict = Verdict(path, "file")
    for number, note in enumerate(listing.notes, 1):
        verdict.facts["note" if number == 1 else f"note {number}"] = note
    rules = readings.rules
    parts = (
        (part, None)
        for unit in plan_units(listing.sources, rules)
        for part in read_ahead(unit.parts, lambda one: one.source)
    )
    records = documents = empty = bad = 0

    def refused(_: Part, error: InputError) -> None:
        verdict.faults.append(str(error))

    for stretch in walk(parts, readings, RecordBounds(rules), refused):
        found = stretch.found
        if stretch.reading.detected:
            verdict.facts[f"detected in {stretch.part.source.name}"] = stretch.reading.detected
        empty += sum(_is_empty(document) for document in found.values)
        documents += len(found.values)
        records += found.seen
        bad += len(found.bad)
        _note(verdict, stretch.part, rules, found.bad, stretch.before or 0)
        if not verdict.sample and found.values:
            verdict.sample = "\n".join(texts_in(found.values[0]))[:_SAMPLE]
        tidy(found, stretch.reading.way, normalized=True)
        if found.values:
            duplicates.add(document_keys(found.values))
    verdict.facts["files"] = len(listing.sources)
    verdict.facts["records"] = (
        f"{records:,} ({documents - empty:,} documents, {empty:,} empty, {bad:,} bad)"
    )
    if bad > _SHOWN:
        verdict.faults.append(f"{path}: and {bad - _SHOWN:,} more bad records.")
    if not documents - empty:
        verdict.faults.append(f"{path}: holds no document.")
    verdict.used = (
        f"batchloom prepare {path} --out STORE reads {counted(documents - empty, 'document')} of it"
        if documents - empty
        else "nothing"
    )
    return verdict


def _is_empty(document: object) -> bool:
    return isinstance(document, str) and not document.strip()


def _note(
    verdict: Verdict, part: Part, rules: ReadRules, bad: list[BadRecord], before: int
) -> None:
    for record in bad[: max(0, _SHOWN - len(verdict.faults))]:
        verdict.faults.append(str(error_of(part.source, rules, before, record)))
