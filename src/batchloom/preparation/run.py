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
from batchloom.preparation.finish import Finished, finish_store, move_store
from batchloom.preparation.read_recipe import weights_note
from batchloom.preparation.reading import USUAL, Readings, refuse_mixed
from batchloom.preparation.recipe import Recipe, recipe_fingerprint
from batchloom.preparation.recipe_store import inputs_lay
from batchloom.preparation.rerun import (
    begin_or_go_on,
    report_sources,
)
from batchloom.preparation.result import PrepareResult, result_of
from batchloom.preparation.shards import ShardTask, decide, decided_membership, write_unit
from batchloom.preparation.subsets import Membership
from batchloom.preparation.tally import Listener, Note, Progress, Tally
from batchloom.preparation.tokenize import Task, tokenize_unit
from batchloom.preparation.tokenizer_of import dtype_name, job_template, job_tokenizer
from batchloom.preparation.units import Unit, plan_units
from batchloom.preparation.work import Decision, UnitFacts, WorkFolder
from batchloom.sources.beginnings import read_ahead
from batchloom.sources.cuts import RecordBounds
from batchloom.sources.listing import Listing
from batchloom.sources.places import error_of
from batchloom.sources.rules import Limits
from batchloom.store.format import TOKEN_DTYPES
from batchloom.store.manifest import Manifest, read_manifest
from batchloom.tokens import Tokenizer, parse_train_spec


@final
class Job:
    """One run of a recipe in its work folder."""

    def __init__(
        self,
        work: WorkFolder,
        recipe: Recipe,
        listing: Listing,
        listener: Listener,
        limits: Limits,
        unit_bytes: int,
        began: float,
    ) -> None:
        self._work, self._recipe, self._listing = work, recipe, listing
        self._listener, self._began = listener, began
        self._started = datetime.now(UTC)
        self._constants = [*dataclasses.astuple(limits)[:-1], unit_bytes]
        self._rules = recipe.reading.rules(limits)
        self._readings = Readings(recipe, limits)
        self._units = plan_units(listing.sources, self._rules, unit_bytes)
        self._notes: list[str] = []
        self._resumed = 0
        self._seconds: dict[str, float] = {}
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
        begin_or_go_on(self._work, self._recipe, self._listing, self._constants, kept)
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
        tokenizer = self._timed("sample", self._tokenizer)
        dtype = dtype_name(self._recipe, tokenizer)
        membership = Membership(self._recipe.val_fraction, self._recipe.test_fraction)
        task = Task(
            self._rules,
            self._readings,
            RecordBounds(self._rules),
            self._recipe.reading.normalize,
            tokenizer,
            TOKEN_DTYPES[dtype],
            membership,
            job_template(
                self._recipe, self._listing.sources, self._readings, tokenizer, self._note
            ),
        )
        facts = self._timed("tokenize", lambda: self._tokenize(task))
        decision = self._work.decision() or decide(
            self._work, self._units, facts, membership, self._recipe.tokens_per_shard
        )
        for text in membership.empty_notes(decision.shards):
            self._note(text)
        shard_task = ShardTask(
            self._work.store,
            task.dtype,
            membership,
            decided_membership(decision, membership),
            self._recipe.tokens_per_shard,
        )
        shards = self._timed("write", lambda: self._write(shard_task, facts, decision))
        done = Finished(
            self._recipe,
            self._rules,
            self._readings,
            self._listing.sources,
            self._units,
            facts,
            shards,
            decision,
            tokenizer,
            dtype,
        )
        return finish_store(self._work, done, self._report(tokenizer)), tokenizer.engine.note

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

    def _tokenize(self, task: Task) -> list[UnitFacts]:
        """Phase A over all units, and the verdict on bad records."""
        tally = Tally(self._listener, self._recipe.max_bad, self._listing.bytes)
        facts: list[UnitFacts | None] = [self._work.unit_facts(unit.number) for unit in self._units]
        self._resumed = sum(one is not None for one in facts)
        if self._resumed:
            self._note(
                f"Going on: {self._resumed:,} of {len(self._units):,} units were finished by an earlier run."
            )
        before: dict[str, int] = {}
        done: list[UnitFacts] = []
        for unit, found in zip(self._units, facts, strict=True):
            if found is None:
                folder = self._work.unit(unit.number)
                done.append(tokenize_unit(unit, folder, task, tally, before))
            else:
                self._count_found(unit, found, tally, before)
                done.append(found)
        tally.verdict()
        if not tally.documents:
            self._work.clear()
            raise InputMissingError(_no_documents(tally, done))
        return done

    def _count_found(
        self, unit: Unit, found: UnitFacts, tally: Tally, before: dict[str, int]
    ) -> None:
        if found.first_bad and not tally.first:
            number, bad = found.first_bad
            source = unit.parts[number].source
            earlier = before.get(source.path, 0)
            earlier += sum(
                counts.records
                for part, counts in zip(unit.parts[:number], found.parts[:number], strict=True)
                if part.source.path == source.path
            )
            tally.first = str(error_of(source, self._rules, earlier, bad))
        for part, counts in zip(unit.parts, found.parts, strict=True):
            before[part.source.path] = before.get(part.source.path, 0) + counts.records
        tally.found_done(
            unit.bytes,
            sum(part.records for part in found.parts),
            found.documents,
            found.tokens,
            sum(part.bad for part in found.parts),
        )

    def _write(self, task: ShardTask, facts: list[UnitFacts], decision: Decision) -> list[Any]:
        """Phase C over all units."""
        total = sum(fact.tokens for fact in facts) * task.dtype.itemsize
        documents = tokens = bad = found_bytes = 0
        shards = []
        for unit, fact, numbers in zip(self._units, facts, decision.shards, strict=True):
            found = self._work.shards(unit.number)
            if found is None:
                found = write_unit(unit, self._work.unit(unit.number), task, fact, numbers)
            else:
                found_bytes += fact.tokens * task.dtype.itemsize
            shards.append(found)
            documents, tokens = documents + fact.documents, tokens + fact.tokens
            bad += sum(part.bad for part in fact.parts)
            done = tokens * task.dtype.itemsize
            self._listener(Progress("write", done, total, found_bytes, documents, tokens, bad))
        return shards

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
