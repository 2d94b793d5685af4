"""Looking at inputs before any work: what they hold, what is wrong, what would become of them."""

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from batchloom.analysis.doctor.examiner import Examiner
from batchloom.analysis.doctor.findings import BadFacts, DuplicateFacts, Examination, TokenizerFacts
from batchloom.analysis.doctor.input_statistics import Group, spread, weighted_lengths
from batchloom.analysis.doctor.preview import Preview, preview_documents
from batchloom.analysis.doctor.sampling import Looks, Sizes
from batchloom.core.addresses import is_url, shown
from batchloom.core.errors import InputError, MissingDependencyError, SchemaError, TokenizerError
from batchloom.core.wording import counted
from batchloom.preparation import Recipe
from batchloom.preparation.dedup import Duplicates
from batchloom.preparation.documents import (
    Membership,
    Readings,
    Task,
    dtype_name,
    job_template,
    job_tokenizer,
    media_encoder,
    refuse_mixed,
    unused_names,
    walk,
)
from batchloom.preparation.report import Listener
from batchloom.preparation.request import list_inputs
from batchloom.preparation.settings import allowed_bad
from batchloom.preparation.units import bad_advice
from batchloom.sources import Limits, Listing, Part, RecordBounds
from batchloom.sources.files import Source, Spool, open_source
from batchloom.store.format import TOKEN_DTYPES
from batchloom.tokens import parse_train_spec

_SHOWN = 10
_PREVIEWED = 5
_END = 64 << 10
# Where a sample holds no record at all, the beginnings of so many sources are read on.
_HEADS, _HEAD_CHARACTERS = 8, 4 << 20


def examine(
    recipe: Recipe,
    listener: Listener,
    *,
    full: bool = False,
    preview: int = 2,
    tokenizer_optional: bool = False,
    sizes: Sizes | None = None,
) -> Examination:
    """Read the inputs of a recipe, or a sample of them, and tell what ``prepare`` would find.

    Inputs of up to 16 MiB in up to 256 files are read whole. Of larger ones a few megabytes are
    read at places spread evenly over all bytes (of compressed files, JSON lists and CSV their
    beginnings), and counts are estimates from the share of bytes that was read.

    Args:
        recipe: what ``prepare`` would be asked to do.
        listener: is told of progress.
        full: whether everything is read, whatever its size.
        preview: documents shown of each source.
        tokenizer_optional: whether the rest is told where the tokenizer cannot be had.
        sizes: how much is read; others than the default only in tests.

    Raises:
        InputMissingError: an input does not exist or holds nothing that can be used.
        InputError: an input cannot be listed, or a large table cannot be opened.
        TokenizerError, MissingDependencyError: the tokenizer cannot be had.
    """
    with Spool() as spool:
        # A sample of what lies on the Hub is read where it lies.
        listing = list_inputs(recipe, spool, streaming=None if full else True)
        return _examine(
            *(recipe, listing, listener, sizes or Sizes()),
            full=full,
            preview=preview,
            tokenizer_optional=tokenizer_optional,
        )


def _examine(
    recipe: Recipe,
    listing: Listing,
    listener: Listener,
    sizes: Sizes,
    *,
    full: bool,
    preview: int,
    tokenizer_optional: bool,
) -> Examination:
    asked = recipe
    if recipe.chat.overlong == "error":
        # They are counted rather than the end of the work.
        recipe = replace(recipe, chat=replace(recipe.chat, overlong="drop"))
    readings = Readings(recipe, Limits())
    looks = Looks(listing.sources, readings.rules, sizes, full=full)
    sources = list({look.part.source.name: look.part.source for look in looks.looks}.values())
    groups = _grouped(sources, readings, looks)
    case = _Case(asked, listing, groups, looks.whole)
    case.faults += [group.fault for group in groups if group.fault]
    good = [source for group in groups if not group.fault for source in group.sources]
    try:
        refuse_mixed(good, readings)
    except InputError as error:
        case.faults.append(str(error))
    began = time.perf_counter()
    try:
        case.task = _task(recipe, good, readings, case)
    except (TokenizerError, MissingDependencyError) as error:
        if not tokenizer_optional:
            raise
        case.tokenizer_missing = True
        case.warnings.append(f"Nothing is told in tokens, for there is no tokenizer: {error}")
    case.ready = time.perf_counter() - began
    with Duplicates() as duplicates:
        run = Examiner(groups, looks, case.task, duplicates, listener, listing.bytes)
        _read(run, looks, readings, good)
        repeated = duplicates.repeated()
        share = repeated / max(duplicates.documents, 1)
        compared = DuplicateFacts(
            duplicates.documents, repeated, share, looks.whole, recipe.dedup.mode != "none"
        )
    case.task = run.task
    case.faults += run.faults
    if not looks.whole and not run.faults:
        case.faults += filter(None, map(_unclosed, good))
    spread(groups, listing.sources, looks)
    previews = _previews(case, preview)
    _judge_bad(case, run.reasons)
    _judge(case, run.reasons)
    encoder = case.task.chat if case.task else None
    unused = [
        () if group.fault else unused_names(map(readings.of, group.sources), encoder)
        for group in groups
    ]
    return _told(case, previews, unused, compared, run.bad)


@dataclass(slots=True)
class _Case:
    """What is known so far."""

    recipe: Recipe
    listing: Listing
    groups: list[Group]
    whole: bool
    task: Task | None = None
    tokenizer_missing: bool = False
    # Seconds until the tokenizer was there; prepare takes them, too.
    ready: float = 0.0
    faults: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def about(self) -> str:
        """What stands before an estimate."""
        return "" if self.whole else "about "


def _told(
    case: _Case,
    previews: Sequence[tuple[Preview, ...]],
    unused: Sequence[tuple[str, ...]],
    duplicates: DuplicateFacts,
    bad: Sequence[BadFacts],
) -> Examination:
    groups, task = case.groups, case.task
    lengths, weights = weighted_lengths(groups)
    size = sum(group.store_bytes(task.dtype.itemsize) for group in groups) if task else 0
    return Examination(
        inputs=tuple(shown(one) for one in case.recipe.inputs),
        exact=case.whole,
        files=len(case.listing.sources),
        bytes=case.listing.bytes,
        read_bytes=round(sum(group.read for group in groups)),
        sources=tuple(
            group.facts(first, names, tokenized=task is not None)
            for group, first, names in zip(groups, previews, unused, strict=True)
        ),
        tokenizer=_tokenizer_facts(case.recipe, task) if task else None,
        tokenizer_missing=case.tokenizer_missing,
        duplicates=duplicates,
        bad=tuple(bad),
        bad_seen=sum(group.bad for group in groups),
        lengths=lengths if task else np.zeros(0, np.int64),
        weights=weights if task else np.zeros(0, np.float64),
        seconds=case.ready + sum(group.seconds * group.scale for group in groups) if task else None,
        store_bytes=round(size) if task else None,
        held_bytes=round(sum(group.held * group.scale for group in groups)),
        faults=_few(case.faults),
        warnings=tuple(dict.fromkeys(case.warnings)),
        notes=case.listing.notes,
    )


def _grouped(sources: Sequence[Source], readings: Readings, looks: Looks) -> list[Group]:
    """Sources by how they are read, in the order of the first of each.

    In a sample small ones, which were chosen by number, do not stand for large ones.
    """
    groups: dict[object, Group] = {}
    for source in sources:
        reading, fault, suggestion = None, "", None
        try:
            reading = readings.of(source)
        except SchemaError as error:
            fault, suggestion = str(error), error.suggestion
        except InputError as error:
            fault = str(error)
        how = (reading.way, reading.detected) if reading else ("", suggestion)
        small = looks.whole or looks.is_small(source)
        key = source.name if looks.apart else (source.kind, source.compression, how, small)
        group = groups.setdefault(key, Group(reading, fault=fault, suggestion=suggestion))
        group.sources.append(source)
    return list(groups.values())


def _task(
    recipe: Recipe,
    sources: Sequence[Source],
    readings: Readings,
    case: _Case,
) -> Task | None:
    """What makes tokens of documents; None where nothing can."""
    if not sources:
        return None
    tell = case.warnings.append
    try:
        tokenizer = job_tokenizer(recipe, sources, readings, tell)
    except InputError as error:
        case.faults.append(str(error))
        if parse_train_spec(recipe.tokenizer) is not None:
            return None
        # A source that cannot be read keeps nobody from counting the tokens of the others.
        tokenizer = job_tokenizer(recipe, (), readings, tell)
    try:
        dtype = dtype_name(recipe, tokenizer)
        encoder = job_template(recipe, sources, readings, tokenizer, tell)
        media = media_encoder(tokenizer, recipe, encoder)
    except InputError as error:
        case.faults.append(str(error))
        return None
    return Task(
        readings.rules,
        readings,
        RecordBounds(readings.rules),
        recipe.reading.normalize,
        tokenizer,
        TOKEN_DTYPES[dtype],
        Membership(0.0, 0.0),
        encoder,
        media=media,
    )


def _read(run: Examiner, looks: Looks, readings: Readings, good: Sequence[Source]) -> None:
    names = {source.name for source in good}
    parts = [(look.part, look.most) for look in looks.looks if look.part.source.name in names]
    bounds = RecordBounds(readings.rules) if looks.whole else None
    for stretch in walk(parts, readings, bounds, run.refuse):
        run.take(stretch)
    run.end()
    if not run.records and not looks.whole:
        # Records larger than a probe may slip through all of them.
        heads = [(Part(source, 0, source.size), _HEAD_CHARACTERS) for source in good[:_HEADS]]
        for stretch in walk(heads, readings, None, run.refuse):
            run.take(stretch)
        run.end()


def _unclosed(source: Source) -> str:
    """Why a plain JSON file is cut short, told by its ends; empty where it is not."""
    if source.kind != "json" or source.compression or source.member or is_url(source.path):
        return ""
    with open_source(source) as file:
        begin = file.read(_END).lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
        file.seek(max(0, source.size - _END))
        end = file.read().rstrip()[-1:]
    if not begin or not end or begin + end in (b"[]", b"{}"):
        return ""
    return f"{source.name} ends inside its list: it is cut short; fetch or write it anew, or leave it out."


def _previews(case: _Case, count: int) -> list[tuple[Preview, ...]]:
    found: list[tuple[Preview, ...]] = []
    for group in case.groups:
        first: tuple[Preview, ...] = ()
        if case.task is not None and not group.fault and sum(map(bool, found)) < _PREVIEWED:
            try:
                first = preview_documents(group.sources, case.task, count)
            except InputError as error:
                case.faults.append(str(error))
        found.append(first)
    return found


def _judge(case: _Case, reasons: Mapping[str, tuple[int, str]]) -> None:
    """What is wrong with the input as a whole, and what people should know of it."""
    groups, about = case.groups, case.about
    if not case.faults and not any(group.documents for group in groups):
        if not case.whole and not any(group.records for group in groups):
            fault = "No whole record lies in the sample, for the first are too long: --full reads everything."
        elif reasons:
            count, reason = max(reasons.values(), key=lambda one: one[0])
            fault = f"No document comes of the input: {counted(count, 'record')} cannot be used ({reason})."
        else:
            fault = "No document comes of the input: name other inputs, or leave fewer out."
        case.faults.append(fault)
    strict = case.recipe.chat.overlong == "error"
    for rule, count in _summed(groups, [group.dropped for group in groups]).items():
        said = (
            f"{about}{counted(count, 'document')} {'is' if count == 1 else 'are'} left out: {rule}."
        )
        (case.faults if strict and rule == "overlong" else case.warnings).append(said)
    for what, count in _summed(groups, [group.altered for group in groups]).items():
        case.warnings.append(f"In {about}{counted(count, 'conversation')} the template {what}.")
    empty = sum(group.whole(group.empty) for group in groups)
    if empty:
        case.warnings.append(
            f"{about}{counted(empty, 'record')} without any text: no document comes of them."
        )
    # Files of text and texts in a column are the same kind of record.
    readings = [group.reading for group in groups if group.reading and not group.fault]
    texts = any(one.detected and one.way == "text" for one in readings)
    schemas: dict[str, str] = {}
    for group in groups:
        if group.reading and not group.fault and (group.reading.detected or not texts):
            schemas.setdefault(group.reading.detected or "plain text", group.sources[0].name)
    if len(schemas) > 1:
        listed = "; ".join(f"{schema} ({name})" for schema, name in list(schemas.items())[:_SHOWN])
        case.warnings.append(f"The sources hold {len(schemas)} different schemas: {listed}.")


def _summed(groups: Sequence[Group], counts: Sequence[Counter[str]]) -> Counter[str]:
    """Counts of all groups as those of the whole input."""
    total: Counter[str] = Counter()
    for group, some in zip(groups, counts, strict=True):
        total.update({name: group.whole(count) for name, count in some.items()})
    return total


def _judge_bad(case: _Case, reasons: Mapping[str, tuple[int, str]]) -> None:
    """Whether more records are bad than the budget allows."""
    groups, max_bad = case.groups, case.recipe.max_bad
    seen = sum(group.bad for group in groups)
    if not seen:
        return
    records = sum(group.whole(group.records) for group in groups)
    bad = sum(group.bad * group.scale for group in groups)
    # Of a sample the least that is likely, two standard deviations of a count below it.
    least = bad if case.whole else bad * max(0.0, 1 - 2 / math.sqrt(seen))
    fact = f"{round(bad):,} of {records:,} records are bad"
    if not case.whole:
        read = sum(group.records for group in groups)
        fact = f"{seen:,} of {read:,} records in the sample are bad, which makes about {round(bad):,} in all"
    if least > allowed_bad(max_bad, records):
        case.faults.append(
            f"{fact}, more than --max-bad {max_bad} allows: {bad_advice(bad, records, reasons)}."
        )
    else:
        more = "" if case.whole else " (--full counts them)"
        case.warnings.append(f"{fact}{more}: prepare keeps them aside in quarantine.jsonl.")


def _few(sentences: list[str]) -> tuple[str, ...]:
    found = list(dict.fromkeys(sentences))
    more = len(found) - _SHOWN
    return (*found[:_SHOWN], f"... and {more:,} more faults.") if more > 0 else tuple(found)


def _tokenizer_facts(recipe: Recipe, task: Task) -> TokenizerFacts:
    tokenizer = task.tokenizer
    engine = tokenizer.engine
    return TokenizerFacts(
        name=recipe.tokenizer,
        vocab_size=tokenizer.vocab_size,
        engine=f"{engine.name} {engine.version}",
        template=task.chat.renderer.name if task.chat else None,
        lossy=tokenizer.lossy,
        dtype=task.dtype.name,
    )
