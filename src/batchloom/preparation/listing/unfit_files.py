"""Files of folders and archives that cannot be used, which are left out."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from batchloom.core.addresses import make_input_labels
from batchloom.core.errors import DamagedFileError, InputError, SchemaError
from batchloom.core.wording import format_count
from batchloom.preparation.documents.record_parsers import RecordParsers
from batchloom.preparation.settings.recipe import Recipe
from batchloom.sources import LeftOutFile, SourceListing, SourcePart, prefetch_sources
from batchloom.sources.files import Source

# Files that a note or an error lists; the report of a store lists all.
_MAX_LISTED = 10
# Share of the data files or bytes of an input that may be left out.
MAX_UNREAD = 0.01


class UnfitFile(NamedTuple):
    """A file that was read and is left out: why, and its bad records if it is whole."""

    source: Source
    reason: str
    bad: int


def is_named(source: Source, recipe: Recipe) -> bool:
    """Return whether an input names this file itself, not its folder or archive."""
    return source.member is None and source.path == recipe.inputs[source.input]


def find_whole_files(parts: Sequence[SourcePart], recipe: Recipe) -> frozenset[int]:
    """Return the numbers of the parts that are files of a folder or archive."""
    return frozenset(
        number
        for number, part in enumerate(parts)
        if (part.start, part.stop) == (0, part.source.size) and not is_named(part.source, recipe)
    )


def check_may_leave_out(part: SourcePart, reason: str, recipe: Recipe) -> None:
    """Check that a damaged file can be left out.

    Raises:
        DamagedFileError: an input names the file, or other parts of the file are stored.
    """
    if is_named(part.source, recipe):
        raise DamagedFileError(reason)
    if (part.start, part.stop) != (0, part.source.size):
        raise DamagedFileError(f"{reason} {_describe_exclusion(part.source)}")


def find_unfit(
    sources: Sequence[Source], record_parsers: RecordParsers, recipe: Recipe
) -> list[tuple[Source, InputError]]:
    """Return files of folders and archives that are damaged or fit no schema.

    Raises:
        DamagedFileError: a file that an input names is damaged.
        SchemaError: a file that an input names fits none.
    """
    unfit: list[tuple[Source, InputError]] = []
    for source in prefetch_sources(sources, lambda item: item):
        try:
            record_parsers.get_parser(source)
        except (DamagedFileError, SchemaError) as error:
            if is_named(source, recipe):
                raise
            unfit.append((source, error))
    return unfit


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
        is_too_much = len(files) > MAX_UNREAD * len(sizes) or unfit_bytes > MAX_UNREAD * sum(sizes)
        if is_too_much and not recipe.reading.allow_skipped:
            others = len(unfit) < len(listing.sources)
            remedy = "; --allow-skipped leaves such files out" if others else ""
            first = unfit[indices[0]][1]
            raise _make_unfit_error(first, files, remedy) from first
        notes.append(f"Left out of {label}: {format_count(len(files), 'file')} that cannot be read:")
        notes += list_first(files, " (report.json of the store lists all)")
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


def leave_out_read(
    listing: SourceListing, files: Sequence[UnfitFile], recipe: Recipe, allowed_bad: int
) -> SourceListing:
    """Leave out files that turned out to be damaged, or to have bad records only.

    The latter may be any number if their records are among the bad ones that the recipe allows.

    Raises:
        InputError: see :func:`leave_out_unfit`.
    """
    is_allowed = sum(file.bad for file in files) <= allowed_bad
    judged = [(source, DamagedFileError(reason)) for source, reason, bad in files if not (bad and is_allowed)]
    others = [(source, DamagedFileError(reason)) for source, reason, bad in files if bad and is_allowed]
    fitting = leave_out_unfit(listing, judged, recipe) if judged else replace(listing, notes=(), warnings=())
    if not others:
        return fitting
    lenient = replace(recipe, reading=replace(recipe.reading, allow_skipped=True))
    rest = leave_out_unfit(fitting, others, lenient)
    notes = (*fitting.notes, *rest.notes)
    return replace(rest, notes=notes, warnings=notes)


def _make_unfit_error(first: InputError, files: Sequence[LeftOutFile], remedy: str) -> InputError:
    """Return the error for too many files that cannot be read; it lists the first."""
    reason = f"{str(first).rstrip('.')}{remedy}."
    if len(files) > 1:
        reason = "\n".join([f"{len(files):,} files cannot be read{remedy}:", *list_first(files)])
    if isinstance(first, SchemaError):
        return SchemaError(reason, first.columns, first.suggestion)
    return DamagedFileError(reason)


def _describe_exclusion(source: Source) -> str:
    """Describe how to leave out a file, or the archive that it is in."""
    name = source.name if source.member is None else source.member.archive.name
    # A comma separates patterns.
    pattern = re.sub(r"[\[*?]", r"[\g<0>]", name).replace(",", "?")
    return f"To leave it out: --exclude {shlex.quote(pattern)}"


def list_first(files: Sequence[LeftOutFile], others: str = "") -> list[str]:
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
