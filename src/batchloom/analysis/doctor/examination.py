"""Examination of inputs before preparation: contents, faults and estimates."""

import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
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

_BATCH_CHARACTERS, _BATCH_DOCUMENTS = 1 << 20, 1 << 13
_MAX_LISTED = 10
_MAX_PREVIEWED_SOURCES = 5
_EDGE_BYTES = 64 << 10
# If a sample holds no record at all, this many sources are read further from their start.
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
        examination = _Examination(recipe, listing, listener, sizes or SampleSizes(), full=full)
        examination.load_context(tokenizer_optional=tokenizer_optional)
        duplicates = examination.read_samples()
        return examination.report(duplicates, preview)


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
class _Examination:
    """Contents of inputs, or of a sample, as ``prepare`` would read and encode them."""

    def __init__(
        self, recipe: Recipe, listing: SourceListing, listener: Listener, sizes: SampleSizes, *, full: bool
    ) -> None:
        self._recipe, self._listing, self._listener = recipe, listing, listener
        self._encode_recipe = recipe
        if recipe.chat.overlong == "error":
            # Overlong documents are counted here; with "error" the first one would end the examination.
            self._encode_recipe = replace(recipe, chat=replace(recipe.chat, overlong="drop"))
        self._record_parsers = RecordParsers(self._encode_recipe, ReadLimits())
        self._sample = InputSample(listing.sources, self._record_parsers.rules, sizes, full=full)
        self._groups = self._group_sources()
        self._group_of = {source.name: group for group in self._groups for source in group.sources}
        self._usable_sources = [source for group in self._groups if not group.fault for source in group.sources]
        # None if nothing can be encoded (any more).
        self._context: EncodeContext | None = None
        self._tokenizer_missing = False
        # Seconds to load the tokenizer, which prepare spends as well.
        self._load_seconds = 0.0
        self._faults = [group.fault for group in self._groups if group.fault]
        self._warnings: list[str] = []
        self._bad: list[BadFacts] = []
        self._reasons = ReasonCounts()
        self._duplicates = DuplicateCounter()
        self._pending: _PendingDocuments | None = None
        self._part: SourcePart | None = None
        self._progress = SampleProgress()
        self._clock = time.perf_counter()
        self._records = 0

    @property
    def _about(self) -> str:
        """Prefix of estimated counts."""
        return "" if self._sample.complete else "about "

    def _group_sources(self) -> list[SourceGroup]:
        """Group sources by how they are read, in the order of each group's first source.

        In a sample, small files form groups of their own: they are chosen by number and do not represent large ones.
        """
        sample, groups = self._sample, dict[object, SourceGroup]()
        for source in {part.source.name: part.source for part, _ in sample.parts}.values():
            record_parser, fault, suggestion = None, "", None
            try:
                record_parser = self._record_parsers.get_parser(source)
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

    def load_context(self, *, tokenizer_optional: bool) -> None:
        """Load what encodes documents, and record why that is impossible."""
        try:
            check_no_mixed_preferences(self._usable_sources, self._record_parsers)
        except InputError as error:
            self._faults.append(str(error))
        began = time.perf_counter()
        try:
            self._context = self._make_context()
        except (TokenizerError, MissingDependencyError) as error:
            if not tokenizer_optional:
                raise
            self._tokenizer_missing = True
            self._warnings.append(f"Token counts are missing, because there is no tokenizer: {error}")
        self._load_seconds = time.perf_counter() - began

    def _make_context(self) -> EncodeContext | None:
        recipe, sources, record_parsers = self._encode_recipe, self._usable_sources, self._record_parsers
        if not sources:
            return None
        add_warning = self._warnings.append
        try:
            tokenizer = choose_job_tokenizer(recipe, sources, record_parsers, add_warning)
        except InputError as error:
            self._faults.append(str(error))
            if parse_train_spec(recipe.tokenizer) is not None:
                return None
            # A source that cannot be read must not prevent counting the tokens of the others.
            tokenizer = choose_job_tokenizer(recipe, (), record_parsers, add_warning)
        try:
            dtype = choose_dtype_name(recipe, tokenizer)
            encoder = choose_job_template(recipe, sources, record_parsers, tokenizer, add_warning)
            media = make_media_encoder(tokenizer, recipe, encoder)
        except InputError as error:
            self._faults.append(str(error))
            return None
        return EncodeContext(
            tokenizer=tokenizer,
            dtype=TOKEN_DTYPES[dtype],
            chat=encoder,
            media=media,
            record_parsers=record_parsers,
            bounds=RecordBounds(record_parsers.rules),
            normalize=recipe.reading.normalize,
            membership=SubsetRule(0.0, 0.0),
        )

    def read_samples(self) -> DuplicateFacts:
        """Read the sample, count its records and documents, and compare documents."""
        self._clock, faults_before = time.perf_counter(), len(self._faults)
        names = {source.name for source in self._usable_sources}
        parts = [sampled_part for sampled_part in self._sample.parts if sampled_part[0].source.name in names]
        with self._duplicates:
            self._read_parts(parts, RecordBounds(self._record_parsers.rules) if self._sample.complete else None)
            if not self._records and not self._sample.complete:
                # Records larger than a probe may be missed by all probes.
                heads = self._usable_sources[:_MAX_SAMPLED_HEADS]
                self._read_parts([(SourcePart(source, 0, source.size), _MAX_HEAD_CHARACTERS) for source in heads], None)
            documents, repeated = self._duplicates.documents, self._duplicates.count_repeated()
        if not self._sample.complete and len(self._faults) == faults_before:
            self._faults += filter(None, map(_describe_unclosed_json, self._usable_sources))
        distribute_unread_bytes(self._groups, self._listing.sources, self._sample)
        is_left_out = self._recipe.dedup.mode != "none"
        return DuplicateFacts(documents, repeated, repeated / max(documents, 1), self._sample.complete, is_left_out)

    def _read_parts(self, parts: Sequence[tuple[SourcePart, int | None]], bounds: RecordBounds | None) -> None:
        for parsed_records in iter_parsed_records(parts, self._record_parsers, bounds, self._refuse):
            self._count_records(parsed_records)
        self._flush()

    def _refuse(self, part: SourcePart, error: InputError) -> None:
        """Record that a part cannot be read."""
        self._faults.append(str(error))
        group = self._group_of[part.source.name]
        group.fault = group.fault or str(error)

    def _count_records(self, parsed_records: ParsedRecords) -> None:
        """Count a batch."""
        group, record_batch = self._group_of[parsed_records.part.source.name], parsed_records.batch
        if parsed_records.part is not self._part:
            self._part, self._progress = parsed_records.part, SampleProgress()
        progress, records_read = self._progress, record_batch.records_read
        if not self._sample.complete and self._sample.is_table(parsed_records.part):
            _truncate_records(record_batch, progress.records_read, self._sample.sizes.probe_bytes)
        self._records += record_batch.records_read
        group.records += record_batch.records_read
        progress.advance(records_read, record_batch.records_read, parsed_records.consumed)
        share = self._sample.estimate_share(parsed_records, progress)
        group.read_bytes += share - progress.share
        progress.share = share
        self._record_bad(group, parsed_records.part, parsed_records.before, record_batch.bad)
        normalized = self._context is None or self._context.normalize
        normalize_records(record_batch, parsed_records.record_parser.record_kind, normalized=normalized)
        group.empty += record_batch.records_read - len(record_batch.bad) - len(record_batch.values)
        if record_batch.values:
            self._queue_documents(group, parsed_records)
        group.seconds += self._measure_lap()

    def _flush(self) -> None:
        """Tokenize the pending documents."""
        pending, self._pending = self._pending, None
        if pending is not None and pending.documents:
            self._encode_pending(pending)
            pending.group.seconds += self._measure_lap()

    def _measure_lap(self) -> float:
        before, self._clock = self._clock, time.perf_counter()
        return self._clock - before

    def _queue_documents(self, group: SourceGroup, parsed_records: ParsedRecords) -> None:
        record_batch, pending = parsed_records.batch, self._pending
        sizes = [sum(map(len, iter_texts(document))) for document in record_batch.values]
        if parsed_records.record_parser.record_kind != "tokens":
            group.characters.update(sizes)
        if pending is None or pending.group is not group:
            self._flush()
            pending = self._pending = _PendingDocuments(group, parsed_records.record_parser)
        pending.documents += record_batch.values
        pending.hashes.append(compute_document_keys(record_batch.values))
        pending.record_locations += [
            (parsed_records.part, parsed_records.before, record, offset)
            for record, offset in zip(record_batch.records, record_batch.offsets, strict=True)
        ]
        pending.characters += sum(map(estimate_characters, record_batch.values))
        if pending.characters >= _BATCH_CHARACTERS or len(pending.documents) >= _BATCH_DOCUMENTS:
            self._flush()

    def _encode_pending(self, pending: _PendingDocuments) -> None:
        group, count = pending.group, len(pending.documents)
        encoded_batch: EncodedBatch | None = None
        if self._context is not None:
            try:
                encoded_batch = encode_documents(self._context, pending.record_parser, pending.documents)
            except TemplateError as error:
                self._faults.append(str(error))
                self._context = None
        keys = np.concatenate(pending.hashes)
        if encoded_batch is None:
            group.documents += count
        else:
            self._count_documents(group, pending, encoded_batch)
            keys = _make_duplicate_keys(keys, encoded_batch.numbers)
        self._duplicates.add(keys)
        if self._sample.complete:
            self._report_progress()

    def _count_documents(self, group: SourceGroup, pending: _PendingDocuments, encoded_batch: EncodedBatch) -> None:
        for fault in encoded_batch.faults:
            part, before, record, offset = pending.record_locations[fault.number]
            self._record_bad(group, part, before, [BadRecord(record, offset, None, fault.reason, fault.snippet)])
        group.dropped.update(fault.rule for fault in encoded_batch.dropped)
        group.altered.update(encoded_batch.altered)
        group.documents += len(encoded_batch.lengths)
        group.lengths.update(encoded_batch.lengths.tolist())
        group.count_media(encoded_batch.media)
        group.tokens += encoded_batch.ids.size
        group.masked |= encoded_batch.mask is not None
        group.trained += encoded_batch.ids.size if encoded_batch.mask is None else int(np.sum(encoded_batch.mask))

    def _record_bad(
        self,
        group: SourceGroup,
        part: SourcePart,
        before: int | None,
        bad_records: Iterable[BadRecord],
    ) -> None:
        for bad in bad_records:
            group.bad += 1
            count_reason(self._reasons, bad.reason)
            if len(self._bad) < _MAX_LISTED:
                self._bad.append(self._make_bad_facts(part, before, bad))

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
                min(done, self._listing.bytes),
                self._listing.bytes,
                0,
                sum(group.documents for group in groups),
                sum(group.tokens for group in groups),
                sum(group.bad for group in groups),
            )
        )

    def report(self, duplicates: DuplicateFacts, preview: int) -> ExaminationResult:
        """Return the result, with ``preview`` documents of each source."""
        groups, context = self._groups, self._context
        previews = self._make_previews(preview)
        self._judge_bad()
        self._judge_input()
        unused = [
            ()
            if group.fault
            else find_unused_columns(
                map(self._record_parsers.get_parser, group.sources), context.chat if context else None
            )
            for group in groups
        ]
        lengths, weights = weight_lengths(groups)
        size = sum(group.estimate_store_bytes(context.dtype.itemsize) for group in groups) if context else 0
        seconds = self._load_seconds + sum(group.seconds * group.scale for group in groups)
        return ExaminationResult(
            inputs=tuple(map(redact_url, self._recipe.inputs)),
            exact=self._sample.complete,
            files=len(self._listing.sources),
            bytes=self._listing.bytes,
            read_bytes=round(sum(group.read_bytes for group in groups)),
            sources=tuple(
                group.make_facts(first, names, tokenized=context is not None)
                for group, first, names in zip(groups, previews, unused, strict=True)
            ),
            tokenizer=_make_tokenizer_facts(self._recipe, context) if context else None,
            tokenizer_missing=self._tokenizer_missing,
            duplicates=duplicates,
            bad=tuple(self._bad),
            bad_seen=sum(group.bad for group in groups),
            lengths=lengths if context else np.zeros(0, np.int64),
            weights=weights if context else np.zeros(0, np.float64),
            seconds=seconds if context else None,
            store_bytes=round(size) if context else None,
            held_bytes=round(sum(group.media_bytes * group.scale for group in groups)),
            faults=_shorten_list(self._faults),
            warnings=tuple(dict.fromkeys(self._warnings)),
            notes=self._listing.notes,
        )

    def _make_previews(self, count: int) -> list[tuple[DocumentPreview, ...]]:
        previews: list[tuple[DocumentPreview, ...]] = []
        for group in self._groups:
            first: tuple[DocumentPreview, ...] = ()
            if self._context is not None and not group.fault and sum(map(bool, previews)) < _MAX_PREVIEWED_SOURCES:
                try:
                    first = preview_documents(group.sources, self._context, count)
                except InputError as error:
                    self._faults.append(str(error))
            previews.append(first)
        return previews

    def _judge_bad(self) -> None:
        """Add a fault if bad records exceed the budget, otherwise a warning."""
        groups, max_bad = self._groups, self._recipe.max_bad
        bad_seen = sum(group.bad for group in groups)
        if not bad_seen:
            return
        records = sum(group.scale_count(group.records) for group in groups)
        bad = sum(group.bad * group.scale for group in groups)
        # For a sample, use a lower bound two standard deviations below the count, so that noise causes no fault.
        least = bad if self._sample.complete else bad * max(0.0, 1 - 2 / math.sqrt(bad_seen))
        fact = f"{round(bad):,} of {records:,} records are bad"
        if not self._sample.complete:
            fact = f"{bad_seen:,} of {sum(group.records for group in groups):,} records in the sample are bad"
            fact += f", an estimated {round(bad):,} in total"
        if least > count_allowed_bad(max_bad, records):
            reasons = describe_bad_records(bad, records, self._reasons)
            self._faults.append(f"{fact}, more than --max-bad {max_bad} allows: {reasons}.")
        else:
            more = "" if self._sample.complete else " (--full counts them)"
            self._warnings.append(f"{fact}{more}: prepare writes them to quarantine.jsonl.")

    def _judge_input(self) -> None:
        """Add faults and warnings about the complete input."""
        groups, about = self._groups, self._about
        if not self._faults and not any(group.documents for group in groups):
            self._faults.append(self._explain_no_document())
        strict = self._recipe.chat.overlong == "error"
        for rule, count in _sum_counts(groups, [group.dropped for group in groups]).items():
            sentence = f"{about}{format_count(count, 'document')} {'is' if count == 1 else 'are'} left out: {rule}."
            (self._faults if strict and rule == "overlong" else self._warnings).append(sentence)
        for change, count in _sum_counts(groups, [group.altered for group in groups]).items():
            self._warnings.append(f"In {about}{format_count(count, 'conversation')} the template {change}.")
        empty = sum(group.scale_count(group.empty) for group in groups)
        if empty:
            self._warnings.append(f"{about}{format_count(empty, 'record')} without any text give no document.")
        # A text file and a text column give the same kind of record, so they are not different schemas.
        parsers = [group.record_parser for group in groups if group.record_parser and not group.fault]
        texts = any(parser.detected and parser.record_kind == "text" for parser in parsers)
        schemas: dict[str, str] = {}
        for group in groups:
            if group.record_parser and not group.fault and (group.record_parser.detected or not texts):
                schemas.setdefault(group.record_parser.detected or "plain text", group.sources[0].name)
        if len(schemas) > 1:
            listed = "; ".join(f"{schema} ({name})" for schema, name in list(schemas.items())[:_MAX_LISTED])
            self._warnings.append(f"The sources hold {len(schemas)} different schemas: {listed}.")

    def _explain_no_document(self) -> str:
        if not self._sample.complete and not any(group.records for group in self._groups):
            return "The sample holds no complete record, because the first ones are too long: --full reads everything."
        if self._reasons:
            count, reason = max(self._reasons.values(), key=lambda count_and_reason: count_and_reason[0])
            return f"The input gives no document: {format_count(count, 'record')} cannot be used ({reason})."
        return "The input gives no document: name other inputs, or leave fewer out."


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


def _sum_counts(groups: Sequence[SourceGroup], counts: Sequence[Counter[str]]) -> Counter[str]:
    """Sum the counts of all groups, scaled to the complete input."""
    total: Counter[str] = Counter()
    for group, group_counts in zip(groups, counts, strict=True):
        total.update({name: group.scale_count(count) for name, count in group_counts.items()})
    return total


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
