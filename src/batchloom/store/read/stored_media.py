"""Media and processor state of an open store, and the filter by media."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, final

import msgspec
import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import InputError, SettingsError, StoreError
from batchloom.core.files import JSON_DECODE_ERRORS, describe_os_error
from batchloom.core.medium import MEDIUM_KINDS, MediumKind
from batchloom.core.settings import quote_value, suggest
from batchloom.store.format.layout import PROCESSOR_NAME, REPORT_NAME, compute_checksum, format_generation_file_name
from batchloom.store.format.manifest import ProcessorEntry
from batchloom.store.format.media_index import MediaRows, StoredMedium, make_stored_media
from batchloom.store.format.store_lengths import mask_removed
from batchloom.store.read.store_reader import Store
from batchloom.store.read.subset_reader import FilteredLengths, LengthReader

_RESTORE_REMEDY = "restore it from a copy, or prepare the data again"
# Maximum number of shards whose media stay mapped.
_MAX_MAPPED = 256
NO_MEDIA = "none"
ANY_MEDIA = "any"
_KIND_SEPARATOR = "+"
# Number of sets of kinds. A set is encoded as bits in the order of MEDIUM_KINDS.
_KIND_SETS = 1 << len(MEDIUM_KINDS)


def read_processor_state(
    read_file: Callable[[str], bytes], store_path: Path | str, entry: ProcessorEntry
) -> dict[str, Any]:
    path = f"{store_path}/{PROCESSOR_NAME}"
    try:
        data = read_file(PROCESSOR_NAME)
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {describe_os_error(error)}; {_RESTORE_REMEDY}.") from error
    if compute_checksum(data) != entry.state:
        raise StoreError(f"{path} is not the one that the manifest next to it names; {_RESTORE_REMEDY}.")
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except JSON_DECODE_ERRORS as error:
        raise StoreError(f"{path} cannot be read: {error}; {_RESTORE_REMEDY}.") from error


def choose_default_overlong(store: Store) -> Literal["drop", "split"]:
    """Return the default overlong policy: conversations and media are never cut."""
    return "drop" if store.contents.conversations or has_media(store) else "split"


def has_media(store: Store) -> bool:
    """Return whether an open store may yield documents with media."""
    entry = store.manifest.subsets.get(store.split) if store.manifest else None
    if store.contents.media == "none":
        return False
    return entry is not None and any(shard.media is not None for shard in entry.shards)


class MediaCount(NamedTuple):
    """Number of media of one kind, of their documents and of their tokens."""

    media: int
    documents: int
    tokens: int


class _ShardMediaSummary(NamedTuple):
    """Media of a shard, with totals of its documents that hold some [D], ascending."""

    rows: MediaRows  # media of the shard
    owners: NDArray[np.uint32]  # document of each medium, as a contiguous array for faster searches
    documents: NDArray[np.uint32]  # shard-relative numbers of documents with media, uint32 [D]
    tokens: NDArray[np.int64]  # placeholder tokens of each document, int64 [D]
    kinds: NDArray[np.uint8]  # kinds of each document, one bit per kind in the order of ``MEDIUM_KINDS``, uint8 [D]


def _summarize_rows(rows: MediaRows) -> _ShardMediaSummary:
    owners = np.ascontiguousarray(rows.rows["document"])
    documents, firsts = np.unique(owners, return_index=True)
    if not len(documents):
        return _ShardMediaSummary(rows, owners, documents, np.zeros(0, np.int64), np.zeros(0, np.uint8))
    bits = np.left_shift(1, rows.rows["kind"].astype(np.uint8), dtype=np.uint8)
    tokens = np.add.reduceat(rows.rows["tokens"].astype(np.int64), firsts)
    return _ShardMediaSummary(rows, owners, documents, tokens, np.bitwise_or.reduceat(bits, firsts))


@final
class StoreMedia:
    """Media of the documents of a store, and their locations.

    Args:
        store: an open store.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._bounds = np.array(store.shards.bounds, np.int64)
        entry = store.manifest.subsets.get(store.split) if store.manifest else None
        self._shard_has_media = [shard.media is not None for shard in entry.shards] if entry else []
        self._names = [shard.name for shard in entry.shards] if entry else []
        self._mapped: OrderedDict[int, _ShardMediaSummary] = OrderedDict()

    @property
    def any(self) -> bool:
        """True if any document holds a medium."""
        return any(self._shard_has_media)

    @cached_property
    def processor(self) -> dict[str, Any] | None:
        """State of the processor; None if the store has none.

        Raises:
            StoreError: the state cannot be read or is not the manifest's.
        """
        entry = self._store.manifest.processor if self._store.manifest else None
        if entry is None:
            return None
        state: dict[str, Any] = read_processor_state(self._store.reader.file, self._store.location.name, entry)
        return state

    @cached_property
    def folders(self) -> list[str | None]:
        """Base folder of the media paths of each source; None if no report names it."""
        manifest = self._store.manifest
        folders = list[str | None]()
        for entry in manifest.all_history if manifest else ():
            report = _read_media_folders(self._store, format_generation_file_name(REPORT_NAME, entry.number))
            folders += [report.get(source.name) for source in manifest.list_sources_of(entry)] if manifest else []
        return folders

    def counts(self) -> dict[MediumKind, MediaCount]:
        """Count the media, documents and tokens of each kind.

        Raises:
            StoreError: a ``.media`` file is missing or damaged.
        """
        totals = np.zeros((3, len(MEDIUM_KINDS)), np.int64)
        for shard in np.flatnonzero(self._shard_has_media).tolist():
            rows = self._get_summary(shard).rows.rows
            kinds = rows["kind"].astype(np.int64)
            owners = np.unique(rows["document"].astype(np.int64) * len(MEDIUM_KINDS) + kinds) % len(MEDIUM_KINDS)
            tokens = np.bincount(kinds, rows["tokens"], len(MEDIUM_KINDS)).astype(np.int64)
            totals += [
                np.bincount(kinds, minlength=len(MEDIUM_KINDS)),
                np.bincount(owners, minlength=len(MEDIUM_KINDS)),
                tokens,
            ]
        counts_by_kind = {
            kind: MediaCount(*kind_totals) for kind, kind_totals in zip(MEDIUM_KINDS, totals.T.tolist(), strict=True)
        }
        return {kind: count for kind, count in counts_by_kind.items() if count.media}

    def shortest(self, longest: int, banned: NDArray[np.int64]) -> dict[MediumKind, int]:
        """Return an example document for each kind of media.

        It is the shortest eligible document of the first shard that has any. Eligible documents have at most
        ``longest`` tokens, are not removed, and are not in ``banned``, int64 [B].

        Raises:
            StoreError: a ``.media`` file is missing or damaged.
        """
        documents_by_kind: dict[MediumKind, int] = {}
        required_kinds = set(self.processor.get("tokens", MEDIUM_KINDS)) if self.processor else set()
        for shard in np.flatnonzero(self._shard_has_media).tolist():
            summary = self._get_summary(shard)
            documents = summary.owners.astype(np.int64) + int(self._bounds[shard])
            lengths = self._store.lengths.take(documents).astype(np.int64)
            is_eligible = (lengths <= longest) & ~mask_removed(self._store.contents.removed, documents)
            is_eligible &= ~np.isin(documents, banned)
            for number, kind in enumerate(MEDIUM_KINDS):
                candidates = np.flatnonzero(is_eligible & (summary.rows.rows["kind"] == number))
                if candidates.size and kind not in documents_by_kind:
                    documents_by_kind[kind] = int(documents[candidates[lengths[candidates].argmin()]])
            if required_kinds <= documents_by_kind.keys():
                break
        return documents_by_kind

    def folder_of(self, document: int) -> str | None:
        """Return the base folder of a document's media paths; None if no report names it.

        Raises:
            StoreError: a report is damaged.
        """
        if self._part_sources is None or len(self._known_folders) < 2:
            return next(iter(self._known_folders), None)
        shard = int(np.searchsorted(self._bounds, document, side="right")) - 1
        part = int(self._store.reader.provenance(shard, np.array([document - int(self._bounds[shard])])).parts[0])
        return self.folders[int(self._part_sources[part])]

    @cached_property
    def _known_folders(self) -> frozenset[str | None]:
        return frozenset(self.folders) - {None}

    @cached_property
    def _part_sources(self) -> NDArray[np.int64] | None:
        """Source of each part; None without a manifest."""
        manifest = self._store.manifest
        return None if manifest is None else self._store.reader.part_table.numbers

    def of(self, documents: NDArray[np.int64]) -> list[list[StoredMedium]]:
        """Return the media of each document [N], in the order of their tokens.

        Raises:
            StoreError: a ``.media`` file is missing or damaged.
        """
        media: list[list[StoredMedium]] = [[] for _ in documents]
        for shard, positions, summary, shard_documents in self._iter_shards(documents):
            # The blobs of a remote store have only a name.
            blobs = self._store.path / self._store.split / f"{self._names[shard]}.blobs"
            begins = np.searchsorted(summary.owners, shard_documents, side="left").tolist()
            ends = np.searchsorted(summary.owners, shard_documents, side="right").tolist()
            for position, begin, end in zip(positions.tolist(), begins, ends, strict=True):
                media[position] = make_stored_media(summary.rows, range(begin, end), int(self._bounds[shard]), blobs)
        return media

    def _iter_shards(
        self, documents: NDArray[np.int64]
    ) -> Iterator[tuple[int, NDArray[np.intp], _ShardMediaSummary, NDArray[np.uint32]]]:
        """Yield each shard with media, and the positions and rows of its documents."""
        if not self.any:  # Bare prefixes and synthetic data list no shards.
            return
        shards = np.searchsorted(self._bounds, documents, side="right") - 1
        for shard in np.unique(shards).tolist():
            if self._shard_has_media[shard]:
                positions = np.flatnonzero(shards == shard)
                shard_documents = (documents[positions] - int(self._bounds[shard])).astype(np.uint32)
                yield shard, positions, self._get_summary(shard), shard_documents

    def count_tokens(self, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of placeholder tokens in each document, int64 [N].

        Raises:
            StoreError: a ``.media`` file is missing or damaged.
        """
        token_counts = np.zeros(len(documents), np.int64)
        for positions, summary, indices in self._find_holding(documents):
            token_counts[positions] = summary.tokens[indices]
        return token_counts

    def list_kinds(self, documents: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return the kinds of media in each document, uint8 [N].

        Each kind is one bit, in the order of ``MEDIUM_KINDS``.

        Raises:
            StoreError: a ``.media`` file is missing or damaged.
        """
        kinds = np.zeros(len(documents), np.uint8)
        for positions, summary, indices in self._find_holding(documents):
            kinds[positions] = summary.kinds[indices]
        return kinds

    def holding(self, shard: int) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
        """Return the documents of a shard with media, int64 [D], and kinds, uint8 [D].

        Raises:
            StoreError: the ``.media`` file is missing or damaged.
        """
        if not self.any or not self._shard_has_media[shard]:
            return np.zeros(0, np.int64), np.zeros(0, np.uint8)
        summary = self._get_summary(shard)
        return summary.documents.astype(np.int64) + int(self._bounds[shard]), summary.kinds

    def _find_holding(
        self, documents: NDArray[np.int64]
    ) -> Iterator[tuple[NDArray[np.intp], _ShardMediaSummary, NDArray[np.intp]]]:
        """Yield, for each shard, the documents that hold media.

        Each item holds positions in ``documents``, the shard's summary, and indices into the summary.
        """
        for _, positions, summary, shard_documents in self._iter_shards(documents):
            indices = np.searchsorted(summary.documents, shard_documents)
            is_present = indices < len(summary.documents)
            is_present[is_present] = summary.documents[indices[is_present]] == shard_documents[is_present]
            yield positions[is_present], summary, indices[is_present]

    def _get_summary(self, shard: int) -> _ShardMediaSummary:
        summary = self._mapped.get(shard)
        if summary is None:
            summary = self._mapped[shard] = _summarize_rows(self._store.reader.media(shard))
            if len(self._mapped) > _MAX_MAPPED:
                self._mapped.popitem(last=False)
        return summary

    def read_bytes(self, medium: StoredMedium) -> bytes:
        """Return the stored bytes of a medium; fewer if the file ends earlier.

        Raises:
            StoreError: the bytes cannot be read, or those of a remote store do not match their checksums.
            InputError: a remote store cannot be reached.
        """
        if medium.blob is None:
            raise AssertionError(f"a medium of document {medium.document} is named only")
        shard = int(np.searchsorted(self._bounds, medium.document, side="right")) - 1
        return self._store.reader.blob(shard, medium.blob[1], medium.size)


class _MediaReport(msgspec.Struct, frozen=True):
    media: dict[str, str] = {}


def _read_media_folders(store: Store, name: str) -> dict[str, str]:
    report = f"{store.location.name}/{name}"
    try:
        return msgspec.json.decode(store.reader.file(name), type=_MediaReport).media
    except FileNotFoundError:
        return {}
    except OSError as error:
        why = describe_os_error(error)
    except JSON_DECODE_ERRORS as error:
        why = str(error)
    raise StoreError(
        f"{report} cannot be read: {why}; it records the folders of relative image and audio paths. Restore it, or "
        "give Loader(media=MediaOptions(folder=...))."
    )


def normalize_media_filter(media_filter: object) -> str:
    """Return the canonical spelling of a media filter.

    It is ``none``, ``any``, or kinds joined by ``+`` in the order of ``MEDIUM_KINDS``.
    """
    words = media_filter.split(_KIND_SEPARATOR) if isinstance(media_filter, str) else []
    if media_filter in (NO_MEDIA, ANY_MEDIA):
        return str(media_filter)
    if words and set(words) <= set(MEDIUM_KINDS) and len(set(words)) == len(words):
        return _KIND_SEPARATOR.join(kind for kind in MEDIUM_KINDS if kind in words)
    choices = (NO_MEDIA, ANY_MEDIA, *MEDIUM_KINDS)
    hint = suggest(media_filter, choices) if isinstance(media_filter, str) else ""
    raise SettingsError(
        [f"media: {quote_value(media_filter)} is not one of {', '.join(choices)}, or kinds joined by +{hint}"]
    )


def filter_by_media(store: Store, media_filter: object) -> Store:
    """Return a store whose lengths are 0 for documents that do not match the filter.

    A document matches a filter of kinds only if it holds exactly these kinds.
    """
    media = normalize_media_filter(media_filter)
    lengths = store.lengths
    if store.manifest is None or not store.location.on_disk:
        raise SettingsError([f"media: only stores have media, and {store.location.name} is not a store"])
    store_media = StoreMedia(store)
    selected_sets = _mask_kind_sets(media)
    documents, tokens = _count_by_kind_set(store, store_media, lengths)
    if not documents[selected_sets].any():
        available_kinds = [f"{documents[n]:,} {_format_kinds(n)}" for n in np.flatnonzero(documents).tolist()]
        raise InputError(
            f"{store.location.name} has no documents in subset {store.split} with media {media!r}; it has: "
            f"{', '.join(available_kinds)}."
        )

    def is_chosen(numbers: NDArray[np.int64]) -> NDArray[np.bool_]:
        return selected_sets[store_media.list_kinds(numbers)]

    count = int(documents[selected_sets].sum())
    total = int(tokens[selected_sets].sum())
    filtered_lengths = FilteredLengths(lengths, media, is_chosen, count, total)
    location = replace(store.location, options={**store.location.options, "media": media})
    return Store(store.path, store.reader, location, filtered_lengths)


def _format_kinds(kinds: int) -> str:
    return _KIND_SEPARATOR.join(kind for bit, kind in enumerate(MEDIUM_KINDS) if kinds >> bit & 1) or NO_MEDIA


def _mask_kind_sets(media: str) -> NDArray[np.bool_]:
    """Return a mask of the sets of kinds that match a filter, bool [sets]."""
    if media == ANY_MEDIA:
        return np.arange(_KIND_SETS) > 0
    return np.array([_format_kinds(kinds) == media for kinds in range(_KIND_SETS)])


def _count_by_kind_set(
    store: Store, media: StoreMedia, lengths: LengthReader
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    documents = np.zeros(_KIND_SETS, np.int64)
    tokens = np.zeros(_KIND_SETS, np.int64)
    for shard in range(len(store.shards)):
        numbers, kinds = media.holding(shard)
        documents += np.bincount(kinds, minlength=_KIND_SETS)
        tokens += np.bincount(kinds, lengths.take(numbers), _KIND_SETS).astype(np.int64)
    # Documents without media, often most of a store, are counted without reading their lengths.
    documents[0], tokens[0] = len(store) - documents.sum(), store.tokens - tokens.sum()
    return documents, tokens
