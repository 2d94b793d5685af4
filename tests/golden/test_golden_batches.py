"""Batches: digests of 50 steps in every packing, form and share of ranks."""

from collections.abc import Callable
from typing import Any

import pytest

import batchloom
from batchloom import Edit, Loader
from golden.batch_digests import describe_batches
from golden.conftest import Workspace
from golden.expectations import Expectations
from golden.interface import (
    Augment,
    LabelledAnswers,
    Mesh,
    PreferencePairs,
    add_dense_mask,
    to_megatron,
    to_padded,
    to_shifted,
    to_varlen,
)
from golden.mixtures import make_mixture

EXPECTED = Expectations("batches")
_STEPS = 50
_ORDER = {"seq_len": 512, "global_batch_size": 4, "steps": _STEPS}
_PACKINGS = ("best_fit", "wrap", "first_fit", "window_16", "none")
_RANKS = {"rank 0 of 1": (0, 1), "rank 0 of 2": (0, 2), "rank 1 of 2": (1, 2)}
_FORMS = {
    "rows": {},
    "shifted": {"labels": "shifted"},
    "varlen": {"form": "varlen"},
    "varlen shifted": {"form": "varlen", "labels": "shifted"},
}
CONVERTERS: dict[str, Callable[[Any], Any]] = {
    "shifted by function": to_shifted,
    "flattened": to_varlen,
    "megatron": lambda batch: to_megatron(batch, attention_mask=True),
    "dense mask": add_dense_mask,
    "additive mask": lambda batch: add_dense_mask(batch, additive="float32"),
}

# Settings of loaders over a store of text and conversations.
LOADERS: dict[str, dict[str, Any]] = {
    "lanes": {"lanes": 4, "pool_size": 8},
    "aligned": {"align": 8, "form": "varlen"},
    "grouped by length": {"packing": "none", "group_by_length": 5},
    "balanced": {"balance": True, "rank": 1, "world_size": 2},
    "uneven": {"uneven": "pad", "rank": 2, "world_size": 3, "global_batch_size": 4},
    "context ranks": {
        "labels": "shifted",
        "mesh": Mesh(context=2, slices="zigzag"),
        "rank": 1,
        "world_size": 2,
    },
    "context ranks, varlen": {
        "labels": "shifted",
        "form": "varlen",
        "align": 4,
        "mesh": Mesh(tensor=2, context=2, slices="contiguous"),
        "rank": 2,
        "world_size": 4,
    },
    "masked": {"augment": Augment(mask_prob=0.15, mask_id=257, vocab_size=258)},
    "noise": {"augment": {"noise_prob": 0.1, "loss_drop_prob": 0.1, "seed": 3}},
    "noise, shifted": {"augment": {"noise_prob": 0.1}, "labels": "shifted", "form": "varlen"},
    "without prefetching": {"prefetch": 0},
}


def make_numpy_loader(data: Any, **settings: Any) -> Loader:
    """Return a loader of numpy arrays, of rank 0 of 1 by default."""
    defaults = {"rank": 0, "world_size": 1, "output": "numpy", "prefetch": 2}
    return batchloom.Loader(data, **{**defaults, **settings})


def check_batches(section: str, batches: Any, **facts: Any) -> None:
    """Compare batches with their expectation."""
    EXPECTED.check(section, {**describe_batches(batches), **facts})


@pytest.mark.parametrize("recipe", ["jsonl-mapped", "chat"])
@pytest.mark.parametrize("form", _FORMS)
@pytest.mark.parametrize("packing", _PACKINGS)
def test_a_packing_in_a_form(workspace: Workspace, packing: str, form: str, recipe: str) -> None:
    """One and two ranks read text; one rank reads conversations with their masks."""
    store = workspace.open(recipe)
    for ranks, (rank, world_size) in _RANKS.items():
        if world_size > 1 and recipe == "chat":
            continue
        settings = {**_ORDER, **_FORMS[form], "packing": packing}
        loader = make_numpy_loader(store, **settings, rank=rank, world_size=world_size)
        batches = list(loader)
        trained = sum(loader.trained_tokens(step) for step in range(0, _STEPS, 10))
        facts = {"origin": batches[0].origin, "trained tokens of every tenth step": trained}
        check_batches(f"{recipe} {packing} {form}, {ranks}", batches, **facts)


@pytest.mark.parametrize("packing", ["best_fit", "none"])
@pytest.mark.parametrize("name", CONVERTERS)
def test_a_converted_form(workspace: Workspace, name: str, packing: str) -> None:
    settings = {**_ORDER, "seq_len": 256, "packing": packing}
    batches = map(CONVERTERS[name], make_numpy_loader(workspace.open("chat"), **settings))
    check_batches(f"{name}, {packing}", batches)


def test_padded_rows(workspace: Workspace) -> None:
    loader = make_numpy_loader(workspace.open("chat"), **_ORDER, packing="none")
    check_batches("padded", (to_padded(batch, multiple_of=16) for batch in loader))


@pytest.mark.parametrize("name", LOADERS)
def test_a_loader(workspace: Workspace, name: str) -> None:
    loader = make_numpy_loader(workspace.open("text-and-chat"), **{**_ORDER, **LOADERS[name]})
    check_batches(name, loader)


def test_micro_batches(workspace: Workspace) -> None:
    for form in ("rows", "varlen"):
        loader = make_numpy_loader(workspace.open("chat"), **_ORDER, form=form, micro_batch_size=2)
        micro_batches = (micro_batch for batch in loader for micro_batch in batch.split(2))
        check_batches(f"micro-batches, {form}", micro_batches)


def test_tensors_equal_arrays(workspace: Workspace) -> None:
    """Batches of torch and numpy have equal contents."""
    pytest.importorskip("torch")
    settings = {**_ORDER, "packing": "best_fit", "output": "torch"}
    digests = describe_batches(make_numpy_loader(workspace.open("jsonl-mapped"), **settings))
    if not EXPECTED.writes:
        expected = EXPECTED.read("jsonl-mapped best_fit rows, rank 0 of 1")
        assert digests["steps"] == expected["steps"]


def test_a_mixture(workspace: Workspace) -> None:
    for ranks, (rank, world_size) in _RANKS.items():
        mixture = make_mixture(workspace)
        loader = make_numpy_loader(mixture, **_ORDER, rank=rank, world_size=world_size)
        check_batches(f"mixture, {ranks}", loader, origin=loader.origin)


def test_an_edited_mixture(workspace: Workspace) -> None:
    loader = make_numpy_loader(make_mixture(workspace), **_ORDER)
    loader.edit(Edit(step=10, weights={"web": 1, "wide": 2}, skip=2, note="more of wide"))
    loader.edit(Edit(step=20, ban={"web": list(range(0, 100, 3))}))
    loader.edit(Edit(step=30, seq_len=300, global_batch_size=6))
    check_batches("edited mixture", loader)


def test_the_subset_for_validation(workspace: Workspace) -> None:
    loader = make_numpy_loader(workspace.open("chat", "val"), seq_len=512, global_batch_size=4, shuffle=False)
    check_batches("val subset", loader)


def test_an_older_generation(workspace: Workspace) -> None:
    """Every generation keeps its own batches."""
    prepare = "prepare --out grown --no-balance-subsets --workers 1 --json"
    workspace.run(f"{prepare} news/monday.jsonl --tokenizer bytes")
    workspace.run(f"{prepare} news/tuesday.jsonl --append")
    workspace.run("remove grown --source news/monday.jsonl --json")
    with workspace.enter():
        for generation in (1, 2, 3):
            store = batchloom.open_store("grown", generation=generation)
            check_batches(f"generation {generation}", make_numpy_loader(store, **_ORDER))


def test_synthetic_data_and_a_megatron_pair(workspace: Workspace) -> None:
    with workspace.enter():
        store = batchloom.open_store("distributed_dummy:documents=300,vocab=900,lengths=9-700")
        check_batches("synthetic", make_numpy_loader(store, **_ORDER, rank=1, world_size=2))
        store = batchloom.open_store("ids/pair")
        check_batches("Megatron pair", make_numpy_loader(store, **_ORDER))


STREAMS: dict[str, dict[str, Any]] = {
    "text": {"inputs": "records.jsonl", "mapping": {"text": "body"}},
    "text, wrapped": {"inputs": ["corpus", "packed"], "packing": "wrap", "pool_size": 32},
    "conversations": {"inputs": "tasks.jsonl", "template": "alpaca", "seed": 4},
    "unshuffled": {"inputs": ["corpus", "notes.csv"], "text_field": "note", "shuffle": False, "lanes": 2},
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream(workspace: Workspace, name: str) -> None:
    with workspace.enter():
        settings = {"tokenizer": "bytes", "lanes": 4, **STREAMS[name], **_ORDER}
        stream = batchloom.stream(settings.pop("inputs"), workers=0, **settings)
        for ranks, (rank, world_size) in _RANKS.items():
            loader = make_numpy_loader(stream, rank=rank, world_size=world_size)
            check_batches(f"stream of {name}, {ranks}", loader, origin=loader.origin)


def test_preferences(workspace: Workspace) -> None:
    """Preference pairs and labelled answers equal the pinned items."""
    pairs, labels = PreferencePairs(workspace.open("pairs")), LabelledAnswers(workspace.open("labels"))
    labels_of_pairs = LabelledAnswers(workspace.open("pairs", "val"))
    EXPECTED.check(
        "preferences",
        {
            "pairs": _describe_items(pairs),
            "pair ids": [int(number) for number in pairs.ids[:20]],
            "labels": _describe_items(labels),
            "labels of pairs": _describe_items(labels_of_pairs),
        },
    )


def _describe_items(items: Any) -> list[str]:
    from golden.expectations import digest_json

    return [digest_json(items[number]) for number in range(min(len(items), 20))]


def list_sections() -> list[str]:
    """Return the names of all sections."""
    forms = [
        f"{recipe} {packing} {form}, {ranks}"
        for recipe in ("jsonl-mapped", "chat")
        for packing in _PACKINGS
        for form in _FORMS
        for ranks in (_RANKS if recipe == "jsonl-mapped" else list(_RANKS)[:1])
    ]
    converted = [f"{name}, {packing}" for name in CONVERTERS for packing in ("best_fit", "none")]
    return [
        *forms,
        *converted,
        *LOADERS,
        *(f"micro-batches, {form}" for form in ("rows", "varlen")),
        *(f"mixture, {ranks}" for ranks in _RANKS),
        *(f"generation {number}" for number in (1, 2, 3)),
        *(f"stream of {name}, {ranks}" for name in STREAMS for ranks in _RANKS),
        *("padded", "edited mixture", "val subset", "synthetic", "Megatron pair", "preferences"),
    ]


def test_no_other_expectations(workspace: Workspace) -> None:
    EXPECTED.check_sections(list_sections())
