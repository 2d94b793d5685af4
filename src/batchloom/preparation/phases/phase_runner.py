"""All phases of a job over all its units, from listed inputs to shards."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, final

from batchloom.core.document import BadRecord
from batchloom.core.errors import InputError, InputMissingError
from batchloom.core.fingerprint import fingerprint
from batchloom.core.wording import format_count
from batchloom.preparation.documents.chat_encoding import ChatEncoder
from batchloom.preparation.documents.document_encoder import EncodeContext
from batchloom.preparation.documents.record_parsers import RecordParsers
from batchloom.preparation.documents.subsets import SubsetRule, describe_missed_shares
from batchloom.preparation.documents.tokenizer_choice import choose_dtype_name, choose_job_template, find_unused_columns
from batchloom.preparation.phases.append import BaseGenerations, read_base_generations
from batchloom.preparation.phases.dedup_report import DuplicatePairReader, PairList, load_or_find_pairs
from batchloom.preparation.phases.duplicate_resolution import ShardingSettings
from batchloom.preparation.phases.later_phases import (
    DuplicateFiles,
    LaterPhases,
    OnUnitWritten,
    UnitShardEntries,
    find_all_duplicates,
    run_tasks,
)
from batchloom.preparation.phases.tokenize_phase import TokenizePhase, run_tokenize_phase
from batchloom.preparation.phases.worker_setup import WorkerSetup, make_task_function
from batchloom.preparation.report.progress import JobCounters, Listener, Progress
from batchloom.preparation.report.report import ReportContent, build_content
from batchloom.preparation.request.recipe_of_store import describe_input_locations
from batchloom.preparation.settings.evaluation_sets import build_step_indexes
from batchloom.preparation.settings.recipe import Recipe, compute_recipe_fingerprint
from batchloom.preparation.units.crash_isolation import CrashTracker, RecordExcludedError
from batchloom.preparation.units.part_cuts import make_cuts_tasks, select_unit_cuts
from batchloom.preparation.units.stream_units import STREAM_BATCHES_FOLDER, AdoptionContext, adopt_unit
from batchloom.preparation.units.tasks import SegmentKeysTask, UnitTask
from batchloom.preparation.units.unit_report import StepFlow, UnitReport
from batchloom.preparation.units.units import compute_unit_identity, plan_units
from batchloom.preparation.units.work_folder import (
    WORK_VERSION,
    Decision,
    ExcludedRecords,
    TokenizedUnit,
    UnitDedupCounts,
    UnitFacts,
    WorkFolder,
    read_unit_facts,
)
from batchloom.preparation.workers.executors import (
    ExecutorRequest,
    RunSettings,
    choose_worker_count,
    make_executor,
    prestart_workers,
    runs_inline,
)
from batchloom.preparation.workers.machine_limits import count_cores
from batchloom.preparation.workers.process_pool import PrestartedWorkers
from batchloom.preparation.workers.protocols import Executor
from batchloom.preparation.workers.versions import collect_versions
from batchloom.sources import ReadRules, SourceListing, format_record_name
from batchloom.sources.files import PartStart
from batchloom.store import Manifest
from batchloom.store.format import SMALL_FILE_LIMIT
from batchloom.tokens import Tokenizer, get_engine_choice

T = TypeVar("T")
CutsBySource = Mapping[tuple[str, int], PartStart | None]
# Minimum size of an input file's manifest entry, in bytes.
_MIN_ENTRY_BYTES = 240


@dataclass(frozen=True, slots=True)
class PhaseResults:
    """Results of all phases.

    Attributes:
        tokenizer: tokenizer of the job.
        dtype: name of the token dtype on disk.
        units: tokenized units in order.
        dedup_counts: counts of remaining documents of each unit.
        shards: shards of each unit, by subset.
        decision: subset overrides and shard numbers.
        resumed: number of units that an earlier run had tokenized.
        workers: number of units processed at the same time.
        executor_name: name of the executor.
        content: content of the report.
        seconds: duration of each phase.
    """

    tokenizer: Tokenizer
    dtype: str
    units: Sequence[TokenizedUnit]
    dedup_counts: Sequence[UnitDedupCounts]
    shards: Sequence[UnitShardEntries]
    decision: Decision
    resumed: int = 0
    workers: int = 1
    executor_name: str = "in-process"
    content: ReportContent = field(default_factory=ReportContent)
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunContext:
    """Run settings of a job, and its callbacks.

    Attributes:
        settings: settings of the run.
        content: content hash of each source by path, for inputs that are identified by content.
        base: newest generation of the store to append to; None for a new store.
        listener: receives progress.
        note: receives notes for the user.
    """

    settings: RunSettings
    content: Mapping[str, str]
    base: Manifest | None
    listener: Listener
    note: Callable[[str], None]


def _check_input_count(files: int) -> None:
    """Raise, before any work, if the manifest would be too large to read."""
    if files * _MIN_ENTRY_BYTES > SMALL_FILE_LIMIT:
        raise InputError(
            f"{files:,} input files make a manifest of more than {SMALL_FILE_LIMIT:,} bytes, which cannot be read. "
            "Write the inputs as records of JSON Lines files, or make several stores."
        )


@final
class PhaseRunner:
    """Runner of all phases of one job.

    Args:
        work: the job's folder.
        recipe: the job's recipe.
        listing: the inputs.
        record_parsers: record parser of each source.
        run: settings and callbacks of the run.
    """

    def __init__(
        self, work: WorkFolder, recipe: Recipe, listing: SourceListing, record_parsers: RecordParsers, run: RunContext
    ) -> None:
        self._work, self._recipe, self._listing = work, recipe, listing
        self._record_parsers, self._settings, self._content = (record_parsers, run.settings, run.content)
        self._base, self._listener, self._note = run.base, run.listener, run.note
        _check_input_count(len(listing.sources) + (len(run.base.sources) if run.base else 0))
        self._units = plan_units(listing.sources, record_parsers.rules, run.settings.unit_bytes)
        self._seconds: dict[str, float] = {}
        self._segment_key_files: list[Path] = []
        self._excluded: list[ExcludedRecords] = [()] * len(self._units)
        self._segment_fingerprint, self._has_new_exclusions = "", False
        self._prestarted_workers: PrestartedWorkers | None = None
        # Computed once: it depends on free memory, and workers that have started already use some.
        self._worker_count = choose_worker_count(self._settings.execution, len(self._units))
        # Unique per run, so that leftovers of an earlier run never collide.
        self._attempt = f"{time.time_ns():x}"

    @property
    def units(self) -> int:
        """Number of units."""
        return len(self._units)

    def start_workers(self) -> PrestartedWorkers:
        """Start workers while the tokenizer is still loaded or trained.

        Returns:
            A context manager that ends the workers not used.
        """
        execution = self._settings.execution
        if isinstance(execution.workers, int) and execution.workers > self.units:
            self._note(
                f"The input makes {format_count(self.units, 'unit')} of work, so at most {self.units:,} of "
                f"{execution.workers:,} workers are used."
            )
        if execution.engine == "ray" and execution.address is None:
            self._note("Starting Ray on this machine, which takes some seconds.")
        self._prestarted_workers = prestart_workers(execution, self._worker_count)
        return self._prestarted_workers

    def make(self, tokenizer: Tokenizer) -> PhaseResults:
        """Run all pending work up to the last shard."""
        recipe = self._recipe
        dtype = choose_dtype_name(recipe, tokenizer)
        chat = choose_job_template(recipe, self._listing.sources, self._record_parsers, tokenizer, self._note)
        unused = find_unused_columns(map(self._record_parsers.get_parser, self._listing.sources), chat)
        if unused:
            self._note(f"Unused columns: {', '.join(unused)}")
        while True:
            try:
                return self._make(tokenizer, dtype, chat)
            except RecordExcludedError as error:
                self._has_new_exclusions = True
                self._work.exclude(self._list_unit_names(tokenizer)[error.unit], error.excluded)

    def _make(self, tokenizer: Tokenizer, dtype: str, chat: ChatEncoder | None) -> PhaseResults:
        """Run all pending work with the records excluded so far."""
        recipe = self._recipe
        folders = self._list_unit_folders(tokenizer)
        units_changed = self._work.follow(fingerprint([folder.name for folder in folders]))
        if units_changed and not self._has_new_exclusions:
            self._note(
                "Versions of packages that affect the documents changed since this job was stopped: all units are "
                "prepared again."
            )
        self._adopt(folders)
        counters = JobCounters(self._listener, recipe.max_bad, self._listing.bytes)
        crash_tracker = CrashTracker(self._units, self._note, together=bool(self._segment_key_files))
        rules = self._record_parsers.rules
        resumed_facts = (read_unit_facts(folder) for folder in folders)
        tokenize_phase = TokenizePhase(self._units, resumed_facts, rules, counters, crash_tracker, self._note)
        resumed = sum(unit_facts is not None for unit_facts in tokenize_phase.facts)
        if resumed:
            self._note(f"Resuming: {resumed:,} of {self.units:,} units were finished by an earlier run.")
        workers = self._worker_count
        worker_setup = WorkerSetup(
            recipe,
            self._settings.limits,
            self._work.tokenizer_path,
            get_engine_choice(tokenizer),
            dtype,
            chat is not None,
            build_step_indexes(recipe.reading.clean, self._work.path, self._note),
            overlap=count_cores() >= 2 * workers,
            versions=collect_versions(recipe.reading.clean),
        )
        context = worker_setup.make_context(tokenizer, self._record_parsers, chat)
        task_function = make_task_function(lambda: context)
        execution = self._settings.execution
        executor_request = ExecutorRequest(execution, self._work.path, self._prestarted_workers)
        with make_executor(
            executor_request, worker_setup, lambda: task_function, workers, tokenize_phase.handle_message
        ) as executor:
            tasks = self._make_unit_tasks(executor, tokenize_phase, folders)
            facts = self._run_timed("tokenize", lambda: run_tokenize_phase(tokenize_phase, executor, tasks))
            counters.first = tokenize_phase.first_bad()
            counters.check_bad_records()
            if not counters.documents:
                self._work.clear()
                raise InputMissingError(_describe_no_documents(counters, facts))
            units = [TokenizedUnit(*unit_fields) for unit_fields in zip(self._units, folders, facts, strict=True)]
            unit_report = tokenize_phase.reports.report()
            results = self._resolve_and_write(executor, units, context, dtype, unit_report)
        name = "in-process" if runs_inline(execution, workers) else execution.engine
        return replace(results, resumed=resumed, workers=workers, executor_name=name, seconds=self._seconds)

    def _resolve_and_write(
        self, executor: Executor, units: list[TokenizedUnit], context: EncodeContext, dtype: str, reports: UnitReport
    ) -> PhaseResults:
        """Run the phases after tokenization; ``dtype`` is the name of the token dtype."""
        recipe = self._recipe
        base_generations = read_base_generations(self._work, self._base, recipe.dedup)
        if base_generations.without_signatures:
            self._note(
                f"{self._work.out} holds signatures of this kind for "
                f"{len(base_generations.signatures) - base_generations.without_signatures:,} of its "
                f"{len(base_generations.signatures):,} shards (prepare with --dedup near writes them): near "
                "duplicates of documents in the other shards are not removed."
            )
        sharding = ShardingSettings(
            membership=context.membership,
            tokens_per_shard=recipe.tokens_per_shard,
            shards=base_generations.shards,
            nonempty_subsets=base_generations.nonempty_subsets,
            base_overrides=base_generations.overrides,
            tokens=base_generations.tokens,
            balance=recipe.balance_subsets,
        )
        phases = LaterPhases(self._work, units, sharding, base_generations, recipe.dedup, context.dtype, self._attempt)
        duplicate_files = self._run_timed("find duplicates", lambda: phases.find_duplicates(executor))
        dedup_counts = self._run_timed("settle", lambda: phases.resolve_duplicates(executor, duplicate_files))
        decision = phases.decide(dedup_counts)
        documents = base_generations.documents + sum(counts.documents for counts in dedup_counts)
        texts = all(self._record_parsers.get_parser(source).record_kind == "text" for source in self._listing.sources)
        for text in (
            *context.membership.empty_notes(decision.shards, base_generations.nonempty_subsets),
            *describe_missed_shares(
                context.membership.shares,
                decision.tokens,
                documents,
                balance=recipe.balance_subsets,
                texts=texts,
                splits=any(source.kind in ("text", "code") for source in self._listing.sources),
            ),
            *_describe_long_documents(units, dedup_counts, self._record_parsers.rules, recipe.tokens_per_shard),
        ):
            self._note(text)
        pairs, omitted_rows = self._run_timed(
            "find duplicates", lambda: self._find_pairs(duplicate_files, units, base_generations, context)
        )
        on_unit_written = self._make_write_listener(dedup_counts, context.dtype.itemsize)
        shards: list[UnitShardEntries] = []
        if not self._settings.dry_run:
            shards = self._run_timed(
                "write shards", lambda: phases.write(executor, dedup_counts, decision, on_unit_written)
            )
        content = build_content(
            reports,
            after=_compute_flows(units, dedup_counts, context.dtype.itemsize),
            duplicates=pairs,
            duplicates_rest=omitted_rows,
        )
        return PhaseResults(context.tokenizer, dtype, units, dedup_counts, shards, decision, content=content)

    def _find_pairs(
        self,
        duplicate_files: DuplicateFiles,
        units: list[TokenizedUnit],
        base_generations: BaseGenerations,
        context: EncodeContext,
    ) -> PairList:
        """Return duplicates by pair of sources, with examples."""
        files, inputs = (
            (*duplicate_files.exact, *duplicate_files.near),
            describe_input_locations(self._recipe.inputs)["inputs"],
        )
        reader = DuplicatePairReader(
            *(units, len(base_generations.files), inputs), context.membership, context.dtype, context.tokenizer
        )
        if not files:
            return reader.read_pairs(files)
        key_parts = [[tokenized_unit.folder.name for tokenized_unit in units], inputs, base_generations.generation]
        path = self._work.duplicates / "pairs" / fingerprint(key_parts)
        return load_or_find_pairs(path, self._attempt, lambda: reader.read_pairs(files))

    def _list_unit_folders(self, tokenizer: Tokenizer) -> list[Path]:
        """Return the folder of each unit's temporary files."""
        names = self._list_unit_names(tokenizer)
        if self._recipe.dedup.repeat_unit:
            # Removed lines depend on all units before, so every unit's name covers all exclusions.
            excluded = self._work.read_excluded()
            self._excluded = [excluded.get(name, ()) for name in names]
            pairs = zip(names, self._excluded, strict=True)
            identities = [
                fingerprint([name, unit_exclusions]) if unit_exclusions else name for name, unit_exclusions in pairs
            ]
            self._segment_key_files, self._segment_fingerprint = (
                [self._work.segment_keys_path(identity) for identity in identities],
                fingerprint(identities),
            )
            names = self._list_unit_names(tokenizer, self._segment_fingerprint)
        return [self._work.unit(name) for name in names]

    def _list_unit_names(self, tokenizer: Tokenizer, segment_fingerprint: str = "") -> list[str]:
        """Return the identities of all units.

        ``segment_fingerprint`` identifies the texts that decide which repeated lines are removed.
        """
        settings = collect_unit_settings(self._recipe, tokenizer, self._settings.constants)
        if segment_fingerprint:
            settings["before"] = segment_fingerprint
        return [compute_unit_identity(unit, settings, self._content) for unit in self._units]

    def _adopt(self, folders: list[Path]) -> None:
        """Make units from batches that a stream has already cached."""
        stream_folder = self._work.path / STREAM_BATCHES_FOLDER
        if not stream_folder.is_dir() or self._recipe.dedup.mode != "none":
            return
        membership = SubsetRule(self._recipe.val_fraction, self._recipe.test_fraction)
        context = AdoptionContext(self._record_parsers, membership)
        adopted_count = 0
        for unit, folder in zip(self._units, folders, strict=True):
            if not folder.exists():
                batches_folder = stream_folder / folder.name
                adopted_count += adopt_unit(unit, batches_folder, folder, self._attempt, context)
        if adopted_count:
            self._note(f"Resuming: {adopted_count:,} of {self.units:,} units were already read by a stream.")

    def _make_unit_tasks(
        self, executor: Executor, tokenize_phase: TokenizePhase, folders: list[Path]
    ) -> dict[int, UnitTask]:
        """Make the tokenization tasks of pending units, after finding cuts and repeats."""
        pending_units = [number for number, facts in enumerate(tokenize_phase.facts) if facts is None]
        cuts_by_offset = self._find_cuts(executor, pending_units)
        repeated_files: tuple[Path, ...] = ()
        if pending_units and self._segment_key_files:
            repeated_files = self._run_timed(
                "find repeated pieces",
                lambda: self._find_repeated_segments(executor, cuts_by_offset, tokenize_phase.crash_tracker),
            )
        return {
            number: UnitTask(
                *(self._units[number], folders[number], self._attempt),
                excluded=self._excluded[number],
                repeated=repeated_files,
                known_cuts=select_unit_cuts(self._units[number], cuts_by_offset),
            )
            for number in pending_units
        }

    def _find_cuts(self, executor: Executor, pending_units: list[int]) -> CutsBySource:
        """Find the part boundaries of large CSV files and JSON lists, one pass per file."""
        units = self._units if self._segment_key_files else [self._units[number] for number in pending_units]
        tasks = make_cuts_tasks(units if pending_units else [], self._record_parsers.rules)
        if not tasks:
            return {}
        cuts_by_task = self._run_timed("find cuts", lambda: run_tasks(executor, dict(enumerate(tasks))))
        return {
            (task.source.path, nominal): begin
            for number, task in enumerate(tasks)
            for nominal, begin in zip(task.nominal, cuts_by_task[number], strict=True)
        }

    def _find_repeated_segments(
        self, executor: Executor, cuts_by_offset: CutsBySource, crash_tracker: CrashTracker
    ) -> tuple[Path, ...]:
        """Return the files that list repeated lines or paragraphs."""
        tasks = {
            unit.number: SegmentKeysTask(
                *(unit, path, self._attempt),
                excluded=unit_exclusions,
                known_cuts=select_unit_cuts(unit, cuts_by_offset),
            )
            for unit, path, unit_exclusions in zip(self._units, self._segment_key_files, self._excluded, strict=True)
            if not path.exists()
        }
        run_tasks(executor, tasks, crash_tracker=crash_tracker)
        folder = self._work.duplicates / self._segment_fingerprint
        return find_all_duplicates(executor, tuple(self._segment_key_files), folder, self._attempt)

    def _make_write_listener(self, dedup_counts: list[UnitDedupCounts], size: int) -> OnUnitWritten:
        """Make a callback that reports written units to the listener."""
        total = sum(unit.tokens for unit in dedup_counts) * size
        done_counts = [0, 0, 0]

        def on_unit_written(number: int, *, already_written: bool) -> None:
            unit = dedup_counts[number]
            done_counts[0] += unit.tokens * size
            done_counts[1] += unit.tokens * size if already_written else 0
            done_counts[2] += unit.documents
            self._listener(
                Progress("write", done_counts[0], total, done_counts[1], done_counts[2], done_counts[0] // size, 0)
            )

        return on_unit_written

    def _run_timed(self, phase: str, work: Callable[[], T]) -> T:
        """Return the result of ``work`` and add its seconds to ``phase``, also on failure."""
        began = time.perf_counter()
        try:
            return work()
        finally:
            elapsed = time.perf_counter() - began
            self._seconds[phase] = self._seconds.get(phase, 0.0) + elapsed


def collect_unit_settings(recipe: Recipe, tokenizer: Tokenizer, constants: Sequence[int]) -> dict[str, Any]:
    """Return everything but the inputs that decides a unit's files, as plain values."""
    return {
        "version": WORK_VERSION,
        "recipe": compute_recipe_fingerprint(recipe),
        "constants": list(constants),
        "tokenizer": [tokenizer.fingerprint, tokenizer.engine.name, tokenizer.engine.version, tokenizer.engine.note],
        "versions": collect_versions(recipe.reading.clean),
    }


def _compute_flows(units: list[TokenizedUnit], dedup_counts: list[UnitDedupCounts], size: int) -> list[StepFlow]:
    """Return the flows of the steps after tokenization: dedup and write."""
    documents_in = sum(tokenized_unit.facts.documents for tokenized_unit in units)
    tokens = sum(tokenized_unit.facts.tokens for tokenized_unit in units)
    documents, remaining_tokens = (
        sum(counts.documents for counts in dedup_counts),
        sum(counts.tokens for counts in dedup_counts),
    )
    dedup = StepFlow(
        step="dedup", documents_in=documents_in, documents_out=documents, tokens_in=tokens, tokens_out=remaining_tokens
    )
    write = StepFlow(
        step="write",
        documents_in=documents,
        documents_out=documents,
        bytes_out=remaining_tokens * size,
        tokens_in=remaining_tokens,
        tokens_out=remaining_tokens,
    )
    return [dedup, write]


def _describe_long_documents(
    units: Sequence[TokenizedUnit], dedup_counts: Sequence[UnitDedupCounts], rules: ReadRules, tokens_per_shard: int
) -> list[str]:
    """Describe documents longer than a shard, with the position of the longest."""
    count = sum(counts.long for counts in dedup_counts)
    if not count:
        return []
    number = max(range(len(dedup_counts)), key=lambda number: dedup_counts[number].longest[0])
    length, part, record, offset = dedup_counts[number].longest
    longest_part, records_before = units[number].unit.parts[part], 0
    source, bound = longest_part.source, (units[number].unit.number, longest_part.start)
    for tokenized_unit in units[: number + 1]:
        for other_part, facts in zip(tokenized_unit.unit.parts, tokenized_unit.facts.parts, strict=True):
            if other_part.source.path == source.path and (tokenized_unit.unit.number, other_part.start) < bound:
                records_before += facts.records
    record_name = format_record_name(source, rules, records_before, BadRecord(record, offset, None, "", ""))
    documents_phrase = "1 document is" if count == 1 else f"{count:,} documents are"
    note = (
        f"{documents_phrase} longer than a shard ({tokens_per_shard:,} tokens, --tokens-per-shard), so some shards "
        f"are larger. The longest has {length:,} tokens: {record_name}. Raise --tokens-per-shard, or cut texts "
        "into smaller documents (--split-on paragraph)."
    )
    return [note]


def _describe_no_documents(counters: JobCounters, facts: list[UnitFacts]) -> str:
    dropped_counts: Counter[str] = Counter()
    for fact in facts:
        for part in fact.parts:
            dropped_counts.update(part.dropped)
    empty = counters.records - counters.quarantined - dropped_counts.total()
    counts_by_reason = [
        (counters.quarantined, "bad"),
        *((n, rule) for rule, n in dropped_counts.items()),
        (empty, "empty"),
    ]
    message = ", ".join(f"{n:,} {reason}" for n, reason in counts_by_reason if n > 0) or "the input has no records"
    message = f"No documents were made from {format_count(counters.records, 'record')}: {message}."
    if counters.first:
        return f"{message} The first bad one: {counters.first}. Fix the input, or name another."
    if dropped_counts:
        flags = any(rule.startswith("nothing to train") for rule in dropped_counts)
        more = ', "loss" or "train" flags of messages' if flags else ""
        return f"{message} Relax the rules (--clean, --max-tokens, --overlong, --train-on{more}), or name other inputs."
    return f"{message} Name other inputs."
