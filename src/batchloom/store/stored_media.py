"""The media of an open store's documents, and the processor that its tokens were made for."""

import json
from collections import OrderedDict
from functools import cached_property
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import InputError, StoreError
from batchloom.core.files import because, read_regular
from batchloom.store.format import PROCESSOR_NAME, REPORT_NAME, of_generation
from batchloom.store.media import MediaRows, StoredMedium, map_media, stored_media
from batchloom.store.reader import Store

# Shards whose media are kept mapped.
_MAPPED = 256


@final
class StoreMedia:
    """Which media documents of a store hold, and where these lie.

    Args:
        store: an open store.

    Raises:
        InputError: the store lies elsewhere.
    """

    def __init__(self, store: Store) -> None:
        if store.is_far and store.manifest and store.manifest.processor:
            raise InputError(
                f"{store.place} holds images or audio and lies elsewhere, from where these are not read yet: copy it "
                "here first."
            )
        self._store = store
        self._bounds = np.array(store.bounds, np.int64)
        entry = store.manifest.subsets.get(store.split) if store.manifest else None
        self._listed = [shard.media is not None for shard in entry.shards] if entry else []
        self._mapped: OrderedDict[int, MediaRows] = OrderedDict()

    @property
    def any(self) -> bool:
        """Whether any document holds a medium."""
        return any(self._listed)

    @cached_property
    def processor(self) -> dict[str, Any] | None:
        """The state of the processor; None where the store has none.

        Raises:
            StoreError: it cannot be read, or is not the manifest's.
        """
        entry = self._store.manifest.processor if self._store.manifest else None
        if entry is None:
            return None
        path = self._store.path / PROCESSOR_NAME
        try:
            state = json.loads(read_regular(path))
        except OSError as error:
            raise StoreError(f"{path} cannot be read: {because(error)}.") from error
        except ValueError as error:
            raise StoreError(f"{path} is no JSON: {error}.") from error
        if not isinstance(state, dict) or state.get("fingerprint") != entry.fingerprint:
            raise StoreError(f"{path} is not the processor of the manifest beside it.")
        return state

    @cached_property
    def folders(self) -> dict[str, str]:
        """Where paths of media begin, by the source that names them, as the reports of the store know."""
        found: dict[str, str] = {}
        manifest = self._store.manifest
        for entry in manifest.all_history if manifest else ():
            path = self._store.path / of_generation(REPORT_NAME, entry.number)
            if path.is_file():
                said = json.loads(read_regular(path)).get("media", {})
                found |= said if isinstance(said, dict) else {}
        return found

    def of(self, documents: NDArray[np.int64]) -> list[list[StoredMedium]]:
        """The media of documents [N], each in the order of its tokens.

        Raises:
            StoreError: a file of media is missing or damaged.
        """
        shards = np.searchsorted(self._bounds, documents, side="right") - 1
        return [
            self._of(shard, document)
            for shard, document in zip(shards.tolist(), documents.tolist(), strict=True)
        ]

    def _of(self, shard: int, document: int) -> list[StoredMedium]:
        if not self._listed[shard]:
            return []
        rows, first = self._rows(shard), int(self._bounds[shard])
        begin, end = rows.of(document - first)
        return stored_media(rows, range(begin, end), first, self._stem(shard, ".blobs"))

    def _rows(self, shard: int) -> MediaRows:
        found = self._mapped.get(shard)
        if found is None:
            documents = int(self._bounds[shard + 1] - self._bounds[shard])
            found = self._mapped[shard] = map_media(self._stem(shard, ".media"), documents)
            if len(self._mapped) > _MAPPED:
                self._mapped.popitem(last=False)
        return found

    def _stem(self, shard: int, suffix: str) -> Path:
        return self._store.stems[shard].with_suffix(suffix)
