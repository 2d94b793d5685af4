"""The media of an open store's documents, and the processor that its tokens were made for."""

from collections import OrderedDict
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, final

import msgspec
import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import InputError, StoreError
from batchloom.core.files import NOT_JSON, because, read_regular
from batchloom.core.media import KINDS, Kind
from batchloom.store.format import PROCESSOR_NAME, REPORT_NAME, checksum, of_generation
from batchloom.store.manifest import ProcessorEntry
from batchloom.store.media import MediaRows, StoredMedium, map_media, stored_media
from batchloom.store.reader import Store

_RESTORE = "restore it from a copy, or prepare the data again"
# Shards whose media are kept mapped.
_MAPPED = 256


def read_processor_state(folder: Path, entry: ProcessorEntry) -> dict[str, Any]:
    """What a store keeps of its processor.

    Raises:
        StoreError: it cannot be read, or is not what the manifest says.
    """
    path = folder / PROCESSOR_NAME
    try:
        data = read_regular(path)
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {because(error)}; {_RESTORE}.") from error
    if checksum(data) != entry.state:
        raise StoreError(f"{path} is not the one that the manifest beside it names; {_RESTORE}.")
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except NOT_JSON as error:
        raise StoreError(f"{path} cannot be read: {error}; {_RESTORE}.") from error


class MediaCount(NamedTuple):
    """Media of one kind: how many, in how many documents, and how many tokens stand for them."""

    media: int
    documents: int
    tokens: int


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
        self._mapped: OrderedDict[int, tuple[MediaRows, NDArray[np.uint32]]] = OrderedDict()

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
        state: dict[str, Any] = read_processor_state(self._store.path, entry)
        return state

    @cached_property
    def folders(self) -> list[dict[str, str]]:
        """Where paths of media begin, by the source that names them, of each generation that read inputs.

        Raises:
            StoreError: a report is damaged.
        """
        manifest = self._store.manifest
        reports = [
            self._store.path / of_generation(REPORT_NAME, entry.number)
            for entry in (manifest.all_history if manifest else ())
        ]
        return [_folders_in(path) if path.is_file() else {} for path in reports]

    def counts(self) -> dict[Kind, MediaCount]:
        """How many media of each kind there are, and how many tokens stand for them.

        Raises:
            StoreError: a file of media is missing or damaged.
        """
        found = np.zeros((3, len(KINDS)), np.int64)
        for shard in np.flatnonzero(self._listed).tolist():
            rows = self._rows(shard)[0].rows
            kinds = rows["kind"].astype(np.int64)
            owners = np.unique(rows["document"].astype(np.int64) * len(KINDS) + kinds) % len(KINDS)
            tokens = np.bincount(kinds, rows["tokens"], len(KINDS)).astype(np.int64)
            found += [
                np.bincount(kinds, minlength=len(KINDS)),
                np.bincount(owners, minlength=len(KINDS)),
                tokens,
            ]
        told = {kind: MediaCount(*some) for kind, some in zip(KINDS, found.T.tolist(), strict=True)}
        return {kind: one for kind, one in told.items() if one.media}

    def folder_of(self, document: int) -> str | None:
        """Where paths of media begin that a document's source names; None where no report says."""
        known = {folder for some in self.folders for folder in some.values()}
        if len(known) == 1:
            return next(iter(known))
        manifest = self._store.manifest
        shard = int(np.searchsorted(self._bounds, document, side="right")) - 1
        part = int(self._store.shard_origins(shard).parts[document - int(self._bounds[shard])])
        if manifest is None:
            return None
        parts = np.cumsum([len(source.parts) for source in manifest.sources])
        source = int(np.searchsorted(parts, part, side="right"))
        before = [entry.sources for entry in manifest.all_history]
        generation = int(np.searchsorted(before, source, side="right"))
        return self.folders[generation].get(manifest.sources[source].name)

    def of(self, documents: NDArray[np.int64]) -> list[list[StoredMedium]]:
        """The media of documents [N], each in the order of its tokens.

        Raises:
            StoreError: a file of media is missing or damaged.
        """
        found: list[list[StoredMedium]] = [[] for _ in documents]
        if not self.any:  # bare prefixes and made-up documents have no shards listed
            return found
        shards = np.searchsorted(self._bounds, documents, side="right") - 1
        for shard in np.unique(shards).tolist():
            if self._listed[shard]:
                self._add(found, shard, np.flatnonzero(shards == shard), documents)
        return found

    def _add(
        self,
        found: list[list[StoredMedium]],
        shard: int,
        at: NDArray[np.int64],
        documents: NDArray[np.int64],
    ) -> None:
        """Put the media of those documents that lie in a shard where they belong."""
        rows, owners = self._rows(shard)
        first, blobs = int(self._bounds[shard]), self._stem(shard, ".blobs")
        local = (documents[at] - first).astype(np.uint32)
        begins = np.searchsorted(owners, local, side="left").tolist()
        ends = np.searchsorted(owners, local, side="right").tolist()
        for place, begin, end in zip(at.tolist(), begins, ends, strict=True):
            found[place] = stored_media(rows, range(begin, end), first, blobs)

    def _rows(self, shard: int) -> tuple[MediaRows, NDArray[np.uint32]]:
        """The media of a shard, and the document of each in an array of its own, which is searched faster."""
        found = self._mapped.get(shard)
        if found is None:
            documents = int(self._bounds[shard + 1] - self._bounds[shard])
            rows = map_media(self._stem(shard, ".media"), documents)
            found = self._mapped[shard] = rows, np.ascontiguousarray(rows.rows["document"])
            if len(self._mapped) > _MAPPED:
                self._mapped.popitem(last=False)
        return found

    def _stem(self, shard: int, suffix: str) -> Path:
        return self._store.stems[shard].with_suffix(suffix)


class _Told(msgspec.Struct, frozen=True):
    """What a report says of where paths of media begin."""

    media: dict[str, str] = {}


def _folders_in(report: Path) -> dict[str, str]:
    try:
        return msgspec.json.decode(read_regular(report), type=_Told).media
    except OSError as error:
        why = because(error)
    except NOT_JSON as error:
        why = str(error)
    raise StoreError(
        f"{report} cannot be read: {why}; it says where paths of images and audio begin. Restore it, or give "
        "Loader(media=MediaSpec(folder=...))."
    )
