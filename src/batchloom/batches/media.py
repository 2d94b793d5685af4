"""The media of a batch: read and processed by threads ahead of need, in the order of rows and documents."""

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol, final

import numpy as np

from batchloom.batches.assemble import BatchCuts, Ids, MediaCut, MediaCuts
from batchloom.batches.data import overlong_of
from batchloom.batches.spec import BatchSpec, MediaSpec
from batchloom.core.addresses import is_url, shown
from batchloom.core.errors import (
    InputError,
    MediumError,
    PlanError,
    StoreError,
    UnusableRecordError,
)
from batchloom.core.media import AudioFacts, Facts, FrameFacts, Medium
from batchloom.media.content import Content, Held, edge_hash, edges
from batchloom.media.features import Arrays, Features, joined
from batchloom.media.limits import MediaLimits
from batchloom.media.places import Places
from batchloom.media.processor import ProcessorFiles
from batchloom.media.rope import mrope_positions
from batchloom.media.traits import Traits, traits_of
from batchloom.plan.mixture import Mixture
from batchloom.plan.plan import Plan
from batchloom.plan.rows import Rows
from batchloom.store.media import StoredMedium
from batchloom.store.reader import Store
from batchloom.store.removed import are_removed
from batchloom.store.stored_media import StoreMedia, holds_media

# What decoding a pixel or a sample takes: 3 bytes and as many numbers of 32 bits, some of them twice.
_BYTES_A_PIXEL, _BYTES_A_SAMPLE = 30, 12
_REMEDY = "batchloom check STORE --gone FILE lists such documents; MediaSpec(replace=FILE) serves padding for them."


class Reads(Protocol):
    """What is asked of a loader."""

    @property
    def holds_media(self) -> bool:
        """Whether its stores hold images or audio."""
        ...

    @property
    def origin(self) -> str:
        """Where the data comes from."""
        ...


class _Found(NamedTuple):
    """A medium of a batch: the span it is of, and the store."""

    span: int
    store: int
    medium: StoredMedium


@final
class BatchMedia:
    """Makes the arrays of the media that a batch holds.

    Args:
        stores: that rows are read from, in the order in which their documents are numbered through.
        spec: how media are read.

    Raises:
        PlanError: the stores are of several processors.
        InputError: a store elsewhere cannot be reached.
    """

    def __init__(self, stores: Sequence[Store], spec: MediaSpec) -> None:
        self._stores, self._spec = list(stores), spec
        self._media = [StoreMedia(store) for store in stores]
        self._firsts = np.cumsum([0, *(len(store) for store in stores)])
        states = [state for one in self._media if (state := one.processor) is not None]
        if len({state["fingerprint"] for state in states}) > 1:
            raise PlanError(
                "The stores are of several processors, whose features do not go into one model: "
                f"{', '.join(sorted({str(state['name']) for state in states}))}. Prepare them with one."
            )
        self._files = ProcessorFiles.from_state(states[0])
        self._tokens: Mapping[str, str] = states[0].get("tokens", {})
        self._traits = traits_of(self._files.name)
        self._features = Features(self._files)
        self._budget = _Budget(spec.memory)
        self._limits = [_limits_of(store) for store in stores]
        self._pool: tuple[int, ThreadPoolExecutor] | None = None

    @property
    def traits(self) -> Traits:
        """What the model wants beside features."""
        return self._traits

    def add_to(
        self, arrays: dict[str, Any], rows: Rows, cuts: BatchCuts, *, varlen: bool
    ) -> BatchCuts:
        """Put the media of rows into the arrays of their batch.

        Args:
            arrays: of the batch; positions and types of tokens are changed where the model wants others.
            rows: of documents that are numbered through all stores.
            cuts: of the batch.
            varlen: whether the batch is one flattened row.

        Returns:
            The cuts, which know where the features of each row lie.

        Raises:
            MediumError: a medium cannot be read, or is not what it was; names document and file.
        """
        found = self._found(rows)
        if self._traits.mrope:
            arrays["position_ids"] = self._positions(
                arrays["position_ids"], rows, found, cuts.bounds if varlen else None
            )
        if self._traits.token_types:
            arrays["token_type_ids"] = self._token_types(arrays["input_ids"])
        features = self._features_of(found)
        if not features:
            return cuts
        spans = np.array([one.span for one in found], np.int64)
        owners = np.searchsorted(rows.pointers, spans, side="right") - 1
        return replace(cuts, media=self._join(arrays, features, owners, len(rows), varlen=varlen))

    def _join(
        self,
        arrays: dict[str, Any],
        features: Sequence[Arrays],
        owners: Ids,
        rows: int,
        *,
        varlen: bool,
    ) -> MediaCuts:
        """Put features into a batch; where those of each row lie."""
        if not self._traits.by_row:
            arrays |= joined(features)
        else:
            whole = np.zeros_like(owners) if varlen else owners
            arrays |= side_by_side(features, whole, 1 if varlen else rows)
        axis = int(self._traits.by_row)
        counts = _pointers(owners, [1] * len(owners), rows)
        if self._traits.by_row and not varlen:
            return {name: MediaCut(0, np.arange(rows + 1), counts) for name in features[0]}
        sizes = {name: [one[name].shape[axis] for one in features] for name in features[0]}
        return {
            name: MediaCut(axis, _pointers(owners, each, rows), counts)
            for name, each in sizes.items()
        }

    def _found(self, rows: Rows) -> list[_Found]:
        numbers = np.searchsorted(self._firsts, rows.documents, side="right") - 1
        found: list[_Found] = []
        for number, media in enumerate(self._media):
            if not media.any:
                continue
            spans = np.flatnonzero(numbers == number)
            documents = rows.documents[spans] - self._firsts[number]
            # What was taken out reads as end tokens, and what stood for media is gone with it.
            left = ~are_removed(self._stores[number].removed, documents)
            spans, documents = spans[left], documents[left]
            those = media.of(documents)
            self._refuse_cut(number, rows, spans, documents, those)
            found += [
                _Found(span, number, medium)
                for span, some in zip(spans.tolist(), those, strict=True)
                for medium in some
            ]
        return sorted(found, key=lambda one: (one.span, one.medium.start))

    def _refuse_cut(
        self, number: int, rows: Rows, spans: Ids, documents: Ids, media: Sequence[object]
    ) -> None:
        """Raise where a span is a part of a document with media: its features would be those of the whole."""
        store = self._stores[number]
        cut = (rows.starts[spans] != 0) | (rows.lengths[spans] != store.lengths.take(documents))
        for at in np.flatnonzero(cut).tolist():
            if media[at]:
                raise PlanError(
                    f"Document {int(documents[at])} of {store.place} holds images or audio and is cut by the plan: "
                    "give its source overlong='drop' or 'error', and a packing that cuts nothing (best_fit)."
                )

    def _positions(
        self, plain: Ids, rows: Rows, found: Sequence[_Found], bounds: Ids | None
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

    def _refuse_other_grid(self, found: _Found) -> None:
        medium, merge = found.medium, self._merge
        time, rows, columns = medium.grid
        if time * (rows // merge) * (columns // merge) != medium.tokens:
            raise StoreError(
                f"{self._stores[found.store].place}: document {medium.document} has {medium.tokens} tokens of a medium "
                f"whose grid is {medium.grid}: the store is damaged. Run batchloom check on it."
            )

    @cached_property
    def _merge(self) -> int:
        """Patches a side that become one token."""
        return int(self._features.setting("AutoImageProcessor", "merge_size"))

    @cached_property
    def _image_id(self) -> int:
        """The id of the token that images are made of."""
        store = next(one for one in self._stores if one.manifest and one.manifest.processor)
        return store.tokenizer.control[self._tokens["image"]]

    def _token_types(self, ids: Ids) -> Ids:
        types: Ids = (ids == self._image_id).astype(np.int64)
        return types

    def _features_of(self, found: Sequence[_Found]) -> list[Arrays]:
        if not found:
            return []
        made = self._threads().map(self._one, _files_of(found))
        return [one for some in made for one in some]

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

    def faults(self, media: Sequence[StoredMedium]) -> list[str]:
        """What is wrong with media of the first store, which are read as for a batch; empty of what is sound."""

        def fault(some: Sequence[_Found]) -> list[str]:
            try:
                self._one(some)
            except (MediumError, StoreError) as error:
                return [str(error).removesuffix(f" {_REMEDY}")] * len(some)
            return [""] * len(some)

        files = _files_of([_Found(0, 0, medium) for medium in media])
        return [one for some in self._threads().map(fault, files) for one in some]

    def _one(self, found: Sequence[_Found]) -> list[Arrays]:
        """The features of the media that one file holds: frames of a video, or a single one."""
        medium = found[0].medium
        frames = [one.medium.facts for one in found if isinstance(one.medium.facts, FrameFacts)]
        decoded = sum(_decoded_bytes(one.medium.facts) for one in found)
        try:
            room = _read_bytes(medium) + decoded
            with self._budget.room(room), self._opened(found[0]) as content:
                if medium.blob is None:
                    _refuse_changed(medium, content)
                if frames:
                    made = self._features.of_frames(content, frames)
                else:
                    made = [self._features.of(content, medium.facts)]
            for one, features in zip(found, made, strict=True):
                _refuse_unlike(one.medium, features)
        except UnusableRecordError as error:
            raise self._told(found[0], error.reason) from error
        return made

    @contextmanager
    def _opened(self, found: _Found) -> Iterator[Content]:
        medium = found.medium
        if medium.blob is not None:
            path, _ = medium.blob
            try:
                data = self._media[found.store].held(medium)
            except StoreError as error:
                raise StoreError(
                    f"The {medium.kind} of document {medium.document} cannot be read: {error} {_REMEDY}"
                ) from error
            if (
                len(data) != medium.size
                or edge_hash(len(data), *edges(Held(data))) != medium.digest
            ):
                raise StoreError(
                    f"{path} does not hold the bytes of document {medium.document}'s {medium.kind}: it is damaged. "
                    f"{_REMEDY}"
                )
            yield Held(data)
            return
        places = Places(self._folder(found), self._limits[found.store])
        with places.open(Medium(medium.kind, medium.place)) as content:
            yield content

    def _folder(self, found: _Found) -> str:
        """Where the paths begin that the source of a document names."""
        if self._spec.folder is not None:
            return self._spec.folder
        folder = self._media[found.store].folder_of(found.medium.document)
        if folder is None:
            raise UnusableRecordError(
                "is named only, and the store's report does not say where paths begin: give "
                "media=MediaSpec(folder=...)"
            )
        return folder

    def _told(self, found: _Found, reason: str) -> MediumError:
        store, medium = self._stores[found.store], found.medium
        origin = store.origin(medium.document)
        line = (
            f", line {origin.line}" if origin.line is not None else f", record {origin.record + 1}"
        )
        place = shown(medium.place) if medium.place else f"of {medium.size:,} bytes in the store"
        return MediumError(
            f"Document {medium.document} of {store.place} ({origin.source}{line}): {medium.kind} {place} {reason}. "
            f"{_REMEDY}"
        )


def _refuse_changed(medium: StoredMedium, content: Content) -> None:
    """Raise where a file is not the one that was looked at when the store was made."""
    if content.size != medium.size:
        raise UnusableRecordError(
            f"has {content.size:,} bytes, and had {medium.size:,} when the store was made; bring that one back"
        )
    if edge_hash(content.size, *edges(content)) != medium.digest:
        raise UnusableRecordError(
            "is not the file that was there when the store was made; bring that one back"
        )


def _limits_of(store: Store) -> MediaLimits:
    """The limits that a store was prepared with."""
    recipe = store.manifest.recipe if store.manifest else {}
    said = (recipe.get("reading") or {}).get("media") or {}
    known = {field.name for field in fields(MediaLimits)}
    return MediaLimits(**{name: value for name, value in said.items() if name in known})


def _refuse_unlike(medium: StoredMedium, made: Arrays) -> None:
    """Raise where features are not of the grid that tokens and positions were made for."""
    if (grid := made.get("image_grid_thw")) is not None and any(medium.grid):
        found = tuple(int(side) for side in grid[0])
        if found != medium.grid:
            raise UnusableRecordError(
                f"becomes a grid of {found} now, and was of {medium.grid} when the store was made: the processor, or "
                "what decodes the image, is another; prepare the data again"
            )


def _files_of(found: Sequence[_Found]) -> list[list[_Found]]:
    """Media that follow each other as the frames of one video, which is decoded once; others by themselves."""
    files: list[list[_Found]] = []
    for one in found:
        last = files[-1][-1] if files else None
        if last is not None and _goes_on(last, one):
            files[-1].append(one)
        else:
            files.append([one])
    return files


def _goes_on(last: _Found, one: _Found) -> bool:
    """Whether a medium is a later frame of the same video of the same document."""
    before, facts = last.medium.facts, one.medium.facts
    return (
        isinstance(before, FrameFacts)
        and isinstance(facts, FrameFacts)
        and before.time < facts.time
        and (last.span, last.store) == (one.span, one.store)
        and last.medium.digest == one.medium.digest
        and (last.medium.place, last.medium.blob) == (one.medium.place, one.medium.blob)
    )


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
    for name in joined(features[:1]):
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


def batch_media(
    stores: Sequence[Store], plan: Plan, spec: BatchSpec, augment: object
) -> BatchMedia | None:
    """What makes the media of batches of these stores; None where none of them was made with a processor.

    Args:
        stores: that rows are read from.
        plan: the order, whose sources they are of.
        spec: the settings of the batches.
        augment: what is to be changed of tokens; None for nothing.

    Raises:
        PlanError, InputError: as :class:`BatchMedia`; or settings that documents with media do not allow.
    """
    if not any(store.manifest is not None and store.manifest.processor for store in stores):
        return None
    _refuse(plan, spec, augmented=augment is not None)
    return BatchMedia(stores, spec.media)


def refuse_cut_by_edit(plan: Plan) -> None:
    """Refuse a plan whose last change of ``seq_len`` cuts documents with media: what was left of pools is packed anew.

    Raises:
        PlanError: names a document, and the least ``seq_len`` that would do.
    """
    era = len(plan.weighed_by_era) - 1
    for order in (plan.order(number, era) for number in plan.weighed_by_era[era]):
        store = order.store
        if not (isinstance(store, Store) and holds_media(store)):
            continue
        media = StoreMedia(store)
        for rest in (one for one in order.rests if one is not None):
            whole = store.lengths.take(rest.documents)
            cut = np.flatnonzero(rest.lengths != whole)
            held = cut[media.tokens_of(rest.documents[cut]) > 0]
            if held.size:
                longest = held[whole[held].argmax()]
                document, tokens = int(rest.documents[longest]), int(whole[longest])
                raise PlanError(
                    f"seq_len {order.spec.seq_len} of the edit cuts document {document} of {store.place}, which holds "
                    f"images or audio and has {tokens} tokens: what is left of a pool is packed anew, and nothing of "
                    f"it is left out. Give a seq_len of at least {tokens}."
                )


def text_alone(loader: Reads, who: str) -> None:
    """Refuse a loader of stores with media where arrays of tokens alone are handed on.

    Args:
        loader: that is to be read.
        who: hands them on, in words.

    Raises:
        InputError: its stores hold images or audio.
    """
    if loader.holds_media:
        raise InputError(
            f"{loader.origin} holds images or audio, which {who} does not hand on yet: the model would be trained on "
            "what stands for them alone. Give the model the Loader's batches as they are (docs/media.md)."
        )


def _refuse(plan: Plan, spec: BatchSpec, *, augmented: bool) -> None:
    """Refuse what documents with media do not allow.

    Raises:
        PlanError: says what to leave out.
    """
    mixed = isinstance(plan.data, Mixture)
    rules = overlong_of(plan)
    for name, store in plan.stores.items():
        if not (isinstance(store, Store) and holds_media(store)):
            continue
        whose = f" of source {name!r}" if mixed else ""
        if plan.spec.packing == "wrap":
            raise _cuts("packing='wrap'", whose, "packing='best_fit'")
        if rules[name] in ("split", "truncate"):
            remedy = f"sources: {{{name}: {{overlong: drop}}}}" if mixed else "overlong='drop'"
            raise _cuts(f"overlong={rules[name]!r}", whose, f"{remedy}, or 'error'")
    if spec.mesh.context > 1:
        raise PlanError(
            "Images and audio are not cut for context-parallel ranks: give a mesh without context ranks."
        )
    if augmented:
        raise PlanError(
            "Augmentation would change what stands for images and audio: leave augment out."
        )


def _cuts(what: str, whose: str, remedy: str) -> PlanError:
    return PlanError(
        f"{what} cuts documents, and a document with images or audio{whose} is never cut: give {remedy}."
    )
