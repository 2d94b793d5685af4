"""Damaged numbers anywhere in a store: each use ends in one of our errors or goes through, never in anything else."""

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
ALONE = {"seq_len": 200, "global_batch_size": 2, "output": "numpy", "rank": 0, "world_size": 1}
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
SECONDS = 20


def text(folder):
    lines = [json.dumps({"text": f"Document {n} " + "word " * (n % 40)}) for n in range(90)]
    (folder / "in.jsonl").write_text("\n".join(lines) + "\n{bad\n")
    settings = {"tokenizer": "bytes", "max_bad": 5, "val_fraction": 0.1, "tokens_per_shard": 3000}
    batchloom.prepare(folder / "in.jsonl", out=folder / "s", workers=1, **settings)
    (folder / "more.jsonl").write_text("\n".join(lines).replace("Document", "Another"))
    settings = {"tokens_per_shard": 3000, "tokenizer": "bytes"}
    batchloom.prepare(folder / "more.jsonl", out=folder / "s", workers=1, append=True, **settings)
    (folder / "named").write_text("train:3\nmore.jsonl 4\n")
    remove_documents(folder / "s", documents_file=folder / "named")


def chat(folder):
    rows = [
        [
            {"role": "user", "content": f"Say {n}"},
            {"role": "assistant", "content": f"{n} " * (n % 9)},
        ]
        for n in range(1, 60)
    ]
    (folder / "in.jsonl").write_text("\n".join(json.dumps({"messages": row}) for row in rows))
    batchloom.prepare(folder / "in.jsonl", out=folder / "s", tokenizer="bytes", workers=1, val_fraction=0)


def pairs(folder):
    rows = [{"prompt": f"Say {n}", "chosen": f"{n}", "rejected": "no"} for n in range(40)]
    (folder / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    batchloom.prepare(folder / "in.jsonl", out=folder / "s", tokenizer="bytes", workers=1, val_fraction=0)


def images(folder):
    pytest.importorskip("transformers")
    from media.made import encoded, picture, talk
    from media.processors import MADE, save

    processor = str(save(MADE["qwen2_vl"](max_pixels=28 * 28 * 16), folder / "processor"))
    (folder / "in").mkdir()
    rows = []
    for number in range(9):
        picture_bytes = encoded(picture(140 + 10 * number, 180 - 5 * number, seed=number), "PNG")
        (folder / f"in/{number}.png").write_bytes(picture_bytes)
        messages = talk(f"<image>Who is {number}?", "A cat." * (1 + number))
        rows.append({"messages": messages, "images": [f"{number}.png"]})
    rows.append({"messages": talk("Who is nobody?", "Nobody is here.")})
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


MAKERS = {"text": text, "chat": chat, "pairs": pairs, "images": images}


SOME = [pytest.param(name, marks=SLOW if name == "images" else ()) for name in MAKERS]


@pytest.fixture(scope="module", params=SOME)
def sound(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    MAKERS[request.param](folder)
    return folder / "s"


def epoch(place, **options):
    loader = Loader(open_store(place, **options), **ALONE, prefetch=0)
    for _, batch in zip(range(60), loader, strict=False):
        assert batch["input_ids"].dtype == np.int64


def ask(place, **options):
    loader = Loader(open_store(place, **options), **ALONE, prefetch=0)
    for step in (0, max(0, loader.plan.steps - 1)):
        for one in explain(loader, step):
            for span in one.spans[:2]:
                if span.origin is not None:
                    assert span.origin.record >= 0
    source = loader.store.manifest.sources[0].name
    for words in (
        {"document": 1},
        {"document": len(loader.store) - 1},
        {"source": source, "record": 2},
    ):
        when(loader, **words)


USES = {
    "check": check,
    "inspect": inspect,
    "epoch": epoch,
    "first-read": lambda place: epoch(place, verify="first-read"),
    "older": lambda place: epoch(place, generation=1),
    "explain and when": ask,
    "export": lambda place: [export_store(place, to=to, out=f"{place}-{to}") for to in ("flat", "parquet")],
    "log": read_log,
    "documents": lambda place: list(iter_shard_documents(place)),
    "remove": lambda place: remove_documents(place, sources=["in.jsonl"], dry_run=True),
    "compact": lambda place: compact_store(shutil.copytree(place, f"{place}-compact")),
}


# A few in the fast tier.
PARTS = [range(8), *(pytest.param(range(n, n + 40), marks=SLOW) for n in range(8, 248, 40))]


@contextmanager
def time_limit(words):
    def stop(*_):
        raise AssertionError(f"{words} takes more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def use_all(folder, what, names=USES):
    """Use a damaged store in every way."""
    refused = 0
    for name in names:
        with time_limit(f"{name} of {what}"):
            try:
                USES[name](folder)
            except BatchloomError:
                refused += 1
            except Exception as error:
                raise AssertionError(f"{name} of {what}: {type(error).__name__}: {error}") from error
        for path in folder.parent.glob(f"{folder.name}-*"):
            shutil.rmtree(path)
    return refused


def places_in(value, place=()):
    """Every place in a JSON value but the top."""
    if place:
        yield place
    if isinstance(value, dict | list):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places_in(inner, (*place, name))


def change_json(data, chance):
    """Change one value, key or item; what was changed."""
    place = chance.choice(list(places_in(data)))
    inner = data
    for name in place[:-1]:
        inner = inner[name]
    how = chance.choice(["value"] * 6 + ["delete", "twice"])
    if how == "delete":
        del inner[place[-1]]
        return place, how
    if how == "twice" and isinstance(inner, list):
        inner.append(copy.deepcopy(inner[place[-1]]))
        return place, how
    inner[place[-1]] = chance.choice(VALUES)
    return place, inner[place[-1]]


def damage_json(path, chance, *, drop):
    data = json.loads(path.read_text())
    if drop:
        data.pop("checksum", None)
    changed = [change_json(data, chance) for _ in range(chance.choice((1, 1, 2)))]
    path.write_text(json.dumps(data))
    return changed


def damage_bytes(path, chance):
    """Overwrite an aligned number, cut, or lengthen a file."""
    data = bytearray(path.read_bytes())
    how = chance.choice(["number"] * 6 + ["cut", "longer", "bit"])
    if how == "cut":
        data = data[: chance.randrange(len(data) + 1)]
    elif how == "longer":
        data += bytes(chance.choice((1, 4, 8, 4096)))
    elif how == "bit" and data:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    else:
        width = chance.choice((1, 4, 8))
        at = chance.randrange(0, max(1, min(len(data), chance.choice((64, len(data) + 1)))), width)
        number = chance.choice(NUMBERS) % (1 << 8 * width)
        data[at : at + width] = number.to_bytes(width, "little")
    path.write_bytes(data)
    return how


def damaged(sound, tmp_path, number):
    folder = tmp_path / f"s{number}"
    shutil.copytree(sound, folder)
    return folder


@pytest.mark.parametrize("part", PARTS)
def test_numbers_of_a_manifest_without_checksum(sound, tmp_path, part):
    refused = 0
    for seed in part:
        chance, folder = random.Random(seed), damaged(sound, tmp_path, seed)
        names = [
            "dataset_metadata.json",
            *(f"generations/{p.name}" for p in folder.glob("generations/*")),
        ]
        name = chance.choice([names[0], *names])
        what = damage_json(folder / name, chance, drop=True)
        refused += use_all(folder, f"seed {seed}: {name} with {what}") > 0
        shutil.rmtree(folder)
    assert refused


@pytest.mark.parametrize("part", PARTS)
def test_numbers_of_other_files(sound, tmp_path, part):
    refused = 0
    for seed in part:
        chance, folder = random.Random(seed), damaged(sound, tmp_path, seed)
        files = [p for p in sorted(folder.rglob("*")) if p.is_file() and "dataset_met" not in p.name]
        by_kind = sorted({p.suffix for p in files})
        kind = chance.choice(by_kind)
        path = chance.choice([p for p in files if p.suffix == kind])
        if path.suffix == ".json" and chance.random() < 0.7:
            what = damage_json(path, chance, drop=False)
        else:
            what = damage_bytes(path, chance)
        refused += use_all(folder, f"seed {seed}: {path.relative_to(folder)} with {what}") > 0
        shutil.rmtree(folder)
    assert refused
