"""States of runs: their content, and resuming from states of the past."""

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest

import batchloom
from batchloom import Edit, Loader, StateError
from batchloom.cli import run_command_line
from golden.arrays import describe_batches
from golden.conftest import Workspace
from golden.expectations import Expectations
from golden.interface import Augment, SourceSpec, Stage, make_loader, merge_states
from golden.mixtures import make_mixture

EXPECTED = Expectations("states")
_DONE, _AFTER = 20, 10
_ORDER = {"seq_len": 512, "global_batch_size": 4, "steps": 50}


def _store(workspace: Workspace, recipe: str = "jsonl-mapped", **settings: Any) -> Loader:
    return _load(workspace.open(recipe), **_ORDER, **settings)


def _load(data: Any, **settings: Any) -> Loader:
    usual = {"rank": 0, "world_size": 1, "output": "numpy", "prefetch": 0}
    return make_loader(data, **{**usual, **settings})


def _edited(workspace: Workspace, **settings: Any) -> Loader:
    """A mixture whose weights, sizes and documents change while it runs."""
    return _load(make_mixture(workspace), **_ORDER, **settings)


def _edit(loader: Loader) -> None:
    loader.edit(Edit(step=5, weights={"web": 1, "wide": 2}, skip=1, note="more of wide"))
    loader.edit(Edit(step=9, ban={"web": [1, 2, 3]}, seq_len=300))
    loader.edit(Edit(step=25, global_batch_size=8))


def _staged(workspace: Workspace, **settings: Any) -> Loader:
    stages = [Stage(weights={"code": 1, "talk": 1}, step=10)]
    epochs = {"code": 1, "web": 20, "talk": 20}
    sources = {name: SourceSpec(epochs=number) for name, number in epochs.items()}
    mixture = make_mixture(workspace, stages=stages, exhausted="redistribute", sources=sources)
    return _load(mixture, **_ORDER, **settings)


RUNS: dict[str, Callable[..., Loader]] = {
    "store": _store,
    "store, wrapped": lambda space, **more: _store(space, packing="wrap", **more),
    "store, first windows": lambda space, **more: _store(space, packing="window_16@1", **more),
    "store, lanes": lambda space, **more: _store(space, lanes=4, pool_size=8, **more),
    "store, grouped": lambda space, **more: _store(space, packing="none", group_by_length=10, **more),
    "store, augmented": lambda space, **more: _store(space, augment=Augment(noise_prob=0.2, seed=5), **more),
    "store, conversations": lambda space, **more: _store(space, "chat", form="varlen", **more),
    "mixture": lambda space, **more: _load(make_mixture(space), **_ORDER, **more),
    "mixture, staged": _staged,
    "mixture, lanes": lambda space, **more: _load(make_mixture(space), **_ORDER, lanes=2, pool_size=16, **more),
    "edited run": _edited,
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_goes_on(workspace: Workspace, name: str) -> None:
    """A run saves the pinned state, and any ranks go on from it."""
    loader = RUNS[name](workspace)
    if name == "edited run":
        _edit(loader)
    state = _state_after(loader, _DONE)
    EXPECTED.check(f"{name}: state", state)
    saved = EXPECTED.read(f"{name}: state")
    for ranks in ((0, 1), (1, 2)):
        again = RUNS[name](workspace, rank=ranks[0], world_size=ranks[1])
        again.load_state_dict(json.loads(json.dumps(saved)))
        batches = _take(again, _AFTER)
        assert batches[0].step == _DONE
        section = f"{name}: after the state, rank {ranks[0]} of {ranks[1]}"
        EXPECTED.check(section, describe_batches(batches)["steps"])


def test_a_state_of_the_first_windows_names_what_goes_on_with_it(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    """``window_16`` had another rule at first, and its fingerprints have this name."""
    again = _store(workspace, packing="window_16")
    assert again.plan.identity["spec"]["packing"] == "window_16@2"
    saved = EXPECTED.read("store, first windows: state")
    with pytest.raises(StateError, match="give packing='window_16@1' to continue it"):
        again.load_state_dict(saved)
    again = _store(workspace, packing="window_16@1")
    assert again.plan.identity["spec"]["packing"] == "window_16"
    again.load_state_dict(saved)
    section = "store, first windows: after the state, rank 0 of 1"
    EXPECTED.check(section, describe_batches(_take(again, _AFTER))["steps"])
    (workspace.root / "first.json").write_text(json.dumps(saved), "utf-8")
    with workspace.entered():
        assert run_command_line(["plan", "stores/jsonl-mapped", "--checkpoint", "first.json"]) == 0
    assert saved["fingerprint"] in capsys.readouterr().out


def _state_after(loader: Loader, steps: int) -> dict[str, Any]:
    _take(loader, steps)
    return loader.state_dict()


def _take(loader: Loader, count: int) -> list[Any]:
    """Return the next batches of a loader; its iteration ends there."""
    return list(itertools.islice(loader, count))


@pytest.mark.parametrize("saved", ["store", "mixture", "edited run"])
def test_a_state_of_another_run_is_refused(workspace: Workspace, saved: str) -> None:
    other = _store(workspace, seed=1)
    with pytest.raises(StateError):
        other.load_state_dict(EXPECTED.read(f"{saved}: state"))


def _stream(workspace: Workspace) -> Any:
    with workspace.entered():
        return batchloom.stream(
            "records.jsonl",
            tokenizer="bytes",
            mapping={"text": "body"},
            lanes=4,
            workers=0,
            pool_size=32,
            **_ORDER,
        )


def test_a_stream_goes_on(workspace: Workspace) -> None:
    """States of two ranks make one, and one rank goes on from the pinned one."""
    with workspace.entered():
        states = [_state_after(_load(_stream(workspace), rank=rank, world_size=2), _DONE) for rank in (0, 1)]
        EXPECTED.check("stream: state", merge_states(states))
        again = _load(_stream(workspace))
        again.load_state_dict(EXPECTED.read("stream: state"))
        batches = _take(again, _AFTER)
    assert batches[0].step == _DONE
    EXPECTED.check("stream: after the state", describe_batches(batches)["steps"])


def test_no_other_expectations(workspace: Workspace) -> None:
    parts = (
        "state",
        *(f"after the state, rank {rank} of {size}" for rank, size in ((0, 1), (1, 2))),
    )
    names = [f"{name}: {part}" for name in RUNS for part in parts]
    EXPECTED.check_sections([*names, "stream: state", "stream: after the state"])
