"""Shards named without their store, where the store says of them what they do not say themselves."""

from pathlib import Path

from batchloom.core.errors import InputError, StoreError
from batchloom.core.synthetic import SYNTHETIC
from batchloom.store.format import MANIFEST_NAME, SUBSETS
from batchloom.store.manifest import read_manifest
from batchloom.store.synthetic import is_synthetic


def refuse_lone_shard(stem: Path) -> None:
    """Refuse a shard that lies in a store of synthetic documents or of preferences, or that held removed ones.

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
        what = f"made-up documents (source={SYNTHETIC})"
    elif manifest.preferences:
        what = f"preferences ({manifest.preferences})"
    elif (subset := manifest.subsets.get(folder.name)) and subset.removed:
        what = "documents of which some were removed"
    else:
        return
    raise InputError(
        f"{stem} is a shard of a store of {what}, which its files alone do not say; name the store itself: {store}"
    )
