import copy
import pickle
import warnings
from itertools import product

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import batchloom
from adapters.small_stores import start_fork_server
from batchloom import StateError
from batchloom.adapters.pytorch import LoaderDataset, LoaderIterable
from batchloom.batches import Augment
from batchloom.core.errors import TrainError
from batchloom.plan import Mesh
from batchloom.testing import write_store

STEPS = 11

pytestmark = [
    # torch warns of few cores; forking with a (finished) thread warns on 3.12.
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    rng = np.random.default_rng(1)
    documents = [rng.integers(0, 257, rng.integers(1, 60)).tolist() for _ in range(300)]
    return write_store(tmp_path_factory.mktemp("store"), documents, documents_per_shard=100)


def build_loader(store, **options):
    return batchloom.Loader(
        store,
        seq_len=32,
        global_batch_size=8,
        steps=STEPS,
        rank=0,
        world_size=1,
        **options,
    )


@pytest.fixture(scope="module")
def expected(store):
    return [batch["input_ids"].clone() for batch in build_loader(store)]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("dataset_class", [LoaderIterable, LoaderDataset])
def test_workers_augment_as_their_loader_does(store, expected, dataset_class, workers):
    noisy = build_loader(store, augment=Augment(noise_prob=0.3))
    noisy_batches = [batch["input_ids"].clone() for batch in noisy]
    actual = [b["input_ids"] for b in DataLoader(dataset_class(noisy), batch_size=None, num_workers=workers)]
    assert all(torch.equal(a, b) for a, b in zip(noisy_batches, actual, strict=True))
    assert not torch.equal(noisy_batches[0], expected[0])


@pytest.mark.parametrize("options", [{}, {"batch_size": 8}, {"num_workers": 2}])
@pytest.mark.parametrize("dataset_class", [LoaderIterable, LoaderDataset])
def test_a_dataloader_that_would_stack_steps_is_refused_with_the_call_that_works(store, dataset_class, options):
    batches = iter(DataLoader(dataset_class(build_loader(store)), **options))
    call = rf"DataLoader\({dataset_class.__name__}\(loader\), batch_size=None\) gives them"
    with pytest.raises(TrainError, match=call):
        next(batches)


def test_a_dataloader_may_unwrap_single_steps(store, expected):
    batches = DataLoader(LoaderIterable(build_loader(store)), collate_fn=lambda items: items[0])
    assert torch.equal(next(iter(batches))["input_ids"], expected[0])


def test_a_workers_state_of_other_augmentation_is_refused(store):
    noisy = LoaderIterable(build_loader(store, augment=Augment(noise_prob=0.3)))
    noisy.load_state_dict(noisy.state_dict())
    with pytest.raises(StateError, match=r"augment.noise_prob was 0.3 and is 0.0"):
        LoaderIterable(build_loader(store)).load_state_dict(noisy.state_dict())


@pytest.mark.parametrize("workers", [0, 2, *(pytest.param(workers, marks=pytest.mark.slow) for workers in (1, 3))])
@pytest.mark.parametrize("dataset_class", [LoaderIterable, LoaderDataset])
def test_the_same_batches_for_any_number_of_workers(store, expected, dataset_class, workers):
    loader = build_loader(store)
    next(iter(loader))  # a producer thread has run before the fork
    actual = [b["input_ids"] for b in DataLoader(dataset_class(loader), batch_size=None, num_workers=workers)]
    assert len(actual) == STEPS
    assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("dataset_class", [LoaderIterable, LoaderDataset])
@pytest.mark.parametrize(
    "options",
    [
        {"uneven": "pad", "balance": True, "micro_batch_size": 2, "rank": 2, "world_size": 3},
        {
            "form": "varlen",
            "align": 4,
            "labels": "shifted",
            "mesh": Mesh(context=2, slices="zigzag"),
            "rank": 3,
            "world_size": 4,
        },
    ],
)
def test_a_share_of_a_step_is_the_same_in_workers(store, dataset_class, workers, options):
    loader = batchloom.Loader(store, seq_len=32, global_batch_size=8, steps=STEPS, **options)
    expected_batches = [loader[step] for step in range(STEPS)]
    actual_batches = list(DataLoader(dataset_class(loader), batch_size=None, num_workers=workers))
    for expected, actual in zip(expected_batches, actual_batches, strict=True):
        for expected_part, actual_part in zip(expected.split(2), actual.split(2), strict=True):
            assert set(expected_part) == set(actual_part)
            assert all(
                torch.equal(torch.as_tensor(expected_part[k]), torch.as_tensor(actual_part[k])) for k in expected_part
            )


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_that_receive_the_loader_as_a_pickle(store, expected, method):
    start_fork_server()
    loader = DataLoader(
        LoaderIterable(build_loader(store)), batch_size=None, num_workers=1, multiprocessing_context=method
    )
    assert all(torch.equal(a, b["input_ids"]) for a, b in zip(expected, loader, strict=True))


def test_a_loaded_loader_state_carries_into_any_number_of_workers(store, expected):
    loader = build_loader(store)
    iterator = iter(loader)
    for _ in range(4):
        next(iterator)
    state = loader.state_dict()
    iterator.close()
    for workers in (0, 2):
        resumed = build_loader(store)
        resumed.load_state_dict(state)
        actual = [b["input_ids"] for b in DataLoader(LoaderIterable(resumed), batch_size=None, num_workers=workers)]
        assert len(actual) == STEPS - 4
        assert all(torch.equal(a, b) for a, b in zip(expected[4:], actual, strict=True))


def make_stateful_dataloader(data, workers, persistent):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(data, batch_size=None, num_workers=workers, persistent_workers=persistent)


@pytest.mark.parametrize(
    ("workers", "persistent", "steps"),
    [
        (0, False, range(STEPS - 1)),
        (2, True, (0, 3)),
        *(
            pytest.param(*modes, range(STEPS - 1), marks=pytest.mark.slow)
            for modes in ((1, False), (2, True), (3, False))
        ),
    ],
)
def test_stateful_dataloader_goes_on_after_any_step(store, expected, workers, persistent, steps):
    first = make_stateful_dataloader(LoaderIterable(build_loader(store)), workers, persistent)
    states = [first.state_dict() for _ in first]
    assert len(states) == STEPS
    for step in steps:
        resumed = make_stateful_dataloader(LoaderIterable(build_loader(store)), workers, persistent)
        resumed.load_state_dict(states[step])
        iterator = iter(resumed)
        assert torch.equal(next(iterator)["input_ids"], expected[step + 1])
        if step in (0, 6):
            actual = [batch["input_ids"] for batch in iterator]
            assert len(actual) == STEPS - step - 2
            assert all(torch.equal(a, b) for a, b in zip(expected[step + 2 :], actual, strict=True))


PATHS = {
    "loader": lambda loader: loader,
    "iterable": lambda loader: DataLoader(LoaderIterable(loader), batch_size=None),
    "stateful": lambda loader: make_stateful_dataloader(LoaderIterable(loader), 0, persistent=False),
}


@pytest.mark.parametrize("prefetch", [0, 4])
@pytest.mark.parametrize("path", PATHS)
def test_the_state_is_that_of_the_batch_received_last(store, expected, path, prefetch):
    loader = build_loader(store, prefetch=prefetch)
    data = PATHS[path](loader)
    assert loader.state_dict()["position"] == 0
    for _ in range(2):  # the second pass follows an abandoned iterator
        iterator = iter(data)
        for step in range(7):
            assert next(iterator).step == step
            state = loader.state_dict()
            assert state["position"] == 8 * (step + 1)
            resumed = build_loader(store)
            resumed.load_state_dict(state)
            assert torch.equal(next(iter(resumed))["input_ids"], expected[step + 1])
        del iterator
        assert loader.state_dict()["position"] == 8 * 7
    assert [batch.step for batch in data] == list(range(STEPS))
    assert loader.state_dict()["position"] == 8 * STEPS


@pytest.mark.parametrize(
    ("dataset_class", "workers", "persistent"),
    [
        (LoaderIterable, 1, True),
        (LoaderDataset, 2, False),
        *(
            pytest.param(*modes, marks=pytest.mark.slow)
            for modes in product((LoaderIterable, LoaderDataset), (1, 2, 3), (False, True))
            if modes not in ((LoaderIterable, 1, True), (LoaderDataset, 2, False))
        ),
    ],
)
def test_a_state_that_workers_hide_is_refused(store, expected, dataset_class, workers, persistent):
    loader = build_loader(store)
    data = DataLoader(
        dataset_class(loader),
        batch_size=None,
        num_workers=workers,
        persistent_workers=persistent,
        prefetch_factor=3,
    )
    assert loader.state_dict()["position"] == 0
    next(iter(data))  # an abandoned iterator
    for batch in data:
        next(iter(loader))  # another iterator changes nothing
        with pytest.raises(StateError, match=r"Take loader.state_at\(batch.step \+ 1\)"):
            loader.state_dict()
        state = loader.state_at(batch.step + 1)
        if batch.step + 1 < STEPS:
            resumed = build_loader(store)
            resumed.load_state_dict(state)
            assert torch.equal(next(iter(resumed))["input_ids"], expected[batch.step + 1])
    loader.load_state_dict(state)
    assert loader.state_dict() == state


def test_items_taken_by_number_hide_the_state(store):
    loader = build_loader(store)
    assert LoaderDataset(loader)[3].step == 3
    with pytest.raises(StateError, match="a LoaderDataset"):
        loader.state_dict()
    assert [batch.step for batch in loader] == list(range(STEPS))
    assert loader.state_dict()["position"] == 8 * STEPS


@pytest.mark.parametrize("steps_taken", [0, 4])
@pytest.mark.parametrize("make_copy", [lambda loader: pickle.loads(pickle.dumps(loader)), copy.copy, copy.deepcopy])
def test_a_loader_is_pickled_and_copied_with_its_position(store, expected, make_copy, steps_taken):
    loader = build_loader(store, augment=Augment(noise_prob=0.3))
    for _ in zip(range(steps_taken), loader, strict=False):
        pass
    copied = make_copy(loader)
    assert copied.state_dict() == loader.state_dict()
    assert copied.spec == loader.spec
    actual = [batch["input_ids"] for batch in copied]
    remaining = [loader[step]["input_ids"] for step in range(steps_taken, STEPS)]
    assert all(torch.equal(a, b) for a, b in zip(remaining, actual, strict=True))
    assert loader.state_dict()["position"] == 8 * steps_taken


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (1, False), (1, True)])
def test_every_pass_starts_over(store, expected, workers, persistent):
    data = DataLoader(
        LoaderIterable(build_loader(store)),
        batch_size=None,
        num_workers=workers,
        persistent_workers=persistent,
    )
    assert torch.equal(next(iter(data))["input_ids"], expected[0])
    for _ in range(2):
        actual = [batch["input_ids"] for batch in data]
        assert len(actual) == STEPS
        assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))


def test_a_state_taken_before_the_first_batch_keeps_the_position(store):
    loader = build_loader(store)
    loader.load_state_dict(loader.plan.state(4 * 8))
    fresh = LoaderIterable(build_loader(store))
    fresh.load_state_dict(LoaderIterable(loader).state_dict())
    assert next(iter(fresh)).step == 4


def test_a_workers_state_of_another_plan_or_number_is_refused(store):
    dataset = LoaderIterable(build_loader(store))
    state = dataset.state_dict()
    with pytest.raises(StateError, match="taken with 4 workers, but there are 1"):
        dataset.load_state_dict({**state, "workers": 4})
    other_loader = batchloom.Loader(store, seq_len=16, global_batch_size=8, rank=0, world_size=1)
    with pytest.raises(StateError, match="spec.seq_len was 16 and is 32"):
        dataset.load_state_dict(LoaderIterable(other_loader).state_dict())
    with pytest.raises(StateError, match="not the state of a worker"):
        dataset.load_state_dict({"next": 3})
    with pytest.raises(IndexError):
        LoaderDataset(build_loader(store))[STEPS]


def test_documents_left_out_are_logged_by_the_process_that_wraps_the_loader(store, caplog):
    loader = batchloom.Loader(store, seq_len=32, global_batch_size=8, overlong="drop", rank=0, world_size=1)
    dataset = LoaderIterable(loader)
    assert len(caplog.records) == 1
    assert "overlong='drop' leaves" in caplog.text
    assert list(DataLoader(dataset, batch_size=None))
    assert len(caplog.records) == 1
