"""Recipe files, and stores prepared again from their manifests."""

import contextlib
import json
import os
import re
import shutil
import time
from dataclasses import fields, replace
from typing import get_args

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import batchloom
from batchloom import BatchloomError, InputError, Recipe, SettingsError, StoreError
from batchloom.chat import BUILT_IN_TEMPLATES
from batchloom.core.errors import InputMissingError, RecordError, StoreConflictError
from batchloom.preparation import (
    ChatRecipe,
    DedupRecipe,
    ReadRecipe,
    make_request,
    parse_clean_steps,
    parse_dedup,
    read_recipe,
    recipe_to_plain,
)
from batchloom.preparation.request import SETTINGS, format_recipe
from batchloom.preparation.request.recipe_file import RECIPE_KEYS
from batchloom.preparation.settings import (
    SourceRecipe,
    clean_steps_to_settings,
    dedup_to_plain,
    format_token_count,
    parse_token_count,
)
from batchloom.preparation.settings.recipe import DedupMode
from batchloom.store import read_manifest
from batchloom.text import CleanStep
from batchloom.tokens import train_tokenizer
from preparation.stores import hash_store_files, read_texts, write_jsonl
from store.manifest_edits import write_sealed
from tiers import examples

TEXTS = [f"document {n} of some {'long ' * (n % 7)}words" for n in range(60)]
QUESTIONS = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(40)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Write inputs of several kinds into the working folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    write_jsonl("data/words.jsonl", [{"text": text} for text in TEXTS])
    write_jsonl("data/asked.jsonl", QUESTIONS)
    write_jsonl("data/lines.txt", [{"text": f"line {n}"} for n in range(10)])
    shutil.copy("data/lines.txt", "data/lines.jsonl")
    (tmp_path / "data/notes.csv").write_text("id,body\n" + "".join(f"{n},note {n}\n" for n in range(30)))
    (tmp_path / "data/prose.txt").write_text("Some prose.\n\n" * 50)
    return tmp_path


def write(name, text):
    with open(name, "w") as file:
        file.write(text)
    return name


def write_tokenizer(name):
    """Write a tokenizer.json of a few words."""
    state = train_tokenizer(TEXTS, 300).state()
    return write(name, json.dumps(state["tokenizer"]))


MANIFEST = """
datasets:
  - {path: data/asked.jsonl, data_type: jsonl, name: asked, weight: 0.7, mapping: {prompt: question, response: answer}}
  - {path: data/notes.csv, data_type: csv, text_field: body, weight: 2}
  - {path: data/lines.jsonl, data_type: jsonl}
"""

JOBS = {
    "texts": (
        ["data/words.jsonl", "data/prose.txt"],
        {"split_on": "paragraph", "test_fraction": 0.1},
    ),
    "a folder and globs": (["some", "data/w*.jsonl", "data/*.txt"], {"tokens_per_shard": 500}),
    "conversations": (
        ["data/asked.jsonl"],
        {"template": "chatml", "max_tokens": 30, "overlong": "split"},
    ),
    "columns": (["data/notes.csv"], {"text_field": "body", "max_bad": 3, "normalize": False}),
    "a manifest": (["all.yaml"], {}),
    "a manifest beside": (["data/prose.txt", "all.yaml"], {"prove": True}),
    "cleaned": (
        ["data/words.jsonl", "data/prose.txt"],
        {"clean": ["control", {"length": {"least_words": 5}}], "dedup": "exact"},
    ),
    "near duplicates": (
        ["data/words.jsonl", "data/asked.jsonl"],
        {"dedup": {"mode": "near", "bands": 4, "rows": 2, "shingle": 2}},
    ),
    "learned": (["data/words.jsonl"], {"tokenizer": "train:300"}),
    "a tokenizer file": (["data/words.jsonl"], {"tokenizer": "some/tok.json"}),
}


@pytest.fixture(params=JOBS)
def prepare_arguments(request, folder):
    """Write the files of a job, and return its inputs and settings."""
    (folder / "some").mkdir()
    write("some/more.md", "# More")
    write_tokenizer("some/tok.json")
    write("all.yaml", MANIFEST)
    if request.param == "conversations":
        tokenizer = {"tokenizer": "bytes", "template": "plain"}
    else:
        tokenizer = {"tokenizer": "bytes"}
    inputs, settings = JOBS[request.param]
    return inputs, {
        "val_fraction": 0.1,
        **settings,
        **{name: value for name, value in tokenizer.items() if name == "template" or name not in settings},
    }


def test_a_store_is_made_again_from_its_manifest_and_from_its_printed_recipe(prepare_arguments):
    inputs, settings = prepare_arguments
    first = batchloom.prepare(inputs, out="one", **settings)
    rerun = batchloom.prepare(recipe="one", out="two")
    assert hash_store_files("two") == hash_store_files("one")
    assert rerun.notes[-1] == "two is identical to one, byte for byte."
    assert batchloom.prepare(recipe="one/dataset_metadata.json", out="two").already_done
    write("recipe.yaml", format_recipe(make_request(inputs, settings, None).recipe))
    batchloom.prepare(recipe="recipe.yaml", out="three")
    assert hash_store_files("three") == hash_store_files("one")
    assert first.counts.documents == read_manifest(first.path / "../three").counts.documents


def test_a_declared_format_is_not_in_the_store(folder):
    manifest = write("m.yaml", "datasets: [{path: data/lines.txt, data_type: jsonl}]")
    batchloom.prepare(manifest, out="one", tokenizer="bytes")
    refusal = "data/lines.txt was read as jsonl because of a data_type"
    with pytest.raises(InputError, match=refusal):
        batchloom.prepare(recipe="one", out="two")
    write("data/more.txt", '{"text": "more"}\n')
    for path in ("data", "data/*.txt", "data/more.txt"):
        with pytest.raises(InputError, match=refusal):
            batchloom.prepare(path, out="one", append=True)
    batchloom.prepare("data/words.jsonl", out="one", append=True)
    write("more.yaml", "datasets: [{path: data/more.txt, data_type: jsonl}]")
    batchloom.prepare("more.yaml", out="one", append=True)
    assert read_texts("one")[-1] == "more"


def test_a_dry_run_of_a_store_made_again_ends_well(folder):
    write("a.jsonl", '{"text": "one"}\n')
    batchloom.prepare("a.jsonl", out="one", tokenizer="bytes")
    result = batchloom.prepare(recipe="one", out="two", dry_run=True)
    assert result.counts.documents == 1
    assert not result.subsets


@pytest.mark.parametrize(
    ("clean", "difference"),
    [
        ("control,length", "clean: control -> control,length"),
        ([{"control": {"joiners": False}}], "clean: control: joiners: True -> False"),
        ([], "clean: control -> none"),
    ],
)
def test_differing_cleaning_steps_are_described_briefly(folder, clean, difference):
    write("a.jsonl", '{"text": "one"}\n')
    batchloom.prepare("a.jsonl", out="one", tokenizer="bytes", clean="control")
    with pytest.raises(StoreConflictError, match=re.escape(f"({difference})")):
        batchloom.prepare("a.jsonl", out="one", tokenizer="bytes", clean=clean)


def test_the_manifest_and_its_tokenizer_state_are_enough(folder, tmp_path_factory):
    write_tokenizer("tok.json")
    for name in ("words.jsonl", "asked.jsonl"):
        (folder / "data" / name).rename(folder / name)
    inputs = [folder / "words.jsonl", "asked.jsonl"]
    batchloom.prepare(inputs, out="one", tokenizer=str(folder / "tok.json"), dtype="int32")
    # Another tokenizer file of that name, or none, changes nothing.
    write("tok.json", "{}")
    batchloom.prepare(recipe="one", out="two")
    assert hash_store_files("two") == hash_store_files("one")
    assert batchloom.prepare(recipe="one", out="two").already_done
    (folder / "tok.json").unlink()
    assert read_manifest(folder / "two").tokenizer.name == "tok.json"
    batchloom.prepare(recipe="one", out="three")
    assert hash_store_files("three") == hash_store_files("one")


def test_inputs_in_other_folders_come_from_the_report_or_are_requested(folder, monkeypatch, tmp_path_factory):
    other_folder = tmp_path_factory.mktemp("elsewhere")
    os.rename("data/words.jsonl", other_folder / "words.jsonl")
    batchloom.prepare([other_folder / "words.jsonl", "data/prose.txt"], out="one", tokenizer="bytes")
    rerun = batchloom.prepare(recipe="one", out="two")
    assert hash_store_files("two") == hash_store_files("one")
    assert rerun.notes[0] == f"Using input paths from report.json in one: {other_folder}/words.jsonl."
    os.remove("one/report.json")
    with pytest.raises(InputMissingError) as error:
        batchloom.prepare(recipe="one", out="three")
    assert "one was made from words.jsonl, which cannot be found" in str(error.value)
    assert "in the order of its manifest (words.jsonl, data/prose.txt)" in str(error.value)
    batchloom.prepare([other_folder / "words.jsonl", "data/prose.txt"], out="three", recipe="one")
    assert hash_store_files("three") == hash_store_files("one")
    monkeypatch.chdir(other_folder)
    with pytest.raises(InputMissingError, match=f"data/prose.txt.* in {folder}, where it was made"):
        read_recipe(folder / "two")


def test_a_missing_folder_is_no_data_set_of_the_hub(folder):
    os.mkdir("data/more")
    os.rename("data/words.jsonl", "data/more/words.jsonl")
    batchloom.prepare("data/more", out="one", tokenizer="bytes")
    os.rename("data/more", "data/less")
    with pytest.raises(InputMissingError, match="one was made from data/more, which cannot be found"):
        batchloom.prepare(recipe="one", out="two")


def test_a_template_that_was_a_file_is_compared_and_asked_for(folder):
    source = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    write("t.jinja", source)
    batchloom.prepare("data/asked.jsonl", out="one", tokenizer="bytes", template="t.jinja")
    batchloom.prepare(recipe="one", out="two")
    assert hash_store_files("two") == hash_store_files("one")
    write("t.jinja", source.replace("\n", "\n\n"))
    with pytest.raises(InputError, match="t.jinja, which has changed"):
        batchloom.prepare(recipe="one", out="three")
    (folder / "t.jinja").unlink()
    with pytest.raises(InputMissingError, match="t.jinja, which is missing .* --template"):
        batchloom.prepare(recipe="one", out="three")
    os.mkdir("new")
    write("new/t.jinja", source)
    batchloom.prepare(recipe="one", out="three", template="new/t.jinja")
    assert hash_store_files("three") == hash_store_files("one")


def test_a_damaged_or_foreign_store_is_no_recipe(folder):
    batchloom.prepare("data/words.jsonl", out="one", tokenizer="bytes")
    manifest = json.loads((folder / "one/dataset_metadata.json").read_text())
    write("other.json", json.dumps(manifest))
    with pytest.raises(InputError, match="call it dataset_metadata.json"):
        read_recipe("other.json")
    with pytest.raises(StoreError):
        read_recipe("data")
    manifest["recipe"]["cleann"] = []
    write_sealed(folder / "one/dataset_metadata.json", manifest)
    with pytest.raises(SettingsError, match=r"recipe.cleann: unknown setting; did you mean 'clean'\?"):
        read_recipe("one")
    manifest["recipe"] = {"how": "link"}
    write_sealed(folder / "one/dataset_metadata.json", manifest)
    with pytest.raises(InputError, match="one was imported"):
        read_recipe("one")


def test_made_up_data_is_made_up_again(folder):
    batchloom.prepare("dummy:documents=50,seed=3", out="one", val_fraction=0.2, tokens_per_shard=9000)
    batchloom.prepare(recipe="one", out="two")
    assert hash_store_files("two") == hash_store_files("one")
    write("r.yaml", format_recipe(read_recipe("one")))
    batchloom.prepare(recipe="r.yaml", out="three")
    assert hash_store_files("three") == hash_store_files("one")


RECIPE = """
inputs:
  - data/words.jsonl
  - {path: asked.jsonl, data_folder: data, name: asked, mapping: {prompt: question, response: answer}}
tokenizer: train:300
tokens_per_shard: 1K
val_fraction: 0.2
end_token: null
"""


def test_options_and_inputs_win_over_a_file(folder):
    write("wiki.yaml", RECIPE)
    recipe = read_recipe("wiki.yaml")
    assert recipe.inputs == ("data/words.jsonl", "data/asked.jsonl")
    assert (recipe.tokenizer, recipe.tokens_per_shard, recipe.val_fraction) == (
        "train:300",
        1000,
        0.2,
    )
    assert [source.name for source in recipe.sources] == [None, "asked"]
    settings = {"split_on": None, "tokenizer": "bytes", "val_fraction": 0.0}
    expected = make_request(None, settings, "wiki.yaml").recipe
    assert expected == replace(recipe, tokenizer="bytes", val_fraction=0.0)
    assert make_request(None, settings, recipe).recipe == expected
    # The same number of inputs replaces those of the recipe and keeps their settings.
    moved = make_request(["data/prose.txt", "data/lines.txt"], {}, "wiki.yaml").recipe
    assert moved.inputs == ("data/prose.txt", "data/lines.txt")
    assert moved.sources == recipe.sources
    with pytest.raises(InputError, match=r"wiki.yaml has settings for each of its 2 inputs"):
        make_request(["data/prose.txt"], {}, "wiki.yaml")
    write("plain.yaml", "val_fraction: 0.5\nmapping: {prompt: question, response: answer}\n")
    assert make_request("x.jsonl", {"text_field": "t"}, "plain.yaml").recipe == Recipe(
        inputs=("x.jsonl",), val_fraction=0.5, reading=ReadRecipe(text_field="t")
    )


def test_python_takes_a_recipe_as_a_value_and_as_a_path(folder):
    recipe = Recipe(inputs=("data/words.jsonl",), tokenizer="bytes", val_fraction=0.2)
    batchloom.prepare(recipe=recipe, out="one")
    batchloom.prepare("data/words.jsonl", out="two", tokenizer="bytes", val_fraction=0.2, dedup="exact")
    assert hash_store_files("one") == hash_store_files("two")
    batchloom.prepare(recipe=folder / "one", out="two", dedup={"mode": "exact"}, clean=["none"])
    with pytest.raises(SettingsError, match="there are none"):
        batchloom.prepare(out="three")
    with pytest.raises(SettingsError, match="recipe: 5 is not a path"):
        batchloom.prepare(recipe=5, out="three")


def test_paths_begin_at_the_folder_of_the_file(folder, tmp_path_factory):
    os.mkdir("conf")
    os.rename("data/words.jsonl", "conf/words.jsonl")
    write_tokenizer("conf/tok.json")
    write("conf/t.jinja", "{% for message in messages %}{{ message.content }}{% endfor %}")
    lines = [
        "inputs: [words.jsonl, ../data/asked.jsonl]",
        "tokenizer: tok.json",
        "template: t.jinja",
    ]
    write("conf/r.yaml", "\n".join(lines))
    recipe = read_recipe("conf/r.yaml")
    assert recipe.inputs == ("conf/words.jsonl", "data/asked.jsonl")
    assert (recipe.tokenizer, recipe.chat.template) == ("conf/tok.json", "conf/t.jinja")
    batchloom.prepare(recipe="conf/r.yaml", out="one")
    # A word that is no path stays a word, even if a folder of that name exists.
    for name in ("bytes", "chatml", "gpt2"):
        os.mkdir(f"conf/{name}")
    write("conf/r.yaml", "inputs: ['-']\ntokenizer: bytes\ntemplate: chatml")
    assert read_recipe("conf/r.yaml").inputs == ("-",)
    assert read_recipe("conf/r.yaml").tokenizer == "bytes"
    assert read_recipe("conf/r.yaml").chat.template == "chatml"
    write("conf/r.yaml", "inputs: [words.jsonl, wrods.jsonl, {path: none.csv}]")
    with pytest.raises(InputMissingError, match=r"inputs\[1\]: .*conf/wrods.jsonl.*conf/none.csv"):
        read_recipe("conf/r.yaml")


def test_everything_that_is_wrong_at_once(folder):
    text = """
inputs: [data/words.jsonl]
clean: [5, {gopher: 3}, {a: {}, b: {}}, "", {c4: {most: .inf}}]
dedup: {mode: near, band: 14}
tokens_per_shard: many
val_fraction: "no"
split_on: lines
prove: 1
mapping: {promt: q}
max_bad: 5 records
overlong: split
train_on: me
"""
    write("w.yaml", text)
    with pytest.raises(SettingsError) as error:
        make_request(None, {"dtype": "uint8", "tokenizer": ""}, "w.yaml")
    assert sorted(
        problem.partition(": ")[2].split(":")[0] if problem.startswith("w.yaml: ") else f"over {problem.split(':')[0]}"
        for problem in error.value.problems
    ) == [
        "clean[0]",
        "clean[1].gopher",
        "clean[2]",
        "clean[3]",
        "clean[4].c4.most",
        "dedup.band",
        "mapping.promt",
        "max_bad",
        "over dtype",
        "over tokenizer",
        "overlong",
        "prove",
        "split_on",
        "tokens_per_shard",
        "train_on",
        "val_fraction",
    ]
    write("w.yaml", "tokeniser: gpt2\nno: 1\nyes: 2\n5: x\nsplit-on: file\ninputs: [{pth: x}, 3]\n")
    with pytest.raises(SettingsError) as error:
        read_recipe("w.yaml")
    message = "\n".join(error.value.problems)
    for part in (
        "tokeniser: unknown setting; did you mean 'tokenizer'?",
        "w.yaml: no: unknown",
        "w.yaml: 5: unknown",
        "did you mean 'split_on'?",
        "inputs[1]: 3 is neither",
    ):
        assert part in message
    write("w.yaml", "inputs: [{pth: x}, {path: y, name: a}, {path: z, name: a}]\n")
    with pytest.raises(SettingsError) as error:
        read_recipe("w.yaml")
    assert sorted(error.value.problems) == [
        "w.yaml: inputs: two are called 'a'; a name is one data set's alone",
        "w.yaml: inputs[0].path: missing",
        "w.yaml: inputs[0].pth: unknown setting; did you mean 'path'?",
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("r.yaml", b"", "r.yaml is empty; write settings such as inputs:"),
        ("r.yaml", b"\x00\xff\xfe", "r.yaml"),
        ("r.yaml", b"a: 1\na: 2\n", "line 2.*the key 'a' is given twice"),
        ("r.json", b'{"dtype": "auto", "dtype": "auto"}', "the key 'dtype' is given twice"),
        ("r.json", b'{"dtype": "\\ud800"}', "cannot be read as JSON"),
        ("r.json", b'{"dtype": ', "line 1.*not valid JSON"),
        ("r.json", b"[" * 100_000, "cannot be read as JSON"),
        ("r.yaml", b"inputs:\n\t- a\n", "line 2.*not valid YAML"),
        ("r.yaml", b"inputs: &a [*a]\n", "an alias refers to a list or mapping that contains it"),
        ("r.yaml", b"[" * 100 + b"]" * 100, "nested more than 64 deep"),
        ("r.yaml", b"dtype: !!python/object/apply:os.system [x]\n", "the tag"),
        ("r.yaml", b"inputs: a.txt\n", "inputs: 'a.txt' is no list"),
        ("r.yaml", b"just words\n", "'just words', which is no recipe"),
        ("r.yaml", b"- a.txt\n", "is a manifest of data sets, not a recipe; give it as an input"),
        ("r.yaml", b"datasets: [{path: a}]\n", "is a manifest of data sets, not a recipe"),
        ("r.yaml", b"dataset: {dataset_path: a}\n", "is a manifest of data sets, not a recipe"),
        ("r.yaml", b"clean: {whitespace: {}}\ninputs: []", "clean: .* is no list of steps"),
        ("r.yaml", b"dedup: no\ninputs: ['-']", "dedup: False is none of none, exact"),
        ("r.yaml", b"dedup: {bands: 3}\ninputs: ['-']", "dedup.mode: missing"),
        (
            "r.yaml",
            b"inputs: ['-']\nclean: [whitespace, lenght]",
            r"r.yaml: clean\[1\]: .* did you mean 'length'",
        ),
    ],
)
def test_files_that_are_no_recipe(folder, name, content, message):
    (folder / name).write_bytes(content)
    with pytest.raises((InputError, InputMissingError, RecordError, SettingsError), match=message) as error:
        read_recipe(name)
    assert name in str(error.value)


def test_paths_that_are_no_recipe(folder):
    os.mkfifo("pipe.yaml")
    start = time.process_time()
    with pytest.raises(InputError, match="it is a pipe or a device"):
        read_recipe("pipe.yaml")
    with open("large.yaml", "wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(InputError, match="more than 32 MiB"):
        read_recipe("large.yaml")
    assert time.process_time() - start < 5
    with pytest.raises(InputMissingError, match=r"did you mean '.*pipe.yaml'\?"):
        read_recipe("pip.yaml")
    with pytest.raises(InputError, match="must be a local path"):
        read_recipe("s3://bucket/r.yaml")
    write("r.yaml", RECIPE)
    with pytest.raises(InputError, match="is a recipe .* give it with --recipe r.yaml"):
        batchloom.prepare("r.yaml", out="out")
    assert not (folder / "out").exists()


def test_two_recipes_into_one_folder(folder):
    write("a.yaml", "inputs: [data/words.jsonl]\ntokenizer: bytes\n")
    write(
        "b.yaml",
        "inputs: [data/words.jsonl]\ntokenizer: bytes\nsplit_on: line\ndedup: exact\nval_fraction: 0.5\n",
    )
    batchloom.prepare(recipe="a.yaml", out="out")
    with pytest.raises(StoreConflictError, match=r"val_fraction: 0.01 -> 0.5; split_on: 'auto' -> 'line'"):
        batchloom.prepare(recipe="b.yaml", out="out")
    assert len(read_texts("out")) == len(TEXTS)


def test_every_setting_has_its_key():
    groups = {"reading", "chat", "inputs", "sources"}
    names = [field.name for group in (Recipe, ReadRecipe, ChatRecipe) for field in fields(group)]
    assert sorted(SETTINGS) == sorted(set(names) - groups)
    recipe, optional_keys = Recipe(inputs=("a",)), {"ignore", "prompts", "carry", "balance_subsets", "follow_links"}
    optional_keys |= {"template_args", "template_date", "tool_format", "tool_arguments", "reasoning"}
    optional_keys |= {"default_system", "train_on_eos", "input_split", "val_from", "encoding", "allow_skipped"}
    optional_keys |= {"include", "exclude"}
    read_recipe = ReadRecipe(
        ignore=("lang",),
        prompts=True,
        carry=("answer",),
        input_split="test",
        val_from="val",
        encoding="gbk",
        include=("*.txt",),
        exclude=("x*",),
        allow_skipped=True,
    )
    chat = ChatRecipe(
        template_args={"a": 1},
        template_date="2026-07-26",
        tool_format="default",
        tool_arguments="parse",
        reasoning="drop",
        default_system="s",
        train_on_eos="all",
    )
    changed = replace(recipe, reading=read_recipe, balance_subsets=False, follow_links=True, chat=chat)
    for printed_recipe, missing in ((recipe, optional_keys), (changed, set())):
        lines = format_recipe(printed_recipe).splitlines()
        keys = [line.split(":")[0] for line in lines if line[0].isalpha()]
        assert keys == [key for key in RECIPE_KEYS if key not in missing]


TEXT = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0"), min_size=1, max_size=8)
# Texts that YAML would parse as other types.
ODD = st.sampled_from(
    [
        "no",
        "yes",
        "null",
        "~",
        "1e5",
        "0x10",
        "1:30",
        "2024-01-02",
        "-",
        "a: b",
        "# c",
        "\n",
        "\t",
        "\x85",
        "\u2028",
        "\ufeff",
        " a",
        "é\U0001f600",
        "!x",
        "*a",
        "&a",
        "{}",
        "1_000",
        "=",
        "<<",
    ]
)
WORD = st.one_of(TEXT, ODD)
FRACTION = st.floats(0, 0.49)
NAMED = WORD.filter(lambda word: "\0" not in word and not os.path.isabs(word) and word[0] not in "~.")
COLUMNS = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"text_field": WORD}),
    st.fixed_dictionaries({"mapping": st.fixed_dictionaries({"prompt": WORD, "response": WORD})}),
)
SOURCES = st.builds(
    lambda columns, ignore, form, name, weight: SourceRecipe(
        **columns, ignore=ignore, data_type=form, name=name, weight=weight
    ),
    COLUMNS,
    st.lists(WORD, max_size=2).map(tuple),
    st.sampled_from([None, "jsonl", "csv"]),
    st.none() | NAMED,
    st.none() | st.floats(1e-9, 1e300),
)
RECIPES = st.builds(
    lambda columns, ignore, split_on, normalize, chat, **said: Recipe(
        reading=ReadRecipe(**columns, ignore=ignore, split_on=split_on, normalize=normalize),
        chat=ChatRecipe(**chat),
        **said,
    ),
    columns=COLUMNS,
    ignore=st.lists(WORD, max_size=2).map(tuple),
    split_on=WORD.filter(lambda word: word.lower().rstrip("s") not in ("auto", "file", "line", "paragraph"))
    | st.just("line"),
    normalize=st.booleans(),
    chat=st.fixed_dictionaries(
        {
            "template": st.none() | st.sampled_from(list(BUILT_IN_TEMPLATES)) | NAMED,
            "template_args": st.dictionaries(
                st.sampled_from(["a", "enable_thinking", "no"]),
                st.none() | st.booleans() | st.integers(-9, 9) | ODD | st.lists(WORD, max_size=2),
                max_size=2,
            ),
            "template_date": st.none() | st.dates().map(str),
            "tool_format": st.sampled_from([None, "default"]),
            "train_on": st.sampled_from([None, "all", "last"]),
            "max_tokens": st.integers(1, 9),
            "overlong": st.sampled_from(["drop", "split"]),
            "prove": st.booleans(),
        }
    ),
    inputs=st.just(("data/words.jsonl", "-", "s3://b/c*.txt", "org/name:config/train@main", "data/*.csv")),
    tokenizer=st.sampled_from(["gpt2", "train:300", "tiktoken:cl100k_base", "org/name"]) | NAMED,
    end_token=st.none() | WORD,
    tokens_per_shard=st.integers(1, 10**12),
    dtype=st.sampled_from(["auto", "int32"]),
    val_fraction=FRACTION,
    test_fraction=FRACTION,
    max_bad=st.sampled_from([0, 5, "7", "0.1%", "100%"]),
)


@settings(max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(recipe=RECIPES, sources=st.lists(SOURCES, min_size=4, max_size=4))
def test_what_is_printed_is_read_as_the_same(folder, recipe, sources):
    # The name of a Hub data set defines its type.
    sources[3] = replace(sources[3], data_type=None)
    # The last source has no settings, so that common settings are not written for each source.
    all_sources = (*sources, SourceRecipe())
    if len({source.name for source in sources if source.name}) == sum(source.name is not None for source in sources):
        recipe = replace(recipe, sources=all_sources if any(source != SourceRecipe() for source in all_sources) else ())
    text = format_recipe(recipe)
    with open("r.yaml", "w", newline="") as file:
        file.write(text)
    assert read_recipe("r.yaml") == recipe
    assert recipe_to_plain(read_recipe("r.yaml")) == recipe_to_plain(recipe)
    values = json.loads(json.dumps(recipe_to_plain(recipe)))
    assert values == recipe_to_plain(recipe)


def test_a_path_that_is_no_text_cannot_be_printed():
    with pytest.raises(InputError, match="holds bytes that are no UTF-8"):
        format_recipe(Recipe(inputs=("a\udcff",)))


SETTING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | WORD,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORD, inner, max_size=3),
    max_leaves=5,
)
STEPS = st.lists(
    st.builds(
        CleanStep,
        WORD.filter(lambda word: "," not in word and word == word.strip() != "none"),
        st.dictionaries(WORD, SETTING, max_size=3),
    ),
    max_size=4,
)


@given(STEPS)
def test_steps_of_cleaning_there_and_back(steps):
    assert parse_clean_steps(clean_steps_to_settings(steps)) == parse_clean_steps(steps) == tuple(steps)


def test_short_forms_of_steps():
    steps = (CleanStep("whitespace"), CleanStep("gopher", {"min_words": 30}))
    assert parse_clean_steps(["whitespace", {"gopher": {"min_words": 30}}]) == steps
    assert (
        parse_clean_steps("whitespace , pii")
        == parse_clean_steps(["whitespace,pii"])
        == parse_clean_steps(["whitespace", {"pii": None}])
    )
    assert parse_clean_steps("none") == parse_clean_steps(None) == parse_clean_steps([]) == ()
    endless = []
    endless.append(endless)
    for value in (float("nan"), endless):
        with pytest.raises(SettingsError, match="cannot be written into a manifest"):
            parse_clean_steps([{"gopher": {"min_words": value}}])


ANY_RECIPE = st.dictionaries(st.sampled_from([*RECIPE_KEYS, "x"]), SETTING | st.lists(SETTING, max_size=3))


@settings(max_examples=examples(200), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ANY_RECIPE, st.sampled_from(["r.json", "r.yaml"]))
def test_whatever_is_written_is_a_recipe_or_an_error_that_says_why(folder, values, name):
    write(name, json.dumps(values))
    with contextlib.suppress(BatchloomError):
        recipe_to_plain(read_recipe(name))


@pytest.mark.parametrize("name", RECIPE_KEYS)
def test_no_setting_takes_a_value_of_any_type(folder, name):
    values = [False, True, 0, 1.5, "x", "", "\ud800", [], [None], [[1]], {}, {"x": None}]
    refused = 0
    for value in values:
        write("r.json", json.dumps({"inputs": "data/words.jsonl"} | {name: value}))
        try:
            recipe_to_plain(read_recipe("r.json"))
        except BatchloomError:
            refused += 1
    assert refused >= len(values) // 2


BANDING = st.fixed_dictionaries({"bands": st.integers(1, 64), "rows": st.integers(1, 64)})
SIMILARITY = st.fixed_dictionaries({"similarity": st.floats(0.05, 1) | st.just(1)})


@given(st.sampled_from(get_args(DedupMode)), BANDING | SIMILARITY, st.integers(1, 1024))
def test_deduplication_there_and_back(mode, banding, shingle):
    banding = {**banding, "shingle": shingle} if mode == "near" else {}
    dedup = DedupRecipe(mode=mode, **banding)
    assert parse_dedup(dedup_to_plain(dedup)) == dedup
    assert not dedup.problems()


@given(st.integers(0, 10**15))
def test_sizes_there_and_back(size):
    assert parse_token_count(str(format_token_count(size))) == size


def test_an_empty_default_system_removes_that_of_a_recipe(tmp_path):
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    write_jsonl(tmp_path / "chat.jsonl", [{"messages": messages}] * 3)
    (tmp_path / "recipe.yaml").write_text("inputs: [chat.jsonl]\ntokenizer: bytes\ndefault_system: Be kind.\n")
    texts = {}
    for name, options in (("kept", {}), ("removed", {"default_system": ""})):
        result = batchloom.prepare(recipe=tmp_path / "recipe.yaml", out=tmp_path / name, val_fraction=0, **options)
        texts[name] = batchloom.open_store(result.path)[0].text
    assert "Be kind." in texts["kept"]
    assert "Be kind." not in texts["removed"]


def test_columns_and_globs_of_an_input_are_read_back_from_its_store(folder):
    write("r.yaml", "inputs: [{path: data, include: notes.csv}]\nmapping: text=body\ntokenizer: bytes\n")
    batchloom.prepare(recipe="r.yaml", out="s")
    recipe = read_recipe("s")
    assert recipe.reading.mapping == {"text": "body"}
    assert recipe.sources[0].include == ("notes.csv",)
    result = batchloom.prepare(recipe="s", out="t")
    assert "t is identical to s, byte for byte." in result.notes
