"""Features written in place by threads equal features joined afterwards."""

import gc
from threading import Thread

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from batchloom.batches.media.batch_media import ArrayPool, FeatureJoin, FeatureShapes
from batchloom.core.medium import AudioFacts, ImageFacts
from batchloom.media import join_features
from batchloom.store.format import StoredMedium
from tiers import examples

IMAGE = StoredMedium(0, "image", 0, 4, (1, 4, 4), ImageFacts(9, 9), "a", 1, b"", None)
SOUND = IMAGE._replace(kind="audio", grid=(0, 0, 0), facts=AudioFacts(9, 9))


def make_features(grid, seed=0, width=3):
    rng = np.random.default_rng(seed)
    patches = int(np.prod(grid))
    values = rng.normal(size=(patches, width)).astype(np.float32)
    return {"pixel_values": values, "image_grid_thw": np.array([grid])}


def join_and_check(shapes, memory, media, features):
    feature_join = FeatureJoin(shapes, memory, media)
    for number in reversed(range(len(features))):
        feature_join.put(number, features[number])
    joined, sizes = feature_join.done()
    expected = join_features(features)
    assert joined.keys() == expected.keys() == sizes.keys()
    for name, array in joined.items():
        np.testing.assert_array_equal(array, expected[name])
        assert array.dtype == expected[name].dtype
        assert sizes[name] == [len(feature[name]) if name in feature else 0 for feature in features]
    return joined


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.just(1), st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=6),
        min_size=1,
        max_size=6,
    ),
    st.integers(0, 2**32),
)
def test_batches_of_grids(batches, seed):
    shapes, memory = FeatureShapes(), ArrayPool()
    for batch in batches:
        media = [IMAGE._replace(grid=grid) for grid in batch]
        join_and_check(shapes, memory, media, [make_features(grid, seed + n) for n, grid in enumerate(batch)])


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=5), min_size=1, max_size=6))
def test_features_that_are_not_alike(batches):
    """Images have different numbers of tiles, padded as for LLaVA-NeXT."""
    shapes, memory = FeatureShapes(), ArrayPool()
    for batch in batches:
        features = [{"pixel_values": np.full((1, tiles, 2), n + 1.0)} for n, tiles in enumerate(batch)]
        join_and_check(shapes, memory, [IMAGE._replace(grid=(0, 0, 0))] * len(batch), features)


def test_shapes_that_stop_being_alike():
    shapes, memory = FeatureShapes(), ArrayPool()
    media = [IMAGE._replace(grid=(0, 0, 0))] * 2
    alike = [{"a": np.ones((1, 3))}, {"a": np.zeros((1, 3))}]
    join_and_check(shapes, memory, media, alike)
    assert shapes.of(media[0]) is not None
    join_and_check(shapes, memory, media, [{"a": np.ones((1, 3))}, {"a": np.zeros((1, 5))}])
    assert shapes.of(media[0]) is None
    join_and_check(shapes, memory, media, alike)
    assert shapes.of(media[0]) is None


def test_images_and_sounds_have_names_of_their_own():
    shapes, memory = FeatureShapes(), ArrayPool()
    media = [IMAGE._replace(grid=(1, 2, 2)), SOUND, IMAGE._replace(grid=(1, 1, 3))]
    features = [make_features((1, 2, 2)), {"input_features": np.ones((1, 4, 4))}, make_features((1, 1, 3), 1)]
    for _ in range(3):
        joined = join_and_check(shapes, memory, media, features)
    assert joined["pixel_values"].shape == (7, 3)


def test_threads_put_each_their_own():
    shapes, memory = FeatureShapes(), ArrayPool()
    media = [IMAGE._replace(grid=(1, 3, n + 1)) for n in range(40)]
    features = [make_features(medium.grid, n, 5000) for n, medium in enumerate(media)]
    join_and_check(shapes, memory, media, features)
    feature_join = FeatureJoin(shapes, memory, media)
    threads = [Thread(target=feature_join.put, args=(n, feature)) for n, feature in enumerate(features)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(feature_join.done()[0]["pixel_values"], join_features(features)["pixel_values"])


def get_address(array):
    return array.__array_interface__["data"][0]


@pytest.mark.parametrize("make_view", [lambda a: a, lambda a: a[1:], lambda a: a.reshape(-1)[::2]])
def test_memory_is_reused_when_no_view_of_it_is_left(make_view):
    memory = ArrayPool()
    first = memory.array((1024, 2048), np.dtype("<f4"))
    first_address = get_address(first)
    view = make_view(first)
    del first
    gc.collect()
    # A view keeps the memory alive.
    second = memory.array((1024, 2048), np.dtype("<f4"))
    assert get_address(second) != first_address
    del view
    gc.collect()
    reused = memory.array((1000, 2048), np.dtype("<f4"))
    assert get_address(reused) == first_address
    reused[...] = 1
    second[...] = 2
    assert (reused == 1).all()


def test_a_tensor_holds_its_memory():
    import torch

    memory = ArrayPool()
    tensor = torch.from_numpy(memory.array((1024, 2048), np.dtype("<f4")))[3:]
    address = tensor.untyped_storage().data_ptr()
    gc.collect()
    assert get_address(memory.array((1024, 2048), np.dtype("<f4"))) != address
    del tensor
    gc.collect()
    assert get_address(memory.array((1024, 2048), np.dtype("<f4"))) == address


def test_small_arrays_are_the_allocators():
    array = ArrayPool().array((3, 2), np.dtype("<i8"))
    assert array.base is None
    assert array.shape == (3, 2)
