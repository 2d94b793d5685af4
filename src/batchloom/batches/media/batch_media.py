"""Media of a batch: threads read and process them ahead, in row order."""

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple, Protocol, TypeVar, final

import numpy as np

from batchloom.batches.assembly.array_filling import Ids, TokenReader
from batchloom.batches.assembly.batch_assembly import (
    TOKEN_KEYS,
    Batch,
    BatchLayout,
    MediaOffsets,
    MediaOffsetsByName,
)
from batchloom.batches.assembly.batch_spec import MediaOptions
from batchloom.batches.assembly.device import to_torch
from batchloom.batches.producer_thread import PendingItem
from batchloom.core.addresses import is_url, redact_url
from batchloom.core.errors import MediumError, StoreError, UnusableRecordError
from batchloom.core.medium import AudioFacts, FrameFacts, Medium, MediumFacts
from batchloom.media import (
    BytesContent,
    FeatureArrays,
    FeatureExtractor,
    MediaContent,
    MediaLimits,
    MediaResolver,
    ProcessorFiles,
    compute_mrope_positions,
    get_model_traits,
    hash_edges,
    join_features,
    read_edges,
    stack_padded,
)
from batchloom.plan.packing import Rows
from batchloom.store import Store, StoreMedia
from batchloom.store.format import StoredMedium
from batchloom.store.read import has_media

T = TypeVar("T")
R = TypeVar("R")
# Memory for decoding a pixel or a sample: the 3 bytes and as many 32-bit numbers, partly twice.
_BYTES_PER_PIXEL = 30
_BYTES_PER_SAMPLE = 12


class MediaSource(Protocol):
    """Source of the media of batches: a store, or a pool of a stream."""

    @property
    def limits(self) -> MediaLimits:
        """Size limits of media."""

    @property
    def remedy(self) -> str:
        """Advice for a medium that cannot be read, as a sentence."""

    def read_bytes(self, medium: StoredMedium) -> bytes:
        """Return the bytes of a medium from a file of the source, possibly truncated."""

    def folder_of(self, document: int) -> str | None:
        """Return the base folder of a document's media paths; None if unknown."""

    def describe_document(self, document: int) -> str:
        """Return the name of a document to begin a sentence, with its file and line."""


class BatchMedium(NamedTuple):
    span: int
    source: MediaSource
    medium: StoredMedium


# Returns the media of a reader's rows, in the order of spans and of tokens in them.
MediaFinder = Callable[[TokenReader, Rows], list[BatchMedium]]


class ProcessorContext(NamedTuple):
    """Processor that makes features, consistent with the tokens."""

    state: Mapping[str, Any]
    control: Callable[[], Mapping[str, int]]


@final
class BatchMedia:
    """Maker of the media arrays of a batch."""

    def __init__(self, find: MediaFinder, processing: ProcessorContext, spec: MediaOptions) -> None:
        self.find = find
        self.processing = processing
        self._spec = spec
        self._files = ProcessorFiles.from_state(processing.state)
        self.traits = get_model_traits(self._files.name)
        self._features = FeatureExtractor(self._files)
        self._budget = _MemoryBudget(spec.memory)
        self._pool: tuple[int, ThreadPoolExecutor] | None = None

    @property
    def processor_files(self) -> dict[str, str]:
        """Settings of the processor, as files that transformers reads, by name."""
        return dict(self.processing.state["files"])

    def names(self, kind: str) -> list[str]:
        """Return the feature names of a media kind, as the processor defines them."""
        return self._features.names(kind)

    def begin(
        self, arrays: dict[str, Any], reader: TokenReader, rows: Rows, layout: BatchLayout, *, varlen: bool
    ) -> PendingItem[BatchLayout]:
        """Start to add the media of rows to their batch, which is complete when finished.

        Returns:
            A pending layout with the offsets of each row's features. It raises MediumError for a medium that
            cannot be read or has changed, with document and file.
        """
        batch_media = self.find(reader, rows)
        if self.traits.mrope:
            arrays["position_ids"] = self._positions(
                arrays["position_ids"], rows, batch_media, layout.bounds if varlen else None
            )
        if self.traits.token_types:
            arrays["token_type_ids"] = (arrays["input_ids"] == self._image_token_id).astype(np.int64)
        if not batch_media:
            return PendingItem(lambda: layout)
        spans = np.array([batch_medium.span for batch_medium in batch_media], np.int64)
        owners = np.searchsorted(rows.pointers, spans, side="right") - 1
        files = self._map_in_threads(self._extract_features, _group_video_frames(batch_media))

        def finish() -> BatchLayout:
            features = [medium_features for some in files.finish() for medium_features in some]
            joined_features, media = self._join(features, owners, len(rows), varlen=varlen)
            arrays.update(joined_features)
            return replace(layout, media=media)

        return PendingItem(finish, files.drop)

    def _join(
        self, features: Sequence[FeatureArrays], owners: Ids, rows: int, *, varlen: bool
    ) -> tuple[FeatureArrays, MediaOffsetsByName]:
        """Join the features of media, and return the offsets of each row's features."""
        counts = _row_offsets(owners, [1] * len(owners), rows)
        if not self.traits.by_row:
            joined_features = join_features(features)
            axis = 0
        elif varlen:
            joined_features = stack_by_row(features, np.zeros_like(owners), 1)
            axis = 1
        else:
            joined_features = stack_by_row(features, owners, rows)
            return joined_features, {name: MediaOffsets(0, np.arange(rows + 1), counts) for name in joined_features}
        offsets = {}
        for name in joined_features:
            sizes = [arrays[name].shape[axis] if name in arrays else 0 for arrays in features]
            offsets[name] = MediaOffsets(axis, _row_offsets(owners, sizes, rows), counts)
        return joined_features, offsets

    def _map_in_threads(self, make: Callable[[T], R], items: Iterable[T]) -> PendingItem[list[R]]:
        """Apply ``make`` in threads; results and errors come in order."""
        pool = self._threads()
        jobs = [pool.submit(make, item) for item in items]

        def drop() -> None:
            for job in jobs:
                job.cancel()

        def finish() -> list[R]:
            try:
                return [job.result() for job in jobs]
            finally:
                drop()

        return PendingItem(finish, drop)

    def _positions(self, plain: Ids, rows: Rows, batch_media: Sequence[BatchMedium], bounds: Ids | None) -> Ids:
        """Return text, time, height and width positions, int64 [4, rows, tokens]."""
        positions = np.repeat(plain[None], 4, axis=0)
        owners = np.repeat(np.arange(len(rows)), np.diff(rows.pointers))
        for span, span_media in groupby(batch_media, lambda batch_medium: batch_medium.span):
            media = []
            for batch_medium in span_media:
                self._check_grid_unchanged(batch_medium)
                medium = batch_medium.medium
                media.append((medium.start, medium.tokens, medium.grid))
            length = int(rows.lengths[span])
            row = int(owners[span]) if bounds is None else 0
            offset = int(rows.row_offsets[span] if bounds is None else bounds[span])
            positions[1:, row, offset : offset + length] = compute_mrope_positions(length, media, self._merge)
        return positions

    def _check_grid_unchanged(self, batch_medium: BatchMedium) -> None:
        medium = batch_medium.medium
        merge = self._merge
        time, rows, columns = medium.grid
        if time * (rows // merge) * (columns // merge) != medium.tokens:
            raise StoreError(
                f"{batch_medium.source.describe_document(medium.document)} has {medium.tokens} tokens of a medium "
                f"with grid {medium.grid}: the store is damaged. Run batchloom check on it."
            )

    @cached_property
    def _merge(self) -> int:
        return int(self._features.setting("AutoImageProcessor", "merge_size"))

    @cached_property
    def _image_token_id(self) -> int:
        return self.processing.control()[self.processing.state["tokens"]["image"]]

    def _threads(self) -> ThreadPoolExecutor:
        """Return the thread pool of this process: threads do not survive a fork."""
        pid = os.getpid()
        if self._pool is None or self._pool[0] != pid:
            if self._pool is not None:
                # The budget that the parent's threads held at the fork is never released here.
                self._budget = _MemoryBudget(self._spec.memory)
                self._features = FeatureExtractor(self._files)
            workers = self._spec.workers or min(8, os.cpu_count() or 1)
            self._pool = pid, ThreadPoolExecutor(workers, "batchloom-media")
        return self._pool[1]

    def faults(self, source: MediaSource, media: Sequence[StoredMedium]) -> list[str]:
        """Return the fault of each medium, read as for a batch; empty if it is sound."""

        def fault(some: Sequence[BatchMedium]) -> list[str]:
            try:
                self._extract_features(some)
            except (MediumError, StoreError) as error:
                return [str(error).removesuffix(f" {source.remedy}")] * len(some)
            return [""] * len(some)

        files = _group_video_frames([BatchMedium(0, source, medium) for medium in media])
        return [message for some in self._map_in_threads(fault, files).finish() for message in some]

    def _extract_features(self, batch_media: Sequence[BatchMedium]) -> list[FeatureArrays]:
        source = batch_media[0].source
        medium = batch_media[0].medium
        frames = [
            batch_medium.medium.facts
            for batch_medium in batch_media
            if isinstance(batch_medium.medium.facts, FrameFacts)
        ]
        decoded = sum(_estimate_decoded_bytes(batch_medium.medium.facts) for batch_medium in batch_media)
        try:
            room = _estimate_read_bytes(medium) + decoded
            with self._budget.reserve(room), open_medium(source, medium, self._spec.folder) as content:
                if medium.blob is None:
                    if not (frames or content.size != medium.size or isinstance(content, BytesContent)):
                        # Read the file once; a video is read in part.
                        content = BytesContent(content.read(0, content.size))  # noqa: PLW2901 - the same content
                    check_unchanged(medium, content)
                if frames:
                    feature_arrays = self._features.extract_frames(content, frames)
                else:
                    feature_arrays = [self._features.extract(content, medium.facts)]
            for batch_medium, features in zip(batch_media, feature_arrays, strict=True):
                _check_grid(batch_medium.medium, features)
        except UnusableRecordError as error:
            location = redact_url(medium.location) if medium.location else f"of {medium.size:,} bytes"
            raise MediumError(
                f"{source.describe_document(medium.document)}: {medium.kind} {location} {error.reason}. {source.remedy}"
            ) from error
        return feature_arrays


@contextmanager
def open_medium(source: MediaSource, medium: StoredMedium, folder: str | None = None) -> Iterator[MediaContent]:
    """Open the bytes of a medium: those in the store, or the file that it names.

    ``folder`` is the base folder of paths; None for the one that the source names. Damaged bytes raise StoreError, a
    file that cannot be read UnusableRecordError.
    """
    if medium.blob is None:
        resolver = MediaResolver(folder or _find_folder(source, medium), source.limits)
        with resolver.open(Medium(medium.kind, medium.location)) as content:
            yield content
        return
    path, _ = medium.blob
    try:
        data = source.read_bytes(medium)
    except StoreError as error:
        raise StoreError(
            f"{source.describe_document(medium.document)}: its {medium.kind} cannot be read: {error} {source.remedy}"
        ) from error
    if len(data) != medium.size or hash_edges(len(data), *read_edges(BytesContent(data))) != medium.digest:
        raise StoreError(
            f"{source.describe_document(medium.document)}: {path} does not hold the bytes of its {medium.kind}: it "
            f"is damaged. {source.remedy}"
        )
    yield BytesContent(data)


def _find_folder(source: MediaSource, medium: StoredMedium) -> str:
    """Return the base folder of the paths in a document's source."""
    folder = source.folder_of(medium.document)
    if folder is None:
        raise UnusableRecordError(
            "is stored as a path only, and the store's report does not name its folder: give "
            "media=MediaOptions(folder=...)"
        )
    return folder


def check_unchanged(medium: StoredMedium, content: MediaContent) -> None:
    """Raise if a file is not the one that tokens were made for."""
    if content.size != medium.size:
        raise UnusableRecordError(
            f"has {content.size:,} bytes, but had {medium.size:,} when its tokens were made; restore that file"
        )
    if hash_edges(content.size, *read_edges(content)) != medium.digest:
        raise UnusableRecordError("is not the file that its tokens were made from; restore that file")


def _check_grid(medium: StoredMedium, features: FeatureArrays) -> None:
    if (grid := features.get("image_grid_thw")) is not None and any(medium.grid):
        actual_grid = tuple(int(side) for side in grid[0])
        if actual_grid != medium.grid:
            raise UnusableRecordError(
                f"has the grid {actual_grid}, but had {medium.grid} when its tokens were made: the processor or the "
                "image decoder changed; prepare the data again"
            )


def _group_video_frames(batch_media: Sequence[BatchMedium]) -> list[list[BatchMedium]]:
    """Group consecutive frames of one video, which is decoded once; others are alone."""
    files: list[list[BatchMedium]] = []
    for batch_medium in batch_media:
        last = files[-1][-1] if files else None
        if last is not None and _is_next_frame(last, batch_medium):
            files[-1].append(batch_medium)
        else:
            files.append([batch_medium])
    return files


def _is_next_frame(last: BatchMedium, batch_medium: BatchMedium) -> bool:
    """Return whether a medium is a later frame of the same video and document."""
    before = last.medium.facts
    facts = batch_medium.medium.facts
    return (
        isinstance(before, FrameFacts)
        and isinstance(facts, FrameFacts)
        and before.time < facts.time
        and last.span == batch_medium.span
        and last.medium.digest == batch_medium.medium.digest
        and (last.medium.location, last.medium.blob) == (batch_medium.medium.location, batch_medium.medium.blob)
    )


def _estimate_read_bytes(medium: StoredMedium) -> int:
    """Estimate the bytes of a medium's file in memory; about none for a local video."""
    seeks = isinstance(medium.facts, FrameFacts) and medium.blob is None
    return 0 if seeks and not is_url(medium.location) else medium.size


def _estimate_decoded_bytes(facts: MediumFacts) -> int:
    if isinstance(facts, AudioFacts):
        return facts.samples * facts.channels * _BYTES_PER_SAMPLE
    return facts.width * facts.height * _BYTES_PER_PIXEL


def _row_offsets(owners: Ids, sizes: Sequence[int], rows: int) -> Ids:
    """Return the row bounds of media with these owners and sizes, int64 [rows + 1]."""
    pointers = np.zeros(rows + 1, np.int64)
    np.add.at(pointers, owners + 1, sizes)
    return np.cumsum(pointers)


def stack_by_row(features: Sequence[FeatureArrays], owners: Ids, rows: int) -> FeatureArrays:
    """Stack features by row: the images of a row are concatenated, then zero-padded."""
    stacked_features: FeatureArrays = {}
    for name, first in features[0].items():
        parts = []
        for row in range(rows):
            images = [features[at][name] for at in np.flatnonzero(owners == row).tolist()]
            parts.append(np.concatenate(images, axis=1) if images else first[:, :0])
        stacked_features[name] = stack_padded(parts)
    return stacked_features


@final
class _MemoryBudget:
    """A byte budget of threads; a request above the total waits until it is alone."""

    def __init__(self, size: int) -> None:
        self._size = self._available = size
        self._turn = threading.Condition()

    @contextmanager
    def reserve(self, size: int) -> Iterator[None]:
        size = min(size, self._size)
        with self._turn:
            self._turn.wait_for(lambda: self._available >= size)
            self._available -= size
        try:
            yield
        finally:
            with self._turn:
                self._available += size
                self._turn.notify_all()


CollateRow = dict[str, Any]


def stacks_features_by_row(store: Store) -> bool:
    """Return whether a store's model takes features as ``[rows, images, ...]``."""
    if not has_media(store):
        return False
    state = StoreMedia(store).processor
    return state is not None and get_model_traits(str(state["name"])).by_row


def take_single_row(batch: Batch, *, by_row: bool) -> CollateRow:
    """Return the row of a one-row batch as a sample for :func:`collate_rows`.

    Returns:
        Arrays of tokens [S] (positions of M-RoPE [4, S]); features with media as their first axis, or none if the
        row holds no medium.
    """
    return {
        name: value[..., 0, :] if name in TOKEN_KEYS else value[0] if by_row else value for name, value in batch.items()
    }


def collate_rows(rows: Sequence[Mapping[str, Any]], *, by_row: bool) -> dict[str, Any]:
    """Collate R samples into a batch as ``Loader`` makes it.

    Tokens are stacked; features are concatenated in the order of rows.

    Returns:
        Arrays of the same kind; a batch without media has no feature keys.
    """
    arrays = [{name: np.asarray(value) for name, value in row.items()} for row in rows]
    batch = {
        # The axis of rows precedes the axis of tokens.
        name: np.stack([row[name] for row in arrays], axis=value.ndim - 1)
        for name, value in arrays[0].items()
        if name in TOKEN_KEYS
    }
    holding = [number for number, row in enumerate(arrays) if len(row) > len(batch)]
    features = [{name: value for name, value in arrays[number].items() if name not in batch} for number in holding]
    if features and by_row:
        alone = [{name: value[None] for name, value in row_features.items()} for row_features in features]
        batch |= stack_by_row(alone, np.array(holding), len(rows))
    elif features:
        batch |= join_features(features)
    return batch if isinstance(rows[0]["input_ids"], np.ndarray) else to_torch(batch)
