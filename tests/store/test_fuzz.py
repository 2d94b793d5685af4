"""Damaged numbers in a store: each use succeeds or raises a BatchloomError."""

import copy
import json
import random
import shutil
import signal
from contextlib import contextmanager

import numpy as np
import pytest

import batchloom
from batchloom import BatchloomError, Loader, check, explain, inspect, open_store, when
from batchloom.store import (
    compact_store,
    export_store,
    iter_shard_documents,
    read_log,
    remove_documents,
)

SLOW = pytest.mark.slow
SINGLE_RANK = {"seq_len": 200, "global_batch_size": 2, "output": "numpy", "rank": 0, "world_size": 1}
NUMBERS = (-1, 0, 1, 7, 255, 2**31, 2**32 - 1, 2**40, 2**50, 2**53, 2**63 - 1, 2**63, 2**64 - 1)
VALUES = (
    *NUMBERS,
    2**64,
    2**80,
    -(2**63),
    -(2**70),
    0.5,
    1.0,
    1e308,
    None,
    True,
    "",
    "x",
    "0",
    [],
    {},
)
from store.manifest_edits import write_sealed

SECONDS = 120


def make_text_store(folder):
    lines = [json.dumps({"text": f"Document {n} " + "word " * (n % 40)}) for n in range(90)]
    (folder / "in.jsonl").write_text("\n".join(lines) + "\n{bad\n")
    settings = {"tokenizer": "bytes", "max_bad": 5, "val_fraction": 0.1, "tokens_per_shard": 3000}
    batchloom.prepare(folder / "in.jsonl", out=folder / "s", workers=1, **settings)
    (folder / "more.jsonl").write_text("\n".join(lines).replace("Document", "Another"))
    settings = {"tokens_per_shard": 3000, "tokenizer": "bytes"}
    batchloom.prepare(folder / "more.jsonl", out=folder / "s", workers=1, append=True, **settings)
    (folder / "named").write_text("train:3\nmore.jsonl 4\n")
    remove_documents(folder / "s", documents_file=folder / "named")


def make_chat_store(folder):
    rows = [
        [
            {"role": "user", "content": f"Say {n}"},
            {"role": "assistant", "content": f"{n} " * (n % 9)},
        ]
        for n in range(1, 60)
    ]
    (folder / "in.jsonl").write_text("\n".join(json.dumps({"messages": row}) for row in rows))
    batchloom.prepare(folder / "in.jsonl", out=folder / "s", tokenizer="bytes", workers=1, val_fraction=0)


def make_pair_store(folder):
    rows = [{"prompt": f"Say {n}", "chosen": f"{n}", "rejected": "no"} for n in range(40)]
    (folder / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    batchloom.prepare(folder / "in.jsonl", out=folder / "s", tokenizer="bytes", workers=1, val_fraction=0)


def make_image_store(folder):
    pytest.importorskip("transformers")
    from media.processors import PROCESSORS, save_processor
    from media.sample_media import encode_image, make_image, make_messages

    processor = str(save_processor(PROCESSORS["qwen2_vl"](max_pixels=28 * 28 * 16), folder / "processor"))
    (folder / "in").mkdir()
    rows = []
    for number in range(9):
        picture_bytes = encode_image(make_image(140 + 10 * number, 180 - 5 * number, seed=number), "PNG")
        (folder / f"in/{number}.png").write_bytes(picture_bytes)
        messages = make_messages(f"<image>Who is {number}?", "A cat." * (1 + number))
        rows.append({"messages": messages, "images": [f"{number}.png"]})
    rows.append({"messages": make_messages("Who is nobody?", "Nobody is here.")})
    (folder / "in/talks.json").write_text(json.dumps(rows))
    batchloom.prepare(
        folder / "in/talks.json",
        out=folder / "s",
        tokenizer=processor,
        media={"processor": processor, "keep": "embed"},
        val_fraction=0,
        workers=1,
        tokens_per_shard=400,
    )


MAKERS = {"text": make_text_store, "chat": make_chat_store, "pairs": make_pair_store, "images": make_image_store}


MAKER_NAMES = [pytest.param(name, marks=SLOW if name == "images" else ()) for name in MAKERS]


@pytest.fixture(scope="module", params=MAKER_NAMES)
def sound_store(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    MAKERS[request.param](folder)
    return folder / "s"


def read_epoch(folder, **options):
    loader = Loader(open_store(folder, **options), **SINGLE_RANK, prefetch=0)
    for _, batch in zip(range(60), loader, strict=False):
        assert batch["input_ids"].dtype == np.int64


def query_plan(folder, **options):
    loader = Loader(open_store(folder, **options), **SINGLE_RANK, prefetch=0)
    for step in (0, max(0, loader.plan.steps - 1)):
        for row in explain(loader, step):
            for span in row.spans[:2]:
                if span.origin is not None:
                    assert span.origin.record >= 0
    source = loader.store.manifest.sources[0].name
    for target in (
        {"document": 1},
        {"document": len(loader.store) - 1},
        {"source": source, "record": 2},
    ):
        when(loader, **target)


USES = {
    "check": check,
    "inspect": inspect,
    "epoch": read_epoch,
    "first-read": lambda folder: read_epoch(folder, verify="first-read"),
    "older": lambda folder: read_epoch(folder, generation=1),
    "explain and when": query_plan,
    "export": lambda folder: [export_store(folder, to=to, out=f"{folder}-{to}") for to in ("flat", "parquet")],
    "log": read_log,
    "documents": lambda folder: list(iter_shard_documents(folder)),
    "remove": lambda folder: remove_documents(folder, sources=["in.jsonl"], dry_run=True),
    "compact": lambda folder: compact_store(shutil.copytree(folder, f"{folder}-compact")),
}


# The fast tier runs a few seeds.
SEED_RANGES = [range(3), *(pytest.param(range(n, n + 40), marks=SLOW) for n in range(3, 243, 40))]


@contextmanager
def time_limit(task):
    def stop(*_):
        raise AssertionError(f"{task} takes more than {SECONDS} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def use_all(folder, damage, names=USES):
    """Use a damaged store in every way."""
    refused = 0
    for name in names:
        with time_limit(f"{name} of {damage}"):
            try:
                USES[name](folder)
            except BatchloomError:
                refused += 1
            except Exception as error:
                raise AssertionError(f"{name} of {damage}: {type(error).__name__}: {error}") from error
        for path in folder.parent.glob(f"{folder.name}-*"):
            shutil.rmtree(path)
    return refused


def iter_paths(value, path=()):
    """Iterate over the paths of all nested values of a JSON value."""
    if path:
        yield path
    if isinstance(value, dict | list):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from iter_paths(inner, (*path, name))


def change_json(data, rng):
    """Change one value, key or item; return its path and the change."""
    path = rng.choice(list(iter_paths(data)))
    container = data
    for name in path[:-1]:
        container = container[name]
    action = rng.choice(["value"] * 6 + ["delete", "twice"])
    if action == "delete":
        del container[path[-1]]
        return path, action
    if action == "twice" and isinstance(container, list):
        container.append(copy.deepcopy(container[path[-1]]))
        return path, action
    container[path[-1]] = rng.choice(VALUES)
    return path, container[path[-1]]


def damage_json(path, rng, *, is_sealed):
    data = json.loads(path.read_text())
    changes = [change_json(data, rng) for _ in range(rng.choice((1, 1, 2)))]
    if is_sealed:
        write_sealed(path, data)
    else:
        path.write_text(json.dumps(data))
    return changes


def damage_bytes(path, rng):
    """Overwrite an aligned number, cut, or lengthen a file."""
    data = bytearray(path.read_bytes())
    action = rng.choice(["number"] * 6 + ["cut", "longer", "bit"])
    if action == "cut":
        data = data[: rng.randrange(len(data) + 1)]
    elif action == "longer":
        data += bytes(rng.choice((1, 4, 8, 4096)))
    elif action == "bit" and data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    else:
        width = rng.choice((1, 4, 8))
        at = rng.randrange(0, max(1, min(len(data), rng.choice((64, len(data) + 1)))), width)
        number = rng.choice(NUMBERS) % (1 << 8 * width)
        data[at : at + width] = number.to_bytes(width, "little")
    path.write_bytes(data)
    return action


def copy_store(sound_store, tmp_path, number):
    folder = tmp_path / f"s{number}"
    shutil.copytree(sound_store, folder)
    return folder


@pytest.mark.parametrize("seeds", SEED_RANGES)
def test_numbers_of_a_sealed_manifest(sound_store, tmp_path, seeds):
    refused = 0
    for seed in seeds:
        rng, folder = random.Random(seed), copy_store(sound_store, tmp_path, seed)
        names = [
            "dataset_metadata.json",
            *(f"generations/{p.name}" for p in folder.glob("generations/*")),
        ]
        name = rng.choice([names[0], *names])
        damage = damage_json(folder / name, rng, is_sealed=True)
        refused += use_all(folder, f"seed {seed}: {name} with {damage}") > 0
        shutil.rmtree(folder)
    assert refused


@pytest.mark.parametrize("seeds", SEED_RANGES)
def test_numbers_of_other_files(sound_store, tmp_path, seeds):
    refused = 0
    for seed in seeds:
        rng, folder = random.Random(seed), copy_store(sound_store, tmp_path, seed)
        files = [p for p in sorted(folder.rglob("*")) if p.is_file() and "dataset_met" not in p.name]
        by_kind = sorted({p.suffix for p in files})
        kind = rng.choice(by_kind)
        path = rng.choice([p for p in files if p.suffix == kind])
        if path.suffix == ".json" and rng.random() < 0.7:
            damage = damage_json(path, rng, is_sealed=False)
        else:
            damage = damage_bytes(path, rng)
        refused += use_all(folder, f"seed {seed}: {path.relative_to(folder)} with {damage}") > 0
        shutil.rmtree(folder)
    assert refused
