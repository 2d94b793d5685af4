"""``keep``: the store of a stream's inputs, which grows while they are read."""

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import final

from batchloom.core.errors import OutputError, SettingsError, StoreConflictError
from batchloom.core.files import refuse_url
from batchloom.core.settings import quote_value
from batchloom.preparation import (
    STREAM_BATCHES_FOLDER,
    ExecutionSettings,
    Recipe,
    RequestedJob,
    RunSettings,
    WorkFolder,
    begin_or_resume,
    check_output_folder,
    check_separate,
    make_job_identity,
    read_report,
    run_recipe,
)
from batchloom.preparation.phases import collect_unit_settings
from batchloom.preparation.report import Listener, PrepareResult
from batchloom.preparation.settings import is_valid_path
from batchloom.preparation.units import Unit, compute_unit_identity, read_stream_batches
from batchloom.sources import SourceListing
from batchloom.store import MANIFEST_NAME, WORK_NAME, write_file
from batchloom.streaming.lane import CachedRanges
from batchloom.tokens import Tokenizer

_LOG = logging.getLogger("batchloom")
_BEGUN_FILE = "begun"
_WAIT_SECONDS = 30.0
_POLL_SECONDS = 0.05


@contextmanager
def explain_keep_in_errors() -> Iterator[None]:
    """Add to the errors of ``prepare`` that ``keep`` is its ``--out``."""
    try:
        yield
    except (StoreConflictError, OutputError) as error:
        if "--out" not in str(error):
            raise
        raise type(error)(f"{error} (For a stream, --out is keep=; other options are of batchloom prepare.)") from error


def resolve_keep_folder(keep: str | os.PathLike[str] | None) -> Path | None:
    if keep is None:
        return None
    name = os.fspath(keep) if isinstance(keep, os.PathLike) else keep
    if not is_valid_path(name):
        raise SettingsError([f"keep: {quote_value(keep)} is not a path; name the folder of the store"])
    refuse_url(name, "keep")
    return Path(name)


def check_keep(inputs: Sequence[str], out: Path) -> None:
    """Reject a folder that is or holds an input, or is neither a store nor its work."""
    with explain_keep_in_errors():
        check_separate(inputs, out)
        if not (out / MANIFEST_NAME).exists():
            check_output_folder(out)


def find_abandoned_folder(before: str | None, keeping: "StreamStoreWriter | None") -> Path | None:
    """Return the previous ``keep`` folder if it is no longer used and holds no store."""
    if before is None:
        return None
    folder = Path(before)
    is_begun = (folder / WORK_NAME / STREAM_BATCHES_FOLDER / _BEGUN_FILE).exists()
    is_current = keeping is not None and keeping.out.resolve() == folder.resolve()
    return folder if is_begun and not (folder / MANIFEST_NAME).exists() and not is_current else None


@final
class StreamStoreWriter:
    """A store that grows while a stream is read; ``prepare`` completes it.

    A range group that a lane reads from its beginning to its end is cached. ``prepare`` does not read units again if
    all their range groups are cached; it reads the input of the others.
    """

    def __init__(
        self,
        out: Path,
        recipe: Recipe,
        listing: SourceListing,
        settings: RunSettings,
        units: Sequence[Unit],
        tokenizer: Tokenizer,
    ) -> None:
        with explain_keep_in_errors():
            RequestedJob(recipe, listing).find_finished_store(out, read_report(out))
        self.out = out
        self._recipe = recipe
        self._listing = listing
        self._settings = settings
        self._units = units
        self._tokenizer = tokenizer
        self._batches_folder = out / WORK_NAME / STREAM_BATCHES_FOLDER
        decided_by = collect_unit_settings(recipe, tokenizer, settings.constants)
        self._names = tuple(compute_unit_identity(unit, decided_by, listing.content) for unit in units)

    @property
    def finished(self) -> bool:
        """True if the store is finished."""
        return (self.out / MANIFEST_NAME).exists()

    def count_cached_units(self) -> int:
        units = self._batches_folder.with_name("units")
        return sum(
            (units / name).exists() or read_stream_batches(self._batches_folder / name) is not None
            for name in self._names
        )

    def keep(self, rank: int) -> CachedRanges | None:
        """Return the cache for a rank's range groups; None if the store is finished.

        Rank 0 begins the job; other ranks wait for it.
        """
        if self.finished:
            _LOG.info("%s is a finished store already: the stream does not write to it.", self.out)
            return None
        if rank == 0:
            with explain_keep_in_errors():
                self._begin()
        until = time.monotonic() + _WAIT_SECONDS
        while not (self._batches_folder / _BEGUN_FILE).exists() and time.monotonic() < until:
            # Records that are read before rank 0 has started the job would not be cached.
            time.sleep(_POLL_SECONDS)
        attempt = f"{time.time_ns():x}-{os.getpid()}-{rank}"
        return CachedRanges(self._batches_folder, self._names, attempt, self._batches_folder / _BEGUN_FILE)

    def _begin(self) -> None:
        with WorkFolder(self.out) as work:
            content = list(self._listing.content.values())
            job = make_job_identity(self._recipe, self._listing, self._settings.constants, content)
            begin_or_resume(work, self._recipe, job)
            if work.tokenizer_state() is None:
                work.keep_tokenizer(self._tokenizer)
            self._batches_folder.mkdir(exist_ok=True)
            write_file(self._batches_folder / _BEGUN_FILE, b"")

    def finish(self, listener: Listener, execution: ExecutionSettings) -> PrepareResult:
        """Complete the store; ``prepare`` reads all records that are not cached."""
        settings = replace(self._settings, execution=execution)
        with explain_keep_in_errors():
            return run_recipe(self._recipe, self.out, listener, settings=settings)
