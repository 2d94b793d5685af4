"""Bytes of stores of every recipe, and of changed, imported and exported stores."""

from pathlib import Path
from typing import Any

import pytest

from golden.conftest import Workspace
from golden.expectations import Expectations, digest, digest_json
from golden.recipes import RECIPES
from golden.store_digests import describe_store

EXPECTED = Expectations("stores")


@pytest.mark.parametrize("name", RECIPES)
def test_the_store_of_a_recipe(workspace: Workspace, name: str) -> None:
    EXPECTED.check(name, describe_store(workspace.root / workspace.prepare(name)))


def test_a_store_prepared_again_from_its_recipe(workspace: Workspace) -> None:
    """The recipe in the manifest of a store builds the same store."""
    for name in ("jsonl-mapped", "chat-last-turn", "near-by-similarity", "every-setting"):
        first = describe_store(workspace.root / workspace.prepare(name))
        workspace.run(f"prepare --recipe stores/{name} --out again/{name} --workers 1 --json")
        second = describe_store(workspace.root / "again" / name)
        differing = [key for key in first if first[key] != second.get(key)]
        assert (name, differing) == (name, [])


def test_balanced_subsets(workspace: Workspace) -> None:
    """Pin stores in which balancing moves documents between subsets."""
    for name, words in BALANCED.items():
        workspace.run(f"prepare {words} --tokenizer bytes --out balanced/{name} --workers 1 --json")
        EXPECTED.check(name, describe_store(workspace.root / "balanced" / name))


BALANCED = {
    "balanced-texts": "corpus",
    "balanced-conversations": "talks.jsonl --val-fraction 0.1 --test-fraction 0.1",
    "balanced-pairs": "pairs.jsonl --val-fraction 0.1",
}


def test_generations(workspace: Workspace) -> None:
    """Pin each generation of a store that is appended to, removed from and compacted."""
    store = "changed/store"
    prepare = f"prepare --out {store} --no-balance-subsets --workers 1 --json"
    workspace.run(f"{prepare} news/monday.jsonl --tokenizer bytes --dedup near --val-fraction 0.1")
    workspace.run(f"{prepare} news --append")
    EXPECTED.check("appended", describe_store(workspace.root / store))
    (workspace.root / "taken_down").write_text("train:3\nnews/tuesday.jsonl 30\n", "utf-8")
    workspace.run(f"remove {store} --documents-file taken_down --json")
    EXPECTED.check("removed", describe_store(workspace.root / store))
    workspace.run(f"compact {store} --json")
    EXPECTED.check("compacted", describe_store(workspace.root / store))


IMPORTS = {
    "imported-pair": "ids/pair --tokenizer bytes",
    "imported-flat": "ids/flat.bin --dtype uint16 --eod 256 --vocab-size 300",
    "imported-copy": ("ids/pair --tokenizer bytes --copy --val-fraction 0.2 --tokens-per-shard 700"),
    "imported-array": "ids/table.npy --vocab-size 257 --copy",
    "imported-pieces": "ids/flat.bin --dtype uint16 --document-tokens 50 --vocab-size 257",
}


@pytest.mark.parametrize("name", IMPORTS)
def test_an_imported_store(workspace: Workspace, name: str) -> None:
    workspace.run(f"import {IMPORTS[name]} --out imported/{name} --json")
    EXPECTED.check(name, describe_store(workspace.root / "imported" / name))


EXPORTS = {
    "exported-megatron": "shards --to megatron",
    "exported-merged": "chat --to megatron --merge whole",
    "exported-flat": "chat --to flat --split val",
    "exported-parquet": "chat --to parquet",
    "exported-hf": "labels --to hf",
}


@pytest.mark.parametrize("name", EXPORTS)
def test_an_export(workspace: Workspace, name: str) -> None:
    source, options = EXPORTS[name].split(" ", 1)
    store = workspace.prepare(source)
    workspace.run(f"export {store} {options} --out exported/{name} --json")
    folder = workspace.root / "exported" / name
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            files[path.relative_to(folder).as_posix()] = _describe_file(path)
    EXPECTED.check(name, files)


def _describe_file(path: Path) -> Any:
    """Return the digest of a file, or of each column of a table."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    # Writers of tables record their version in the files.
    if path.suffix == ".parquet":
        table = pq.read_table(path)
    elif path.suffix == ".arrow":
        table = pa.ipc.open_stream(path.read_bytes()).read_all()
    else:
        return digest(path.read_bytes())
    return {
        f"{name} {table.schema.field(name).type}": digest_json(table[name].to_pylist()) for name in table.column_names
    }


def test_a_stream_keeps_its_store(workspace: Workspace) -> None:
    """A stream with ``keep`` writes the store of ``prepare --dedup none``."""
    import batchloom

    workspace.run(
        "prepare records.jsonl --map text=body --tokenizer bytes --val-fraction 0 --no-dedup "
        "--out kept/expected --workers 1 --json"
    )
    with workspace.enter():
        stream = batchloom.stream(
            "records.jsonl",
            tokenizer="bytes",
            mapping={"text": "body"},
            val_fraction=0,
            keep="kept/stream",
            workers=0,
            seq_len=256,
            global_batch_size=4,
            steps=12,
            lanes=2,
        )
        for _ in batchloom.Loader(stream, output="numpy", rank=0, world_size=1):
            pass
        stream.finish(workers=1)
    digests = describe_store(workspace.root / "kept/stream")
    assert digests == describe_store(workspace.root / "kept/expected")
    EXPECTED.check("kept-by-a-stream", digests)


def test_no_other_expectations(workspace: Workspace) -> None:
    changed = ("appended", "removed", "compacted", "kept-by-a-stream")
    EXPECTED.check_sections([*RECIPES, *BALANCED, *IMPORTS, *EXPORTS, *changed])
