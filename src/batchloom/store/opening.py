"""Opening a store, a bare Megatron prefix, or synthetic data that is asked for by name."""

import os
from pathlib import Path

from batchloom.core.errors import InputError, SettingsError, StoreError
from batchloom.core.files import because, refuse_url
from batchloom.core.spec import shown, whole
from batchloom.core.synthetic import parse_synthetic
from batchloom.store.format import SUBSETS, TOKEN_DTYPES
from batchloom.store.lengths import StoreLengths, map_lengths
from batchloom.store.lone import refuse_lone_shard
from batchloom.store.manifest import read_manifest
from batchloom.store.missing import no_store
from batchloom.store.reader import Store
from batchloom.store.shards import Place, map_prefix
from batchloom.store.synthetic import SUBSET, Generated


def open_store(
    path: str | os.PathLike[str], split: str = "train", *, generation: int | None = None
) -> Store:
    """Open one subset of a store, a bare Megatron prefix, or synthetic data that is asked for by name.

    Args:
        path: a store's folder; or ``path/name`` of a ``name.bin``/``name.idx`` pair (anybody's, of
            any integer dtype), also given with one of the two endings. A ``name.mask`` beside it
            says which tokens are trained. Where there is nothing of that name, ``dummy`` and
            ``distributed_dummy``, also with settings (``dummy:documents=1000,kind=text``): documents
            that are made up as they are read, by docs/synthetic.md.
        split: ``train``, ``val`` or ``test``; a bare prefix has no subsets and ignores it.
        generation: of a store that was appended to or taken from, which of its generations; None
            for the newest.

    Raises:
        StoreMissingError: there is neither a store nor a prefix at ``path``.
        GenerationError: the generation never was, or was compacted away; names those that are there.
        StoreError: the store is damaged, of another format, or names files outside itself.
        InputError: the subset does not exist or is empty, ``path`` is a URL, or a shard of a store of synthetic
            documents or preferences.
        SettingsError: settings of synthetic data that are none, or a generation of what has none.
    """
    if generation is not None and whole(generation) is None:
        raise SettingsError([f"generation: {shown(generation)} is no number of a generation"])
    refuse_url(path, "The store")
    # Files are mapped when they are first read, perhaps after the process has changed its folder.
    folder = Path(path).absolute()
    stem = folder.with_suffix("") if folder.suffix in (".bin", ".idx") else folder
    try:
        is_folder = folder.is_dir()
        is_prefix = not is_folder and stem.with_name(stem.name + ".idx").is_file()
        is_there = os.path.lexists(folder)
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {because(error)}.") from error
    if is_folder:
        return _open_folder(folder, split, generation)
    spec = None if is_prefix or is_there else parse_synthetic(os.fspath(path))
    if generation is not None and (is_prefix or spec):
        raise SettingsError([f"generation: only stores have generations, and {path} is none"])
    if is_prefix:
        return _open_prefix(stem)
    if spec:
        return _open_synthetic(Generated(spec), split)
    raise no_store(Path(path))


def _open_folder(folder: Path, split: str, generation: int | None) -> Store:
    manifest = read_manifest(folder, generation)
    if split not in manifest.subsets or not manifest.subsets[split].documents:
        have = [
            name
            for name in SUBSETS
            if name in manifest.subsets and manifest.subsets[name].documents
        ]
        raise InputError(
            f"{folder} has no documents in subset {split!r}; it has: {', '.join(have) or 'none'}."
        )
    entry = manifest.subsets[split]
    return Store(
        folder,
        split,
        manifest,
        map_lengths(folder / split, entry),
        [
            Place(folder / split / shard.name, shard.documents, shard.bytes)
            for shard in entry.shards
        ],
        TOKEN_DTYPES[manifest.dtype],
    )


def _open_synthetic(made: Generated, split: str) -> Store:
    if split != SUBSET:
        raise InputError(
            f"{made.spec.place} has no subset {split!r}; it has: {SUBSET}. Another seed is other data: {made.spec.name}"
            f":seed={made.spec.seed + 1}"
        )
    path = Path(made.spec.place)
    return Store(path, split, made.manifest, made.lengths, [], made.dtype, made)


def _open_prefix(stem: Path) -> Store:
    refuse_lone_shard(stem)
    shard, lengths = map_prefix(stem)
    place = Place(stem, lengths.size, shard.tokens.nbytes, shard)
    return Store(stem, "", None, StoreLengths(lengths), [place], shard.tokens.dtype)
