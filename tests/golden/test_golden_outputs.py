"""JSON of commands, quarantine files and reports; sentences are pinned separately."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import batchloom
from golden.conftest import Workspace
from golden.expectations import Expectations
from golden.json_normalization import iter_sentences, normalize
from golden.recipes import RECIPES

EXPECTED = Expectations("outputs")
SENTENCES = Expectations("sentences")
_SIZES = "--seq-len 512 --global-batch-size 4"
_MIXTURE = "--mixture stores/jsonl-mapped=0.7,stores/text=0.3,stores/shards"
_WORLD = "--world-size 2"

# Read-only commands: their words without --json, and their exit code if it is not 0.
COMMANDS: dict[str, str | tuple[str, int]] = {
    "check: store": "check stores/chat",
    "check: pairs": "check stores/pairs",
    "check: Megatron pair": "check ids/pair --vocab-size 257",
    "check: ids beyond the vocabulary": ("check ids/pair --vocab-size 200", 1),
    "check: raw file": ("check notes.csv --text-field note", 1),
    "check: raw file without a schema": ("check records.jsonl", 1),
    "check: synthetic": "check dummy:documents=50",
    "check: damaged": ("check damaged", 1),
    "check: absent": ("check nowhere", 1),
    "datasets": "datasets",
    "doctor: text": "doctor records.jsonl --map text=body --tokenizer bytes --global-batch-size 4",
    "doctor: folder": "doctor corpus packed --tokenizer bytes --preview 1 --seq-len 512",
    "doctor: conversations": (
        "doctor talks.jsonl tasks.jsonl --tokenizer tokenizer.json --template chatml --preview 1 "
        "--max-tokens 300 --overlong truncate-turns"
    ),
    "doctor: pairs": ("doctor pairs.jsonl --tokenizer bytes --preview 1 --max-bad 0", 1),
    "doctor: store and prefix": "doctor stores/chat ids/pair --preview 0 --full",
    "doctor: absent": ("doctor nowhere", 1),
    "explain: store": f"explain stores/chat {_SIZES} --step 1 --row 2 --text 30",
    "explain: one row of a rank": f"explain stores/text {_SIZES} --step 2 --rank 1 {_WORLD} --row 1",
    "explain: mixture": f"explain {_MIXTURE} {_SIZES} --steps 20 --step 3 --row 0",
    "explain: checkpoint": f"explain {_MIXTURE} --checkpoint state.json --step 12 --row 1 --text 0",
    "inspect: store": "inspect stores/jsonl-mapped --seq-len 512",
    "inspect: val subset": "inspect stores/chat --split val --seq-len 256 --first 1",
    "inspect: pairs": "inspect stores/pairs --seq-len 128 --first 1",
    "inspect: Megatron pair": "inspect ids/pair --seq-len 64",
    "inspect: synthetic": "inspect dummy:documents=200,vocab=300,lengths=5-90 --seq-len 64",
    "log": "log stores/chat",
    "plan: store": f"plan stores/chat {_SIZES} --epochs 2 --tokens-per-second 1e5 {_WORLD}",
    "plan: grouped": (f"plan stores/jsonl-mapped {_SIZES} --packing none --group-by-length 5 --overlong drop"),
    "plan: mixture": f"plan {_MIXTURE} {_SIZES} --steps 60",
    "plan: checkpoint": f"plan {_MIXTURE} --checkpoint state.json --steps 50",
    "plan: journal": "plan --journal state.json",
    "plan: assumed": (
        "plan --assume 'web=10B tokens/8M documents' --steps 2000 --seq-len 4096 --global-batch-size 512"
    ),
    "when: document": f"when stores/jsonl-mapped {_SIZES} --document 3 --epochs 2",
    "when: record": f"when stores/chat {_SIZES} --source talks.jsonl --record 12 {_WORLD}",
    "when: left out": f"when stores/jsonl-mapped {_SIZES} --overlong drop --document 8",
    "when: mixture": f"when {_MIXTURE} {_SIZES} --source text --document 5 --steps 40",
    "when: checkpoint": (f"when {_MIXTURE} --checkpoint state.json --source jsonl-mapped --document 2 --steps 50"),
}
QUARANTINES = ("jsonl-mapped", "csv", "chat", "pairs")
REPORTS = ("cleaned", "near")
PREPARED = ("jsonl-mapped", "chat", "pairs", "shards", "cleaned-by-quality")


@pytest.fixture(scope="module")
def stores(workspace: Workspace) -> Workspace:
    """Return the workspace with the stores and the state that commands name."""
    for name in ("chat", "pairs", "jsonl-mapped", "text", "shards"):
        workspace.prepare(name)
    loader = batchloom.Loader(
        _make_mixture_of_commands(workspace),
        seq_len=512,
        global_batch_size=4,
        steps=50,
        rank=0,
        world_size=1,
        output="numpy",
        prefetch=0,
    )
    loader.edit(batchloom.Edit(step=10, ban={"jsonl-mapped": [2]}, note="taken down"))
    loader.edit(batchloom.Edit(step=15, weights={"text": 1, "shards": 2}))
    state = loader.state_at(20)
    (workspace.root / "state.json").write_text(json.dumps(state), "utf-8")
    damaged = workspace.root / "damaged"
    shutil.copytree(workspace.root / "stores/text", damaged)
    tokens = damaged / "train/shard_00000.bin"
    data = bytearray(tokens.read_bytes())
    data[100] ^= 1
    tokens.write_bytes(data)
    return workspace


def _make_mixture_of_commands(workspace: Workspace) -> batchloom.Mixture:
    names = ("jsonl-mapped", "text", "shards")
    stores = {name: workspace.open(name) for name in names}
    return batchloom.Mixture({"jsonl-mapped": 0.7, "text": 0.3}, stores=stores)


def print_json(workspace: Workspace, command: str | tuple[str, int]) -> Any:
    """Return the JSON that a command prints with --json."""
    words, code = command if isinstance(command, tuple) else (command, 0)
    return json.loads(workspace.run(f"{words} --json", code).out)


def check_json(workspace: Workspace, section: str, value: Any) -> None:
    """Compare a JSON value, then the sentences in it, with their expectations.

    A failure of the second comparison means that only sentences differ.
    """
    root = str(workspace.root)
    EXPECTED.check(section, normalize(value, root))
    SENTENCES.check(section, dict(iter_sentences(value, root)))


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command(stores: Workspace, name: str) -> None:
    check_json(stores, name, print_json(stores, COMMANDS[name]))


@pytest.mark.parametrize("name", PREPARED)
def test_prepare(workspace: Workspace, name: str) -> None:
    check_json(workspace, f"prepare: {name}", json.loads(workspace.prepare_output(name)))


def test_prepare_after_a_dry_run_and_again(workspace: Workspace) -> None:
    words = f"prepare {RECIPES['text'].words} --no-balance-subsets --out parts --workers 1"
    check_json(workspace, "prepare: dry run", print_json(workspace, f"{words} --dry-run"))
    check_json(workspace, "prepare: behind a dry run", print_json(workspace, words))
    check_json(workspace, "prepare: finished already", print_json(workspace, words))


def test_generations(workspace: Workspace) -> None:
    """Run the commands that change a store, one after the other."""
    for name, words in _iter_changes():
        check_json(workspace, name, print_json(workspace, words))


def _iter_changes() -> Iterator[tuple[str, str]]:
    store, prepare = "outputs/store", "prepare --out outputs/store --no-balance-subsets --workers 1"
    yield "generations: prepare", f"{prepare} news/monday.jsonl --tokenizer bytes"
    yield "generations: append", f"{prepare} news --append"
    yield "generations: nothing to append", f"{prepare} news --append"
    remove = f"remove {store} --source news/tuesday.jsonl"
    yield "generations: remove, dry run", f"{remove} --dry-run"
    yield "generations: remove", remove
    yield "generations: check", f"check {store}"
    yield "generations: inspect", f"inspect {store} --seq-len 256 --first 1"
    yield "generations: log", f"log {store}"
    yield "generations: compact", f"compact {store}"
    yield "generations: nothing to compact", f"compact {store}"
    yield "generations: log of one", f"log {store}"


CONVERSIONS = {
    "import": "import ids/pair --tokenizer bytes --out outputs/imported",
    "export: merged": "export stores/chat --to megatron --merge whole --out outputs/merged",
    "export: flat": "export stores/text --to flat --out outputs/flat",
    "convert: jsonl": "convert notes.csv --out outputs/notes.jsonl --max-bad 3",
    "convert: columns": ("convert tables/rows.parquet --out outputs/rows.jsonl --columns score,text --force"),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_conversion(stores: Workspace, name: str) -> None:
    (stores.root / "outputs").mkdir(exist_ok=True)
    check_json(stores, name, print_json(stores, CONVERSIONS[name]))


def test_converted_rows(workspace: Workspace) -> None:
    words = "convert records.jsonl talks.jsonl --out - --max-bad 10 --columns id,body"
    output = workspace.run(words)
    lines = output.out.splitlines()
    EXPECTED.check("convert: rows", [len(lines), *lines[:5]])


def test_finished_runs(workspace: Workspace) -> None:
    """Compare the loss curves of two runs."""
    pytest.importorskip("torch")
    pytest.importorskip("matplotlib")
    words = "compare --runs losses/first.jsonl losses/second.jsonl --tolerance 1e-9 --out compared"
    check_json(workspace, "compare: runs", print_json(workspace, (words, 1)))


@pytest.mark.parametrize("name", QUARANTINES)
def test_a_quarantine_file(workspace: Workspace, name: str) -> None:
    file = workspace.root / workspace.prepare(name) / "quarantine.jsonl"
    records = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    check_json(workspace, f"quarantine: {name}", records)


@pytest.mark.parametrize("name", REPORTS)
def test_a_report(workspace: Workspace, name: str) -> None:
    file = workspace.root / workspace.prepare(name) / "report.json"
    check_json(workspace, f"report: {name}", json.loads(Path(file).read_text("utf-8")))


def test_no_other_expectations(workspace: Workspace) -> None:
    names = [
        *COMMANDS,
        *(f"prepare: {name}" for name in PREPARED),
        *("prepare: dry run", "prepare: behind a dry run", "prepare: finished already"),
        *(name for name, _ in _iter_changes()),
        *CONVERSIONS,
        *("convert: rows", "compare: runs"),
        *(f"quarantine: {name}" for name in QUARANTINES),
        *(f"report: {name}" for name in REPORTS),
    ]
    EXPECTED.check_sections(names)
    SENTENCES.check_sections([name for name in names if name != "convert: rows"])
