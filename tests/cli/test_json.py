"""``--json`` of each command that reports: one document, with the numbers of the text."""

import json
import shutil

import pytest
import yaml

from batchloom.cli import run_command_line
from batchloom.testing import write_store

SIZES = ["--seq-len", "32", "--global-batch-size", "4"]
# These commands have no result to read: they show pages, or walk through the others.
WITHOUT_JSON = {"view", "demo"}
RUN = ["--data", "s", *SIZES, "--max-iters", "2", "--save-interval", "1", "--device", "cpu", "--out", "run"]


def write_text_store():
    texts = [f"the tale of {'many ' * (n % 9)}knights, part {n}" for n in range(80)]
    documents = [[*text.encode(), 256] for text in texts]
    write_store("s", {"train": documents[:60], "val": documents[60:]})


def count(number, noun):
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def describe_prepared(result):
    counts = result["counts"]
    return [
        f"records read {counts['records']:,}",
        f"documents kept {counts['documents']:,}",
        f"tokens {counts['tokens']:,}",
        *(f"{name} {subset['documents']:,} {subset['tokens']:,}" for name, subset in result["subsets"].items()),
    ]


# The arguments of each command, and the texts that a reader of its result expects in the other output.
CASES = {
    "doctor": (
        ["in.jsonl", "--tokenizer", "bytes"],
        lambda result: [
            f"records: {result['sources'][0]['records']} ({result['documents']:,} documents",
            f"tokens: {result['tokens']:,}",
            f"next: {result['commands'][0]}",
        ],
    ),
    "prepare": (["in.jsonl", "--out", "new", "--tokenizer", "bytes"], describe_prepared),
    "check": (
        ["s"],
        lambda result: [f"data: {result['data']}", f"used: {result['used']}", f"{result['path']}: sound"],
    ),
    "inspect": (
        ["s"],
        lambda result: [
            f"{count(result['documents'], 'document')}, {result['tokens']:,} tokens",
            f"shortest {result['shortest']}, median {result['median']:,.0f}",
            *(f"{row['packing']} │ {row['sequences']:,}" for row in result["efficiencies"]),
        ],
    ),
    "plan": (
        ["s", *SIZES],
        lambda result: [
            f"plan {result['fingerprint']}",
            f"{result['steps']:,} steps of {result['global_batch_size']} sequences",
            f"padding: {result['padding']:.3%}",
        ],
    ),
    "explain": (
        ["s", *SIZES, "--step", "1"],
        lambda result: [
            f"step {result['step']} of plan {result['fingerprint']}",
            *(f"data document {span['document']}" for row in result["sequences"] for span in row["spans"]),
        ],
    ),
    "when": (
        ["s", *SIZES, "--document", "3"],
        lambda result: [
            f"{count(len(result['showings']), 'sequence')} of plan {result['fingerprint']}",
            *(f"step {showing['step']}, row {showing['row']}" for showing in result["showings"]),
        ],
    ),
    "convert": (
        ["in.jsonl", "--out", "rows.json"],
        lambda result: [f"{result['path']}: {count(result['rows'], 'row')}"],
    ),
    "import": (["s/train/shard_00000", "--out", "new", "--tokenizer", "bytes"], describe_prepared),
    "export": (
        ["s", "--to", "flat", "--out", "flat"],
        lambda result: [f"{result['path']}: {result['documents']:,} documents, {result['tokens']:,} tokens"],
    ),
    "upload": (
        ["s", "memory://json/s"],
        lambda result: [result["path"], count(result["files"], "file")],
    ),
    "log": (
        ["s"],
        lambda entries: [f"{entry['number']} {entry['made']}" for entry in entries],
    ),
    "remove": (
        ["s", "--documents-file", "list.txt"],
        lambda result: [
            f"{count(result['documents'], 'document')} of {result['tokens']:,} tokens removed from ",
            f"generation {result['generation']} now",
        ],
    ),
    "compact": (
        ["s"],
        lambda result: ["s is one generation, and no document of it is removed"] * (not result["made"]),
    ),
    "datasets": ([], lambda entries: [entry["name"] for entry in entries]),
    "train": (
        RUN,
        lambda result: [
            f"step {result['steps'] - 1}/2 val loss {result['val_loss']:.4f}",
            f"{result['path']}/loss.png",
        ],
    ),
    "worker": (
        [*("--dataset-type", "store", "--dataset-name", "s", "--num-steps", "1"), *("--device", "cpu", "--out", "w")],
        lambda report: [f"{count(report['step'], 'step')}, {report['tokens']:,} tokens"],
    ),
    "edit": (
        ["run", "--data", "s", "--at-step", "2", "--skip", "1"],
        lambda result: [f"Written to {result['checkpoint']} (edit {result['number']} of its journal)"],
    ),
    "compare": (
        ["--runs", "run", "run"],
        lambda result: [f"{len(run['curve']['steps'])} │ {run['at_common']:.4f}" for run in result["runs"]],
    ),
}
NEED_A_RUN = ("edit", "compare")


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A folder with a run of a few steps."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_text_store()
        assert run_command_line(["train", *RUN]) == 0
    return folder


@pytest.fixture
def enter_folder(tmp_path, monkeypatch, request):
    """Make folders with equal files, and change to them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def enter(name, command):
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.chdir(folder)
        write_text_store()
        (folder / "in.jsonl").write_text("".join(f'{{"text": "story number {n}"}}\n' for n in range(50)))
        (folder / "list.txt").write_text("train:3\ntrain:4\n")
        if command in NEED_A_RUN:
            shutil.copytree(request.getfixturevalue("run_folder") / "run", "run")

    return enter


def test_each_command_reports_or_is_known_not_to(capfd):
    assert run_command_line(["--help"]) == 0
    lines = capfd.readouterr().out.partition("Commands:\n")[2].splitlines()
    with_json = set()
    for name in (line.split()[0] for line in lines):
        assert run_command_line([name, "--help"]) == 0
        help_text = capfd.readouterr().out
        assert "  -q, --quiet " in help_text
        if "  --json " in help_text:
            with_json.add(name)
    assert with_json == set(CASES)
    assert len(lines) == len(CASES) + len(WITHOUT_JSON)


@pytest.mark.parametrize("command", CASES)
def test_json_is_one_document_with_the_numbers_of_the_text(command, enter_folder, capfd):
    arguments, describe = CASES[command]
    enter_folder("text", command)
    assert run_command_line([command, *arguments]) == 0
    text = " ".join(capfd.readouterr().out.split())
    enter_folder("json", command)
    assert run_command_line([command, *arguments, "--json"]) == 0
    output = capfd.readouterr()
    (line,) = output.out.splitlines()
    expected = describe(json.loads(line))
    assert expected
    assert [part for part in expected if part not in text] == []
    assert "Traceback" not in output.err


def test_a_recipe_is_printed_as_json(enter_folder, capfd):
    enter_folder("recipe", "prepare")
    words = ["prepare", "in.jsonl", "--tokenizer", "bytes", "--val-fraction", "0.2", "--print-recipe"]
    assert run_command_line(words) == 0
    recipe = yaml.safe_load(capfd.readouterr().out)
    assert run_command_line([*words, "--json"]) == 0
    assert json.loads(capfd.readouterr().out) == recipe
    assert recipe["val_fraction"] == 0.2


def test_rows_and_json_do_not_share_standard_output(enter_folder, capfd):
    enter_folder("rows", "convert")
    assert run_command_line(["convert", "in.jsonl", "--out", "-", "--json"]) == 2
    output = capfd.readouterr()
    assert output.out == ""
    assert output.err.startswith("batchloom: --json: standard output holds the rows")


def test_a_failed_command_prints_no_json(enter_folder, capfd):
    enter_folder("failure", "inspect")
    assert run_command_line(["inspect", "missing", "--json"]) == 1
    assert capfd.readouterr().out == ""
