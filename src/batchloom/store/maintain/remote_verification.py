"""Verifying a store that lies elsewhere: its shards come one after the other, and go when they were looked at."""

import contextlib
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, final

from batchloom.core.addresses import redact_url
from batchloom.core.errors import StoreError, StoreMissingError
from batchloom.remote import (
    RangeError,
    RangeFetcher,
    fetch_file_info,
    is_web_url,
    make_no_ranges_error,
    make_remote_error,
    run_with_retries,
)
from batchloom.store.format import (
    MANIFEST_NAME,
    PROCESSOR_NAME,
    TOKENIZER_NAME,
    ShardEntry,
    format_generation_name,
    read_manifest,
)
from batchloom.store.maintain.generations import list_generation_files, list_sidecars
from batchloom.store.maintain.verification import VerificationResult, describe_use, verify_store
from batchloom.store.read import MAX_FETCH_ATTEMPTS, Store, open_remote_manifest, open_store

if TYPE_CHECKING:
    from concurrent.futures import Future

# A file comes in stretches of 4 MiB, so many of them at the same time.
_CHUNK_BYTES, _MAX_CONCURRENT = 4 << 20, 16
# Blocks of the documents that are decoded: they go with the rest.
_CACHE_BYTES = 1 << 30
# What of a shard is looked at beyond it.
_RETAINED_SUFFIXES = (".docs",)


def verify_remote_store(
    url: str, progress: Callable[[int], None] | None = None, *, generation: int | None = None
) -> VerificationResult:
    """Check a whole store at a URL as :func:`~batchloom.store.verify_store` does: all of it is read once.

    A shard at a time lies in a temporary folder; what stays there to the end are lengths and origins, 40 bytes for
    each document. Files that no manifest names are not looked for.

    Args:
        url: of the store's folder.
        progress: called with the number of bytes verified since the last call.
        generation: an older one; None for the newest, and for what the older ones say of themselves.

    Raises:
        StoreMissingError: there is no manifest.
        GenerationError: there is no such generation.
        InputError: the store cannot be reached.
    """
    base = url.rstrip("/")
    with tempfile.TemporaryDirectory(prefix="batchloom-check-") as scratch:
        folder = Path(scratch) / "store"
        copy = _StoreCopy(base, folder)
        try:
            open_remote_manifest(base)
        except StoreMissingError:
            raise
        except StoreError as error:
            faulty = VerificationResult(redact_url(base), "store", [str(error)], data="unknown")
            faulty.used = describe_use(faulty, {})
            return faulty
        copy.copy_store_files()

        def open_subset(subset: str, number: int) -> Store:
            cache = Path(scratch) / "blocks"
            return open_store(base, subset, generation=number, cache=cache, cache_limit=_CACHE_BYTES)

        verdict = verify_store(
            folder,
            progress,
            generation=generation,
            provide_shard=copy.provide_shard,
            open_subset=open_subset,
        )
    return _rename_result(verdict, str(folder), base)


def _rename_result(verdict: VerificationResult, folder: str, base: str) -> VerificationResult:
    """The verdict on a copy as that on the store itself."""
    verdict.path = redact_url(base)
    verdict.faults = [fault.replace(folder, verdict.path) for fault in verdict.faults]
    verdict.used = verdict.used.replace(folder, verdict.path)
    return verdict


@final
class _StoreCopy:
    """The files of a store, brought to a folder when they are looked at."""

    def __init__(self, base: str, folder: Path) -> None:
        self._base, self._folder, self._ranges = base, folder, RangeFetcher(base)

    def copy_store_files(self) -> None:
        """Bring all but the files of shards."""
        self._copy_manifest(MANIFEST_NAME, None)
        try:
            manifest = read_manifest(self._folder)
        except StoreError:
            return  # It is told by who looks at it.
        for number in manifest.readable[:-1]:
            self._copy_manifest(format_generation_name(number), number)
        names = {TOKENIZER_NAME, *list_sidecars(manifest)}
        if manifest.processor is not None:
            names.add(PROCESSOR_NAME)
        for number in manifest.readable:
            with contextlib.suppress(StoreError):
                generation_manifest = manifest if number == manifest.generation else read_manifest(self._folder, number)
                names |= list_generation_files(generation_manifest)
        shards = {f"{name}/{shard.name}" for name, subset in manifest.subsets.items() for shard in subset.shards}
        for name in sorted(names):
            if str(Path(name).with_suffix("")) not in shards:
                self._copy_file(name)

    @contextlib.contextmanager
    def provide_shard(self, stem: Path, entry: ShardEntry) -> Iterator[None]:
        """Have the files of a shard here for a while."""
        optional_files = {
            "mask": entry.mask,
            "pairs": entry.pairs,
            "bands": entry.bands,
            "sums": entry.sums,
        }
        optional_files |= {"media": entry.media, "blobs": entry.blobs, "blobsums": entry.blobsums}
        endings = [
            "bin",
            "idx",
            "docs",
            *(ending for ending, checksum in optional_files.items() if checksum),
        ]
        paths = [stem.with_suffix(f".{ending}") for ending in endings]
        for path in paths:
            self._copy_file(path.relative_to(self._folder).as_posix())
        try:
            yield
        finally:
            for path in paths:
                if path.suffix not in _RETAINED_SUFFIXES and path.exists():
                    # That it is there is looked at later; whoever has it mapped keeps its bytes.
                    path.unlink()
                    path.touch()

    def _copy_manifest(self, name: str, generation: int | None) -> None:
        """Copy a manifest, again where the copy is damaged."""
        for _ in range(MAX_FETCH_ATTEMPTS):
            self._copy_file(name)
            with contextlib.suppress(StoreError):
                read_manifest(self._folder, generation)
                return

    def _copy_file(self, name: str) -> None:
        """Copy a file; one that is not there is told by who looks at it."""
        url = f"{self._base}/{name}"
        try:
            info = run_with_retries(url, lambda: fetch_file_info(url))
        except FileNotFoundError:
            return
        if is_web_url(url) and not info["ranges"]:
            raise make_no_ranges_error(url, info)
        size = int(info["size"])
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pending: deque[Future[bytes]] = deque()
        with path.open("wb") as file:
            try:
                for start in range(0, size, _CHUNK_BYTES):
                    stop = min(start + _CHUNK_BYTES, size)
                    pending.append(self._ranges.submit(name, start, stop, size))
                    if len(pending) == _MAX_CONCURRENT:
                        file.write(pending.popleft().result())
                while pending:
                    file.write(pending.popleft().result())
            except RangeError as error:
                raise make_remote_error(error.fault, url) from None
            finally:
                for future in pending:
                    future.cancel()
