"""Work folder ``OUT/.work``, which keeps finished work and is locked by one run."""

import contextlib
import errno
import logging
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self, TypeVar, final

import msgspec

from batchloom.core.document import BadRecord
from batchloom.core.errors import BatchloomError, StoreConflictError
from batchloom.core.files import (
    JSON_DECODE_ERRORS,
    PARTIAL_SUFFIX,
    describe_os_error,
    lock_exclusively,
    open_regular_file,
    read_regular_file,
)
from batchloom.core.fingerprint import fingerprint
from batchloom.preparation.units.unit_report import UnitReport
from batchloom.preparation.units.units import RecordPosition, Unit
from batchloom.store import MANIFEST_NAME, WORK_NAME, ShardEntry, wrap_write_errors, write_file
from batchloom.store.format import LOCK_NAME, TOKENIZER_NAME
from batchloom.store.write import make_folder, sync_folder
from batchloom.tokens import Tokenizer, encode_state

T = TypeVar("T")

_LOG = logging.getLogger("batchloom")

# Excluded records, each with the reason.
ExcludedRecords = tuple[tuple[RecordPosition, str], ...]

# Files of a unit.
ROWS_NAME = "documents.rows"
# Hash and number of each document, for the duplicate search.
KEYS_NAME = "documents.keys"
SIGNATURES_NAME = "documents.bands"
BAD_NAME = "bad.jsonl"
FACTS_NAME = "unit.json"
DEDUP_COUNTS_NAME = "kept.json"
DROPPED_NAME = "dropped.rows"
SHARDS_NAME = "shards.json"
# Files of the job.
DECISION_NAME = "decision.json"
EXCLUDED_NAME = "excluded.json"
# Folder of inputs that can be read only once, with one subfolder per run.
SPOOL_NAME = "spool"
# Suffixes of keys, of duplicates, and of documents dropped as near duplicates.
KEYS_SUFFIX = ".keys"
DUPLICATES_SUFFIX = ".rows"
DROPS_SUFFIX = ".drops"
# Version of the temporary files; a job of another version starts over.
WORK_VERSION = 12
_ENCODED_SOURCES = 1 << 14


class PartCounts(msgspec.Struct):
    """Counts of one part; ``hash`` is the XXH3-128 of its decompressed bytes.

    ``further`` counts documents beyond the first of each record, ``truncated`` records whose documents were cut.
    ``damage`` says why a file is left out: it is damaged, or all its records are bad.
    """

    start: int = 0
    stop: int = 0
    records: int = 0
    documents: int = 0
    tokens: int = 0
    empty: int = 0
    bad: int = 0
    further: int = 0
    truncated: int = 0
    dropped: dict[str, int] = {}
    hash: str = ""
    damage: str = ""

    def count_dropped(self, reason: str, count: int = 1) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + count


class Alteration(msgspec.Struct, frozen=True):
    """Number of records with a change by the template, and the first of them.

    ``part`` is the number of its part in the unit, ``record`` its index in that part, ``offset`` its byte offset.
    """

    count: int
    part: int
    record: int
    offset: int

    def add(self, later: "Alteration") -> "Alteration":
        """Return the sum with the same change in later records."""
        return msgspec.structs.replace(self, count=self.count + later.count)


class UnitFacts(msgspec.Struct, frozen=True):
    """``unit.json``: facts of a unit, written when its temporary files are complete.

    ``first_bad`` is the first bad record and its part; ``checksums`` the XXH3-128 of the token file of each subset;
    ``altered`` maps each change that the template makes to conversations to their number and the first of them;
    ``report`` holds the statistics.
    """

    parts: list[PartCounts]
    documents: int
    tokens: int
    first_bad: tuple[int, BadRecord] | None
    checksums: dict[str, str]
    altered: dict[str, Alteration]
    report: UnitReport

    @property
    def counts(self) -> "UnitFacts":
        """The facts without the report, which would take too much memory for many units."""
        return msgspec.structs.replace(self, report=UnitReport())


class PartDedupCounts(msgspec.Struct, frozen=True):
    """Remaining documents of a part after deduplication, and drops by reason."""

    documents: int
    tokens: int
    dropped: dict[str, int] = {}


class UnitDedupCounts(msgspec.Struct, frozen=True):
    """``kept.json``: remaining documents of a unit after deduplication.

    ``dropped`` counts dropped documents, ``seen`` those of them without tokens in the unit's files.
    ``smallest`` holds the few smallest distinct hashes of each subset, ``shards`` the number of shards of each
    subset by the shares, ``subsets`` its tokens; ``moved`` tells whether overrides of earlier generations move
    any document. ``long`` counts documents (and pairs) longer than a shard; ``longest`` is (tokens, part, record,
    offset) of the longest.
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
    """Unit with the folder of its temporary files, and its facts."""

    unit: Unit
    folder: Path
    facts: UnitFacts


class Decision(msgspec.Struct, frozen=True):
    """``decision.json``: subset overrides and shard numbers, decided over all units.

    ``shards`` gives, for each unit and subset, the number of the unit's first shard and the number of its shards;
    ``moved`` lists the units with documents whose subset differs from the shares; ``tokens`` are those of each
    subset, including earlier generations.
    """

    overrides: dict[str, str]
    shards: list[dict[str, tuple[int, int]]]
    moved: list[int]
    tokens: dict[str, int]


class JobIdentity(msgspec.Struct, frozen=True):
    """``job.json``: identity of the job in the work folder.

    Sources are (name, bytes, mtime in ns), ``kinds`` the format of each, ``content`` its content hash if sources
    are identified by content (the times are then 0). ``base`` is the generation that is appended to.
    """

    work_version: int
    recipe: dict[str, Any]
    constants: list[int]
    sources: Sequence[tuple[str, int, int]]
    kinds: list[str] = []
    content: list[str] = []
    base: int = 0


def _encode_job(job: JobIdentity) -> bytes:
    """Encode a job, its sources in groups.

    All of a million as objects would take 300 MB.
    """
    encoded_sources = bytearray()
    for start in range(0, len(job.sources), _ENCODED_SOURCES):
        encoded_sources += b"," if start else b""
        encoded_sources += msgspec.json.encode(job.sources[start : start + _ENCODED_SOURCES])[1:-1]
    raw_sources = msgspec.Raw(b"[" + encoded_sources + b"]")
    return msgspec.json.encode(msgspec.structs.replace(job, sources=raw_sources))


@contextlib.contextmanager
def translate_read_errors(path: Path) -> Iterator[None]:
    """Translate read errors of a work folder's file into a readable error."""
    try:
        yield
    except BatchloomError:
        raise
    except (OSError, *JSON_DECODE_ERRORS) as error:
        why = describe_os_error(error) if isinstance(error, OSError) else error
        work = next((folder for folder in path.parents if folder.name == WORK_NAME), path)
        raise StoreConflictError(f"{path} cannot be read ({why}); delete {work} to start over.") from error


def attempt_folder(destination: Path, attempt: str) -> Path:
    """Return the path of one attempt's folder or file, which no other attempt uses."""
    return destination.with_name(f"{destination.name}.{attempt}")


def move_into_place(folder: Path, destination: Path) -> bool:
    """Move a finished attempt into place; False if another attempt was first."""
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


def move_files(folder: Path, target: Path) -> None:
    """Move the complete files of a folder, except for a manifest; safe to repeat."""
    with wrap_write_errors(target), os.scandir(folder) as scan:
        for entry in sorted(scan, key=lambda entry: entry.name):
            if entry.is_file() and entry.name != MANIFEST_NAME and not entry.name.endswith(PARTIAL_SUFFIX):
                Path(entry.path).replace(target / entry.name)
    sync_folder(target)


@contextlib.contextmanager
def open_attempt_file(destination: Path, attempt: str) -> Iterator[Path]:
    """Yield the path of this attempt's file, and move it into place on success."""
    make_folder(destination.parent)
    partial_path = attempt_folder(destination, attempt)
    yield partial_path
    with wrap_write_errors(destination):
        partial_path.replace(destination)


def read_unit_facts(folder: Path) -> UnitFacts | None:
    """Read the facts of a unit; None if it is not tokenized yet."""
    return read_json(folder / FACTS_NAME, UnitFacts)


def read_unit_shards(folder: Path) -> dict[str, list[ShardEntry]] | None:
    """Read a unit's shards by subset; None if they are not written yet."""
    return read_json(folder / SHARDS_NAME, dict[str, list[ShardEntry]])


def read_dedup_counts(folder: Path) -> UnitDedupCounts | None:
    """Read the dedup counts of a unit; None if its duplicates are not resolved yet."""
    return read_json(folder / DEDUP_COUNTS_NAME, UnitDedupCounts)


def read_bad_records(folder: Path) -> Iterator[tuple[int, BadRecord]]:
    """Read the bad records of a unit, each with the number of its part."""
    path = folder / BAD_NAME
    with translate_read_errors(path), open_regular_file(path) as file:
        for line in file:
            yield msgspec.json.decode(line, type=tuple[int, BadRecord])


def read_json(path: Path, kind: type[T]) -> T | None:
    """Read a file of a work folder; None if it does not exist."""
    with translate_read_errors(path):
        try:
            return msgspec.json.decode(read_regular_file(path), type=kind)
        except FileNotFoundError:
            return None


def _delete_folder(folder: Path) -> None:
    """Delete a folder so that a kill never leaves a partial one under its name."""
    trash_folder = folder.with_name(f"{folder.name}.gone")
    if trash_folder.exists():
        shutil.rmtree(trash_folder)
    with contextlib.suppress(FileNotFoundError):
        folder.rename(trash_folder)
        shutil.rmtree(trash_folder)


@final
class WorkFolder:
    """Open and locked work folder of one job; use as a context manager.

    Attributes:
        path: ``OUT/.work``.
        store: work store, which is moved to ``OUT`` when complete.
        duplicates: folder of the search for duplicates.
        tokenizer_path: file of the job's tokenizer.
        attempt: suffix that keeps the unfinished files of this run apart from those of other runs.

    Raises:
        StoreConflictError: another run uses the folder.
        OutputError: the folder cannot be written.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.path = out / WORK_NAME
        self.store = self.path / "store"
        self.duplicates = self.path / "duplicates"
        self.tokenizer_path = self.path / TOKENIZER_NAME
        # Unique per run, so that leftovers of an earlier run never collide.
        self.attempt = f"{time.time_ns():x}"
        self._made_out = not out.exists()
        make_folder(self.path)
        with wrap_write_errors(self.path):
            self._lock: IO[str] = (self.path / LOCK_NAME).open("a+")
        self._take_lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        # A job that fails before any result leaves no folder behind.
        if not self._lock.closed and not self.has_results() and not has_learned_tokenizer(self):
            self.remove()
            if self._made_out:
                with contextlib.suppress(OSError):
                    self.out.rmdir()
        self._lock.close()

    def has_results(self) -> bool:
        """Return whether it holds results worth resuming."""
        finished = (f"units/*/{FACTS_NAME}", f"pieces/*{KEYS_SUFFIX}", "stretches/*")
        return self.complete or any(any(self.path.glob(pattern)) for pattern in finished)

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
        return self.path / "units" / identity

    def resolution_folder(self, number: int) -> Path:
        return self.path / "kept" / f"{number:05d}"

    def shards(self, number: int) -> Path:
        return self.path / "shards" / f"{number:05d}"

    def segment_keys_path(self, identity: str) -> Path:
        return self.path / "pieces" / f"{identity}{KEYS_SUFFIX}"

    def follow(self, names: Sequence[str]) -> bool:
        """Delete all later results if other units made them; return whether any existed.

        Units are named after everything that decides their documents, later results only by unit number.
        """
        units = fingerprint(names)
        note = self.path / "followed"
        with wrap_write_errors(self.path):
            if note.exists() and read_regular_file(note) == units.encode():
                return False
            decided = any((self.path / "kept").glob("*"))
            self._drop_unusable()
            for name in ("store", "shards", "kept", "duplicates"):
                _delete_folder(self.path / name)
            (self.path / DECISION_NAME).unlink(missing_ok=True)
        write_file(note, units.encode())
        return decided

    def sweep(self) -> None:
        """Delete the leftovers of unfinished attempts and interrupted deletions."""
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
        return read_json(self.path / "job.json", JobIdentity)

    def begin(self, job: JobIdentity) -> None:
        write_file(self.path / "job.json", _encode_job(job))

    def tokenizer_state(self) -> dict[str, Any] | None:
        """Return the state of the job's tokenizer; None if it is not chosen yet."""
        return read_json(self.tokenizer_path, dict)

    def keep_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Store the tokenizer, so that a resumed run uses the same one."""
        write_file(self.tokenizer_path, encode_state(tokenizer))

    @property
    def complete(self) -> bool:
        """True if the complete store is written and only has to be moved."""
        return (self.store / MANIFEST_NAME).exists()

    def remove(self) -> None:
        """Delete the folder at the end of the job; warn of what stays."""
        try:
            for path in self.path.iterdir():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                elif path.name != LOCK_NAME:
                    path.unlink()
            # The lock file goes last: a run that finds none starts.
            (self.path / LOCK_NAME).unlink()
            self.path.rmdir()
        except FileNotFoundError:
            # A run that waited for this one began its own work in the folder.
            pass
        except OSError as error:
            _LOG.warning(
                "The work folder %s is not needed any more but cannot be deleted (%s).",
                self.path,
                describe_os_error(error),
            )
        self._lock.close()

    def clear(self, *, keep_units: bool = False) -> None:
        """Delete everything but the lock, spooled inputs and, if asked, complete units."""
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
        """Delete units without temporary files, before their shards are deleted.

        Writing shards deletes the temporary files, so such units are useless without their shards.
        """
        for path in (self.path / "units").glob("*"):
            if not (path / ROWS_NAME).exists():
                _delete_folder(path)


def has_learned_tokenizer(work: WorkFolder) -> bool:
    """Return whether a work folder holds a tokenizer trained on the inputs."""
    try:
        job = work.job() if work.tokenizer_path.exists() else None
    except StoreConflictError:
        # Reading the job itself raises the error.
        return False
    # An appending job uses the tokenizer of its store.
    if job is None or job.base:
        return False
    return str(job.recipe.get("tokenizer")).startswith("train:")
