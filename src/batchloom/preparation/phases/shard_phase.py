"""Phases after tokenization: duplicates, subsets and shards."""

from collections.abc import Sequence
from dataclasses import replace
from typing import final

from batchloom.preparation.documents.encode_documents import EncodeContext
from batchloom.preparation.documents.record_parsers import RecordParsers
from batchloom.preparation.documents.tokenizer_choice import choose_dtype_name
from batchloom.preparation.phases.base_generations import BaseGenerations, read_base_generations
from batchloom.preparation.phases.duplicate_pairs import find_duplicate_pairs
from batchloom.preparation.phases.duplicate_resolution import resolve_duplicates
from batchloom.preparation.phases.duplicates_file import write_duplicates_file
from batchloom.preparation.phases.find_duplicates import DuplicateFiles, find_duplicates
from batchloom.preparation.phases.job_results import JobResults
from batchloom.preparation.phases.prepare_notes import (
    describe_long_documents,
    describe_missing_signatures,
    describe_subsets,
)
from batchloom.preparation.phases.subset_decision import ShardSettings, decide
from batchloom.preparation.phases.unit_shards import write_shards
from batchloom.preparation.report.progress import PrepareLog
from batchloom.preparation.report.report import ReportContent, build_content
from batchloom.preparation.request.recipe_file import describe_input_locations
from batchloom.preparation.settings.recipe import Recipe
from batchloom.preparation.units.unit_report import StepFlow, UnitReport
from batchloom.preparation.units.work_folder import Decision, TokenizedUnit, UnitDedupCounts, WorkFolder
from batchloom.preparation.workers.protocols import Executor
from batchloom.sources.files import Source
from batchloom.store import Manifest, ShardEntry


@final
class ShardPhase:
    """Duplicates, subsets and shards of all tokenized units.

    ``base`` is the store that is appended to. A dry run writes no shards.
    """

    def __init__(
        self,
        work: WorkFolder,
        recipe: Recipe,
        record_parsers: RecordParsers,
        sources: Sequence[Source],
        base: Manifest | None,
        log: PrepareLog,
        *,
        dry_run: bool,
    ) -> None:
        self._work = work
        self._recipe = recipe
        self._record_parsers = record_parsers
        self._sources = sources
        self._manifest = base
        self._log = log
        self._dry_run = dry_run

    def run(
        self, executor: Executor, units: list[TokenizedUnit], context: EncodeContext, unit_report: UnitReport
    ) -> JobResults:
        """Resolve duplicates over all units, then write each unit's shards."""
        recipe = self._recipe
        work = self._work
        log = self._log
        base = read_base_generations(work, self._manifest, recipe.dedup)
        log.report(describe_missing_signatures(base, work.out))
        settings = ShardSettings(
            context.membership,
            replace(context.membership, overrides=base.overrides),
            recipe.tokens_per_shard,
            context.encoder.dtype,
            recipe.dedup.stored_banding,
        )
        with log.time("find duplicates"):
            duplicate_files = find_duplicates(executor, work, units, base, recipe.dedup)
        with log.time("resolve duplicates"):
            dedup_counts = resolve_duplicates(executor, work, units, duplicate_files, settings, len(base.files))
        decision = decide(work, units, dedup_counts, settings, base, balance=recipe.balance_subsets)
        self._warn(units, dedup_counts, decision, base, context)
        content = self._make_content(units, dedup_counts, duplicate_files, base, context, unit_report)
        shards: list[dict[str, list[ShardEntry]]] = []
        if not self._dry_run:
            with log.time("find duplicates"):
                write_duplicates_file(work, units, duplicate_files, base, recipe.dedup.banding)
            with log.time("write shards"):
                shards = write_shards(executor, work, units, dedup_counts, decision, settings, log.listener)
        return JobResults(
            recipe=recipe,
            record_parsers=self._record_parsers,
            sources=self._sources,
            base=self._manifest,
            tokenizer=context.encoder.tokenizer,
            dtype=choose_dtype_name(recipe, context.encoder.tokenizer),
            units=units,
            dedup_counts=dedup_counts,
            decision=decision,
            shards=shards,
            content=content,
        )

    def _warn(
        self,
        units: Sequence[TokenizedUnit],
        dedup_counts: Sequence[UnitDedupCounts],
        decision: Decision,
        base: BaseGenerations,
        context: EncodeContext,
    ) -> None:
        """Warn of subsets and shards that are not as asked for."""
        documents = base.documents + sum(counts.documents for counts in dedup_counts)
        balance = self._recipe.balance_subsets
        parsers = self._record_parsers
        self._log.report(
            describe_subsets(context.membership, decision, base, documents, self._sources, parsers, balance=balance)
        )
        self._log.report(describe_long_documents(units, dedup_counts, parsers.rules, self._recipe.tokens_per_shard))

    def _make_content(
        self,
        units: list[TokenizedUnit],
        dedup_counts: Sequence[UnitDedupCounts],
        duplicate_files: DuplicateFiles,
        base: BaseGenerations,
        context: EncodeContext,
        unit_report: UnitReport,
    ) -> ReportContent:
        """Make the report's statistics, with examples of duplicates."""
        with self._log.time("find duplicates"):
            inputs = describe_input_locations(self._recipe.inputs)["inputs"]
            pairs, omitted_pairs = find_duplicate_pairs(self._work, units, duplicate_files, base, inputs, context)
        flows = _compute_flows(units, dedup_counts, context.encoder.dtype.itemsize)
        return build_content(unit_report, after=flows, duplicates=pairs, duplicates_rest=omitted_pairs)


def _compute_flows(
    units: Sequence[TokenizedUnit], dedup_counts: Sequence[UnitDedupCounts], token_bytes: int
) -> list[StepFlow]:
    """Return the flows of the steps after tokenization: dedup and write."""
    documents = sum(counts.documents for counts in dedup_counts)
    tokens = sum(counts.tokens for counts in dedup_counts)
    dedup = StepFlow(
        step="dedup",
        documents_in=sum(unit.facts.documents for unit in units),
        documents_out=documents,
        tokens_in=sum(unit.facts.tokens for unit in units),
        tokens_out=tokens,
    )
    write = StepFlow(
        step="write",
        documents_in=documents,
        documents_out=documents,
        bytes_out=tokens * token_bytes,
        tokens_in=tokens,
        tokens_out=tokens,
    )
    return [dedup, write]
