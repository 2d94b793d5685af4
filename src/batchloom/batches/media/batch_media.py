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

from batchloom.batches.assembly import BatchCuts, Ids, MediaCut, MediaCuts, MediaOptions, Reader
from batchloom.batches.media.array_reuse import Recycled
from batchloom.batches.media.feature_join import Joining, Shapes
from batchloom.batches.producer_thread import Begun
from batchloom.core.addresses import is_url, shown
from batchloom.core.errors import MediumError, StoreError, UnusableRecordError
from batchloom.core.medium import AudioFacts, Facts, FrameFacts, Medium
from batchloom.media import (
    Arrays,
    Content,
    Features,
    Held,
    MediaLimits,
    Places,
    ProcessorFiles,
    Traits,
    edge_hash,
    edges,
    mrope_positions,
    traits_of,
)
from batchloom.plan.packing import Rows
from batchloom.store.format import StoredMedium

T = TypeVar("T")
R = TypeVar("R")

# Arrays of a batch, and where those of each row lie in them.
_Features = tuple[Arrays, MediaCuts]

# What decoding a pixel or a sample takes: 3 bytes and as many numbers of 32 bits, some of them twice.
_BYTES_A_PIXEL, _BYTES_A_SAMPLE = 30, 12


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


class FoundMedium(NamedTuple):
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
Finder = Callable[[Reader, Rows], list[FoundMedium]]


class Processing(NamedTuple):
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

    def __init__(self, find: Finder, processing: Processing, spec: MediaOptions) -> None:
        self.find, self.processing, self._spec = find, processing, spec
        self._files = ProcessorFiles.from_state(processing.state)
        self._traits = traits_of(self._files.name)
        self._features = Features(self._files)
        self._budget, self._memory = _Budget(spec.memory), Recycled()
        self._shapes = Shapes()
        self._pool: tuple[int, ThreadPoolExecutor] | None = None

    @property
    def processor_files(self) -> dict[str, str]:
        """The settings of the processor that makes features, as files that transformers reads, by name."""
        return dict(self.processing.state["files"])

    def names(self, kind: str) -> list[str]:
        """What features of a kind of media are called, as the processor itself says."""
        return self._features.names(kind)

    @property
    def traits(self) -> Traits:
        """What the model wants beside features."""
        return self._traits

    def begin(
        self, arrays: dict[str, Any], reader: Reader, rows: Rows, cuts: BatchCuts, *, varlen: bool
    ) -> Begun[BatchCuts]:
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
            arrays["token_type_ids"] = self._token_types(arrays["input_ids"])
        if not found:
            return Begun(lambda: cuts)
        spans = np.array([one.span for one in found], np.int64)
        owners = np.searchsorted(rows.pointers, spans, side="right") - 1
        if self._traits.by_row:
            made = self._join_by_row(found, owners, len(rows), varlen=varlen)
        else:
            made = self._join(found, owners, len(rows))

        def finish() -> BatchCuts:
            features, media = made.finish()
            arrays.update(features)
            return replace(cuts, media=media)

        return Begun(finish, made.drop)

    def _join(self, found: Sequence[FoundMedium], owners: Ids, rows: int) -> Begun[_Features]:
        """Put features one behind the other; where those of each row lie."""
        joining = Joining(self._shapes, self._memory, [one.medium for one in found])

        def make(numbered: tuple[int, Sequence[FoundMedium]]) -> None:
            first, some = numbered
            for number, features in enumerate(self._one(some), first):
                joining.put(number, features)

        files = self._by_threads(make, _numbered(_files_of(found)))

        def finish() -> _Features:
            files.finish()
            made, sizes = joining.done()
            counts = _pointers(owners, [1] * len(owners), rows)
            return made, {
                name: MediaCut(0, _pointers(owners, each, rows), counts)
                for name, each in sizes.items()
            }

        return Begun(finish, files.drop)

    def _join_by_row(
        self, found: Sequence[FoundMedium], owners: Ids, rows: int, *, varlen: bool
    ) -> Begun[_Features]:
        """The same where features have an axis of rows."""
        files = self._by_threads(self._one, _files_of(found))

        def finish() -> _Features:
            features = [one for some in files.finish() for one in some]
            whole = np.zeros_like(owners) if varlen else owners
            made = side_by_side(features, whole, 1 if varlen else rows)
            counts = _pointers(owners, [1] * len(owners), rows)
            if not varlen:
                return made, {name: MediaCut(0, np.arange(rows + 1), counts) for name in made}
            return made, {
                name: MediaCut(
                    1, _pointers(owners, [one[name].shape[1] for one in features], rows), counts
                )
                for name in made
            }

        return Begun(finish, files.drop)

    def _by_threads(self, make: Callable[[T], R], wanted: Iterable[T]) -> Begun[list[R]]:
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

        return Begun(finish, drop)

    def _positions(
        self, plain: Ids, rows: Rows, found: Sequence[FoundMedium], bounds: Ids | None
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
                self._refuse_other_grid(one)
            length = int(rows.lengths[span])
            row = int(owners[span]) if bounds is None else 0
            place = int(rows.places[span] if bounds is None else bounds[span])
            positions[1:, row, place : place + length] = mrope_positions(length, media, merge)
            at = stop
        return positions

    def _refuse_other_grid(self, found: FoundMedium) -> None:
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
    def _image_id(self) -> int:
        """The id of the token that images are made of."""
        return self.processing.control()[self.processing.state["tokens"]["image"]]

    def _token_types(self, ids: Ids) -> Ids:
        types: Ids = (ids == self._image_id).astype(np.int64)
        return types

    def _threads(self) -> ThreadPoolExecutor:
        """The pool of this process: threads do not come through a fork."""
        pid = os.getpid()
        if self._pool is None or self._pool[0] != pid:
            if self._pool is not None:
                # What threads of the parent held when it was forked is given back by nobody here.
                self._budget, self._features = _Budget(self._spec.memory), Features(self._files)
            workers = self._spec.workers or min(8, os.cpu_count() or 1)
            self._pool = pid, ThreadPoolExecutor(workers, "batchloom-media")
        return self._pool[1]

    def faults(self, source: MediaSource, media: Sequence[StoredMedium]) -> list[str]:
        """What is wrong with media of a source, which are read as for a batch; empty of what is sound."""

        def fault(some: Sequence[FoundMedium]) -> list[str]:
            try:
                self._one(some)
            except (MediumError, StoreError) as error:
                return [str(error).removesuffix(f" {source.remedy}")] * len(some)
            return [""] * len(some)

        files = _files_of([FoundMedium(0, source, medium) for medium in media])
        return [one for some in self._by_threads(fault, files).finish() for one in some]

    def _one(self, found: Sequence[FoundMedium]) -> list[Arrays]:
        """The features of the media that one file holds: frames of a video, or a single one."""
        medium = found[0].medium
        frames = [one.medium.facts for one in found if isinstance(one.medium.facts, FrameFacts)]
        decoded = sum(_decoded_bytes(one.medium.facts) for one in found)
        try:
            room = _read_bytes(medium) + decoded
            with self._budget.room(room), self._opened(found[0]) as content:
                if medium.blob is None:
                    content = _whole(content, medium)  # noqa: PLW2901 - the same, read once
                    _refuse_changed(medium, content)
                if frames:
                    made = self._features.of_frames(content, frames)
                else:
                    made = [self._features.of(content, medium.facts)]
            for one, features in zip(found, made, strict=True):
                _refuse_unlike(one.medium, features)
        except UnusableRecordError as error:
            raise _told(found[0], error.reason) from error
        return made

    @contextmanager
    def _opened(self, found: FoundMedium) -> Iterator[Content]:
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
                or edge_hash(len(data), *edges(Held(data))) != medium.digest
            ):
                raise StoreError(
                    f"{source.told(medium.document)}: {path} does not hold the bytes of its {medium.kind}: it is "
                    f"damaged. {source.remedy}"
                )
            yield Held(data)
            return
        places = Places(self._folder(found), source.limits)
        with places.open(Medium(medium.kind, medium.place)) as content:
            yield content

    def _folder(self, found: FoundMedium) -> str:
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


def _told(found: FoundMedium, reason: str) -> MediumError:
    source, medium = found.source, found.medium
    place = shown(medium.place) if medium.place else f"of {medium.size:,} bytes"
    return MediumError(
        f"{source.told(medium.document)}: {medium.kind} {place} {reason}. {source.remedy}"
    )


def _refuse_changed(medium: StoredMedium, content: Content) -> None:
    """Raise where a file is not the one that tokens were made for."""
    if content.size != medium.size:
        raise UnusableRecordError(
            f"has {content.size:,} bytes, and had {medium.size:,} when its tokens were made; bring that one back"
        )
    if edge_hash(content.size, *edges(content)) != medium.digest:
        raise UnusableRecordError(
            "is not the file that was there when its tokens were made; bring that one back"
        )


def _refuse_unlike(medium: StoredMedium, made: Arrays) -> None:
    """Raise where features are not of the grid that tokens and positions were made for."""
    if (grid := made.get("image_grid_thw")) is not None and any(medium.grid):
        found = tuple(int(side) for side in grid[0])
        if found != medium.grid:
            raise UnusableRecordError(
                f"becomes a grid of {found} now, and was of {medium.grid} when its tokens were made: the processor, or "
                "what decodes the image, is another; prepare the data again"
            )


def _files_of(found: Sequence[FoundMedium]) -> list[list[FoundMedium]]:
    """Media that follow each other as the frames of one video, which is decoded once; others by themselves."""
    files: list[list[FoundMedium]] = []
    for one in found:
        last = files[-1][-1] if files else None
        if last is not None and _goes_on(last, one):
            files[-1].append(one)
        else:
            files.append([one])
    return files


def _numbered(
    files: Sequence[Sequence[FoundMedium]],
) -> Iterator[tuple[int, Sequence[FoundMedium]]]:
    """Files, each with the number of its first medium."""
    first = 0
    for some in files:
        yield first, some
        first += len(some)


def _goes_on(last: FoundMedium, one: FoundMedium) -> bool:
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


def _whole(content: Content, medium: StoredMedium) -> Content:
    """A file in memory, where all of it is read: of a video only some of it is."""
    seeks = isinstance(medium.facts, FrameFacts) or content.size != medium.size
    return content if seeks or isinstance(content, Held) else Held(content.read(0, content.size))


def _read_bytes(medium: StoredMedium) -> int:
    """How much of a medium's file is in memory at once; of a video that lies on this machine next to nothing."""
    seeks = isinstance(medium.facts, FrameFacts) and medium.blob is None
    return 0 if seeks and not is_url(medium.place) else medium.size


def _decoded_bytes(facts: Facts) -> int:
    """About what a medium takes while it is decoded and processed."""
    if isinstance(facts, AudioFacts):
        return facts.samples * facts.channels * _BYTES_A_SAMPLE
    return facts.width * facts.height * _BYTES_A_PIXEL


def _pointers(owners: Ids, sizes: Sequence[int], rows: int) -> Ids:
    """Where what lies in rows begins and ends, of media of these rows and sizes, int64 [rows + 1]."""
    pointers = np.zeros(rows + 1, np.int64)
    np.add.at(pointers, owners + 1, sizes)
    return np.cumsum(pointers)


def side_by_side(features: Sequence[Arrays], owners: Ids, rows: int) -> Arrays:
    """Features with an axis of rows: those of the images of a row one behind the other, then zeros.

    Args:
        features: each with an axis for rows of length 1 before its own.
        owners: the row of each.
        rows: how many there are.
    """
    found: Arrays = {}
    for name in features[0]:
        flat = [[one[name][0] for one in _of(features, owners, row)] for row in range(rows)]
        parts = [np.concatenate(some) if some else None for some in flat]
        there = [part for part in parts if part is not None]
        largest = [max(sides) for sides in zip(*(part.shape for part in there), strict=True)]
        whole = np.zeros((rows, *largest), there[0].dtype)
        for row, part in enumerate(parts):
            if part is not None:
                whole[row][tuple(slice(0, side) for side in part.shape)] = part
        found[name] = whole
    return found


def _of(features: Sequence[Arrays], owners: Ids, row: int) -> list[Arrays]:
    return [features[at] for at in np.flatnonzero(owners == row).tolist()]


@final
class _Budget:
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
