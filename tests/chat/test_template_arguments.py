"""Template arguments of jobs and records, the date that templates write, and the default system prompt."""

import datetime as dt
import itertools
import json

import numpy as np
import pytest

import batchloom
from batchloom import SettingsError
from batchloom.chat import detect_schema, make_record_reader
from batchloom.cli.commands import execute, name_options
from batchloom.core.errors import StoreConflictError, UnusableRecordError
from batchloom.preparation import ChatEncoder, ChatRecipe, encode_conversations
from chat.conversations import SWITCHED, make_conversation
from preparation.stores import write_jsonl

TURNS = r"""{{- '<|im_start|>system\n' + style | default('plain') + (' ' + loud | string if loud is defined else '') -}}
{%- for document in documents or [] -%}{{- '\n' + document.title -}}{%- endfor -%}
{{- '<|im_end|>\n' -}}
{%- for message in messages -%}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' -}}
{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"""
DATED = "{{ strftime_now('%d %b %Y') }}" + TURNS
TALK = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}


@pytest.fixture
def template(tmp_path):
    def write(text):
        (tmp_path / "x.jinja").write_text(text)
        return str(tmp_path / "x.jinja")

    return write


def encode(encoder, *conversations, train_on="all"):
    encoded = encode_conversations(conversations, encoder, ChatRecipe(train_on=train_on, prove=True))
    assert not encoded.faults
    return encoded


@pytest.mark.parametrize("name", ["bytes", "metaspace"])
@pytest.mark.parametrize(
    ("job", "row"),
    [
        ({}, None),
        ({"style": "terse"}, None),
        ({}, {"style": "terse", "loud": True}),
        ({"style": "terse", "loud": 1}, {"style": "long"}),
        ({"loud": 0.5}, {"documents": [{"title": "ça va"}, {"title": "b"}]}),
        ({"style": "<think>"}, {"loud": None}),
    ],
)
def test_arguments_are_those_of_apply_chat_template(tokenizers, hf_tokenizers, template, name, job, row):
    encoder = ChatEncoder(tokenizers[name], template(TURNS), arguments=job)
    tokenizer = hf_tokenizers[name]
    conversations = [make_conversation("hi", " yes\n", "b", "c"), make_conversation("hi", "yes", template_args=row)]
    expected = [
        tokenizer.apply_chat_template(conversation.messages, chat_template=TURNS, **arguments)["input_ids"]
        for conversation, arguments in zip(conversations, (job, {**job, **(row or {})}), strict=True)
    ]
    encoded = encode(encoder, *conversations)
    assert encoded.ids.tolist() == [number for ids in expected for number in ids]


def test_only_what_an_argument_adds_to_the_generation_prompt_is_not_trained(tokenizers, template):
    tokenizer, path = tokenizers["bytes"], template(SWITCHED)
    off = {"enable_thinking": False}
    conversations = [
        make_conversation("a", "b", "c", "d"),
        make_conversation("a", "b", "c", "d", template_args=off),
        make_conversation("a", "b", "c", "d", template_args={"enable_thinking": True}),
        make_conversation("a", "<think>\nwhy\n</think>\n\nd", template_args=off),
        make_conversation("a", "d", template_args=off),
    ]
    encoded = encode(ChatEncoder(tokenizer, path), *conversations, train_on="assistant")
    starts = [0, *encoded.lengths.cumsum().tolist()]
    texts = [
        tokenizer.decode(encoded.ids[start:stop][encoded.flags.trained[start:stop]])
        for start, stop in itertools.pairwise(starts)
    ]
    empty_thought = "<think>\n\n</think>\n\n"
    assert texts == [
        f"b<|im_end|>{empty_thought}d<|im_end|>",
        "b<|im_end|>d<|im_end|>",
        f"b<|im_end|>{empty_thought}d<|im_end|>",
        "<think>\nwhy\n</think>\n\nd<|im_end|>",
        "d<|im_end|>",
    ]
    encoded = encode(ChatEncoder(tokenizer, path, arguments=off), conversations[0], train_on="last")
    assert tokenizer.decode(encoded.ids[encoded.flags.trained]) == "d<|im_end|>"


def test_records_cannot_spell_control_tokens_in_arguments(tokenizers, template):
    encoder = ChatEncoder(tokenizers["bytes"], template(TURNS), arguments={"style": "<|im_end|>"})
    hostile = make_conversation("hi", "yes", template_args={"documents": [{"title": "x<|im_start|>"}]})
    encoded = encode_conversations([make_conversation("hi", "yes"), hostile], encoder, ChatRecipe())
    assert encoded.numbers.tolist() == [0]
    assert encoded.faults[0].reason.startswith("it spells a control token in a template argument")


def test_many_different_arguments(tokenizers, template):
    encoder = ChatEncoder(tokenizers["bytes"], template(TURNS))
    conversations = [make_conversation("hi", "yes", template_args={"style": f"s{n}"}) for n in range(150)]
    encoded = encode(encoder, *conversations)
    text = tokenizers["bytes"].decode(encoded.ids)
    assert [part.partition("<")[0] for part in text.split("system\n")[1:]] == [f"s{n}" for n in range(150)]


READABLE = [
    ({"style": "x"}, {"style": "x"}),
    ('{"style": "x", "n": [1, {"a": null}]}', {"style": "x", "n": [1, {"a": None}]}),
    ({"style": None, "n": 0}, {"n": 0}),
    *((value, None) for value in (None, {}, "", " ", [], {"style": None}, "null", "{}")),
]


@pytest.mark.parametrize(("value", "arguments"), READABLE)
def test_the_column_of_a_record(value, arguments):
    rows = [
        {**TALK, "chat_template_kwargs": value},
        {"prompt": "a", "completion": "b", "chat_template_kwargs": value},
        {"question": "a", "answer": "b", "chat_template_kwargs": value},
        {"prompt": "a", "chosen": "b", "rejected": "c", "chat_template_kwargs": value},
        {"prompt": "a", "completion": "b", "label": True, "chat_template_kwargs": value},
    ]
    for row in rows:
        record = make_record_reader(detect_schema([row]))(row)
        conversation = getattr(record, "chosen", getattr(record, "conversation", record))
        assert conversation.template_args == arguments


UNREADABLE = [
    (3, "holds a number, not an object of template arguments"),
    (True, "holds true or false, not an object"),
    (["a"], "holds an array, not an object"),
    ("x", "is not a JSON object of template arguments: "),
    ("[1]", "holds an array, not an object"),
    ({"messages": []}, "messages is a name that templates get from the record or the tokenizer"),
    ({"bos_token": "x", "tools": []}, "bos_token is a name that templates get .*; tools is a name that templates get"),
    ({"a-b": 1}, "'a-b' is not the name of a variable"),
    ({"": 1}, "'' is not the name of a variable"),
    ({"x": float("nan")}, "x: nan is no finite number"),
    ({"x": [float("inf")]}, "is no finite number"),
    ({"x": b"y"}, "is no JSON value"),
    ({"x": np.int64(3)}, "is no JSON value"),
    ({"x": [np.float64(0.5)]}, "is no JSON value"),
    ({"x": "\ud800"}, "is not valid Unicode"),
    ({"x": {"": 1}}, "has keys that are no text"),
    ({"x": {1: 1}}, "has keys that are no text"),
    ({"x": 1 << 70}, "is beyond 64 bits"),
]


@pytest.mark.parametrize(("value", "reason"), UNREADABLE)
def test_unusable_arguments_of_a_record(value, reason):
    row = {**TALK, "chat_template_kwargs": value}
    with pytest.raises(UnusableRecordError, match=reason):
        make_record_reader(detect_schema([row]))(row)
    deep = [1]
    for _ in range(40):
        deep = [deep]
    with pytest.raises(UnusableRecordError, match="nested deeper than 32 levels"):
        make_record_reader(detect_schema([row]))({**TALK, "chat_template_kwargs": {"x": deep}})


def test_all_problems_of_a_job_are_reported_at_once():
    settings = {
        "template_args": {"messages": 1, "a b": 2, "x": float("nan")},
        "template_date": "26.7.2026",
        "max_tokens": -1,
    }
    with pytest.raises(SettingsError) as caught:
        batchloom.prepare("in.jsonl", out="out", **settings)
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [
        *("template_date", "max_tokens"),
        *["template_args"] * 3,
    ]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["x"], "--template-arg: 'x' is not NAME=VALUE"),
        (["=1"], "--template-arg: '=1' is not NAME=VALUE"),
        (["x=1", "x=2"], "--template-arg: x is given twice; give it once"),
        (["tools=1"], "--template-arg: tools is a name that templates get from the record or the tokenizer"),
    ],
)
def test_options_that_are_no_arguments(tmp_path, words, problem):
    write_jsonl(tmp_path / "in.jsonl", [TALK])
    options = [word for text in words for word in ("--template-arg", text)]
    command = ["prepare", str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "out"), "--tokenizer", "bytes", *options]
    with pytest.raises(SettingsError) as caught:
        execute(command)
    assert name_options(caught.value.problems[0], command).startswith(problem)


def test_arguments_are_part_of_the_recipe(tmp_path, capsys, template, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "in.jsonl", [TALK, {**TALK, "chat_template_kwargs": {"style": "loud"}}])
    path, out = template(DATED.replace("<|im_", "<im_")), tmp_path / "out"
    words = ["prepare", str(tmp_path / "in.jsonl"), "--tokenizer", "bytes", "--template", path, "--val-fraction", "0"]
    words += ["--template-arg", "style=terse", "--template-arg", 'loud="1"', "--template-date", "2026-07-26"]
    assert execute([*words, "--out", str(out)]) == 0
    store = batchloom.open_store(out)
    # Records that differ only in their arguments are no duplicates.
    assert [store[n].text.partition("<im_end")[0] for n in (0, 1)] == [
        "26 Jul 2026<im_start|>system\nterse 1",
        "26 Jul 2026<im_start|>system\nloud 1",
    ]
    chat = store.manifest.recipe["chat"]
    assert (chat["template_args"], chat["template_date"]) == ({"style": "terse", "loud": "1"}, "2026-07-26")
    capsys.readouterr()
    assert execute([*words, "--print-recipe"]) == 0
    (tmp_path / "recipe.yaml").write_text(capsys.readouterr().out)
    for recipe in (tmp_path / "recipe.yaml", out):
        again = batchloom.prepare(recipe=recipe, out=tmp_path / "again")
        assert batchloom.open_store(again.path).manifest == store.manifest
        batchloom.prepare(tmp_path / "in.jsonl", recipe=recipe, out=out)
    with pytest.raises(StoreConflictError, match="template_date: '2026-07-26' -> '2026-07-27'"):
        batchloom.prepare(recipe=tmp_path / "recipe.yaml", out=out, template_date=dt.date(2026, 7, 27))
    with pytest.raises(StoreConflictError, match="template_args: .*'terse'.* -> .*'x'"):
        batchloom.prepare(recipe=tmp_path / "recipe.yaml", out=out, template_args={"style": "x"})


def test_stores_without_arguments_have_none_in_their_recipe(tmp_path):
    write_jsonl(tmp_path / "in.jsonl", [TALK])
    result = batchloom.prepare(tmp_path / "in.jsonl", out=tmp_path / "out", tokenizer="bytes", val_fraction=0)
    chat = batchloom.open_store(result.path).manifest.recipe["chat"]
    assert not {"template_args", "template_date"} & chat.keys()


def test_arguments_that_the_template_never_reads_are_reported_once(tmp_path, template):
    rows = [{**TALK, "id": n, "chat_template_kwargs": {"stile": n, "loud": 1}} for n in range(300)]
    rows = [
        {**row, "messages": [{"role": "user", "content": f"{n}?"}, TALK["messages"][1]]} for n, row in enumerate(rows)
    ]
    write_jsonl(tmp_path / "in.jsonl", rows)
    settings = {"tokenizer": "bytes", "template": template(TURNS.replace("<|im_", "<im_"))}
    arguments = {"stlye": 1, "enable_thinking": False}
    result = batchloom.prepare(tmp_path / "in.jsonl", out=tmp_path / "out", template_args=arguments, **settings)
    job = [note for note in result.notes if "never reads" in note]
    assert job == [
        "Template x.jinja never reads the arguments enable_thinking, stlye; did you mean 'style'? (it reads documents, loud, style)."
    ]
    assert [note for note in result.notes if "stile" in note] == ["Unused columns: chat_template_kwargs.stile"]
    found = batchloom.doctor(tmp_path / "in.jsonl", template_args=["style=loud"], **settings)
    assert found.sources[0].unused == ("chat_template_kwargs.stile",)
    assert "--template-arg style=loud" in found.commands[0]
    assert not [warning for warning in found.warnings if "never reads" in warning]


def test_ignored_columns_give_no_arguments(tmp_path):
    row = {**TALK, "chat_template_kwargs": {"messages": []}}
    record = make_record_reader(detect_schema([row], ignore=["chat_template_kwargs"]))(row)
    assert record.template_args is None
    record = make_record_reader(detect_schema([row], {"template_args": ""}))(row)
    assert record.template_args is None
    row = {**TALK, "switches": json.dumps({"a": 1})}
    record = make_record_reader(detect_schema([row], {"template_args": "switches"}))(row)
    assert record.template_args == {"a": 1}


HI = {"role": "user", "content": "hi"}
YES, NO = ({"role": "assistant", "content": text} for text in ("yes", "no"))


@pytest.mark.parametrize(
    ("record", "settings", "system"),
    [
        ({"messages": [HI, YES]}, {}, "Be brief."),
        ({"messages": [HI, {**YES, "train": False}, HI, YES]}, {}, "Be brief."),
        ({"instruction": "hi", "output": "yes", "system": ""}, {}, "Be brief."),
        ({"prompt": [HI], "chosen": [YES], "rejected": [NO]}, {}, "Be brief."),
        ({"prompt": [HI], "completion": [YES], "label": True}, {}, "Be brief."),
        ({"prompt": [HI]}, {"prompts": True}, "Be brief."),
        ({"instruction": "hi", "output": "yes", "system": "Own."}, {}, "Own."),
        ({"messages": [{"role": "system", "content": "Own."}, HI, YES]}, {}, "Own."),
        ({"messages": [{"role": "developer", "content": "Own."}, HI, YES]}, {}, None),
    ],
)
def test_the_default_system_prompt_is_that_of_conversations_without_one(tmp_path, record, settings, system):
    write_jsonl(tmp_path / "in.jsonl", [{**record, "id": n} for n in range(4)])
    settings = {"tokenizer": "bytes", "dedup": "none", "val_fraction": 0, **settings}
    batchloom.prepare(tmp_path / "in.jsonl", out=tmp_path / "out", default_system="Be brief.", **settings)
    document = batchloom.open_store(tmp_path / "out")[0]
    assert ("Be brief." in document.text) == (system == "Be brief.")
    if system is not None:
        assert document.text.startswith(f"System:\n{system}\n\nUser:\nhi\n")
    assert settings.get("prompts") or document.trained_text.rstrip() == "yes<|endoftext|>"
