"""Features of the media of a batch, put one behind the other by the threads that make them."""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple, final

import numpy as np

from batchloom.batches.media.array_reuse import ArrayPool
from batchloom.core.medium import AudioFacts
from batchloom.media import FeatureArrays, stack_padded
from batchloom.store.format import StoredMedium


class _FeatureShape(NamedTuple):
    """What the features of a name are like: as many rows as a medium has patches (0), or a fixed number."""

    rows: int
    sides: tuple[int, ...]
    dtype: np.dtype[Any]


@final
class FeatureShapes:
    """What features are like, learned from those that were made before; nothing where these are not alike."""

    def __init__(self) -> None:
        self._known: dict[bool, dict[str, _FeatureShape]] = {}
        self._varied: set[bool] = set()

    def of(self, medium: StoredMedium) -> dict[str, _FeatureShape] | None:
        """The features that a medium will have, by name; None where nobody knows."""
        return self._known.get(_is_audio(medium))

    def learn(self, media: Sequence[StoredMedium], made: Sequence[FeatureArrays]) -> None:
        """Take note of the features of media that were not known before, or are others than was thought."""
        for hears in {_is_audio(medium) for medium in media} - self._varied:
            mine = [n for n, medium in enumerate(media) if _is_audio(medium) == hears]
            found = _find_common_shapes([media[n] for n in mine], [made[n] for n in mine])
            if found is None or self._known.get(hears, found) != found:
                self._varied.add(hears)
                self._known.pop(hears, None)
            else:
                self._known[hears] = found


@final
class FeatureJoin:
    """The features of media in their order, as :func:`batchloom.media.join_features` gives them.

    Where it is known how many there will be, each thread puts those that it made in place and lets go of its own:
    memory that a thread frees itself is used again by its next medium, and nothing is copied afterwards.

    Args:
        shapes: what is known of features.
        memory: where they are put.
        media: whose they are.
    """

    def __init__(
        self, shapes: FeatureShapes, memory: ArrayPool, media: Sequence[StoredMedium]
    ) -> None:
        self._shapes, self._media = shapes, media
        self._made: dict[int, FeatureArrays] = {}
        self._placed: list[FeatureArrays] = [{} for _ in media]
        self._whole: FeatureArrays = {}
        expected = [shapes.of(medium) for medium in media]
        if all(one is not None for one in expected):
            self._allocate_features([one or {} for one in expected], memory)

    def _allocate_features(
        self, expected: Sequence[dict[str, _FeatureShape]], memory: ArrayPool
    ) -> None:
        names = dict.fromkeys(name for one in expected for name in one)
        for name in names:
            shape = next(one[name] for one in expected if name in one)
            sizes = [
                _count_feature_rows(one[name], medium) if name in one else 0
                for one, medium in zip(expected, self._media, strict=True)
            ]
            whole = self._whole[name] = memory.array((sum(sizes), *shape.sides), shape.dtype)
            ends = np.cumsum(sizes).tolist()
            for placed, one, size, end in zip(self._placed, expected, sizes, ends, strict=True):
                if name in one:
                    placed[name] = whole[end - size : end]

    def put(self, number: int, features: FeatureArrays) -> None:
        """Take the features of a medium, by its number; threads call it, each for its own."""
        placed = self._placed[number]
        alike = placed.keys() == features.keys() and all(
            (one.shape, one.dtype) == (placed[name].shape, placed[name].dtype)
            for name, one in features.items()
        )
        if not alike:
            self._made[number] = features
            return
        for name, array in features.items():
            placed[name][...] = array

    def done(self) -> tuple[FeatureArrays, dict[str, list[int]]]:
        """All of them, and how long those of each medium are, by name."""
        if not self._made:
            return self._whole, _collect_feature_sizes(self._placed)
        made = [self._made.get(number, placed) for number, placed in enumerate(self._placed)]
        self._shapes.learn(self._media, made)
        sizes = _collect_feature_sizes(made)
        return {
            name: stack_padded([one[name] for one in made if name in one]) for name in sizes
        }, sizes


def _collect_feature_sizes(made: Sequence[FeatureArrays]) -> dict[str, list[int]]:
    names = dict.fromkeys(name for one in made for name in one)
    return {name: [len(one[name]) if name in one else 0 for one in made] for name in names}


def _is_audio(medium: StoredMedium) -> bool:
    return isinstance(medium.facts, AudioFacts)


def _count_feature_rows(shape: _FeatureShape, medium: StoredMedium) -> int:
    return shape.rows or prod(medium.grid)


def _find_common_shapes(
    media: Sequence[StoredMedium], made: Sequence[FeatureArrays]
) -> dict[str, _FeatureShape] | None:
    """What the features of all these media are like; None where they are not alike."""
    found = {}
    for name, first in made[0].items():
        if any(name not in one for one in made):
            return None
        arrays = [one[name] for one in made]
        if any((one.shape[1:], one.dtype) != (first.shape[1:], first.dtype) for one in arrays):
            return None
        patches = [prod(medium.grid) for medium in media]
        lengths = [len(one) for one in arrays]
        if lengths == patches and first.ndim > 1:
            rows = 0
        elif len(set(lengths)) == 1:
            rows = lengths[0]
        else:
            return None
        found[name] = _FeatureShape(rows, first.shape[1:], first.dtype)
    return found if all(one.keys() == found.keys() for one in made) else None
