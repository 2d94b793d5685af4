"""Files of LLaMA-Factory, axolotl and ms-swift as inputs of prepare."""

import json
from dataclasses import fields
from pathlib import Path

import pytest

import batchloom
from batchloom import DatasetConfig, InputError, SettingsError
from batchloom.core.errors import InputMissingError
from batchloom.preparation import make_request
from batchloom.preparation.settings.read_recipe import SourceRecipe
from batchloom.preparation.settings.recipe import ChatRecipe
from batchloom.store import read_manifest
from preparation.stores import write_jsonl

ALPACA = [{"instruction": f"Add {n}.", "input": "" if n % 2 else f"{n} + 1", "output": str(n)} for n in range(40)]
SHAREGPT = [
    {"conversations": [{"from": "human", "value": f"q{n}"}, {"from": "gpt", "value": f"a{n}"}]} for n in range(40)
]
OPENAI = [
    {"messages": [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": f"a{n}"}]} for n in range(40)
]
RANKING = [
    {
        "conversations": [{"from": "human", "value": f"q{n}"}],
        "chosen": {"from": "gpt", "value": "good"},
        "rejected": {"from": "gpt", "value": "bad"},
    }
    for n in range(40)
]
TEXTS = [{"text": f"text {n}", "content": "unused"} for n in range(40)]
DIALOGS = [
    {"dialog": [{"who": "client", "says": f"q{n}"}, {"who": "bot", "says": f"a{n}"}], "tool_list": "[]"}
    for n in range(40)
]
INFO = {
    "identity": {"file_name": "alpaca.jsonl"},
    "sharegpt": {"file_name": "sharegpt.jsonl", "formatting": "sharegpt"},
    "openai": {
        "file_name": "openai.jsonl",
        "formatting": "sharegpt",
        "columns": {"messages": "messages"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
    },
    "dialogs": {
        "file_name": "dialogs.jsonl",
        "formatting": "sharegpt",
        "columns": {"messages": "dialog", "tools": "tool_list"},
        "tags": {"role_tag": "who", "content_tag": "says", "user_tag": "client", "assistant_tag": "bot"},
    },
    "ranking": {
        "file_name": "ranking.jsonl",
        "ranking": True,
        "formatting": "sharegpt",
        "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"},
    },
    "texts": {"file_name": "texts.jsonl", "columns": {"prompt": "text"}},
    "alpaca_en": {"hf_hub_url": "llamafactory/alpaca_en", "ms_hub_url": "llamafactory/alpaca_en", "subset": "small"},
    "few": {"file_name": "alpaca.jsonl", "num_samples": 5},
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Write LLaMA-Factory's folder of data sets, and make its parent the current folder."""
    data = tmp_path / "data"
    data.mkdir()
    for name, records in (("alpaca", ALPACA), ("sharegpt", SHAREGPT), ("openai", OPENAI), ("ranking", RANKING)):
        write_jsonl(data / f"{name}.jsonl", records)
    write_jsonl(data / "texts.jsonl", TEXTS)
    write_jsonl(data / "dialogs.jsonl", DIALOGS)
    (data / "dataset_info.json").write_text(json.dumps(INFO))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path, text):
    path.write_text(text)
    return str(path)


def read_request(*inputs, **options):
    return make_request(list(inputs), options, None)


def read_texts(out):
    """Return the bytes of every document without its control tokens, in the order of the store."""
    store = batchloom.open_store(out)
    return [bytes(token for token in store[n].ids.tolist() if token < 256).decode() for n in range(len(store))]


def list_entries(*inputs):
    """Return the input and the settings that are not default of each data set."""
    recipe = read_request(*inputs).recipe
    sources = recipe.sources or (SourceRecipe(),) * len(recipe.inputs)
    defaults = {"text_field": None, "mapping": {}, "ignore": (), "data_type": None, "name": None, "weight": None}
    defaults |= {"max_samples": None, "num_samples": None}
    return [
        (path, {key: getattr(source, key) for key, value in defaults.items() if getattr(source, key) != value})
        for path, source in zip(recipe.inputs, sources, strict=True)
    ]


UNNAMED = dict.fromkeys(("context", "history", "system", "tools", "label"), "")
SHAREGPT_UNNAMED = dict.fromkeys(("system", "tools", "label"), "")


def test_entries_of_a_dataset_info_become_data_sets(folder):
    names = "identity,openai,dialogs,ranking,texts,alpaca_en,few"
    assert list_entries(f"data/dataset_info.json:{names}") == [
        ("data/alpaca.jsonl", {"name": "identity", "mapping": {"prompt": "instruction", "response": "output"}}),
        (
            "data/openai.jsonl",
            {
                "name": "openai",
                "mapping": {
                    "messages": "messages", **SHAREGPT_UNNAMED, "role": "role", "content": "content",
                    "user": "user", "assistant": "assistant",
                },
            },
        ),
        (
            "data/dialogs.jsonl",
            {
                "name": "dialogs",
                "mapping": {
                    "messages": "dialog", **SHAREGPT_UNNAMED, "tools": "tool_list",
                    "role": "who", "content": "says", "user": "client", "assistant": "bot",
                },
            },
        ),
        (
            "data/ranking.jsonl",
            {
                "name": "ranking",
                "mapping": {
                    "prompt": "conversations", "chosen": "chosen", "rejected": "rejected",
                    **SHAREGPT_UNNAMED,
                },
            },
        ),
        ("data/texts.jsonl", {"name": "texts", "mapping": {"text": "text"}}),
        ("llamafactory/alpaca_en:small/train", {"name": "alpaca_en", "data_type": "hf_dataset", "mapping": {
            "prompt": "instruction", "response": "output"}}),
        (
            "data/alpaca.jsonl",
            {"name": "few", "num_samples": 5, "mapping": {"prompt": "instruction", "response": "output"}},
        ),
    ]  # fmt: skip


def test_all_data_sets_of_a_dataset_info_are_read_without_names(folder):
    info = {name: INFO[name] for name in ("identity", "sharegpt", "openai", "dialogs")}
    write(folder / "data" / "dataset_info.json", json.dumps(info))
    result = batchloom.prepare("data/dataset_info.json", out="store", tokenizer="bytes", val_fraction=0, dedup="none")
    manifest = read_manifest(folder / "store")
    assert [source["name"] for source in manifest.recipe["sources"]] == list(info)
    texts = read_texts("store")
    assert texts[0] == "User:\nAdd 0.\n0 + 1\n\nAssistant:\n0\n"
    assert len(texts) == 160
    assert sum("q7\n" in text for text in texts) == 3
    assert "Detected dialog -> all turns, with tool_list in data/dialogs.jsonl." in result.notes


def test_an_entry_that_is_no_file_is_read_by_name_alone(folder):
    info = {**INFO, "lost": {"file_name": "lost.jsonl"}, "code": {"script_url": "x.py"}}
    path = write(folder / "data" / "dataset_info.json", json.dumps(info))
    with pytest.raises(SettingsError) as caught:
        read_request("data/dataset_info.json")
    no_file = (
        "is no file or folder, and a data set of the Hub is read only by name; name the data sets to read: "
        "data/dataset_info.json:NAME,NAME"
    )
    assert [problem.removeprefix("data/dataset_info.json: ") for problem in caught.value.problems[:2]] == [
        f"alpaca_en: llamafactory/alpaca_en {no_file}",
        f"lost: lost.jsonl {no_file}",
    ]
    assert "code.script_url: 'x.py' is not supported" in caught.value.problems[2]
    assert len(list_entries(f"{path}:identity,alpaca_en")) == 2


def test_a_number_after_the_name_of_a_data_set_reads_random_records(folder):
    assert [settings.get("num_samples") for _, settings in list_entries("data/dataset_info.json:openai#7,texts")] == [
        7,
        None,
    ]
    for count in ("0", "x", ""):
        with pytest.raises(SettingsError, match=f"openai#{count}: '{count}' is not a number of records of at least 1"):
            read_request(f"data/dataset_info.json:openai#{count}")


def test_a_folder_with_a_dataset_info_is_read_as_files_with_a_note(folder):
    data = folder / "data"
    for name in ("dialogs", "ranking", "texts"):
        (data / f"{name}.jsonl").unlink()
    result = batchloom.prepare("data", out="store", tokenizer="bytes", val_fraction=0)
    assert result.notes[1] == (
        "data is read as a folder of files, without the columns and roles of data/dataset_info.json; give "
        "data/dataset_info.json to read its data sets, or data/dataset_info.json:NAME,NAME for some of them."
    )
    (data / "dataset_info.json").write_text(json.dumps({"builder_name": "json", "features": {"text": {}}}))
    result = batchloom.prepare("data", out="other", tokenizer="bytes", val_fraction=0)
    assert not any("dataset_info.json to read" in note for note in result.notes)
    (data / "dataset_info.json").write_text("not JSON")
    assert not any("dataset_info" in note for note in batchloom.prepare("data", out="third", tokenizer="bytes").notes)


def test_columns_that_a_dataset_info_does_not_name_are_not_read(folder):
    records = [{"instruction": f"i{n}", "input": "left out", "output": "o", "system": "left out"} for n in range(10)]
    write_jsonl(folder / "data" / "more.jsonl", records)
    columns = {"prompt": "instruction", "response": "output"}
    info = {"more": {"file_name": "more.jsonl", "columns": columns}}
    write(folder / "data" / "dataset_info.json", json.dumps(info))
    batchloom.prepare("data/dataset_info.json:more", out="store", tokenizer="bytes", val_fraction=0)
    assert not any("left out" in text for text in read_texts("store"))
    info["more"]["columns"] = {**columns, "query": "input", "system": "system"}
    write(folder / "data" / "dataset_info.json", json.dumps(info))
    batchloom.prepare("data/dataset_info.json:more", out="store2", tokenizer="bytes", val_fraction=0)
    assert all(text.count("left out") == 2 for text in read_texts("store2"))


JOB = """
model_name_or_path: bytes
stage: sft
do_train: true
finetuning_type: lora
dataset: identity,openai
template: qwen
cutoff_len: 2048
max_samples: 10
overwrite_cache: true
preprocessing_num_workers: 16
learning_rate: 1.0e-4
"""


def test_a_job_of_llamafactory_is_read_as_it_is(folder):
    job = write(folder / "sft.yaml", JOB)
    result = batchloom.prepare(job, out="store", val_fraction=0)
    assert [text.split("\n")[1] for text in read_texts("store")] == [
        *(f"Add {n}." for n in range(10)),
        *(f"q{n}" for n in range(10)),
    ]
    assert f"{job}: taken: model_name_or_path (--tokenizer bytes), no val_size (--val-fraction 0)." in result.notes
    assert any(
        note.startswith(f"{job}: not taken: cutoff_len (") and "template qwen (" in note for note in result.notes
    )
    assert read_request(job).recipe.tokenizer == "bytes"


def list_chat_settings(recipe):
    """Return the settings of conversations that are not default."""
    default = ChatRecipe()
    return {
        field.name: getattr(recipe.chat, field.name)
        for field in fields(ChatRecipe)
        if getattr(recipe.chat, field.name) != getattr(default, field.name)
    }


@pytest.mark.parametrize(
    ("text", "settings", "note"),
    [
        ("train_on_prompt: true", {"train_on": "all"}, "train_on_prompt (--train-on all)"),
        ("mask_history: true", {"train_on": "last"}, ""),
        ("tool_format: glm4", {"tool_format": "glm4"}, ""),
        ("tool_format: glm4_moe", {}, "tool_format (the template of its models writes the tools)"),
        ("enable_thinking: false", {"template_args": {"enable_thinking": False}}, "the removal of thoughts by"),
        ("enable_thinking: null", {"template_args": {"enable_thinking": False}}, "the removal of thoughts by"),
        ("enable_thinking: true", {}, ""),
        ("template: llama3", {"template": "llama3"}, "template (--template llama3)"),
        ("default_system: Be brief.", {"default_system": "Be brief."}, "default_system (--default-system 'Be brief.')"),
        ("train_on_prompt: false\nmask_history: false\ntool_format: null", {}, "cutoff_len (it cuts the question and"),
    ],
)
def test_settings_of_a_job_become_settings_of_the_recipe(folder, text, settings, note):
    job = write(folder / "sft.yaml", f"{JOB.replace('template: qwen', '')}{text}\n")
    request = read_request(job)
    assert list_chat_settings(request.recipe) == settings
    assert note in "".join(request.notes)
    overridden = read_request(job, train_on="assistant")
    assert overridden.recipe.chat.train_on == "assistant"
    assert any(f"overridden by options: {text.partition(':')[0]}." in note for note in overridden.notes) == (
        "train_on" in settings
    )


@pytest.mark.parametrize(
    ("text", "share", "note"),
    [
        ("stage: sft\nval_size: 0.1", 0.1, "val_size (--val-fraction 0.1)"),
        ("stage: sft\nval_size: 0", 0.0, "val_size (--val-fraction 0)"),
        # Without a share these libraries split nothing off.
        ("stage: sft", 0.0, "no val_size (--val-fraction 0)"),
        ("stage: sft\nval_size: 100", 0.01, "val_size (a number of records; give a share with --val-fraction)"),
        ("base_model: bytes\nval_set_size: 0.1", 0.1, "val_set_size (--val-fraction 0.1)"),
        ("base_model: bytes", 0.0, "no val_set_size (--val-fraction 0)"),
        ("model: bytes\nsplit_dataset_ratio: 0.1", 0.1, "split_dataset_ratio (--val-fraction 0.1)"),
        ("model: bytes\nsplit_dataset_ratio: 0.1\nval_dataset: [a]", 0.0, "val_dataset (--val-fraction 0)"),
    ],
)
def test_the_validation_share_of_a_job_is_that_of_the_recipe(folder, text, share, note):
    datasets = "datasets: [{path: data/openai.jsonl}]" if "base_model" in text else "dataset: data/openai.jsonl"
    job = write(folder / "job.yaml", f"{text}\n{'dataset: openai' if 'stage' in text else datasets}\n")
    request = read_request(job)
    assert request.recipe.val_fraction == share
    assert note in "".join(request.notes)
    assert read_request(job, val_fraction=0.5).recipe.val_fraction == 0.5


def test_pretraining_reads_the_prompt_as_text(folder):
    job = write(folder / "pt.yaml", JOB.replace("stage: sft", "stage: pt").replace("identity,openai", "texts,identity"))
    assert [settings["mapping"] for _, settings in list_entries(job)] == [{"text": "text"}, {"text": "instruction"}]


def test_the_folder_of_data_sets_begins_in_the_current_folder_or_that_of_the_job(folder):
    (folder / "jobs" / "sets").mkdir(parents=True)
    job = write(folder / "jobs" / "sft.yaml", f"{JOB}dataset_dir: sets\n")
    with pytest.raises(InputMissingError, match=r"no sets/dataset_info.json and no .*jobs/sets/dataset_info.json"):
        read_request(job)
    write_jsonl(folder / "jobs" / "sets" / "alpaca.jsonl", ALPACA)
    write_jsonl(folder / "jobs" / "sets" / "openai.jsonl", OPENAI)
    write(folder / "jobs" / "sets" / "dataset_info.json", json.dumps(INFO))
    assert [path for path, _ in list_entries(job)] == [
        str(folder / "jobs" / "sets" / f"{name}.jsonl") for name in ("alpaca", "openai")
    ]


BAD_ENTRIES = [
    ({"script_url": "x.py"}, "bad.script_url: 'x.py' is not supported; it names code to run"),
    ({"ms_hub_url": "x/y"}, "bad.ms_hub_url: 'x/y' is not supported; only the Hugging Face Hub is read"),
    ({"file_name": "a.jsonl", "folder": "x"}, "bad.folder: 'x' is not supported"),
    ({}, "bad: has no file_name and no hf_hub_url"),
    ({"file_name": 5}, "bad.file_name: 5 is not a text"),
    ({"file_nam": "a"}, "bad.file_nam: unknown setting; did you mean 'file_name'?"),
    ({"file_name": "a", "formatting": "sharegtp"}, "bad.formatting: 'sharegtp' is none of alpaca, sharegpt, openai"),
    ({"file_name": "a", "ranking": "yes"}, "bad.ranking: 'yes' is not true or false"),
    ({"file_name": "a", "ranking": True}, "bad.columns.chosen: missing; formatting alpaca and ranking needs it"),
    ({"file_name": "a", "columns": ["q"]}, 'bad.columns: ["q"] is not a mapping'),
    ({"file_name": "a", "columns": {"promt": "q"}}, "bad.columns.promt: unknown setting; did you mean 'prompt'?"),
    ({"file_name": "a", "columns": {"prompt": 5}}, "bad.columns.prompt: 5 is not a text"),
    ({"file_name": "a", "formatting": "sharegpt", "columns": {"tools": "t"}}, "bad.columns.messages: missing"),
    ({"file_name": "a", "formatting": "sharegpt", "tags": {"role": "r"}}, "bad.tags.role: unknown setting"),
    ({"file_name": "a", "split": "test"}, "bad.split: 'test' is not 'train', the only split of a file"),
    ({"file_name": "a", "num_samples": -1}, "bad.num_samples: -1 is not a whole number above 0"),
    ("a.jsonl", "bad: 'a.jsonl' is not a mapping"),
]


@pytest.mark.parametrize(("entry", "problem"), BAD_ENTRIES)
def test_wrong_entries_are_refused_in_one_line(folder, entry, problem):
    path = write(folder / "data" / "dataset_info.json", json.dumps({"bad": entry}))
    with pytest.raises(SettingsError) as caught:
        DatasetConfig.load(path)
    assert [text for text in caught.value.problems if problem in text]
    assert all(text.startswith(f"{path}: bad") for text in caught.value.problems)


def test_all_problems_of_a_file_are_reported_at_once(folder):
    bad = {f"bad{n}": entry for n, (entry, _) in enumerate(BAD_ENTRIES)}
    path = write(folder / "data" / "dataset_info.json", json.dumps(bad))
    with pytest.raises(SettingsError) as caught:
        DatasetConfig.load(path)
    assert len(caught.value.problems) >= len(bad)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("dataset: idenity", SettingsError, "there is no such data set; did you mean 'identity'?"),
        ("dataset: []", SettingsError, "dataset: there are none"),
        ("dataset: identity\nmax_sample: 5", SettingsError, "max_sample: unknown setting; did you mean 'max_samples'?"),
        ("dataset: identity\nmax_samples: none", SettingsError, "max_samples: 'none' is not a whole number above 0"),
        ("dataset: identity\ndefault_system: 5", SettingsError, "default_system: 5 is not a text"),
        ("dataset: identity\ndataset_dir: ONLINE", InputError, "dataset_dir ONLINE names no folder"),
        ("dataset: identity\ndataset_dir: 5", SettingsError, "dataset_dir: 5 is not a text"),
        ("dataset: identity\ntool_format: qwn", SettingsError, "'qwn' is none of .*; did you mean 'qwen'?"),
        ("dataset: identity\ntool_format: hermes", SettingsError, "tool_format: 'hermes' is none of"),
        ("dataset: identity\ntool_format: [qwen]", SettingsError, "tool_format: .* is not a text"),
        ("dataset: identity\nenable_thinking: 0", SettingsError, "enable_thinking: 0 is not true or false"),
        ("dataset: identity\nmask_history: 1", SettingsError, "mask_history: 1 is not true or false"),
        ("dataset: identity\nmask_history: true\ntrain_on_prompt: true", SettingsError, "mask_history: contradicts"),
    ],
)
def test_wrong_jobs_are_refused(folder, text, error, message):
    job = write(folder / "sft.yaml", f"stage: sft\n{text}\n")
    with pytest.raises(error, match=message.replace("?", r"\?").replace("(", r"\(")):
        read_request(job)


@pytest.mark.parametrize("key", ["mask_history", "train_on_prompt"])
def test_what_conversations_train_is_not_taken_for_rankings(folder, key):
    job = JOB.replace("stage: sft", "stage: dpo").replace("identity,openai", "ranking")
    request = read_request(write(folder / "dpo.yaml", f"{job}{key}: true\n"))
    assert list_chat_settings(request.recipe) == {}
    assert f"{key} (LLaMA-Factory uses it in the stage sft alone)" in "".join(request.notes)


def test_the_description_of_a_saved_data_set_is_not_taken_for_a_list_of_data_sets(folder):
    path = write(folder / "dataset_info.json", json.dumps({"builder_name": "json", "features": {}}))
    with pytest.raises(InputError, match="describes a saved data set; name its folder instead"):
        read_request(path)


AXOLOTL = """
base_model: bytes
load_in_8bit: false
datasets:
  - path: data/dialogs.jsonl
    type: chat_template
    ds_type: json
    split: train[:20]
    field_messages: dialog
    message_property_mappings: {role: who, content: says}
    roles:
      assistant: [bot, gpt]
      user: [client]
    roles_to_train: ["assistant"]
    train_on_eos: turn
  - path: data/texts.jsonl
    type: completion
    field: text
chat_template: plain
val_set_size: 0.0
sequence_len: 4096
sample_packing: true
"""


def test_a_configuration_of_axolotl_is_read_as_it_is(folder):
    config = write(folder / "lora.yml", AXOLOTL.replace("chat_template: plain", "chat_template: tokenizer_default"))
    result = batchloom.prepare(config, out="store", val_fraction=0)
    texts = read_texts("store")
    assert [text for text in texts if text.startswith("text")] == [f"text {n}" for n in range(40)]
    assert len(texts) == 60
    assert f"{config}: not taken: sample_packing (a setting of the loader)." in result.notes
    assert any("sequence_len (--max-tokens 4096), val_set_size (--val-fraction 0)." in note for note in result.notes)


AXOLOTL_TYPES = [
    ({"type": "chat_template"}, {"messages": "messages"}),
    ({"type": "chat_template", "field_tools": "t", "field_thinking": "thoughts", "message_field_training": "learn"},
     {"messages": "messages", "tools": "t", "reasoning_content": "thoughts", "train": "learn"}),
    ({"type": "chat_template", "message_field_training": "train", "message_field_training_detail": "train_detail"},
     {"messages": "messages"}),
    ({"type": "chat_template", "message_field_training_detail": "ranges"},
     {"messages": "messages", "train_detail": "ranges"}),
    ({"type": "input_output"}, {"segments": "segments"}),
    ({"type": "chat_template", "roles": {"system": ["narrator"], "tool": ["ipython"]}},
     {"messages": "messages", "tool": "ipython", "system_role": "narrator"}),
    ({"type": "chat_template.default", "field_messages": "m", "field_chosen": "c"},
     {"prompt": "m", "chosen": "c", "rejected": "rejected"}),
    ({"type": "chat_template.argilla_chat"}, {"chosen": "chosen", "rejected": "rejected"}),
    ({"type": "completion", "field": "body"}, {"text": "body"}),
    ({"type": "completion"}, {"text": "text"}),
    ({"type": "stepwise_supervised", "step_separator": "\n", "train_on_last_step_only": False},
     {"prompt": "prompt", "completions": "completions", "labels": "labels"}),
    ({"type": "alpaca"}, {"prompt": "instruction", "response": "output"}),
    ({"type": "alpaca_chat.load_qa"}, {"prompt": "question", "response": "answer"}),
    ({"type": "chatml.intel"}, {"prompt": "question", "chosen": "chosen", "rejected": "rejected"}),
]  # fmt: skip


@pytest.mark.parametrize(("entry", "mapping"), AXOLOTL_TYPES)
def test_types_of_axolotl_name_columns(folder, entry, mapping):
    text = f"base_model: bytes\ndatasets: [{json.dumps({'path': 'data/texts.jsonl', **entry})}]\n"
    recipe = read_request(write(folder / "a.yml", text)).recipe
    assert recipe.reading.mapping == mapping


def test_places_of_axolotl_are_files_repositories_and_urls(folder):
    datasets = [
        {"path": "org/name", "name": "small", "split": "test", "type": "completion"},
        {"path": "org/name", "name": ["a", "b"], "split": "train[:9]", "type": "completion"},
        {"path": "org/name", "data_files": ["x/a.jsonl"], "revision": "main", "type": "completion"},
        {"path": "json", "data_files": "data/texts.jsonl", "type": "completion"},
        {"path": "https://example.org/a.jsonl", "type": "completion"},
    ]
    (folder / "configs").mkdir()
    config = write(folder / "configs" / "a.yml", f"base_model: bytes\ndatasets: {json.dumps(datasets)}\n")
    assert list_entries(config) == [
        ("org/name:small/test", {}),
        ("org/name:a/train", {"max_samples": 9}),
        ("org/name:b/train", {"max_samples": 9}),
        ("hf://datasets/org/name@main/x/a.jsonl", {}),
        # As in axolotl, a path may begin in the current folder.
        (str(folder / "data" / "texts.jsonl"), {}),
        ("https://example.org/a.jsonl", {}),
    ]


def test_the_template_of_axolotl_is_that_of_the_recipe(folder):
    text = "base_model: bytes\nchat_template: {}\ndatasets: [{{path: data/openai.jsonl, type: chat_template{}}}]\n"
    for name, template in (("chatml", "chatml"), ("tokenizer_default", None), ("gemma", None)):
        request = read_request(write(folder / "a.yml", text.format(name, "")))
        assert request.recipe.chat.template == template
        assert any("chat_template gemma (it is axolotl's own" in note for note in request.notes) == (name == "gemma")
    write(folder / "t.jinja", "{{ messages }}")
    jinja = text.format("jinja\nchat_template_jinja: t.jinja", "")
    assert read_request(write(folder / "a.yml", jinja)).recipe.chat.template == "t.jinja"
    (folder / "job").mkdir()
    (folder / "t.jinja").rename(folder / "job" / "t.jinja")
    config = write(folder / "job" / "a.yml", jinja.replace("data/", f"{folder}/data/"))
    adjacent = read_request(config).recipe.chat.template
    assert Path(adjacent) == folder / "job" / "t.jinja"
    two = text.format("chatml", "}, {path: data/dialogs.jsonl, type: chat_template, chat_template: llama3")
    with pytest.raises(
        SettingsError, match=r"datasets\[1\].chat_template: llama3 differs from chatml of datasets\[0\]"
    ):
        read_request(write(folder / "a.yml", two))


CHAT = {"type": "chat_template"}
SEGMENTS = {"type": "input_output"}
PAIRS = {"type": "chatml.intel"}
ALL_ROLES = "system,developer,user,assistant,tool"


@pytest.mark.parametrize(
    ("entries", "job", "settings"),
    [
        ([{**CHAT, "roles_to_train": ["assistant"], "train_on_eos": "turn"}], {}, {}),
        ([{**CHAT, "roles_to_train": None, "train_on_eos": None}], {}, {}),
        ([{**CHAT, "roles_to_train": ["gpt", "human", "user"]}], {}, {"train_on": "assistant,user"}),
        ([{**CHAT, "roles_to_train": ["bot"], "roles": {"tool": ["bot"]}}], {}, {"train_on": "tool"}),
        ([{**CHAT, "roles_to_train": []}], {}, {"train_on": "flagged"}),
        ([{**CHAT, "train_on_eos": "all"}], {}, {"train_on_eos": "all"}),
        ([{**CHAT, "train_on_eos": "last", "train_on_eot": "last"}], {}, {"train_on_eos": "last"}),
        ([{**CHAT, "roles_to_train": ["user"]}], {"train_on_inputs": True}, {"train_on": ALL_ROLES}),
        ([SEGMENTS], {"train_on_inputs": True}, {"train_on": "all"}),
        ([{"type": "alpaca"}], {"train_on_inputs": True}, {"train_on": "all"}),
        ([PAIRS, {"type": "completion"}], {"train_on_inputs": True}, {}),
        ([{**CHAT, "train_on_eos": "none"}, SEGMENTS, PAIRS], {}, {"train_on_eos": "none"}),
        ([CHAT], {"chat_template_kwargs": {"enable_thinking": False}}, {"template_args": {"enable_thinking": False}}),
        ([CHAT], {"sequence_len": 512}, {"max_tokens": 512}),
        (
            [CHAT],
            {"sequence_len": 512, "excess_length_strategy": "truncate"},
            {"max_tokens": 512, "overlong": "truncate"},
        ),
        (
            [CHAT],
            {"sequence_len": 512, "excess_length_strategy": "raise"},
            {"max_tokens": 512, "overlong": "error"},
        ),
    ],
)
def test_settings_of_axolotl_become_settings_of_the_recipe(folder, entries, job, settings):
    datasets = [{"path": "data/texts.jsonl", **entry} for entry in entries]
    config = write(folder / "a.yml", json.dumps({"base_model": "bytes", "datasets": datasets, **job}))
    assert list_chat_settings(read_request(config).recipe) == settings


@pytest.mark.parametrize(
    ("entries", "job", "problem"),
    [
        (
            [CHAT, {**CHAT, "roles_to_train": ["user"]}],
            {},
            "datasets[1].roles_to_train: user differs from assistant of datasets[0], and a store has one train_on;",
        ),
        (
            [{"type": "alpaca"}, {**CHAT, "roles_to_train": ["user"]}],
            {},
            "datasets[1].roles_to_train: user differs from assistant of datasets[0]",
        ),
        (
            [SEGMENTS, CHAT],
            {"train_on_inputs": True},
            f"datasets[1].roles_to_train: {ALL_ROLES} differs from all of datasets[0]",
        ),
        (
            [CHAT, {**CHAT, "train_on_eos": "all"}],
            {},
            "datasets[1].train_on_eos: all differs from turn of datasets[0], and a store has one train_on_eos;",
        ),
        ([CHAT], {"train_on_inputs": "yes"}, "train_on_inputs: 'yes' is not true or false"),
        ([CHAT], {"chat_template_kwargs": "x"}, "chat_template_kwargs: 'x' is not a mapping"),
        ([CHAT], {"chat_template_kwargs": {"tools": 1}}, "template_args: tools is a name that templates get from"),
        ([CHAT], {"sequence_len": -1}, "sequence_len: -1 is not a whole number above 0"),
        ([CHAT], {"excess_length_strategy": "cut"}, "excess_length_strategy: 'cut' is none of drop, truncate, raise"),
    ],
)
def test_wrong_settings_of_axolotl_are_refused(folder, entries, job, problem):
    datasets = [{"path": "data/texts.jsonl", **entry} for entry in entries]
    config = write(folder / "a.yml", json.dumps({"base_model": "bytes", "datasets": datasets, **job}))
    with pytest.raises(SettingsError) as caught:
        read_request(config)
    assert [text for text in caught.value.problems if problem in text]


def test_a_policy_without_a_length_is_reported(folder):
    text = "base_model: bytes\nexcess_length_strategy: truncate\ndatasets: [{path: data/openai.jsonl}]\n"
    notes = read_request(write(folder / "a.yml", text)).notes
    assert any("excess_length_strategy (not used without sequence_len" in note for note in notes)


FLAGGED = [
    {"from": "human", "value": "Trained?", "learn": True, "ranges": None},
    {"from": "gpt", "value": "Without a flag.", "learn": None, "ranges": None},
    {"from": "human", "value": "And this?", "learn": None, "ranges": None},
    {
        "from": "gpt",
        "value": "Partly.",
        "learn": None,
        "ranges": [{"begin_offset": 0, "end_offset": 3, "train": True}],
    },
]


def test_flags_of_axolotl_under_other_names_select_what_is_trained(folder):
    write_jsonl(folder / "data" / "flagged.jsonl", [{"conversations": FLAGGED, "id": n} for n in range(4)])
    entry = {
        **CHAT,
        "path": "data/flagged.jsonl",
        "field_messages": "conversations",
        "message_property_mappings": {"role": "from", "content": "value"},
        "roles_to_train": [],
        "train_on_eos": "turn",
        "message_field_training": "learn",
        "message_field_training_detail": "ranges",
    }
    config = write(folder / "a.yml", json.dumps({"base_model": "bytes", "datasets": [entry]}))
    batchloom.prepare(config, out="store", val_fraction=0, dedup="none")
    document = batchloom.open_store("store")[0]
    assert document.trained_text == "Trained?Part<|endoftext|>"


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"type": "alpacca"}, "datasets[0].type: 'alpacca' is not read; did you mean 'alpaca'?"),
        ({"step_separator": " "}, "datasets[0].step_separator: ' ' is not supported; a line end follows each step"),
        ({"type": 5}, "datasets[0].type: 5 is not read"),
        ({"fild": "x"}, "datasets[0].fild: unknown setting; did you mean 'field'?"),
        ({"roles_to_train": ["usr"]}, "datasets[0].roles_to_train: 'usr' is none of system, developer, user, assist"),
        ({"roles_to_train": "user,"}, "datasets[0].roles_to_train: 'user,' is none of"),
        ({"roles_to_train": [5]}, "datasets[0].roles_to_train: [5] is not a list of texts"),
        ({"train_on_eos": "every"}, "datasets[0].train_on_eos: 'every' is none of turn, all, last, none"),
        ({"train_on_eot": "all"}, "datasets[0].train_on_eot: 'all' differs from train_on_eos, which is 'turn'"),
        ({"message_field_training_detail": 5}, "datasets[0].message_field_training_detail: 5 is not a text"),
        ({"shards": 4}, "datasets[0].shards: 4 is not supported"),
        ({"trust_remote_code": True}, "datasets[0].trust_remote_code: true is not supported; code of data sets never"),
        ({"split": "train[10%:]"}, "datasets[0].split: 'train[10%:]' is not supported"),
        ({"ds_type": "jsn"}, "datasets[0].ds_type: 'jsn' is none of json, jsonl, text, csv, parquet, arrow; did you"),
        ({"roles": {"user": 5}}, "datasets[0].roles.user: 5 is not a list of texts"),
        ({"roles": {"usr": ["a"]}}, "datasets[0].roles.usr: unknown setting; did you mean 'user'?"),
        ({"message_property_mappings": {"name": "n"}}, "message_property_mappings.name: only role, content,"),
        ({"message_field_role": "b"}, "message_field_role: 'b' is not supported; write message_property_mappings"),
        (
            {"type": {"format": "[INST] {instruction}"}},
            'datasets[0].type: {"format": "[INST] {instruction}"} is not read',
        ),
        ({"path": None}, "datasets[0].path: missing"),
    ],
)
def test_wrong_entries_of_axolotl_are_refused(folder, entry, problem):
    values = {"path": "data/texts.jsonl", "type": "chat_template", **entry}
    config = write(folder / "a.yml", f"base_model: bytes\ndatasets: [{json.dumps(values)}, 5]\n")
    with pytest.raises(SettingsError) as caught:
        read_request(config)
    assert [text for text in caught.value.problems if problem in text]
    assert f"{config}: datasets[1]: 5 is not a mapping" in caught.value.problems


def test_a_job_of_ms_swift_is_read_as_it_is(folder):
    text = """
    model: bytes
    train_type: lora
    dataset: ['data/openai.jsonl#10', 'hf::org/name:a/b', 'org/name']
    dataset_num_proc: 4
    """
    request = read_request(write(folder / "swift.yaml", text))
    assert list_entries(str(folder / "swift.yaml")) == [
        (str(folder / "data" / "openai.jsonl"), {"num_samples": 10}),
        ("org/name:a", {}),
        ("org/name:b", {}),
        ("org/name", {}),
    ]
    assert request.recipe.tokenizer == "bytes"
    first = text.replace("dataset_num_proc: 4", "dataset_shuffle: false")
    assert list_entries(write(folder / "first.yaml", first))[0][1] == {"max_samples": 10}


@pytest.mark.parametrize(
    ("text", "settings", "note"),
    [
        ("loss_scale: default", {}, ""),
        ("loss_scale: last_round", {"train_on": "last"}, ""),
        ("loss_scale: all", {"train_on": "all"}, ""),
        ("loss_scale: last_round\nrlhf_type: dpo", {}, "loss_scale (preferences train the last answer alone)"),
        ("system: Be\\nbrief.", {"default_system": "Be\nbrief."}, "system (--default-system 'Be"),
        ("template: llama3", {"template": "llama3"}, "template (--template llama3)"),
        ("template: qwen2_5", {}, "template qwen2_5 (it is ms-swift's own; the tokenizer's chat template is used"),
        ("agent_template: hermes", {"tool_format": "hermes"}, ""),
        ("agent_template: qwen3_coder", {}, "agent_template (the model's own chat template writes the tools)"),
        ("enable_thinking: true", {}, "enable_thinking (set the variable of the chat template"),
        ("max_length: 512", {"max_tokens": 512}, ""),
        ("max_length: 512\ntruncation_strategy: delete", {"max_tokens": 512}, ""),
        ("max_length: 512\ntruncation_strategy: left", {"max_tokens": 512, "overlong": "truncate-left"}, ""),
        ("max_length: 512\ntruncation_strategy: right", {"max_tokens": 512, "overlong": "truncate"}, ""),
        ("max_length: 512\ntruncation_strategy: split", {"max_tokens": 512, "overlong": "split"}, ""),
        ("truncation_strategy: left", {}, "truncation_strategy (not used without max_length"),
    ],
)
def test_settings_of_ms_swift_become_settings_of_the_recipe(folder, text, settings, note):
    request = read_request(write(folder / "swift.yaml", f"model: bytes\ndataset: data/openai.jsonl\n{text}\n"))
    assert list_chat_settings(request.recipe) == settings
    assert note in "".join(request.notes)


def test_columns_of_ms_swift_name_roles(folder):
    text = "dataset: data/texts.jsonl\ncolumns: {content: query, text: response}\n"
    assert read_request(write(folder / "swift.yaml", text)).recipe.reading.mapping == {
        "prompt": "content",
        "response": "text",
    }


def test_a_dataset_info_of_ms_swift_is_read(folder):
    info = [
        {"dataset_path": "texts.jsonl", "dataset_name": "mine", "columns": {"text": "query", "content": "response"}},
        {"hf_dataset_id": "org/name", "subsets": ["a", "b"], "tags": ["chat"]},
        {"dataset_path": "dialogs.jsonl", "columns": {"dialog": "messages"}, "messages": {
            "role_key": "who", "content_key": "says", "user_role": "client", "assistant_role": "bot"}},
    ]  # fmt: skip
    path = write(folder / "data" / "dataset_info.json", json.dumps(info))
    assert list_entries(f"{path}:mine,org/name") == [
        (str(folder / "data" / "texts.jsonl"), {"name": "mine", "mapping": {"prompt": "text", "response": "content"}}),
        ("org/name:a", {}),
        ("org/name:b", {}),
    ]
    batchloom.prepare(f"{path}:dialogs.jsonl", out="store", tokenizer="bytes", val_fraction=0)
    assert len(read_texts("store")) == 40


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("dataset: ['a.jsonl#x']", "'a.jsonl#x': 'x' is not a number of records"),
        ("dataset: ['a.jsonl#0']", "'a.jsonl#0': '0' is not a number of records"),
        ("dataset: ['ms::org/name']", "only the Hugging Face Hub is read"),
        ("dataset: ['org/name:a/b#5']", "5 records of all subsets together are not supported"),
        ("dataset: [5]", "dataset: [5] is not a list of texts"),
        ("dataset: []", "dataset: there are none"),
        ("dataset: a\ncolumns: {a: qury}", "columns.a: 'qury' is none of query,"),
        ("dataset: a\ndata_seed: 7", "data_seed: 7 is not supported"),
        ("dataset: a\ndataset_shufle: true", "dataset_shufle: unknown setting; did you mean 'dataset_shuffle'?"),
        ("dataset: a\nagent_template: react_en", "agent_template: 'react_en' has no equal --tool-format; hermes has"),
        ("dataset: a\nloss_scale: hermes", "loss_scale: 'hermes' is none of default, last_round, all; weights by patt"),
        ("dataset: a\nloss_scale: default+ignore_empty_think", "loss_scale: 'default+ignore_empty_think' is none of"),
        ("dataset: a\nloss_scale: 2", "loss_scale: 2 is not a text"),
        ("dataset: a\nsystem: s.txt", "system: 's.txt' names a file; write its text here"),
        ("dataset: a\nmax_length: '5'", "max_length: '5' is not a whole number above 0"),
        (
            "dataset: a\ntruncation_strategy: rigth",
            "'rigth' is none of delete, right, left, split; did you mean 'right'",
        ),
        ("dataset: a\nsplit_dataset_ratio: 2", "split_dataset_ratio: 2 is not a share below 1"),
    ],
)
def test_wrong_jobs_of_ms_swift_are_refused(folder, text, problem):
    with pytest.raises(SettingsError) as caught:
        read_request(write(folder / "swift.yaml", f"model: bytes\n{text}\n"))
    assert [line for line in caught.value.problems if problem in line]


def test_files_with_contradicting_settings_do_not_make_one_store(folder):
    first = write(folder / "a.yml", AXOLOTL.replace("chat_template: plain", "chat_template: chatml"))
    second = write(folder / "b.yml", AXOLOTL.replace("chat_template: plain", "chat_template: llama3"))
    message = r"a.yml says --template chatml \(chat_template\) and .*b.yml --template llama3 \(chat_template\), but a"
    with pytest.raises(InputError, match=message):
        read_request(first, second)
    assert read_request(first, second, template="plain").recipe.chat.template == "plain"


@pytest.mark.parametrize("place", ["column", "message"])
def test_an_unknown_key_in_every_record_is_one_line(folder, place):
    records = [
        {**({"mood": "calm"} if place == "column" else {}), "messages": [
            {"role": "user", "content": f"q{n}", **({"mood": "calm"} if place == "message" else {})},
            {"role": "assistant", "content": "a"}]}
        for n in range(1500)
    ]  # fmt: skip
    write_jsonl(folder / "many.jsonl", records)
    result = batchloom.prepare("many.jsonl", out="store", tokenizer="bytes", val_fraction=0)
    assert sum("mood" in note for note in result.notes) == 1
    assert (folder / "store" / "quarantine.jsonl").read_text() == ""


def test_an_unsupported_key_in_every_later_record_is_one_line(folder):
    records = [{"messages": OPENAI[0]["messages"], **({"functions": ["x"]} if n > 200 else {})} for n in range(1500)]
    write_jsonl(folder / "many.jsonl", records)
    with pytest.raises(InputError) as caught:
        batchloom.prepare("many.jsonl", out="store", tokenizer="bytes", val_fraction=0)
    assert str(caught.value).count("column 'functions'") == 1
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (
            "{field_instruction: question, field_output: answer}",
            r'datasets\[0\].type: \{"field_instruction": .* is not read',
        ),
        ("[x]", r"datasets\[0\].type: \['x'\] is none of text, "),
    ],
)
def test_a_type_that_is_no_name_is_refused(folder, kind, problem):
    job = write(folder / "job.yml", f"datasets: [{{path: alpaca.jsonl, type: {kind}}}]")
    with pytest.raises(SettingsError, match=problem):
        read_request(job)


def test_a_role_that_is_no_text_is_refused():
    with pytest.raises(SettingsError, match=r"datasets\[0\].mapping.5: unknown role; roles are prompt, "):
        DatasetConfig(datasets=[{"path": "texts.jsonl", "mapping": {5: "text"}}])
