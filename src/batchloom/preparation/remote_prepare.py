"""``prepare`` into a store that lies elsewhere: made in a work folder of this machine, sent, the manifest last."""

import contextlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import msgspec
import xxhash

from batchloom.core.addresses import get_scheme, is_url, redact_url
from batchloom.core.errors import OutputError, StoreConflictError, StoreError
from batchloom.core.locks import lock_exclusively
from batchloom.core.synthetic_data import SyntheticSpec
from batchloom.preparation.remote_output import (
    OWNER_NAME,
    StoreOwner,
    StoreUploader,
    check_ownership,
    claim_folder,
    publish_store,
    read_remote_manifest,
    release_claim,
)
from batchloom.preparation.report import (
    Listener,
    Note,
    PrepareResult,
    Progress,
    make_result,
    parse_report,
    read_report,
    write_report_page,
)
from batchloom.preparation.request import PrepareRequest, list_inputs
from batchloom.preparation.rerun import (
    check_same_finished_job,
    find_finished_store,
    fingerprint_tokenizer_file,
    hash_sources,
    make_job_identity,
)
from batchloom.preparation.settings import Recipe
from batchloom.preparation.synthetic_run import (
    check_same_data,
    parse_synthetic_input,
    synthetic_to_plain,
    write_synthetic,
)
from batchloom.preparation.units import SPOOL_NAME, WORK_VERSION, JobIdentity
from batchloom.preparation.workers import RunSettings
from batchloom.remote import RemoteFile, RemoteFolder
from batchloom.sources import SourceListing
from batchloom.sources.files import Spool
from batchloom.store import (
    PAGE_NAME,
    REPORT_NAME,
    WORK_NAME,
    Manifest,
    wrap_write_errors,
    write_file,
)
from batchloom.store.write import make_folder

_UPLOADS_NAME, _STORE_NAME, _LOCK_NAME = "uploads.jsonl", "store", "lock"
_WORK_FILES = (_UPLOADS_NAME, _STORE_NAME, _LOCK_NAME)

# Makes the store of listed inputs in a folder of this machine.
StoreBuilder = Callable[[Recipe, Path, SourceListing, Spool, Listener, float], PrepareResult]


def default_work_folder(url: str) -> Path:
    """Where the store of a URL grows when nobody says where: a folder of its own below the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    name = xxhash.xxh3_64_hexdigest(redact_url(url).rstrip("/").encode())
    return Path(cache) / "batchloom" / "prepare" / name


def run_remote(
    chosen: PrepareRequest, url: str, listener: Listener, make: StoreBuilder, settings: RunSettings
) -> PrepareResult:
    """Carry out a recipe into a folder elsewhere; see :func:`batchloom.prepare`.

    Args:
        chosen: what to do, and where that comes from.
        url: the folder.
        listener: is told of notes and progress.
        make: makes the store on this machine.
        settings: how the job is run.
    """
    began, recipe = time.perf_counter(), chosen.recipe
    folder = settings.work or default_work_folder(url)
    check_remote_separate(recipe.inputs, url)
    with RemoteFolder(url) as far, _lock_work_folder(folder):
        files = far.files(first=True)
        with (
            _release_on_failure(far, folder / _STORE_NAME) as claimed,
            _open_spool(folder) as spool,
        ):
            manifest = read_remote_manifest(far, files)
            task = _plan_remote_build(
                chosen, folder, spool, settings, finished=manifest is not None
            )
            task.begin(far, files, manifest, restart=settings.restart)
            if manifest is not None:
                _delete_leftovers(far, files, folder)
                seconds = time.perf_counter() - began
                return make_result(far.shown, manifest, seconds=seconds, already_done=True)
            claimed.append(task.owner)
            if settings.restart:
                task.delete_previous_work()
            note = (
                f"{far.shown} is made in {folder} and sent from there; that folder goes when the store is whole "
                "(--work names another)."
            )
            listener(Note(note))
            far.end_uploads()
            made = task.make(make, spool, listener, began)
        if settings.dry_run:
            return replace(made, path=far.shown, notes=(note, *made.notes))
        _record_location(folder / _STORE_NAME, far.shown)
        # Hours may have passed, and not every store keeps two jobs apart that begin together.
        files = far.files()
        manifest = read_remote_manifest(far, files)
        task.begin(far, files, manifest)
        if manifest is None:
            uploads = StoreUploader(far, files, folder / _UPLOADS_NAME)
            publish_store(
                task.store, uploads, _make_upload_listener(made, listener), partial(task.go_on, far)
            )
        _delete_leftovers(far, {**files, OWNER_NAME: RemoteFile(0, "")}, folder)
    return replace(
        made,
        path=far.shown,
        seconds=time.perf_counter() - began,
        already_done=False,
        notes=(note, *made.notes),
    )


def _open_spool(folder: Path) -> Spool:
    return Spool(folder / _STORE_NAME / WORK_NAME / SPOOL_NAME)


@contextlib.contextmanager
def _release_on_failure(far: RemoteFolder, store: Path) -> Iterator[list[StoreOwner]]:
    """Leave nothing there of a job that failed before anything was finished; gives where it is noted that it began."""
    claimed: list[StoreOwner] = []
    try:
        yield claimed
    except BaseException:
        if claimed and not store.exists():
            with contextlib.suppress(OutputError):
                release_claim(far, claimed[0])
        raise


@dataclass(frozen=True, slots=True)
class _RemoteBuild:
    """What is to be made on this machine, of inputs or of synthetic data."""

    recipe: Recipe
    store: Path
    owner: StoreOwner
    of: SourceListing | SyntheticSpec
    kept: Mapping[str, Any] | None = None
    hashed: bool = False

    def begin(
        self,
        far: RemoteFolder,
        files: dict[str, RemoteFile],
        manifest: Manifest | None,
        *,
        restart: bool = False,
    ) -> None:
        """Make a folder elsewhere this job's, or make sure that what is finished there is.

        Args:
            far: the folder.
            files: what lies there.
            manifest: of the finished store there; None where there is none.
            restart: whether unfinished work of another job gives way.

        Raises:
            StoreConflictError: it is another job's, or holds something else.
        """
        if manifest is None:
            claim_folder(far, files, self.owner, self._own_recipe, restart=restart)
        else:
            self._refuse_other(far, manifest)

    def go_on(self, far: RemoteFolder) -> None:
        """Make sure that the folder elsewhere is this job's still.

        Raises:
            StoreConflictError: it is another job's now.
        """
        check_ownership(far, self.owner, self._own_recipe)

    def delete_previous_work(self) -> None:
        """Delete the store of another job that was made here and not sent; of unfinished work the same units stay."""
        if isinstance(self.of, SyntheticSpec):
            shutil.rmtree(self.store, ignore_errors=True)
            return
        try:
            report = read_report(self.store)
            find_finished_store(
                self.store, self.recipe, self.of, report, self.kept, hashed=self.hashed
            )
        except StoreError:
            with wrap_write_errors(self.store):
                for path in self.store.iterdir():
                    # Inputs that can be read only once lie there.
                    if path.name == WORK_NAME:
                        continue
                    if path.is_dir():
                        shutil.rmtree(path)
                    else:
                        path.unlink()

    @property
    def _own_recipe(self) -> Recipe | None:
        """The recipe, where it has a tokenizer of its own."""
        return self.recipe if isinstance(self.of, SourceListing) else None

    def _refuse_other(self, far: RemoteFolder, manifest: Manifest) -> None:
        if isinstance(self.of, SyntheticSpec):
            check_same_data(far.shown, manifest, self.owner.job.recipe)
            return
        report = parse_report(far.read(REPORT_NAME) or b"")
        check_same_finished_job(
            far.shown, manifest, report, self.recipe, self.of, self.kept, hashed=self.hashed
        )

    def make(
        self, make: StoreBuilder, spool: Spool, listener: Listener, began: float
    ) -> PrepareResult:
        """Make the store on this machine."""
        if isinstance(self.of, SyntheticSpec):
            return write_synthetic(self.of, self.recipe, self.store, listener)
        return make(self.recipe, self.store, self.of, spool, listener, began)


def _plan_remote_build(
    chosen: PrepareRequest, folder: Path, spool: Spool, settings: RunSettings, *, finished: bool
) -> _RemoteBuild:
    """What is to be made; ``finished``: whether a store is there already, and nothing is to be claimed."""
    recipe, store = chosen.recipe, folder / _STORE_NAME
    if made_up := parse_synthetic_input(recipe.inputs):
        plain = synthetic_to_plain(made_up, recipe)
        return _RemoteBuild(
            recipe, store, StoreOwner(JobIdentity(WORK_VERSION, plain, [], [])), made_up
        )
    listing = list_inputs(recipe, spool, exclude=folder, streaming=settings.streaming)
    listing = replace(listing, notes=(*chosen.initial_notes, *listing.notes))
    if settings.hash_inputs and not finished:
        listing = replace(listing, content=hash_sources(listing.sources))
    facts = make_job_identity(recipe, listing, [], list(listing.content.values()))
    owner = StoreOwner(facts, fingerprint_tokenizer_file(recipe))
    return _RemoteBuild(recipe, store, owner, listing, chosen.kept, settings.hash_inputs)


def check_remote_separate(inputs: Sequence[str], url: str) -> None:
    """Refuse an output elsewhere that lies in an input, or an input that lies in it.

    Raises:
        StoreConflictError: names the input.
    """
    out = _normalize_url(url)
    for given in inputs:
        if not is_url(given):
            continue
        place = _normalize_url(given)
        fixed = re.split(r"[*?\[]", place, maxsplit=1)[0]
        if fixed != place:
            fixed = fixed.rpartition("/")[0]
        if f"{place}/".startswith(f"{out}/"):
            raise StoreConflictError(
                f"The input {redact_url(given)} lies inside --out {redact_url(url)}, where only the store may lie; "
                f"choose "
                "another --out."
            )
        if f"{out}/".startswith(f"{fixed}/") and (fixed == place or "**" in place):
            raise StoreConflictError(
                f"--out {redact_url(url)} lies inside the input {redact_url(given)}, where it would be read; "
                f"choose another "
                "--out, beside it."
            )


def _normalize_url(url: str) -> str:
    scheme = get_scheme(url)
    usual = {"s3a": "s3", "gcs": "gs"}.get(scheme, scheme)
    return usual + redact_url(url)[len(scheme) :].rstrip("/")


def _make_upload_listener(
    made: PrepareResult, listener: Listener
) -> Callable[[int, int, int], None]:
    """What tells how far sending is: of bytes that lie there, all bytes, and those that were found there."""
    counts = made.counts

    def tell(done: int, total: int, found: int) -> None:
        listener(
            Progress(
                "upload", done, total, found, counts.documents, counts.tokens, counts.quarantined
            )
        )

    return tell


def _record_location(store: Path, place: str) -> None:
    """Have the sidecar and its page say where the store lies, not where it was made."""
    plain = msgspec.json.decode((store / REPORT_NAME).read_bytes())
    if plain.get("out") == place:
        return
    facts = read_report(store)
    if facts is not None and (store / PAGE_NAME).exists():
        write_report_page(msgspec.structs.replace(facts, out=place), store / PAGE_NAME)
    # Last: by it a later run tells that both are as they should be.
    named = msgspec.json.encode({**plain, "out": place})
    write_file(store / REPORT_NAME, msgspec.json.format(named, indent=1) + b"\n")


def _delete_leftovers(far: RemoteFolder, files: dict[str, RemoteFile], folder: Path) -> None:
    """Delete what a finished job needs no longer, there and here."""
    if OWNER_NAME in files:
        far.delete(OWNER_NAME)
    shutil.rmtree(folder / _STORE_NAME, ignore_errors=True)
    with contextlib.suppress(OSError):
        (folder / _UPLOADS_NAME).unlink(missing_ok=True)


@contextlib.contextmanager
def _lock_work_folder(folder: Path) -> Iterator[None]:
    """Hold a work folder, which goes afterwards where nothing is left in it.

    Raises:
        StoreConflictError: another run is at work in it, or it holds something else.
        OutputError: it cannot be written.
    """
    there = folder.exists()
    with wrap_write_errors(folder):
        strange = sorted(path.name for path in folder.iterdir()) if there else []
    if strange := [name for name in strange if name not in _WORK_FILES]:
        raise StoreConflictError(
            f"The work folder {folder} holds something else ({strange[0]}); choose another --work."
        )
    make_folder(folder)
    path = folder / _LOCK_NAME
    with wrap_write_errors(path):
        lock = path.open("a")
    with lock:
        _acquire_lock(lock, folder)
        try:
            yield
        finally:
            if not any((folder / name).exists() for name in (_STORE_NAME, _UPLOADS_NAME)):
                # While it is held, so that nobody begins in it.
                with contextlib.suppress(OSError):
                    path.unlink()
                    if not there:
                        folder.rmdir()


def _acquire_lock(lock: IO[str], folder: Path) -> None:
    lock_exclusively(
        lock.fileno(),
        folder / _LOCK_NAME,
        busy=lambda: f"Another run is at work in {folder}; wait for it, or choose another --work.",
        ended=f"Another run in {folder} has just ended; give the command again.",
        unable=lambda why: (
            f"Cannot lock {folder}: {why}; choose a --work on a file system with locks."
        ),
    )
