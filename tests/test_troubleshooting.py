"""Check that the code reports every message of docs/how-to/check/troubleshooting.md."""

import builtins
import json
import re
from pathlib import Path

import numpy as np
import pytest

import batchloom
from batchloom.chat import choose_template
from batchloom.compat import GPTDataLoader, PretrainingDataset, SFTDataset, load_jsonl_file
from batchloom.plan import Mesh
from batchloom.preparation.units.units import CrashState, update_after_crash
from batchloom.store import WORK_NAME, compact_store
from batchloom.testing import append_documents, write_store
from batchloom.tokens import resolve_tokenizer
from batchloom.train import RunFolder
from chat.conftest import make_metaspace_tokenizer
from preparation.stores import write_jsonl
from processes import run_python
from sources.hub_server import serve_hub

PAGE = Path(__file__).parents[1] / "docs/how-to/check/troubleshooting.md"
ROW = re.compile(r"^\| `(.+?)` \((\w[\w.]*|a warning|in quarantine)\) \|", re.M)


def prepare(inputs, **settings):
    settings = {"out": "made", "tokenizer": "bytes", **settings}
    return batchloom.prepare(inputs, **settings)


def write_broken_lines(bad_count, good_count=0):
    Path("in.jsonl").write_text('{"text": "a"}\n' * good_count + "{broken\n" * bad_count)
    return "in.jsonl"


def open_edited_manifest():
    path = write_store("s", [[1]]).path / "dataset_metadata.json"
    path.write_text(path.read_text().replace('"end_id": 256', '"end_id": 255'))
    batchloom.open_store("s")


def load_utf16_file():
    Path("in.jsonl").write_text('{"text": "a"}\n', "utf-16")
    load_jsonl_file("in.jsonl")


def prepare_without_tool_calls():
    call = {"function": {"name": "f", "arguments": {}}}
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "tool_calls": [call]},
    ]
    write_jsonl(Path("in.jsonl"), [{"messages": turns}])
    Path("t.jinja").write_text("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}")
    prepare("in.jsonl", template="t.jinja", max_bad=0)


def spell_control_token():
    turns = [{"role": "user", "content": "<|im_end|>"}, {"role": "assistant", "content": "a"}]
    write_jsonl(Path("in.jsonl"), [{"messages": turns}])
    SFTDataset("in.jsonl", make_metaspace_tokenizer(Path("m")), formatter="chatml")


def open_unfinished_store():
    (Path("store") / WORK_NAME).mkdir(parents=True)
    batchloom.open_store("store")


def prepare_other_job_again():
    Path("a.txt").write_text("words")
    prepare("a.txt")
    prepare("a.txt", normalize=False)


def change_unfinished_job():
    Path("a.txt").write_text("words")
    prepare("a.txt", dry_run=True)
    prepare("a.txt", normalize=False)


def exclude_deadly_record():
    """Return the quarantine reason of a record on which workers died."""
    state, record = CrashState(), (0, 5)
    for _ in range(3):
        state = update_after_crash(state, [(record, record)], "was killed by signal 9 (out of memory?)")
    ((_, reason),) = state.excluded
    return reason


def load_narrow_ids():
    np.arange(9, dtype=np.uint16).tofile("shard_00000.bin")
    GPTDataLoader({"block_size": 2, "batch_size": 1}, "bytes", ".")


def make_small_loader(**settings):
    sizes = {"seq_len": 8, "global_batch_size": 10, "labels": "shifted", "rank": 0}
    return batchloom.Loader(write_store("s", [[1, 2, 3]] * 9), **{**sizes, **settings})


def load_state_of_another_plan():
    store = write_store("s", [[1, 2, 3]] * 9)
    loaders = [batchloom.Loader(store, seq_len=n, global_batch_size=1) for n in (4, 5)]
    loaders[0].load_state_dict(loaders[1].state_dict())


def load_state_of_another_generation():
    loader = batchloom.Loader(write_store("s", [[1, 2, 3]] * 9), seq_len=4, global_batch_size=1)
    append_documents("s", [[4, 5]])
    newer = batchloom.Loader(batchloom.open_store("s"), seq_len=4, global_batch_size=1)
    newer.load_state_dict(loader.state_dict())


def open_compacted_generation():
    write_store("s", [[1, 2, 3]] * 9)
    append_documents("s", [[4, 5]])
    compact_store("s")
    batchloom.open_store("s", generation=1)


def lock_run_twice():
    with RunFolder(Path("run")).lock(), RunFolder(Path("run")).lock():
        pass


def drop_overlong_document():
    store = write_store("s", [[1, 2, 3], [1] * 9])
    next(iter(batchloom.Loader(store, seq_len=4, global_batch_size=1, overlong="drop", prefetch=0)))


def read_foreign_ids():
    write_store("s", [[1, 300]], tokenizer="gpt2")
    PretrainingDataset("s", "bytes", 4)[0]


CASES = {
    "JSONL file not found: ...": lambda: prepare("no.jsonl"),
    "There is no file or folder ...": lambda: prepare("nowhere"),
    "... is empty: it has 0 bytes": lambda: (Path("a.txt").touch(), prepare("a.txt")),
    "Invalid JSON on line 5 in ...": lambda: load_jsonl_file(write_broken_lines(1, 4)),
    "JSON file must contain a list of objects": lambda: (
        Path("a.json").write_text('{"a": 1} {"a": 2}'), prepare("a.json")),
    "... bad records in the first ..., more than --max-bad 0.1% allows": lambda: prepare(
        write_broken_lines(50, 50)),
    "no schema fits": lambda: (
        write_jsonl(Path("in.jsonl"), [{"colour": 1, "size": 2}] * 5), prepare("in.jsonl")),
    "this is UTF-16, not UTF-8": load_utf16_file,
    "No documents were made from ... records": lambda: (
        write_jsonl(Path("in.jsonl"), [{"text": " "}] * 5), prepare("in.jsonl")),
    "there is no tokenizer '...'": lambda: resolve_tokenizer("gtp2"),
    "template chatml writes ..., which tokenizer '...' does not have as control tokens": (
        lambda: choose_template("chatml", {}, {}, "bytes")),
    "template ... leaves out tool calls of turn ...": prepare_without_tool_calls,
    "it spells a control token that cannot be distinguished from the template's own": spell_control_token,
    "No training shards found in ...": lambda: (
        Path("d").mkdir(), GPTDataLoader({"block_size": 2, "batch_size": 1}, "bytes", "d")),
    "There is no store at ...": lambda: (
        Path("notes.txt").write_text("text"), batchloom.open_store("notes.txt")),
    "is an unfinished store; give its prepare command again to continue": open_unfinished_store,
    "dataset_metadata.json was changed or damaged: its checksum is ..., and its content has ...": (
        open_edited_manifest),
    "holds unfinished work of another job": change_unfinished_job,
    "the worker that processed it ... times; give workers more memory": exclude_deadly_record,
    "holds a finished store of another job": prepare_other_job_again,
    "not a multiple of the 4 of uint32": load_narrow_ids,
    "holds token id ...; the tokenizer has ids 0 to ...": read_foreign_ids,
    "has no documents in subset 'val'": lambda: batchloom.open_store(
        write_store("s", [[1]]).path, "val"),
    "was compacted away when generation ... was made": open_compacted_generation,
    "The state was made on generation ... is open": load_state_of_another_generation,
    "cannot be divided evenly among ... ranks": lambda: make_small_loader(world_size=4),
    "rows of a step ... cannot be cut into micro-batches of ...": lambda: make_small_loader(
        world_size=2, micro_batch_size=3),
    "processes cannot form a mesh": lambda: make_small_loader(world_size=3, mesh=Mesh(tensor=2)),
    "labels: the model shifts 'aligned' labels": lambda: make_small_loader(
        world_size=2, mesh=Mesh(context=2), labels="aligned"),
    "each document into ... in the varlen form, but align is ...": lambda: make_small_loader(
        world_size=2, mesh=Mesh(context=2), form="varlen"),
    "The state belongs to another plan": load_state_of_another_plan,
    "is in use by process ... write over each other's checkpoints": lock_run_twice,
    "leaves ... of ... documents": drop_overlong_document,
    "No sequence can be made of ... documents": lambda: next(iter(batchloom.Loader(
        write_store("s", [[1] * 9]), seq_len=4, global_batch_size=1, overlong="drop"))),
}  # fmt: skip
HUB_CASES = {
    "Failed to download dataset": ("org/any", {"HF_HUB_OFFLINE": "1"}),
    "Dataset '...' not found": ("org/none", {}),
    "asks for permission: accept its terms": ("org/gated", {}),
    "has no split '...'": ("org/plain/val", {}),
}
# Package that is not installed, and code that needs it.
MISSING_CASES = {
    "pip install datasets transformers": ("huggingface_hub", "list_sources(['org/other'])"),
    "output='torch' needs torch, which is not installed": (
        "torch", "batchloom.Loader(write_store('s', [[1]]), seq_len=4, global_batch_size=1)"),
}  # fmt: skip
CATCHING_CODE = """
import json, sys
import batchloom
from batchloom.sources.listing import list_sources
from batchloom.testing import write_store
for code in sys.argv[1:]:
    try:
        exec(code)
    except batchloom.BatchloomError as error:
        print(json.dumps([[base.__name__ for base in type(error).__mro__], str(error)]))
"""


def read_documented_kinds():
    return {sentence.replace("\\|", "|"): kind for sentence, kind in ROW.findall(PAGE.read_text())}


def make_pattern(sentence):
    return ".*".join(map(re.escape, sentence.split("...")))


def test_every_sentence_has_its_case():
    assert set(read_documented_kinds()) == {*CASES, *HUB_CASES, *MISSING_CASES}


@pytest.mark.parametrize("sentence", CASES)
def test_the_code_reports_the_sentence(sentence, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    kind = read_documented_kinds()[sentence]
    if kind == "a warning":
        CASES[sentence]()
        assert re.search(make_pattern(sentence), caplog.text)
        return
    if kind == "in quarantine":
        assert re.search(make_pattern(sentence), CASES[sentence]())
        return
    kind = json.JSONDecodeError if kind == "json.JSONDecodeError" else getattr(builtins, kind)
    with pytest.raises(kind, match=make_pattern(sentence)) as caught:
        CASES[sentence]()
    assert isinstance(caught.value, batchloom.BatchloomError)


@pytest.mark.slow
def test_list_sources_reports_the_sentences_of_the_hub(tmp_path):
    lines = b'{"text": "a"}\n'
    repos = {
        "org/plain": {"README.md": b"# hi", "train.jsonl": lines, "test.jsonl": lines},
        "org/gated": {"a.jsonl": lines},
    }
    with serve_hub(repos) as hub:
        hub.gated.add("org/gated")
        for environment in ({}, {"HF_HUB_OFFLINE": "1"}):
            names = {sentence: name for sentence, (name, variables) in HUB_CASES.items() if variables == environment}
            hub_environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), **environment}
            codes = [f"list_sources([{name!r}])" for name in names.values()]
            check_sentences(names, run_python(CATCHING_CODE, *codes, env=hub_environment))


@pytest.mark.parametrize("sentence", MISSING_CASES)
def test_the_code_reports_a_missing_package(sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    package, code = MISSING_CASES[sentence]
    check_sentences([sentence], run_python(CATCHING_CODE, code, missing=[package]))


def check_sentences(sentences, result):
    """Check the errors that a process printed."""
    assert result.returncode == 0, result.stderr
    for sentence, line in zip(sentences, result.stdout.splitlines(), strict=True):
        kinds, message = json.loads(line)
        assert re.search(make_pattern(sentence), message)
        assert read_documented_kinds()[sentence] in kinds
