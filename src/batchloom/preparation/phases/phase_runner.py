"""From inputs that are listed and a tokenizer to shards: all phases of a job over all its units."""

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
from batchloom.preparation.documents import (
    ChatEncoder,
    EncodeContext,
    RecordParsers,
    SubsetRule,
    choose_dtype_name,
    choose_job_template,
    find_unused_columns,
)
from batchloom.preparation.phases.append import BaseGenerations, read_base_generations
from batchloom.preparation.phases.dedup_report import (
    DuplicatePairReader,
    PairList,
    load_or_find_pairs,
)
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
from batchloom.preparation.report import (
    JobCounters,
    Listener,
    Progress,
    ReportContent,
    build_content,
)
from batchloom.preparation.request import describe_input_locations
from batchloom.preparation.settings import Recipe, build_step_indexes, compute_recipe_fingerprint
from batchloom.preparation.units import (
    STREAM_BATCHES_FOLDER,
    WORK_VERSION,
    AdoptionContext,
    CrashTracker,
    Decision,
    ExcludedRecords,
    RecordExcludedError,
    SegmentKeysTask,
    StepFlow,
    TokenizedUnit,
    UnitDedupCounts,
    UnitFacts,
    UnitReport,
    UnitTask,
    WorkFolder,
    adopt_unit,
    compute_unit_identity,
    describe_missed_shares,
    make_cuts_tasks,
    plan_units,
    read_unit_facts,
    select_unit_cuts,
)
from batchloom.preparation.workers import (
    Executor,
    ExecutorRequest,
    PrestartedWorkers,
    RunSettings,
    choose_worker_count,
    collect_versions,
    count_cores,
    make_executor,
    prestart_workers,
    runs_inline,
)
from batchloom.sources import ReadRules, SourceListing, format_record_name
from batchloom.sources.files import PartStart
from batchloom.store import Manifest
from batchloom.store.format import SMALL_FILE_LIMIT
from batchloom.tokens import Tokenizer, get_engine_choice

T = TypeVar("T")
CutsBySource = Mapping[tuple[str, int], PartStart | None]
# Bytes of a manifest for an input file at least.
_MIN_ENTRY_BYTES = 240


@dataclass(frozen=True, slots=True)
class PhaseResults:
    """What came of all phases.

    Attributes:
        tokenizer: what encoded.
        dtype: name of the dtype on disk.
        units: the units in order, with what came of each.
        kept: what is left of each unit.
        shards: the shards of each unit, by subset.
        decision: what was decided over all units.
        resumed: units that an earlier run had tokenized.
        workers: how many units were done at the same time.
        crew: what did them.
        content: what the report tells of it.
        seconds: of each phase.
    """

    tokenizer: Tokenizer
    dtype: str
    units: Sequence[TokenizedUnit]
    kept: Sequence[UnitDedupCounts]
    shards: Sequence[UnitShardEntries]
    decision: Decision
    resumed: int = 0
    workers: int = 1
    crew: str = "in-process"
    content: ReportContent = field(default_factory=ReportContent)
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunContext:
    """How a job is run, and who hears of it.

    Attributes:
        settings: how it is run.
        content: the hash of the content of sources by path, where inputs are told apart by it.
        base: the newest generation of the store to append to; None for a store that is made.
        listener: is told of progress.
        note: is given sentences for the user.
    """

    settings: RunSettings
    content: Mapping[str, str]
    base: Manifest | None
    listener: Listener
    note: Callable[[str], None]


def _check_input_count(files: int) -> None:
    """Refuse inputs whose manifest could not be read, before the work and not at its end."""
    if files * _MIN_ENTRY_BYTES > SMALL_FILE_LIMIT:
        raise InputError(
            f"{files:,} input files make a manifest of more than {SMALL_FILE_LIMIT:,} bytes, which is not read. Write "
            "them as records of JSON Lines files, or make several stores."
        )


@final
class PhaseRunner:
    """The phases of one job.

    Args:
        work: the job's folder.
        recipe: what to do.
        listing: the inputs.
        readings: how their records become documents.
        run: how the job is run, and who hears of it.
    """

    def __init__(
        self,
        work: WorkFolder,
        recipe: Recipe,
        listing: SourceListing,
        readings: RecordParsers,
        run: RunContext,
    ) -> None:
        self._work, self._recipe, self._listing = work, recipe, listing
        self._readings, self._settings, self._content = readings, run.settings, run.content
        self._base, self._listener, self._note = run.base, run.listener, run.note
        _check_input_count(len(listing.sources) + (len(run.base.sources) if run.base else 0))
        self._units = plan_units(listing.sources, readings.rules, run.settings.unit_bytes)
        self._seconds: dict[str, float] = {}
        self._pieces: list[Path] = []
        self._excluded: list[ExcludedRecords] = [()] * len(self._units)
        self._before, self._again = "", False
        self._ready: PrestartedWorkers | None = None
        # Found once: what it depends on is the memory that is free, which workers that begin take.
        self._at_once = choose_worker_count(self._settings.execution, len(self._units))
        # Two runs never use the same: what one left behind is in nobody's way.
        self._attempt = f"{time.time_ns():x}"

    @property
    def units(self) -> int:
        """How many units there are."""
        return len(self._units)

    def workers(self) -> PrestartedWorkers:
        """Have workers begin, while the tokenizer is still found or learned; end those that are not used."""
        execution = self._settings.execution
        if isinstance(execution.workers, int) and execution.workers > self.units:
            self._note(
                f"The input makes {format_count(self.units, 'unit')} of work, so no more than {self.units:,} of "
                f"{execution.workers:,} workers have something to do."
            )
        if execution.engine == "ray" and execution.address is None:
            self._note("Ray is started on this machine, which takes some seconds.")
        self._ready = prestart_workers(execution, self._at_once)
        return self._ready

    def make(self, tokenizer: Tokenizer) -> PhaseResults:
        """Do what is left to do, up to the last shard."""
        recipe = self._recipe
        dtype = choose_dtype_name(recipe, tokenizer)
        chat = choose_job_template(
            recipe, self._listing.sources, self._readings, tokenizer, self._note
        )
        unused = find_unused_columns(map(self._readings.of, self._listing.sources), chat)
        if unused:
            self._note(f"Unused columns: {', '.join(unused)}")
        while True:
            try:
                return self._make(tokenizer, dtype, chat)
            except RecordExcludedError as error:
                self._again = True
                self._work.exclude(self._names(tokenizer)[error.unit], error.excluded)

    def _make(self, tokenizer: Tokenizer, dtype: str, chat: ChatEncoder | None) -> PhaseResults:
        """Do what is left to do, with records that are known to be kept aside."""
        recipe = self._recipe
        folders = self._folders(tokenizer)
        other = self._work.follow(fingerprint([folder.name for folder in folders]))
        if other and not self._again:
            self._note(
                "Packages that decide documents are of other versions than when this job was stopped: all units are "
                "done again."
            )
        self._adopt(folders)
        tally = JobCounters(self._listener, recipe.max_bad, self._listing.bytes)
        losses = CrashTracker(self._units, self._note, together=bool(self._pieces))
        rules = self._readings.rules
        found = (read_unit_facts(folder) for folder in folders)
        tokenizing = TokenizePhase(self._units, found, rules, tally, losses, self._note)
        resumed = sum(one is not None for one in tokenizing.facts)
        if resumed:
            self._note(
                f"Going on: {resumed:,} of {self.units:,} units were finished by an earlier run."
            )
        workers = self._at_once
        hand = WorkerSetup(
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
        task = hand.task_of(tokenizer, self._readings, chat)
        here = make_task_function(lambda: task)
        execution = self._settings.execution
        crewed = ExecutorRequest(execution, self._work.path, self._ready)
        with make_executor(crewed, hand, lambda: here, workers, tokenizing.hear) as crew:
            orders = self._orders(crew, tokenizing, folders)
            facts = self._timed("tokenize", lambda: run_tokenize_phase(tokenizing, crew, orders))
            tally.first = tokenizing.first_bad()
            tally.verdict()
            if not tally.documents:
                self._work.clear()
                raise InputMissingError(_describe_no_documents(tally, facts))
            units = [TokenizedUnit(*one) for one in zip(self._units, folders, facts, strict=True)]
            told = tokenizing.reports.report()
            made = self._resolve_and_write(crew, units, task, dtype, told)
        name = "in-process" if runs_inline(execution, workers) else execution.engine
        return replace(made, resumed=resumed, workers=workers, crew=name, seconds=self._seconds)

    def _resolve_and_write(
        self,
        crew: Executor,
        units: list[TokenizedUnit],
        task: EncodeContext,
        dtype: str,
        reports: UnitReport,
    ) -> PhaseResults:
        """What follows when every unit is tokenized; ``dtype`` is the name of the task's."""
        recipe = self._recipe
        older = read_base_generations(self._work, self._base, recipe.dedup)
        if older.without_signatures:
            self._note(
                f"{self._work.out} keeps signatures of this kind for "
                f"{len(older.bands) - older.without_signatures:,} of its "
                f"{len(older.bands):,} shards (prepare with --dedup near keeps them): near duplicates of documents in "
                "the others stay."
            )
        sharding = ShardingSettings(
            membership=task.membership,
            most=recipe.tokens_per_shard,
            shards=older.shards,
            filled=older.filled,
            settled=older.overrides,
            tokens=older.tokens,
            balance=recipe.balance_subsets,
        )
        phases = LaterPhases(
            self._work, units, sharding, older, recipe.dedup, task.dtype, self._attempt
        )
        found = self._timed("find duplicates", lambda: phases.duplicates(crew))
        kept = self._timed("settle", lambda: phases.settle(crew, found))
        decision = phases.decide(kept)
        documents = older.documents + sum(one.documents for one in kept)
        texts = all(self._readings.of(one).way == "text" for one in self._listing.sources)
        for text in (
            *task.membership.empty_notes(decision.shards, older.filled),
            *describe_missed_shares(
                task.membership.shares,
                decision.tokens,
                documents,
                balance=recipe.balance_subsets,
                texts=texts,
                splits=any(one.kind in ("text", "code") for one in self._listing.sources),
            ),
            *_describe_long_documents(units, kept, self._readings.rules, recipe.tokens_per_shard),
        ):
            self._note(text)
        pairs, rest = self._timed("find duplicates", lambda: self._pairs(found, units, older, task))
        tell = self._make_write_listener(kept, task.dtype.itemsize)
        shards: list[UnitShardEntries] = []
        if not self._settings.dry_run:
            shards = self._timed("write shards", lambda: phases.write(crew, kept, decision, tell))
        content = build_content(
            reports,
            after=_compute_flows(units, kept, task.dtype.itemsize),
            duplicates=pairs,
            duplicates_rest=rest,
        )
        return PhaseResults(task.tokenizer, dtype, units, kept, shards, decision, content=content)

    def _pairs(
        self,
        found: DuplicateFiles,
        units: list[TokenizedUnit],
        older: BaseGenerations,
        task: EncodeContext,
    ) -> PairList:
        """Duplicates by pair of sources, with examples."""
        files, inputs = (
            (*found.exact, *found.near),
            describe_input_locations(self._recipe.inputs)["inputs"],
        )
        reader = DuplicatePairReader(
            *(units, len(older.files), inputs), task.membership, task.dtype, task.tokenizer
        )
        if not files:
            return reader.pairs(files)
        decided_by = [[one.folder.name for one in units], inputs, older.generation]
        place = self._work.duplicates / "pairs" / fingerprint(decided_by)
        return load_or_find_pairs(place, self._attempt, lambda: reader.pairs(files))

    def _folders(self, tokenizer: Tokenizer) -> list[Path]:
        """Where the temporary files of each unit are."""
        names = self._names(tokenizer)
        if self._recipe.dedup.pieces:
            # Which lines stood before is a matter of all that comes before.
            excluded = self._work.excluded()
            self._excluded = [excluded.get(name, ()) for name in names]
            pairs = zip(names, self._excluded, strict=True)
            read = [fingerprint([name, aside]) if aside else name for name, aside in pairs]
            self._pieces, self._before = [self._work.pieces(one) for one in read], fingerprint(read)
            names = self._names(tokenizer, self._before)
        return [self._work.unit(name) for name in names]

    def _names(self, tokenizer: Tokenizer, before: str = "") -> list[str]:
        """The identities of all units; ``before`` names what decides which of their lines stay."""
        decided_by = collect_unit_settings(self._recipe, tokenizer, self._settings.constants)
        if before:
            decided_by["before"] = before
        return [compute_unit_identity(unit, decided_by, self._content) for unit in self._units]

    def _adopt(self, folders: list[Path]) -> None:
        """Make units of what a stream has kept of them."""
        stretches = self._work.path / STREAM_BATCHES_FOLDER
        if not stretches.is_dir() or self._recipe.dedup.mode != "none":
            return
        membership = SubsetRule(self._recipe.val_fraction, self._recipe.test_fraction)
        how = AdoptionContext(self._readings, membership)
        adopted = 0
        for unit, folder in zip(self._units, folders, strict=True):
            if not folder.exists():
                kept = stretches / folder.name
                adopted += adopt_unit(unit, kept, folder, self._attempt, how)
        if adopted:
            self._note(
                f"Going on: {adopted:,} of {self.units:,} units were read by a stream already."
            )

    def _orders(
        self, crew: Executor, tokenizing: TokenizePhase, folders: list[Path]
    ) -> dict[int, UnitTask]:
        """Phase A of the units that are not done; what they have to know of each other is found before."""
        todo = [number for number, facts in enumerate(tokenizing.facts) if facts is None]
        cuts = self._cuts(crew, todo)
        repeated: tuple[Path, ...] = ()
        if todo and self._pieces:
            repeated = self._timed(
                "find repeated pieces",
                lambda: self._find_repeated_segments(crew, cuts, tokenizing.losses),
            )
        return {
            number: UnitTask(
                *(self._units[number], folders[number], self._attempt),
                excluded=self._excluded[number],
                repeated=repeated,
                cuts=select_unit_cuts(self._units[number], cuts),
            )
            for number in todo
        }

    def _cuts(self, crew: Executor, todo: list[int]) -> CutsBySource:
        """Where the parts of large CSV files and JSON lists meet, each found by one pass."""
        units = self._units if self._pieces else [self._units[number] for number in todo]
        orders = make_cuts_tasks(units if todo else [], self._readings.rules)
        if not orders:
            return {}
        found = self._timed("find cuts", lambda: run_tasks(crew, dict(enumerate(orders))))
        return {
            (order.source.path, nominal): begin
            for number, order in enumerate(orders)
            for nominal, begin in zip(order.nominal, found[number], strict=True)
        }

    def _find_repeated_segments(
        self, crew: Executor, cuts: CutsBySource, losses: CrashTracker
    ) -> tuple[Path, ...]:
        """The files that name lines (or paragraphs) that stood before."""
        orders = {
            unit.number: SegmentKeysTask(
                *(unit, place, self._attempt), excluded=aside, cuts=select_unit_cuts(unit, cuts)
            )
            for unit, place, aside in zip(self._units, self._pieces, self._excluded, strict=True)
            if not place.exists()
        }
        run_tasks(crew, orders, losses=losses)
        folder = self._work.duplicates / self._before
        return find_all_duplicates(crew, tuple(self._pieces), folder, self._attempt)

    def _make_write_listener(self, kept: list[UnitDedupCounts], size: int) -> OnUnitWritten:
        """Tells the listener of units whose shards are there."""
        total = sum(unit.tokens for unit in kept) * size
        done = [0, 0, 0]

        def tell(number: int, *, found: bool) -> None:
            unit = kept[number]
            done[0] += unit.tokens * size
            done[1] += unit.tokens * size if found else 0
            done[2] += unit.documents
            self._listener(Progress("write", done[0], total, done[1], done[2], done[0] // size, 0))

        return tell

    def _timed(self, phase: str, work: Callable[[], T]) -> T:
        """What the work gives; its seconds are added to those of its phase, also where it fails."""
        began = time.perf_counter()
        try:
            return work()
        finally:
            spent = time.perf_counter() - began
            self._seconds[phase] = self._seconds.get(phase, 0.0) + spent


def collect_unit_settings(
    recipe: Recipe, tokenizer: Tokenizer, constants: Sequence[int]
) -> dict[str, Any]:
    """All but the inputs that decides what comes of a unit, as plain values."""
    return {
        "version": WORK_VERSION,
        "recipe": compute_recipe_fingerprint(recipe),
        "constants": list(constants),
        "tokenizer": [
            tokenizer.fingerprint,
            tokenizer.engine.name,
            tokenizer.engine.version,
            tokenizer.engine.note,
        ],
        "versions": collect_versions(recipe.reading.clean),
    }


def _compute_flows(
    units: list[TokenizedUnit], kept: list[UnitDedupCounts], size: int
) -> list[StepFlow]:
    """What came to the steps behind those of the units, and left them."""
    came = sum(one.facts.documents for one in units)
    tokens = sum(one.facts.tokens for one in units)
    documents, left = sum(one.documents for one in kept), sum(one.tokens for one in kept)
    dedup = StepFlow(
        step="dedup",
        documents_in=came,
        documents_out=documents,
        tokens_in=tokens,
        tokens_out=left,
    )
    write = StepFlow(
        step="write",
        documents_in=documents,
        documents_out=documents,
        bytes_out=left * size,
        tokens_in=left,
        tokens_out=left,
    )
    return [dedup, write]


def _describe_long_documents(
    units: Sequence[TokenizedUnit], kept: Sequence[UnitDedupCounts], rules: ReadRules, most: int
) -> list[str]:
    """Describe documents longer than a shard may be, with the place of the longest."""
    count = sum(one.long for one in kept)
    if not count:
        return []
    number = max(range(len(kept)), key=lambda number: kept[number].longest[0])
    length, part, record, offset = kept[number].longest
    found, before = units[number].unit.parts[part], 0
    source, bound = found.source, (units[number].unit.number, found.start)
    for one in units[: number + 1]:
        for other, facts in zip(one.unit.parts, one.facts.parts, strict=True):
            if other.source.path == source.path and (one.unit.number, other.start) < bound:
                before += facts.records
    place = format_record_name(source, rules, before, BadRecord(record, offset, None, "", ""))
    some = "1 document is" if count == 1 else f"{count:,} documents are"
    note = (
        f"{some} longer than a shard should be ({most:,} tokens, --tokens-per-shard), so shards are larger. The "
        f"longest has {length:,} tokens: {place}. Raise --tokens-per-shard, or cut texts into smaller documents "
        "(--split-on paragraph)."
    )
    return [note]


def _describe_no_documents(tally: JobCounters, facts: list[UnitFacts]) -> str:
    left_out: Counter[str] = Counter()
    for fact in facts:
        for part in fact.parts:
            left_out.update(part.dropped)
    empty = tally.records - tally.quarantined - left_out.total()
    found = [
        (tally.quarantined, "bad"),
        *((n, rule) for rule, n in left_out.items()),
        (empty, "empty"),
    ]
    said = ", ".join(f"{n:,} {what}" for n, what in found if n > 0) or "the input has none"
    said = f"No document came of {format_count(tally.records, 'record')}: {said}."
    if tally.first:
        return f"{said} The first bad one: {tally.first}. Mend the input, or name another."
    if left_out:
        flags = any(rule.startswith("nothing to train") for rule in left_out)
        more = ', "loss" or "train" flags of messages' if flags else ""
        return f"{said} Leave fewer out (--clean, --max-tokens, --overlong, --train-on{more}), or name other inputs."
    return f"{said} Name other inputs."
