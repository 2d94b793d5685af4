"""The ``export`` command: its targets, each written atomically."""

import contextlib
import importlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from batchloom.core.errors import InputError, StoreConflictError
from batchloom.core.locks import lock_exclusively
from batchloom.core.partial_files import PARTIAL_SUFFIX
from batchloom.core.settings import raise_problems, suggest
from batchloom.store.export.export_mds import export_mds
from batchloom.store.export.export_tokens import export_flat, export_merged, export_shards
from batchloom.store.read.standalone_shard import refuse_media
from batchloom.store.read.store_opening import open_store
from batchloom.store.read.store_reader import Store
from batchloom.store.write.store_writer import make_folder, sync_folder, wrap_write_errors

ExportTarget = Literal["megatron", "flat", "parquet", "hf", "mds"]
EXPORT_TARGETS = ("megatron", "flat", "parquet", "hf", "mds")
_SYNTHETIC_NOTE = (
    "source=synthetic: these documents are synthetic. Their store records that, the exported files do not. Keep them "
    "apart from real data."
)
_NAME_PATTERN = re.compile(r"[A-Za-z0-9_][\w.-]*")


@dataclass(frozen=True, slots=True)
class ExportResult:
    """Result of an export.

    Attributes:
        path: output folder.
        to: export target.
        documents: number of documents.
        tokens: number of tokens.
        files: number of files.
        bytes: total size of the files.
        notes: information that the target cannot hold, one sentence each.
    """

    path: Path
    to: str
    documents: int
    tokens: int
    files: int
    bytes: int
    notes: tuple[str, ...]


def export_store(
    path: str | os.PathLike[str],
    *,
    to: ExportTarget,
    out: str | os.PathLike[str],
    split: str = "train",
    merge: str | None = None,
    generation: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> ExportResult:
    """Write one subset of a store (or a bare prefix) in another format.

    Streams in bounded memory and verifies a store's checksums on the way. The output folder appears complete or
    not at all.

    Args:
        path: a store's folder or a Megatron prefix.
        to: ``megatron`` (every shard unchanged, by hard link where possible; one prefix with
            ``merge``), ``flat`` (one file of ids and a JSON that describes it), ``parquet``,
            ``hf`` (for ``datasets.load_from_disk``) or ``mds`` (for mosaicml-streaming).
        out: output folder; it must not exist, or be empty.
        split: name of the subset.
        merge: for ``megatron``: name of the single prefix.
        generation: generation of the store; None for the newest.
        progress: called with the number of documents written since the last call.

    Raises:
        SettingsError: the target is unknown, or ``merge`` is not a valid name.
        StoreMissingError, StoreError, InputError: as :func:`batchloom.open_store`.
        StoreConflictError: ``out`` is not empty, or another run writes it.
        OutputError: ``out`` cannot be written.
    """
    raise_problems(_list_problems(to, merge))
    # Without verification, a flipped bit would go into files without checksums. A bare prefix has no checksums.
    store = open_store(
        path,
        split,
        generation=generation,
        verify="first-read" if Path(path).is_dir() else None,
    )
    output_folder = Path(out)
    if not store.location.on_disk:
        raise InputError(
            f"{store.path} is generated while it is read and has no shards to export: write it first (batchloom "
            f"prepare {store.path} --out STORE), then export that store."
        )
    refuse_media(store.manifest, store.location.name, "an export")
    tick = progress or (lambda _: None)
    with _open_staging_folder(output_folder) as folder:
        if to == "megatron" and merge is not None:
            notes = export_merged(store, folder, merge, tick)
        elif to == "megatron":
            notes = export_shards(store, folder, tick)
        elif to == "flat":
            notes = export_flat(store, folder, tick)
        else:
            notes = _choose_exporter(to)(store, folder, tick)
    if store.contents.removed.size:
        notes = [*notes, f"{store.contents.removed.size:,} removed documents are left out."]
    if store.contents.synthetic:
        notes = [*notes, _SYNTHETIC_NOTE]
    sizes = [file.stat().st_size for file in output_folder.iterdir()]
    return ExportResult(output_folder, to, *store.contents.remaining_counts, len(sizes), sum(sizes), tuple(notes))


def _list_problems(to: str, merge: str | None) -> list[str]:
    problems = []
    if to not in EXPORT_TARGETS:
        problems.append(f"to: {to!r} is not one of {', '.join(EXPORT_TARGETS)}{suggest(str(to), EXPORT_TARGETS)}")
    if merge is not None and to != "megatron":
        problems.append(f"merge: names the one prefix of --to megatron; --to {to} writes no prefix")
    if merge is not None and not _NAME_PATTERN.fullmatch(merge):
        problems.append(f"merge: {merge!r} is not a file name of letters, digits, '.', '_' and '-'")
    return problems


def _choose_exporter(to: str) -> Callable[[Store, Path, Callable[[int], None]], list[str]]:
    """Return the exporter of a target; pyarrow is imported only if needed."""
    if to == "mds":
        return export_mds
    tables = importlib.import_module("batchloom.store.export.export_tables")
    return tables.export_parquet if to == "parquet" else tables.export_hf  # type: ignore[no-any-return]


@contextlib.contextmanager
def _open_staging_folder(out: Path) -> Iterator[Path]:
    """Provide a temporary folder that is renamed to ``out`` on success, else deleted."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise StoreConflictError(f"{out} already exists and is not empty; choose another --out, or delete it.")
    folder = out.absolute().with_name(out.absolute().name + PARTIAL_SUFFIX)
    make_folder(folder)
    with _lock_output(folder, out):
        with wrap_write_errors(folder):
            for stale_file in folder.iterdir():
                stale_file.unlink()
        try:
            yield folder
            sync_folder(folder)
            with wrap_write_errors(out):
                folder.replace(out)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    sync_folder(out.absolute().parent)


@contextlib.contextmanager
def _lock_output(folder: Path, out: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with wrap_write_errors(folder):
            lock_exclusively(
                descriptor,
                folder,
                busy=lambda: f"Another run is exporting into {out}; wait for it, or choose another --out.",
                ended=f"Another run that exported into {out} has just ended; give the command again.",
            )
        yield
    finally:
        os.close(descriptor)
