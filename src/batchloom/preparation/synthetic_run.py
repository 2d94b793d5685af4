"""``prepare dummy``: a store of synthetic documents, marked so in its manifest."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from batchloom.core.errors import SettingsError
from batchloom.core.settings import quote_value, raise_problems, to_plain
from batchloom.core.synthetic_data import SYNTHETIC, SyntheticDocuments, SyntheticSpec, parse_synthetic_spec
from batchloom.preparation.documents.subsets import SubsetRule
from batchloom.preparation.plain_store import PlainStoreJob, collect_subsets, finish_plain_store, list_plain_differences
from batchloom.preparation.report.progress import Listener, Note, PrepareResult, Progress
from batchloom.preparation.resumable_job import run_job
from batchloom.preparation.settings.recipe import Recipe, flatten_settings
from batchloom.preparation.token_files import TokenBatch, hash_ids
from batchloom.preparation.units.subset_writer import SubsetWriter
from batchloom.preparation.units.unit_files import ROW
from batchloom.preparation.units.work_folder import WORK_VERSION, JobIdentity, WorkFolder
from batchloom.store import Manifest, ShardEntry
from batchloom.store.format import SUBSETS, TOKEN_DTYPES, UINT16_IDS, choose_token_dtype
from batchloom.store.read import make_synthetic_manifest, make_synthetic_tokenizer
from batchloom.store.write import make_folder

# Recipe settings that apply to synthetic documents.
_SYNTHETIC_SETTINGS = ("tokens_per_shard", "dtype", "val_fraction", "test_fraction")
_BATCH_DOCUMENTS, _BATCH_TOKENS = 1 << 14, 1 << 20


def parse_synthetic_input(inputs: Sequence[str]) -> SyntheticSpec | None:
    """Return the synthetic data that the inputs name; None for inputs to be read.

    A name that exists as a file or folder is read as one.

    Raises:
        SettingsError: the settings are invalid, or synthetic data is mixed with other inputs.
    """
    synthetic_names = [name for name in inputs if not os.path.lexists(name) and parse_synthetic_spec(name)]
    if synthetic_names and len(inputs) > 1:
        alone = "synthetic data, which cannot be combined with other inputs"
        raise SettingsError([f"inputs: {synthetic_names[0]} is {alone}; prepare it into a separate store"])
    return parse_synthetic_spec(synthetic_names[0]) if synthetic_names else None


def write_synthetic(spec: SyntheticSpec, recipe: Recipe, out: Path, listener: Listener) -> PrepareResult:
    """Write all documents of a spec as a store; an interrupted job starts over."""
    _check_settings_apply(spec, recipe)
    plain = msgspec.to_builtins({**spec.identity, **{name: getattr(recipe, name) for name in _SYNTHETIC_SETTINGS}})
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


def _check_settings_apply(spec: SyntheticSpec, recipe: Recipe) -> None:
    settings = flatten_settings(to_plain(recipe))
    default_settings = flatten_settings(to_plain(Recipe(inputs=recipe.inputs)))
    problems = [
        f"{name}: {quote_value(value)} does not apply to synthetic data, which consists of ids; set its vocabulary "
        f"with {spec.name}:vocab=50257"
        for name, value in settings.items()
        if name not in _SYNTHETIC_SETTINGS and value != default_settings[name]
    ]
    if recipe.dtype == "uint16" and spec.vocab > UINT16_IDS:
        problems.append(f"dtype: uint16 cannot hold the {spec.vocab:,} ids of {spec.spec_string}")
    raise_problems(problems)


def _write_synthetic_shards(
    spec: SyntheticSpec, recipe: Recipe, work: WorkFolder, listener: Listener
) -> dict[str, list[ShardEntry]]:
    data, dtype = (SyntheticDocuments(spec), TOKEN_DTYPES[choose_token_dtype(recipe.dtype, spec.vocab)])
    membership = SubsetRule(recipe.val_fraction, recipe.test_fraction)
    writers = {name: SubsetWriter(work.store / name, dtype, recipe.tokens_per_shard) for name in SUBSETS}
    total, documents, tokens = data.tokens, 0, 0
    try:
        for batch in _iter_synthetic_batches(data):
            rows = np.zeros(len(batch.lengths), ROW)
            rows["hash"] = hash_ids(batch)
            rows["record"] = batch.first + np.arange(len(rows))
            rows["length"] = batch.lengths
            codes = membership.codes(rows)
            for code, name in enumerate(SUBSETS):
                row_indices = np.flatnonzero(codes == code)
                writers[name].add(rows, batch.tokens, batch.starts, row_indices)
            documents, tokens = documents + len(rows), tokens + batch.tokens.size
            size = dtype.itemsize
            listener(Progress("write", tokens * size, total * size, 0, documents, tokens, 0))
        return {name: writer.finish() for name, writer in writers.items()}
    finally:
        for writer in writers.values():
            writer.abandon()


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
