"""Records of prompts with carried columns."""

import datetime as dt
import json
from types import MappingProxyType

import numpy as np
import pytest

from batchloom.chat import detect_schema, make_record_reader
from batchloom.core.errors import SchemaError, UnusableRecordError
from batchloom.preparation import ChatEncoder, ChatRecipe, OverlongError
from batchloom.preparation.documents.encode_answers import encode_prompts
from batchloom.store import PROMPT
from chat.conversations import CHATML, LLAMA3, THINKING

NO_CARRY = MappingProxyType({})


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


SYSTEM, TOOL = {"role": "system", "content": "s"}, {"role": "tool", "content": "1"}


def read_prompt(record, carry=NO_CARRY, mapping=None):
    schema = detect_schema([record], mapping, carry=carry)
    assert schema.kind == "prompt"
    return make_record_reader(schema)(record)


PROMPTS = {
    "TRL text": ({"prompt": "q", "solution": "4"}, [user("q")]),
    "TRL messages": ({"prompt": [SYSTEM, user("q")], "solution": "4"}, [SYSTEM, user("q")]),
    "messages as JSON text": ({"prompt": json.dumps([user("q")])}, [user("q")]),
    "verl": (
        {"data_source": "x", "prompt": [user("q")], "ability": "math", "reward_model": {"ground_truth": "4"}},
        [user("q")],
    ),
    "GSM8K": ({"question": "q", "answer": "4"}, [user("q")]),
    "open-r1": ({"problem": "q", "solution": "4"}, [user("q")]),
    "alpaca": ({"instruction": "q", "input": "1", "output": "4", "system": "s"}, [SYSTEM, user("q\n1")]),
    "alpaca, history": (
        {"instruction": "q", "output": "4", "history": [["p", "x"]]},
        [user("p"), assistant("x"), user("q")],
    ),
    "ms-swift, with the answer": (
        {"messages": [user("p"), assistant("x"), user("q"), assistant("4")], "solution": "4"},
        [user("p"), assistant("x"), user("q")],
    ),
    "ms-swift, without it": ({"messages": [SYSTEM, user("q")]}, [SYSTEM, user("q")]),
    "ShareGPT": (
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "4"}]},
        [user("q")],
    ),
    "after the result of a tool": ({"prompt": [user("q"), assistant("x"), TOOL]}, [user("q"), assistant("x"), TOOL]),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts(name):
    record, messages = PROMPTS[name]
    prompt = read_prompt(record)
    assert prompt.conversation.messages == messages
    assert prompt.conversation.is_prompt
    assert json.loads(prompt.fields) == {"prompt": messages}


def test_carried_columns_keep_their_values():
    values = {
        "answer": "ça\u2028 \" \\", "number": 2.5, "big": 10**30, "flag": False, "none": None,
        "list": [1, [None, {"a": 1}]], "object": {"b": {"c": [True]}}, "array": np.array([1, 2]), "dotted.name": 1,
    }  # fmt: skip
    record = {"prompt": "q", **values, "reward_model": {"ground_truth": [4]}}
    carry = {name: name for name in values if name != "dotted.name"} | {
        "truth": "reward_model.ground_truth",
        "d": "dotted.name",
    }
    fields = json.loads(read_prompt(record, carry).fields)
    expected = {**values, "array": [1, 2], "truth": [4], "d": 1, "prompt": [user("q")]}
    del expected["dotted.name"]
    assert fields == expected
    assert list(fields) == ["prompt", *carry]


REFUSED = {
    "an answer at the end": ({"prompt": [user("q"), assistant("a")]}, {}, "ends with a turn of the role assistant"),
    "no question": ({"messages": [SYSTEM, assistant("a")]}, {}, "ends with a turn of the role system"),
    "an empty prompt": ({"prompt": " "}, {}, "column 'prompt' is empty: the prompt would be empty"),
    "a number": ({"prompt": 5}, {}, "column 'prompt' holds a number, not text"),
    "a number as content": ({"prompt": [{"role": "user", "content": 5}]}, {}, "content holds a number"),
    "an unknown role": ({"prompt": [{"role": "asker", "content": "q"}]}, {}, "role is 'asker'"),
    "null": ({"prompt": None}, {}, "column 'prompt' is null"),
    "no column to carry": ({"prompt": "q"}, {"answer": "answer"}, "no column 'answer'"),
    "an image": ({"prompt": "q", "images": ["i.png"]}, {}, "column 'images' is not empty"),
    "template arguments that are none": (
        {"prompt": "q", "chat_template_kwargs": 5}, {}, "column 'chat_template_kwargs' holds",
    ),
    "not a number": ({"prompt": "q", "answer": float("nan")}, {"answer": "answer"}, "JSON cannot hold .*not JSON compliant"),
    "infinity inside": ({"prompt": "q", "answer": [float("inf")]}, {"answer": "answer"}, "column 'answer' holds an array"),
    "bytes": ({"prompt": "q", "answer": b"4"}, {"answer": "answer"}, "bytes is no JSON type"),
    "a date": ({"prompt": "q", "answer": dt.date(2024, 1, 1)}, {"answer": "answer"}, "date is no JSON type"),
    "a lone surrogate": ({"prompt": "q", "answer": "\ud800"}, {"answer": "answer"}, "surrogates not allowed"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_prompts(name):
    record, carry, sentence = REFUSED[name]
    schema = detect_schema(
        [{"messages": [user("q")]} if "messages" in record else {"prompt": "q", "answer": ""}], carry=carry
    )
    with pytest.raises(UnusableRecordError, match=sentence):
        make_record_reader(schema)(record)


@pytest.mark.parametrize(
    ("record", "carry", "mapping", "sentence"),
    [
        ({"body": "q"}, {}, {}, "no prompt: the records have 'body' and none of 'prompt', .* --map prompt="),
        ({"prompt": "q", "answr": "4"}, {"answer": "answer"}, {}, "--carry answer: no column 'answer'.* 'answr'"),
        ({"prompt": "q"}, {"a": "b.c"}, {"prompt": "p"}, "--map prompt=p: no column 'p'.*--carry b.c: no column"),
    ],
)  # fmt: skip
def test_columns_that_no_record_has(record, carry, mapping, sentence):
    with pytest.raises(SchemaError, match=sentence):
        detect_schema([record], mapping, carry=carry)


@pytest.mark.parametrize("template", [CHATML, LLAMA3, THINKING], ids=["chatml", "llama3", "thinking"])
@pytest.mark.parametrize("name", ["bytes", "nfc", "metaspace"])
def test_the_ids_are_those_of_apply_chat_template(tokenizers, hf_tokenizers, tmp_path, name, template):
    (tmp_path / "x.jinja").write_text(template)
    contents = ["q", "The fox\n", "ça va 😀", "<|im_end|> typed", "<think>"]
    conversations = [[user(text)] for text in contents]
    conversations += [[SYSTEM, user("p"), assistant("x"), user(text)] for text in contents]
    prompts = [read_prompt({"prompt": messages}) for messages in conversations]
    encoder = ChatEncoder(tokenizers[name], str(tmp_path / "x.jinja"))
    encoded = encode_prompts(prompts, encoder, ChatRecipe(), np.dtype(np.int32))
    spelled = [n for n, messages in enumerate(conversations) if "typed" in messages[-1]["content"]]
    documents = np.split(encoded.ids, np.cumsum(encoded.lengths)[:-1])
    assert encoded.sides.tolist() == [PROMPT] * len(documents)
    assert not encoded.flags.trained.any()
    assert list(encoded.fields) == [prompts[number].fields for number in encoded.numbers.tolist()]
    if name == "metaspace":
        # A control token in a text needs a byte-level tokenizer.
        assert [fault.number for fault in encoded.faults] == spelled
    else:
        assert not encoded.faults
    for number, document in zip(encoded.numbers.tolist(), documents, strict=True):
        expected = hf_tokenizers[name].apply_chat_template(
            conversations[number], chat_template=template, add_generation_prompt=True, return_dict=True
        )["input_ids"]
        # transformers reads a typed control token as the token.
        assert (document.tolist() == expected) is (number not in spelled)


def test_prompts_that_are_too_long(tokenizers, tmp_path):
    (tmp_path / "x.jinja").write_text(CHATML)
    encoder = ChatEncoder(tokenizers["bytes"], str(tmp_path / "x.jinja"))
    prompts = [read_prompt({"prompt": text}) for text in ("q", "word " * 50, "r")]
    for overlong in ("drop", "split", "truncate-turns"):
        rules = ChatRecipe(max_tokens=30, overlong=overlong)
        encoded = encode_prompts(prompts, encoder, rules, np.dtype(np.int32))
        assert encoded.numbers.tolist() == [0, 2]
        assert [(fault.number, fault.rule) for fault in encoded.dropped] == [(1, "overlong")]
    with pytest.raises(OverlongError, match="tokens where 30 are allowed"):
        encode_prompts(prompts, encoder, ChatRecipe(max_tokens=30, overlong="error"), np.dtype(np.int32))


def test_a_prompt_has_template_arguments_and_tools():
    tools = [{"type": "function", "function": {"name": "f"}}]
    record = {"prompt": "q", "chat_template_kwargs": {"enable_thinking": False}, "tools": tools}
    conversation = read_prompt(record).conversation
    assert (conversation.template_args, conversation.tools) == ({"enable_thinking": False}, tools)
