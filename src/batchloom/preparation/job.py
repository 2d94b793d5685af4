"""``prepare``: from input files to a store, through three phases that can stop and go on."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from batchloom.chat.trained import TrainOn
from batchloom.core.errors import SettingsError
from batchloom.core.spec import shown
from batchloom.preparation.inputs import Given, list_inputs, read_inputs
from batchloom.preparation.overlong import Overlong
from batchloom.preparation.read_recipe import ReadRecipe
from batchloom.preparation.recipe import ChatRecipe, Dedup, Dtype, Recipe, is_path
from batchloom.preparation.rerun import (
    Report,
    check_apart,
    check_folder,
    finished_store,
    read_report,
    remove_leftover,
    seen_before,
)
from batchloom.preparation.result import PrepareResult, result_of
from batchloom.preparation.run import Job
from batchloom.preparation.synthetic import synthetic_input, write_synthetic
from batchloom.preparation.tally import Listener, Note, Progress, log_notes
from batchloom.preparation.units import UNIT_BYTES
from batchloom.preparation.work import SPOOL_NAME, WorkFolder
from batchloom.sources.listing import Listing
from batchloom.sources.rules import Limits
from batchloom.sources.spool import Spool
from batchloom.store.format import WORK_NAME


def prepare(  # noqa: D417 - the fields of the recipes, told there
    inputs: Given | Sequence[Given],
    *,
    out: str | os.PathLike[str],
    tokenizer: str | None = None,
    end_token: str | None = None,
    text_field: str | None = None,
    mapping: Mapping[str, str] | None = None,
    split_on: str = "auto",
    normalize: bool = True,
    tokens_per_shard: int = 100_000_000,
    dtype: Dtype = "auto",
    val_fraction: float = 0.01,
    test_fraction: float = 0.0,
    dedup: Dedup = "none",
    max_bad: int | str = "0.1%",
    template: str | None = None,
    train_on: TrainOn | None = None,
    max_tokens: int | None = None,
    overlong: Overlong = "drop",
    prove: bool = False,
    streaming: bool | None = None,
    progress: Callable[[Note | Progress], None] | None = None,
) -> PrepareResult:
    """Make a store of text, code, JSON, CSV, Parquet and Arrow files.

    Streams: memory stays below 500 MiB for an input of any size. What was finished when a run
    ended, however it ended, is found by the next one with the same arguments. On a finished
    store the same arguments succeed at once.

    Args:
        inputs: one or several files, folders, globs, archives and URLs, also packed (``.gz``,
            ``.zst`` ...), data sets of the Hub, or ``-`` for standard input; YAML manifests and
            :class:`DatasetConfig`, which name such; or one name of synthetic data.
        out: the store's folder.
        tokenizer: see :class:`Recipe`; None for the one a manifest names, else ``gpt2``.
        end_token, tokens_per_shard, dtype, val_fraction, test_fraction, dedup, max_bad: see
            :class:`Recipe`.
        text_field, mapping, split_on, normalize: see :class:`ReadRecipe`.
        template, train_on, max_tokens, overlong, prove: see :class:`ChatRecipe`.
        streaming: whether data sets of the Hub are read where they lie (True) or downloaded first
            (False); None: those above 10 GB are read where they lie. It decides no byte.
        progress: is called with a :class:`Note` or a :class:`Progress`, some times a second;
            what it raises stops the job. Without it, notes go to the log ``batchloom``.

    Raises:
        SettingsError: settings that are unknown or contradict each other.
        InputMissingError: an input does not exist or holds nothing that can be used.
        InputError: an input cannot be read; RecordError and TooManyBadRecordsError say where.
        TokenizerError: the tokenizer cannot be found, read or trusted.
        StoreConflictError: ``out`` holds something else than this job would write.
        OutputError: ``out`` cannot be written.
    """
    reading = ReadRecipe(
        text_field=text_field, mapping=dict(mapping or {}), split_on=split_on, normalize=normalize
    )
    given = read_inputs(inputs, reading, tokenizer)
    recipe = Recipe(
        inputs=given.inputs,
        sources=given.sources,
        tokenizer=given.tokenizer,
        end_token=end_token,
        reading=given.reading,
        tokens_per_shard=tokens_per_shard,
        dtype=dtype,
        val_fraction=val_fraction,
        test_fraction=test_fraction,
        dedup=dedup,
        max_bad=max_bad,
        chat=ChatRecipe(
            template=template,
            train_on=train_on,
            max_tokens=max_tokens,
            overlong=overlong,
            prove=prove,
        ),
    )
    if not is_path(folder := os.fspath(out) if isinstance(out, os.PathLike) else out):
        raise SettingsError([f"out: {shown(out)} is no path; name the folder of the store"])
    listener = progress or log_notes
    return run_recipe(recipe, Path(folder), listener, told=given.notes, streaming=streaming)


def run_recipe(
    recipe: Recipe,
    out: Path,
    listener: Listener,
    *,
    told: tuple[str, ...] = (),
    streaming: bool | None = None,
    limits: Limits | None = None,
    unit_bytes: int = UNIT_BYTES,
) -> PrepareResult:
    """Carry out a recipe into ``out``; see :func:`prepare`.

    Args:
        recipe: what to do.
        out: the store's folder.
        listener: is told of notes and progress.
        told: notes that come before all others.
        streaming: see :func:`prepare`.
        limits: the constants that decide documents; others than the default only in tests.
        unit_bytes: the size of a unit; another than the default only in tests.
    """
    began = time.perf_counter()
    if made_up := synthetic_input(recipe.inputs):
        return write_synthetic(made_up, recipe, out, listener)
    check_apart(recipe.inputs, out)
    with Spool(out / WORK_NAME / SPOOL_NAME) as spool:
        report = read_report(out)
        seen = seen_before(report, recipe)
        listing = list_inputs(recipe, spool, exclude=out, streaming=streaming, seen=seen)
        listing = replace(listing, notes=(*told, *listing.notes))
        done = _done_before(recipe, out, listing, report, began)
        if done is not None:
            return done
        limits = limits or Limits()
        with WorkFolder(out) as work:
            spool.sweep()
            job = Job(work, recipe, listing, listener, limits, unit_bytes, began)
            return job.run()


def _done_before(
    recipe: Recipe, out: Path, listing: Listing, report: Report | None, began: float
) -> PrepareResult | None:
    """The result of a job that is finished already; None where there is work to do."""
    manifest = finished_store(out, recipe, listing, report)
    if manifest is None:
        check_folder(out)
        return None
    remove_leftover(out)
    note = report.engine_note if report else ""
    seconds = time.perf_counter() - began
    return result_of(out, manifest, engine_note=note, seconds=seconds, already_done=True)
