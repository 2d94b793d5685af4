"""One run of a recipe: the tokenizer, the three phases over all units, the end."""

import dataclasses
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, final

import msgspec

from batchloom.core.errors import InputMissingError
from batchloom.core.files import printable
from batchloom.core.values import counted
from batchloom.execution.machine import cores
from batchloom.execution.seam import Crew
from batchloom.preparation.crews import crew_for, workers_of
from batchloom.preparation.finish import Finished, finish_store, move_store
from batchloom.preparation.hand import Hand, doing
from batchloom.preparation.orders import UnitOrder
from batchloom.preparation.phases import Phases, Shards
from batchloom.preparation.read_recipe import weights_note
from batchloom.preparation.reading import USUAL, Readings, refuse_mixed
from batchloom.preparation.recipe import Recipe, recipe_fingerprint
from batchloom.preparation.recipe_store import inputs_lay
from batchloom.preparation.rerun import (
    begin_or_go_on,
    report_sources,
)
from batchloom.preparation.result import PrepareResult, result_of
from batchloom.preparation.run_settings import RunSettings
from batchloom.preparation.settle import Sharding
from batchloom.preparation.tally import Listener, Note, Progress, Tally
from batchloom.preparation.tokenizer_of import dtype_name, job_template, job_tokenizer
from batchloom.preparation.tokenizing import Tokenizing, tokenize_all
from batchloom.preparation.units import plan_units, unit_identity
from batchloom.preparation.work import (
    WORK_VERSION,
    Decision,
    UnitFacts,
    UnitKept,
    UnitWork,
    WorkFolder,
)
from batchloom.sources.beginnings import read_ahead
from batchloom.sources.listing import Listing
from batchloom.store.format import TOKEN_DTYPES
from batchloom.store.manifest import Manifest, read_manifest
from batchloom.tokens import Tokenizer, engine_choice, parse_train_spec


@final
class Job:
    """One run of a recipe in its work folder."""

    def __init__(
        self,
        work: WorkFolder,
        recipe: Recipe,
        listing: Listing,
        listener: Listener,
        settings: RunSettings,
        began: float,
    ) -> None:
        self._work, self._recipe, self._listing = work, recipe, listing
        self._listener, self._settings, self._began = listener, settings, began
        self._started = datetime.now(UTC)
        limits, unit_bytes = settings.limits, settings.unit_bytes
        self._constants = [*dataclasses.astuple(limits)[:-1], unit_bytes]
        self._rules = recipe.reading.rules(limits)
        self._readings = Readings(recipe, limits)
        self._units = plan_units(listing.sources, self._rules, unit_bytes)
        self._notes: list[str] = []
        self._resumed = 0
        self._seconds: dict[str, float] = {}
        # Two runs never use the same: what one left behind is in nobody's way.
        self._attempt = f"{os.getpid():x}.{time.time_ns():x}"
        self._kept: Mapping[str, Any] | None = None

    def run(self, kept: Mapping[str, Any] | None = None) -> PrepareResult:
        """Do what is left to do.

        Args:
            kept: the state of the tokenizer, where it is not to be found by the recipe.
        """
        self._kept = kept
        for text in self._listing.notes:
            self._note(text)
        if weights := weights_note(self._recipe.sources):
            self._note(weights)
        self._tell_schemas()
        refuse_mixed(self._listing.sources, self._readings)
        begin_or_go_on(
            self._work,
            self._recipe,
            self._listing,
            self._constants,
            kept,
            restart=self._settings.restart,
        )
        self._work.sweep()
        note = ""
        if self._work.complete:
            self._note("Going on: the store was complete and only had to be moved to its place.")
            manifest = read_manifest(self._work.store)
            self._resumed = len(self._units)
        else:
            manifest, note = self._make()
        move_store(self._work)
        return result_of(
            self._work.out,
            manifest,
            engine_note=note,
            seconds=time.perf_counter() - self._began,
            resumed_units=self._resumed,
            notes=tuple(self._notes),
        )

    def _make(self) -> tuple[Manifest, str]:
        recipe, sources = self._recipe, self._listing.sources
        tokenizer = self._timed("sample", self._tokenizer)
        dtype = dtype_name(recipe, tokenizer)
        chat = job_template(recipe, sources, self._readings, tokenizer, self._note)
        folders = self._folders(tokenizer)
        found = [self._work.unit_facts(folder.name) for folder in folders]
        self._resumed = sum(one is not None for one in found)
        if self._resumed:
            self._note(
                f"Going on: {self._resumed:,} of {len(self._units):,} units were finished by an earlier run."
            )
        tally = Tally(self._listener, recipe.max_bad, self._listing.bytes)
        tokenizing = Tokenizing(self._units, found, self._rules, tally, self._note)
        workers = workers_of(self._settings.execution, len(found) - self._resumed)
        hand = Hand(
            recipe,
            self._settings.limits,
            self._work.tokenizer_path,
            engine_choice(tokenizer),
            dtype,
            chat is not None,
            overlap=cores() >= 2 * workers,
        )
        here = hand.task_of(tokenizer, self._readings, chat)
        crew = crew_for(
            self._settings.execution,
            hand,
            lambda: doing(lambda: here),
            workers,
            tokenizing.hear,
        )
        with crew:
            facts = self._timed(
                "tokenize", lambda: self._tokenize(tokenizing, folders, tally, crew)
            )
            units = [UnitWork(*one) for one in zip(self._units, folders, facts, strict=True)]
            sharding = Sharding(here.membership, recipe.tokens_per_shard)
            phases = Phases(*(self._work, units, sharding), recipe.dedup, dtype, self._attempt)
            kept = self._timed("settle", lambda: phases.settle(crew))
            decision = phases.decide(kept)
            for text in here.membership.empty_notes(decision.shards):
                self._note(text)
            shards = self._timed("write", lambda: self._write(phases, crew, kept, decision, dtype))
        done = Finished(
            recipe,
            self._rules,
            self._readings,
            sources,
            units,
            kept,
            shards,
            decision,
            tokenizer,
            dtype,
        )
        return finish_store(self._work, done, self._report(tokenizer)), tokenizer.engine.note

    def _folders(self, tokenizer: Tokenizer) -> list[Path]:
        """Where the temporary files of each unit are."""
        decided_by = {
            "version": WORK_VERSION,
            "recipe": recipe_fingerprint(self._recipe),
            "constants": self._constants,
            "tokenizer": [
                tokenizer.fingerprint,
                tokenizer.engine.name,
                tokenizer.engine.version,
                tokenizer.engine.note,
            ],
        }
        content = dict(self._settings.content)
        return [
            self._work.unit(unit_identity(unit, decided_by, content)[:32]) for unit in self._units
        ]

    def _tokenizer(self) -> Tokenizer:
        """The job's tokenizer: kept by an earlier run, learned, or found; its engine compared."""
        state = self._work.tokenizer_state()
        if state is None and parse_train_spec(self._recipe.tokenizer) is not None:
            self._listener(Progress("sample", 0, self._listing.bytes, 0, 0, 0, 0))
        known = self._kept if state is None else state
        tokenizer = job_tokenizer(
            self._recipe, self._listing.sources, self._readings, self._note, known
        )
        dtype_name(self._recipe, tokenizer)
        if state is None:
            self._work.keep_tokenizer(tokenizer.state())
        return tokenizer

    def _tell_schemas(self) -> None:
        """Look at the first records of every source, and say what they are, before work begins."""
        names: dict[str, list[str]] = {}
        for source in read_ahead(self._listing.sources, lambda one: one):
            reading = self._readings.of(source)
            # A column called text is what everybody expects.
            if reading.detected and reading.detected != USUAL:
                names.setdefault(reading.detected, []).append(source.name)
        for detected, found in names.items():
            more = f" and {len(found) - 1:,} more" if len(found) > 1 else ""
            self._note(f"Detected {detected} in {found[0]}{more}.")

    def _tokenize(
        self, tokenizing: Tokenizing, folders: list[Path], tally: Tally, crew: Crew
    ) -> list[UnitFacts]:
        """Phase A over all units, and the verdict on bad records."""
        orders = {
            unit.number: UnitOrder(unit, folder, self._attempt)
            for unit, folder, found in zip(self._units, folders, tokenizing.facts, strict=True)
            if found is None
        }
        facts = tokenize_all(tokenizing, crew, orders)
        tally.first = tokenizing.first_bad()
        tally.verdict()
        if not tally.documents:
            self._work.clear()
            raise InputMissingError(_no_documents(tally, facts))
        return facts

    def _write(
        self, phases: Phases, crew: Crew, kept: list[UnitKept], decision: Decision, dtype: str
    ) -> list[Shards]:
        """Phase C over all units."""
        size = TOKEN_DTYPES[dtype].itemsize
        total = sum(unit.tokens for unit in kept) * size
        done = [0, 0, 0]

        def tell(number: int, *, found: bool) -> None:
            unit = kept[number]
            done[0] += unit.tokens * size
            done[1] += unit.tokens * size if found else 0
            done[2] += unit.documents
            self._listener(Progress("write", done[0], total, done[1], done[2], done[0] // size, 0))

        return phases.write(crew, kept, decision, tell)

    def _report(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """The sidecar: what may differ between two runs that write the same store."""
        seconds = time.perf_counter() - self._began
        return {
            "sources": msgspec.to_builtins(report_sources(self._listing.sources)),
            **inputs_lay(self._recipe.inputs),
            "engine_note": tokenizer.engine.note,
            "out": printable(os.path.abspath(self._work.out)),  # noqa: PTH100
            "recipe_fingerprint": recipe_fingerprint(self._recipe),
            "started": self._started.isoformat(timespec="seconds"),
            "seconds": round(seconds, 3),
            "seconds_by_phase": {name: round(value, 3) for name, value in self._seconds.items()},
            "bytes_per_second": round(self._listing.bytes / max(seconds, 1e-9)),
            "peak_memory_bytes": _peak_memory(),
            "units": len(self._units),
            "resumed_units": self._resumed,
            "notes": self._notes,
        }

    def _timed(self, phase: str, work: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = work()
        self._seconds[phase] = time.perf_counter() - began
        return result

    def _note(self, text: str) -> None:
        self._notes.append(text)
        self._listener(Note(text))


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
        return (
            f"{said} Leave fewer out (--max-tokens, --overlong, --train-on), or name other inputs."
        )
    return f"{said} Name other inputs."


def _peak_memory() -> int:
    """The most bytes this process has had in memory."""
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        # On Linux this would be the most of the process that started this one, too.
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024
