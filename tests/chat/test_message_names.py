"""Names inside messages: keys, role values, and the conventions that libraries read without a setting."""

import json

import pytest

from batchloom import SettingsError
from batchloom.chat import detect_schema, make_record_reader, parse_mapping, unused_columns
from batchloom.chat.schema import unused_message_keys
from batchloom.core.errors import SchemaError, UnusableRecordError

TALK = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "a"},
]
CALL = {"name": "f", "arguments": {"x": 1}}
CALLED = [{"type": "function", "function": CALL}]


def read_record(record, mapping=""):
    schema = detect_schema([record], parse_mapping(mapping) if mapping else None)
    return make_record_reader(schema)(record)


def rewrite(role_key, content_key, roles):
    """Return TALK under other names."""
    return [{role_key: roles.get(turn["role"], turn["role"]), content_key: turn["content"]} for turn in TALK]


CLIENT = {"user": "client", "assistant": "bot", "system": "setting"}
MAPPED = [
    ({"dialog": rewrite("speaker", "utterance", {})}, "messages=dialog,role=speaker,content=utterance"),
    (
        {"dialog": rewrite("speaker", "utterance", CLIENT)},
        "messages=dialog,role=speaker,content=utterance,assistant=bot,user=client,system_role=setting",
    ),
    ({"messages": rewrite("role", "content", CLIENT)}, "assistant=bot|model,user=person|client,system_role=setting"),
    ({"conversations": rewrite("from", "value", CLIENT)}, "user=client,system_role=setting"),
    # The value of a mapped role may be in either place.
    ({"messages": rewrite("who", "value", {})}, "role=who"),
    ({"messages": rewrite("from", "text", {})}, "content=text"),
    # As in axolotl, a mapped role overrides a known one.
    ({"messages": rewrite("role", "content", {"user": "gpt", "assistant": "human"})}, "user=gpt,assistant=human"),
    ({"a.b": rewrite("who", "text", {})}, "messages=a.b,role=who,content=text"),
    ({"a": {"b": rewrite("who", "text", {})}}, "messages=a.b,role=who,content=text"),
]


@pytest.mark.parametrize(("record", "mapping"), MAPPED)
def test_a_mapping_names_keys_and_roles_of_messages(record, mapping):
    assert read_record(record, mapping).messages == TALK
    ((name, value),) = record.items()
    if isinstance(value, list):
        assert read_record({name: json.dumps(value)}, mapping).messages == TALK


def test_a_mapping_names_calls_reasoning_and_flags():
    messages = [
        {"who": "user", "says": "q"},
        {"who": "assistant", "says": "", "calls": CALLED, "thoughts": "Hm.", "learn": True},
        {"who": "result", "says": "2"},
        {"who": "call", "says": json.dumps(CALL), "learn": False},
    ]
    names = "role=who,content=says,tool_calls=calls,reasoning_content=thoughts,train=learn,tool=result"
    conversation = read_record({"messages": messages}, f"{names},function_call=call")
    assert conversation.messages[1:] == [
        {"role": "assistant", "content": "", "tool_calls": CALLED, "reasoning_content": "Hm.", "train": True},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "", "tool_calls": CALLED, "train": False},
    ]
    assert conversation.trained == [None, True, None, False]


def test_names_inside_messages_apply_to_every_column_of_turns():
    question, good, bad = ({"who": role, "text": text} for role, text in (("human", "q"), ("gpt", "a"), ("gpt", "b")))
    pair = read_record({"prompt": [question], "chosen": good, "rejected": bad}, "role=who,content=text")
    assert [side.messages[-1]["content"] for side in (pair.chosen, pair.rejected)] == ["a", "b"]
    assert pair.chosen.messages[0] == {"role": "user", "content": "q"}
    record = {"prompt": "q", "completion": json.dumps([{"kind": "code", "text": "x"}])}
    # A text that happens to be JSON stays text.
    assert read_record(record, "role=who,content=text").messages[1]["content"] == record["completion"]


def test_mapped_keys_are_not_reported_as_unused():
    record = {"dialog": [{**turn, "mood": "calm"} for turn in rewrite("speaker", "utterance", {})]}
    schema = detect_schema([record], parse_mapping("messages=dialog,role=speaker,content=utterance"))
    assert unused_columns([record], schema) == ()
    assert unused_message_keys([record], schema) == ("mood",)


# Conventions that a library reads without a setting.
BY_DEFAULT = [
    # axolotl reads ShareGPT's roles under the usual keys, ms-swift any combination of both keys.
    rewrite("role", "content", {"user": "human", "assistant": "gpt"}),
    rewrite("role", "value", {"user": "human", "assistant": "bot"}),
    rewrite("from", "content", {"user": "human", "assistant": "gpt"}),
    rewrite("from", "value", {"assistant": "bot"}),
]


@pytest.mark.parametrize("messages", BY_DEFAULT)
@pytest.mark.parametrize("column", ["messages", "conversations", "conversation"])
def test_names_that_a_library_reads_by_default_are_read(messages, column):
    assert read_record({column: messages}).messages == TALK


@pytest.mark.parametrize(("user", "assistant"), [("human", "assistant"), ("user", "assistant"), ("human", "bot")])
def test_exchanges_of_ms_swift_are_two_turns_each(user, assistant):
    exchanges = [{user: "q1", assistant: "a1"}, {user: "q2", assistant: "a2"}]
    record = {"conversation": exchanges, "system": "s"}
    assert [turn["content"] for turn in read_record(record).messages] == ["s", "q1", "a1", "q2", "a2"]
    for bad, message in [
        ({user: "q3"}, r"conversation\[1\] is not an object with a user's question and its answer"),
        ({user: "q3", assistant: 3}, rf"conversation\[1\]\.{assistant} holds a number, not text"),
        ({user: " ", assistant: "a3"}, rf"conversation\[1\]\.{user} is empty"),
        ({user: "q3", assistant: "a3", "loss": 1}, r"has 'loss' next to .*--ignore loss"),
    ]:
        with pytest.raises(UnusableRecordError, match=message):
            read_record({"conversation": [exchanges[0], bad]})


def test_query_and_history_of_ms_swift_are_read():
    record = {"query": "q2", "response": "a2", "history": '[["q1", "a1"]]', "system": "s"}
    assert [turn["content"] for turn in read_record(record).messages] == ["s", "q1", "a1", "q2", "a2"]
    with pytest.raises(UnusableRecordError, match=r"history\[0\] is not a list of two texts"):
        read_record({"query": "q", "response": "a", "history": "not JSON"})


def test_the_input_is_the_prompt_if_the_instruction_is_empty():
    record = {"instruction": "", "input": "Sort: 2, 1", "output": "1, 2"}
    assert read_record(record).messages[0] == {"role": "user", "content": "Sort: 2, 1"}
    with pytest.raises(UnusableRecordError, match="column 'instruction' is empty"):
        read_record({**record, "input": " "})


def part(kind, value):
    return {"type": kind, "value": value}


def test_parts_of_llamafactory_become_reasoning_text_and_calls():
    parts = [part("reasoning", "Hm."), part("text", "Let me see."), part("tool_call", json.dumps(CALL))]
    messages = [
        {"role": "user", "content": [part("text", "q")]},
        {"role": "assistant", "content": parts},
        {"role": "tool", "content": [part("text", "2")]},
        {"role": "assistant", "content": [part("tool_call", json.dumps(CALL))]},
    ]
    _, answer, _, call = read_record({"messages": messages}).messages
    assert answer == {
        "role": "assistant",
        "content": [{"type": "text", "text": "Let me see."}],
        "reasoning_content": "Hm.",
        "tool_calls": CALLED,
    }
    assert call == {"role": "assistant", "content": "", "tool_calls": CALLED}


@pytest.mark.parametrize(
    ("role", "parts", "message"),
    [
        ("assistant", [part("text", "t"), part("reasoning", "r")], "is of type 'reasoning' after parts"),
        ("assistant", [part("tool_call", json.dumps(CALL)), part("text", "t")], "is of type 'text' after parts"),
        ("assistant", [part("tool_call", "{")], r"content\[0\].value is not JSON of a function call"),
        ("assistant", [part("reasoning", 5)], r"content\[0\].value holds a number, not text"),
        ("assistant", [part("text", 5)], r"content\[0\] has 'type', 'text', not"),
        ("user", [part("tool_call", json.dumps(CALL))], "belongs to an assistant message"),
    ],
)
def test_parts_that_no_template_would_write_in_this_order_are_refused(role, parts, message):
    messages = [*TALK, {"role": role, "content": parts}]
    with pytest.raises(UnusableRecordError, match=message):
        read_record({"messages": messages})


def test_parts_and_keys_of_the_same_meaning_are_refused():
    message = {"role": "assistant", "content": [part("reasoning", "r")], "reasoning_content": "s"}
    with pytest.raises(UnusableRecordError, match="has reasoning_content and parts with the same meaning"):
        read_record({"messages": [*TALK, message]})


@pytest.mark.parametrize(
    ("record", "suggestion"),
    [
        ({"messages": rewrite("speaker", "text", {})}, "messages=messages,role=speaker,content=text"),
        ({"dialog": rewrite("Speaker", "utterance", {})}, "messages=dialog,role=Speaker,content=utterance"),
        (
            {"messages": rewrite("sender", "message", {"user": "client", "assistant": "AI"})},
            "messages=messages,role=sender,content=message,user=client,assistant=AI",
        ),
        (
            {"messages": rewrite("role", "content", {"system": "SYSTEM", "user": "USER", "assistant": "model"})},
            "messages=messages,system_role=SYSTEM,user=USER,assistant=model",
        ),
        ({"messages": rewrite("role", "text", {})}, "messages=messages,content=text"),
    ],
)
def test_unknown_names_are_refused_with_the_mapping_that_reads_them(record, suggestion):
    with pytest.raises(SchemaError) as caught:
        detect_schema([record])
    assert caught.value.suggestion == suggestion
    assert read_record(record, suggestion).messages == TALK


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"messages": rewrite("speaker", "text", {"user": "Alice", "assistant": "Bob", "system": "Bob"})},
            "name the roles of 'Bob', 'Alice': --map messages=messages,role=speaker,content=text,user=...",
        ),
        ({"messages": [{"a": "user", "b": "q"}]}, "name their keys: --map role=...,content=..."),
        ({"messages": [{"speaker": "user", "sender": "user", "text": "q"}]}, "name their keys"),
    ],
)
def test_names_that_are_not_clear_are_left_to_the_user(record, message):
    with pytest.raises(SchemaError) as caught:
        detect_schema([record])
    assert message in str(caught.value)
    assert caught.value.suggestion is None


@pytest.mark.parametrize(
    ("mapping", "problem"),
    [
        ("role=", "map.role: names no key of messages"),
        ("messages=m,assistant=bot|", "map.assistant: names no value of messages"),
        ("user=a,assistant=b|a", "map.assistant: 'a' is already the name of user"),
        ("role=a,content=a", "map.content: 'a' is already the name of role"),
        ("text=t,role=speaker", "map.role: is a name inside messages, but text holds none"),
        ("input_ids=i,user=me", "map.user: is a name inside messages, but input_ids holds none"),
        ("asistant=bot", "map.asistant: unknown role; did you mean 'assistant'?"),
    ],
)
def test_names_inside_messages_are_checked(mapping, problem):
    with pytest.raises(SettingsError) as caught:
        parse_mapping(mapping)
    assert [problem in text for text in caught.value.problems] == [True]


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ("role=speeker", "--map role=speeker: no message has 'speeker'; did you mean 'speaker'?"),
        ("role=speaker,content=words", "--map content=words: no message has 'words'; the messages have 'speaker', "),
        ("system=setting", "no column 'setting'; a value of the role inside messages is system_role="),
    ],
)
def test_names_must_occur_in_messages(mapping, message):
    with pytest.raises(SchemaError) as caught:
        detect_schema([{"messages": rewrite("speaker", "text", {})}], parse_mapping(mapping))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("late", "message"),
    [
        ({"text": "q"}, r"messages\[0\] has no 'speaker': the message has 'text'"),
        ({"speaker": "user", "role": "user", "text": "q"}, r"messages\[0\] has 'speaker' and 'role'"),
        ({"speaker": "narrator", "text": "q"}, r"messages\[0\].role is 'narrator', not one of"),
        ({"speaker": ["user"], "text": "q"}, r"messages\[0\].role holds an array"),
        ({"speaker": "user"}, r"messages\[0\] has no content"),
        (5, r"messages\[0\] holds a number, not a message"),
    ],
)
def test_a_later_message_under_other_names_is_unusable(late, message):
    mapping = parse_mapping("role=speaker,content=text")
    read = make_record_reader(detect_schema([{"messages": rewrite("speaker", "text", {})}], mapping))
    with pytest.raises(UnusableRecordError, match=message):
        read({"messages": [late]})
