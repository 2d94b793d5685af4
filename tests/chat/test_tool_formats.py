"""Tools, calls and results in contents (``--tool-format``): equality with templates, positions, bad input."""

import json
import math

import pytest

import batchloom
from batchloom import SettingsError
from batchloom.chat.templates import TOOL_FORMATS
from batchloom.core.document import Conversation
from batchloom.core.errors import TemplateError
from batchloom.preparation import ChatEncoder, ChatRecipe, encode_conversations
from batchloom.tokens import resolve_tokenizer
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


@pytest.mark.parametrize("name", ["qwen", "hermes"])
@pytest.mark.parametrize("train_on", ["all", "assistant", "last"])
def test_qwen_is_what_chatml_writes(tokenizers, name, train_on):
    conversation = Conversation([SYSTEM, *TURNS], [TOOL])
    expected = encode(ChatEncoder(tokenizers["bytes"], "chatml"), conversation, train_on=train_on)
    encoded = encode(ChatEncoder(tokenizers["bytes"], "chatml", tool_format=name), conversation, train_on=train_on)
    assert encoded.ids.tolist() == expected.ids.tolist()
    assert encoded.mask.tolist() == expected.mask.tolist()


def test_qwen_is_what_the_template_of_qwen3_writes(real_tokenizers):
    folders = [path.parent for path in real_tokenizers.rglob("tokenizer.json") if "qwen3" in str(path)]
    if not folders:
        pytest.skip("BATCHLOOM_REAL_TOKENIZERS has no qwen3")
    tokenizer = resolve_tokenizer(str(folders[0]))
    # A user turn at the end, for Qwen3 writes an empty thought into an answer at the end.
    turns = [{**turn, "content": turn["content"] or ""} for turn in TURNS]
    conversation = Conversation([SYSTEM, *turns, {"role": "user", "content": "thanks"}], [TOOL])
    results = [
        encode(encoder, conversation)
        for encoder in (ChatEncoder(tokenizer), ChatEncoder(tokenizer, "chatml", tool_format="qwen"))
    ]
    assert results[0].ids.tolist() == results[1].ids.tolist()
    assert results[0].mask.tolist() == results[1].mask.tolist()


PLAIN = "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"


@pytest.mark.parametrize(
    ("name", "call", "results"),
    [
        ("qwen", '<tool_call>\n{"name": "find", "arguments": {"city": "Zürich", "n": 3}}\n</tool_call>', "responses"),
        ("default", 'Action: find\nAction Input: {"city": "Zürich", "n": 3}', "user"),
        ("llama3", '{"name": "find", "parameters": {"city": "Zürich", "n": 3}}', "tool"),
        ("mistral", '[{"name": "find", "arguments": {"city": "Zürich", "n": 3}}]', "tool"),
        ("glm4", 'find\n{"city": "Zürich", "n": 3}', "tool"),
        ("lfm2", '<|tool_call_start|>[find(city="Zürich", n=3)]<|tool_call_end|>', "tool"),
    ],
)
def test_a_template_without_tools(tokenizers, tmp_path, name, call, results):
    (tmp_path / "x.jinja").write_text(PLAIN)
    encoder = ChatEncoder(tokenizers["bytes"], str(tmp_path / "x.jinja"), tool_format=name)
    turns = [*TURNS[:2], *TURNS[4:]]
    encoded = encode(encoder, Conversation(turns, [TOOL]), train_on="all")
    text = tokenizers["bytes"].decode(encoded.ids).split("<|endoftext|>")
    written = {
        "responses": ["user: <tool_response>\na\n</tool_response>\n<tool_response>\nb\n</tool_response>"],
        "user": ["user: a\nb"],
        "tool": ["tool: a", "tool: b"],
    }[results]
    assert text[0].startswith("system: ")
    assert "find" in text[0]
    assert text[1:] == ["user: weather?", f"assistant: {call}", *written, "assistant: Sunny.", ""]


def test_flags_and_the_completion_keep_their_turns(tokenizers):
    tokenizer = tokenizers["bytes"]
    encoder = ChatEncoder(tokenizer, "chatml", tool_format="qwen")
    flags = [None, False, None, None, None, None, True]
    flagged = Conversation(TURNS, [TOOL], flags)
    encoded = encode(encoder, flagged, train_on="last")
    assert tokenizer.decode(encoded.ids[encoded.mask]) == "Sunny.<|im_end|>"
    encoded = encode(encoder, flagged)
    assert tokenizer.decode(encoded.ids[encoded.mask]).startswith("Two:\n<tool_call>")
    encoded = encode(encoder, Conversation(TURNS, [TOOL], completion=6), train_on="completion")
    assert tokenizer.decode(encoded.ids[encoded.mask]).strip() == "Sunny.<|im_end|>"


@pytest.mark.parametrize(
    ("name", "message", "tools", "reason"),
    [
        ("glm4", {"tool_calls": [CALL, CALL]}, None, "it calls several tools at once"),
        ("qwen", {"tool_calls": [{"name": "f", "arguments": "{x"}]}, None, "the arguments of f are no JSON"),
        ("lfm2", {"tool_calls": [{"name": "f", "arguments": "[1]"}]}, None, "the arguments of f are not an object"),
        ("qwen3_5", {"tool_calls": [{"name": "f", "arguments": "3"}]}, None, "the arguments of f are not an object"),
        *((name, {}, [{"type": "function"}], "a tool has no name") for name in TOOL_FORMATS),
        *((name, {}, [{"description": "x"}], "a tool has no name") for name in TOOL_FORMATS),
        *(
            (name, {"tool_calls": [{"name": "f", "arguments": arguments}]}, None, "a tool or call holds a number that")
            for name in TOOL_FORMATS
            for arguments in ('{"x": NaN}', {"x": [-math.inf]})
        ),
        ("qwen", {}, [{"name": "f", "parameters": {"minimum": -math.inf}}], "a tool or call holds a number that"),
    ],
)
def test_what_a_format_cannot_write(tokenizers, name, message, tools, reason):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", **message}]
    encoder = ChatEncoder(tokenizers["bytes"], "plain", tool_format=name)
    encoded = encode_conversations([Conversation(turns, tools)], encoder, ChatRecipe())
    assert encoded.faults[0].reason.startswith(reason)


def test_a_format_of_control_tokens_needs_the_models_template(tmp_path, tokenizer_folders):
    definition = json.loads((tokenizer_folders["bytes"] / "tokenizer.json").read_text())
    last = max(definition["added_tokens"], key=lambda token: token["id"])
    definition["added_tokens"].append({**last, "special": True, "content": "[AVAILABLE_TOOLS]", "id": last["id"] + 1})
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    tokenizer = resolve_tokenizer(str(tmp_path), end_token="<|endoftext|>")
    with pytest.raises(TemplateError, match=r"writes \[AVAILABLE_TOOLS\], control tokens .* use the model's own"):
        ChatEncoder(tokenizer, "plain", tool_format="mistral")
    ChatEncoder(tokenizer, "plain", tool_format="qwen")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"tool_format": "qwem"}, "tool_format: 'qwem' is none of default, glm4, .*did you mean 'qwen'"),
        ({"tool_format": 3}, "tool_format: 3 is not a text"),
        ({"tool_format": "qwen", "template": "none"}, "tool_format: is for a chat template, and template is none"),
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
    settings = {"tokenizer": "bytes", "template": str(tmp_path / "x.jinja"), "tool_format": "qwen"}
    result = batchloom.prepare(tmp_path / "in.jsonl", out=tmp_path / "out", val_fraction=0, **settings)
    store = batchloom.open_store(result.path)
    assert store.manifest.recipe["chat"]["tool_format"] == "qwen"
    assert "<tools>\n" + json.dumps(TOOL) in store[0].text
    assert '{"name": "find", "arguments": {"city": "Bern"}}\n</tool_call><|endoftext|>user: <tool_resp' in store[0].text
    found = batchloom.doctor(tmp_path / "in.jsonl", **settings)
    assert "--tool-format qwen" in found.commands[0]
