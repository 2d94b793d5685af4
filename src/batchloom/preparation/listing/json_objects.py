"""Files that hold one JSON object: records, or settings of a project."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from batchloom.chat import detect_schema
from batchloom.chat.schema import get_column_value
from batchloom.core.addresses import make_input_labels
from batchloom.core.errors import BatchloomError, InputError, SettingsError
from batchloom.core.wording import format_count
from batchloom.preparation.settings.recipe import Recipe
from batchloom.sources import LeftOutFile, PartReader, ReadLimits, ReadRules, SourceListing, SourcePart
from batchloom.sources.files import Source, SourceTable
from batchloom.sources.formats import JSON_OBJECT

_MAX_READ = 100


def leave_out_objects(listing: SourceListing, recipe: Recipe) -> SourceListing:
    """Leave out JSON objects that are no records, as the settings of a project are.

    Most of those that an input has must fit a schema, or hold the columns that the recipe names. An object that an
    input names is a record in any case.
    """
    if JSON_OBJECT not in list_kinds(listing.sources):
        return listing
    objects: dict[int, list[int]] = {}
    for number, source in enumerate(listing.sources):
        if source.kind == JSON_OBJECT and source.path != recipe.inputs[source.input]:
            objects.setdefault(source.input, []).append(number)
    left_out: set[int] = set()
    notes = []
    labels = make_input_labels(recipe.inputs)
    for input_number, numbers in objects.items():
        read = numbers[:: -(-len(numbers) // _MAX_READ)]
        rows = [row for number in read if (row := _read_object(listing.sources[number])) is not None]
        if 2 * sum(_is_record(row, recipe, input_number) for row in rows) < len(read):
            left_out.update(numbers)
            notes.append(
                f"Left out of {labels[input_number]}: {format_count(len(numbers), 'JSON object')} without text."
            )
    if not left_out:
        return listing
    kept = [source for number, source in enumerate(listing.sources) if number not in left_out]
    if not kept:
        raise InputError(f"There is nothing to read. {' '.join(notes)} Name the columns with --map, or a file.")
    names = [listing.sources[number].name for number in sorted(left_out)]
    files = [LeftOutFile(name, f"{name} is one JSON object without text.") for name in names]
    return replace(
        listing,
        sources=kept,
        notes=(*listing.notes, *notes),
        warnings=(*listing.warnings, *notes),
        left_out=(*listing.left_out, *files),
    )


def list_kinds(sources: Sequence[Source]) -> Iterable[str]:
    """Return the kinds of sources."""
    return sources.kinds if isinstance(sources, SourceTable) else {source.kind for source in sources}


def _read_object(source: Source) -> dict[str, Any] | None:
    with PartReader(SourcePart(source, 0, source.size), ReadRules(None, limits=ReadLimits())) as reader:
        values = [value for batch in reader for value in batch.values]
    return values[0] if values and isinstance(values[0], dict) else None


def _is_record(row: Mapping[str, Any], recipe: Recipe, input_number: int) -> bool:
    text_field, mapping = recipe.columns(input_number)
    if text_field is not None:
        return get_column_value(row, text_field) is not None
    ignore = (*recipe.reading.ignore, *recipe.source(input_number).ignore)
    try:
        detect_schema(
            [row],
            mapping,
            media=recipe.reading.media is not None,
            ignore=ignore,
            carry=recipe.reading.carried_columns,
        )
    except SettingsError:
        raise
    except BatchloomError:
        return False
    return True
