"""States of runs: their content, and resuming from states of earlier versions."""

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest

import batchloom
from batchloom import Edit, Loader, StateError
from golden.batch_digests import describe_batches
from golden.conftest import Workspace
from golden.expectations import Expectations
from golden.interface import Augment, SourceSpec, Stage, merge_states
from golden.mixtures import make_mixture

EXPECTED = Expectations("states")
_STEPS_BEFORE, _STEPS_AFTER = 20, 10
_ORDER = {"seq_len": 512, "global_batch_size": 4, "steps": 50}


def _load_store(workspace: Workspace, recipe: str = "jsonl-mapped", **settings: Any) -> Loader:
    return _make_numpy_loader(workspace.open(recipe), **_ORDER, **settings)


def _make_numpy_loader(data: Any, **settings: Any) -> Loader:
    defaults = {"rank": 0, "world_size": 1, "output": "numpy", "prefetch": 0}
    return batchloom.Loader(data, **{**defaults, **settings})


def _load_edited_mixture(workspace: Workspace, **settings: Any) -> Loader:
    """Return a loader over a mixture whose weights, sizes and documents change."""
    return _make_numpy_loader(make_mixture(workspace), **_ORDER, **settings)


def _apply_edits(loader: Loader) -> None:
    loader.edit(Edit(step=5, weights={"web": 1, "wide": 2}, skip=1, note="more of wide"))
    loader.edit(Edit(step=9, ban={"web": [1, 2, 3]}, seq_len=300))
    loader.edit(Edit(step=25, global_batch_size=8))


def _load_staged_mixture(workspace: Workspace, **settings: Any) -> Loader:
    stages = [Stage(weights={"code": 1, "talk": 1}, step=10)]
    epochs = {"code": 1, "web": 20, "talk": 20}
    sources = {name: SourceSpec(epochs=number) for name, number in epochs.items()}
    mixture = make_mixture(workspace, stages=stages, exhausted="redistribute", sources=sources)
    return _make_numpy_loader(mixture, **_ORDER, **settings)


RUNS: dict[str, Callable[..., Loader]] = {
    "store": _load_store,
    "store, wrapped": lambda space, **more: _load_store(space, packing="wrap", **more),
    "store, lanes": lambda space, **more: _load_store(space, lanes=4, pool_size=8, **more),
    "store, grouped": lambda space, **more: _load_store(space, packing="none", group_by_length=10, **more),
    "store, augmented": lambda space, **more: _load_store(space, augment=Augment(noise_prob=0.2, seed=5), **more),
    "store, conversations": lambda space, **more: _load_store(space, "chat", form="varlen", **more),
    "mixture": lambda space, **more: _make_numpy_loader(make_mixture(space), **_ORDER, **more),
    "mixture, staged": _load_staged_mixture,
    "mixture, lanes": lambda space, **more: _make_numpy_loader(
        make_mixture(space), **_ORDER, lanes=2, pool_size=16, **more
    ),
    "edited run": _load_edited_mixture,
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_resumes(workspace: Workspace, name: str) -> None:
    """A run saves the pinned state, and any number of ranks resumes from it."""
    loader = RUNS[name](workspace)
    if name == "edited run":
        _apply_edits(loader)
    state = _save_state_after(loader, _STEPS_BEFORE)
    EXPECTED.check(f"{name}: state", state)
    saved = EXPECTED.read(f"{name}: state")
    for ranks in ((0, 1), (1, 2)):
        resumed = RUNS[name](workspace, rank=ranks[0], world_size=ranks[1])
        resumed.load_state_dict(json.loads(json.dumps(saved)))
        batches = _read_batches(resumed, _STEPS_AFTER)
        assert batches[0].step == _STEPS_BEFORE
        section = f"{name}: after the state, rank {ranks[0]} of {ranks[1]}"
        EXPECTED.check(section, describe_batches(batches)["steps"])


def _save_state_after(loader: Loader, steps: int) -> dict[str, Any]:
    _read_batches(loader, steps)
    return loader.state_dict()


def _read_batches(loader: Loader, count: int) -> list[Any]:
    """Return the next batches of a loader, and end its iteration."""
    return list(itertools.islice(loader, count))


@pytest.mark.parametrize("saved", ["store", "mixture", "edited run"])
def test_a_state_of_another_run_is_refused(workspace: Workspace, saved: str) -> None:
    loader = _load_store(workspace, seed=1)
    with pytest.raises(StateError):
        loader.load_state_dict(EXPECTED.read(f"{saved}: state"))


def _open_stream(workspace: Workspace) -> Any:
    with workspace.enter():
        return batchloom.stream(
            "records.jsonl",
            tokenizer="bytes",
            mapping={"text": "body"},
            lanes=4,
            workers=0,
            pool_size=32,
            **_ORDER,
        )


def test_a_stream_resumes(workspace: Workspace) -> None:
    """States of two ranks merge into the pinned one, and one rank resumes from it."""
    with workspace.enter():
        states = [
            _save_state_after(_make_numpy_loader(_open_stream(workspace), rank=rank, world_size=2), _STEPS_BEFORE)
            for rank in (0, 1)
        ]
        EXPECTED.check("stream: state", merge_states(states))
        resumed = _make_numpy_loader(_open_stream(workspace))
        resumed.load_state_dict(EXPECTED.read("stream: state"))
        batches = _read_batches(resumed, _STEPS_AFTER)
    assert batches[0].step == _STEPS_BEFORE
    EXPECTED.check("stream: after the state", describe_batches(batches)["steps"])


def test_no_other_expectations(workspace: Workspace) -> None:
    parts = (
        "state",
        *(f"after the state, rank {rank} of {size}" for rank, size in ((0, 1), (1, 2))),
    )
    names = [f"{name}: {part}" for name in RUNS for part in parts]
    EXPECTED.check_sections([*names, "stream: state", "stream: after the state"])
