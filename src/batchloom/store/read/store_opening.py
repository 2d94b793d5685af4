"""Opening a store, a bare Megatron prefix, or synthetic data by name."""

import contextlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from batchloom.core.addresses import is_url, redact_url, strip_file_scheme
from batchloom.core.errors import InputError, SettingsError, StoreError
from batchloom.core.files import describe_os_error, find_cache_folder, refuse_url
from batchloom.core.settings import as_int, quote_value, raise_problems
from batchloom.core.synthetic_data import DUMMY, SYNTHETIC, parse_synthetic_spec
from batchloom.store.format.layout import MANIFEST_NAME, SUBSETS, make_missing_store_error
from batchloom.store.format.manifest import Manifest, read_manifest
from batchloom.store.format.objectives import OBJECTIVES
from batchloom.store.read.local_reader import LocalReader
from batchloom.store.read.remote_store import VERIFY_MODES, RemoteSubset, VerifyMode, open_remote_manifest
from batchloom.store.read.store_reader import Store, StoreLocation
from batchloom.store.read.stored_media import filter_by_media, normalize_media_filter
from batchloom.store.read.synthetic_store import SUBSET, SyntheticReader, is_synthetic

_CACHE_LIMIT = 50 * 10**9


def open_store(
    path: str | os.PathLike[str],
    split: str = "train",
    *,
    generation: int | None = None,
    removals: int | None = None,
    cache: str | os.PathLike[str] | None = None,
    cache_limit: int | None = None,
    verify: VerifyMode | None = None,
    media: str | None = None,
) -> Store:
    """Open one subset of a store, a bare Megatron prefix, or synthetic data by name.

    Args:
        path: a store's folder, or its URL (``s3://``, ``gs://``, ``https://``, anything fsspec reads:
            docs/how-to/prepare/remote.md); or ``path/name`` of a ``name.bin``/``name.idx`` pair from any writer and
            of any integer dtype, with or without one of the two suffixes. An adjacent ``name.mask`` marks the
            trained tokens. If the path does not exist, ``dummy`` and ``distributed_dummy``, also with settings
            (``dummy:documents=1000,kind=text``), name synthetic data (docs/how-to/prepare/synthetic.md).
        split: ``train``, ``val`` or ``test``; a bare prefix has no subsets and ignores it.
        generation: number of a generation, for a store with appended or removed documents; None
            for the newest.
        removals: number of a later generation: documents that it removed count as removed here, too. Plans and
            fingerprints stay those of ``generation``.
        cache: cache folder of a remote store, shared by all processes of a node; None:
            ``batchloom/blocks`` in the user's cache folder.
        cache_limit: maximum size of the cache in bytes; None: 50 GB.
        verify: ``first-read``: each 4 KiB of tokens is compared with its checksum when this process first
            reads it; ``full``: every time; ``off``: never. None: ``first-read`` for a URL, else ``off``. Masks,
            weights, pairs, columns and provenance of a local store are always verified, when first read.
        media: read only documents that hold exactly these media: ``none``, ``image``, ``audio`` or ``image+audio``;
            ``any`` for all with media. Plans skip the others; document numbers stay the same. None for all.

    Raises:
        StoreMissingError: there is neither a store nor a prefix at ``path``.
        GenerationError: the generation never existed or was compacted away; lists the available ones.
        StoreError: the store is damaged, of another format, or names files outside itself.
        InputError: the subset does not exist, is empty, or holds no such media; ``path`` is not a path, or is a shard
            of a store of synthetic documents or of another objective; a URL cannot be reached.
        SettingsError: a setting is invalid, a generation is given for data without any, or a cache for a local store.
    """
    if media is not None:
        normalize_media_filter(media)
        store = open_store(
            path,
            split,
            generation=generation,
            removals=removals,
            cache=cache,
            cache_limit=cache_limit,
            verify=verify,
        )
        return filter_by_media(store, media)
    location = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(location, str):
        raise InputError(
            f"{quote_value(path)} is not the location of a store: give the path or the URL of its folder, as a string."
        )
    is_remote = is_url(location)
    if not is_remote:
        refuse_url(path, "The store", may_be_remote=True)
        location = strip_file_scheme(location)
    numbers = {"generation": generation, "removals": removals}
    problems = [
        f"{name}: {quote_value(number)} is not the number of a generation"
        for name, number in numbers.items()
        if number is not None and as_int(number) is None
    ]
    if verify is not None and verify not in VERIFY_MODES:
        problems.append(f"verify: {quote_value(verify)} is not one of {', '.join(VERIFY_MODES)}")
    if not is_remote and (cache is not None or cache_limit is not None):
        problems.append(f"cache: only remote stores are cached, and {location} is not a URL")
    elif cache_limit is not None and (as_int(cache_limit) or 0) < 1:
        problems.append(f"cache_limit: {quote_value(cache_limit)} is not a number of bytes above 0")
    raise_problems(problems)
    if not is_remote:
        store = _open_local(location, split, generation, verify or "off")
    else:
        cache_folder = None if cache is None else _resolve_cache_folder(cache)
        store = _open_remote(
            location, split, generation, cache_folder, cache_limit or _CACHE_LIMIT, verify or "first-read"
        )
    if removals is None or removals == store.location.generation:
        return store
    later = open_store(path, split, generation=removals, cache=cache, cache_limit=cache_limit, verify=verify)
    store.reader.remove(later.contents.removed)
    location_options = {**store.location.options, "removals": removals}
    return Store(store.path, store.reader, replace(store.location, options=location_options))


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
        manifest = read_manifest(folder, generation)
        _refuse_missing_subset(manifest, split, folder)
        options = {"generation": manifest.generation} | ({} if verify == "off" else {"verify": verify})
        located = replace(_locate(str(folder), options), is_chosen=generation is not None)
        return Store(folder, LocalReader(folder, split, manifest, verify), located)
    spec = None if is_prefix or is_there else parse_synthetic_spec(path)
    if not is_prefix and spec is None:
        raise make_missing_store_error(Path(path))
    if generation is not None:
        raise SettingsError([f"generation: only stores have generations, and {path} is not a store"])
    if verify != "off":
        raise SettingsError([f"verify: only stores have checksums, and {path} is not a store"])
    if spec is None:
        refuse_standalone_shard(stem)
        return Store(stem, LocalReader(stem, "", None), _locate(str(stem), {}))
    if split != SUBSET:
        raise InputError(
            f"{spec.spec_string} has no subset {split!r}; it has: {SUBSET}. Another seed gives other data: "
            f"{spec.name}:seed={spec.seed + 1}"
        )
    location = replace(_locate(spec.spec_string, {}), on_disk=False, replicated=spec.name == DUMMY)
    return Store(Path(spec.spec_string), SyntheticReader(spec), location)


def _locate(address: str, options: dict[str, Any]) -> StoreLocation:
    return StoreLocation(address=address, name=address, options=options, open=open_store)


def _open_remote(
    url: str, split: str, generation: int | None, cache: Path | None, cache_limit: int, verify: VerifyMode
) -> Store:
    manifest = open_remote_manifest(url, generation)
    _refuse_missing_subset(manifest, split, redact_url(url))
    folder = cache or find_cache_folder() / "blocks"
    reader = RemoteSubset(url, split, manifest, cache=folder, cache_limit=cache_limit, verify=verify)
    options = {
        "generation": manifest.generation,
        "cache": None if cache is None else str(cache),
        "cache_limit": cache_limit,
        "verify": verify,
    }
    location = StoreLocation(
        address=reader.url,
        name=reader.name,
        options=options,
        open=open_store,
        is_remote=True,
        is_chosen=generation is not None,
    )
    return Store(Path(redact_url(url)), reader, location)


def _refuse_missing_subset(manifest: Manifest, split: str, store_path: Path | str) -> None:
    available_subsets = [name for name in SUBSETS if name in manifest.subsets and manifest.subsets[name].documents]
    if split not in available_subsets:
        raise InputError(
            f"{store_path} has no documents in subset {quote_value(split)}; it has: "
            f"{', '.join(available_subsets) or 'none'}."
        )


def refuse_standalone_shard(stem: Path) -> None:
    """Refuse a shard of a store whose documents must not be read without it.

    These stores hold synthetic documents, documents of another objective, media or removed documents. The shard alone
    would pass for real data, or for answers that are all to be imitated.
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
    elif manifest.objective:
        content = OBJECTIVES[manifest.objective].contents
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
            "be read. Read it with batchloom.Loader (docs/how-to/prepare/media.md)."
        )
