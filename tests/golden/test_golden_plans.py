"""Plans: fingerprints, step counts, unserved data and the first steps."""

import dataclasses
from typing import Any

import pytest

import batchloom
from batchloom import Edit, Plan, PlanError, PlanSpec
from golden.batch_digests import describe_batches
from golden.conftest import Workspace
from golden.expectations import Expectations
from golden.interface import SourceSpec, Stage, read_mixture
from golden.mixtures import SOURCES, WEIGHTS, make_mixture

EXPECTED = Expectations("plans")
_STEPS = 8
_SIZES = {"seq_len": 512, "global_batch_size": 4}
_PACKINGS = ("best_fit", "wrap", "first_fit", "window_16", "none")

SETTINGS: dict[str, dict[str, Any]] = {
    **{packing: {"packing": packing} for packing in _PACKINGS},
    **{f"{packing} unshuffled": {"packing": packing, "shuffle": False} for packing in _PACKINGS},
    **{
        f"{packing} overlong {rule}": {"packing": packing, "overlong": rule, "seq_len": 256}
        for packing in ("best_fit", "wrap", "none")
        for rule in ("split", "drop", "truncate")
    },
    "another seed": {"seed": 7},
    "a large negative seed": {"seed": -(2**100)},
    "epochs": {"epochs": 3},
    "steps": {"steps": 60},
    "last step left out": {"last": "drop"},
    "small pools": {"pool_size": 16},
    "small pools of blocks": {"pool_size": 16, "block": 4},
    "lanes": {"lanes": 4, "pool_size": 8},
    "aligned": {"align": 8},
    "grouped by length": {"packing": "none", "group_by_length": 5, "pool_size": 32},
    "long sequences": {"seq_len": 4096, "global_batch_size": 2},
}

MIXTURES: dict[str, dict[str, Any]] = {
    "weights": {"weights": WEIGHTS},
    "weights in documents": {"weights": WEIGHTS, "unit": "documents"},
    "weights in epochs": {"weights": WEIGHTS, "unit": "epochs"},
    "by size": {"weights": "size", "temperature": 2.0},
    "by size, capped": {"weights": "size", "most_epochs": 3.0},
    "groups": {"weights": {"web": 2, "rest": {"weight": 1, "sources": {"code": 2, "talk": 1}}}},
    "a source alone": {
        "weights": WEIGHTS,
        "sources": {"web": SourceSpec(seed=5, overlong="truncate"), "code": SourceSpec(seed=6)},
    },
    "stop": {"weights": WEIGHTS, "exhausted": "stop", "sources": {"code": SourceSpec(epochs=2)}},
    "redistribute": {"weights": WEIGHTS, "exhausted": "redistribute"},
    "stages by step": {
        "weights": WEIGHTS,
        "stages": [
            Stage(weights={"code": 1}, step=2),
            Stage(weights={"wide": 1, "web": 2}, step=5),
        ],
    },
    "a stage by tokens": {
        "weights": WEIGHTS,
        "stages": [Stage(weights={"wide": 1, "web": 2}, tokens=9000)],
    },
    "lanes": {"weights": WEIGHTS, "spec": {"lanes": 2, "pool_size": 16}},
    "wrapped": {"weights": WEIGHTS, "spec": {"packing": "wrap"}},
}
_ENDLESS = ("stop", "redistribute")

EDITS: dict[str, list[dict[str, Any]]] = {
    "weights": [{"step": 3, "weights": {"web": 1, "wide": 1}, "note": "asked for"}],
    "skip": [{"step": 2, "skip": 3}],
    "ban": [{"step": 1, "ban": {"web": [4, 0, 17], "code": [1]}}],
    "batch size": [{"step": 2, "global_batch_size": 8}],
    "sequence length": [{"step": 2, "seq_len": 300}],
    "every edit": [
        {"step": 1, "seq_len": 200},
        {"step": 2, "skip": 1, "global_batch_size": 2, "seq_len": 700},
        {"step": 4, "ban": {"talk": [3]}, "weights": {"web": 1, "talk": 1}},
    ],
}


def describe_plan(plan: Plan) -> dict[str, Any]:
    """Return the pinned properties of a plan."""
    loader = batchloom.Loader(plan, rank=0, world_size=1, output="numpy", prefetch=0)
    batches = [loader.batch(step) for step in range(min(_STEPS, plan.steps))]
    return {
        "fingerprint": plan.fingerprint,
        "steps": plan.steps,
        "left out": dataclasses.asdict(plan.left_out()),
        "state at step 3": plan.state(plan.positions_of(3)[0])["check"],
        "journal": [entry["fingerprint"] for entry in plan.journal],
        "first steps": describe_batches(batches)["steps"],
    }


@pytest.mark.parametrize("name", SETTINGS)
def test_a_plan_of_one_store(workspace: Workspace, name: str) -> None:
    spec = PlanSpec(**{**_SIZES, **SETTINGS[name]})
    EXPECTED.check(name, describe_plan(Plan(workspace.open("jsonl-mapped"), spec)))


@pytest.mark.parametrize("recipe", ["chat", "instructions", "token-rows", "manifest"])
def test_the_defaults_of_a_store(workspace: Workspace, recipe: str) -> None:
    """By default, a loader drops long conversations and splits long texts."""
    loader = batchloom.Loader(workspace.open(recipe), rank=0, world_size=1, output="numpy", **_SIZES)
    EXPECTED.check(f"defaults of {recipe}", describe_plan(loader.plan))


@pytest.mark.parametrize("name", MIXTURES)
def test_a_plan_of_a_mixture(workspace: Workspace, name: str) -> None:
    settings = dict(MIXTURES[name])
    run_length = {} if name in _ENDLESS else {"steps": 40}
    spec = PlanSpec(**_SIZES, **run_length, **settings.pop("spec", {}))
    plan = Plan(make_mixture(workspace, **settings), spec)
    EXPECTED.check(f"mixture: {name}", describe_plan(plan))


MIXTURE_FILE = """\
weights:
  web: 2
  rest: {weight: 1, sources: {code: 2, talk: 1}}
stores:
  web: stores/jsonl-mapped
  code: {path: stores/text, generation: 1}
  talk: stores/text-and-chat
exhausted: redistribute
sources:
  web: {epochs: 4, seed: 3}
stages:
  - {step: 6, weights: {web: 1, code: 1}}
"""


def test_a_mixture_file(workspace: Workspace) -> None:
    for recipe in SOURCES.values():
        workspace.prepare(recipe)
    (workspace.root / "mix.yaml").write_text(MIXTURE_FILE, "utf-8")
    with workspace.enter():
        mixture = read_mixture("mix.yaml")
        EXPECTED.check("mixture file", describe_plan(Plan(mixture, PlanSpec(**_SIZES))))


def test_overlong_documents_are_refused(workspace: Workspace) -> None:
    with pytest.raises(PlanError):
        Plan(workspace.open("jsonl-mapped"), PlanSpec(**_SIZES, overlong="error"))


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("name", EDITS)
def test_an_edited_plan(workspace: Workspace, name: str, lanes: int) -> None:
    spec = PlanSpec(**_SIZES, steps=30, lanes=lanes, pool_size=64)
    edits = [Edit(**edit) for edit in EDITS[name]]
    plan = Plan(make_mixture(workspace), spec, edits)
    EXPECTED.check(f"edits, {lanes} lanes: {name}", describe_plan(plan))


def test_no_other_expectations(workspace: Workspace) -> None:
    EXPECTED.check_sections(
        [
            *SETTINGS,
            *(f"defaults of {recipe}" for recipe in ("chat", "instructions", "token-rows", "manifest")),
            *(f"mixture: {name}" for name in MIXTURES),
            "mixture file",
            *(f"edits, {lanes} lanes: {name}" for name in EDITS for lanes in (1, 2)),
        ]
    )
