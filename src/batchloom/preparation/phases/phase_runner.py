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
from batchloom.core.wording import counted
from batchloom.preparation.documents import (
    ChatEncoder,
    Membership,
    Readings,
    Task,
    dtype_name,
    job_template,
    unused_names,
)
from batchloom.preparation.phases.append import Older, older_of
from batchloom.preparation.phases.dedup_report import DuplicateReader, Pairs, pairs_once
from batchloom.preparation.phases.duplicate_resolution import Sharding
from batchloom.preparation.phases.later_phases import (
    Duplicates,
    Phases,
    Shards,
    Wrote,
    find_all,
    have_done,
)
from batchloom.preparation.phases.tokenize_phase import Tokenizing, tokenize_all
from batchloom.preparation.phases.worker_setup import Hand, doing
from batchloom.preparation.report import Content, Listener, Progress, Tally, content_of
from batchloom.preparation.request import inputs_lay
from batchloom.preparation.settings import Recipe, recipe_fingerprint, steps_with_index
from batchloom.preparation.units import (
    STRETCHES,
    WORK_VERSION,
    Adoption,
    Decision,
    Excluded,
    Flow,
    KeptAsideError,
    Losses,
    PiecesOrder,
    UnitFacts,
    UnitKept,
    UnitOrder,
    UnitReport,
    UnitWork,
    WorkFolder,
    adopt_unit,
    cuts_of,
    cuts_orders,
    plan_units,
    share_notes,
    unit_identity,
)
from batchloom.preparation.workers import (
    Crew,
    Crewed,
    Ready,
    RunSettings,
    alone,
    cores,
    crew_for,
    ready_for,
    versions_of,
    workers_of,
)
from batchloom.sources import Listing, ReadRules, record_name
from batchloom.sources.files import Begin
from batchloom.store import Manifest
from batchloom.store.format import SMALL_FILE_LIMIT
from batchloom.tokens import Tokenizer, engine_choice

T = TypeVar("T")
Cuts = Mapping[tuple[str, int], Begin | None]
# Bytes of a manifest for an input file at least.
_SOURCE_BYTES = 240


@dataclass(frozen=True, slots=True)
class Made:
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
    units: Sequence[UnitWork]
    kept: Sequence[UnitKept]
    shards: Sequence[Shards]
    decision: Decision
    resumed: int = 0
    workers: int = 1
    crew: str = "in-process"
    content: Content = field(default_factory=Content)
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Run:
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


def _refuse_too_many(files: int) -> None:
    """Refuse inputs whose manifest could not be read, before the work and not at its end."""
    if files * _SOURCE_BYTES > SMALL_FILE_LIMIT:
        raise InputError(
            f"{files:,} input files make a manifest of more than {SMALL_FILE_LIMIT:,} bytes, which is not read. Write "
            "them as records of JSON Lines files, or make several stores."
        )


@final
class Making:
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
        listing: Listing,
        readings: Readings,
        run: Run,
    ) -> None:
        self._work, self._recipe, self._listing = work, recipe, listing
        self._readings, self._settings, self._content = readings, run.settings, run.content
        self._base, self._listener, self._note = run.base, run.listener, run.note
        _refuse_too_many(len(listing.sources) + (len(run.base.sources) if run.base else 0))
        self._units = plan_units(listing.sources, readings.rules, run.settings.unit_bytes)
        self._seconds: dict[str, float] = {}
        self._pieces: list[Path] = []
        self._excluded: list[Excluded] = [()] * len(self._units)
        self._before, self._again = "", False
        self._ready: Ready | None = None
        # Found once: what it depends on is the memory that is free, which workers that begin take.
        self._at_once = workers_of(self._settings.execution, len(self._units))
        # Two runs never use the same: what one left behind is in nobody's way.
        self._attempt = f"{time.time_ns():x}"

    @property
    def units(self) -> int:
        """How many units there are."""
        return len(self._units)

    def workers(self) -> Ready:
        """Have workers begin, while the tokenizer is still found or learned; end those that are not used."""
        execution = self._settings.execution
        if isinstance(execution.workers, int) and execution.workers > self.units:
            self._note(
                f"The input makes {counted(self.units, 'unit')} of work, so no more than {self.units:,} of "
                f"{execution.workers:,} workers have something to do."
            )
        if execution.engine == "ray" and execution.address is None:
            self._note("Ray is started on this machine, which takes some seconds.")
        self._ready = ready_for(execution, self._at_once)
        return self._ready

    def make(self, tokenizer: Tokenizer) -> Made:
        """Do what is left to do, up to the last shard."""
        recipe = self._recipe
        dtype = dtype_name(recipe, tokenizer)
        chat = job_template(recipe, self._listing.sources, self._readings, tokenizer, self._note)
        unused = unused_names(map(self._readings.of, self._listing.sources), chat)
        if unused:
            self._note(f"Unused columns: {', '.join(unused)}")
        while True:
            try:
                return self._make(tokenizer, dtype, chat)
            except KeptAsideError as error:
                self._again = True
                self._work.exclude(self._names(tokenizer)[error.unit], error.excluded)

    def _make(self, tokenizer: Tokenizer, dtype: str, chat: ChatEncoder | None) -> Made:
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
        tally = Tally(self._listener, recipe.max_bad, self._listing.bytes)
        losses = Losses(self._units, self._note, together=bool(self._pieces))
        rules = self._readings.rules
        found = (self._work.unit_facts(folder.name) for folder in folders)
        tokenizing = Tokenizing(self._units, found, rules, tally, losses, self._note)
        resumed = sum(one is not None for one in tokenizing.facts)
        if resumed:
            self._note(
                f"Going on: {resumed:,} of {self.units:,} units were finished by an earlier run."
            )
        workers = self._at_once
        hand = Hand(
            recipe,
            self._settings.limits,
            self._work.tokenizer_path,
            engine_choice(tokenizer),
            dtype,
            chat is not None,
            steps_with_index(recipe.reading.clean, self._work.path, self._note),
            overlap=cores() >= 2 * workers,
            versions=versions_of(recipe.reading.clean),
        )
        task = hand.task_of(tokenizer, self._readings, chat)
        here = doing(lambda: task)
        execution = self._settings.execution
        crewed = Crewed(execution, self._work.path, self._ready)
        with crew_for(crewed, hand, lambda: here, workers, tokenizing.hear) as crew:
            orders = self._orders(crew, tokenizing, folders)
            facts = self._timed("tokenize", lambda: tokenize_all(tokenizing, crew, orders))
            tally.first = tokenizing.first_bad()
            tally.verdict()
            if not tally.documents:
                self._work.clear()
                raise InputMissingError(_no_documents(tally, facts))
            units = [UnitWork(*one) for one in zip(self._units, folders, facts, strict=True)]
            told = tokenizing.reports.report()
            made = self._settle_and_write(crew, units, task, dtype, told)
        name = "in-process" if alone(execution, workers) else execution.engine
        return replace(made, resumed=resumed, workers=workers, crew=name, seconds=self._seconds)

    def _settle_and_write(
        self, crew: Crew, units: list[UnitWork], task: Task, dtype: str, reports: UnitReport
    ) -> Made:
        """What follows when every unit is tokenized; ``dtype`` is the name of the task's."""
        recipe = self._recipe
        older = older_of(self._work, self._base, recipe.dedup)
        if older.unsigned:
            self._note(
                f"{self._work.out} keeps signatures of this kind for {len(older.bands) - older.unsigned:,} of its "
                f"{len(older.bands):,} shards (prepare with --dedup near keeps them): near duplicates of documents in "
                "the others stay."
            )
        sharding = Sharding(
            membership=task.membership,
            most=recipe.tokens_per_shard,
            shards=older.shards,
            filled=older.filled,
            settled=older.overrides,
            tokens=older.tokens,
            balance=recipe.balance_subsets,
        )
        phases = Phases(self._work, units, sharding, older, recipe.dedup, task.dtype, self._attempt)
        found = self._timed("find duplicates", lambda: phases.duplicates(crew))
        kept = self._timed("settle", lambda: phases.settle(crew, found))
        decision = phases.decide(kept)
        documents = older.documents + sum(one.documents for one in kept)
        texts = all(self._readings.of(one).way == "text" for one in self._listing.sources)
        for text in (
            *task.membership.empty_notes(decision.shards, older.filled),
            *share_notes(
                task.membership.shares,
                decision.tokens,
                documents,
                balance=recipe.balance_subsets,
                texts=texts,
                splits=any(one.kind in ("text", "code") for one in self._listing.sources),
            ),
            *_long_notes(units, kept, self._readings.rules, recipe.tokens_per_shard),
        ):
            self._note(text)
        pairs, rest = self._timed("find duplicates", lambda: self._pairs(found, units, older, task))
        tell = self._teller(kept, task.dtype.itemsize)
        shards: list[Shards] = []
        if not self._settings.dry_run:
            shards = self._timed("write shards", lambda: phases.write(crew, kept, decision, tell))
        content = content_of(
            reports,
            after=_flows(units, kept, task.dtype.itemsize),
            duplicates=pairs,
            duplicates_rest=rest,
        )
        return Made(task.tokenizer, dtype, units, kept, shards, decision, content=content)

    def _pairs(self, found: Duplicates, units: list[UnitWork], older: Older, task: Task) -> Pairs:
        """Duplicates by pair of sources, with examples."""
        files, inputs = (*found.exact, *found.near), inputs_lay(self._recipe.inputs)["inputs"]
        reader = DuplicateReader(
            *(units, len(older.files), inputs), task.membership, task.dtype, task.tokenizer
        )
        if not files:
            return reader.pairs(files)
        decided_by = [[one.folder.name for one in units], inputs, older.generation]
        place = self._work.duplicates / "pairs" / fingerprint(decided_by)
        return pairs_once(place, self._attempt, lambda: reader.pairs(files))

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
        decided_by = unit_decided_by(self._recipe, tokenizer, self._settings.constants)
        if before:
            decided_by["before"] = before
        return [unit_identity(unit, decided_by, self._content) for unit in self._units]

    def _adopt(self, folders: list[Path]) -> None:
        """Make units of what a stream has kept of them."""
        stretches = self._work.path / STRETCHES
        if not stretches.is_dir() or self._recipe.dedup.mode != "none":
            return
        membership = Membership(self._recipe.val_fraction, self._recipe.test_fraction)
        how = Adoption(self._readings, membership)
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
        self, crew: Crew, tokenizing: Tokenizing, folders: list[Path]
    ) -> dict[int, UnitOrder]:
        """Phase A of the units that are not done; what they have to know of each other is found before."""
        todo = [number for number, facts in enumerate(tokenizing.facts) if facts is None]
        cuts = self._cuts(crew, todo)
        repeated: tuple[Path, ...] = ()
        if todo and self._pieces:
            repeated = self._timed(
                "find repeated pieces", lambda: self._repeated(crew, cuts, tokenizing.losses)
            )
        return {
            number: UnitOrder(
                *(self._units[number], folders[number], self._attempt),
                excluded=self._excluded[number],
                repeated=repeated,
                cuts=cuts_of(self._units[number], cuts),
            )
            for number in todo
        }

    def _cuts(self, crew: Crew, todo: list[int]) -> Cuts:
        """Where the parts of large CSV files and JSON lists meet, each found by one pass."""
        units = self._units if self._pieces else [self._units[number] for number in todo]
        orders = cuts_orders(units if todo else [], self._readings.rules)
        if not orders:
            return {}
        found = self._timed("find cuts", lambda: have_done(crew, dict(enumerate(orders))))
        return {
            (order.source.path, nominal): begin
            for number, order in enumerate(orders)
            for nominal, begin in zip(order.nominal, found[number], strict=True)
        }

    def _repeated(self, crew: Crew, cuts: Cuts, losses: Losses) -> tuple[Path, ...]:
        """The files that name lines (or paragraphs) that stood before."""
        orders = {
            unit.number: PiecesOrder(
                *(unit, place, self._attempt), excluded=aside, cuts=cuts_of(unit, cuts)
            )
            for unit, place, aside in zip(self._units, self._pieces, self._excluded, strict=True)
            if not place.exists()
        }
        have_done(crew, orders, losses=losses)
        folder = self._work.duplicates / self._before
        return find_all(crew, tuple(self._pieces), folder, self._attempt)

    def _teller(self, kept: list[UnitKept], size: int) -> Wrote:
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


def unit_decided_by(
    recipe: Recipe, tokenizer: Tokenizer, constants: Sequence[int]
) -> dict[str, Any]:
    """All but the inputs that decides what comes of a unit, as plain values."""
    return {
        "version": WORK_VERSION,
        "recipe": recipe_fingerprint(recipe),
        "constants": list(constants),
        "tokenizer": [
            tokenizer.fingerprint,
            tokenizer.engine.name,
            tokenizer.engine.version,
            tokenizer.engine.note,
        ],
        "versions": versions_of(recipe.reading.clean),
    }


def _flows(units: list[UnitWork], kept: list[UnitKept], size: int) -> list[Flow]:
    """What came to the steps behind those of the units, and left them."""
    came = sum(one.facts.documents for one in units)
    tokens = sum(one.facts.tokens for one in units)
    documents, left = sum(one.documents for one in kept), sum(one.tokens for one in kept)
    dedup = Flow(
        step="dedup",
        documents_in=came,
        documents_out=documents,
        tokens_in=tokens,
        tokens_out=left,
    )
    write = Flow(
        step="write",
        documents_in=documents,
        documents_out=documents,
        bytes_out=left * size,
        tokens_in=left,
        tokens_out=left,
    )
    return [dedup, write]


def _long_notes(
    units: Sequence[UnitWork], kept: Sequence[UnitKept], rules: ReadRules, most: int
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
    place = record_name(source, rules, before, BadRecord(record, offset, None, "", ""))
    some = "1 document is" if count == 1 else f"{count:,} documents are"
    note = (
        f"{some} longer than a shard should be ({most:,} tokens, --tokens-per-shard), so shards are larger. The "
        f"longest has {length:,} tokens: {place}. Raise --tokens-per-shard, or cut texts into smaller documents "
        "(--split-on paragraph)."
    )
    return [note]


def _no_documents(tally: Tally, facts: list[UnitFacts]) -> str:
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
    said = f"No document came of {counted(tally.records, 'record')}: {said}."
    if tally.first:
        return f"{said} The first bad one: {tally.first}. Mend the input, or name another."
    if left_out:
        flags = any(rule.startswith("nothing to train") for rule in left_out)
        more = ', "loss" or "train" flags of messages' if flags else ""
        return f"{said} Leave fewer out (--clean, --max-tokens, --overlong, --train-on{more}), or name other inputs."
    return f"{said} Name other inputs."
