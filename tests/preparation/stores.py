"""Reading whole stores back, to compare them with what went in."""

import hashlib
import json
from pathlib import Path

from batchloom import Recipe, open_store
from batchloom.preparation import (
    ChatRecipe,
    ReadRecipe,
    RunSettings,
    parse_clean_steps,
    parse_dedup,
    run_recipe,
)
from batchloom.sources import ReadLimits
from batchloom.store import read_manifest

SMALL = ReadLimits(whole_text_bytes=2000, document_bytes=300, reach_bytes=500, chunk_bytes=128)

READING = ("text_field", "mapping", "split_on", "normalize", "clean")
CHAT = ("template", "train_on", "max_tokens", "overlong", "prove")


def recipe_of(**settings):
    """A recipe whose settings of reading are named as ``prepare`` names them."""
    reading = {name: settings.pop(name) for name in READING if name in settings}
    chat = {name: settings.pop(name) for name in CHAT if name in settings}
    settings.setdefault("chat", ChatRecipe(**chat))
    if "clean" in reading:
        reading["clean"] = parse_clean_steps(reading["clean"])
    if "dedup" in settings:
        settings["dedup"] = parse_dedup(settings["dedup"])
    return Recipe(reading=ReadRecipe(**reading), **settings)


def make(inputs, out, *, limits=None, unit_bytes=1 << 40, listener=None, **settings):
    """Prepare with the tokenizer ``bytes``, units of any size, and no listener."""
    settings.setdefault("tokenizer", "bytes")
    inputs = [inputs] if isinstance(inputs, (str, Path)) else inputs
    return run_recipe(
        recipe_of(inputs=tuple(map(str, inputs)), **settings),
        Path(out),
        listener or (lambda event: None),
        settings=RunSettings(limits=limits or ReadLimits(), unit_bytes=unit_bytes),
    )


def documents(out):
    """(source, line or record, text, subset) of every document of a store of bytes, in input order."""
    manifest = read_manifest(Path(out))
    order = [source.name for source in manifest.sources]
    found = []
    for split in manifest.subsets:
        store = open_store(out, split)
        for number in range(len(store)):
            ids = store[number].ids
            assert ids[-1] == store.end_id
            origin = store.provenance.of(number)
            text = bytes(ids[:-1].tolist()).decode()
            found.append((order.index(origin.source), origin.record, origin, text, split))
    found.sort(key=lambda row: row[:2])
    return [(origin, text, split) for _, _, origin, text, split in found]


def texts(out):
    """The text of every document of a store of bytes, in input order."""
    return [text for _, text, _ in documents(out)]


def tree(out):
    """Name and content hash of every file of a store but the report."""
    return {
        str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(Path(out).rglob("*"))
        if path.is_file() and path.stem.partition(".")[0] != "report"
    }


def jsonl(path, records):
    """Write records as JSON Lines."""
    Path(path).write_text("".join(json.dumps(record) + "\n" for record in records))
    return path
