"""Tools, calls and results in contents (``--tool-format``): equality with templates, positions, bad input."""

import json
import math

import pytest

import batchloom
from batchloom import SettingsError
from batchloom.core.document import Conversation
from batchloom.preparation import ChatEncoder, ChatRecipe, encode_conversations
from preparation.stores import write_jsonl

CALL = {"type": "function", "function": {"name": "find", "arguments": {"city": "Zürich", "n": 3}}}
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
SYSTEM = {"role": "system", "content": "Be brief."}
TURNS = [
    {"role": "user", "content": "weather?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "sunny"},
    {"role": "assistant", "content": "Two:", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "a"},
    {"role": "tool", "content": "b"},
    {"role": "assistant", "content": "Sunny."},
]


def encode(encoder, *conversations, train_on="assistant"):
    encoded = encode_conversations(conversations, encoder, ChatRecipe(train_on=train_on, prove=True))
    assert not encoded.faults
    return encoded


PLAIN = "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"


def test_a_template_without_tools(tokenizers, tmp_path):
    (tmp_path / "x.jinja").write_text(PLAIN)
    encoder = ChatEncoder(tokenizers["bytes"], str(tmp_path / "x.jinja"), tool_format="default")
    turns = [*TURNS[:2], *TURNS[4:]]
    encoded = encode(encoder, Conversation(turns, [TOOL]), train_on="all")
    system, *text = tokenizers["bytes"].decode(encoded.ids).split("<|endoftext|>")
    assert system.startswith("system: You have access to the following tools:\n> Tool Name: find\n")
    call = 'Action: find\nAction Input: {"city": "Zürich", "n": 3}'
    assert text == ["user: weather?", f"assistant: {call}", "user: a\nb", "assistant: Sunny.", ""]


def test_flags_and_the_completion_keep_their_turns(tokenizers):
    tokenizer = tokenizers["bytes"]
    encoder = ChatEncoder(tokenizer, "chatml", tool_format="default")
    flags = [None, False, None, None, None, None, True]
    flagged = Conversation(TURNS, [TOOL], flags)
    encoded = encode(encoder, flagged, train_on="last")
    assert tokenizer.decode(encoded.ids[encoded.flags.trained]) == "Sunny.<|im_end|>"
    encoded = encode(encoder, flagged)
    assert tokenizer.decode(encoded.ids[encoded.flags.trained]).startswith("Two:\nAction: find\n")
    encoded = encode(encoder, Conversation(TURNS, [TOOL], completion=6), train_on="completion")
    assert tokenizer.decode(encoded.ids[encoded.flags.trained]).strip() == "Sunny.<|im_end|>"


NUMBER = "a call of f holds a number that JSON cannot hold"


@pytest.mark.parametrize(
    ("message", "tools", "reason"),
    [
        ({"tool_calls": [{"name": "f", "arguments": "{x"}]}, None, "the arguments of f are no JSON"),
        ({}, [{"type": "function"}], "a tool has no name"),
        ({}, [{"description": "x"}], "a tool has no name"),
        ({"tool_calls": [{"name": "f", "arguments": '{"x": NaN}'}]}, None, NUMBER),
        ({"tool_calls": [{"name": "f", "arguments": {"x": [-math.inf]}}]}, None, NUMBER),
    ],
)
def test_what_the_format_cannot_write(tokenizers, message, tools, reason):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", **message}]
    encoder = ChatEncoder(tokenizers["bytes"], "plain", tool_format="default")
    encoded = encode_conversations([Conversation(turns, tools)], encoder, ChatRecipe())
    assert encoded.faults[0].reason.startswith(reason)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"tool_format": "qwen"}, "tool_format: 'qwen' is not default, the only format"),
        ({"tool_format": 3}, "tool_format: 3 is not"),
        ({"tool_format": "default", "template": "none"}, "tool_format: is for a chat template, and template is none"),
    ],
)
def test_settings_that_are_no_format(settings, problem):
    with pytest.raises(SettingsError, match=problem):
        batchloom.prepare("in.jsonl", out="out", **settings)


def test_shared_conversations_with_tools(tmp_path):
    row = {
        "conversations": [
            {"from": "human", "value": "weather?"},
            {"from": "function_call", "value": '{"name": "find", "arguments": {"city": "Bern"}}'},
            {"from": "observation", "value": "sunny"},
            {"from": "gpt", "value": "Sunny."},
        ],
        "tools": json.dumps([TOOL["function"]]),
    }
    write_jsonl(tmp_path / "in.jsonl", [row])
    (tmp_path / "x.jinja").write_text(PLAIN)
    settings = {"tokenizer": "bytes", "template": str(tmp_path / "x.jinja"), "tool_format": "default"}
    result = batchloom.prepare(tmp_path / "in.jsonl", out=tmp_path / "out", val_fraction=0, **settings)
    store = batchloom.open_store(result.path)
    assert store.manifest.recipe["chat"]["tool_format"] == "default"
    assert "> Tool Name: find\n" in store[0].text
    assert 'Action: find\nAction Input: {"city": "Bern"}<|endoftext|>user: sunny<|endoftext|>' in store[0].text
    found = batchloom.doctor(tmp_path / "in.jsonl", **settings)
    assert "--tool-format default" in found.commands[0]
