"""Looking at inputs before any work: what they hold, what is wrong, what would become of them."""

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from batchloom.analysis.doctor.examiner import InputExaminer
from batchloom.analysis.doctor.findings import (
    BadFacts,
    DuplicateFacts,
    ExaminationResult,
    TokenizerFacts,
)
from batchloom.analysis.doctor.input_statistics import (
    SourceGroup,
    distribute_unread_bytes,
    weight_lengths,
)
from batchloom.analysis.doctor.preview import DocumentPreview, preview_documents
from batchloom.analysis.doctor.sampling import InputSample, SampleSizes
from batchloom.core.addresses import is_url, redact_url
from batchloom.core.errors import InputError, MissingDependencyError, SchemaError, TokenizerError
from batchloom.core.wording import format_count
from batchloom.preparation import Recipe
from batchloom.preparation.dedup import DuplicateCounter
from batchloom.preparation.documents import (
    EncodeContext,
    RecordParsers,
    SubsetRule,
    check_no_mixed_preferences,
    choose_dtype_name,
    choose_job_template,
    choose_job_tokenizer,
    find_unused_columns,
    iter_parsed_records,
    make_media_encoder,
)
from batchloom.preparation.report import Listener
from batchloom.preparation.request import list_inputs
from batchloom.preparation.settings import count_allowed_bad
from batchloom.preparation.units import describe_bad_records
from batchloom.sources import ReadLimits, RecordBounds, SourceListing, SourcePart
from batchloom.sources.files import Source, Spool, open_source
from batchloom.store.format import TOKEN_DTYPES
from batchloom.tokens import parse_train_spec

_MAX_LISTED = 10
_MAX_PREVIEWED_SOURCES = 5
_EDGE_BYTES = 64 << 10
# Where a sample holds no record at all, the beginnings of so many sources are read on.
_MAX_SAMPLED_HEADS, _MAX_HEAD_CHARACTERS = 8, 4 << 20


def examine_inputs(
    recipe: Recipe,
    listener: Listener,
    *,
    full: bool = False,
    preview: int = 2,
    tokenizer_optional: bool = False,
    sizes: SampleSizes | None = None,
) -> ExaminationResult:
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
        return _examine_listing(
            *(recipe, listing, listener, sizes or SampleSizes()),
            full=full,
            preview=preview,
            tokenizer_optional=tokenizer_optional,
        )


def _examine_listing(
    recipe: Recipe,
    listing: SourceListing,
    listener: Listener,
    sizes: SampleSizes,
    *,
    full: bool,
    preview: int,
    tokenizer_optional: bool,
) -> ExaminationResult:
    asked = recipe
    if recipe.chat.overlong == "error":
        # They are counted rather than the end of the work.
        recipe = replace(recipe, chat=replace(recipe.chat, overlong="drop"))
    readings = RecordParsers(recipe, ReadLimits())
    looks = InputSample(listing.sources, readings.rules, sizes, full=full)
    sources = list({look.part.source.name: look.part.source for look in looks.looks}.values())
    groups = _group_sources(sources, readings, looks)
    case = _ExaminationState(asked, listing, groups, looks.whole)
    case.faults += [group.fault for group in groups if group.fault]
    good = [source for group in groups if not group.fault for source in group.sources]
    try:
        check_no_mixed_preferences(good, readings)
    except InputError as error:
        case.faults.append(str(error))
    began = time.perf_counter()
    try:
        case.task = _make_encode_context(recipe, good, readings, case)
    except (TokenizerError, MissingDependencyError) as error:
        if not tokenizer_optional:
            raise
        case.tokenizer_missing = True
        case.warnings.append(f"Nothing is told in tokens, for there is no tokenizer: {error}")
    case.ready = time.perf_counter() - began
    with DuplicateCounter() as duplicates:
        run = InputExaminer(groups, looks, case.task, duplicates, listener, listing.bytes)
        _read_samples(run, looks, readings, good)
        repeated = duplicates.repeated()
        share = repeated / max(duplicates.documents, 1)
        compared = DuplicateFacts(
            duplicates.documents, repeated, share, looks.whole, recipe.dedup.mode != "none"
        )
    case.task = run.task
    case.faults += run.faults
    if not looks.whole and not run.faults:
        case.faults += filter(None, map(_describe_unclosed_json, good))
    distribute_unread_bytes(groups, listing.sources, looks)
    previews = _make_previews(case, preview)
    _judge_bad(case, run.reasons)
    _judge_input(case, run.reasons)
    encoder = case.task.chat if case.task else None
    unused = [
        () if group.fault else find_unused_columns(map(readings.of, group.sources), encoder)
        for group in groups
    ]
    return _make_examination(case, previews, unused, compared, run.bad)


@dataclass(slots=True)
class _ExaminationState:
    """What is known so far."""

    recipe: Recipe
    listing: SourceListing
    groups: list[SourceGroup]
    whole: bool
    task: EncodeContext | None = None
    tokenizer_missing: bool = False
    # Seconds until the tokenizer was there; prepare takes them, too.
    ready: float = 0.0
    faults: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def format_estimate_prefix(self) -> str:
        """What stands before an estimate."""
        return "" if self.whole else "about "


def _make_examination(
    case: _ExaminationState,
    previews: Sequence[tuple[DocumentPreview, ...]],
    unused: Sequence[tuple[str, ...]],
    duplicates: DuplicateFacts,
    bad: Sequence[BadFacts],
) -> ExaminationResult:
    groups, task = case.groups, case.task
    lengths, weights = weight_lengths(groups)
    size = sum(group.store_bytes(task.dtype.itemsize) for group in groups) if task else 0
    return ExaminationResult(
        inputs=tuple(redact_url(one) for one in case.recipe.inputs),
        exact=case.whole,
        files=len(case.listing.sources),
        bytes=case.listing.bytes,
        read_bytes=round(sum(group.read for group in groups)),
        sources=tuple(
            group.facts(first, names, tokenized=task is not None)
            for group, first, names in zip(groups, previews, unused, strict=True)
        ),
        tokenizer=_make_tokenizer_facts(case.recipe, task) if task else None,
        tokenizer_missing=case.tokenizer_missing,
        duplicates=duplicates,
        bad=tuple(bad),
        bad_seen=sum(group.bad for group in groups),
        lengths=lengths if task else np.zeros(0, np.int64),
        weights=weights if task else np.zeros(0, np.float64),
        seconds=case.ready + sum(group.seconds * group.scale for group in groups) if task else None,
        store_bytes=round(size) if task else None,
        held_bytes=round(sum(group.held * group.scale for group in groups)),
        faults=_shorten_list(case.faults),
        warnings=tuple(dict.fromkeys(case.warnings)),
        notes=case.listing.notes,
    )


def _group_sources(
    sources: Sequence[Source], readings: RecordParsers, looks: InputSample
) -> list[SourceGroup]:
    """Sources by how they are read, in the order of the first of each.

    In a sample small ones, which were chosen by number, do not stand for large ones.
    """
    groups: dict[object, SourceGroup] = {}
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
        group = groups.setdefault(key, SourceGroup(reading, fault=fault, suggestion=suggestion))
        group.sources.append(source)
    return list(groups.values())


def _make_encode_context(
    recipe: Recipe,
    sources: Sequence[Source],
    readings: RecordParsers,
    case: _ExaminationState,
) -> EncodeContext | None:
    """What makes tokens of documents; None where nothing can."""
    if not sources:
        return None
    tell = case.warnings.append
    try:
        tokenizer = choose_job_tokenizer(recipe, sources, readings, tell)
    except InputError as error:
        case.faults.append(str(error))
        if parse_train_spec(recipe.tokenizer) is not None:
            return None
        # A source that cannot be read keeps nobody from counting the tokens of the others.
        tokenizer = choose_job_tokenizer(recipe, (), readings, tell)
    try:
        dtype = choose_dtype_name(recipe, tokenizer)
        encoder = choose_job_template(recipe, sources, readings, tokenizer, tell)
        media = make_media_encoder(tokenizer, recipe, encoder)
    except InputError as error:
        case.faults.append(str(error))
        return None
    return EncodeContext(
        readings.rules,
        readings,
        RecordBounds(readings.rules),
        recipe.reading.normalize,
        tokenizer,
        TOKEN_DTYPES[dtype],
        SubsetRule(0.0, 0.0),
        encoder,
        media=media,
    )


def _read_samples(
    run: InputExaminer, looks: InputSample, readings: RecordParsers, good: Sequence[Source]
) -> None:
    names = {source.name for source in good}
    parts = [(look.part, look.most) for look in looks.looks if look.part.source.name in names]
    bounds = RecordBounds(readings.rules) if looks.whole else None
    for stretch in iter_parsed_records(parts, readings, bounds, run.refuse):
        run.take(stretch)
    run.end()
    if not run.records and not looks.whole:
        # Records larger than a probe may slip through all of them.
        heads = [
            (SourcePart(source, 0, source.size), _MAX_HEAD_CHARACTERS)
            for source in good[:_MAX_SAMPLED_HEADS]
        ]
        for stretch in iter_parsed_records(heads, readings, None, run.refuse):
            run.take(stretch)
        run.end()


def _describe_unclosed_json(source: Source) -> str:
    """Why a plain JSON file is cut short, told by its ends; empty where it is not."""
    if source.kind != "json" or source.compression or source.member or is_url(source.path):
        return ""
    with open_source(source) as file:
        begin = file.read(_EDGE_BYTES).lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
        file.seek(max(0, source.size - _EDGE_BYTES))
        end = file.read().rstrip()[-1:]
    if not begin or not end or begin + end in (b"[]", b"{}"):
        return ""
    return f"{source.name} ends inside its list: it is cut short; fetch or write it anew, or leave it out."


def _make_previews(case: _ExaminationState, count: int) -> list[tuple[DocumentPreview, ...]]:
    found: list[tuple[DocumentPreview, ...]] = []
    for group in case.groups:
        first: tuple[DocumentPreview, ...] = ()
        if (
            case.task is not None
            and not group.fault
            and sum(map(bool, found)) < _MAX_PREVIEWED_SOURCES
        ):
            try:
                first = preview_documents(group.sources, case.task, count)
            except InputError as error:
                case.faults.append(str(error))
        found.append(first)
    return found


def _judge_input(case: _ExaminationState, reasons: Mapping[str, tuple[int, str]]) -> None:
    """What is wrong with the input as a whole, and what people should know of it."""
    groups, about = case.groups, case.format_estimate_prefix
    if not case.faults and not any(group.documents for group in groups):
        if not case.whole and not any(group.records for group in groups):
            fault = "No whole record lies in the sample, for the first are too long: --full reads everything."
        elif reasons:
            count, reason = max(reasons.values(), key=lambda one: one[0])
            fault = f"No document comes of the input: {format_count(count, 'record')} cannot be used ({reason})."
        else:
            fault = "No document comes of the input: name other inputs, or leave fewer out."
        case.faults.append(fault)
    strict = case.recipe.chat.overlong == "error"
    for rule, count in _sum_counts(groups, [group.dropped for group in groups]).items():
        said = f"{about}{format_count(count, 'document')} {'is' if count == 1 else 'are'} left out: {rule}."
        (case.faults if strict and rule == "overlong" else case.warnings).append(said)
    for what, count in _sum_counts(groups, [group.altered for group in groups]).items():
        case.warnings.append(
            f"In {about}{format_count(count, 'conversation')} the template {what}."
        )
    empty = sum(group.whole(group.empty) for group in groups)
    if empty:
        case.warnings.append(
            f"{about}{format_count(empty, 'record')} without any text: no document comes of them."
        )
    # Files of text and texts in a column are the same kind of record.
    readings = [group.reading for group in groups if group.reading and not group.fault]
    texts = any(one.detected and one.way == "text" for one in readings)
    schemas: dict[str, str] = {}
    for group in groups:
        if group.reading and not group.fault and (group.reading.detected or not texts):
            schemas.setdefault(group.reading.detected or "plain text", group.sources[0].name)
    if len(schemas) > 1:
        listed = "; ".join(
            f"{schema} ({name})" for schema, name in list(schemas.items())[:_MAX_LISTED]
        )
        case.warnings.append(f"The sources hold {len(schemas)} different schemas: {listed}.")


def _sum_counts(groups: Sequence[SourceGroup], counts: Sequence[Counter[str]]) -> Counter[str]:
    """Counts of all groups as those of the whole input."""
    total: Counter[str] = Counter()
    for group, some in zip(groups, counts, strict=True):
        total.update({name: group.whole(count) for name, count in some.items()})
    return total


def _judge_bad(case: _ExaminationState, reasons: Mapping[str, tuple[int, str]]) -> None:
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
    if least > count_allowed_bad(max_bad, records):
        case.faults.append(
            f"{fact}, more than --max-bad {max_bad} allows: {describe_bad_records(bad, records, reasons)}."
        )
    else:
        more = "" if case.whole else " (--full counts them)"
        case.warnings.append(f"{fact}{more}: prepare keeps them aside in quarantine.jsonl.")


def _shorten_list(sentences: list[str]) -> tuple[str, ...]:
    found = list(dict.fromkeys(sentences))
    more = len(found) - _MAX_LISTED
    return (*found[:_MAX_LISTED], f"... and {more:,} more faults.") if more > 0 else tuple(found)


def _make_tokenizer_facts(recipe: Recipe, task: EncodeContext) -> TokenizerFacts:
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
