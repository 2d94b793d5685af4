"""Features that threads put in place are those that are joined afterwards, whatever comes."""

import gc
from threading import Thread

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from batchloom.batches.media.array_reuse import ArrayPool
from batchloom.batches.media.feature_join import FeatureJoin, FeatureShapes
from batchloom.core.medium import AudioFacts, ImageFacts
from batchloom.media import join_features
from batchloom.store.format import StoredMedium
from tiers import examples

IMAGE = StoredMedium(0, "image", 0, 4, (1, 4, 4), ImageFacts(9, 9), "a", 1, b"", None)
SOUND = IMAGE._replace(kind="audio", grid=(0, 0, 0), facts=AudioFacts(9, 9))


def of_grid(grid, seed=0, width=3):
    rng = np.random.default_rng(seed)
    patches = int(np.prod(grid))
    values = rng.normal(size=(patches, width)).astype(np.float32)
    return {"pixel_values": values, "image_grid_thw": np.array([grid])}


def join(shapes, memory, media, made):
    joining = FeatureJoin(shapes, memory, media)
    for number in reversed(range(len(made))):
        joining.put(number, made[number])
    whole, sizes = joining.done()
    wanted = join_features(made)
    assert whole.keys() == wanted.keys() == sizes.keys()
    for name, array in whole.items():
        np.testing.assert_array_equal(array, wanted[name])
        assert array.dtype == wanted[name].dtype
        assert sizes[name] == [len(one[name]) if name in one else 0 for one in made]
    return whole


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
        join(shapes, memory, media, [of_grid(grid, seed + n) for n, grid in enumerate(batch)])


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=5), min_size=1, max_size=6))
def test_features_that_are_not_alike(batches):
    """As tiles of LLaVA-NeXT: of some images more than of others, which are filled up."""
    shapes, memory = FeatureShapes(), ArrayPool()
    for batch in batches:
        made = [{"pixel_values": np.full((1, tiles, 2), n + 1.0)} for n, tiles in enumerate(batch)]
        join(shapes, memory, [IMAGE._replace(grid=(0, 0, 0))] * len(batch), made)


def test_what_was_alike_and_is_no_more():
    shapes, memory = FeatureShapes(), ArrayPool()
    media = [IMAGE._replace(grid=(0, 0, 0))] * 2
    alike = [{"a": np.ones((1, 3))}, {"a": np.zeros((1, 3))}]
    join(shapes, memory, media, alike)
    assert shapes.of(media[0]) is not None
    join(shapes, memory, media, [{"a": np.ones((1, 3))}, {"a": np.zeros((1, 5))}])
    assert shapes.of(media[0]) is None
    join(shapes, memory, media, alike)
    assert shapes.of(media[0]) is None


def test_images_and_sounds_have_names_of_their_own():
    shapes, memory = FeatureShapes(), ArrayPool()
    media = [IMAGE._replace(grid=(1, 2, 2)), SOUND, IMAGE._replace(grid=(1, 1, 3))]
    made = [of_grid((1, 2, 2)), {"input_features": np.ones((1, 4, 4))}, of_grid((1, 1, 3), 1)]
    for _ in range(3):
        whole = join(shapes, memory, media, made)
    assert whole["pixel_values"].shape == (7, 3)


def test_threads_put_each_their_own():
    shapes, memory = FeatureShapes(), ArrayPool()
    media = [IMAGE._replace(grid=(1, 3, n + 1)) for n in range(40)]
    made = [of_grid(one.grid, n, 5000) for n, one in enumerate(media)]
    join(shapes, memory, media, made)
    joining = FeatureJoin(shapes, memory, media)
    threads = [Thread(target=joining.put, args=(n, one)) for n, one in enumerate(made)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(joining.done()[0]["pixel_values"], join_features(made)["pixel_values"])


def address(array):
    return array.__array_interface__["data"][0]


@pytest.mark.parametrize("keep", [lambda a: a, lambda a: a[1:], lambda a: a.reshape(-1)[::2]])
def test_memory_is_used_again_when_nobody_holds_it(keep):
    memory = ArrayPool()
    first = memory.array((1024, 2048), np.dtype("<f4"))
    place = address(first)
    held = keep(first)
    del first
    gc.collect()
    # A view of it is left.
    other = memory.array((1024, 2048), np.dtype("<f4"))
    assert address(other) != place
    del held
    gc.collect()
    again = memory.array((1000, 2048), np.dtype("<f4"))
    assert address(again) == place
    again[...] = 1
    other[...] = 2
    assert (again == 1).all()


def test_a_tensor_holds_its_memory():
    import torch

    memory = ArrayPool()
    tensor = torch.from_numpy(memory.array((1024, 2048), np.dtype("<f4")))[3:]
    place = tensor.untyped_storage().data_ptr()
    gc.collect()
    assert address(memory.array((1024, 2048), np.dtype("<f4"))) != place
    del tensor
    gc.collect()
    assert address(memory.array((1024, 2048), np.dtype("<f4"))) == place


def test_small_arrays_are_the_allocators():
    array = ArrayPool().array((3, 2), np.dtype("<i8"))
    assert array.base is None
    assert array.shape == (3, 2)
