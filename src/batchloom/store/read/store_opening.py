"""Opening a store, a bare Megatron prefix, or synthetic data by name."""

import contextlib
import os
from pathlib import Path

from batchloom.core.addresses import is_url, redact_url as address, strip_file_scheme
from batchloom.core.errors import InputError, SettingsError, StoreError
from batchloom.core.files import describe_os_error, refuse_url
from batchloom.core.settings import as_int, quote_value
from batchloom.core.synthetic_data import SYNTHETIC, parse_synthetic_spec
from batchloom.store.format.layout import MANIFEST_NAME, SUBSETS, TOKEN_DTYPES, make_missing_store_error
from batchloom.store.format.manifest import Manifest, SubsetEntry, read_manifest
from batchloom.store.format.store_lengths import StoreLengths, map_lengths
from batchloom.store.read.local_reader import FirstRead, LocalReader
from batchloom.store.read.mapped_shards import MappedShards, ShardLocation, ShardTable, map_prefix
from batchloom.store.read.remote_store import (
    CACHE_LIMIT,
    VERIFY_MODES,
    RemoteStoreSettings,
    RemoteSubset,
    VerifyMode,
    open_remote_manifest,
)
from batchloom.store.read.store_reader import Store, StoreLocation
from batchloom.store.read.stored_media import filter_by_media, normalize_media_filter
from batchloom.store.read.synthetic_store import SUBSET, SyntheticReader, is_synthetic


def open_store(
    path: str | os.PathLike[str],
    split: str = "train",
    *,
    generation: int | None = None,
    cache: str | os.PathLike[str] | None = None,
    cache_limit: int | None = None,
    verify: VerifyMode | None = None,
    media: str | None = None,
) -> Store:
    """Open one subset of a store, a bare Megatron prefix, or synthetic data by name.

    Args:
        path: a store's folder, or its URL (``s3://``, ``gs://``, ``https://``, anything fsspec reads:
            docs/remote.md); or ``path/name`` of a ``name.bin``/``name.idx`` pair from any writer and of any integer
            dtype, with or without one of the two suffixes. An adjacent ``name.mask`` marks the trained tokens. If
            the path does not exist, ``dummy`` and ``distributed_dummy``, also with settings
            (``dummy:documents=1000,kind=text``), name synthetic data (docs/synthetic.md).
        split: ``train``, ``val`` or ``test``; a bare prefix has no subsets and ignores it.
        generation: number of a generation, for a store with appended or removed documents; None
            for the newest.
        cache: cache folder of a remote store, shared by all processes of a node; None:
            ``batchloom/blocks`` in the user's cache folder.
        cache_limit: maximum size of the cache in bytes; None: 50 GB.
        verify: ``first-read``: each 4 KiB of tokens is compared with its checksum when this process first
            reads it; ``full``: every time; ``off``: never. None: ``first-read`` for a URL, else ``off``.
        media: read only documents that hold exactly these media: ``none``, ``image``, ``audio`` or ``image+audio``;
            ``any`` for all with media. Plans skip the others; document numbers stay the same. None for all.

    Raises:
        StoreMissingError: there is neither a store nor a prefix at ``path``.
        GenerationError: the generation never existed or was compacted away; lists the available ones.
        StoreError: the store is damaged, of another format, or names files outside itself.
        InputError: the subset does not exist, is empty, or holds no such media; ``path`` is not a path, or is a shard
            of a store of synthetic documents or preferences; a URL cannot be reached.
        SettingsError: a setting is invalid, a generation is given for data without any, or a cache for a local store.
    """
    if media is not None:
        normalize_media_filter(media)
        store = open_store(path, split, generation=generation, cache=cache, cache_limit=cache_limit, verify=verify)
        return filter_by_media(store, media)
    if generation is not None and as_int(generation) is None:
        raise SettingsError([f"generation: {quote_value(generation)} is not the number of a generation"])
    path_or_url = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(path_or_url, str):
        raise InputError(
            f"{quote_value(path)} is not the location of a store: give the path or the URL of its folder, as a string."
        )
    if is_url(path_or_url):
        settings = RemoteStoreSettings(
            cache=None if cache is None else _resolve_cache_folder(cache),
            limit=CACHE_LIMIT if cache_limit is None else cache_limit,
            verify="first-read" if verify is None else verify,
        )
        return _open_remote(path_or_url, split, generation, settings)
    refuse_url(path, "The store")
    path = strip_file_scheme(path_or_url)
    if cache is not None or cache_limit is not None:
        raise SettingsError([f"cache: only remote stores are cached, and {path} is not a URL"])
    if verify is not None and verify not in VERIFY_MODES:
        raise SettingsError([f"verify: {quote_value(verify)} is not one of {', '.join(VERIFY_MODES)}"])
    return _open_local(path, split, generation, verify or "off")


def _resolve_cache_folder(cache: object) -> Path:
    """Return the absolute cache folder, independent of later changes of directory."""
    folder = os.fspath(cache) if isinstance(cache, os.PathLike) else cache
    if isinstance(folder, str) and folder and "\0" not in folder and not is_url(folder):
        # A path of an unknown user (~name) raises RuntimeError and is refused below.
        with contextlib.suppress(RuntimeError):
            return Path(strip_file_scheme(folder)).expanduser().absolute()
    raise SettingsError([f"cache: {quote_value(cache)} is not a local folder: give its path, as a string"])


def _open_local(path: str, split: str, generation: int | None, verify: VerifyMode) -> Store:
    # Files are mapped at their first read, perhaps after the process changed its working directory.
    folder = Path(path).absolute()
    stem = folder.with_suffix("") if folder.suffix in (".bin", ".idx") else folder
    try:
        is_folder = folder.is_dir()
        is_prefix = not is_folder and stem.with_name(stem.name + ".idx").is_file()
        is_there = os.path.lexists(folder)
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {describe_os_error(error)}.") from error
    if is_folder:
        return _open_folder(folder, split, generation, verify)
    spec = None if is_prefix or is_there else parse_synthetic_spec(path)
    if generation is not None and (is_prefix or spec):
        raise SettingsError([f"generation: only stores have generations, and {path} is not a store"])
    if verify != "off" and (is_prefix or spec):
        raise SettingsError([f"verify: only stores have checksums, and {path} is not a store"])
    if is_prefix:
        return _open_prefix(stem)
    if spec:
        return _open_synthetic(SyntheticReader(spec), split)
    raise make_missing_store_error(Path(path))


def _open_folder(folder: Path, split: str, generation: int | None, verify: VerifyMode) -> Store:
    manifest = read_manifest(folder, generation)
    entry = _get_subset_entry(manifest, split, folder)
    subset_folder = folder / split
    checks = None if verify == "off" else FirstRead(subset_folder, entry, always=verify == "full")
    lengths = map_lengths(subset_folder, entry)
    shard_locations = [
        ShardLocation(subset_folder / shard.name, shard.documents, shard.bytes) for shard in entry.shards
    ]
    shards = MappedShards(ShardTable(shard_locations), TOKEN_DTYPES[manifest.dtype], lengths.slice)
    reader = LocalReader(folder, split, manifest, lengths, shards, checks)
    options = {"generation": manifest.generation}
    location = StoreLocation(
        address=str(folder),
        name=str(folder),
        options=options if checks is None else {**options, "verify": verify},
        open=open_store,
    )
    return Store(folder, split, manifest, location, reader)


def _open_remote(url: str, split: str, generation: int | None, settings: RemoteStoreSettings) -> Store:
    manifest = open_remote_manifest(url, generation)
    _get_subset_entry(manifest, split, address(url))
    reader = RemoteSubset(url, split, manifest, settings)
    location = StoreLocation(
        address=reader.url,
        name=address(reader.url),
        options={
            "generation": manifest.generation,
            "cache": None if settings.cache is None else str(settings.cache),
            "cache_limit": settings.limit,
            "verify": settings.verify,
        },
        open=open_store,
        is_remote=True,
    )
    return Store(Path(address(url)), split, manifest, location, reader)


def _get_subset_entry(manifest: Manifest, split: str, store_path: Path | str) -> SubsetEntry:
    available_subsets = [name for name in SUBSETS if name in manifest.subsets and manifest.subsets[name].documents]
    if split not in available_subsets:
        raise InputError(
            f"{store_path} has no documents in subset {quote_value(split)}; it has: "
            f"{', '.join(available_subsets) or 'none'}."
        )
    return manifest.subsets[split]


def _open_synthetic(reader: SyntheticReader, split: str) -> Store:
    if split != SUBSET:
        raise InputError(
            f"{reader.spec.spec_string} has no subset {split!r}; it has: {SUBSET}. Another seed gives other data: "
            f"{reader.spec.name}:seed={reader.spec.seed + 1}"
        )
    location = StoreLocation(
        address=str(Path(reader.spec.spec_string)),
        name=str(Path(reader.spec.spec_string)),
        options={},
        open=open_store,
        on_disk=False,
        replicated=reader.replicated,
    )
    return Store(Path(reader.spec.spec_string), split, reader.manifest, location, reader)


def _open_prefix(stem: Path) -> Store:
    refuse_standalone_shard(stem)
    shard, counts = map_prefix(stem)
    lengths = StoreLengths(counts)
    table = ShardTable([ShardLocation(stem, lengths.size, shard.tokens.nbytes, shard)])
    shards = MappedShards(table, shard.tokens.dtype, lengths.slice)
    reader = LocalReader(stem, "", None, lengths, shards)
    location = StoreLocation(address=str(stem), name=str(stem), options={}, open=open_store)
    return Store(stem, "", None, location, reader)


def refuse_standalone_shard(stem: Path) -> None:
    """Refuse a shard of a store whose documents must not be read without it.

    These stores hold synthetic documents, preferences, media or removed documents. The shard alone would pass for real
    data, or for answers that are all to be imitated.
    """
    folder = stem.absolute().parent
    store = folder.parent
    if folder.name not in SUBSETS or not (store / MANIFEST_NAME).is_file():
        return
    try:
        manifest = read_manifest(store)
    except StoreError:
        # With an unreadable manifest the shard is treated as any other prefix.
        return
    if is_synthetic(manifest):
        content = f"synthetic documents (source={SYNTHETIC})"
    elif manifest.preferences:
        content = f"preferences ({manifest.preferences})"
    elif manifest.processor is not None:
        content = "documents with images or audio"
    elif (subset := manifest.subsets.get(folder.name)) and subset.removed:
        content = "documents, some of them removed"
    else:
        return
    raise InputError(
        f"{stem} is a shard of a store of {content}. Its files alone do not record that; name the store itself: {store}"
    )


def refuse_media(manifest: Manifest | None, store_name: str, reader: str) -> None:
    """Refuse a store with images or audio for a reader of tokens only."""
    if manifest is not None and manifest.processor is not None:
        raise InputError(
            f"{store_name} holds images or audio, which {reader} does not support yet: only their placeholders would "
            "be read. Read it with batchloom.Loader (docs/media.md)."
        )
