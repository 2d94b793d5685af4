"""The work folder ``OUT/.work``: what is finished stays, and only one run is at work in it."""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self, TypeVar, final

import msgspec

from batchloom.core.document import BadRecord
from batchloom.core.errors import BatchloomError, StoreConflictError
from batchloom.core.files import (
    JSON_DECODE_ERRORS,
    describe_os_error,
    open_regular_file,
    read_regular_file,
)
from batchloom.core.locks import lock_exclusively
from batchloom.preparation.units.tasks import RecordPosition
from batchloom.preparation.units.unit_files import (
    BAD_NAME,
    DEDUP_COUNTS_NAME,
    FACTS_NAME,
    ROWS_NAME,
    SHARDS_NAME,
)
from batchloom.preparation.units.unit_report import UnitReport
from batchloom.preparation.units.units import Unit
from batchloom.store import MANIFEST_NAME, WORK_NAME, ShardEntry, wrap_write_errors, write_file
from batchloom.store.format import LOCK_NAME, TOKENIZER_NAME
from batchloom.store.write import make_folder, sync_folder

T = TypeVar("T")

# Records, each with the reason why it is not taken in hand.
ExcludedRecords = tuple[tuple[RecordPosition, str], ...]

# Inputs that can be read only once are kept here, each run's in a folder of its own.
SPOOL_NAME = "spool"
# Suffixes of keys, of what was found to stand twice, and of documents that go for being alike.
KEYS_SUFFIX, DUPLICATES_SUFFIX, DROPS_SUFFIX = ".keys", ".rows", ".drops"
# Of the temporary files; a job begun by another version is begun anew.
WORK_VERSION = 7


class PartCounts(msgspec.Struct, frozen=True):
    """What came of one part. ``hash`` is the XXH3-128 of its bytes after decompression.

    ``further`` counts what records gave beyond one document each.
    """

    start: int
    stop: int
    records: int
    documents: int
    tokens: int
    empty: int
    bad: int
    further: int
    dropped: dict[str, int]
    hash: str


class UnitFacts(msgspec.Struct, frozen=True):
    """``unit.json``: written when a unit's temporary files are complete.

    ``first_bad`` is the part and the first bad record in it;
    ``checksums`` the XXH3-128 of the token file of each subset; ``altered`` what a template does to
    conversations beside rendering them, and the source it was first seen in; ``report`` what the
    report tells of it.
    """

    parts: list[PartCounts]
    documents: int
    tokens: int
    first_bad: tuple[int, BadRecord] | None
    checksums: dict[str, str]
    altered: dict[str, str]
    report: UnitReport

    @property
    def counts(self) -> "UnitFacts":
        """The same without what the report tells: of very many units it is held by nobody."""
        return msgspec.structs.replace(self, report=UnitReport())


class PartDedupCounts(msgspec.Struct, frozen=True):
    """What is left of a part when duplicates are gone, and how many went by reason."""

    documents: int
    tokens: int
    dropped: dict[str, int] = {}


class UnitDedupCounts(msgspec.Struct, frozen=True):
    """``kept.json``: what is left of a unit when duplicates are gone.

    ``seen`` is how many of the documents that went have no tokens in the unit's files.
    ``smallest`` holds the few smallest distinct hashes of each subset, ``shards`` how many shards each
    subset fills as the shares of the subsets say, ``subsets`` its tokens; ``dropped`` is the number of documents
    that went; ``moved`` whether some stand in another subset than the shares say, as older generations decided.
    ``long`` counts documents (and pairs) longer than a shard may be, ``longest`` is the length of the longest of
    them, its part, its record and its offset.
    """

    parts: list[PartDedupCounts]
    documents: int
    tokens: int
    dropped: int
    smallest: dict[str, list[str]]
    shards: dict[str, int]
    moved: bool = False
    seen: int = 0
    subsets: dict[str, int] = {}
    long: int = 0
    longest: tuple[int, int, int, int] = (0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class TokenizedUnit:
    """A unit with the place of its temporary files, and what came of its first phase."""

    unit: Unit
    folder: Path
    facts: UnitFacts


class Decision(msgspec.Struct, frozen=True):
    """``decision.json``: what is decided over all units before shards are written.

    ``shards`` gives, for each unit and subset, the number of the unit's first shard and how many
    it has; ``moved`` names the units with documents in another subset than the shares say; ``tokens`` are those
    of each subset, with older generations.
    """

    overrides: dict[str, str]
    shards: list[dict[str, tuple[int, int]]]
    moved: list[int]
    tokens: dict[str, int]


class JobIdentity(msgspec.Struct, frozen=True):
    """``job.json``: what the work folder is for.

    Sources are (name, bytes, mtime in ns), ``kinds`` what each of them is read as, ``content`` the hash of
    each where they are told apart by it: then the times are 0. ``base`` is the generation that is appended to.
    """

    work_version: int
    recipe: dict[str, Any]
    constants: list[int]
    sources: list[tuple[str, int, int]]
    kinds: list[str] = []
    content: list[str] = []
    base: int = 0


@contextlib.contextmanager
def translate_read_errors(path: Path) -> Iterator[None]:
    """Turn what is wrong with a file (or folder) of a work folder into one sentence.

    Raises:
        StoreConflictError: in place of any OSError of the system, or of what is no JSON.
    """
    try:
        yield
    except BatchloomError:
        raise
    except (OSError, *JSON_DECODE_ERRORS) as error:
        why = describe_os_error(error) if isinstance(error, OSError) else error
        work = next(folder for folder in path.parents if folder.name == WORK_NAME)
        raise StoreConflictError(f"{path} cannot be read ({why}); delete {work} to begin anew.") from error


def attempt_folder(destination: Path, attempt: str) -> Path:
    """Where one attempt at a folder or a file works, so that no other one can be in its way."""
    return destination.with_name(f"{destination.name}.{attempt}")


def move_into_place(folder: Path, destination: Path) -> bool:
    """Give what an attempt has finished its place; whether no other one was first.

    Raises:
        OutputError: it cannot be moved.
    """
    first = True
    with wrap_write_errors(destination):
        try:
            folder.rename(destination)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            shutil.rmtree(folder)
            first = False
    sync_folder(destination.parent)
    return first


@contextlib.contextmanager
def open_attempt_file(destination: Path, attempt: str) -> Iterator[Path]:
    """A file of this attempt, which takes its place when all went well.

    Raises:
        OutputError: it cannot be moved.
    """
    make_folder(destination.parent)
    partial_path = attempt_folder(destination, attempt)
    yield partial_path
    with wrap_write_errors(destination):
        partial_path.replace(destination)


def read_unit_facts(folder: Path) -> UnitFacts | None:
    """What came of a unit; None where its first phase is not finished."""
    return _read_json(folder / FACTS_NAME, UnitFacts)


def read_unit_shards(folder: Path) -> dict[str, list[ShardEntry]] | None:
    """A unit's shards by subset; None where they are not written."""
    return _read_json(folder / SHARDS_NAME, dict[str, list[ShardEntry]])


def read_dedup_counts(folder: Path) -> UnitDedupCounts | None:
    """Return what is left of a unit without duplicates; None where that is not known."""
    return _read_json(folder / DEDUP_COUNTS_NAME, UnitDedupCounts)


def read_bad_records(folder: Path) -> Iterator[tuple[int, BadRecord]]:
    """Read the bad records of a unit, each with the number of its part."""
    path = folder / BAD_NAME
    with translate_read_errors(path), open_regular_file(path) as file:
        for line in file:
            yield msgspec.json.decode(line, type=tuple[int, BadRecord])


def _read_json(path: Path, kind: type[T]) -> T | None:
    with translate_read_errors(path):
        try:
            return msgspec.json.decode(read_regular_file(path), type=kind)
        except FileNotFoundError:
            return None


def _delete_folder(folder: Path) -> None:
    """Delete a folder that may be killed half-way: under its name it is whole or not there."""
    trash_folder = folder.with_name(f"{folder.name}.gone")
    if trash_folder.exists():
        shutil.rmtree(trash_folder)
    with contextlib.suppress(FileNotFoundError):
        folder.rename(trash_folder)
        shutil.rmtree(trash_folder)


@final
class WorkFolder:
    """The open and locked work folder of one job; use as a context manager.

    Attributes:
        path: ``OUT/.work``.
        store: where the finished store grows until it is moved to ``OUT`` as a whole.

    Raises:
        StoreConflictError: another run is at work in it.
        OutputError: it cannot be written.
    """

    def __init__(self, out: Path) -> None:
        self.out, self.path = out, out / WORK_NAME
        self.store = self.path / "store"
        self._made_out = not out.exists()
        make_folder(self.path)
        with wrap_write_errors(self.path):
            self._lock: IO[str] = (self.path / LOCK_NAME).open("a+")
        self._take_lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        # A job that failed before anything was finished leaves nothing behind.
        if not self._lock.closed and not self.has_results() and not self.has_learned_tokenizer():
            self.remove()
            if self._made_out:
                with contextlib.suppress(OSError):
                    self.out.rmdir()
        self._lock.close()

    def has_results(self) -> bool:
        """Whether anything in it is worth going on with."""
        finished = (f"units/*/{FACTS_NAME}", f"pieces/*{KEYS_SUFFIX}", "stretches/*")
        return self.complete or any(any(self.path.glob(pattern)) for pattern in finished)

    def has_learned_tokenizer(self) -> bool:
        """Whether it keeps a tokenizer that was learned from the inputs: to learn it again takes long."""
        try:
            job = self.job() if self.tokenizer_path.exists() else None
        except StoreConflictError:
            # Whoever asks for the job is told.
            return False
        # What is appended takes the tokenizer of its store.
        if job is None or job.base:
            return False
        return str(job.recipe.get("tokenizer")).startswith("train:")

    def _take_lock(self) -> None:
        def busy() -> str:
            self._lock.seek(0)
            owner = self._lock.read().strip() or "unknown"
            return f"Another run is preparing into {self.out} (process {owner}); wait for it, or choose another --out."

        try:
            lock_exclusively(
                self._lock.fileno(),
                self.path / "lock",
                busy=busy,
                ended=f"Another run into {self.out} has just ended; give the command again.",
                unable=lambda why: f"Cannot lock {self.path}: {why}; choose an --out on a file system with locks.",
            )
        except BaseException:
            self._lock.close()
            raise
        self._lock.truncate(0)
        self._lock.write(str(os.getpid()))
        self._lock.flush()

    def unit(self, identity: str) -> Path:
        """The folder of a unit's temporary files, named by what decides them."""
        return self.path / "units" / identity

    def resolution_folder(self, number: int) -> Path:
        """The folder of what is decided of a unit."""
        return self.path / "kept" / f"{number:05d}"

    def shards(self, number: int) -> Path:
        """The folder of a unit's shards, before they are moved into the store."""
        return self.path / "shards" / f"{number:05d}"

    def segment_keys_path(self, identity: str) -> Path:
        """The file of the keys of a unit's lines or paragraphs."""
        return self.path / "pieces" / f"{identity}{KEYS_SUFFIX}"

    @property
    def duplicates(self) -> Path:
        """The folder of what was found to stand twice."""
        return self.path / "duplicates"

    def follow(self, units: str) -> bool:
        """Delete what was found, decided and written of other units than these; whether any was decided.

        Units are named by all that decides their documents, what follows by their numbers alone.

        Args:
            units: the fingerprint of their names.

        Raises:
            OutputError: it cannot be deleted, or the units cannot be noted.
        """
        note = self.path / "followed"
        with wrap_write_errors(self.path):
            if note.exists() and read_regular_file(note) == units.encode():
                return False
            decided = any((self.path / "kept").glob("*"))
            self._drop_unusable()
            for name in ("store", "shards", "kept", "duplicates"):
                _delete_folder(self.path / name)
            (self.path / "decision.json").unlink(missing_ok=True)
        write_file(note, units.encode())
        return decided

    def sweep(self) -> None:
        """Delete what attempts have left that nobody finished, and what was on its way out."""
        for subfolder in ("", "units", "kept", "shards", "duplicates"):
            for path in (self.path / subfolder).glob("*.*"):
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
        for subfolder in ("pieces", "duplicates"):
            for path in (self.path / subfolder).rglob("*.*"):
                if path.suffix not in (KEYS_SUFFIX, DUPLICATES_SUFFIX, DROPS_SUFFIX):
                    with contextlib.suppress(OSError):
                        path.unlink()

    def job(self) -> JobIdentity | None:
        """What the folder is for; None where nothing was begun."""
        return _read_json(self.path / "job.json", JobIdentity)

    def begin(self, job: JobIdentity) -> None:
        """State what the folder is for."""
        write_file(self.path / "job.json", msgspec.json.encode(job))

    @property
    def tokenizer_path(self) -> Path:
        """The file that keeps the job's tokenizer."""
        return self.path / TOKENIZER_NAME

    def tokenizer_state(self) -> dict[str, Any] | None:
        """The state of the job's tokenizer; None where it is not chosen yet."""
        return _read_json(self.tokenizer_path, dict)

    def keep_tokenizer(self, state: dict[str, Any]) -> None:
        """Keep the tokenizer, so that a later run goes on with the same one."""
        write_file(self.tokenizer_path, msgspec.json.encode(state))

    def read_excluded(self) -> dict[str, ExcludedRecords]:
        """Records that are kept aside because workers die of them, by the identity of their units."""
        return _read_json(self.path / "excluded.json", dict[str, ExcludedRecords]) or {}

    def exclude(self, identity: str, excluded: ExcludedRecords) -> None:
        """Keep aside records of a unit, so that a later run does, too."""
        excluded_by_unit = {**self.read_excluded(), identity: excluded}
        write_file(self.path / "excluded.json", msgspec.json.encode(excluded_by_unit))

    def decision(self) -> Decision | None:
        """What was decided over all units; None where it was not."""
        return _read_json(self.path / "decision.json", Decision)

    def decide(self, decision: Decision) -> None:
        """Keep what was decided."""
        write_file(self.path / "decision.json", msgspec.json.encode(decision))

    @property
    def complete(self) -> bool:
        """Whether the whole store is written and only has to be moved."""
        return (self.store / MANIFEST_NAME).exists()

    def remove(self) -> None:
        """Delete the folder, at the end of the job; what stays is deleted by the next run."""
        with contextlib.suppress(OSError):
            for path in self.path.iterdir():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                elif path.name != LOCK_NAME:
                    path.unlink()
            # Last: whoever finds no lock begins.
            (self.path / LOCK_NAME).unlink()
            self.path.rmdir()
        self._lock.close()

    def clear(self, *, keep_units: bool = False) -> None:
        """Delete what is in the folder but the lock and the inputs that are kept.

        Args:
            keep_units: leave the units whose temporary files are all there.
        """
        with wrap_write_errors(self.path):
            self._drop_unusable()
            for path in self.path.iterdir():
                if path.name == SPOOL_NAME or (keep_units and path.name == "units"):
                    continue
                if path.is_dir():
                    _delete_folder(path)
                elif path.name != LOCK_NAME:
                    path.unlink()

    def _drop_unusable(self) -> None:
        """Delete units whose temporary files went when their shards were written, before these shards go."""
        for path in (self.path / "units").glob("*"):
            if not (path / ROWS_NAME).exists():
                _delete_folder(path)
