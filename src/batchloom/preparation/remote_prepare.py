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

from batchloom.core.addresses import is_url, scheme_of, shown
from batchloom.core.errors import OutputError, StoreConflictError, StoreError
from batchloom.core.locks import lock_alone
from batchloom.core.synthetic_data import SyntheticSpec
from batchloom.preparation.remote_output import (
    OWNER_NAME,
    Owner,
    Uploads,
    claim,
    far_manifest,
    give_back,
    publish,
    still_ours,
)
from batchloom.preparation.report import (
    Listener,
    Note,
    PrepareResult,
    Progress,
    facts_of,
    read_facts,
    result_of,
    write_report_page,
)
from batchloom.preparation.request import Chosen, list_inputs
from batchloom.preparation.rerun import (
    content_hashes,
    file_fingerprint,
    finished_store,
    job_facts,
    refuse_other_job,
)
from batchloom.preparation.settings import Recipe
from batchloom.preparation.synthetic_run import (
    refuse_other_data,
    synthetic_input,
    synthetic_plain,
    write_synthetic,
)
from batchloom.preparation.units import SPOOL_NAME, WORK_VERSION, JobFacts
from batchloom.preparation.workers import RunSettings
from batchloom.remote import FarFile, FarFolder
from batchloom.sources import Listing
from batchloom.sources.files import Spool
from batchloom.store import PAGE_NAME, REPORT_NAME, WORK_NAME, Manifest, write_file, writing
from batchloom.store.write import make_folder

_UPLOADS_NAME, _STORE_NAME, _LOCK_NAME = "uploads.jsonl", "store", "lock"
_OURS = (_UPLOADS_NAME, _STORE_NAME, _LOCK_NAME)

# Makes the store of listed inputs in a folder of this machine.
Make = Callable[[Recipe, Path, Listing, Spool, Listener, float], PrepareResult]


def usual_work(url: str) -> Path:
    """Where the store of a URL grows when nobody says where: a folder of its own below the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    name = xxhash.xxh3_64_hexdigest(shown(url).rstrip("/").encode())
    return Path(cache) / "batchloom" / "prepare" / name


def run_far(
    chosen: Chosen, url: str, listener: Listener, make: Make, settings: RunSettings
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
    folder = settings.work or usual_work(url)
    check_apart_far(recipe.inputs, url)
    with FarFolder(url) as far, _alone(folder):
        files = far.files(first=True)
        with _given_back(far, folder / _STORE_NAME) as claimed, _spool(folder) as spool:
            manifest = far_manifest(far, files)
            task = _task(chosen, folder, spool, settings, finished=manifest is not None)
            task.begin(far, files, manifest, restart=settings.restart)
            if manifest is not None:
                _tidy(far, files, folder)
                seconds = time.perf_counter() - began
                return result_of(far.shown, manifest, seconds=seconds, already_done=True)
            claimed.append(task.owner)
            if settings.restart:
                task.make_way()
            note = (
                f"{far.shown} is made in {folder} and sent from there; that folder goes when the store is whole "
                "(--work names another)."
            )
            listener(Note(note))
            far.end_uploads()
            made = task.make(make, spool, listener, began)
        if settings.dry_run:
            return replace(made, path=far.shown, notes=(note, *made.notes))
        _name_place(folder / _STORE_NAME, far.shown)
        # Hours may have passed, and not every store keeps two jobs apart that begin together.
        files = far.files()
        manifest = far_manifest(far, files)
        task.begin(far, files, manifest)
        if manifest is None:
            uploads = Uploads(far, files, folder / _UPLOADS_NAME)
            publish(task.store, uploads, _telling(made, listener), partial(task.go_on, far))
        _tidy(far, {**files, OWNER_NAME: FarFile(0, "")}, folder)
    return replace(
        made,
        path=far.shown,
        seconds=time.perf_counter() - began,
        already_done=False,
        notes=(note, *made.notes),
    )


def _spool(folder: Path) -> Spool:
    return Spool(folder / _STORE_NAME / WORK_NAME / SPOOL_NAME)


@contextlib.contextmanager
def _given_back(far: FarFolder, store: Path) -> Iterator[list[Owner]]:
    """Leave nothing there of a job that failed before anything was finished; gives where it is noted that it began."""
    claimed: list[Owner] = []
    try:
        yield claimed
    except BaseException:
        if claimed and not store.exists():
            with contextlib.suppress(OutputError):
                give_back(far, claimed[0])
        raise


@dataclass(frozen=True, slots=True)
class _Task:
    """What is to be made on this machine, of inputs or of synthetic data."""

    recipe: Recipe
    store: Path
    owner: Owner
    of: Listing | SyntheticSpec
    kept: Mapping[str, Any] | None = None
    hashed: bool = False

    def begin(
        self,
        far: FarFolder,
        files: dict[str, FarFile],
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
            claim(far, files, self.owner, self._own_recipe, restart=restart)
        else:
            self._refuse_other(far, manifest)

    def go_on(self, far: FarFolder) -> None:
        """Make sure that the folder elsewhere is this job's still.

        Raises:
            StoreConflictError: it is another job's now.
        """
        still_ours(far, self.owner, self._own_recipe)

    def make_way(self) -> None:
        """Delete the store of another job that was made here and not sent; of unfinished work the same units stay."""
        if isinstance(self.of, SyntheticSpec):
            shutil.rmtree(self.store, ignore_errors=True)
            return
        try:
            report = read_facts(self.store)
            finished_store(self.store, self.recipe, self.of, report, self.kept, hashed=self.hashed)
        except StoreError:
            with writing(self.store):
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
        return self.recipe if isinstance(self.of, Listing) else None

    def _refuse_other(self, far: FarFolder, manifest: Manifest) -> None:
        if isinstance(self.of, SyntheticSpec):
            refuse_other_data(far.shown, manifest, self.owner.job.recipe)
            return
        report = facts_of(far.read(REPORT_NAME) or b"")
        refuse_other_job(
            far.shown, manifest, report, self.recipe, self.of, self.kept, hashed=self.hashed
        )

    def make(self, make: Make, spool: Spool, listener: Listener, began: float) -> PrepareResult:
        """Make the store on this machine."""
        if isinstance(self.of, SyntheticSpec):
            return write_synthetic(self.of, self.recipe, self.store, listener)
        return make(self.recipe, self.store, self.of, spool, listener, began)


def _task(
    chosen: Chosen, folder: Path, spool: Spool, settings: RunSettings, *, finished: bool
) -> _Task:
    """What is to be made; ``finished``: whether a store is there already, and nothing is to be claimed."""
    recipe, store = chosen.recipe, folder / _STORE_NAME
    if made_up := synthetic_input(recipe.inputs):
        plain = synthetic_plain(made_up, recipe)
        return _Task(recipe, store, Owner(JobFacts(WORK_VERSION, plain, [], [])), made_up)
    listing = list_inputs(recipe, spool, exclude=folder, streaming=settings.streaming)
    listing = replace(listing, notes=(*chosen.announced, *listing.notes))
    if settings.hash_inputs and not finished:
        listing = replace(listing, content=content_hashes(listing.sources))
    facts = job_facts(recipe, listing, [], list(listing.content.values()))
    owner = Owner(facts, file_fingerprint(recipe))
    return _Task(recipe, store, owner, listing, chosen.kept, settings.hash_inputs)


def check_apart_far(inputs: Sequence[str], url: str) -> None:
    """Refuse an output elsewhere that lies in an input, or an input that lies in it.

    Raises:
        StoreConflictError: names the input.
    """
    out = _plain_place(url)
    for given in inputs:
        if not is_url(given):
            continue
        place = _plain_place(given)
        fixed = re.split(r"[*?\[]", place, maxsplit=1)[0]
        if fixed != place:
            fixed = fixed.rpartition("/")[0]
        if f"{place}/".startswith(f"{out}/"):
            raise StoreConflictError(
                f"The input {shown(given)} lies inside --out {shown(url)}, where only the store may lie; choose "
                "another --out."
            )
        if f"{out}/".startswith(f"{fixed}/") and (fixed == place or "**" in place):
            raise StoreConflictError(
                f"--out {shown(url)} lies inside the input {shown(given)}, where it would be read; choose another "
                "--out, beside it."
            )


def _plain_place(url: str) -> str:
    scheme = scheme_of(url)
    usual = {"s3a": "s3", "gcs": "gs"}.get(scheme, scheme)
    return usual + shown(url)[len(scheme) :].rstrip("/")


def _telling(made: PrepareResult, listener: Listener) -> Callable[[int, int, int], None]:
    """What tells how far sending is: of bytes that lie there, all bytes, and those that were found there."""
    counts = made.counts

    def tell(done: int, total: int, found: int) -> None:
        listener(
            Progress(
                "upload", done, total, found, counts.documents, counts.tokens, counts.quarantined
            )
        )

    return tell


def _name_place(store: Path, place: str) -> None:
    """Have the sidecar and its page say where the store lies, not where it was made."""
    plain = msgspec.json.decode((store / REPORT_NAME).read_bytes())
    if plain.get("out") == place:
        return
    facts = read_facts(store)
    if facts is not None and (store / PAGE_NAME).exists():
        write_report_page(msgspec.structs.replace(facts, out=place), store / PAGE_NAME)
    # Last: by it a later run tells that both are as they should be.
    named = msgspec.json.encode({**plain, "out": place})
    write_file(store / REPORT_NAME, msgspec.json.format(named, indent=1) + b"\n")


def _tidy(far: FarFolder, files: dict[str, FarFile], folder: Path) -> None:
    """Delete what a finished job needs no longer, there and here."""
    if OWNER_NAME in files:
        far.delete(OWNER_NAME)
    shutil.rmtree(folder / _STORE_NAME, ignore_errors=True)
    with contextlib.suppress(OSError):
        (folder / _UPLOADS_NAME).unlink(missing_ok=True)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold a work folder, which goes afterwards where nothing is left in it.

    Raises:
        StoreConflictError: another run is at work in it, or it holds something else.
        OutputError: it cannot be written.
    """
    there = folder.exists()
    with writing(folder):
        strange = sorted(path.name for path in folder.iterdir()) if there else []
    if strange := [name for name in strange if name not in _OURS]:
        raise StoreConflictError(
            f"The work folder {folder} holds something else ({strange[0]}); choose another --work."
        )
    make_folder(folder)
    path = folder / _LOCK_NAME
    with writing(path):
        lock = path.open("a")
    with lock:
        _lock(lock, folder)
        try:
            yield
        finally:
            if not any((folder / name).exists() for name in (_STORE_NAME, _UPLOADS_NAME)):
                # While it is held, so that nobody begins in it.
                with contextlib.suppress(OSError):
                    path.unlink()
                    if not there:
                        folder.rmdir()


def _lock(lock: IO[str], folder: Path) -> None:
    lock_alone(
        lock.fileno(),
        folder / _LOCK_NAME,
        busy=lambda: f"Another run is at work in {folder}; wait for it, or choose another --work.",
        ended=f"Another run in {folder} has just ended; give the command again.",
        unable=lambda why: (
            f"Cannot lock {folder}: {why}; choose a --work on a file system with locks."
        ),
    )
