"""Steps of every command that writes a store.

:func:`run_job` orders them so that a kill at any moment loses no finished work. A :class:`StoreJob` says which store it
makes; a :class:`JobRun` makes it in a work folder.
"""

from pathlib import Path
from typing import Protocol

from batchloom.preparation.report.progress import PrepareResult
from batchloom.preparation.units.work_folder import WorkFolder, move_files
from batchloom.store import (
    MANIFEST_NAME,
    WORK_NAME,
    Manifest,
    add_generation,
    lock_store,
    read_manifest,
    wrap_write_errors,
)
from batchloom.store.format import SUBSETS
from batchloom.store.maintain import delete_stale_files
from batchloom.store.write import make_folder, sync_folder


class JobRun(Protocol):
    """Protocol of a job that has begun in its locked work folder."""

    def make(self) -> Manifest:
        """Complete the store in the work folder; return its manifest."""

    def make_result(self, manifest: Manifest) -> PrepareResult:
        """Return the result of the store of this manifest."""


class StoreJob(Protocol):
    """Protocol of what a command was asked to do, before its output is locked."""

    def find_finished(self) -> PrepareResult | None:
        """Return the result of the finished job; None if there is work to do.

        Raises:
            StoreConflictError: the output holds something else.
        """

    def begin(self, work: WorkFolder) -> JobRun:
        """Begin the job in its work folder, or resume the work there.

        Raises:
            StoreConflictError: it is the work of another job.
        """


def run_job(job: StoreJob, out: Path, *, base: int = 0, dry_run: bool = False) -> PrepareResult:
    """Return the result of a finished job, or run it and move its store to ``out``.

    Args:
        job: the job.
        out: folder of the store.
        base: generation of the store that the job appends to; 0 to make a new store.
        dry_run: leave the result in the work folder, for a later run.
    """
    if (finished := job.find_finished()) is not None:
        _remove_leftover_work(out, finished.generation)
        return finished
    with _lock_output(out, base) as work:
        # Another run may have finished before this one got the lock.
        if (finished := job.find_finished()) is not None:
            _clear_leftover_work(work, finished.generation)
            return finished
        if base:
            _clear_leftover_work(work, base)
        run = job.begin(work)
        if dry_run:
            return run.make_result(run.make())
        # Only the move is left of a job that was stopped after it had written its manifest.
        manifest = read_manifest(work.store) if work.complete else run.make()
        _move_store(work, manifest)
        return run.make_result(manifest)


def _lock_output(out: Path, base: int) -> WorkFolder:
    if not base:
        return WorkFolder(out)
    with lock_store(out):
        # From here on, commands that change the store see that a job is running in it.
        return WorkFolder(out)


def _remove_leftover_work(out: Path, generation: int) -> None:
    """Delete the work folder of a job that ended after its store was moved to ``out``.

    The work of a job that makes a generation after ``generation`` stays.
    """
    if (out / WORK_NAME).is_dir():
        with WorkFolder(out) as work:
            _clear_leftover_work(work, generation)


def _clear_leftover_work(work: WorkFolder, generation: int) -> None:
    """Clear the work folder of a job whose generation the store already has."""
    job = work.job()
    if job is None or job.base < generation:
        work.clear()


def _move_store(work: WorkFolder, manifest: Manifest) -> None:
    """Move the complete store to its place, the manifest last; safe to repeat.

    An appended store becomes the newest generation of the existing one.
    """
    if manifest.generation > 1:
        add_generation(work.out, manifest, staged=work.store)
        work.remove()
        return
    for folder in [work.store / name for name in SUBSETS if (work.store / name).is_dir()]:
        make_folder(work.out / folder.name)
        move_files(folder, work.out / folder.name)
    move_files(work.store, work.out)
    with lock_store(work.out):
        with wrap_write_errors(work.out):
            (work.store / MANIFEST_NAME).replace(work.out / MANIFEST_NAME)
        sync_folder(work.out)
        # An abandoned job may have been killed while it moved its shards here.
        delete_stale_files(work.out, manifest)
    work.remove()
