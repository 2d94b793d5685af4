"""Stores without units, made in one go: of imported ids and of synthetic data."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import msgspec

from batchloom.core.errors import StoreConflictError
from batchloom.preparation.output_checks import check_output_folder
from batchloom.preparation.phases.finish import make_subset_entry
from batchloom.preparation.report.progress import PrepareResult, make_result
from batchloom.preparation.units.work_folder import JobIdentity, WorkFolder
from batchloom.store import MANIFEST_NAME, REPORT_NAME, Manifest, ShardEntry, encode_manifest, read_manifest, write_file
from batchloom.store.format import TOKENIZER_NAME, SubsetEntry, seal_manifest


@final
class PlainStoreJob:
    """Job of a store without units; if it is stopped, it starts over.

    Args:
        out: folder of the store.
        identity: identity of the job.
        list_differences: lists how the job of a finished store differs from this one.
        write: writes all files into the work folder, and returns the manifest.
    """

    def __init__(
        self,
        out: Path,
        identity: JobIdentity,
        list_differences: Callable[[Manifest], list[str]],
        write: Callable[[WorkFolder], Manifest],
    ) -> None:
        self._out = out
        self._identity = identity
        self._list_differences = list_differences
        self._write = write
        self._began = time.perf_counter()

    def find_finished(self) -> PrepareResult | None:
        """Return the result of the finished store; None without a store."""
        if not (self._out / MANIFEST_NAME).exists():
            check_output_folder(self._out)
            return None
        manifest = read_manifest(self._out)
        if differences := self._list_differences(manifest):
            raise StoreConflictError(
                f"{self._out} holds a finished store of another job ({'; '.join(differences[:3])}); choose another "
                "--out, or delete that folder."
            )
        return make_result(self._out, manifest, seconds=time.perf_counter() - self._began, already_done=True)

    def begin(self, work: WorkFolder) -> "_PlainStoreRun":
        """Begin the job, unless the work folder holds results of another one."""
        if not work.has_results():
            work.clear()
            work.begin(self._identity)
        elif work.job() != self._identity:
            raise StoreConflictError(
                f"{self._out} holds unfinished work of another job; delete {work.path} to start over, or choose "
                "another --out."
            )
        return _PlainStoreRun(work, self._write, self._began)


@final
@dataclass(frozen=True, slots=True)
class _PlainStoreRun:
    work: WorkFolder
    write: Callable[[WorkFolder], Manifest]
    began: float

    def make(self) -> Manifest:
        return self.write(self.work)

    def make_result(self, manifest: Manifest) -> PrepareResult:
        return make_result(self.work.out, manifest, seconds=time.perf_counter() - self.began)


def collect_subsets(store: Path, shards: Mapping[str, list[ShardEntry]]) -> dict[str, SubsetEntry]:
    """Make the entries of the subsets that have shards, and write their lengths files."""
    return {name: make_subset_entry(store / name, entries) for name, entries in shards.items() if entries}


def finish_plain_store(
    store: Path, manifest: Manifest, tokenizer_state: Mapping[str, Any], report: Mapping[str, Any]
) -> Manifest:
    """Write the files next to the shards, the manifest last; return that."""
    write_file(store / TOKENIZER_NAME, msgspec.json.encode(tokenizer_state))
    write_file(store / REPORT_NAME, msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    sealed = seal_manifest(manifest)
    write_file(store / MANIFEST_NAME, encode_manifest(sealed))
    return sealed


def list_plain_differences(manifest: Manifest, plain: Mapping[str, Any]) -> list[str]:
    """List the settings in which a plain recipe differs from that of a manifest."""
    return [
        f"{name}: {manifest.recipe.get(name)!r} -> {plain.get(name)!r}"
        for name in sorted(manifest.recipe.keys() | plain.keys())
        if manifest.recipe.get(name) != plain.get(name)
    ]
