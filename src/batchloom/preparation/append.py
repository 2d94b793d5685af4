"""Appending: what a store holds already, and which of the inputs are new to it."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from batchloom.core.errors import StoreConflictError, StoreError
from batchloom.core.files import NOT_JSON, because, read_regular
from batchloom.core.values import counted
from batchloom.dedup.keys import write_keys
from batchloom.preparation.recipe import Recipe
from batchloom.preparation.rerun import content_hash, report_of, report_sources
from batchloom.preparation.work import WorkFolder
from batchloom.sources.listing import Listing
from batchloom.store.format import MANIFEST_NAME, REPORT_NAME, TOKENIZER_NAME, of_generation
from batchloom.store.generations import next_part, next_shards, stored_hashes
from batchloom.store.manifest import Manifest, read_manifest
from batchloom.store.writer import make_folder, writing


@dataclass(frozen=True, slots=True)
class Older:
    """What stands before the documents of a job: nothing, or the generations of a store.

    Attributes:
        generation: the newest there is; 0 where there is no store.
        files: of keys of its documents, in order.
        shards: number of the next shard of each subset.
        parts: how many parts its sources have.
        filled: subsets that hold documents.
        overrides: the subset of single hashes.
    """

    generation: int = 0
    files: tuple[Path, ...] = ()
    shards: Mapping[str, int] = field(default_factory=dict)
    parts: int = 0
    filled: frozenset[str] = frozenset()
    overrides: tuple[tuple[int, str], ...] = ()


def base_of(out: Path) -> Manifest | None:
    """The newest generation of the store to append to; None where there is no store yet."""
    with writing(out):
        if not (out / MANIFEST_NAME).exists():
            return None
    return read_manifest(out)


def older_of(work: WorkFolder, base: Manifest | None, *, keyed: bool) -> Older:
    """What stands before the documents of a job.

    Args:
        work: the job's folder, inside the store; keys go there.
        base: the newest generation; None where there is none.
        keyed: whether new documents are compared with those that are there.
    """
    if base is None:
        return Older()
    return Older(
        generation=base.generation,
        files=_keys(work, base) if keyed else (),
        shards=next_shards(base),
        parts=next_part(base),
        filled=frozenset(name for name, subset in base.subsets.items() if subset.documents),
        overrides=tuple((int(value, 16), name) for value, name in base.subset_overrides.items()),
    )


def _keys(work: WorkFolder, base: Manifest) -> tuple[Path, ...]:
    """The keys of all documents that are there, a file a shard."""
    if base.preferences == "labels":
        # Which label an answer has is not in its hash, and another label makes no duplicate.
        return ()
    folder = work.path / "older"
    make_folder(folder)
    paths = []
    for number, (hashes, parts) in enumerate(stored_hashes(work.out, base)):
        path = folder / f"{number:05d}.keys"
        if not path.exists():
            numbers = np.arange(len(hashes), dtype=np.uint32)
            write_keys(path, np.ascontiguousarray(hashes), numbers, np.ascontiguousarray(parts))
        paths.append(path)
    return tuple(paths)


def kept_tokenizer(out: Path) -> dict[str, Any]:
    """The state of a store's tokenizer, which what is appended is encoded with.

    Raises:
        StoreError: it is missing or damaged.
    """
    path = out / TOKENIZER_NAME
    try:
        return msgspec.json.decode(read_regular(path), type=dict)
    except (OSError, *NOT_JSON) as error:
        why = because(error) if isinstance(error, OSError) else error
        raise StoreError(f"{path} cannot be read ({why}); restore it from a copy.") from error


def refuse_unlike(recipe: Recipe, base: Manifest, out: Path) -> None:
    """Refuse to append what would be divided among the subsets otherwise than the store is.

    Raises:
        StoreConflictError: names the setting.
    """
    for name in ("val_fraction", "test_fraction"):
        then, now = base.recipe.get(name), getattr(recipe, name)
        if then is not None and then != now:
            raise StoreConflictError(
                f"{out} was prepared with {name} {then:g}, and would be appended to with {now:g}: equal documents "
                "could then be on two sides; leave the option out."
            )


def new_inputs(listing: Listing, base: Manifest, out: Path) -> Listing:
    """The inputs that the store does not hold yet, with a note on those it does.

    A file is known by its place, size and time, or by its name, size and content.
    """
    known = _reported(out, base)
    named = {(entry.name, entry.bytes): entry for entry in base.sources}
    fresh = []
    for source, told in zip(listing.sources, report_sources(listing.sources), strict=True):
        if (told.path, told.bytes, told.mtime_ns) in known:
            continue
        entry = named.get((source.name, source.size))
        if entry is None or content_hash(source, entry) != entry.hash:
            fresh.append(source)
    found = len(listing.sources) - len(fresh)
    if not found:
        return listing
    note = f"{counted(found, 'input')} of {len(listing.sources):,} are in {out} already."
    return replace(listing, sources=tuple(fresh), notes=(*listing.notes, note))


def _reported(out: Path, base: Manifest) -> set[tuple[str, int, int]]:
    """Place, size and time of every file that a generation was made of, where its report is there."""
    found: set[tuple[str, int, int]] = set()
    for entry in base.all_history:
        # Without the report inputs are told by their content.
        with contextlib.suppress(OSError):
            report = report_of(read_regular(out / of_generation(REPORT_NAME, entry.number)))
            sources = report.sources if report else []
            found |= {(one.path, one.bytes, one.mtime_ns) for one in sources}
    return found
