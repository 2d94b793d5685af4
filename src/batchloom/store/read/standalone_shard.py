"""Refusal of reads that would lose what only a store's manifest records."""

from pathlib import Path

from batchloom.core.errors import InputError, StoreError
from batchloom.core.synthetic_data import SYNTHETIC
from batchloom.store.format.layout import MANIFEST_NAME, SUBSETS
from batchloom.store.format.manifest import Manifest, read_manifest
from batchloom.store.read.synthetic_store import is_synthetic


def refuse_standalone_shard(stem: Path) -> None:
    """Refuse a shard of a store whose documents must not be read without it.

    These stores hold synthetic documents, preferences, media or removed documents. The shard alone would pass for real
    data, or for answers that are all to be imitated.

    Args:
        stem: prefix of the shard.

    Raises:
        InputError: the shard belongs to such a store; names the store.
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
    """Refuse a store with images or audio for a reader of tokens only.

    Args:
        manifest: manifest of the store; None for data without a manifest.
        store_name: the store, for the error message.
        reader: the reader, for the error message.

    Raises:
        InputError: the store holds images or audio.
    """
    if manifest is not None and manifest.processor is not None:
        raise InputError(
            f"{store_name} holds images or audio, which {reader} does not support yet: only their placeholders would "
            "be read. Read it with batchloom.Loader (docs/media.md)."
        )
