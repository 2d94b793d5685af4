"""Examination of inputs before preparation: contents, faults and estimates."""

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from batchloom.analysis.doctor.findings import (
    BadFacts,
    DuplicateFacts,
    ExaminationResult,
    SourceGroup,
    TokenizerFacts,
    distribute_unread_bytes,
    weight_lengths,
)
from batchloom.analysis.doctor.preview import DocumentPreview, preview_documents
from batchloom.analysis.doctor.sampling import InputSample, SampleProgress, SampleSizes
from batchloom.core.addresses import is_url, redact_url
from batchloom.core.document import BadRecord, Records
from batchloom.core.errors import (
    InputError,
    MissingDependencyError,
    RecordError,
    SchemaError,
    TemplateError,
    TokenizerError,
)
from batchloom.core.wording import format_count
from batchloom.preparation import Progress, Recipe
from batchloom.preparation.dedup import DuplicateCounter
from batchloom.preparation.documents import (
    EncodeContext,
    EncodedBatch,
    ParsedRecords,
    RecordParser,
    RecordParsers,
    SubsetRule,
    check_no_mixed_preferences,
    choose_dtype_name,
    choose_job_template,
    choose_job_tokenizer,
    compute_document_keys,
    encode_documents,
    estimate_characters,
    fault_rule,
    find_unused_columns,
    iter_parsed_records,
    iter_texts,
    make_media_encoder,
    normalize_records,
)
from batchloom.preparation.report import Listener
from batchloom.preparation.request import list_inputs
from batchloom.preparation.settings import count_allowed_bad
from batchloom.preparation.units import ReasonCounts, count_reason, describe_bad_records
from batchloom.sources import ReadLimits, RecordBounds, SourceListing, SourcePart, make_bad_record_error
from batchloom.sources.files import Source, Spool, open_source
from batchloom.store.format import TOKEN_DTYPES
from batchloom.tokens import parse_train_spec

_MAX_BAD_RECORDS = 10
_BATCH_CHARACTERS = 1 << 20
_BATCH_DOCUMENTS = 1 << 13

_MAX_LISTED = 10
_MAX_PREVIEWED_SOURCES = 5
_EDGE_BYTES = 64 << 10
# If a sample holds no record at all, this many sources are read further from their start.
_MAX_SAMPLED_HEADS, _MAX_HEAD_CHARACTERS = 8, 4 << 20


@dataclass(slots=True)
class _PendingDocuments:
    """Documents of one group that are not tokenized yet, with their locations."""

    group: SourceGroup
    record_parser: RecordParser
    documents: list[Any] = field(default_factory=list)
    record_locations: list[tuple[SourcePart, int | None, int, int]] = field(default_factory=list)
    hashes: list[NDArray[np.uint64]] = field(default_factory=list)
    characters: int = 0


@final
class InputExaminer:
    """Counter of parsed batches.

    Attributes:
        task: context that encodes documents; None if nothing can be encoded (any more).
        records: number of records read.
        faults: messages about parts that cannot be read.
        bad: the first bad records.
        reasons: number of bad records by kind of reason.
    """

    def __init__(
        self,
        groups: Sequence[SourceGroup],
        sample: InputSample,
        task: EncodeContext | None,
        duplicates: DuplicateCounter,
        listener: Listener,
        total: int,
    ) -> None:
        self._groups = groups
        self._group_of = {source.name: group for group in groups for source in group.sources}
        self._sample, self._duplicates = sample, duplicates
        self._listener, self._total = listener, total
        self._pending: _PendingDocuments | None = None
        self._part: SourcePart | None = None
        self._progress = SampleProgress()
        self._clock = time.perf_counter()
        self.task = task
        self.records = 0
        self.faults: list[str] = []
        self.bad: list[BadFacts] = []
        self.reasons = ReasonCounts()

    def refuse(self, part: SourcePart, error: InputError) -> None:
        """Record that a part cannot be read."""
        self.faults.append(str(error))
        group = self._group_of[part.source.name]
        group.fault = group.fault or str(error)

    def take(self, parsed_records: ParsedRecords) -> None:
        """Count a batch."""
        group, record_batch = self._group_of[parsed_records.part.source.name], parsed_records.batch
        if parsed_records.part is not self._part:
            self._part, self._progress = parsed_records.part, SampleProgress()
        progress, records_read = self._progress, record_batch.records_read
        if not self._sample.complete and self._sample.is_table(parsed_records.part):
            _truncate_records(record_batch, progress.records_read, self._sample.sizes.probe_bytes)
        self.records += record_batch.records_read
        group.records += record_batch.records_read
        progress.advance(records_read, record_batch.records_read, parsed_records.consumed)
        share = self._sample.estimate_share(parsed_records, progress)
        group.read_bytes += share - progress.share
        progress.share = share
        self._record_bad(group, parsed_records.part, parsed_records.before, record_batch.bad)
        normalized = self.task is None or self.task.normalize
        normalize_records(record_batch, parsed_records.record_parser.record_kind, normalized=normalized)
        group.empty += record_batch.records_read - len(record_batch.bad) - len(record_batch.values)
        if record_batch.values:
            self._add(group, parsed_records)
        group.seconds += self._measure_lap()

    def end(self) -> None:
        """Tokenize the pending documents."""
        pending, self._pending = self._pending, None
        if pending is not None and pending.documents:
            self._encode(pending)
            pending.group.seconds += self._measure_lap()

    def _measure_lap(self) -> float:
        before, self._clock = self._clock, time.perf_counter()
        return self._clock - before

    def _add(self, group: SourceGroup, parsed_records: ParsedRecords) -> None:
        record_batch, pending = parsed_records.batch, self._pending
        sizes = [sum(map(len, iter_texts(document))) for document in record_batch.values]
        if parsed_records.record_parser.record_kind != "tokens":
            group.characters.update(sizes)
        if pending is None or pending.group is not group:
            self.end()
            pending = self._pending = _PendingDocuments(group, parsed_records.record_parser)
        pending.documents += record_batch.values
        pending.hashes.append(compute_document_keys(record_batch.values))
        pending.record_locations += [
            (parsed_records.part, parsed_records.before, record, offset)
            for record, offset in zip(record_batch.records, record_batch.offsets, strict=True)
        ]
        pending.characters += sum(map(estimate_characters, record_batch.values))
        if pending.characters >= _BATCH_CHARACTERS or len(pending.documents) >= _BATCH_DOCUMENTS:
            self.end()

    def _encode(self, pending: _PendingDocuments) -> None:
        group, count = pending.group, len(pending.documents)
        encoded_batch: EncodedBatch | None = None
        if self.task is not None:
            try:
                encoded_batch = encode_documents(self.task, pending.record_parser, pending.documents)
            except TemplateError as error:
                self.faults.append(str(error))
                self.task = None
        keys = np.concatenate(pending.hashes)
        if encoded_batch is None:
            group.documents += count
        else:
            self._count(group, pending, encoded_batch)
            keys = _make_duplicate_keys(keys, encoded_batch.numbers)
        self._duplicates.add(keys)
        if self._sample.complete:
            self._report_progress()

    def _count(self, group: SourceGroup, pending: _PendingDocuments, encoded_batch: EncodedBatch) -> None:
        for fault in encoded_batch.faults:
            part, before, record, offset = pending.record_locations[fault.number]
            self._record_bad(group, part, before, [BadRecord(record, offset, None, fault.reason, fault.snippet)])
        group.dropped.update(fault_rule(dropped_document) for dropped_document in encoded_batch.dropped)
        group.altered.update(encoded_batch.altered)
        group.documents += len(encoded_batch.lengths)
        group.lengths.update(encoded_batch.lengths.tolist())
        group.count_media(encoded_batch.media)
        group.tokens += encoded_batch.tokens.size
        group.masked |= encoded_batch.trained is not None
        group.trained += (
            encoded_batch.tokens.size if encoded_batch.trained is None else int(np.sum(encoded_batch.trained))
        )

    def _record_bad(
        self,
        group: SourceGroup,
        part: SourcePart,
        before: int | None,
        bad_records: Iterable[BadRecord],
    ) -> None:
        for bad in bad_records:
            group.bad += 1
            count_reason(self.reasons, bad.reason)
            if len(self.bad) < _MAX_BAD_RECORDS:
                self.bad.append(self._make_bad_facts(part, before, bad))

    def _make_bad_facts(self, part: SourcePart, before: int | None, bad: BadRecord) -> BadFacts:
        source = part.source
        records_before = self._sample.count_records_before(part) if before is None else before
        error = make_bad_record_error(source, self._sample.rules, records_before or 0, bad)
        if records_before is None:
            reason = f"at byte {bad.offset:,}: {error.reason}"
            error = RecordError(source.name, None, bad.column, reason)
        return BadFacts(
            *(source.name, error.line, error.row, error.column, bad.offset),
            *(bad.reason, bad.snippet, str(error)),
        )

    def _report_progress(self) -> None:
        groups = self._groups
        done = round(sum(group.read_bytes for group in groups))
        self._listener(
            Progress(
                "tokenize",
                min(done, self._total),
                self._total,
                0,
                sum(group.documents for group in groups),
                sum(group.tokens for group in groups),
                sum(group.bad for group in groups),
            )
        )


def _make_duplicate_keys(keys: NDArray[np.uint64], numbers: NDArray[np.int64] | None) -> NDArray[np.uint64]:
    """Return the keys of encoded documents.

    Documents made from the same record, such as the sides of a pair, get different keys.
    """
    if numbers is None:
        return keys
    document_keys, indices = keys[numbers], np.arange(len(numbers))
    first = np.concatenate([[True], numbers[1:] != numbers[:-1]])[: len(numbers)]
    within = indices - np.maximum.accumulate(np.where(first, indices, 0))
    document_keys[:, 0] += within.astype(np.uint64)
    return document_keys


def _truncate_records(record_batch: Records, first: int, max_characters: int) -> None:
    """Cut a batch of complete rows to about ``max_characters``.

    The rest counts as not read.
    """
    size = 0
    for number, document in enumerate(record_batch.values):
        size += estimate_characters(document)
        if size > max_characters and number + 1 < len(record_batch.values):
            end = record_batch.records[number + 1]
            record_batch.values, record_batch.records = (
                record_batch.values[: number + 1],
                record_batch.records[: number + 1],
            )
            record_batch.offsets = record_batch.offsets[: number + 1]
            record_batch.bad = [bad for bad in record_batch.bad if bad.record < end]
            record_batch.records_read = end - first
            return


def examine_inputs(
    recipe: Recipe,
    listener: Listener,
    *,
    full: bool = False,
    preview: int = 2,
    tokenizer_optional: bool = False,
    sizes: SampleSizes | None = None,
) -> ExaminationResult:
    """Read the inputs of a recipe, or a sample; report what ``prepare`` would find.

    Inputs of up to 16 MiB in up to 256 files are read completely. Of larger ones a few megabytes are
    read at positions spread evenly over all bytes (of compressed files, JSON lists and CSV from the
    start), and counts are estimates from the share of bytes that was read.

    Args:
        recipe: recipe for ``prepare``.
        listener: callback that receives progress.
        full: whether to read everything, whatever its size.
        preview: number of documents to preview per source.
        tokenizer_optional: whether to continue without a tokenizer if it is not available.
        sizes: limits on how much is read; only tests override the default.

    Raises:
        InputMissingError: an input does not exist or holds nothing usable.
        InputError: an input cannot be listed, or a large table cannot be opened.
        TokenizerError, MissingDependencyError: the tokenizer is not available.
    """
    with Spool() as spool:
        # A sample of a Hub data set is read remotely, without downloading it.
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
    original_recipe = recipe
    if recipe.chat.overlong == "error":
        # Overlong documents are counted here; with "error" the first one would end the examination.
        recipe = replace(recipe, chat=replace(recipe.chat, overlong="drop"))
    record_parsers = RecordParsers(recipe, ReadLimits())
    sample = InputSample(listing.sources, record_parsers.rules, sizes, full=full)
    sources = list({sampled_part.part.source.name: sampled_part.part.source for sampled_part in sample.parts}.values())
    groups = _group_sources(sources, record_parsers, sample)
    state = _ExaminationState(original_recipe, listing, groups, sample.complete)
    state.faults += [group.fault for group in groups if group.fault]
    usable_sources = [source for group in groups if not group.fault for source in group.sources]
    try:
        check_no_mixed_preferences(usable_sources, record_parsers)
    except InputError as error:
        state.faults.append(str(error))
    began = time.perf_counter()
    try:
        state.task = _make_encode_context(recipe, usable_sources, record_parsers, state)
    except (TokenizerError, MissingDependencyError) as error:
        if not tokenizer_optional:
            raise
        state.tokenizer_missing = True
        state.warnings.append(f"Token counts are missing, because there is no tokenizer: {error}")
    state.ready = time.perf_counter() - began
    with DuplicateCounter() as duplicates:
        examiner = InputExaminer(groups, sample, state.task, duplicates, listener, listing.bytes)
        _read_samples(examiner, sample, record_parsers, usable_sources)
        repeated = duplicates.count_repeated()
        share = repeated / max(duplicates.documents, 1)
        compared = DuplicateFacts(duplicates.documents, repeated, share, sample.complete, recipe.dedup.mode != "none")
    state.task = examiner.task
    state.faults += examiner.faults
    if not sample.complete and not examiner.faults:
        state.faults += filter(None, map(_describe_unclosed_json, usable_sources))
    distribute_unread_bytes(groups, listing.sources, sample)
    previews = _make_previews(state, preview)
    _judge_bad(state, examiner.reasons)
    _judge_input(state, examiner.reasons)
    encoder = state.task.chat if state.task else None
    unused = [
        () if group.fault else find_unused_columns(map(record_parsers.get_parser, group.sources), encoder)
        for group in groups
    ]
    return _make_examination(state, previews, unused, compared, examiner.bad)


@dataclass(slots=True)
class _ExaminationState:
    """Intermediate results of an examination."""

    recipe: Recipe
    listing: SourceListing
    groups: list[SourceGroup]
    complete: bool
    task: EncodeContext | None = None
    tokenizer_missing: bool = False
    # Seconds to load the tokenizer, which prepare spends as well.
    ready: float = 0.0
    faults: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def about(self) -> str:
        """Prefix of estimated counts."""
        return "" if self.complete else "about "


def _make_examination(
    state: _ExaminationState,
    previews: Sequence[tuple[DocumentPreview, ...]],
    unused: Sequence[tuple[str, ...]],
    duplicates: DuplicateFacts,
    bad: Sequence[BadFacts],
) -> ExaminationResult:
    groups, task = state.groups, state.task
    lengths, weights = weight_lengths(groups)
    size = sum(group.estimate_store_bytes(task.dtype.itemsize) for group in groups) if task else 0
    return ExaminationResult(
        inputs=tuple(redact_url(input_path) for input_path in state.recipe.inputs),
        exact=state.complete,
        files=len(state.listing.sources),
        bytes=state.listing.bytes,
        read_bytes=round(sum(group.read_bytes for group in groups)),
        sources=tuple(
            group.make_facts(first, names, tokenized=task is not None)
            for group, first, names in zip(groups, previews, unused, strict=True)
        ),
        tokenizer=_make_tokenizer_facts(state.recipe, task) if task else None,
        tokenizer_missing=state.tokenizer_missing,
        duplicates=duplicates,
        bad=tuple(bad),
        bad_seen=sum(group.bad for group in groups),
        lengths=lengths if task else np.zeros(0, np.int64),
        weights=weights if task else np.zeros(0, np.float64),
        seconds=state.ready + sum(group.seconds * group.scale for group in groups) if task else None,
        store_bytes=round(size) if task else None,
        held_bytes=round(sum(group.media_bytes * group.scale for group in groups)),
        faults=_shorten_list(state.faults),
        warnings=tuple(dict.fromkeys(state.warnings)),
        notes=state.listing.notes,
    )


def _group_sources(sources: Sequence[Source], record_parsers: RecordParsers, sample: InputSample) -> list[SourceGroup]:
    """Group sources by how they are read, in the order of each group's first source.

    In a sample, small files form groups of their own: they are chosen by number and do not represent large ones.
    """
    groups: dict[object, SourceGroup] = {}
    for source in sources:
        record_parser, fault, suggestion = None, "", None
        try:
            record_parser = record_parsers.get_parser(source)
        except SchemaError as error:
            fault, suggestion = str(error), error.suggestion
        except InputError as error:
            fault = str(error)
        schema_key = (record_parser.record_kind, record_parser.detected) if record_parser else ("", suggestion)
        small = sample.complete or sample.is_small(source)
        key = source.name if sample.apart else (source.kind, source.compression, schema_key, small)
        group = groups.setdefault(key, SourceGroup(record_parser, fault=fault, suggestion=suggestion))
        group.sources.append(source)
    return list(groups.values())


def _make_encode_context(
    recipe: Recipe,
    sources: Sequence[Source],
    record_parsers: RecordParsers,
    state: _ExaminationState,
) -> EncodeContext | None:
    """Return the context that encodes documents; None if nothing can be encoded."""
    if not sources:
        return None
    add_warning = state.warnings.append
    try:
        tokenizer = choose_job_tokenizer(recipe, sources, record_parsers, add_warning)
    except InputError as error:
        state.faults.append(str(error))
        if parse_train_spec(recipe.tokenizer) is not None:
            return None
        # A source that cannot be read must not prevent counting the tokens of the others.
        tokenizer = choose_job_tokenizer(recipe, (), record_parsers, add_warning)
    try:
        dtype = choose_dtype_name(recipe, tokenizer)
        encoder = choose_job_template(recipe, sources, record_parsers, tokenizer, add_warning)
        media = make_media_encoder(tokenizer, recipe, encoder)
    except InputError as error:
        state.faults.append(str(error))
        return None
    return EncodeContext(
        record_parsers.rules,
        record_parsers,
        RecordBounds(record_parsers.rules),
        recipe.reading.normalize,
        tokenizer,
        TOKEN_DTYPES[dtype],
        SubsetRule(0.0, 0.0),
        encoder,
        media=media,
    )


def _read_samples(
    examiner: InputExaminer,
    sample: InputSample,
    record_parsers: RecordParsers,
    usable_sources: Sequence[Source],
) -> None:
    names = {source.name for source in usable_sources}
    parts = [
        (sampled_part.part, sampled_part.max_characters)
        for sampled_part in sample.parts
        if sampled_part.part.source.name in names
    ]
    bounds = RecordBounds(record_parsers.rules) if sample.complete else None
    for parsed_records in iter_parsed_records(parts, record_parsers, bounds, examiner.refuse):
        examiner.take(parsed_records)
    examiner.end()
    if not examiner.records and not sample.complete:
        # Records larger than a probe may be missed by all probes.
        heads = [
            (SourcePart(source, 0, source.size), _MAX_HEAD_CHARACTERS) for source in usable_sources[:_MAX_SAMPLED_HEADS]
        ]
        for parsed_records in iter_parsed_records(heads, record_parsers, None, examiner.refuse):
            examiner.take(parsed_records)
        examiner.end()


def _describe_unclosed_json(source: Source) -> str:
    """Describe a plain JSON file that is cut short; empty if it is complete."""
    if source.kind != "json" or source.compression or source.member or is_url(source.path):
        return ""
    with open_source(source) as file:
        begin = file.read(_EDGE_BYTES).lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
        file.seek(max(0, source.size - _EDGE_BYTES))
        end = file.read().rstrip()[-1:]
    if not begin or not end or begin + end in (b"[]", b"{}"):
        return ""
    return f"{source.name} ends inside its list: it is truncated; fetch or write it again, or leave it out."


def _make_previews(state: _ExaminationState, count: int) -> list[tuple[DocumentPreview, ...]]:
    previews: list[tuple[DocumentPreview, ...]] = []
    for group in state.groups:
        first: tuple[DocumentPreview, ...] = ()
        if state.task is not None and not group.fault and sum(map(bool, previews)) < _MAX_PREVIEWED_SOURCES:
            try:
                first = preview_documents(group.sources, state.task, count)
            except InputError as error:
                state.faults.append(str(error))
        previews.append(first)
    return previews


def _judge_input(state: _ExaminationState, reasons: Mapping[str, tuple[int, str]]) -> None:
    """Add faults and warnings about the complete input."""
    groups, about = state.groups, state.about
    if not state.faults and not any(group.documents for group in groups):
        if not state.complete and not any(group.records for group in groups):
            fault = "The sample holds no complete record, because the first ones are too long: --full reads everything."
        elif reasons:
            count, reason = max(reasons.values(), key=lambda count_and_reason: count_and_reason[0])
            fault = f"The input gives no document: {format_count(count, 'record')} cannot be used ({reason})."
        else:
            fault = "The input gives no document: name other inputs, or leave fewer out."
        state.faults.append(fault)
    strict = state.recipe.chat.overlong == "error"
    for rule, count in _sum_counts(groups, [group.dropped for group in groups]).items():
        sentence = f"{about}{format_count(count, 'document')} {'is' if count == 1 else 'are'} left out: {rule}."
        (state.faults if strict and rule == "overlong" else state.warnings).append(sentence)
    for change, count in _sum_counts(groups, [group.altered for group in groups]).items():
        state.warnings.append(f"In {about}{format_count(count, 'conversation')} the template {change}.")
    empty = sum(group.scale_count(group.empty) for group in groups)
    if empty:
        state.warnings.append(f"{about}{format_count(empty, 'record')} without any text give no document.")
    # A text file and a text column give the same kind of record, so they are not different schemas.
    record_parsers = [group.record_parser for group in groups if group.record_parser and not group.fault]
    texts = any(record_parser.detected and record_parser.record_kind == "text" for record_parser in record_parsers)
    schemas: dict[str, str] = {}
    for group in groups:
        if group.record_parser and not group.fault and (group.record_parser.detected or not texts):
            schemas.setdefault(group.record_parser.detected or "plain text", group.sources[0].name)
    if len(schemas) > 1:
        listed = "; ".join(f"{schema} ({name})" for schema, name in list(schemas.items())[:_MAX_LISTED])
        state.warnings.append(f"The sources hold {len(schemas)} different schemas: {listed}.")


def _sum_counts(groups: Sequence[SourceGroup], counts: Sequence[Counter[str]]) -> Counter[str]:
    """Sum the counts of all groups, scaled to the complete input."""
    total: Counter[str] = Counter()
    for group, group_counts in zip(groups, counts, strict=True):
        total.update({name: group.scale_count(count) for name, count in group_counts.items()})
    return total


def _judge_bad(state: _ExaminationState, reasons: Mapping[str, tuple[int, str]]) -> None:
    """Add a fault if bad records exceed the budget, otherwise a warning."""
    groups, max_bad = state.groups, state.recipe.max_bad
    bad_seen = sum(group.bad for group in groups)
    if not bad_seen:
        return
    records = sum(group.scale_count(group.records) for group in groups)
    bad = sum(group.bad * group.scale for group in groups)
    # For a sample, use a lower bound two standard deviations below the count, so that noise causes no fault.
    least = bad if state.complete else bad * max(0.0, 1 - 2 / math.sqrt(bad_seen))
    fact = f"{round(bad):,} of {records:,} records are bad"
    if not state.complete:
        records_read = sum(group.records for group in groups)
        fact = f"{bad_seen:,} of {records_read:,} records in the sample are bad, an estimated {round(bad):,} in total"
    if least > count_allowed_bad(max_bad, records):
        state.faults.append(
            f"{fact}, more than --max-bad {max_bad} allows: {describe_bad_records(bad, records, reasons)}."
        )
    else:
        more = "" if state.complete else " (--full counts them)"
        state.warnings.append(f"{fact}{more}: prepare writes them to quarantine.jsonl.")


def _shorten_list(sentences: list[str]) -> tuple[str, ...]:
    unique_sentences = list(dict.fromkeys(sentences))
    more = len(unique_sentences) - _MAX_LISTED
    return (*unique_sentences[:_MAX_LISTED], f"... and {more:,} more faults.") if more > 0 else tuple(unique_sentences)


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
