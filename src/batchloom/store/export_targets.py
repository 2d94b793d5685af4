"""The ``export`` command, written atomically; Megatron and flat files."""

import contextlib
import importlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from batchloom.core.errors import InputError, StoreConflictError, StoreError
from batchloom.core.files import PARTIAL_SUFFIX, lock_exclusively
from batchloom.core.loss_weights import LossFlags
from batchloom.core.settings import raise_problems, suggest
from batchloom.store.format.layout import compute_checksum
from batchloom.store.format.megatron_index import iter_index_chunks, map_file
from batchloom.store.format.objectives import OBJECTIVES
from batchloom.store.format.shard_sidecars import CHECK_REMEDY, encode_weights_header, iter_mask_chunks
from batchloom.store.read.document_walk import DocumentRange, iter_document_ranges, read_remaining_lengths
from batchloom.store.read.store_opening import open_store, refuse_media
from batchloom.store.read.store_reader import Store
from batchloom.store.write.store_writer import make_folder, sync_folder, wrap_write_errors, write_chunks, write_file

ExportTarget = Literal["megatron", "flat", "parquet", "hf"]
EXPORT_TARGETS = ("megatron", "flat", "parquet", "hf")
_SYNTHETIC_NOTE = (
    "source=synthetic: these documents are synthetic. Their store records that, the exported files do not. Keep them "
    "apart from real data."
)
_FLAG_SUFFIXES = (".mask", ".weights")
_PREFIX_SUFFIXES = (".bin", ".idx", *_FLAG_SUFFIXES)
_NAME_PATTERN = re.compile(r"[A-Za-z0-9_][\w.-]*")
ProgressCallback = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class ExportResult:
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
            ``merge``), ``flat`` (one file of ids and a JSON that describes it), ``parquet`` or
            ``hf`` (for ``datasets.load_from_disk``).
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
    problems = []
    if to not in EXPORT_TARGETS:
        problems.append(f"to: {to!r} is not one of {', '.join(EXPORT_TARGETS)}{suggest(str(to), EXPORT_TARGETS)}")
    if merge is not None and to != "megatron":
        problems.append(f"merge: names the one prefix of --to megatron; --to {to} writes no prefix")
    if merge is not None and not _NAME_PATTERN.fullmatch(merge):
        problems.append(f"merge: {merge!r} is not a file name of letters, digits, '.', '_' and '-'")
    raise_problems(problems)
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
        notes = []
        if to == "megatron" and merge is not None:
            _write_prefix(store, folder / merge, tick)
        elif to == "megatron":
            _export_shards(store, folder, tick)
        elif to == "flat":
            notes = _export_flat(store, folder, tick)
        else:
            # Importing pyarrow takes long.
            tables = importlib.import_module("batchloom.store.export_tables")
            export = tables.export_parquet if to == "parquet" else tables.export_hf
            export(store, folder, tick)
    if to in ("megatron", "flat"):
        notes = [*_list_losses(store), *notes]
    if store.contents.removed.size:
        notes = [*notes, f"{store.contents.removed.size:,} removed documents are left out."]
    if store.contents.synthetic:
        notes = [*notes, _SYNTHETIC_NOTE]
    sizes = [file.stat().st_size for file in output_folder.iterdir()]
    return ExportResult(output_folder, to, *store.contents.remaining_counts, len(sizes), sum(sizes), tuple(notes))


@contextlib.contextmanager
def _open_staging_folder(out: Path) -> Iterator[Path]:
    """Provide a temporary folder that is renamed to ``out`` on success, else deleted."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise StoreConflictError(f"{out} already exists and is not empty; choose another --out, or delete it.")
    folder = out.absolute().with_name(out.absolute().name + PARTIAL_SUFFIX)
    make_folder(folder)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with wrap_write_errors(folder):
            lock_exclusively(
                descriptor,
                folder,
                busy=lambda: f"Another run is exporting into {out}; wait for it, or choose another --out.",
                ended=f"Another run that exported into {out} has just ended; give the command again.",
            )
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
    finally:
        os.close(descriptor)
    sync_folder(out.absolute().parent)


def _export_shards(store: Store, folder: Path, tick: ProgressCallback) -> None:
    """Export every shard as a Megatron prefix, by hard link or copy."""
    for number, stem in enumerate(store.shards.stems):
        first, stop = store.shards.bounds[number : number + 2]
        if np.diff(store.contents.removed.searchsorted([first, stop])):
            if read_remaining_lengths(store, first, stop).size:
                _write_prefix(store, folder / stem.name, tick, number)
            continue
        _verify_shard(store, number)
        for suffix in _PREFIX_SUFFIXES:
            source = stem.with_name(stem.name + suffix)
            if suffix not in _FLAG_SUFFIXES or source.is_file():
                _link_or_copy(source.resolve(), folder / source.name)
        tick(stop - first)


def _verify_shard(store: Store, number: int) -> None:
    """Verify the files of a shard, since linking does not read them."""
    if store.manifest is None:
        return  # A bare prefix has no checksums.
    checksums = store.manifest.subsets[store.split].shards[number].checksums
    for suffix in _PREFIX_SUFFIXES:
        path = store.shards.stems[number].with_suffix(suffix)
        if suffix in checksums and compute_checksum(map_file(path)) != checksums[suffix]:
            raise StoreError(f"{path}: checksum differs from the manifest's. {CHECK_REMEDY}")


def _link_or_copy(source: Path, target: Path) -> None:
    with wrap_write_errors(target):
        try:
            target.hardlink_to(source)
        except OSError:
            # Hard links fail across file systems, and some have none. Copying reports any other error.
            shutil.copyfile(source, target)
            with target.open("rb") as file:
                os.fsync(file.fileno())


def _write_prefix(store: Store, stem: Path, tick: ProgressCallback, shard: int | None = None) -> None:
    """Write the remaining documents of a shard, or of all, as one Megatron prefix."""
    first, stop = (0, len(store)) if shard is None else store.shards.bounds[shard : shard + 2]
    lengths = read_remaining_lengths(store, first, stop)
    write_chunks(stem.with_name(f"{stem.name}.idx"), iter_index_chunks(lengths, store.dtype))
    write_chunks(stem.with_name(f"{stem.name}.bin"), _iter_ids(iter_document_ranges(store, shard), tick))
    _write_flags(store, stem, shard)


def _export_flat(store: Store, folder: Path, tick: ProgressCallback) -> list[str]:
    """Export all ids as a flat file with a JSON sidecar; return notes on losses."""
    name = store.split or store.path.name
    are_exact: list[bool] = []

    def iter_checked() -> Iterator[DocumentRange]:
        for document_range in iter_document_ranges(store):
            are_exact.append(_is_end_token_exact(document_range, store.end_id))
            yield document_range

    write_chunks(folder / f"{name}.bin", _iter_ids(iter_checked(), tick))
    _write_flags(store, folder / name)
    clear = store.manifest is not None and all(are_exact)
    facts = {
        "dtype": store.dtype.name,
        "eod": store.end_id if clear else None,
        "documents": store.contents.remaining_counts[0],
        "tokens": store.contents.remaining_counts[1],
        "vocab_size": store.vocab_size,
        "tokenizer": store.manifest.tokenizer.name if store.manifest else None,
    }
    write_file(folder / f"{name}.json", json.dumps(facts, indent=1).encode() + b"\n")
    note = (
        "The flat file does not show where documents end: some lack the end token at their end, or contain it "
        "inside. --to megatron keeps their bounds."
    )
    return [] if clear else [note]


def _is_end_token_exact(document_range: DocumentRange, end_id: int) -> bool:
    marks = document_range.ids == end_id
    lengths = document_range.lengths
    all_ended = bool((lengths > 0).all() and marks[np.cumsum(lengths) - 1].all())
    return all_ended and int(np.count_nonzero(marks)) == len(lengths)


def _iter_ids(document_ranges: Iterator[DocumentRange], tick: ProgressCallback) -> Iterator[memoryview]:
    for document_range in document_ranges:
        yield np.ascontiguousarray(document_range.ids).data
        tick(len(document_range.lengths))


def _write_flags(store: Store, stem: Path, shard: int | None = None) -> None:
    """Write the mask and the loss weights of a shard or of all, if there are any."""
    tokens = store.contents.remaining_counts[1]
    trained = store.contents.trained_tokens
    is_weighted = store.reader.weighted
    if shard is not None:
        tokens = 0
        trained = 0
        is_weighted = False
        for flags in _iter_flags(store, shard):
            tokens += flags.size
            trained += flags.count_trained()
            is_weighted |= flags.has_weights
    if trained < tokens:
        chunks = iter_mask_chunks(tokens, trained, (flags.trained for flags in _iter_flags(store, shard)))
        write_chunks(stem.with_name(f"{stem.name}.mask"), chunks)
    if is_weighted:
        codes = (flags.codes.tobytes() for flags in _iter_flags(store, shard))
        header = encode_weights_header(tokens, trained)
        write_chunks(stem.with_name(f"{stem.name}.weights"), itertools.chain([header], codes))


def _iter_flags(store: Store, shard: int | None) -> Iterator[LossFlags]:
    for document_range in iter_document_ranges(store, shard):
        yield document_range.flags


def _list_losses(store: Store) -> list[str]:
    notes = []
    objective = store.contents.objective
    if objective and OBJECTIVES[objective].carries:
        notes.append("These files do not hold the carried columns: --to parquet or hf keeps them.")
    elif objective:
        notes.append("These files do not show which answers are preferred: --to parquet or hf keeps pair and side.")
    tokens = store.contents.remaining_counts[1]
    if masked := tokens - store.contents.trained_tokens:
        notes.append(
            f"{masked:,} of {tokens:,} tokens are not trained. The .mask files say which; batchloom applies them, "
            "Megatron and other readers do not."
        )
    if store.reader.weighted:
        notes.append(
            "Some tokens have another loss weight than 0 and 1. The .weights files say which; batchloom applies them, "
            "Megatron and other readers do not."
        )
    return notes
