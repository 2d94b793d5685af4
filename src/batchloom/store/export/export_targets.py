"""The ``export`` command, written atomically; Megatron and flat files."""

import contextlib
import importlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import InputError, StoreConflictError, StoreError
from batchloom.core.files import PARTIAL_SUFFIX, lock_exclusively
from batchloom.core.settings import raise_problems, suggest
from batchloom.store.format.layout import compute_checksum
from batchloom.store.format.megatron_index import iter_index_chunks, map_file
from batchloom.store.format.shard_sidecars import CHECK_REMEDY, iter_mask_chunks
from batchloom.store.read.document_walk import DocumentRange, iter_document_ranges, read_remaining_lengths
from batchloom.store.read.store_opening import open_store, refuse_media
from batchloom.store.read.store_reader import Store
from batchloom.store.write.store_writer import make_folder, sync_folder, wrap_write_errors, write_chunks, write_file

ExportTarget = Literal["megatron", "flat", "parquet", "hf", "mds"]
EXPORT_TARGETS = ("megatron", "flat", "parquet", "hf", "mds")
_SYNTHETIC_NOTE = (
    "source=synthetic: these documents are synthetic. Their store records that, the exported files do not. Keep them "
    "apart from real data."
)
_NAME_PATTERN = re.compile(r"[A-Za-z0-9_][\w.-]*")
ProgressCallback = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class ExportResult:
    """Result of an export."""

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
    store = open_store(path, split, generation=generation, verify="first-read" if Path(path).is_dir() else None)
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
            # Importing pyarrow takes long.
            tables = importlib.import_module("batchloom.store.export.export_tables")
            export = {"parquet": tables.export_parquet, "hf": tables.export_hf, "mds": tables.export_mds}[to]
            export(store, folder, tick)
            notes = []
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


def export_shards(store: Store, folder: Path, tick: ProgressCallback) -> list[str]:
    """Export every shard as a Megatron prefix, by hard link or copy.

    Returns notes on lost information, one sentence each.
    """
    for number, stem in enumerate(store.shards.stems):
        first, stop = store.contents.removed.searchsorted(store.shards.bounds[number : number + 2]).tolist()
        if first < stop:
            _write_shard(store, number, folder / stem.name, tick)
            continue
        _verify_shard(store, number)
        for suffix in (".bin", ".idx", ".mask"):
            source = stem.with_name(stem.name + suffix)
            if suffix != ".mask" or source.is_file():
                _link_or_copy(source.resolve(), folder / source.name)
        tick(store.shards.bounds[number + 1] - store.shards.bounds[number])
    return _list_losses(store)


def _verify_shard(store: Store, number: int) -> None:
    """Verify the files of a shard, since linking does not read them.

    A bare prefix has no checksums.
    """
    if store.manifest is None:
        return
    entry = store.manifest.subsets[store.split].shards[number]
    for suffix, expected_checksum in ((".bin", entry.bin), (".idx", entry.idx), (".mask", entry.mask)):
        path = store.shards.stems[number].with_name(entry.name + suffix)
        if expected_checksum is not None and compute_checksum(map_file(path)) != expected_checksum:
            raise StoreError(f"{path}: checksum differs from the manifest's. {CHECK_REMEDY}")


def _write_shard(store: Store, number: int, stem: Path, tick: ProgressCallback) -> None:
    """Write a shard without its removed documents, or nothing if all are removed."""
    lengths = read_remaining_lengths(store, *store.shards.bounds[number : number + 2])
    if not lengths.size:
        return
    write_chunks(stem.with_suffix(".idx"), iter_index_chunks(lengths, store.dtype))
    write_chunks(stem.with_suffix(".bin"), _iter_ids(iter_document_ranges(store, number), tick))
    flags = np.concatenate(
        [
            document_range.trained
            for document_range in iter_document_ranges(store, number)
            if document_range.trained is not None
        ]
    )
    if not flags.all():
        trained = int(np.count_nonzero(flags))
        write_chunks(stem.with_suffix(".mask"), iter_mask_chunks(flags.size, trained, [flags]))


def _link_or_copy(source: Path, target: Path) -> None:
    with wrap_write_errors(target):
        try:
            target.hardlink_to(source)
        except OSError:
            # Hard links fail across file systems, and some have none. Copying reports any other error.
            shutil.copyfile(source, target)
            with target.open("rb") as file:
                os.fsync(file.fileno())


def export_merged(store: Store, folder: Path, name: str, tick: ProgressCallback) -> list[str]:
    """Export all shards as one Megatron prefix; return notes on losses."""
    lengths = read_remaining_lengths(store, 0, len(store))
    write_chunks(folder / f"{name}.idx", iter_index_chunks(lengths, store.dtype))
    write_chunks(folder / f"{name}.bin", _iter_ids(iter_document_ranges(store), tick))
    _write_mask(store, folder / f"{name}.mask")
    return _list_losses(store)


def export_flat(store: Store, folder: Path, tick: ProgressCallback) -> list[str]:
    """Export all ids as a flat file with a JSON sidecar; return notes on losses."""
    name = store.split or store.path.name
    ends = _EndTokenCheck(store.end_id)
    write_chunks(folder / f"{name}.bin", _iter_ids(ends.watch(iter_document_ranges(store)), tick))
    _write_mask(store, folder / f"{name}.mask")
    clear = store.manifest is not None and ends.exact
    facts = {
        "dtype": store.dtype.name,
        "eod": store.end_id if clear else None,
        "documents": store.contents.remaining_counts[0],
        "tokens": store.contents.remaining_counts[1],
        "vocab_size": store.vocab_size,
        "tokenizer": store.manifest.tokenizer.name if store.manifest else None,
    }
    write_file(folder / f"{name}.json", json.dumps(facts, indent=1).encode() + b"\n")
    notes = _list_losses(store)
    if not clear:
        notes.append(
            "The flat file does not show where documents end: some lack the end token at their end, or contain it "
            "inside. --to megatron keeps their bounds."
        )
    return notes


class _EndTokenCheck:
    """Check that the end token ends every document and occurs nowhere else."""

    def __init__(self, end_id: int) -> None:
        self._end_id = end_id
        self.exact = True

    def watch(self, document_ranges: Iterator[DocumentRange]) -> Iterator[DocumentRange]:
        for document_range in document_ranges:
            marks = document_range.ids == self._end_id
            lasts = np.cumsum(document_range.lengths) - 1
            all_ended = bool((document_range.lengths > 0).all() and marks[lasts].all())
            self.exact &= all_ended and int(np.count_nonzero(marks)) == len(lasts)
            yield document_range


def _iter_ids(document_ranges: Iterator[DocumentRange], tick: ProgressCallback) -> Iterator[memoryview]:
    for document_range in document_ranges:
        yield np.ascontiguousarray(document_range.ids).data
        tick(len(document_range.lengths))


def _write_mask(store: Store, path: Path) -> None:
    if store.contents.trained_tokens < store.contents.remaining_counts[1]:
        write_chunks(
            path,
            iter_mask_chunks(
                store.contents.remaining_counts[1], store.contents.trained_tokens, _iter_mask_flags(store)
            ),
        )


def _iter_mask_flags(store: Store) -> Iterator[NDArray[np.bool_]]:
    for document_range in iter_document_ranges(store):
        if document_range.trained is not None:
            yield document_range.trained


def _list_losses(store: Store) -> list[str]:
    """List the information that such files lack or other readers ignore."""
    notes = []
    if store.contents.preferences:
        notes.append(
            "These files do not show which answers are preferred: --to parquet, hf or mds keeps pair and side."
        )
    masked = store.contents.remaining_counts[1] - store.contents.trained_tokens
    if not masked:
        return notes
    note = (
        f"{masked:,} of {store.contents.remaining_counts[1]:,} tokens are not trained. The .mask files say which; "
        "batchloom applies them, Megatron and other readers do not."
    )
    return [*notes, note]
