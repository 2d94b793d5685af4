"""Preparing stores, and reading them back to compare them with their inputs."""

import hashlib
import json
from dataclasses import fields
from pathlib import Path

from batchloom import Recipe, open_store
from batchloom.preparation import (
    ChatRecipe,
    ExecutionSettings,
    ReadRecipe,
    RunSettings,
    parse_clean_steps,
    parse_dedup,
    run_recipe,
)
from batchloom.sources import ReadLimits
from batchloom.store import read_manifest

INLINE = ExecutionSettings(workers=1)
SMALL_LIMITS = ReadLimits(whole_text_bytes=2000, document_bytes=300, reach_bytes=500, chunk_bytes=128)

READ_SETTINGS = [field.name for field in fields(ReadRecipe)]
CHAT_SETTINGS = ("template", "train_on", "max_tokens", "overlong", "prove")


def make_recipe(**settings):
    """Make a recipe from settings named as ``prepare`` names them."""
    read_settings = {name: settings.pop(name) for name in READ_SETTINGS if name in settings}
    chat_settings = {name: settings.pop(name) for name in CHAT_SETTINGS if name in settings}
    settings.setdefault("chat", ChatRecipe(**chat_settings))
    if "clean" in read_settings:
        read_settings["clean"] = parse_clean_steps(read_settings["clean"])
    if "dedup" in settings:
        settings["dedup"] = parse_dedup(settings["dedup"])
    return Recipe(reading=ReadRecipe(**read_settings), **settings)


def prepare_store(inputs, out, *, limits=None, unit_bytes=1 << 40, listener=None, **settings):
    """Prepare with the tokenizer ``bytes``, units of any size, and no listener."""
    settings.setdefault("tokenizer", "bytes")
    inputs = [inputs] if isinstance(inputs, (str, Path)) else inputs
    return run_recipe(
        make_recipe(inputs=tuple(map(str, inputs)), **settings),
        Path(out),
        listener or (lambda event: None),
        settings=RunSettings(limits=limits or ReadLimits(), unit_bytes=unit_bytes, execution=INLINE),
    )


def read_documents(out):
    """Return (provenance, text, subset) of all documents of bytes, in input order."""
    manifest = read_manifest(Path(out))
    source_names = [source.name for source in manifest.sources]
    rows = []
    for split in manifest.subsets:
        store = open_store(out, split)
        for number in range(len(store)):
            ids = store[number].ids
            assert ids[-1] == store.end_id
            origin = store.provenance.of(number)
            text = bytes(ids[:-1].tolist()).decode()
            rows.append((source_names.index(origin.source), origin.record, origin, text, split))
    rows.sort(key=lambda row: row[:2])
    return [(origin, text, split) for _, _, origin, text, split in rows]


def read_texts(out):
    """Return the text of every document of a store of bytes, in input order."""
    return [text for _, text, _ in read_documents(out)]


def hash_store_files(out):
    """Return the name and content hash of every file of a store but the reports with times."""
    return {
        str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(Path(out).rglob("*"))
        if path.is_file() and (path.name.partition(".")[0] != "report" or path.suffix == ".duplicates")
    }


def write_jsonl(path, records):
    """Write records as JSON Lines."""
    Path(path).write_text("".join(json.dumps(record) + "\n" for record in records))
    return path
