"""Hub datasets: the real libraries against a local stand-in, in subprocesses."""

import io
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchloom
from batchloom.cli import run_command_line
from batchloom.sources import HubDatasetName, parse_hub_name, pin_revision, strip_revision
from batchloom.sources.files import get_pinned_revision
from batchloom.store import read_manifest
from processes import run_python
from sources.hub_server import COMMIT, NEXT_COMMIT, serve_hub

TOKEN = "hf_SECRETSECRET"
# The libraries take seconds to import, so each request runs in a fork of one process that imported them.
SERVER_SCRIPT = """
import json, os, sys, time
import aiohttp, datasets, huggingface_hub, pyarrow.parquet
from batchloom import BatchloomError, check, prepare
from batchloom.preparation import run_recipe
# Skip all delays between retries.
time.sleep = lambda seconds: None

def answer(folder, streaming, environment, inputs):
    if environment:
        os.environ.update(environment)
        # The libraries read the environment when they are imported.
        for name in list(sys.modules):
            if name.partition(".")[0] in ("datasets", "huggingface_hub"):
                del sys.modules[name]
    for number, source in enumerate(inputs):
        notes, began = [], time.perf_counter()
        try:
            prepare(
                source, out=f"{folder}/{number}", tokenizer="bytes", streaming=streaming,
                progress=lambda event: notes.append(getattr(event, "text", "")),
            )
            result = check(source).sound if streaming is None else True
        except BatchloomError as error:
            kinds = [base.__name__ for base in type(error).__mro__]
            result = kinds, str(error), error.__cause__ is None
        print("\\n@" + json.dumps([result, notes, time.perf_counter() - began]), flush=True)

for line in sys.stdin:
    cwd, *request = json.loads(line)
    child = os.fork()
    if not child:
        os.chdir(cwd)
        answer(*request)
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)
    print("\\n@@", flush=True)
"""
CARD = b"""---
configs:
- config_name: big
  data_files:
  - split: train
    path: data/*/*.jsonl
- config_name: small
  default: true
  data_files:
  - split: train
    path: small/train.jsonl
  - split: validation
    path: small/test.jsonl
---
# A card
"""


def make_lines(word, count):
    return b"".join(json.dumps({"text": f"{word} {i} " + "x" * 200}).encode() + b"\n" for i in range(count))


def encode_parquet(word, count):
    table = pa.Table.from_pylist([json.loads(line) for line in make_lines(word, count).splitlines()])
    file = io.BytesIO()
    pq.write_table(table, file, row_group_size=400, compression="none")
    return file.getvalue()


@pytest.fixture(scope="module")
def hub():
    repos = {
        "org/plain": {
            "README.md": b"# hi",
            "train.jsonl": make_lines("plain", 1500),
            "test.jsonl": make_lines("test", 3),
        },
        "org/cards": {
            "README.md": CARD,
            "data/a/0.jsonl": make_lines("a", 2),
            "data/b/0.jsonl": make_lines("b", 2),
            "small/train.jsonl": make_lines("small", 3),
            "small/test.jsonl": make_lines("validation", 4),
        },
        "org/tables": {
            "README.md": b"# hi",
            "data/train-00000-of-00002.parquet": encode_parquet("table", 1500),
            "data/train-00001-of-00002.parquet": encode_parquet("other", 10),
        },
        "org/script": {"script.py": b"raise SystemExit('a script was run')"},
        "org/gated": {"a.jsonl": make_lines("gated", 1)},
        "org/empty": {"README.md": b"# nothing"},
        "org/splits": {"a/dev.jsonl": make_lines("dev", 1), "a/test.jsonl": make_lines("t", 1)},
        "karpathy/tiny_shakespeare": {"train.jsonl": make_lines("To be", 2)},
    }
    with serve_hub(repos) as server:
        server.gated.add("org/gated")
        yield server


@contextmanager
def start_preparer(url, home):
    """Start a process that prepares requested inputs from the Hub at ``url``."""
    settings = {
        "HF_ENDPOINT": url,
        "HF_HOME": str(home),
        "HF_TOKEN": TOKEN,
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    with (
        tempfile.TemporaryFile("w+") as error_file,
        subprocess.Popen(
            [sys.executable, "-c", SERVER_SCRIPT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=error_file,
            text=True,
            env=os.environ | settings,
        ) as process,
    ):

        def request(cwd, folder, *inputs, streaming=None, **environment):
            process.stdin.write(json.dumps([str(cwd), str(cwd / folder), streaming, environment, inputs]) + "\n")
            process.stdin.flush()
            output = list(itertools.takewhile(lambda line: line != "@@\n", process.stdout))
            error_file.seek(0)
            errors = error_file.read()
            assert TOKEN not in "".join(output) + errors
            answers = [json.loads(line[1:]) for line in output if line.startswith("@")]
            assert len(answers) == len(inputs), errors
            return answers

        yield request


@pytest.fixture(scope="module")
def preparer(hub, tmp_path_factory):
    """The process that uses the stand-in, and the cache folder of its libraries."""
    home = tmp_path_factory.mktemp("hf")
    with start_preparer(hub.url, home) as request:
        yield request, home


@pytest.fixture
def home(preparer):
    """The empty cache folder of the libraries."""
    shutil.rmtree(preparer[1])
    preparer[1].mkdir()
    return preparer[1]


@pytest.fixture
def prepare_in_process(hub, preparer, home, tmp_path):
    """Prepare inputs in the process; return result, notes and seconds of each.

    The stores are ``FOLDER/0``, ``FOLDER/1``, ...
    """
    hub.requests.clear()
    return partial(preparer[0], tmp_path)


def read_json_manifest(folder):
    return json.loads((folder / "dataset_metadata.json").read_text())


@pytest.mark.parametrize(
    ("location", "name"),
    [
        ("org/name", HubDatasetName("org/name")),
        ("org/name:config", HubDatasetName("org/name", "config")),
        ("org/name/split", HubDatasetName("org/name", "", "split")),
        (
            "org/na-me.v1:2023.en/train@refs/pr/1",
            HubDatasetName("org/na-me.v1", "2023.en", "train", "refs/pr/1"),
        ),
        ("org/name@main", HubDatasetName("org/name", revision="main")),
        ("hf://datasets/org/name@v1", HubDatasetName("org/name", revision="v1")),
        ("hf://datasets/org/name/", HubDatasetName("org/name")),
        ("pile", HubDatasetName("monology/pile-uncopyrighted", "default", "train")),
    ],
)
def test_names_of_the_hub(location, name):
    assert parse_hub_name(location) == name


@pytest.mark.parametrize(
    "location",
    [
        *(
            "org/name.jsonl",
            "org/name.json",
            "data/train.csv",
            "a/b/c.parquet",
            "x/y.txt.gz",
            "x/y.jsonl@main",
        ),
        *(
            "./org/name",
            "/org/name",
            "../name",
            "~/name",
            "name",
            "a/b/c/d",
            "org/*",
            "org/name?",
            "",
            "a b/c",
        ),
        *(
            "s3://org/name",
            "hf://datasets/org/name/a.jsonl",
            "hf://datasets/org/name@v1/data/a.jsonl",
        ),
    ],
)
def test_names_that_are_never_looked_up_on_the_hub(location):
    assert parse_hub_name(location) is None


# Prints the names of the sources of each location, or the class and message of the error.
LISTING_SCRIPT = """
import json, os, sys
from batchloom import BatchloomError
from batchloom.sources import list_sources

os.chdir(sys.argv[1])
for location in sys.argv[2:]:
    try:
        result = [source.name for source in list_sources([location]).sources]
    except BatchloomError as error:
        kinds = ("FileNotFoundError", "ImportError")
        result = [next(base.__name__ for base in type(error).__mro__ if base.__name__ in kinds), str(error)]
    print(json.dumps(result))
"""


def test_local_paths_are_never_looked_up_on_the_hub(tmp_path):
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "org" / "name" / "a.txt").write_text("local")
    (tmp_path / "pile").write_text("local")
    # Below an existing folder the name is a mistyped path, not a Hub dataset.
    locations = ("org/name", "pile", "other/name", "org/nmae", "org/name/b", "tiny_shakespear")
    process = run_python(LISTING_SCRIPT, tmp_path, *locations, missing=["huggingface_hub"])
    assert process.returncode == 0, process.stderr
    folder, file, other, *mistyped, short = map(json.loads, process.stdout.splitlines())
    assert (folder, file) == (["org/name/a.txt"], ["pile"])
    assert other[0] == "ImportError"
    assert re.search(r"no file or folder other/name.*pip install datasets transformers", other[1])
    for location, (kind, message) in zip(("org/nmae", "org/name/b"), mistyped, strict=True):
        assert kind == "FileNotFoundError"
        assert f"There is no file or folder {location}: " in message
    assert short[0] == "FileNotFoundError"
    assert re.search(r"no file or folder tiny_shakespear: .*; did you mean 'tiny_shakespeare'", short[1])


def test_pinned_urls():
    url = f"hf://datasets/org/name@{COMMIT}/data/a.jsonl"
    assert (get_pinned_revision(url), strip_revision(url), pin_revision(url)) == (
        COMMIT,
        "hf://datasets/org/name/data/a.jsonl",
        url,
    )
    assert get_pinned_revision("hf://datasets/org/name@main/a.jsonl") == ""
    assert pin_revision("s3://bucket/a") == "s3://bucket/a"


def test_a_dataset_gives_its_train_split_at_one_commit(hub, prepare_in_process, home, tmp_path):
    ((result, notes, _),) = prepare_in_process("far", "org/plain", streaming=True)
    assert result is True
    (source,) = read_json_manifest(tmp_path / "far" / "0")["sources"]
    assert (source["name"], source["revision"]) == ("org/plain/train.jsonl", COMMIT)
    assert source["documents"] == 1500
    expected = f"org/plain: configuration default, split train (not test), 1 files, 0.3 MB, commit {COMMIT}"
    assert any(expected in note for note in notes)
    assert not list((home / "hub").rglob("train.jsonl"))
    # A downloaded dataset is read from its copy and gives the same store.
    hub.requests.clear()
    assert prepare_in_process("near", "org/plain", streaming=False)[0][0] is True
    assert list((home / "hub").rglob("train.jsonl"))
    gets = [path for method, path, _ in hub.requests if method == "GET" and path.endswith("train.jsonl")]
    assert len(gets) == 1
    manifests = [tmp_path / folder / "0" / "dataset_metadata.json" for folder in ("far", "near")]
    assert manifests[0].read_bytes() == manifests[1].read_bytes()
    for folder in ("far", "near"):
        files = [path for path in (tmp_path / folder).rglob("*") if path.is_file()]
        assert not any(TOKEN in path.read_text("latin1") for path in files)
    assert hub.tokens == {f"Bearer {TOKEN}"}


@pytest.mark.slow
def test_parquet_files_give_the_same_store_downloaded_or_not(hub, prepare_in_process, tmp_path):
    try:
        hub.cut = 150_000
        assert prepare_in_process("far", "org/tables", streaming=True)[0][0] is True
    finally:
        hub.cut = None
    assert prepare_in_process("near", "org/tables", streaming=False)[0][0] is True
    remote, local = (read_json_manifest(tmp_path / folder / "0") for folder in ("far", "near"))
    assert remote == local
    assert [(source["name"], source["kind"], source["documents"]) for source in remote["sources"]] == [
        ("org/tables/data/train-00000-of-00002.parquet", "parquet", 1500),
        ("org/tables/data/train-00001-of-00002.parquet", "parquet", 10),
    ]


def test_broken_connections_and_failing_servers(hub, prepare_in_process, tmp_path):
    try:
        hub.cut = 150_000
        assert prepare_in_process("cut", "org/plain", streaming=True)[0][0] is True
        ((result, notes, _),) = prepare_in_process("copied", "org/plain", streaming=False)
        assert result is True
        assert "org/plain/train.jsonl could not be downloaded; the remaining files are read remotely." in notes
        hub.cut, hub.failures, hub.delay = None, 2, 0.01
        assert prepare_in_process("failing", "org/plain", streaming=True)[0][0] is True
    finally:
        hub.cut, hub.failures, hub.delay = None, 0, 0.0
    assert prepare_in_process("whole", "org/plain", streaming=True)[0][0] is True
    expected = read_json_manifest(tmp_path / "whole" / "0")
    assert [read_json_manifest(tmp_path / name / "0") for name in ("cut", "copied", "failing")] == 3 * [expected]


NAMES = {
    "org/cards": ["org/cards/small/train.jsonl"],
    "org/cards:big": ["org/cards/data/a/0.jsonl", "org/cards/data/b/0.jsonl"],
    f"org/cards:small/validation@{COMMIT}": ["org/cards/small/test.jsonl"],
    "hf://datasets/org/cards@main/data/**/*.jsonl": [
        "hf://datasets/org/cards/data/a/0.jsonl",
        "hf://datasets/org/cards/data/b/0.jsonl",
    ],
    "hf://datasets/org/cards/data/b/0.jsonl": ["hf://datasets/org/cards/data/b/0.jsonl"],
    "hf://datasets/org/cards/small": ["hf://datasets/org/cards/small/train.jsonl"],
    "tiny_shakespeare": ["karpathy/tiny_shakespeare/train.jsonl"],
}


@pytest.mark.slow
def test_configurations_splits_files_and_short_names(prepare_in_process, tmp_path):
    answers = prepare_in_process("o", *NAMES)
    assert [result for result, _, _ in answers] == [True] * len(NAMES)
    for number, names in enumerate(NAMES.values()):
        sources = read_json_manifest(tmp_path / "o" / str(number))["sources"]
        assert [source["name"] for source in sources] == names
        assert {source["revision"] for source in sources} == {COMMIT}


@pytest.mark.slow
def test_a_commit_without_data_changes_is_the_same_input(hub, prepare_in_process):
    before = hub.repos["org/plain"]["train.jsonl"]
    try:
        assert prepare_in_process("o", "org/plain")[0][0] is True
        hub.commit = NEXT_COMMIT
        assert prepare_in_process("o", "org/plain")[0][0] is True
        hub.commit, hub.repos["org/plain"]["train.jsonl"] = NEXT_COMMIT[::-1], make_lines("other", 1500)
        assert "another job" in prepare_in_process("o", "org/plain")[0][0][1]
    finally:
        hub.commit, hub.repos["org/plain"]["train.jsonl"] = COMMIT, before


SENTENCES = {
    "org/none": (
        "FileNotFoundError",
        "Dataset 'org/none' not found: there is no file or folder of that name",
    ),
    "org/plain@v9": ("FileNotFoundError", "Dataset 'org/plain' not found at revision 'v9'"),
    "org/plain/trian": (
        "FileNotFoundError",
        "has no split 'trian'; it has train, test; did you mean 'train'?",
    ),
    "org/splits": ("FileNotFoundError", "has several splits, but no train split"),
    "org/cards:smal": (
        "FileNotFoundError",
        "has no configuration 'smal'; it has big, small; did you mean 'small'?",
    ),
    "org/gated": (
        "PermissionError",
        "Dataset 'org/gated' asks for permission: accept its terms at https://",
    ),
    "org/script": ("InputError", "needs a loading script, and loading scripts are never run here"),
    "org/empty": ("FileNotFoundError", "Dataset 'org/empty' holds no supported data files"),
    "hf://datasets/org/plain/none.jsonl": (
        "FileNotFoundError",
        "There is no file or folder hf://datasets/org/plain/none.jsonl.",
    ),
    "hf://datasets/org/none/a.jsonl": ("FileNotFoundError", "Dataset 'org/none' not found"),
}


def test_unavailable_datasets_are_one_sentence(prepare_in_process):
    answers = prepare_in_process("o", *SENTENCES)
    for ((class_names, message, without_cause), _, seconds), (kind, sentence) in zip(
        answers, SENTENCES.values(), strict=True
    ):
        assert {kind, "BatchloomError"} <= set(class_names)
        assert sentence in message
        assert without_cause
        assert seconds < 60


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "the connection was refused"),
    ],
)
def test_a_missing_network_is_reported_at_once(hub, prepare_in_process, environment, expected):
    inputs = ("org/plain", "fineweb", "hf://datasets/org/plain/train.jsonl")
    answers = prepare_in_process("o", *inputs, **environment)
    assert hub.requests == []
    assert len(answers) == len(inputs)
    for (class_names, message, _), _, seconds in answers:
        assert "ConnectionError" in class_names
        assert message.startswith("Failed to download dataset '")
        assert expected in message
        assert "There is no file or folder of that name either; go online, or download it" in message
        assert seconds < 60


def test_list_datasets(capsys):
    datasets = batchloom.list_datasets()
    assert [dataset["name"] for dataset in datasets] == [
        "distributed_dummy",
        "dummy",
        "fineweb",
        "fineweb-edu",
        "pile",
        "shakespeare",
        "tiny_shakespeare",
    ]
    assert {dataset["name"]: dataset["streaming"] for dataset in datasets} == {
        "distributed_dummy": False,
        "dummy": False,
        "fineweb": True,
        "fineweb-edu": True,
        "pile": True,
        "shakespeare": False,
        "tiny_shakespeare": False,
    }
    for dataset in datasets:
        assert dataset["description"]
        assert parse_hub_name(dataset["name"]) == parse_hub_name(dataset["input"])
        assert dataset["input"].startswith(dataset["repository"])
    assert run_command_line(["datasets", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == datasets
    assert run_command_line(["datasets"]) == 0
    assert "HuggingFaceFW/fineweb" in capsys.readouterr().out


@pytest.mark.slow
def test_a_manifest_names_hub_datasets(prepare_in_process, tmp_path):
    (tmp_path / "m.yaml").write_text(
        "datasets:\n  - {path: org/cards, data_type: hf_dataset, config: small, split: validation, name: cards}\n"
        f"  - {{path: org/plain, split: test, revision: {COMMIT}}}\n  - {{path: org/tables}}\n"
    )
    ((result, notes, _),) = prepare_in_process(tmp_path / "out", str(tmp_path / "m.yaml"), streaming=True)
    assert result is True, result
    sources = read_manifest(tmp_path / "out/0").sources
    assert [(source.name, source.dataset, source.kind) for source in sources] == [
        ("org/cards/small/test.jsonl", "cards", "jsonl"),
        ("org/plain/test.jsonl", "", "jsonl"),
        ("org/tables/data/train-00000-of-00002.parquet", "", "parquet"),
        ("org/tables/data/train-00001-of-00002.parquet", "", "parquet"),
    ]
    assert {source.revision for source in sources} == {COMMIT}
    assert sum("configuration" in note for note in notes) == 3
