"""Schema detection from columns, and the records that each schema reads."""

import gzip
import json

import numpy as np
import pytest

from batchloom import SettingsError
from batchloom.chat import detect_schema, make_record_reader, parse_mapping
from batchloom.core.document import Conversation, LabelledConversation, PreferencePair
from batchloom.core.errors import SchemaError, UnusableRecordError


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def system(text):
    return {"role": "system", "content": text}


def read_record(record, mapping=None):
    schema = detect_schema([record], mapping)
    return schema, make_record_reader(schema)(record)


TALK = [user("q"), assistant("a"), user("q2"), assistant("a2")]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
FUNCTIONS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]

CONVERSATIONS = [
    ({"question": "q", "answer": "a"}, "question/answer -> 2 turns", [user("q"), assistant("a")]),
    (
        {"instruction": "i", "input": "x", "output": "o"},
        "instruction/output -> 2 turns, with input",
        [user("i\nx"), assistant("o")],
    ),
    (
        {"instruction": "i", "input": "", "output": "o"},
        "instruction/output -> 2 turns",
        [user("i"), assistant("o")],
    ),
    (
        {"instruction": "i", "context": "c", "response": "r", "category": "qa"},
        "instruction/response -> 2 turns, with context",
        [user("i\nc"), assistant("r")],
    ),
    (
        {"id": 1, "system_prompt": "s", "question": "q", "response": "r"},
        "question/response -> 2 turns, with system_prompt",
        [system("s"), user("q"), assistant("r")],
    ),
    (
        {"question": "q", "context": "c", "answers": {"text": ["a", "b"], "answer_start": [1]}},
        "question/answers.text[0] -> 2 turns, with context",
        [user("q\nc"), assistant("a")],
    ),
    (
        {"instruction": "i", "output": "o", "history": [["q", "a"]], "system": None},
        "instruction/output -> 2 turns, with history",
        [user("q"), assistant("a"), user("i"), assistant("o")],
    ),
    (
        {"prompt": TALK[:3], "response": "r"},
        "prompt/response -> all turns",
        [*TALK[:3], assistant("r")],
    ),
    ({"messages": TALK, "system": ""}, "messages -> all turns", TALK),
    ({"messages": json.dumps(TALK)}, "messages -> all turns", TALK),
    (
        {"conversations": TALK, "system": "s"},
        "conversations -> all turns, with system",
        [system("s"), *TALK],
    ),
    (
        {"messages": [system("s"), *TALK], "system": "s"},
        "messages -> all turns, with system",
        [system("s"), *TALK],
    ),
    (
        {
            "conversations": [
                {"from": "system", "value": "s"},
                {"from": "human", "value": "q"},
                {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
                {"from": "observation", "value": "2"},
                {"from": "gpt", "value": "a", "score": 1},
            ],
            "tools": json.dumps(FUNCTIONS),
        },
        "conversations -> all turns (from/value), with tools",
        [
            system("s"),
            user("q"),
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": "2"},
            {"role": "assistant", "score": 1, "content": "a"},
        ],
    ),
]


@pytest.mark.parametrize(("record", "description", "messages"), CONVERSATIONS)
def test_conversations(record, description, messages):
    serialized = json.dumps(record)
    schema, conversation = read_record(record)
    assert (schema.kind, schema.description) == ("conversation", description)
    assert (conversation.messages, conversation.trained, conversation.completion) == (messages, [], None)
    assert conversation.tools == (FUNCTIONS if record.get("tools") else None)
    assert json.dumps(record) == serialized


@pytest.mark.parametrize(
    ("columns", "form"),
    [
        ("messages conversations prompt completion text", "messages"),
        ("conversations prompt completion text input_ids", "messages"),
        ("chosen rejected prompt completion response text", "pair"),
        ("prompt completion question answer output text", "prompt-completion"),
        ("instruction input output text input_ids", "instruction"),
        ("input_ids text", "tokens"),
        ("text content", "text"),
        ("content", "text"),
    ],
)
def test_the_first_form_wins(columns, form):
    values = {"messages": TALK, "conversations": TALK, "input_ids": [1]}
    record = {name: values.get(name, name) for name in reversed(columns.split())}
    schema = detect_schema([record])
    assert schema.form == form
    make_record_reader(schema)(record)


def test_names_of_a_role_have_an_order():
    answers = {"answers": {"text": ["5"]}, "answer": "3", "output": "2", "response": "1"}
    for expected in "1235":
        _, conversation = read_record({"question": "q", **answers})
        assert conversation.messages[1]["content"] == expected
        answers.popitem()
    assert read_record({"instruction": "i", "completion": "c"})[1].messages == [user("i"), assistant("c")]
    assert read_record({"question": "1", "prompt": "2", "instruction": "3", "answer": "a"})[1].messages[0] == user("3")


def test_prompt_and_completion_know_where_the_completion_begins():
    assert read_record({"prompt": "p", "completion": "c"})[1] == Conversation([user("p"), assistant("c")], completion=1)
    _, conversation = read_record({"prompt": [system("s"), *TALK[:3]], "completion": [assistant("c"), user("x")]})
    assert (conversation.messages, conversation.completion) == (
        [system("s"), *TALK[:3], assistant("c"), user("x")],
        4,
    )
    _, conversation = read_record({"prompt": "p", "completion": "c", "system": "s"})
    assert (conversation.messages, conversation.completion) == ([system("s"), user("p"), assistant("c")], 2)


def test_flags_are_separate_from_messages():
    messages = [
        {**system("s"), "weight": 1},
        user("q"),
        {**assistant("a"), "weight": 0},
        {**user("q"), "train": True},
        {**assistant("a"), "train": False},
        {**assistant("a"), "weight": 1},
        assistant("a"),
    ]
    _, conversation = read_record({"messages": messages})
    assert conversation.messages == messages
    assert conversation.trained == [None, None, False, True, False, True, None]
    _, conversation = read_record({"messages": messages, "system": "s"})
    assert conversation.trained == [None, None, False, True, False, True, None]
    _, conversation = read_record(
        {"prompt": TALK[:1], "completion": [{**assistant("a"), "train": False}], "system": "s"}
    )
    assert conversation.trained == [None, None, False]


def test_messages_keep_all_fields():
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "d"}]},
        {"role": "user", "content": "q", "name": "Ann"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "f", "arguments": '{"a":1}'}}],
        },
        {"role": "tool", "content": "", "tool_call_id": "1"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"name": "f", "arguments": None}],
            "name": None,
        },
        {
            "role": "assistant",
            "content": "a",
            "reasoning_content": "r",
            "tool_calls": None,
            "anything": 7,
        },
    ]
    _, conversation = read_record({"messages": messages, "tools": FUNCTIONS})
    assert conversation.messages is messages
    assert conversation.tools is FUNCTIONS


def test_a_pair_has_one_prompt_and_two_answers():
    good = Conversation([user("p"), assistant("g")], completion=1)
    bad = Conversation([user("p"), assistant("b")], completion=1)
    for record in (
        {"prompt": "p", "chosen": "g", "rejected": "b"},
        {"question": "p", "chosen": [assistant("g")], "rejected": [assistant("b")]},
        {"prompt": "p", "chosen": good.messages, "rejected": bad.messages},
        {"chosen": good.messages, "rejected": bad.messages},
        {
            "conversations": [{"from": "human", "value": "p"}],
            "chosen": {"from": "gpt", "value": "g"},
            "rejected": {"from": "gpt", "value": "b"},
        },
    ):
        schema, pair = read_record(record)
        assert (schema.kind, pair) == ("preference", PreferencePair(good, bad))
    _, pair = read_record(
        {
            "prompt": "p",
            "chosen": [system("s"), *good.messages],
            "rejected": [system("s"), *bad.messages],
        }
    )
    assert pair.chosen == Conversation([system("s"), *good.messages], completion=2)
    assert read_record({"chosen": "text one", "rejected": "text two"})[1] == PreferencePair("text one", "text two")


def test_a_label_makes_a_labelled_conversation():
    conversation = Conversation([user("p"), assistant("c")], completion=1)
    for value in (True, False, 1, 0, 1.0, "True", "0"):
        schema, labelled = read_record({"prompt": "p", "completion": "c", "label": value})
        good = value in (True, "True")
        assert (schema.kind, labelled) == ("preference", LabelledConversation(conversation, label=good))
        assert schema.description == "prompt/completion -> 2 turns and a preference label"
    assert read_record({"prompt": "p", "completion": "c", "label": True}, {"label": ""})[1] == conversation
    assert read_record({"question": "p", "answer": "c", "label": True})[1] == LabelledConversation(
        conversation, label=True
    )
    last = len(TALK) - 1
    expected = LabelledConversation(Conversation(TALK, completion=last), label=False)
    assert read_record({"messages": TALK, "label": False})[1] == expected


@pytest.mark.parametrize("values", [[0, 3, 2], [0.5], ["toxic", "mild", "true"], [0, -1, 7], [[0]]])
def test_a_label_of_another_task_is_ignored(values):
    rows = [{"prompt": "p", "completion": "c", "label": value} for value in values]
    assert detect_schema(rows).kind == "conversation"
    # A value that is no label must not turn bad answers into good ones.
    assert detect_schema([*rows, *[{**rows[0], "label": False}] * 4]).kind == "preference"
    assert detect_schema(rows, {"label": "label"}).kind == "preference"


def test_token_rows_lose_their_padding_and_keep_their_mask():
    _, row = read_record({"input_ids": [5, 6, 7]})
    assert (row.ids.tolist(), row.flags.is_plain) == ([5, 6, 7], True)
    _, row = read_record(
        {
            "input_ids": [0, 5, 6, 7, 0],
            "labels": [-100, -100, 6, 7, -100],
            "attention_mask": [0, 1, 1, 1, 0],
        }
    )
    assert (row.ids.tolist(), row.flags.trained.tolist()) == ([5, 6, 7], [False, True, True])
    _, row = read_record({"input_ids": [5, 6], "labels": [5, 6], "loss_mask": [0, 1]})
    assert row.flags.trained.tolist() == [False, True]
    _, row = read_record({"input_ids": np.array([5, 6], np.uint16), "labels": np.array([-100, 6])})
    assert (row.ids.tolist(), row.flags.trained.tolist()) == ([5, 6], [False, True])
    _, row = read_record({"toks": {"ids": [5]}}, {"input_ids": "toks.ids"})
    assert row.ids.tolist() == [5]


def test_a_map_names_columns_and_the_rest_is_still_detected():
    record = {
        "q": "?",
        "a": "!",
        "input": "x",
        "text": "t",
        "deep": {"list": [{"s": "sys"}]},
        "a.b": "dotted",
    }
    assert read_record(record, parse_mapping("prompt=q,response=a"))[1].messages == [
        user("?\nx"),
        assistant("!"),
    ]
    mapping = parse_mapping(" prompt=q, response=a.b ,context=,system=deep.list[-1].s")
    assert read_record(record, mapping)[1].messages == [system("sys"), user("?"), assistant("dotted")]
    assert read_record(record, {"text": "deep.list[0].s"})[1] == "sys"
    assert read_record({"input": "i", "output": "o"}, {"prompt": "input"})[1].messages == [
        user("i"),
        assistant("o"),
    ]
    assert read_record({"messages": TALK, "text": "t"}, {"text": "text"})[1] == "t"


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        (
            "promt=q,answer=a",
            [
                "map.promt: unknown role; did you mean 'prompt'?",
                "map.answer: unknown role; did you mean 'response'?",
            ],
        ),
        ("prompt", ["map: 'prompt' is not role=column"]),
        ("", ["map: '' is not role=column"]),
        ("text=a,text=b", ["map.text: named twice, as 'a' and 'b'"]),
        (
            "text=a,messages=b",
            ["map: no record has messages, text together; valid combinations are messages + "],
        ),
    ],
)
def test_a_map_is_checked_at_once(text, problems):
    with pytest.raises(SettingsError) as caught:
        parse_mapping(text)
    assert len(caught.value.problems) == len(problems)
    for problem, expected in zip(caught.value.problems, problems, strict=True):
        assert expected in problem


def test_columns_of_a_map_must_be_there():
    with pytest.raises(SchemaError) as caught:
        detect_schema(
            [{"question": "q", "answer": "a"}],
            {"prompt": "questoin", "response": "answers.text[0]"},
        )
    assert str(caught.value) == (
        "--map prompt=questoin: no column 'questoin'; did you mean 'question'?; "
        "--map response=answers.text[0]: no column 'answers.text[0]'; the records have 'question', 'answer': "
        "name columns that every input has, prepare inputs with other columns separately, or give each input its own "
        "mapping in a YAML manifest"
    )


HUMAN_EVAL = {
    "task_id": "1",
    "prompt": "def f():",
    "entry_point": "f",
    "canonical_solution": " pass",
    "test": "t",
}


@pytest.mark.parametrize(
    ("record", "message", "suggestion"),
    [
        (
            HUMAN_EVAL,
            "the records have 'task_id', 'prompt', 'entry_point', 'canonical_solution', 'test'; 'prompt' is a known",
            "prompt=prompt,response=canonical_solution",
        ),
        (
            {"instuction": "i", "outputs": "o"},
            "'instuction' is near 'instruction', 'outputs' is near 'output'",
            "prompt=instuction,response=outputs",
        ),
        (
            {"Question": "q", "Answer": "a", "id": 3},
            "'id' (a number)",
            "prompt=Question,response=Answer",
        ),
        (
            {"input": "i", "output": "o"},
            "'output' is a known response column, but there is no instruction",
            "prompt=input,response=output",
        ),
        ({"utterance": "u", "response": "r"}, "", "prompt=utterance,response=response"),
        (
            {"question": "q", "answer": ["a"]},
            "'answer' (an array); 'question' is a known prompt column, but there is no response",
            None,
        ),
        ({"question": "q", "answer": 3, "choices": [1]}, "'answer' (a number)", None),
        ({"conversatons": TALK}, "'conversatons' is near 'conversations'", "messages=conversatons"),
        ({"body": "b", "id": 1}, "known columns are messages,", "text=body"),
        ({"question": "q"}, "or --map text=...; for prompt-only data pass --prompts", None),
        ({"prompt": [user("q")], "truth": 4}, "for prompt-only data pass --prompts", None),
        ({"title": "a", "author": "b", "year": "c"}, "known columns are messages,", None),
        (
            {"User query": "a", "reply": "b"},
            "--map 'prompt=User query,response=reply'",
            "prompt=User query,response=reply",
        ),
        (
            {"prompt": "p"},
            "no response, output, answer, completion or answers.text[0] with the response",
            None,
        ),
        ({"text": None, "messages": 5}, "'text' (null), 'messages' (a number)", None),
        ({}, "the first records are empty", None),
    ],
)
def test_an_unknown_record_is_refused_with_the_map_that_would_read_it(record, message, suggestion):
    with pytest.raises(SchemaError) as caught:
        detect_schema([record])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert (caught.value.suggestion, caught.value.columns) == (suggestion, tuple(record))
    if suggestion:
        make_record_reader(detect_schema([record], parse_mapping(suggestion)))(record)


def test_no_records_are_no_schema():
    with pytest.raises(SchemaError, match="there are no records"):
        detect_schema([])


def test_a_few_other_records_do_not_change_a_schema():
    good = {"question": "q", "answer": "a"}
    odd_records = [{"messages": TALK}, {"text": "t"}, {}, {"answer": 5}]
    assert detect_schema([*odd_records, *[good] * 4]).form == "instruction"
    assert detect_schema([{}, {}, good]).form == "instruction"


def test_late_columns_are_read():
    schema = detect_schema([{"instruction": "i", "output": "o"}])
    record = {"instruction": "i", "output": "o", "input": "x", "system": "s"}
    assert make_record_reader(schema)(record).messages == [system("s"), user("i\nx"), assistant("o")]


IDS = {"input_ids": [1, 2]}


@pytest.mark.parametrize(
    ("first_record", "late_columns", "role"),
    [
        ({"prompt": "q", "completion": "a"}, {"label": False}, "label"),
        ({"question": "q", "answer": "a", "label": ""}, {"label": "false"}, "label"),
        ({"messages": TALK, "label": None}, {"label": 0}, "label"),
        (IDS, {"loss_mask": [0, 1]}, "loss_mask"),
        (IDS, {"labels": [-100, 2]}, "labels"),
        (IDS | {"attention_mask": None}, {"attention_mask": [0, 1]}, "attention_mask"),
        ({"chosen": "q a", "rejected": "q b"}, {"prompt": "q"}, "prompt"),
    ],
)
def test_late_columns_that_would_change_a_record_are_refused(first_record, late_columns, role):
    reader = make_record_reader(detect_schema([first_record] * 3))
    reader(first_record)
    with pytest.raises(UnusableRecordError, match=f"column '{role}' holds .* first records have no value.*{role}="):
        reader(first_record | late_columns)
    make_record_reader(detect_schema([first_record] * 3, {role: ""}))(first_record | late_columns)
    # In the first records the column belongs to another task or is used.
    make_record_reader(detect_schema([first_record | late_columns] * 3))(first_record | late_columns)


def test_real_files(real_data):
    def read_lines(name):
        opener = gzip.open if name.endswith("gz") else open
        with opener(real_data / name, "rt") as file:
            return [json.loads(line) for line in file]

    gsm, c4 = read_lines("gsm8k_train.jsonl"), read_lines("c4_demo.jsonl")
    alpaca = json.loads((real_data / "alpaca_en_demo.json").read_text())
    for rows, description in (
        (gsm, "question/answer -> 2 turns"),
        (alpaca, "instruction/output -> 2 turns, with input"),
        (c4, "text -> plain text"),
    ):
        schema = detect_schema(rows[:100])
        assert schema.description == description
        reader = make_record_reader(schema)
        assert len([reader(row) for row in rows]) == len(rows)
    with pytest.raises(SchemaError) as caught:
        detect_schema(read_lines("HumanEval.jsonl.gz"))
    assert str(caught.value).endswith(
        "--map prompt=prompt,response=canonical_solution; for prompt-only data pass --prompts"
    )
    mapping = parse_mapping("prompt=prompt,response=canonical_solution")
    rows = read_lines("HumanEval.jsonl.gz")
    conversation = make_record_reader(detect_schema(rows, mapping))(rows[0])
    assert conversation.messages == [user(rows[0]["prompt"]), assistant(rows[0]["canonical_solution"])]


def test_answers_without_a_prompt_are_read_if_they_are_mapped():
    rows = [{"response": "Only this."}, {"response": "And that.", "system": "Be brief."}]
    with pytest.raises(SchemaError, match=r"--map response=response reads answers without a prompt"):
        detect_schema(rows)
    for mapping in ({"response": "response"}, {"response": "response", "prompt": ""}):
        read = make_record_reader(detect_schema(rows, mapping))
        assert read(rows[0]).messages == [{"role": "assistant", "content": "Only this."}]
        assert read(rows[0]).completion == 0
        assert [turn["role"] for turn in read(rows[1]).messages] == ["system", "assistant"]
    # With a prompt, it is one.
    pairs = [{"response": "A.", "prompt": "Q?"}]
    assert len(make_record_reader(detect_schema(pairs, {"response": "response"}))(pairs[0]).messages) == 2


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "each row is one message"),
        ([{"role": "user", "content": "q", "id": 1}], "each row is one message .* --map text=content"),
        (
            [{"text": ["one", "two"], "id": [1, 2]}],
            r"""'text' is a list of 2 .* jq -c '.\["text"\]\[\] \| {text: .}'""",
        ),
        ([{"pages": [{"text": "a"}, {"text": "b"}]}], r"""jq -c '.\["pages"\]\[\]'.* joins them to one text"""),
    ],
)
def test_rows_that_are_parts_or_hold_others_are_no_documents(rows, message):
    with pytest.raises(SchemaError, match=message):
        detect_schema(rows)


def test_a_role_that_no_message_has_leaves_a_text():
    assert detect_schema([{"role": "engineer", "content": "a text"}]).form == "text"
    mapping = {"text": "content"}
    assert detect_schema([{"role": "user", "content": "a text"}], mapping).form == "text"
