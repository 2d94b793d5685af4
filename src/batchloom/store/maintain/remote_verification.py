"""Verification of a remote store, which downloads one shard at a time."""

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
from batchloom.store.format.layout import MANIFEST_NAME, PROCESSOR_NAME, TOKENIZER_NAME, format_generation_name
from batchloom.store.format.manifest import ShardEntry, read_manifest
from batchloom.store.maintain.generations import list_generation_files, list_sidecars
from batchloom.store.maintain.verification import VerificationResult, describe_use, verify_store
from batchloom.store.read.remote_blocks import MAX_FETCH_ATTEMPTS
from batchloom.store.read.remote_store import open_remote_manifest
from batchloom.store.read.store_opening import open_store
from batchloom.store.read.store_reader import Store

if TYPE_CHECKING:
    from concurrent.futures import Future

# A file is fetched in ranges of 4 MiB, up to 16 at the same time.
_CHUNK_BYTES, _MAX_CONCURRENT = 4 << 20, 16
# Block cache for decoded documents; it is deleted with the temporary folder.
_CACHE_BYTES = 1 << 30
# Files of a shard that later checks need.
_RETAINED_SUFFIXES = (".docs",)


def verify_remote_store(
    url: str, progress: Callable[[int], None] | None = None, *, generation: int | None = None
) -> VerificationResult:
    """Verify a store at a URL as :func:`~batchloom.store.verify_store` does.

    Every byte is downloaded once, one shard at a time, to a temporary folder. Lengths and provenance stay there,
    40 bytes per document. Files that no manifest names are not searched for.

    Args:
        url: URL of the store's folder.
        progress: called with the number of bytes verified since the last call.
        generation: an older generation; None for the newest, including consistency of the older ones.

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
            folder, progress, generation=generation, provide_shard=copy.provide_shard, open_subset=open_subset
        )
    # The faults name the URL instead of the copy.
    verdict.path = redact_url(base)
    verdict.faults = [fault.replace(str(folder), verdict.path) for fault in verdict.faults]
    verdict.used = verdict.used.replace(str(folder), verdict.path)
    return verdict


@final
class _StoreCopy:
    """Local copy of a remote store's files, downloaded when needed."""

    def __init__(self, base: str, folder: Path) -> None:
        self._base, self._folder, self._ranges = base, folder, RangeFetcher(base)

    def copy_store_files(self) -> None:
        self._copy_manifest(MANIFEST_NAME, None)
        try:
            manifest = read_manifest(self._folder)
        except StoreError:
            return  # The verification reports it.
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
        paths = [stem.with_suffix(suffix) for suffix in entry.checksums]
        for path in paths:
            self._copy_file(path.relative_to(self._folder).as_posix())
        try:
            yield
        finally:
            for path in paths:
                if path.suffix not in _RETAINED_SUFFIXES and path.exists():
                    # A later check only tests that the file exists; an existing mapping keeps its bytes.
                    path.unlink()
                    path.touch()

    def _copy_manifest(self, name: str, generation: int | None) -> None:
        """Copy a manifest, retrying while the copy is damaged."""
        for _ in range(MAX_FETCH_ATTEMPTS):
            self._copy_file(name)
            with contextlib.suppress(StoreError):
                read_manifest(self._folder, generation)
                return

    def _copy_file(self, name: str) -> None:
        """Copy a file; the verification reports a missing one."""
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
