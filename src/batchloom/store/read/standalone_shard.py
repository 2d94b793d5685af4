"""Shards named without their store, where the store says of them what they do not say themselves."""

from pathlib import Path

from batchloom.core.errors import InputError, StoreError
from batchloom.core.synthetic_data import SYNTHETIC
from batchloom.store.format import MANIFEST_NAME, SUBSETS, Manifest, read_manifest
from batchloom.store.read.synthetic_store import is_synthetic


def refuse_standalone_shard(stem: Path) -> None:
    """Refuse a shard of a store of synthetic documents, of preferences or of media, or that held removed ones.

    Its files alone would pass for real data, or for answers that are all to be imitated.

    Args:
        stem: the prefix of the shard.

    Raises:
        InputError: it is one; names the store.
    """
    folder = stem.absolute().parent
    store = folder.parent
    if folder.name not in SUBSETS or not (store / MANIFEST_NAME).is_file():
        return
    try:
        manifest = read_manifest(store)
    except StoreError:
        # Nothing is known of them then, as of anybody's prefix.
        return
    if is_synthetic(manifest):
        content = f"made-up documents (source={SYNTHETIC})"
    elif manifest.preferences:
        content = f"preferences ({manifest.preferences})"
    elif manifest.processor is not None:
        content = "documents with images or audio"
    elif (subset := manifest.subsets.get(folder.name)) and subset.removed:
        content = "documents of which some were removed"
    else:
        return
    raise InputError(
        f"{stem} is a shard of a store of {content}, which its files alone do not say; name the store itself: {store}"
    )


def refuse_media(manifest: Manifest | None, store_name: str, reader: str) -> None:
    """Refuse a store with images or audio where its tokens alone are read.

    Args:
        manifest: of the store; None for what has none.
        store_name: the store, for the words of the error.
        reader: reads them, in words.

    Raises:
        InputError: it is one.
    """
    if manifest is not None and manifest.processor is not None:
        raise InputError(
            f"{store_name} holds images or audio, which {reader} does not take along yet: what stands for them "
            "would be left "
            "alone. Read it with batchloom.Loader (docs/media.md)."
        )
