"""Examination of raw inputs for ``doctor`` and ``check``."""

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from batchloom.analysis.doctor.findings import BadFacts, Diagnosis, DuplicateFacts, SourceGroup, TokenizerFacts
from batchloom.analysis.doctor.sampling import (
    DocumentPreview,
    InputSample,
    MemorySink,
    SampleContext,
    SampledPart,
    SampleReader,
    SampleSizes,
    encode_nothing,
    make_unit_tokenizer,
    preview_documents,
)
from batchloom.core.addresses import format_input_label, is_url, is_url_or_stdin, redact_url
from batchloom.core.document import BadRecord
from batchloom.core.errors import (
    DamagedFileError,
    InputError,
    MissingDependencyError,
    RecordError,
    SchemaError,
    TemplateError,
    TokenizerError,
)
from batchloom.core.wording import format_count, format_list
from batchloom.preparation import Progress, ReadRecipe, Recipe
from batchloom.preparation.dedup import DuplicateCounter
from batchloom.preparation.documents import (
    WHOLE_TEXTS,
    DocumentEncoder,
    EncodedBatch,
    RecordParser,
    RecordParsers,
    SubsetRule,
    check_one_objective,
    choose_dtype_name,
    choose_job_template,
    choose_job_tokenizer,
    encode_documents,
    estimate_characters,
    find_unused_columns,
    iter_texts,
    make_duplicate_keys,
    make_media_encoder,
)
from batchloom.preparation.identity import make_cleaner
from batchloom.preparation.listing import (
    UnfitFile,
    find_whole_files,
    is_named,
    leave_out_read,
    leave_out_unfit,
    list_inputs,
)
from batchloom.preparation.report import Listener
from batchloom.preparation.request import resolve_inputs
from batchloom.preparation.settings import count_allowed_bad
from batchloom.preparation.units import (
    ReasonCounts,
    UnitProgress,
    UnitTokenizer,
    count_reason,
    describe_bad_records,
    mark_first_of_records,
)
from batchloom.sources import (
    PartReader,
    ReadLimits,
    RecordBounds,
    SourceListing,
    SourcePart,
    format_record_name,
    make_bad_record_error,
    prefetch_sources,
)
from batchloom.sources.files import Source, Spool, open_source
from batchloom.sources.formats import choose_read_method
from batchloom.store import BAD
from batchloom.store.format import TOKEN_DTYPES
from batchloom.store.maintain import VerificationResult
from batchloom.tokens import parse_train_spec

MAX_LISTED = 10
_MAX_PREVIEWED_SOURCES = 5
_EDGE_BYTES = 64 << 10
# If a sample holds no record at all, this many sources are read further from their start.
_MAX_SAMPLED_HEADS = 8
_MAX_HEAD_CHARACTERS = 4 << 20
# Characters of the first document that a verdict shows.
_BEGINNING_CHARACTERS = 200
_REPORT_SECONDS = 0.2
# Maximum number of parts encoded together, and of bad records kept before they are sorted.
_MAX_RUN_PARTS = 4096
_MAX_COLLECTED = 1024
# Bad records from which those to list are chosen.
_MAX_BAD_FACTS = 100
# Minimum characters counted per batch. Without it a part whose batches hold no documents would be read to its end.
_MIN_BATCH_CHARACTERS = 64 << 10


@dataclass(frozen=True, slots=True)
class ExaminationResult:
    """Diagnosis without packing, feeds and commands, and what they are computed from.

    Attributes:
        tokenizer_missing: whether the tokenizer is not available here.
        lengths: tokens of a document, ascending [N] int64.
        weights: estimated number of documents with each length in the complete input [N] float64.
        held_bytes: bytes of media embedded in records, equal ones counted once.
        proposals: settings that notes about the files propose, and their values.
    """

    diagnosis: Diagnosis
    tokenizer_missing: bool
    lengths: NDArray[np.int64]
    weights: NDArray[np.float64]
    held_bytes: int
    proposals: tuple[tuple[str, str], ...]


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
    with Spool() as spool, TemporaryDirectory() as folder:
        # A sample of a Hub data set is read remotely, without downloading it.
        listing = list_inputs(recipe, spool, streaming=None if full else True)
        examination = Examination(recipe, listing, listener, sizes or SampleSizes(), full=full)
        examination.load_components(Path(folder), tokenizer_optional=tokenizer_optional)
        duplicates = examination.read()
        return examination.report(duplicates, preview)


@final
class Examination:
    """Contents of inputs, or of a sample, as ``prepare`` would read and encode them.

    Attributes:
        sample: what is read.
        groups: sources that are read alike, with their counters.
        faults: why sources, or parts of them, cannot be read.
        bad: bad records, the first ones of each file.
        beginning: beginning of the first document.
    """

    def __init__(
        self,
        recipe: Recipe,
        listing: SourceListing,
        listener: Listener = lambda _: None,
        sizes: SampleSizes | None = None,
        *,
        full: bool,
    ) -> None:
        self._recipe = recipe
        self._listing = listing
        self._listener = listener
        self._encode_recipe = recipe
        if recipe.chat.overlong == "error":
            # Overlong documents are counted here; with "error" the first one would end the examination.
            self._encode_recipe = replace(recipe, chat=replace(recipe.chat, overlong="drop"))
        self._record_parsers = RecordParsers(self._encode_recipe, ReadLimits())
        self.sample = InputSample(listing.sources, self._record_parsers.rules, sizes or SampleSizes(), full=full)
        self.faults: list[str] = []
        self._warnings: list[str] = []
        self.bad: list[BadFacts] = []
        # Files without a usable record.
        self._unusable: list[UnfitFile] = []
        self._bad_by_source: Counter[str] = Counter()
        self.beginning = ""
        self.groups = self._group_sources()
        self._group_of = {source.name: group for group in self.groups for source in group.sources}
        self._usable_sources = [source for group in self.groups if not group.fault for source in group.sources]
        # None if nothing can be encoded (any more).
        self._encoder: DocumentEncoder | None = None
        self._context = SampleContext(
            record_parsers=self._record_parsers,
            normalize=recipe.reading.normalize,
            membership=SubsetRule(0.0, 0.0),
        )
        self._tokenizer_missing = False
        # Seconds to load the tokenizer, which prepare spends as well.
        self._load_seconds = 0.0
        self._reasons = ReasonCounts()
        # Records of each source before the part that is read next, if everything is read.
        self._records_before: dict[str, int] = {}
        # Name of the first record with each change that the template makes.
        self._first_altered: dict[str, str] = {}
        # Bytes of the parts that were read, and characters of the documents of the current one.
        self._bytes_before = self._characters = 0
        self._total_bytes = listing.bytes
        self._last_report_time = time.perf_counter()

    def _group_sources(self) -> list[SourceGroup]:
        """Group sources by how they are read, in the order of each group's first source.

        In a sample, small files form groups of their own: they are chosen by number and do not represent large ones.
        """
        sample = self.sample
        groups = dict[object, SourceGroup]()
        unfit: list[tuple[Source, InputError]] = list(sample.damaged)
        faults = [(source, str(error)) for source, error in unfit]
        for source in {part.source.name: part.source for part, _ in sample.parts}.values():
            record_parser = None
            fault = ""
            suggestion = None
            try:
                record_parser = self._record_parsers.get_parser(source)
            except InputError as error:
                fault = str(error)
                suggestion = error.suggestion if isinstance(error, SchemaError) else None
                if isinstance(error, DamagedFileError | SchemaError) and not is_named(source, self._recipe):
                    unfit.append((source, error))
                    if isinstance(error, DamagedFileError):
                        # A damaged file says nothing about others of its form.
                        sample.damaged.append((source, error))
                        faults.append((source, fault))
                        continue
            schema_key = (record_parser.record_kind, record_parser.detected) if record_parser else ("", suggestion)
            small = sample.complete or sample.is_small(source)
            key = source.name if sample.apart else (source.kind, source.compression, schema_key, small)
            if fault and (suggestion is None or key not in groups):
                faults.append((source, fault))
            group = groups.setdefault(key, SourceGroup(record_parser, fault, suggestion))
            group.sources.append(source)
            group.has_file_documents &= choose_read_method(source, sample.rules) == "file"
        self._judge_unfit(unfit, faults)
        return list(groups.values())

    def _judge_unfit(self, unfit: Sequence[tuple[Source, InputError]], faults: Sequence[tuple[Source, str]]) -> None:
        """Add the faults of sources; files that prepare leaves out are warnings."""
        left_out: set[str] = set()
        if unfit:
            with suppress(DamagedFileError, SchemaError):
                self._warnings += leave_out_unfit(self._listing, unfit, self._recipe).warnings
                left_out = {source.name for source, _ in unfit}
        self.faults += [fault for source, fault in faults if source.name not in left_out]

    def load_components(self, folder: Path, *, tokenizer_optional: bool) -> None:
        """Load what cleans and encodes documents; record why they cannot be encoded.

        ``folder`` is for indexes of cleaning steps.
        """
        cleaner = make_cleaner(self._recipe.reading.clean, folder, lambda _: None)
        self._context = replace(self._context, cleaner=cleaner)
        try:
            check_one_objective(self._usable_sources, self._record_parsers)
        except InputError as error:
            self.faults.append(str(error))
        began = time.perf_counter()
        try:
            self._encoder = self._make_encoder()
        except (TokenizerError, MissingDependencyError) as error:
            if not tokenizer_optional:
                raise
            self._tokenizer_missing = True
            self._warnings.append(f"Token counts are missing, because there is no tokenizer: {error}")
        self._load_seconds = time.perf_counter() - began

    def _make_encoder(self) -> DocumentEncoder | None:
        recipe = self._encode_recipe
        sources = self._usable_sources
        record_parsers = self._record_parsers
        if not sources:
            return None
        add_warning = self._warnings.append
        try:
            tokenizer = choose_job_tokenizer(recipe, sources, record_parsers, add_warning)
        except InputError as error:
            self.faults.append(str(error))
            if parse_train_spec(recipe.tokenizer) is not None:
                return None
            # A source that cannot be read must not prevent counting the tokens of the others.
            tokenizer = choose_job_tokenizer(recipe, (), record_parsers, add_warning)
        try:
            dtype = choose_dtype_name(recipe, tokenizer)
            encoder = choose_job_template(recipe, sources, record_parsers, tokenizer, add_warning)
            media = make_media_encoder(tokenizer, recipe, encoder)
        except InputError as error:
            self.faults.append(str(error))
            return None
        return DocumentEncoder(tokenizer=tokenizer, dtype=TOKEN_DTYPES[dtype], chat=encoder, media=media)

    def read(self) -> DuplicateFacts:
        """Read the sample, count its records and documents, and compare documents."""
        faults_before = len(self.faults)
        names = {source.name for source in self._usable_sources}
        sampled_parts = [part for part in self.sample.parts if part[0].source.name in names]
        with DuplicateCounter() as duplicates:
            if self.sample.complete:
                bounds = RecordBounds(self._record_parsers.rules)
                for parts in self._iter_runs(sampled_parts):
                    self._read_parts(parts, bounds, duplicates)
            else:
                for sampled_part in sampled_parts:
                    self._read_parts([sampled_part], None, duplicates)
            if not self.sample.complete and not any(group.records for group in self.groups):
                # Records larger than a probe may be missed by all probes.
                for source in self._usable_sources[:_MAX_SAMPLED_HEADS]:
                    part = SourcePart(source, 0, source.size)
                    self._read_parts([(part, _MAX_HEAD_CHARACTERS)], None, duplicates)
            documents = duplicates.documents
            repeated = duplicates.count_repeated()
        if not self.sample.complete and len(self.faults) == faults_before:
            self.faults += filter(None, map(_describe_unclosed_json, self._usable_sources))
        _distribute_unread_bytes(self.groups, self._listing.sources, self.sample)
        is_left_out = self._recipe.dedup.mode != "none"
        return DuplicateFacts(documents, repeated, repeated / max(documents, 1), self.sample.complete, is_left_out)

    def _iter_runs(self, sampled_parts: Sequence[SampledPart]) -> Iterator[list[SampledPart]]:
        """Yield runs of parts of one group: small files are encoded together."""
        for _, parts in groupby(sampled_parts, lambda sampled_part: id(self._group_of[sampled_part[0].source.name])):
            while run := list(islice(parts, _MAX_RUN_PARTS)):
                yield run

    def _read_parts(
        self, sampled_parts: Sequence[SampledPart], bounds: RecordBounds | None, duplicates: DuplicateCounter
    ) -> None:
        """Run what ``prepare`` runs over a unit, on parts of one group."""
        began = time.perf_counter()
        parts = [part for part, _ in sampled_parts]
        group = self._group_of[parts[0].source.name]
        bad_records: list[tuple[int, BadRecord]] = []
        sink = MemorySink(partial(self._count_documents, group, duplicates), partial(self._collect_bad, bad_records))
        chat = self._encoder.chat if self._encoder else None
        context = replace(self._context, encode_sample=partial(self._encode, group), chat_encoder=chat)
        # Of a file that is read in part, the rest may be usable.
        complete = {number for number, (_, max_characters) in enumerate(sampled_parts) if max_characters is None}
        whole_files = find_whole_files(parts, self._recipe) & complete
        tokenizer = make_unit_tokenizer(parts, context, sink, self._receive, whole_files)
        prefetched = prefetch_sources(sampled_parts, lambda part: part[0].source) if bounds else sampled_parts
        for number, (part, max_characters) in enumerate(prefetched):
            try:
                with PartReader(part, self._record_parsers.get_parser(part.source).rules, bounds) as part_reader:
                    reader = SampleReader(part_reader, part, self.sample)
                    try:
                        self._read_steps(tokenizer, tokenizer.iter_steps(number, part, reader), max_characters)
                    finally:
                        group.read_bytes += reader.estimate_share()
            except InputError as error:
                self.faults.append(str(error))
                group.fault = group.fault or str(error)
        tokenizer.flush()
        records_before: list[int] = []
        facts = tokenizer.make_facts()
        for part, counts in zip(parts, facts.parts, strict=True):
            group.count_part(counts)
            if counts.damage:
                self._unusable.append(UnfitFile(part.source, counts.damage, counts.bad))
            records_before.append(self._records_before.get(part.source.name, 0))
            self._records_before[part.source.name] = records_before[-1] + counts.records
        for change, alteration in facts.altered.items():
            group.altered[change] += alteration.count
            if change not in self._first_altered:
                part = parts[alteration.part]
                before = records_before[alteration.part]
                record = BadRecord(alteration.record, alteration.offset, None, "", "")
                self._first_altered[change] = self._name_record(part, before, record)
        bad_records.sort(key=_get_record_position)
        for number, bad in bad_records:
            source = parts[number].source.name
            if self._bad_by_source[source] < MAX_LISTED and len(self.bad) < _MAX_BAD_FACTS:
                self._bad_by_source[source] += 1
                self.bad.append(self._make_bad_facts(parts[number], records_before[number], bad))
        self._bytes_before += sum(part.stop - part.start for part in parts)
        group.seconds += time.perf_counter() - began

    def _read_steps(self, tokenizer: UnitTokenizer, steps: Iterator[None], max_characters: int | None) -> None:
        """Read a part, up to about ``max_characters`` of its documents."""
        self._characters = 0
        for count, _ in enumerate(steps, 1):
            if max_characters is not None:
                tokenizer.flush()
                if max(self._characters, count * _MIN_BATCH_CHARACTERS) >= max_characters:
                    return

    def _encode(
        self, group: SourceGroup, record_parser: RecordParser, documents: list[Any], weights: Sequence[float]
    ) -> EncodedBatch:
        """Encode documents; without a tokenizer or a usable template they have no tokens."""
        if not self.beginning:
            self.beginning = "\n".join(iter_texts(documents[0]))[:_BEGINNING_CHARACTERS]
        self._characters += sum(map(estimate_characters, documents))
        group.count_characters(record_parser.record_kind, documents)
        if self._encoder is not None:
            try:
                encoded_batch = encode_documents(self._encoder, record_parser, documents, weights)
            except TemplateError as error:
                self.faults.append(str(error))
                self._encoder = None
            else:
                return encoded_batch
        return encode_nothing(record_parser, documents, weights)

    def _count_documents(
        self,
        group: SourceGroup,
        duplicates: DuplicateCounter,
        batch: EncodedBatch,
        rows: NDArray[np.void],
    ) -> None:
        duplicates.add(_make_document_keys(rows))
        if self._encoder is not None:
            group.count_tokens(rows["length"], rows["side"], batch.flags)
            group.count_media(batch.media)

    def _receive(self, message: object) -> None:
        """Report progress if everything is read."""
        if not isinstance(message, UnitProgress) or not self.sample.complete:
            return
        now = time.perf_counter()
        if now - self._last_report_time >= _REPORT_SECONDS:
            self._last_report_time = now
            groups = self.groups
            total = self._total_bytes
            self._listener(
                Progress(
                    "tokenize",
                    min(self._bytes_before + message.bytes, total),
                    total,
                    0,
                    sum(group.documents for group in groups) + message.documents,
                    sum(group.tokens for group in groups) + message.tokens,
                    sum(group.bad for group in groups) + message.bad,
                )
            )

    def _collect_bad(
        self, collected: list[tuple[int, BadRecord]], part_number: int, bad_records: Sequence[BadRecord]
    ) -> None:
        """Count the reasons of bad records, and collect the first ones by part and record."""
        for bad in bad_records:
            count_reason(self._reasons, bad.reason)
        collected += [(part_number, bad) for bad in bad_records]
        if len(collected) > _MAX_COLLECTED:
            collected.sort(key=_get_record_position)
            del collected[MAX_LISTED:]

    def _name_record(self, part: SourcePart, before: int, record: BadRecord) -> str:
        records_before = before if self.sample.complete else self.sample.count_records_before(part)
        if records_before is None:
            return f"{part.source.name}, byte {record.offset:,}"
        return format_record_name(part.source, self.sample.rules, records_before, record)

    def _make_bad_facts(self, part: SourcePart, before: int, bad: BadRecord) -> BadFacts:
        source = part.source
        records_before = before if self.sample.complete else self.sample.count_records_before(part)
        error = make_bad_record_error(source, self.sample.rules, records_before or 0, bad)
        if records_before is None:
            reason = f"at byte {bad.offset:,}: {error.reason}"
            error = RecordError(source.name, None, bad.column, reason)
        return BadFacts(
            file=source.name,
            line=error.line,
            row=error.row,
            column=error.column,
            offset=bad.offset,
            reason=bad.reason,
            snippet=bad.snippet,
            sentence=str(error),
        )

    def report(self, duplicates: DuplicateFacts, preview: int) -> ExaminationResult:
        """Return the result, with ``preview`` documents of each source."""
        groups = self.groups
        encoder = self._encoder
        previews = self._make_previews(preview)
        self._judge_bad()
        self._judge_input()
        unused = [
            ()
            if group.fault
            else find_unused_columns(
                map(self._record_parsers.get_parser, group.sources), encoder.chat if encoder else None
            )
            for group in groups
        ]
        size = sum(group.estimate_store_bytes(encoder.dtype.itemsize) for group in groups) if encoder else 0
        seconds = self._load_seconds + sum(group.seconds * group.scale for group in groups)
        sources = tuple(
            group.make_facts(first, names, tokenized=encoder is not None)
            for group, first, names in zip(groups, previews, unused, strict=True)
        )
        diagnosis = Diagnosis(
            inputs=tuple(map(redact_url, self._recipe.inputs)),
            exact=self.sample.complete,
            files=len(self._listing.sources),
            bytes=self._listing.bytes,
            read_bytes=round(sum(group.read_bytes for group in groups)),
            sources=sources,
            tokenizer=_make_tokenizer_facts(self._recipe, encoder) if encoder else None,
            documents=sum(source.documents for source in sources),
            tokens=sum(source.total_tokens or 0 for source in sources) if encoder else None,
            trained_tokens=sum(source.trained_tokens or 0 for source in sources) if encoder else None,
            duplicates=duplicates,
            bad=_spread_over_files(self.bad),
            bad_seen=sum(group.bad for group in groups),
            seconds=seconds if encoder else None,
            store_bytes=round(size) if encoder else None,
            faults=tuple(dict.fromkeys(self.faults)),
            warnings=tuple(dict.fromkeys(self._warnings)),
            notes=self._listing.notes,
        )
        lengths, weights = _weight_lengths(groups if encoder else ())
        held_bytes = round(sum(group.media_bytes * group.scale for group in groups))
        proposals = self._listing.proposals
        return ExaminationResult(diagnosis, self._tokenizer_missing, lengths, weights, held_bytes, proposals)

    def _make_previews(self, count: int) -> list[tuple[DocumentPreview, ...]]:
        previews: list[tuple[DocumentPreview, ...]] = []
        encoder = self._encoder
        for group in self.groups:
            first: tuple[DocumentPreview, ...] = ()
            if encoder is not None and not group.fault and sum(map(bool, previews)) < _MAX_PREVIEWED_SOURCES:
                context = replace(self._context, encode_sample=partial(encode_documents, encoder))
                try:
                    first = preview_documents(group.sources, context, encoder.tokenizer, count)
                except InputError as error:
                    self.faults.append(str(error))
            previews.append(first)
        return previews

    def _judge_bad(self) -> None:
        """Add a fault if bad records exceed the budget, otherwise a warning."""
        groups = self.groups
        max_bad = self._recipe.max_bad
        records = sum(group.scale_count(group.records) for group in groups)
        bad_seen = sum(group.bad for group in groups)
        bad = sum(group.bad * group.scale for group in groups)
        for file in self._unusable:
            bad_seen -= file.bad
            bad -= file.bad * self._group_of[file.source.name].scale
        allowed = count_allowed_bad(max_bad, records)
        if self._unusable:
            try:
                self._warnings += leave_out_read(
                    self._listing, self._unusable, self._recipe, allowed - round(bad)
                ).warnings
            except DamagedFileError:
                self.faults += [file.reason for file in self._unusable]
        if not bad_seen:
            return
        # For a sample, use a lower bound two standard deviations below the count, so that noise causes no fault.
        least = bad if self.sample.complete else bad * max(0.0, 1 - 2 / math.sqrt(bad_seen))
        fact = f"{round(bad):,} of {records:,} records are bad"
        if not self.sample.complete:
            fact = f"{bad_seen:,} of {sum(group.records for group in groups):,} records in the sample are bad"
            fact += f", an estimated {round(bad):,} in total"
        if least > allowed:
            reasons = describe_bad_records(bad, records, self._reasons)
            self.faults.append(f"{fact}, more than --max-bad {max_bad} allows: {reasons}.")
        else:
            more = "" if self.sample.complete else " (--full counts them)"
            self._warnings.append(f"{fact}{more}: prepare writes them to quarantine.jsonl.")

    def _judge_input(self) -> None:
        """Add faults and warnings about the complete input."""
        groups = self.groups
        about = "" if self.sample.complete else "about "
        if not self.faults and not any(group.documents for group in groups):
            self.faults.append(self._explain_no_document())
        strict = self._recipe.chat.overlong == "error"
        for rule, count in _sum_counts(groups, [group.dropped for group in groups]).items():
            sentence = f"{about}{format_count(count, 'document')} {'is' if count == 1 else 'are'} left out: {rule}."
            (self.faults if strict and rule == "overlong" else self._warnings).append(sentence)
        for change, count in _sum_counts(groups, [group.altered for group in groups]).items():
            first = self._first_altered[change]
            self._warnings.append(f"{change}: {about}{format_count(count, 'record')}, first {first}.")
        if truncated := sum(group.scale_count(group.truncated) for group in groups):
            verb = "is" if truncated == 1 else "are"
            limit = f"{self._recipe.chat.max_tokens:,} tokens"
            self._warnings.append(f"{about}{format_count(truncated, 'conversation')} {verb} cut to {limit}.")
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
        whole = [group.sources[0].name for group in groups if not group.fault and _is_text(group)]
        if whole and self._recipe.chat.max_tokens is not None:
            self._warnings.append(f"{WHOLE_TEXTS} {format_list(whole, 1)}.")
        if len(schemas) > 1:
            listed = "; ".join(f"{schema} ({name})" for schema, name in list(schemas.items())[:MAX_LISTED])
            self._warnings.append(f"The sources hold {len(schemas)} different schemas: {listed}.")

    def _explain_no_document(self) -> str:
        if not self.sample.complete and not any(group.records for group in self.groups):
            return "The sample holds no complete record, because the first ones are too long: --full reads everything."
        if self._reasons:
            count, reason = max(self._reasons.values(), key=lambda count_and_reason: count_and_reason[0])
            return f"The input gives no document: {format_count(count, 'record')} cannot be used ({reason})."
        return "The input gives no document: name other inputs, or leave fewer out."


def _is_text(group: SourceGroup) -> bool:
    return group.record_parser is not None and group.record_parser.record_kind == "text"


def _spread_over_files(bad: Sequence[BadFacts]) -> tuple[BadFacts, ...]:
    """Return the first ones of as many files as are listed, in their order."""
    seen: Counter[str] = Counter()
    ranked = []
    for number, facts in enumerate(bad):
        ranked.append((seen[facts.file], number))
        seen[facts.file] += 1
    return tuple(bad[number] for number in sorted(number for _, number in sorted(ranked)[:MAX_LISTED]))


def _get_record_position(numbered: tuple[int, BadRecord]) -> tuple[int, int]:
    return numbered[0], numbered[1].record


def _make_document_keys(rows: NDArray[np.void]) -> NDArray[np.uint64]:
    """Return the keys of documents that duplicates share, uint64 [D, 2].

    Documents made from the same record, such as the sides of a pair, get different keys.
    """
    keys = make_duplicate_keys(rows["hash"], rows["side"] == BAD)
    indices = np.arange(len(rows))
    is_first = mark_first_of_records(rows, (-1, -1))
    keys[:, 0] += (indices - np.maximum.accumulate(np.where(is_first, indices, 0))).astype(np.uint64)
    return keys


def _describe_unclosed_json(source: Source) -> str:
    """Describe a plain JSON file that is cut short; empty if it is complete."""
    if source.kind != "json" or not source.is_plain or source.member or is_url(source.path):
        return ""
    with open_source(source) as file:
        begin = file.read(_EDGE_BYTES).lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
        file.seek(max(0, source.size - _EDGE_BYTES))
        end = file.read().rstrip()[-1:]
    if not begin or not end or begin + end in (b"[]", b"{}"):
        return ""
    return f"{source.name} ends inside its list: it is truncated; fetch or write it again, or leave it out."


def _sum_counts(groups: Sequence[SourceGroup], counts: Sequence[Counter[str]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for group, group_counts in zip(groups, counts, strict=True):
        total.update({name: group.scale_count(count) for name, count in group_counts.items()})
    return total


def _make_tokenizer_facts(recipe: Recipe, encoder: DocumentEncoder) -> TokenizerFacts:
    tokenizer = encoder.tokenizer
    engine = tokenizer.engine
    return TokenizerFacts(
        name=recipe.tokenizer,
        vocab_size=tokenizer.vocab_size,
        engine=f"{engine.name} {engine.version}",
        template=encoder.chat.renderer.name if encoder.chat else None,
        lossy=tokenizer.lossy,
        dtype=encoder.dtype.name,
    )


def _weight_lengths(groups: Sequence[SourceGroup]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return all token lengths, ascending int64 [N], and their weights, float64 [N].

    A weight is the estimated number of documents with this length in the complete input.
    """
    weights: Counter[int] = Counter()
    for group in groups:
        for length, count in group.lengths.items():
            weights[length] += count * group.scale  # type: ignore[assignment]  # a share of documents
    lengths = sorted(weights)
    return np.array(lengths, np.int64), np.array([weights[document_length] for document_length in lengths], np.float64)


def _distribute_unread_bytes(groups: Sequence[SourceGroup], sources: Sequence[Source], sample: InputSample) -> None:
    """Assign each group the files and bytes it represents, with unsampled sources."""

    def get_form(source: Source) -> tuple[str, str | None, bool]:
        return source.kind, source.compression, sample.is_small(source)

    def count_sources(counted: Iterable[Source]) -> tuple[Counter[object], Counter[object]]:
        files: Counter[object] = Counter()
        sizes: Counter[object] = Counter()
        for source in counted:
            files[get_form(source)] += 1
            sizes[get_form(source)] += source.size
        return files, sizes

    damaged = {source.name for source, _ in sample.damaged}
    all_files, all_bytes = count_sources(source for source in sources if source.name not in damaged)
    sampled_files, sampled_bytes = count_sources(source for group in groups for source in group.sources)
    for group in groups:
        forms = [(get_form(source), source.size) for source in group.sources]
        group.files = sum(all_files[form] / sampled_files[form] for form, _ in forms)
        group.bytes = sum(size * all_bytes[form] / sampled_bytes[form] for form, size in forms)
        if sample.complete:
            group.read_bytes = group.bytes


def check_raw(location: str, text_field: str | None, encoding: str | None) -> VerificationResult:
    """Read every record of raw input, as ``doctor --full`` does, without a tokenizer."""
    # What is left out is a note of the verdict.
    reading = ReadRecipe(text_field=text_field, encoding=encoding, allow_skipped=True)
    resolved_inputs = resolve_inputs(location, reading, None)
    recipe = Recipe(
        inputs=resolved_inputs.inputs,
        sources=resolved_inputs.sources,
        reading=resolved_inputs.reading,
        follow_links=resolved_inputs.follow_links,
    )
    verdict = VerificationResult(format_input_label(location) if is_url_or_stdin(location) else location, "file")
    with Spool() as spool:
        listing = list_inputs(recipe, spool)
        examination = Examination(recipe, listing, full=True)
        duplicates = examination.read()
    for number, note in enumerate((*resolved_inputs.notes, *listing.notes), 1):
        verdict.facts["note" if number == 1 else f"note {number}"] = note
    groups = examination.groups
    for group in groups:
        if group.record_parser and group.record_parser.detected:
            names = format_list([source.name for source in group.sources], 1)
            verdict.facts[f"detected in {names}"] = group.record_parser.detected
    records = sum(group.records for group in groups)
    documents = sum(group.documents for group in groups)
    empty = sum(group.empty for group in groups)
    bad = sum(group.bad for group in groups)
    verdict.facts["files"] = len(listing.sources)
    verdict.facts["records"] = f"{records:,} ({documents:,} documents, {empty:,} empty, {bad:,} bad)"
    if duplicates.repeated:
        repeated = format_count(duplicates.repeated, "document")
        verdict.facts["duplicates"] = f"{repeated} seen before: prepare leaves them out (--no-dedup keeps them)"
    listed = _spread_over_files(examination.bad)
    verdict.faults = [*examination.faults, *(facts.sentence for facts in listed)]
    if bad > len(listed):
        verdict.faults.append(f"{verdict.path}: and {bad - len(listed):,} more bad records.")
    if not documents:
        verdict.faults.append(f"{verdict.path}: holds no document.")
    verdict.sample = examination.beginning
    verdict.used = (
        f"batchloom prepare {verdict.path} --out STORE reads {format_count(documents, 'document')} of it"
        if documents
        else "nothing"
    )
    return verdict
