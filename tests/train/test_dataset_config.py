"""``batchloom train --dataset-config``: data, packing and training from YAML."""

import json

import pytest

from batchloom import open_store
from batchloom.cli import run_command_line
from train.model_folders import write_model
from train.runs import BASE_SETTINGS, read_steps

# Settings that a manifest does not have.
UNSET = {"noise_prob": None, "uneven": "refuse", "balance": False}


@pytest.fixture
def home(tmp_path):
    rows = [
        {
            "question": f"Tom has {n} apples and eats {n // 2}. How many are left?",
            "answer": f"{n} - {n // 2} = {n - n // 2} #### {n - n // 2}",
        }
        for n in range(120)
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "small.json").write_text(json.dumps({**BASE_SETTINGS, "steps": 3}))
    (tmp_path / "sft.yaml").write_text(
        "dataset:\n  dataset_type: text\n  dataset_format: jsonl\n  dataset_path: train.jsonl\n  packing: true\n"
        "  packing_length: 256\n  processor_config: {processor_name: bytes, processor_type: qwen2}\n"
    )
    return tmp_path


def train(home, *args):
    return run_command_line(["train", "--device", "cpu", "--config-file", str(home / "small.json"), *map(str, args)])


def read_lines(capsys, name):
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith(name)]


def test_from_a_file_to_a_trained_model(home, capsys):
    args = ["--dataset-config", home / "sft.yaml", "--out", home / "run"]
    assert train(home, *args, "--stop-at", 2) == 0
    out = capsys.readouterr().out
    assert "order  packing first_fit of 256 tokens, longer documents are left out, shuffled\n" in out
    assert "of them trained" in out
    settings = json.loads((home / "run/run.json").read_text())
    assert settings["seq_len"] == 256
    order = {"packing": "first_fit", "overlong": "drop", "shuffle": True}
    assert settings["order"] == {**UNSET, **order}
    store = open_store(home / "run/data")
    assert store.tokenizer.name == "bytes"
    assert store.masked
    assert settings["data"]["fingerprint"] == store.fingerprint
    assert run_command_line(["train", "--device", "cpu", *map(str, args), "--resume"]) == 0
    out = capsys.readouterr().out
    assert "is prepared already" in out
    assert "as the run was started\n" in out
    assert len(read_steps(home / "run")) == 3


def test_resuming_keeps_the_order_of_the_run(home, capsys):
    args = ["--dataset-config", home / "sft.yaml", "--out", home / "run"]
    assert train(home, *args, "--stop-at", 1) == 0
    capsys.readouterr()
    with (home / "sft.yaml").open("a") as file:
        file.write("  packing_strategy: wrap\n")
    assert run_command_line(["train", "--device", "cpu", *map(str, args), "--resume"]) == 0
    (line,) = read_lines(capsys, "order")
    assert "packing first_fit of 256 tokens" in line
    assert line.endswith("as the run was started")


def test_options_override_the_manifest(home, capsys):
    args = ["--dataset-config", home / "sft.yaml", "--out", home / "run", "--max-iters", 1]
    assert train(home, *args, "--seq-len", 64, "--packing", "wrap", "--tokenizer", "train:300") == 0
    (line,) = read_lines(capsys, "order")
    assert "packing wrap of 64 tokens" in line
    settings = json.loads((home / "run/run.json").read_text())
    assert (settings["seq_len"], settings["order"]["packing"]) == (64, "wrap")
    assert open_store(home / "run/data").tokenizer.name == "train:300"


def test_overlong_can_be_set_on_the_command_line(home, capsys):
    args = ["--dataset-config", home / "sft.yaml", "--out", home / "run", "--max-iters", 1]
    assert train(home, *args, "--overlong", "split") == 0
    (line,) = read_lines(capsys, "order")
    assert "longer documents are cut" in line
    assert json.loads((home / "run/run.json").read_text())["order"]["overlong"] == "split"


def test_unpacked_unshuffled_and_cut(home):
    text = (home / "sft.yaml").read_text()
    text = text.replace("packing: true", "shuffle: false\n  filter_overlong: false").replace("256", "48")
    (home / "sft.yaml").write_text(text)
    assert train(home, "--dataset-config", home / "sft.yaml", "--out", home / "run", "--max-iters", 1) == 0
    settings = json.loads((home / "run/run.json").read_text())
    assert settings["order"] == {
        **UNSET,
        "packing": "none",
        "overlong": "split",
        "shuffle": False,
    }
    assert settings["seq_len"] == 48


def test_a_list_leaves_the_order_to_the_configuration(home, capsys):
    (home / "list.yaml").write_text("datasets: [{path: train.jsonl, weight: 0.5, name: sums}]")
    args = ["--dataset-config", home / "list.yaml", "--tokenizer", "bytes", "--max-iters", 1]
    assert train(home, *args, "--seq-len", 128, "--out", home / "list") == 0
    assert "(sums 0.5) are not applied" in capsys.readouterr().err
    settings = json.loads((home / "list/run.json").read_text())
    assert settings["order"] == {
        **UNSET,
        "packing": "best_fit",
        "overlong": None,
        "shuffle": True,
    }


def test_preferences_are_refused_before_they_are_prepared(home, capsys):
    rows = [{"prompt": f"q{n}", "chosen": "a", "rejected": "b"} for n in range(20)]
    (home / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    processor = {"processor_name": "bytes"}
    block = {"dataset_path": str(home / "pairs.jsonl"), "processor_config": processor}
    (home / "dpo.yml").write_text(json.dumps({"dataset": block}))
    assert train(home, "--dataset-config", home / "dpo.yml", "--max-iters", 1, "--out", home / "run") == 1
    assert "holds preference pairs: a loader would also train the rejected answers." in capsys.readouterr().err
    assert not (home / "run/data/dataset_metadata.json").exists()


def test_with_a_model_to_finetune(home, capsys):
    write_model(home / "llama", "llama")
    args = ["--init", home / "llama", "--dataset-config", home / "sft.yaml", "--out", home / "run"]
    text = (home / "sft.yaml").read_text().replace("  packing_length: 256\n", "")
    (home / "sft.yaml").write_text(text.replace("packing: true", "packing: true\n  filter_overlong: false"))
    sizes = ["--global-batch-size", "2", "--max-iters", "2", "--device", "cpu"]
    assert run_command_line(["train", *map(str, args), *sizes]) == 0
    # The default length is at most the positions of the model.
    assert "order  packing first_fit of 64 tokens" in capsys.readouterr().out
    assert (home / "run/model/config.json").exists()


def test_an_unfinished_preparation_is_continued(home, capsys):
    """OUT may hold the prepared data before the run begins, and nothing else."""
    args = ["--dataset-config", home / "sft.yaml", "--out", home / "run", "--max-iters", 1]
    (home / "run").mkdir()
    assert run_command_line(["prepare", str(home / "sft.yaml"), "--out", str(home / "run/data")]) == 0
    capsys.readouterr()
    assert train(home, *args) == 0
    assert "is prepared already" in capsys.readouterr().out
    (home / "other").mkdir()
    (home / "other/mine.txt").write_text("x")
    assert train(home, *args[:3], home / "other") == 1
    assert "is not an empty folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--data", "s", "--dataset-config", "d"],
            "--data and --dataset-config exclude each other",
        ),
        (
            ["--input-file", "s", "--dataset-config", "d"],
            "--input-file and --dataset-config exclude each other",
        ),
        (["--dataset-config", "nowhere.yaml"], "There is no file or folder nowhere.yaml"),
        (
            ["--input-file", "{home}/sft.yaml"],
            "is named like a manifest; give it as --dataset-config",
        ),
        (
            ["--data", "s", "--tokenizer", "t"],
            "requires --input-file, --stream or --dataset-config",
        ),
    ],
)
def test_contradicting_options_are_refused(home, args, message, capsys):
    assert run_command_line(["train", "--out", str(home / "run"), *(word.format(home=home) for word in args)]) != 0
    assert message in capsys.readouterr().err
