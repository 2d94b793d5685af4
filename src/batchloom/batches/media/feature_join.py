"""Concatenation of a batch's media features, by the threads that make them."""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple, final

import numpy as np

from batchloom.batches.media.array_reuse import ArrayPool
from batchloom.core.medium import AudioFacts
from batchloom.media import FeatureArrays, stack_padded
from batchloom.store.format import StoredMedium


class _FeatureShape(NamedTuple):
    """Shape of a feature: ``rows`` per medium, or one row per patch if it is 0."""

    rows: int
    sides: tuple[int, ...]
    dtype: np.dtype[Any]


@final
class FeatureShapes:
    """Shapes of features, learned from earlier media; unknown if they vary."""

    def __init__(self) -> None:
        self._known_shapes: dict[bool, dict[str, _FeatureShape]] = {}
        self._varied: set[bool] = set()

    def of(self, medium: StoredMedium) -> dict[str, _FeatureShape] | None:
        """Return the expected features of a medium, by name; None if unknown."""
        return self._known_shapes.get(_is_audio(medium))

    def learn(self, media: Sequence[StoredMedium], features: Sequence[FeatureArrays]) -> None:
        """Record the features of media that were unknown or deviated from the expectation."""
        for is_audio in {_is_audio(medium) for medium in media} - self._varied:
            indices = [n for n, medium in enumerate(media) if _is_audio(medium) == is_audio]
            shapes = _find_common_shapes([media[n] for n in indices], [features[n] for n in indices])
            if shapes is None or self._known_shapes.get(is_audio, shapes) != shapes:
                self._varied.add(is_audio)
                self._known_shapes.pop(is_audio, None)
            else:
                self._known_shapes[is_audio] = shapes


@final
class FeatureJoin:
    """Concatenation of media features, as :func:`batchloom.media.join_features` does.

    If the shapes are known, each thread copies its features into place and frees its own memory: the thread's
    next medium reuses it, and no copy is needed afterwards.

    Args:
        shapes: known feature shapes.
        memory: pool of the joined arrays.
        media: the media, in order.
    """

    def __init__(self, shapes: FeatureShapes, memory: ArrayPool, media: Sequence[StoredMedium]) -> None:
        self._shapes, self._media = shapes, media
        self._unplaced_features: dict[int, FeatureArrays] = {}
        self._placed: list[FeatureArrays] = [{} for _ in media]
        self._joined_arrays: FeatureArrays = {}
        expected = [shapes.of(medium) for medium in media]
        if all(medium_shapes is not None for medium_shapes in expected):
            self._allocate_features([medium_shapes or {} for medium_shapes in expected], memory)

    def _allocate_features(self, expected: Sequence[dict[str, _FeatureShape]], memory: ArrayPool) -> None:
        names = dict.fromkeys(name for medium_shapes in expected for name in medium_shapes)
        for name in names:
            shape = next(medium_shapes[name] for medium_shapes in expected if name in medium_shapes)
            sizes = [
                _count_feature_rows(medium_shapes[name], medium) if name in medium_shapes else 0
                for medium_shapes, medium in zip(expected, self._media, strict=True)
            ]
            joined_array = self._joined_arrays[name] = memory.array((sum(sizes), *shape.sides), shape.dtype)
            ends = np.cumsum(sizes).tolist()
            for reserved_arrays, medium_shapes, size, end in zip(self._placed, expected, sizes, ends, strict=True):
                if name in medium_shapes:
                    reserved_arrays[name] = joined_array[end - size : end]

    def put(self, number: int, features: FeatureArrays) -> None:
        """Store the features of a medium by its index; threads call it concurrently."""
        reserved_arrays = self._placed[number]
        fits_reserved = reserved_arrays.keys() == features.keys() and all(
            (feature.shape, feature.dtype) == (reserved_arrays[name].shape, reserved_arrays[name].dtype)
            for name, feature in features.items()
        )
        if not fits_reserved:
            self._unplaced_features[number] = features
            return
        for name, array in features.items():
            reserved_arrays[name][...] = array

    def done(self) -> tuple[FeatureArrays, dict[str, list[int]]]:
        """Return the joined features, and the length of each medium's part, by name."""
        if not self._unplaced_features:
            return self._joined_arrays, _collect_feature_sizes(self._placed)
        features = [
            self._unplaced_features.get(number, reserved_arrays) for number, reserved_arrays in enumerate(self._placed)
        ]
        self._shapes.learn(self._media, features)
        sizes = _collect_feature_sizes(features)
        return {
            name: stack_padded([medium_features[name] for medium_features in features if name in medium_features])
            for name in sizes
        }, sizes


def _collect_feature_sizes(features: Sequence[FeatureArrays]) -> dict[str, list[int]]:
    names = dict.fromkeys(name for medium_features in features for name in medium_features)
    return {
        name: [len(medium_features[name]) if name in medium_features else 0 for medium_features in features]
        for name in names
    }


def _is_audio(medium: StoredMedium) -> bool:
    return isinstance(medium.facts, AudioFacts)


def _count_feature_rows(shape: _FeatureShape, medium: StoredMedium) -> int:
    return shape.rows or prod(medium.grid)


def _find_common_shapes(
    media: Sequence[StoredMedium], features: Sequence[FeatureArrays]
) -> dict[str, _FeatureShape] | None:
    """Return the common shapes of the media's features; None if they differ."""
    shapes = {}
    for name, first in features[0].items():
        if any(name not in medium_features for medium_features in features):
            return None
        arrays = [medium_features[name] for medium_features in features]
        if any((array.shape[1:], array.dtype) != (first.shape[1:], first.dtype) for array in arrays):
            return None
        patches = [prod(medium.grid) for medium in media]
        lengths = [len(array) for array in arrays]
        if lengths == patches and first.ndim > 1:
            rows = 0
        elif len(set(lengths)) == 1:
            rows = lengths[0]
        else:
            return None
        shapes[name] = _FeatureShape(rows, first.shape[1:], first.dtype)
    return shapes if all(medium_features.keys() == shapes.keys() for medium_features in features) else None
