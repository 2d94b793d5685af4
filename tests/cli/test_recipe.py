"""Options ``--recipe`` and ``--print-recipe`` of ``prepare``."""

import pytest

from batchloom import SettingsError
from batchloom.cli import run_command_line
from batchloom.preparation import make_request
from preparation.stores import hash_store_files, write_jsonl
from store.manifest_edits import edit_manifest


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_jsonl(
        "in.jsonl",
        [{"q": f"question {n}", "a": f"answer {n}", "text": f"text {n}"} for n in range(60)],
    )
    return tmp_path


COMMANDS = [
    ["--text-field", "q"],
    ["--map", "prompt=q,response=a", "--template", "plain", "--prove", "--train-on", "last"],
    ["--map=text=a", "--no-normalize", "--split-on", r"\n\t", "--max-bad", "7", "--dtype", "int32"],
    [
        "--clean",
        "control,whitespace",
        "--clean",
        "boilerplate",
        "--dedup",
        "exact",
        "--text-field=q",
    ],
    ["--dedup", "near", "--similarity", "0.9", "--text-field=q"],
    ["--tokens-per-shard", "1.5K", "--no-dedup", "--clean", "none", "--val-fraction", "1e-3"],
]


@pytest.mark.parametrize("options", COMMANDS)
def test_a_printed_recipe_makes_the_same_store(folder, options, capsys):
    arguments = ["in.jsonl", "--tokenizer", "bytes", *options]
    assert run_command_line(["prepare", *arguments, "--print-recipe"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert not (folder / "one").exists()
    (folder / "r.yaml").write_text(printed.out)
    assert run_command_line(["prepare", *arguments, "--out", "one"]) == 0
    assert run_command_line(["prepare", "--recipe", "r.yaml", "--out", "two"]) == 0
    assert hash_store_files("two") == hash_store_files("one")
    capsys.readouterr()
    # A recipe printed again, also from the store, is the same. The store's recipe has every setting of a cleaning step.
    for recipe in ("r.yaml", *([] if "boilerplate" in options else ["one"])):
        assert run_command_line(["prepare", "--recipe", recipe, "--print-recipe"]) == 0
        printed_lines = [line for line in capsys.readouterr().out.splitlines() if line[0] != "#"]
        assert printed_lines == [line for line in printed.out.splitlines() if line[0] != "#"]


def test_options_override_the_recipe(folder, capsys):
    (folder / "r.yaml").write_text(
        "inputs: [in.jsonl]\nprove: true\nnormalize: false\nmapping: {text: q}\nval_fraction: 0.5\n"
    )
    options = [
        "--no-prove",
        "--normalize",
        "--text-field",
        "a",
        "--val-fraction",
        "0.01",
        "--print-recipe",
    ]
    assert run_command_line(["prepare", "--recipe", "r.yaml", *options]) == 0
    output = capsys.readouterr().out
    assert run_command_line(["prepare", "in.jsonl", "--text-field", "a", "--print-recipe"]) == 0
    assert capsys.readouterr().out == output


def test_cleaning_steps_may_be_given_several_times(folder):
    recipe = make_request("in.jsonl", {"clean": ["control,whitespace", "length"]}, None).recipe
    assert [step.name for step in recipe.reading.clean] == ["control", "whitespace", "length"]
    with pytest.raises(SettingsError) as error:
        make_request("in.jsonl", {"clean": ["contrl,whitespace", "x"]}, None)
    assert [problem.split(":")[0] for problem in error.value.problems] == ["clean[0]", "clean[2]"]


def test_a_rebuilt_store_is_compared_with_the_original(folder, capsys):
    assert (
        run_command_line(["prepare", "in.jsonl", "--tokenizer", "train:300", "--text-field", "q", "--out", "one"]) == 0
    )
    assert run_command_line(["prepare", "--recipe", "one", "--out", "two"]) == 0
    assert "two is identical to one, byte for byte." in capsys.readouterr().err
    write_jsonl("in.jsonl", [{"q": "another"}] * 9)
    assert run_command_line(["prepare", "--recipe", "one", "--out", "three"]) == 0
    assert "three differs from one: the inputs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "o"], "INPUT: missing: name files, or a recipe with --recipe"),
        (["in.jsonl"], "--out: missing: name the folder of the store"),
        (
            ["--recipe", "r.yaml", "--out", "o"],
            "r.yaml: tokenisers: unknown setting; did you mean 'tokenizer'?",
        ),
        (["--recipe", "r.yaml", "--recipe", "r.yaml"], "--recipe: it is given 2 times"),
        (["--recipe", "s.yaml", "--out", "o", "--test-fraction", "2"], "\n--test-fraction: 2.0 is not in [0, 1)"),
        (
            ["--recipe", "s.yaml", "--out", "o", "--test-fraction", "2"],
            "s.yaml: val_fraction: 3 is not in [0, 1)",
        ),
    ],
)
def test_errors_name_the_option_or_the_recipe_setting(folder, arguments, message, capsys):
    (folder / "r.yaml").write_text("inputs: [in.jsonl]\ntokenisers: gpt2\n")
    (folder / "s.yaml").write_text("inputs: [in.jsonl]\nval_fraction: 3\n")
    assert run_command_line(["prepare", *arguments]) == 2
    output = capsys.readouterr().err.replace("batchloom: ", "\n")
    assert message in output
    assert not (folder / "o").exists()


def test_a_name_of_an_evaluation_set_cannot_write_to_the_terminal(folder, capsys):
    text = "one two three four five six seven eight nine ten eleven twelve thirteen"
    write_jsonl("set.jsonl", [{"q": text}])
    write_jsonl("texts.jsonl", [{"text": text}, {"text": "another text"}])
    (folder / "r.yaml").write_text(
        'clean:\n- decontaminate: {sets: {"a\\nb\\e[31m": set.jsonl}}\ninputs: [texts.jsonl]\n'
    )
    assert run_command_line(["prepare", "--recipe", "r.yaml", "--tokenizer", "bytes", "--out", "o"]) == 0
    assert "shares words with a\\nb\\x1b[31m  " in capsys.readouterr().out


WRONG_RECIPES = {
    "val_fraction: Expected `float | null`, got `str`": lambda r: r.update(val_fraction="x"),
    "val_fraction: Number out of range": lambda r: r.update(val_fraction=10**400),
    "inputs: Expected `array`, got `null`": lambda r: r.update(inputs=None),
    "sources[0]: Expected `object`, got `array`": lambda r: r.update(sources=[[1]]),
    "reading.clean: Expected `array`, got `str`": lambda r: r["reading"].update(clean="x"),
    "reading.clean[0]: Expected `str | object`": lambda r: r["reading"].update(clean=[[1]]),
    "reading.clean[0]: Expected `object` of length": lambda r: r["reading"].update(clean=[{}]),
}


@pytest.mark.parametrize("problem", WRONG_RECIPES)
def test_a_recipe_of_other_types_in_a_manifest_is_refused(problem, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_jsonl("in.jsonl", [{"text": f"document {number}"} for number in range(30)])
    arguments = ["prepare", "in.jsonl", "--tokenizer", "bytes", "--clean", "control", "--out", "st"]
    assert run_command_line(arguments) == 0
    manifest = tmp_path / "st" / "dataset_metadata.json"
    edit_manifest(manifest.parent, lambda values: WRONG_RECIPES[problem](values["recipe"]))
    for command in (["inspect", "st"], ["prepare", "--recipe", "st", "--out", "s3"], arguments):
        capsys.readouterr()
        assert run_command_line(command) == 1
        message = capsys.readouterr().err
        assert f"dataset_metadata.json is damaged: recipe.{problem}" in message
