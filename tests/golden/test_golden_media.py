"""Stores and batches with images; skipped without the ``media`` extra."""

import itertools
import json
from typing import Any

import pytest

from batchloom import Loader
from golden.batch_digests import describe_batches
from golden.conftest import Workspace
from golden.expectations import Expectations
from golden.interface import MediaOptions
from golden.json_normalization import normalize
from golden.recipes import MEDIA_RECIPES
from golden.store_digests import describe_store

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
EXPECTED = Expectations("media")
_SETTINGS = {
    "seq_len": 256,
    "global_batch_size": 2,
    "steps": 10,
    "media": MediaOptions(workers=1),
    "output": "numpy",
    "prefetch": 1,
}
_RANKS = {"rank 0 of 1": (0, 1), "rank 1 of 2": (1, 2)}
_FORMS = {"rows": {}, "varlen": {"form": "varlen"}, "alone": {"packing": "none"}}


def make_recipe_loader(workspace: Workspace, name: str, rank: int = 0, world_size: int = 1, **overrides: Any) -> Loader:
    """Return a loader over the store of a recipe."""
    settings = {**_SETTINGS, **overrides}
    return Loader(workspace.open(name), rank=rank, world_size=world_size, **settings)


@pytest.mark.parametrize("name", MEDIA_RECIPES)
def test_the_store_of_a_recipe(workspace: Workspace, name: str) -> None:
    store = workspace.prepare(name)
    EXPECTED.check(name, describe_store(workspace.root / store))


@pytest.mark.parametrize("ranks", _RANKS)
@pytest.mark.parametrize("form", _FORMS)
@pytest.mark.parametrize("name", MEDIA_RECIPES)
def test_batches(workspace: Workspace, name: str, form: str, ranks: str) -> None:
    rank, world_size = _RANKS[ranks]
    loader = make_recipe_loader(workspace, name, rank, world_size, **_FORMS[form])
    with workspace.enter():
        EXPECTED.check(f"batches: {name}, {form}, {ranks}", describe_batches(loader))


def test_a_run_resumes(workspace: Workspace) -> None:
    """A run resumes from the pinned state."""
    with workspace.enter():
        loader = make_recipe_loader(workspace, "pictures")
        assert [batch.step for batch in itertools.islice(loader, 4)] == [0, 1, 2, 3]
        EXPECTED.check("state", loader.state_dict())
        resumed = make_recipe_loader(workspace, "pictures")
        resumed.load_state_dict(EXPECTED.read("state"))
        EXPECTED.check("after the state", describe_batches(resumed)["steps"])


COMMANDS = ("check stores/pictures", "inspect stores/pictures-embedded --seq-len 256 --first 1")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command(workspace: Workspace, command: str) -> None:
    for name in MEDIA_RECIPES:
        workspace.prepare(name)
    printed = json.loads(workspace.run(f"{command} --json").out)
    EXPECTED.check(command, normalize(printed, str(workspace.root)))


def test_no_other_expectations(workspace: Workspace) -> None:
    batches = (f"batches: {name}, {form}, {ranks}" for name in MEDIA_RECIPES for form in _FORMS for ranks in _RANKS)
    EXPECTED.check_sections([*MEDIA_RECIPES, *batches, "state", "after the state", *COMMANDS])
