"""Unusable records: each reason names the position, the value and the remedy."""

import json

import pytest
from hypothesis import example, given, settings, strategies as st

from batchloom.chat import detect_schema, make_record_reader, parse_mapping
from batchloom.core.errors import SchemaError, UnusableRecordError
from tiers import examples

USER, ASSISTANT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
GOOD = {
    "messages": {"messages": [USER, ASSISTANT]},
    "instruction": {"question": "q", "answer": "a", "context": "c"},
    "prompt-completion": {"prompt": "q", "completion": "a", "label": True},
    "pair": {"prompt": "q", "chosen": "a", "rejected": "b"},
    "tokens": {"input_ids": [1], "labels": [1], "loss_mask": [1], "attention_mask": [1]},
    "text": {"text": "t"},
}


def make_reader(form):
    schema = detect_schema([GOOD[form]])
    assert schema.form == form
    return make_record_reader(schema)


def read_fault(form, record):
    with pytest.raises(UnusableRecordError) as caught:
        make_reader(form)(record)
    assert "\n" not in caught.value.reason
    return caught.value.reason


@pytest.mark.parametrize(
    ("form", "record", "message"),
    [
        (
            "text",
            {"text": 5},
            "column 'text' holds a number, not text; write it as a string or name another column with --map text=...",
        ),
        ("text", {"Text": "t"}, "no column 'text': the record has 'Text'; did you mean 'Text'?"),
        ("text", {}, "no column 'text': the record is empty"),
        (
            "instruction",
            {"question": "q", "answer": 42},
            "column 'answer' holds a number, not text",
        ),
        (
            "instruction",
            {"question": "q", "answer": None},
            "column 'answer' is null; fill in the response",
        ),
        (
            "instruction",
            {"question": "q"},
            "no column 'answer': the record has 'question'; name the one that holds the response with --map response=...",
        ),
        (
            "instruction",
            {"question": " \n", "answer": "a"},
            "column 'question' is empty: the prompt would be empty; fill it in or remove the record",
        ),
        (
            "instruction",
            {"question": "q", "answer": ""},
            "'answer' is empty: there would be nothing to train; fill it in or remove the record; for prompt-only data",
        ),
        (
            "instruction",
            {"question": "q", "answer": "a", "context": 0},
            "column 'context' holds a number",
        ),
        (
            "instruction",
            {"question": [USER], "answer": "a", "context": "c"},
            "column 'context' cannot join a prompt that is a list of messages; leave it out with --map context=",
        ),
        (
            "instruction",
            {"question": "q", "answer": "a", "history": [["q"]]},
            "history[0] is not a list of two texts",
        ),
        (
            "instruction",
            {"question": "q", "answer": "a", "system": 1},
            "column 'system' holds a number",
        ),
        (
            "instruction",
            {"question": "q", "answer": "a", "images": ["1.jpg"]},
            "column 'images' is not empty: images and audio need --processor",
        ),
        (
            "prompt-completion",
            {"prompt": "q", "completion": [USER], "label": True},
            "column 'completion' has no answer to train on",
        ),
        ("prompt-completion", {"prompt": "q", "completion": "a"}, "no column 'label'"),
        (
            "prompt-completion",
            {"prompt": "q", "completion": "a", "label": 2},
            "column 'label' holds 2, not true (good) or false (bad)",
        ),
        (
            "prompt-completion",
            {"prompt": "q", "completion": "a", "label": [True]},
            "column 'label' holds an array, not true (good) or false (bad)",
        ),
        (
            "pair",
            {"prompt": "q", "chosen": "a", "rejected": "a"},
            "columns 'chosen' and 'rejected' are equal: there is no preference",
        ),
        ("pair", {"prompt": "q", "chosen": "a"}, "no column 'rejected'"),
        (
            "pair",
            {"prompt": "q", "chosen": "a", "rejected": " "},
            "column 'rejected' is empty: there would be nothing to train",
        ),
        (
            "pair",
            {"prompt": "other", "chosen": [USER, ASSISTANT], "rejected": "b"},
            "column 'chosen' begins with a user turn and not with the prompt; where it holds whole conversations leave the prompt out with --map prompt=",
        ),
        (
            "tokens",
            {**GOOD["tokens"], "input_ids": [-1]},
            "input_ids[0] is -1: a token id is 0 or more",
        ),
        (
            "tokens",
            {**GOOD["tokens"], "input_ids": [1.5]},
            "input_ids[0] is 1.5, not a whole number",
        ),
        (
            "tokens",
            {**GOOD["tokens"], "input_ids": [[1], [1, 2]]},
            "input_ids[0] is an array, not a whole number",
        ),
        (
            "tokens",
            {**GOOD["tokens"], "input_ids": "1 2"},
            "column 'input_ids' holds a string, not a list of numbers",
        ),
        (
            "tokens",
            {**GOOD["tokens"], "labels": [1, 2]},
            "column 'labels' holds 2 numbers and 'input_ids' 1",
        ),
        (
            "tokens",
            {**GOOD["tokens"], "labels": [2]},
            "labels[0] is 2 where input_ids[0] is 1; a label is -100 or the id at the same position",
        ),
        ("tokens", {**GOOD["tokens"], "loss_mask": [2]}, "loss_mask[0] is 2; a mask holds 0 and 1"),
        (
            "tokens",
            {
                "input_ids": [1, 2, 3],
                "labels": [1, 2, 3],
                "loss_mask": [1, 1, 1],
                "attention_mask": [1, 0, 1],
            },
            "attention_mask[1] is 0 between tokens",
        ),
        ("tokens", {"input_ids": [1], "attention_mask": [1]}, "no column 'labels'"),
    ],
)
def test_columns(form, record, message):
    assert message in read_fault(form, record)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "column 'messages' is empty: a conversation without turns"),
        ("hello", "column 'messages' holds text that is not a JSON list of messages: "),
        ('{"role": "user"}', "column 'messages' holds an object, not a list of messages"),
        (5, "column 'messages' holds a number, not a list of messages"),
        ([USER], "column 'messages' has no answer to train on; for prompt-only data pass --prompts"),
        ([USER, "hi"], "messages[1] holds a string, not a message with role and content"),
        (
            [{"role": "Human", "content": "q"}],
            "tool, developer; did you mean 'user'? --map user=Human reads it so",
        ),
        ([{"role": "asistant", "content": "q"}], "did you mean 'assistant'?"),
        ([{"role": "User", "content": "q"}], "did you mean 'user'?"),
        ([{"role": "model", "content": "q"}], "did you mean 'assistant'?"),
        ([{"role": ["user"], "content": "q"}], "messages[0].role holds an array"),
        (
            [{"from": "gtp", "value": "q"}],
            "messages[0].from is 'gtp', not one of system, user, assistant, tool, developer; did you mean 'gpt'?",
        ),
        (
            [{"speaker": "a", "text": "q"}],
            "messages[0].role is missing: the message has 'speaker', 'text'",
        ),
        (
            [{"role": "user", "text": "q"}],
            "messages[0] has no content: the message has 'role', 'text'",
        ),
        ([{"role": "user", "content": 5}], "messages[0].content holds a number, not text"),
        ([{"role": "user", "content": None}], "messages[0].content holds null, not text"),
        (
            [{"role": "user", "content": None, "tool_calls": [{"name": "f"}]}],
            "messages[0].content holds null, not text",
        ),
        (
            [USER, {"role": "assistant", "content": None}],
            "messages[1].content holds null, not text",
        ),
        (
            [USER, {"role": "assistant", "content": None, "function_call": {"name": "f"}}],
            "write tool_calls",
        ),
        (
            [{"role": "user", "content": " "}],
            "messages[0].content is empty: the prompt would be empty",
        ),
        (
            [USER, {"role": "assistant", "content": []}],
            "messages[1].content is empty: there would be nothing to train",
        ),
        (
            [{"role": "user", "content": [{"type": "image", "image": "1.jpg"}]}],
            "messages[0].content[0] is of type 'image': images and audio need --processor",
        ),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "need --processor"),
        (
            [{"role": "user", "content": ["q"]}],
            'messages[0].content[0] holds a string, not {"type": "text"',
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": None}]}],
            "messages[0].content[0] has 'type', 'text', not",
        ),
        ([{**USER, "name": 5}], "messages[0].name holds a number, not text"),
        (
            [{**ASSISTANT, "tool_calls": "[]"}],
            "messages[0].tool_calls holds a string, not a list of calls",
        ),
        (
            [{**ASSISTANT, "tool_calls": [{"function": {}}]}],
            "messages[0].tool_calls[0] has no name",
        ),
        (
            [{**ASSISTANT, "tool_calls": [{"name": "f", "arguments": [1]}]}],
            "messages[0].tool_calls[0].arguments holds an array",
        ),
        *(
            ([{**ASSISTANT, "tool_calls": [{"name": "f", "arguments": text}]}], reason)
            for text, reason in (
                ('{"x": ', "arguments holds text that is not JSON of an object ({} for none)"),
                ("", "arguments holds text that is not JSON of an object ({} for none)"),
                ('{"x": NaN}', "arguments holds text that is not JSON of an object ({} for none)"),
                ("[1]", "arguments holds JSON of an array, not of an object"),
            )
        ),
        ([{**ASSISTANT, "train": "no"}], "messages[0].train is 'no'; it can be true or false"),
        (
            [{**ASSISTANT, "weight": "heavy"}],
            "messages[0].weight is 'heavy'; a loss weight is a number from 0 (not trained) to 55",
        ),
        (
            [{**ASSISTANT, "weight": 0, "train": True}],
            "messages[0] has train True and weight 0, which contradict each other; leave one out",
        ),
        (
            [{"from": "function_call", "value": "f(1)"}],
            "messages[0].value is not JSON of a function call",
        ),
    ],
)
def test_messages(messages, message):
    assert message in read_fault("messages", {"messages": messages})


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"tools": "[1"}, "column 'tools' holds text that is not a JSON list of tools"),
        ({"tools": {"name": "f"}}, "column 'tools' holds an object, not a list of tools"),
        ({"tools": ["f"]}, "tools[0] holds a string, not the object that describes a tool"),
        (
            {"messages": [{"role": "system", "content": "s"}, ASSISTANT], "system": "t"},
            "column 'system' and the system turn of the conversation differ; leave the column out with --map system=",
        ),
    ],
)
def test_columns_next_to_messages(extra, message):
    assert message in read_fault("messages", {**GOOD["messages"], **extra})


def test_a_pair_without_prompt_must_begin_alike():
    record = {"chosen": [USER, ASSISTANT], "rejected": [{**USER, "content": "x"}, ASSISTANT]}
    with pytest.raises(UnusableRecordError, match="do not begin with the same prompt"):
        make_record_reader(detect_schema([record]))(record)


# Texts with at least one visible character.
visible_texts = st.builds(
    "".join,
    st.tuples(st.text(), st.characters(codec="ascii", min_codepoint=33, max_codepoint=126), st.text()),
)
extra_fields = st.dictionaries(st.sampled_from(["name", "reasoning_content", "id", "Ω"]), visible_texts, max_size=2)
visible_contents = visible_texts | st.lists(
    st.fixed_dictionaries({"type": st.just("text"), "text": visible_texts}), min_size=1, max_size=3
)
visible_messages = st.builds(
    lambda role, content, extra: {"role": role, "content": content, **extra},
    st.sampled_from(["system", "user", "assistant", "tool", "developer"]),
    visible_contents,
    extra_fields,
)


@given(st.lists(visible_messages, max_size=8), visible_messages)
def test_all_turns_are_read_unchanged(messages, last):
    messages = [*messages, {**last, "role": "assistant"}]
    serialized = json.dumps(messages)
    assert make_reader("messages")({"messages": messages}).messages == json.loads(serialized)
    assert json.dumps(messages) == serialized
    assert make_reader("messages")({"messages": serialized}).messages == messages
    split = len(messages) // 2
    if split:
        labelled = make_reader("prompt-completion")(
            {"prompt": messages[:split], "completion": messages[split:], "label": True}
        )
        assert (labelled.conversation.messages, labelled.conversation.completion) == (messages, split)


@given(
    st.lists(st.tuples(st.sampled_from(["human", "gpt", "system", "observation"]), visible_texts), max_size=8),
    visible_texts,
)
def test_all_sharegpt_turns_are_read_in_order(turns, last):
    turns = [*turns, ("gpt", last)]
    roles = {"human": "user", "gpt": "assistant", "system": "system", "observation": "tool"}
    conversation = make_reader("messages")({"messages": [{"from": speaker, "value": text} for speaker, text in turns]})
    assert conversation.messages == [{"role": roles[speaker], "content": text} for speaker, text in turns]


@given(visible_texts, visible_texts, st.none() | visible_texts, st.none() | visible_texts)
def test_texts_are_read_unchanged(question, answer, context, system):
    record = {"question": question, "answer": answer, "context": context, "system": system}
    prompt = question if context is None else f"{question}\n{context}"
    expected = [] if system is None else [("system", system)]
    expected += [("user", prompt), ("assistant", answer)]
    messages = make_reader("instruction")(record).messages
    assert [(message["role"], message["content"]) for message in messages] == expected


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "role",
                    "content",
                    "from",
                    "value",
                    "tool_calls",
                    "train",
                    "weight",
                    "type",
                    "text",
                    "name",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=examples(300))
@given(st.sampled_from(sorted(GOOD)), st.data())
def test_any_value_in_any_column_is_read_or_a_named_fault(form, data):
    record = dict(GOOD[form])
    for column in data.draw(st.sets(st.sampled_from([*record, "system", "tools", "history", "images"]))):
        record[column] = data.draw(json_values)
    try:
        make_reader(form)(record)
    except UnusableRecordError:
        return


known_columns = st.sampled_from(
    [
        "messages",
        "conversations",
        "chosen",
        "rejected",
        "prompt",
        "completion",
        "question",
        "answer",
        "answers",
        "input",
        "label",
        "input_ids",
        "labels",
        "text",
        "content",
        "other",
        "Prompt",
        "prompt ",
        " answer",
    ]
)


@settings(max_examples=examples(300))
@example([{" answer": {"content": ""}}])
@example([{"prompt": [{"role": 1}, {"role": [None]}]}])
@example([{"messages": [], "chosen": [None], "rejected": [None]}])
@given(st.lists(st.dictionaries(known_columns, json_values, max_size=5), min_size=1, max_size=4))
def test_any_records_have_a_schema_or_a_named_refusal(records):
    try:
        schema = detect_schema(records)
    except SchemaError as refusal:
        if refusal.suggestion:
            detect_schema(records, parse_mapping(refusal.suggestion))
        return
    read_record = make_record_reader(schema)
    for record in records:
        try:
            read_record(record)
        except UnusableRecordError:
            continue


BLANK = st.sampled_from(["", " ", "\n\t", "\u00a0", "\u200b", "\ufeff", " \u2060\u00ad\n", "\u3000"])
texts_or_blank = BLANK | st.sampled_from(["q", " a ", "\u200bx", "0", "\u0301"])
any_turn = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant"]), "content": texts_or_blank | st.lists(
        st.fixed_dictionaries({"type": st.just("text"), "text": texts_or_blank}), max_size=2
    )}
)  # fmt: skip
any_column = st.none() | texts_or_blank | st.lists(any_turn, max_size=3)


def is_visible(content):
    texts = [content] if isinstance(content, str) else [part["text"] for part in content]
    return any(c.isprintable() and not c.isspace() for text in texts for c in text)


@settings(max_examples=examples(300))
@given(
    st.lists(
        st.fixed_dictionaries(
            {},
            optional={
                **dict.fromkeys(("instruction", "prompt", "question", "input", "system"), any_column),
                **dict.fromkeys(("response", "output", "answer", "completion"), any_column),
                "messages": any_column,
                "answers": st.fixed_dictionaries({"text": st.lists(texts_or_blank, max_size=2)}),
            },
        ),
        min_size=1,
        max_size=3,
    )
)
def test_no_prompt_and_no_answer_is_ever_empty(records):
    try:
        read_record = make_record_reader(detect_schema(records))
    except SchemaError:
        return
    for record in records:
        try:
            conversation = read_record(record)
        except UnusableRecordError:
            continue
        if isinstance(conversation, str):
            continue
        roles = [message["role"] for message in conversation.messages]
        assert "assistant" in roles
        for message in conversation.messages:
            assert message["role"] == "system" or is_visible(message["content"])


@pytest.mark.parametrize(
    ("records", "suggestion", "prompt"),
    [
        ([{"prompt ": "q", "response": "a"}], "prompt=prompt ,response=response", "q"),
        ([{" question": "q", "Answer ": "a"}], "prompt= question,response=Answer ", "q"),
    ],
)
def test_a_suggested_mapping_can_be_parsed(records, suggestion, prompt):
    with pytest.raises(SchemaError) as refusal:
        detect_schema(records)
    assert refusal.value.suggestion == suggestion
    read_record = make_record_reader(detect_schema(records, parse_mapping(suggestion)))
    assert read_record(records[0]).messages[0]["content"] == prompt
