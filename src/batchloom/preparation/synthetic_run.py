"""``prepare dummy``: a store of synthetic documents, marked so in its manifest."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from batchloom.core.loss_weights import LossFlags
from batchloom.core.synthetic_data import SYNTHETIC, SyntheticDocuments, SyntheticSpec
from batchloom.preparation.documents.subsets import SubsetRule
from batchloom.preparation.imports.token_files import TokenBatch, hash_ids
from batchloom.preparation.plain_store import PlainStoreJob, collect_subsets, finish_plain_store, list_plain_differences
from batchloom.preparation.report.progress import Listener, Note, PrepareResult, Progress
from batchloom.preparation.resumable_job import run_job
from batchloom.preparation.settings.recipe import Recipe
from batchloom.preparation.synthetic_request import SYNTHETIC_SETTINGS, check_synthetic_settings
from batchloom.preparation.units.subset_writer import open_subset_writers
from batchloom.preparation.units.unit_rows import ROW
from batchloom.preparation.units.work_folder import WORK_VERSION, JobIdentity, WorkFolder
from batchloom.store import Manifest, ShardEntry
from batchloom.store.format import SUBSETS, TOKEN_DTYPES, choose_token_dtype
from batchloom.store.read import make_synthetic_manifest, make_synthetic_tokenizer
from batchloom.store.write import make_folder

_BATCH_DOCUMENTS = 1 << 14
_BATCH_TOKENS = 1 << 20


def write_synthetic(spec: SyntheticSpec, recipe: Recipe, out: Path, listener: Listener) -> PrepareResult:
    """Write all documents of a spec as a store; an interrupted job starts over."""
    check_synthetic_settings(spec, recipe)
    plain = msgspec.to_builtins({**spec.identity, **{name: getattr(recipe, name) for name in SYNTHETIC_SETTINGS}})
    notes = (f"source={SYNTHETIC}: {spec.spec_string} is synthetic data; its store records that.",)

    def make(work: WorkFolder) -> Manifest:
        listener(Note(notes[0]))
        shards = _write_synthetic_shards(spec, recipe, work, listener)
        make_folder(work.store)
        subsets = collect_subsets(work.store, shards)
        manifest = make_synthetic_manifest(
            spec,
            dtype=choose_token_dtype(recipe.dtype, spec.vocab),
            recipe=plain,
            tokens=sum(entry.tokens for entry in subsets.values()),
            subsets=subsets,
        )
        report = {"sources": [], "out": str(work.out.absolute()), "notes": notes}
        state = make_synthetic_tokenizer(SyntheticDocuments(spec)).state()
        return finish_plain_store(work.store, manifest, state, report)

    identity = JobIdentity(WORK_VERSION, plain, [], [])
    job = PlainStoreJob(out, identity, lambda manifest: list_plain_differences(manifest, plain), make)
    result = run_job(job, out)
    return result if result.already_done else replace(result, notes=notes)


def _write_synthetic_shards(
    spec: SyntheticSpec, recipe: Recipe, work: WorkFolder, listener: Listener
) -> dict[str, list[ShardEntry]]:
    data = SyntheticDocuments(spec)
    dtype = choose_token_dtype(recipe.dtype, spec.vocab)
    size = TOKEN_DTYPES[dtype].itemsize
    membership = SubsetRule(recipe.val_fraction, recipe.test_fraction)
    documents = tokens = 0
    with open_subset_writers(work.store, dtype, recipe.tokens_per_shard) as writers:
        for batch in _iter_synthetic_batches(data):
            rows = np.zeros(len(batch.lengths), ROW)
            rows["hash"] = hash_ids(batch)
            rows["record"] = batch.first + np.arange(len(rows))
            rows["length"] = batch.lengths
            codes = membership.codes(rows)
            flags = LossFlags.all_trained(batch.tokens.size)
            for code, name in enumerate(SUBSETS):
                row_indices = np.flatnonzero(codes == code)
                writers[name].add(rows, batch.tokens, batch.starts, row_indices, flags)
            documents += len(rows)
            tokens += batch.tokens.size
            listener(Progress("write", tokens * size, data.tokens * size, 0, documents, tokens, 0))
        return {name: writer.finish() for name, writer in writers.items()}


def _iter_synthetic_batches(data: SyntheticDocuments) -> Iterator[TokenBatch]:
    first = 0
    while first < data.spec.documents:
        stop = min(first + _BATCH_DOCUMENTS, data.spec.documents)
        lengths = data.lengths(np.arange(first, stop)).astype(np.int64)
        count = int(np.searchsorted(np.cumsum(lengths), _BATCH_TOKENS, side="right"))
        lengths = lengths[: max(1, count)]
        numbers = np.arange(first, first + len(lengths))
        ids = data.ids(numbers, np.zeros(len(numbers), np.int64), lengths)
        yield TokenBatch(first, lengths, np.cumsum(lengths) - lengths, ids)
        first += len(lengths)
