"""Listing of the files of a recipe, without those that cannot be read."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from batchloom.core.addresses import make_input_labels
from batchloom.core.errors import DamagedFileError, InputError, SchemaError
from batchloom.core.wording import format_count
from batchloom.preparation.listing.json_objects import leave_out_objects
from batchloom.preparation.listing.record_samples import get_rows, sample_inputs
from batchloom.preparation.settings.read_recipe import normalize_encoding
from batchloom.preparation.settings.recipe import Recipe
from batchloom.sources import DetectedFile, LeftOutFile, SourceListing, list_sources
from batchloom.sources.files import Source, Spool

# Files that a note or an error lists; the report of a store lists all.
_MAX_LISTED = 10
# Share of the data files or bytes of an input that may be left out.
_MAX_UNREAD = 0.01


def list_inputs(
    recipe: Recipe,
    spool: Spool | None = None,
    *,
    exclude: Path | None = None,
    streaming: bool | None = None,
    detected_files: Mapping[str, DetectedFile] | None = None,
    any_columns: bool = False,
) -> SourceListing:
    """List the files of a recipe's inputs; see :func:`list_sources`.

    With ``any_columns``, JSON objects need no columns that become documents.

    Raises:
        InputError: two inputs name a file with different settings; a file is read once.
    """
    sources = [recipe.source(number) for number in range(len(recipe.inputs))]
    declared_inputs = [
        replace(
            source.declared_input,
            follow_links=recipe.follow_links,
            split=recipe.split(number),
            val_split=recipe.val_split,
            encoding=normalize_encoding(source.encoding or recipe.reading.encoding or "utf-8"),
            subset=source.subset or "",
            include=source.include or recipe.reading.include,
            exclude=source.exclude or recipe.reading.exclude,
            keeps_tags=all(step.name != "html" for step in recipe.reading.clean),
        )
        for number, source in enumerate(sources)
    ]
    listing = list_sources(
        recipe.inputs,
        declared_inputs=declared_inputs,
        exclude=exclude,
        spool=spool,
        streaming=streaming,
        detected_files=detected_files,
        media=recipe.reading.media is not None,
    )
    for name, first, second, is_val_too in listing.duplicates:
        if is_val_too and (get_rows(recipe.split(first)) is None or get_rows(recipe.val_split) is None):
            raise InputError(
                f"{name} is read for training and for val: name two splits, or two ranges of rows, such as "
                "--input-split 'train[5%:]' --val-from 'train[:5%]', or leave the file out."
            )
        if recipe.source(first) != recipe.source(second):
            first_location, second_location = (_describe_input(recipe, number) for number in (first, second))
            raise InputError(
                f"{name} is listed by {first_location} and by {second_location} with different settings, but a file "
                "is read only once; leave one of them out."
            )
    if not recipe.reading.allow_skipped:
        _refuse_unread(listing)
    if not any_columns:
        listing = leave_out_objects(listing, recipe)
    return sample_inputs(listing, recipe)


def _refuse_unread(listing: SourceListing) -> None:
    """Refuse inputs if more than 1 % of their data would be left out.

    Raises:
        InputError: names the files, and how to make them readable.
    """
    for unread in listing.unread:
        if unread.files > _MAX_UNREAD * unread.all_files or unread.bytes > _MAX_UNREAD * unread.all_bytes:
            lines = _list_first(unread.left_out)
            count = f"{unread.files:,} of {format_count(unread.all_files, 'data file')}"
            raise InputError(
                "\n".join(
                    [f"{unread.input}: {count} cannot be read: mend them, or --allow-skipped leaves them out:", *lines]
                )
            )


def _list_first(files: Sequence[LeftOutFile], others: str = "") -> list[str]:
    """Return lines about the first files, and one with the number of the ``others``.

    A long reason that files share is written once.
    """
    lines = []
    seen: set[str] = set()
    for file in files[:_MAX_LISTED]:
        reason = file.reason.removeprefix(file.name)
        lines.append(f"  {file.name}: likewise" if reason in seen else f"  {file.reason}")
        seen.add(reason)
    if len(files) > _MAX_LISTED:
        lines.append(f"  and {len(files) - _MAX_LISTED:,} more{others}")
    return lines


def is_named(source: Source, recipe: Recipe) -> bool:
    """Return whether an input names this file itself, not its folder or archive."""
    return source.member is None and source.path == recipe.inputs[source.input]


def leave_out_unfit(
    listing: SourceListing, unfit: Sequence[tuple[Source, InputError]], recipe: Recipe
) -> SourceListing:
    """Leave out files of folders and archives that are damaged or fit no schema.

    The notes of the result are those about these files.

    Raises:
        InputError: they are more than 1 % of the files or bytes of an input, without ``allow_skipped``.
    """
    left_out = [LeftOutFile(source.name, str(error)) for source, error in unfit]
    notes = []
    for number, label in enumerate(make_input_labels(recipe.inputs)):
        indices = [index for index, (source, _) in enumerate(unfit) if source.input == number]
        if not indices:
            continue
        files = [left_out[index] for index in indices]
        sizes = [source.size for source in listing.sources if source.input == number]
        unfit_bytes = sum(unfit[index][0].size for index in indices)
        is_too_much = len(files) > _MAX_UNREAD * len(sizes) or unfit_bytes > _MAX_UNREAD * sum(sizes)
        if is_too_much and not recipe.reading.allow_skipped:
            others = len(unfit) < len(listing.sources)
            remedy = "; --allow-skipped leaves such files out" if others else ""
            first = unfit[indices[0]][1]
            raise _make_unfit_error(first, files, remedy) from first
        notes.append(f"Left out of {label}: {format_count(len(files), 'file')} that cannot be read:")
        notes += _list_first(files, " (report.json of the store lists all)")
    names = {source.name for source, _ in unfit}
    sources = [source for source in listing.sources if source.name not in names]
    if not sources:
        raise unfit[0][1]
    return replace(
        listing,
        sources=sources,
        notes=tuple(notes),
        warnings=tuple(notes),
        left_out=(*listing.left_out, *left_out),
    )


def _make_unfit_error(first: InputError, files: Sequence[LeftOutFile], remedy: str) -> InputError:
    """Return the error for too many files that cannot be read; it lists the first."""
    reason = f"{str(first).rstrip('.')}{remedy}."
    if len(files) > 1:
        reason = "\n".join([f"{len(files):,} files cannot be read{remedy}:", *_list_first(files)])
    if isinstance(first, SchemaError):
        return SchemaError(reason, first.columns, first.suggestion)
    return DamagedFileError(reason)


def describe_exclusion(source: Source) -> str:
    """Describe how to leave out a file, or the archive that it is in."""
    name = source.name if source.member is None else source.member.archive.name
    # A comma separates patterns.
    pattern = re.sub(r"[\[*?]", r"[\g<0>]", name).replace(",", "?")
    return f"To leave it out: --exclude {shlex.quote(pattern)}"


def _describe_input(recipe: Recipe, number: int) -> str:
    """Return an input as it was given."""
    source = recipe.source(number)
    count = "" if source.num_samples is None else f"#{source.num_samples}"
    return source.location or f"{recipe.inputs[number]}{count}"
