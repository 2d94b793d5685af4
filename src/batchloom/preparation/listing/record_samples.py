"""Samples of inputs: a number of their records, or a range of their rows."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import accumulate

from batchloom.core.addresses import make_input_labels
from batchloom.core.errors import InputError
from batchloom.core.wording import format_count
from batchloom.preparation.settings.read_recipe import SourceRecipe
from batchloom.preparation.settings.recipe import Recipe
from batchloom.sources import PartReader, ReadLimits, ReadRules, RowRange, SourceListing, SourcePart, SplitRequest
from batchloom.sources.files import RecordSample, Source, choose_random_records


def sample_inputs(listing: SourceListing, recipe: Recipe) -> SourceListing:
    """Restrict the inputs that have a number of samples to these records."""
    numbers = range(len(recipe.inputs))
    is_sampled = any(source.max_samples or source.num_samples for source in recipe.sources)
    splits = [recipe.val_split, *map(recipe.split, numbers)]
    if not is_sampled and not any(map(get_rows, splits)):
        return listing
    rules = replace(recipe.reading.rules(ReadLimits()), text_field=None)
    notes = list(listing.notes)
    # Of each input, those of the split that becomes val are apart.
    source_groups: dict[tuple[int, bool], list[Source]] = {}
    for source in listing.sources:
        is_val = recipe.val_split is not None and source.subset == "val"
        source_groups.setdefault((source.input, is_val), []).append(source)
    for (number, is_val), listed in source_groups.items():
        settings = recipe.source(number)
        name = settings.name or make_input_labels([recipe.inputs[number]])[0]
        if rows := get_rows(recipe.val_split if is_val else recipe.split(number)):
            source_groups[number, is_val], note = _choose_rows(listed, rows, rules)
        elif not is_val and (settings.max_samples or settings.num_samples):
            source_groups[number, is_val], note = _choose_records(listed, settings, rules)
        else:
            continue
        notes.append(f"{name}: {note}.")
    chosen = tuple(source for sources in source_groups.values() for source in sources)
    _refuse_common_rows(chosen)
    return replace(listing, sources=chosen, notes=tuple(notes))


def _refuse_common_rows(sources: Sequence[Source]) -> None:
    """Refuse rows of a file that are read for training and for val."""
    rows_by_path: dict[str, list[tuple[str, Collection[int]]]] = {}
    for source in sources:
        if source.sample is None:
            continue
        rows = source.sample.choose()
        earlier = rows_by_path.setdefault(source.path, [])
        if any(subset != source.subset and not set(rows).isdisjoint(others) for subset, others in earlier):
            raise InputError(
                f"{source.name}: --input-split and --val-from read the same rows; name two ranges, such as "
                "--input-split 'train[5%:]' --val-from 'train[:5%]'."
            )
        earlier.append((source.subset, rows))


def _choose_records(sources: Sequence[Source], settings: SourceRecipe, rules: ReadRules) -> tuple[list[Source], str]:
    """Return the sources of an input with their chosen records, and a note."""
    count = min(filter(None, (settings.max_samples, settings.num_samples)))
    is_random = settings.num_samples is not None
    chosen = list[RecordSample]()
    before = 0
    record_counts: list[int] = []
    for source in sources:
        if is_random or len(sources) > 1:
            record_counts.append(_count_records(source, rules, None if is_random else count - before))
        chosen.append(RecordSample(count, None, before))
        before += record_counts[-1] if record_counts else 0
        if not is_random and before >= count:
            break
    if not is_random:
        sampled_sources = [replace(source, sample=sample) for source, sample in zip(sources, chosen, strict=False)]
        verb = "is" if count == 1 else "are"
        return sampled_sources, f"at most its first {format_count(count, 'record')} {verb} read"
    if count >= before:
        few = f", fewer than {count:,}" if count > before else ""
        return list(sources), f"all of its {format_count(before, 'record')} are read once{few}"
    numbers = choose_random_records(before, count)
    sampled_sources = [
        replace(source, sample=replace(sample, total=before))
        for source, sample, records in zip(sources, chosen, record_counts, strict=True)
        if ((numbers >= sample.before) & (numbers < sample.before + records)).any()
    ]
    return sampled_sources, f"{count:,} of its {format_count(before, 'record')} are read, chosen at random"


def get_rows(split: SplitRequest | None) -> RowRange | None:
    return None if split is None else split.rows


def _choose_rows(sources: Sequence[Source], rows: RowRange, rules: ReadRules) -> tuple[list[Source], str]:
    """Return the sources of an input with a range of their records, and a note."""
    stops = list(accumulate(_count_records(source, rules, None) for source in sources))
    chosen = rows.resolve(stops[-1] if stops else 0)
    sampled_sources = [
        replace(source, sample=RecordSample(chosen.stop, None, before, chosen.start))
        for source, before, stop in zip(sources, [0, *stops], stops, strict=False)
        if before < chosen.stop and chosen.start < stop
    ]
    return sampled_sources, (
        f"records {chosen.start:,} to {chosen.stop - 1:,} of {stops[-1]:,} are read" if chosen else "no record is read"
    )


def _count_records(source: Source, rules: ReadRules, most: int | None) -> int:
    """Return the number of records of a source; counting may stop at ``most``."""
    count = 0
    with PartReader(SourcePart(source, 0, source.size), rules) as reader:
        for batch in reader:
            count += len(batch.values) + len(batch.bad)
            if most is not None and count >= most:
                break
    return count
