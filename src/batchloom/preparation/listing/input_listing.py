"""Listing of the files of a recipe, without those that cannot be read."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from batchloom.core.errors import InputError
from batchloom.core.wording import format_count
from batchloom.preparation.listing.json_objects import leave_out_objects
from batchloom.preparation.listing.record_samples import get_rows, sample_inputs
from batchloom.preparation.listing.unfit_files import MAX_UNREAD, list_first
from batchloom.preparation.settings.read_recipe import normalize_encoding
from batchloom.preparation.settings.recipe import Recipe
from batchloom.sources import DetectedFile, SourceListing, list_sources
from batchloom.sources.files import Spool


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
        if unread.files > MAX_UNREAD * unread.all_files or unread.bytes > MAX_UNREAD * unread.all_bytes:
            lines = list_first(unread.left_out)
            count = f"{unread.files:,} of {format_count(unread.all_files, 'data file')}"
            raise InputError(
                "\n".join(
                    [f"{unread.input}: {count} cannot be read: mend them, or --allow-skipped leaves them out:", *lines]
                )
            )


def _describe_input(recipe: Recipe, number: int) -> str:
    """Return an input as it was given."""
    source = recipe.source(number)
    count = "" if source.num_samples is None else f"#{source.num_samples}"
    return source.location or f"{recipe.inputs[number]}{count}"
