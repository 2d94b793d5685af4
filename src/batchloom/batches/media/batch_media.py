"""The media of a batch: read and processed by threads ahead of need, in the order of rows and documents."""

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeVar, final

import numpy as np

from batchloom.batches.assembly import (
    BatchLayout,
    Ids,
    MediaOffsets,
    MediaOffsetsByName,
    MediaOptions,
    TokenReader,
)
from batchloom.batches.media.array_reuse import ArrayPool
from batchloom.batches.media.feature_join import FeatureJoin, FeatureShapes
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
    ModelTraits,
    ProcessorFiles,
    compute_mrope_positions,
    get_model_traits,
    hash_edges,
    read_edges,
)
from batchloom.plan.packing import Rows
from batchloom.store.format import StoredMedium

T = TypeVar("T")
R = TypeVar("R")

# Arrays of a batch, and where those of each row lie in them.
_FeaturesAndOffsets = tuple[FeatureArrays, MediaOffsetsByName]

# What decoding a pixel or a sample takes: 3 bytes and as many numbers of 32 bits, some of them twice.
_BYTES_PER_PIXEL, _BYTES_PER_SAMPLE = 30, 12


class MediaSource(Protocol):
    """Where media lie that batches are made of: a store, or a pool of a stream."""

    @property
    def limits(self) -> MediaLimits:
        """What is refused for its size."""
        ...

    @property
    def remedy(self) -> str:
        """What may be done where a medium cannot be read, in a sentence."""
        ...

    def held(self, medium: StoredMedium) -> bytes:
        """The bytes of a medium that lie in a file of the source, as far as they are there."""
        ...

    def folder_of(self, document: int) -> str | None:
        """Where paths of media begin that a document names; None where nobody knows."""
        ...

    def told(self, document: int) -> str:
        """What a document is called in a sentence, which begins with it: with its file and line."""
        ...


class BatchMedium(NamedTuple):
    """A medium of a batch.

    Attributes:
        span: number of the span it is of, among those of the rows.
        source: where it lies.
        medium: which.
    """

    span: int
    source: MediaSource
    medium: StoredMedium


# The media of rows that a reader reads, in the order of spans and of tokens in them.
MediaFinder = Callable[[TokenReader, Rows], list[BatchMedium]]


class ProcessorContext(NamedTuple):
    """What makes features, as it made tokens.

    Attributes:
        state: of the processor, with the tokens that media are made of.
        control: gives the ids of the tokenizer's control tokens.
    """

    state: Mapping[str, Any]
    control: Callable[[], Mapping[str, int]]


@final
class BatchMedia:
    """Makes the arrays of the media that a batch holds.

    Args:
        find: finds the media of rows; an attribute of this name, too.
        processing: makes features of them; likewise.
        spec: how they are read.
    """

    def __init__(self, find: MediaFinder, processing: ProcessorContext, spec: MediaOptions) -> None:
        self.find, self.processing, self._spec = find, processing, spec
        self._files = ProcessorFiles.from_state(processing.state)
        self._traits = get_model_traits(self._files.name)
        self._features = FeatureExtractor(self._files)
        self._budget, self._memory = _MemoryBudget(spec.memory), ArrayPool()
        self._shapes = FeatureShapes()
        self._pool: tuple[int, ThreadPoolExecutor] | None = None

    @property
    def processor_files(self) -> dict[str, str]:
        """The settings of the processor that makes features, as files that transformers reads, by name."""
        return dict(self.processing.state["files"])

    def names(self, kind: str) -> list[str]:
        """What features of a kind of media are called, as the processor itself says."""
        return self._features.names(kind)

    @property
    def traits(self) -> ModelTraits:
        """What the model wants beside features."""
        return self._traits

    def begin(
        self,
        arrays: dict[str, Any],
        reader: TokenReader,
        rows: Rows,
        cuts: BatchLayout,
        *,
        varlen: bool,
    ) -> PendingItem[BatchLayout]:
        """Begin to put the media of rows into the arrays of their batch, which is whole when this is finished.

        Args:
            arrays: of the batch; positions and types of tokens are changed where the model wants others.
            reader: reads the tokens of rows.
            rows: of documents as the reader numbers them.
            cuts: of the batch.
            varlen: whether the batch is one flattened row.

        Returns:
            Gives the cuts, which know where the features of each row lie. Raises MediumError where a medium cannot be
            read, or is not what it was; it names document and file.

        Raises:
            StoreError: what is stored of media does not fit the rows.
        """
        found = self.find(reader, rows)
        if self._traits.mrope:
            arrays["position_ids"] = self._positions(
                arrays["position_ids"], rows, found, cuts.bounds if varlen else None
            )
        if self._traits.token_types:
            arrays["token_type_ids"] = self._make_token_types(arrays["input_ids"])
        if not found:
            return PendingItem(lambda: cuts)
        spans = np.array([one.span for one in found], np.int64)
        owners = np.searchsorted(rows.pointers, spans, side="right") - 1
        if self._traits.by_row:
            made = self._join_by_row(found, owners, len(rows), varlen=varlen)
        else:
            made = self._join(found, owners, len(rows))

        def finish() -> BatchLayout:
            features, media = made.finish()
            arrays.update(features)
            return replace(cuts, media=media)

        return PendingItem(finish, made.drop)

    def _join(
        self, found: Sequence[BatchMedium], owners: Ids, rows: int
    ) -> PendingItem[_FeaturesAndOffsets]:
        """Put features one behind the other; where those of each row lie."""
        joining = FeatureJoin(self._shapes, self._memory, [one.medium for one in found])

        def make(numbered: tuple[int, Sequence[BatchMedium]]) -> None:
            first, some = numbered
            for number, features in enumerate(self._one(some), first):
                joining.put(number, features)

        files = self._map_in_threads(make, _number_files(_group_video_frames(found)))

        def finish() -> _FeaturesAndOffsets:
            files.finish()
            made, sizes = joining.done()
            counts = _row_offsets(owners, [1] * len(owners), rows)
            return made, {
                name: MediaOffsets(0, _row_offsets(owners, each, rows), counts)
                for name, each in sizes.items()
            }

        return PendingItem(finish, files.drop)

    def _join_by_row(
        self, found: Sequence[BatchMedium], owners: Ids, rows: int, *, varlen: bool
    ) -> PendingItem[_FeaturesAndOffsets]:
        """The same where features have an axis of rows."""
        files = self._map_in_threads(self._one, _group_video_frames(found))

        def finish() -> _FeaturesAndOffsets:
            features = [one for some in files.finish() for one in some]
            whole = np.zeros_like(owners) if varlen else owners
            made = stack_by_row(features, whole, 1 if varlen else rows)
            counts = _row_offsets(owners, [1] * len(owners), rows)
            if not varlen:
                return made, {name: MediaOffsets(0, np.arange(rows + 1), counts) for name in made}
            return made, {
                name: MediaOffsets(
                    1, _row_offsets(owners, [one[name].shape[1] for one in features], rows), counts
                )
                for name in made
            }

        return PendingItem(finish, files.drop)

    def _map_in_threads(self, make: Callable[[T], R], wanted: Iterable[T]) -> PendingItem[list[R]]:
        """What threads make of each, in order; so do errors come out."""
        pool = self._threads()
        jobs = [pool.submit(make, one) for one in wanted]

        def drop() -> None:
            for job in jobs:
                job.cancel()

        def finish() -> list[R]:
            try:
                return [job.result() for job in jobs]
            finally:
                drop()

        return PendingItem(finish, drop)

    def _positions(
        self, plain: Ids, rows: Rows, found: Sequence[BatchMedium], bounds: Ids | None
    ) -> Ids:
        """Positions of the text and in time, height and width, int64 [4, rows, tokens].

        ``bounds`` says where spans begin in a flattened row, None for rows.
        """
        positions = np.repeat(plain[None], 4, axis=0)
        merge = self._merge
        at = 0
        owners = np.repeat(np.arange(len(rows)), np.diff(rows.pointers))
        while at < len(found):
            span = found[at].span
            stop = at
            while stop < len(found) and found[stop].span == span:
                stop += 1
            media = [
                (one.medium.start, one.medium.tokens, one.medium.grid) for one in found[at:stop]
            ]
            for one in found[at:stop]:
                self._check_grid_unchanged(one)
            length = int(rows.lengths[span])
            row = int(owners[span]) if bounds is None else 0
            place = int(rows.places[span] if bounds is None else bounds[span])
            positions[1:, row, place : place + length] = compute_mrope_positions(
                length, media, merge
            )
            at = stop
        return positions

    def _check_grid_unchanged(self, found: BatchMedium) -> None:
        medium, merge = found.medium, self._merge
        time, rows, columns = medium.grid
        if time * (rows // merge) * (columns // merge) != medium.tokens:
            raise StoreError(
                f"{found.source.told(medium.document)} has {medium.tokens} tokens of a medium whose grid is "
                f"{medium.grid}: the store is damaged. Run batchloom check on it."
            )

    @cached_property
    def _merge(self) -> int:
        """Patches a side that become one token."""
        return int(self._features.setting("AutoImageProcessor", "merge_size"))

    @cached_property
    def _image_token_id(self) -> int:
        """The id of the token that images are made of."""
        return self.processing.control()[self.processing.state["tokens"]["image"]]

    def _make_token_types(self, ids: Ids) -> Ids:
        types: Ids = (ids == self._image_token_id).astype(np.int64)
        return types

    def _threads(self) -> ThreadPoolExecutor:
        """The pool of this process: threads do not come through a fork."""
        pid = os.getpid()
        if self._pool is None or self._pool[0] != pid:
            if self._pool is not None:
                # What threads of the parent held when it was forked is given back by nobody here.
                self._budget, self._features = (
                    _MemoryBudget(self._spec.memory),
                    FeatureExtractor(self._files),
                )
            workers = self._spec.workers or min(8, os.cpu_count() or 1)
            self._pool = pid, ThreadPoolExecutor(workers, "batchloom-media")
        return self._pool[1]

    def faults(self, source: MediaSource, media: Sequence[StoredMedium]) -> list[str]:
        """What is wrong with media of a source, which are read as for a batch; empty of what is sound."""

        def fault(some: Sequence[BatchMedium]) -> list[str]:
            try:
                self._one(some)
            except (MediumError, StoreError) as error:
                return [str(error).removesuffix(f" {source.remedy}")] * len(some)
            return [""] * len(some)

        files = _group_video_frames([BatchMedium(0, source, medium) for medium in media])
        return [one for some in self._map_in_threads(fault, files).finish() for one in some]

    def _one(self, found: Sequence[BatchMedium]) -> list[FeatureArrays]:
        """The features of the media that one file holds: frames of a video, or a single one."""
        medium = found[0].medium
        frames = [one.medium.facts for one in found if isinstance(one.medium.facts, FrameFacts)]
        decoded = sum(_estimate_decoded_bytes(one.medium.facts) for one in found)
        try:
            room = _estimate_read_bytes(medium) + decoded
            with self._budget.room(room), self._opened(found[0]) as content:
                if medium.blob is None:
                    content = _load_content(content, medium)  # noqa: PLW2901 - the same, read once
                    _check_unchanged(medium, content)
                if frames:
                    made = self._features.extract_frames(content, frames)
                else:
                    made = [self._features.of(content, medium.facts)]
            for one, features in zip(found, made, strict=True):
                _check_grid(one.medium, features)
        except UnusableRecordError as error:
            raise _make_medium_error(found[0], error.reason) from error
        return made

    @contextmanager
    def _opened(self, found: BatchMedium) -> Iterator[MediaContent]:
        source, medium = found.source, found.medium
        if medium.blob is not None:
            path, _ = medium.blob
            try:
                data = source.held(medium)
            except StoreError as error:
                raise StoreError(
                    f"{source.told(medium.document)}: its {medium.kind} cannot be read: {error} {source.remedy}"
                ) from error
            if (
                len(data) != medium.size
                or hash_edges(len(data), *read_edges(BytesContent(data))) != medium.digest
            ):
                raise StoreError(
                    f"{source.told(medium.document)}: {path} does not hold the bytes of its {medium.kind}: it is "
                    f"damaged. {source.remedy}"
                )
            yield BytesContent(data)
            return
        places = MediaResolver(self._folder(found), source.limits)
        with places.open(Medium(medium.kind, medium.place)) as content:
            yield content

    def _folder(self, found: BatchMedium) -> str:
        """Where the paths begin that the source of a document names."""
        if self._spec.folder is not None:
            return self._spec.folder
        folder = found.source.folder_of(found.medium.document)
        if folder is None:
            raise UnusableRecordError(
                "is named only, and the store's report does not say where paths begin: give "
                "media=MediaOptions(folder=...)"
            )
        return folder


def _make_medium_error(found: BatchMedium, reason: str) -> MediumError:
    source, medium = found.source, found.medium
    place = redact_url(medium.place) if medium.place else f"of {medium.size:,} bytes"
    return MediumError(
        f"{source.told(medium.document)}: {medium.kind} {place} {reason}. {source.remedy}"
    )


def _check_unchanged(medium: StoredMedium, content: MediaContent) -> None:
    """Raise where a file is not the one that tokens were made for."""
    if content.size != medium.size:
        raise UnusableRecordError(
            f"has {content.size:,} bytes, and had {medium.size:,} when its tokens were made; bring that one back"
        )
    if hash_edges(content.size, *read_edges(content)) != medium.digest:
        raise UnusableRecordError(
            "is not the file that was there when its tokens were made; bring that one back"
        )


def _check_grid(medium: StoredMedium, made: FeatureArrays) -> None:
    """Raise where features are not of the grid that tokens and positions were made for."""
    if (grid := made.get("image_grid_thw")) is not None and any(medium.grid):
        found = tuple(int(side) for side in grid[0])
        if found != medium.grid:
            raise UnusableRecordError(
                f"becomes a grid of {found} now, and was of {medium.grid} when its tokens were made: the processor, or "
                "what decodes the image, is another; prepare the data again"
            )


def _group_video_frames(found: Sequence[BatchMedium]) -> list[list[BatchMedium]]:
    """Media that follow each other as the frames of one video, which is decoded once; others by themselves."""
    files: list[list[BatchMedium]] = []
    for one in found:
        last = files[-1][-1] if files else None
        if last is not None and _is_next_frame(last, one):
            files[-1].append(one)
        else:
            files.append([one])
    return files


def _number_files(
    files: Sequence[Sequence[BatchMedium]],
) -> Iterator[tuple[int, Sequence[BatchMedium]]]:
    """Files, each with the number of its first medium."""
    first = 0
    for some in files:
        yield first, some
        first += len(some)


def _is_next_frame(last: BatchMedium, one: BatchMedium) -> bool:
    """Whether a medium is a later frame of the same video of the same document."""
    before, facts = last.medium.facts, one.medium.facts
    return (
        isinstance(before, FrameFacts)
        and isinstance(facts, FrameFacts)
        and before.time < facts.time
        and last.span == one.span
        and last.medium.digest == one.medium.digest
        and (last.medium.place, last.medium.blob) == (one.medium.place, one.medium.blob)
    )


def _load_content(content: MediaContent, medium: StoredMedium) -> MediaContent:
    """A file in memory, where all of it is read: of a video only some of it is."""
    seeks = isinstance(medium.facts, FrameFacts) or content.size != medium.size
    return (
        content
        if seeks or isinstance(content, BytesContent)
        else BytesContent(content.read(0, content.size))
    )


def _estimate_read_bytes(medium: StoredMedium) -> int:
    """How much of a medium's file is in memory at once; of a video that lies on this machine next to nothing."""
    seeks = isinstance(medium.facts, FrameFacts) and medium.blob is None
    return 0 if seeks and not is_url(medium.place) else medium.size


def _estimate_decoded_bytes(facts: MediumFacts) -> int:
    """About what a medium takes while it is decoded and processed."""
    if isinstance(facts, AudioFacts):
        return facts.samples * facts.channels * _BYTES_PER_SAMPLE
    return facts.width * facts.height * _BYTES_PER_PIXEL


def _row_offsets(owners: Ids, sizes: Sequence[int], rows: int) -> Ids:
    """Where what lies in rows begins and ends, of media of these rows and sizes, int64 [rows + 1]."""
    pointers = np.zeros(rows + 1, np.int64)
    np.add.at(pointers, owners + 1, sizes)
    return np.cumsum(pointers)


def stack_by_row(features: Sequence[FeatureArrays], owners: Ids, rows: int) -> FeatureArrays:
    """Features with an axis of rows: those of the images of a row one behind the other, then zeros.

    Args:
        features: each with an axis for rows of length 1 before its own.
        owners: the row of each.
        rows: how many there are.
    """
    found: FeatureArrays = {}
    for name in features[0]:
        flat = [
            [one[name][0] for one in _features_of_row(features, owners, row)] for row in range(rows)
        ]
        parts = [np.concatenate(some) if some else None for some in flat]
        there = [part for part in parts if part is not None]
        largest = [max(sides) for sides in zip(*(part.shape for part in there), strict=True)]
        whole = np.zeros((rows, *largest), there[0].dtype)
        for row, part in enumerate(parts):
            if part is not None:
                whole[row][tuple(slice(0, side) for side in part.shape)] = part
        found[name] = whole
    return found


def _features_of_row(
    features: Sequence[FeatureArrays], owners: Ids, row: int
) -> list[FeatureArrays]:
    return [features[at] for at in np.flatnonzero(owners == row).tolist()]


@final
class _MemoryBudget:
    """Bytes that threads take and give back; one that wants more than all of them waits until it is alone."""

    def __init__(self, size: int) -> None:
        self._size = self._left = size
        self._turn = threading.Condition()

    @contextmanager
    def room(self, wanted: int) -> Iterator[None]:
        wanted = min(wanted, self._size)
        with self._turn:
            self._turn.wait_for(lambda: self._left >= wanted)
            self._left -= wanted
        try:
            yield
        finally:
            with self._turn:
                self._left += wanted
                self._turn.notify_all()
