"""Traces of agents as messages: Anthropic's blocks, the items of OpenAI's Responses, rows of Hugging Face datasets."""

import json

import pytest

from batchloom.chat import detect_schema, make_record_reader
from batchloom.core.document import JsonObject
from batchloom.core.errors import SchemaError, UnusableRecordError

QUESTION = {"role": "user", "content": "Oslo?"}


def read(messages, **columns):
    row = {"messages": messages, **columns}
    return make_record_reader(detect_schema([row]))(row)


CALL_ALONE = {"role": "assistant", "content": ""}


def call(number, arguments, name="weather"):
    return {"type": "function", "id": number, "function": {"name": name, "arguments": arguments}}


def result(number, content, name="weather"):
    return {"role": "tool", "tool_call_id": number, "content": content, "name": name}


def text(value, kind="text"):
    return {"type": kind, "text": value}


ANTHROPIC = [
    QUESTION,
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Ask.", "signature": "x"},
            text("Let me look."),
            {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}},
            {"type": "tool_use", "id": "t2", "name": "time", "input": {}},
        ],
        "stop_reason": "tool_use",
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": "-3"},
            {"type": "tool_result", "tool_use_id": "t2", "content": [text("noon")]},
            text("Well?"),
        ],
    },
    {"role": "assistant", "content": [text("Minus three.")]},
]
RESPONSES = [
    {"type": "message", "role": "user", "content": [text("Oslo?", "input_text")]},
    {"type": "reasoning", "id": "r1", "summary": [], "content": [text("Ask.", "reasoning_text")]},
    {
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{**text("Let me look.", "output_text"), "annotations": []}],
    },
    {"type": "function_call", "call_id": "t1", "id": "f1", "name": "weather", "arguments": '{"city": "Oslo"}'},
    {"type": "function_call", "call_id": "t2", "id": "f2", "name": "time", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "t1", "output": "-3"},
    {"type": "function_call_output", "call_id": "t2", "output": [text("noon", "input_text")]},
    {"role": "user", "content": "Well?"},
    {"type": "reasoning", "id": "r2", "summary": []},
    {"type": "message", "role": "assistant", "content": [text("Minus three.", "output_text")]},
]


@pytest.mark.parametrize(
    ("trace", "arguments"),
    [(ANTHROPIC, ({"city": "Oslo"}, {})), (RESPONSES, ('{"city": "Oslo"}', "{}"))],
    ids=["Anthropic", "Responses"],
)
def test_a_trace_becomes_messages(trace, arguments):
    calls = [call("t1", arguments[0]), call("t2", arguments[1], "time")]
    expected = [
        QUESTION,
        {"role": "assistant", "content": "Let me look.", "reasoning_content": "Ask.", "tool_calls": calls},
        result("t1", "-3"),
        result("t2", "noon", "time"),
        {"role": "user", "content": "Well?"},
        {"role": "assistant", "content": "Minus three."},
    ]
    messages = read(trace).messages
    assert [{key: turn[key] for key in wanted} for turn, wanted in zip(messages, expected, strict=True)] == expected
    with_nulls = [{"role": None, "content": None, **item} for item in trace]
    assert read(json.dumps(trace)).messages == messages
    assert read(with_nulls).messages == messages


def test_blocks_written_one_by_one_are_one_answer():
    thought, answer = ({"role": "assistant", "content": [block]} for block in ANTHROPIC[1]["content"][:2])
    turns = read([QUESTION, thought, answer]).messages
    assert turns == [QUESTION, {"role": "assistant", "content": "Let me look.", "reasoning_content": "Ask."}]


def test_a_call_alone_and_a_reasoning_summary():
    items = [
        QUESTION,
        {"type": "reasoning", "summary": [text("One.", "summary_text"), text("Two.", "summary_text")]},
        {"type": "function_call", "call_id": "t1", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "t1", "output": ""},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    ]
    assert read(items).messages[1:] == [
        {"role": "assistant", "content": "", "reasoning_content": "One.\n\nTwo.", "tool_calls": [call("t1", "{}")]},
        result("t1", ""),
        {"role": "assistant", "content": "No."},
    ]


def test_blocks_and_items_of_one_answer_are_one_message():
    """A message of its own would teach the model to stop between them."""
    thought, said, first, second = ({"role": "assistant", "content": [block]} for block in ANTHROPIC[1]["content"])
    calls = [call("t1", {"city": "Oslo"}), call("t2", {}, "time")]
    expected = {"role": "assistant", "content": "Let me look.", "reasoning_content": "Ask.", "tool_calls": calls}
    assert read([QUESTION, thought, said, first, second, *ANTHROPIC[2:]]).messages[1] == expected
    reasoning = [{"type": "reasoning", "summary": value} for value in ("One.", [text("Two.", "summary_text")])]
    [_, answer] = read([QUESTION, *reasoning, {"role": "assistant", "content": "Cold."}]).messages
    assert answer == {"role": "assistant", "content": "Cold.", "reasoning_content": "One.\n\nTwo."}
    null = {"role": "assistant", "content": "So.", "tool_calls": None}
    assert read([QUESTION, null, RESPONSES[3]]).messages[1]["tool_calls"] == [call("t1", '{"city": "Oslo"}')]


def test_train_flags_of_traces_stay():
    flagged = [{**text("a", "output_text"), "train": False}, text("b", "output_text")]
    conversation = read([QUESTION, {"role": "assistant", "content": flagged}])
    assert conversation.messages[1]["content"] == "ab"
    assert conversation.trained[1].ranges[0].start == 1
    results = {**ANTHROPIC[2], "content": ANTHROPIC[2]["content"][:2], "train": True}
    conversation = read([*ANTHROPIC[:2], results, ANTHROPIC[3]])
    assert conversation.trained == [None, None, True, True, None]


def answer(*blocks):
    return [QUESTION, {"role": "assistant", "content": list(blocks)}]


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (answer({"type": "redacted_thinking", "data": "x"}, text("a")), r"content\[0\] is 'redacted_thinking', which"),
        (answer({"type": "tool_use", "id": "1", "name": "f", "input": {}}, text("a")), "'text' after blocks that"),
        (answer({"type": "thinking"}, text("a")), r"content\[0\].thinking holds null, not text"),
        (answer({"type": "tool_use", "id": "1", "input": {}}), "has no name"),
        (answer({"type": "server_tool_use"}, {"type": "thinking", "thinking": "b"}), "is of type 'thinking' after"),
        (answer(text("a", "output_text"), {"type": "document"}), r"content\[1\] is of type 'document'"),
        ([QUESTION, {"type": "web_search_call", "id": "1"}], r"messages\[1\] is 'web_search_call', which has no place"),
        ([QUESTION, {"type": "reasoning", "summary": [], "encrypted_content": "x"}], "is encrypted 'reasoning'"),
        ([QUESTION, *RESPONSES[3:4], *RESPONSES[9:]], r"messages\[2\] stands between a call and its result"),
        ([{"role": "user", "content": [text("?"), {"type": "tool_result"}]}], "behind what the user says"),
        ([QUESTION, {"type": "function_call", "call_id": "1", "arguments": "{}"}], "has no name"),
        ([QUESTION, {**RESPONSES[3], "call_id": ["1"]}], r"messages\[1\].call_id holds an array, not text"),
        ([QUESTION, {**RESPONSES[3], "train": False}], r"messages\[1\].train is not supported"),
        ([QUESTION, {"type": "reasoning", "text": "Hm."}], "has text, which reasoning of the Responses has not"),
        ([QUESTION, RESPONSES[2], RESPONSES[1], RESPONSES[3]], r"messages\[2\] is reasoning behind the text of its"),
        (
            [QUESTION, RESPONSES[1], {"role": "assistant", "content": "a", "thinking": "Hm."}],
            r"messages\[2\] has reasoning, and follows an item of reasoning",
        ),
        ([QUESTION, RESPONSES[1], QUESTION], "has reasoning without an answer behind it"),
        ([QUESTION, {**ANTHROPIC[1], "reasoning_content": "Hm."}], "has reasoning_content and blocks with the same"),
    ],
)
def test_what_has_no_place_in_a_message_is_named(items, message):
    with pytest.raises(UnusableRecordError, match=message):
        read(items)


def test_tools_of_every_make_are_functions():
    parameters = {"type": "object", "properties": {}}
    expected = {"type": "function", "function": {"name": "f", "description": "x", "parameters": parameters}}
    tools = [
        {"name": "f", "description": "x", "input_schema": parameters},
        {"type": "function", "name": "f", "description": "x", "parameters": parameters},
        expected,
    ]
    turns = [QUESTION, {"role": "assistant", "content": "Cold."}]
    assert read(turns, tools=tools).tools == [expected] * 3


def test_rows_of_agent_traces_are_read_by_their_messages():
    """The rows that Hugging Face datasets make of the sessions of an agent."""
    turns = [QUESTION, {"role": "assistant", "content": "Cold.", "reasoning_content": "Hm."}]
    row = {
        "harness": "claude_code",
        "session_id": "s",
        "prompt": "Oslo?",
        "messages": turns,
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "metadata": {"trace_type": "claude_code"},
        "num_user_messages": 1,
        "num_tool_calls": 0,
        "trace": '{"type": "user"}',
        "file_path": "a.jsonl",
    }
    conversation = make_record_reader(detect_schema([row]))(row)
    assert conversation.messages == turns
    assert conversation.tools == row["tools"]


def test_nulls_of_json_in_a_table_stay():
    content = [JsonObject({"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": None}})]
    row = {"messages": [{**QUESTION, "name": None}, {"role": "assistant", "content": content}]}
    conversation = make_record_reader(detect_schema([row]), has_inserted_nulls=True)(row)
    assert conversation.messages == [QUESTION, {**CALL_ALONE, "tool_calls": [call("t1", {"city": None})]}]


def test_objects_in_json_are_objects_with_their_nulls():
    """The type Json of Hugging Face datasets, which Arrow stores as texts."""
    turns = [QUESTION, {"role": "assistant", "content": "", "tool_calls": [call("t1", {"city": None})]}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    row = {"prompt": "Oslo?", "messages": list(map(json.dumps, turns)), "tools": list(map(json.dumps, tools))}
    conversation = make_record_reader(detect_schema([row]), has_inserted_nulls=True)(row)
    assert conversation.messages == turns
    assert conversation.tools == tools


@pytest.mark.parametrize(
    "events",
    [
        [
            {"type": "session_meta", "payload": {"id": "x"}},
            {"type": "response_item", "payload": {"type": "message", "role": "user", "content": []}},
        ],
        [
            {"type": "user", "sessionId": "s", "message": QUESTION},
            {"type": "assistant", "sessionId": "s", "message": {"role": "assistant", "content": [text("Cold.")]}},
        ],
        [{"type": "file-history-snapshot"}, {"type": "user", "sessionId": "s", "message": QUESTION}],
        [{"type": "session", "harness": "llama.app", "id": "1"}, {"type": "message", "message": QUESTION}],
    ],
    ids=["Codex", "Claude Code", "Claude Code with a snapshot", "Pi"],
)
def test_a_session_is_named_with_what_makes_rows_of_it(events):
    with pytest.raises(SchemaError, match="events of a session of an agent.* load_dataset"):
        detect_schema(events)
