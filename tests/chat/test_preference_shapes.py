"""The shapes of preference data that other libraries accept, and what each gives.

Sources: TRL's dataset formats; LLaMA-Factory's ``data/README.md`` (ranking, kto_tag); ms-swift's custom data
sets (rejected_response, rejected_messages, label); axolotl's ``prompt_strategies/dpo`` and ``kto``.
``tests/peers`` compares the tokens with those of the libraries that are installed.
"""

import json

import pytest

from batchloom.chat import detect_schema, make_record_reader, parse_mapping
from batchloom.core.document import Conversation, LabelledConversation, PreferencePair
from batchloom.core.errors import SchemaError, UnusableRecordError


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def human(text):
    return {"from": "human", "value": text}


def gpt(text):
    return {"from": "gpt", "value": text}


SYSTEM = {"role": "system", "content": "s"}
Q, GOOD, BAD = user("q"), assistant("good"), assistant("bad")
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
CALL = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "f"}}]}
RESULT = {"role": "tool", "content": "1"}
EARLIER = [user("p"), assistant("x")]

# Name of the shape: record, mapping, prompt, turns of the chosen answer, turns of the rejected answer.
PAIRS = {
    "TRL, explicit prompt": ({"prompt": "q", "chosen": "good", "rejected": "bad"}, "", [Q], [GOOD], [BAD]),
    "TRL, conversational": ({"prompt": [Q], "chosen": [GOOD], "rejected": [BAD]}, "", [Q], [GOOD], [BAD]),
    "TRL, implicit prompt": (
        {"chosen": [*EARLIER, Q, GOOD], "rejected": [*EARLIER, Q, BAD]}, "",
        [*EARLIER, Q], [GOOD], [BAD],
    ),
    "TRL, several turns": (
        {"prompt": [Q], "chosen": [CALL, RESULT, GOOD], "rejected": [BAD], "tools": TOOLS}, "",
        [Q], [CALL, RESULT, GOOD], [BAD],
    ),
    "ultrafeedback_binarized, which also has messages": (
        {"prompt": "q", "prompt_id": "1", "chosen": [Q, GOOD], "rejected": [Q, BAD], "messages": [Q, GOOD],
         "score_chosen": 1.0, "score_rejected": 0.0},
        "chosen=chosen,rejected=rejected", [Q], [GOOD], [BAD],
    ),
    "LLaMA-Factory alpaca ranking": (
        {"instruction": "q", "input": "more", "chosen": "good", "rejected": "bad"}, "",
        [user("q\nmore")], [GOOD], [BAD],
    ),
    "LLaMA-Factory alpaca ranking, history": (
        {"instruction": "q", "input": "", "history": [["p", "x"]], "system": "s", "chosen": "good", "rejected": "bad"},
        "", [SYSTEM, *EARLIER, Q], [GOOD], [BAD],
    ),
    "LLaMA-Factory sharegpt ranking": (
        {"conversations": [human("p"), gpt("x"), human("q")], "chosen": gpt("good"), "rejected": gpt("bad")}, "",
        [*EARLIER, Q], [GOOD], [BAD],
    ),
    "LLaMA-Factory openai ranking": (
        {"messages": [SYSTEM, Q], "chosen": GOOD, "rejected": BAD}, "",
        [SYSTEM, Q], [GOOD], [BAD],
    ),
    "ms-swift rejected_response": (
        {"messages": [SYSTEM, *EARLIER, Q, GOOD], "rejected_response": "bad"}, "",
        [SYSTEM, *EARLIER, Q], [GOOD], [BAD],
    ),
    "ms-swift rejected_response after tool calls": (
        {"messages": [*EARLIER, Q, CALL, RESULT, GOOD], "rejected_response": "bad", "tools": TOOLS}, "",
        [*EARLIER, Q], [CALL, RESULT, GOOD], [BAD],
    ),
    "ms-swift rejected_response of several turns": (
        {"messages": [*EARLIER, Q, GOOD], "rejected_response": [CALL, RESULT, BAD], "tools": TOOLS}, "",
        [*EARLIER, Q], [GOOD], [CALL, RESULT, BAD],
    ),
    "ms-swift rejected_messages": (
        {"messages": [*EARLIER, Q, GOOD], "rejected_messages": [*EARLIER, Q, BAD]}, "",
        [*EARLIER, Q], [GOOD], [BAD],
    ),
    "ms-swift conversations": (
        {"conversations": [human("q"), gpt("good")], "rejected_response": "bad"}, "",
        [Q], [GOOD], [BAD],
    ),
    "OpenAI": (
        {
            "input": {"messages": [SYSTEM, *EARLIER, Q], "tools": TOOLS, "parallel_tool_calls": True},
            "preferred_output": [CALL, RESULT, GOOD], "non_preferred_output": [BAD],
        }, "",
        [SYSTEM, *EARLIER, Q], [CALL, RESULT, GOOD], [BAD],
    ),
    "axolotl chatml.intel": (
        {"system": "s", "question": "q", "chosen": "good", "rejected": "bad"}, "",
        [SYSTEM, Q], [GOOD], [BAD],
    ),
    "axolotl chatml.icr": (
        {"system": "s", "input": "q", "chosen": "good", "rejected": "bad"}, "",
        [SYSTEM, Q], [GOOD], [BAD],
    ),
    "axolotl chatml.icr, mapped": (
        {"input": "q", "chosen": "good", "rejected": "bad"}, "prompt=input",
        [Q], [GOOD], [BAD],
    ),
    "axolotl chatml.prompt_pairs": (
        {"system": "s", "prompt": "q", "chosen": "good", "rejected": "bad"}, "",
        [SYSTEM, Q], [GOOD], [BAD],
    ),
    "axolotl chatml, long names": (
        {"system": "", "instruction": "q", "chosen_response": "good", "rejected_response": "bad"}, "",
        [Q], [GOOD], [BAD],
    ),
    "axolotl chatml.argilla_chat": ({"chosen": [Q, GOOD], "rejected": [Q, BAD]}, "", [Q], [GOOD], [BAD]),
    "axolotl chatml.ultra": (
        {"system": "s", "prompt": "q", "chosen": [Q, GOOD], "rejected": [Q, BAD]}, "",
        [SYSTEM, Q], [GOOD], [BAD],
    ),
    "axolotl chat_template.default": (
        {"messages": [*EARLIER, Q], "chosen": GOOD, "rejected": BAD}, "",
        [*EARLIER, Q], [GOOD], [BAD],
    ),
    "axolotl chat_template.default, texts": (
        {"messages": [*EARLIER, Q], "chosen": "good", "rejected": "bad"}, "",
        [*EARLIER, Q], [GOOD], [BAD],
    ),
    "axolotl chat_template.default, lists": (
        {"messages": [Q], "chosen": [Q, GOOD], "rejected": [Q, BAD]}, "",
        [Q], [GOOD], [BAD],
    ),
    "axolotl chat_template.default, a text as messages": (
        {"messages": "q", "chosen": GOOD, "rejected": BAD}, "",
        [Q], [GOOD], [BAD],
    ),
    "axolotl chat_template.default, field names": (
        {"conversation": [Q], "better": GOOD, "worse": BAD}, "prompt=conversation,chosen=better,rejected=worse",
        [Q], [GOOD], [BAD],
    ),
    "axolotl orpo": ({"system": "s", "chosen": [Q, GOOD], "rejected": [Q, BAD]}, "", [SYSTEM, Q], [GOOD], [BAD]),
}  # fmt: skip


def read_shape(record, mapping):
    schema = detect_schema([record] * 3, parse_mapping(mapping) if mapping else {})
    assert schema.kind == "preference"
    return make_record_reader(schema)(record)


def expect_pair(record, prompt, *answers):
    tools = TOOLS if "tools" in record or "tools" in record.get("input", "") else None
    return PreferencePair(*(Conversation(prompt + answer, tools, completion=len(prompt)) for answer in answers))


@pytest.mark.parametrize("name", PAIRS)
def test_pairs(name):
    record, mapping, *turns = PAIRS[name]
    assert read_shape(record, mapping) == expect_pair(record, *turns)


# CSV and Parquet hold lists of messages as text.
AS_TEXT = [
    name
    for name, (record, *_) in PAIRS.items()
    if any(isinstance(value, list) for value in record.values())
    and not any(isinstance(value, dict) for value in record.values())
    and not isinstance(record.get("rejected_response"), str)
]


@pytest.mark.parametrize("name", AS_TEXT)
def test_pairs_in_json_text(name):
    record, mapping, *turns = PAIRS[name]
    texts = {key: json.dumps(value) for key, value in record.items() if isinstance(value, list) and key != "history"}
    assert read_shape({**record, **texts}, mapping) == expect_pair(record, *turns)


# Name of the shape: record, turns, index of the judged answer, label.
LABELLED = {
    "TRL, prompt and completion": ({"prompt": "q", "completion": "good", "label": True}, [Q, GOOD], 1, True),
    "TRL, conversational": ({"prompt": [Q], "completion": [BAD], "label": False}, [Q, BAD], 1, False),
    "LLaMA-Factory alpaca": (
        {"instruction": "q", "input": "", "output": "good", "kto_tag": True}, [Q, GOOD], 1, True,
    ),
    "LLaMA-Factory sharegpt": ({"conversations": [human("q"), gpt("bad")], "kto_tag": False}, [Q, BAD], 1, False),
    "LLaMA-Factory openai": ({"messages": [SYSTEM, Q, GOOD], "label": True}, [SYSTEM, Q, GOOD], 2, True),
    "ms-swift": ({"messages": [*EARLIER, Q, BAD], "label": False}, [*EARLIER, Q, BAD], 3, False),
    "axolotl chatml.argilla": (
        {"system": "s", "instruction": "q", "completion": "good", "label": True}, [SYSTEM, Q, GOOD], 2, True,
    ),
    "axolotl chatml.argilla_chat": ({"completion": [*EARLIER, Q, BAD], "label": False}, [*EARLIER, Q, BAD], 3, False),
    "axolotl chatml.intel": ({"question": "q", "completion": "bad", "label": False}, [Q, BAD], 1, False),
    "axolotl chatml.prompt_pairs": ({"prompt": "q", "completion": "good", "label": 1}, [Q, GOOD], 1, True),
}  # fmt: skip


@pytest.mark.parametrize("name", LABELLED)
def test_labelled_answers(name):
    record, messages, completion, label = LABELLED[name]
    schema = detect_schema([record] * 3)
    expected = LabelledConversation(Conversation(messages, completion=completion), label)
    assert make_record_reader(schema)(record) == expected


REFUSED = {
    "the messages end with an answer": (
        {"messages": [Q, GOOD], "chosen": [Q, GOOD], "rejected": [Q, BAD]},
        SchemaError, "--map chosen=...,rejected=...",
    ),
    "axolotl zephyr.nectar: ranked answers": (
        {"prompt": "q", "answers": [{"answer": "good", "rank": 1}, {"answer": "bad", "rank": 2}]},
        SchemaError, "no schema fits",
    ),
    "ms-swift: another prompt on the rejected side": (
        {"messages": [Q, GOOD], "rejected_messages": [user("r"), BAD]},
        UnusableRecordError, "do not begin with the same prompt",
    ),
    "no question before the replaced answer": (
        {"messages": [SYSTEM, GOOD], "rejected_response": "bad"},
        UnusableRecordError, "do not begin with the same prompt",
    ),
    "the conversation has no answer to replace": (
        {"messages": [GOOD, Q], "rejected_response": "bad"},
        UnusableRecordError, "no answer to train on",
    ),
    "a number as an answer": (
        {"input": "q", "chosen": "good", "rejected": 5},
        UnusableRecordError, "column 'rejected' holds a number",
    ),
    "turns of the wrong type": (
        {"messages": [Q], "chosen": [GOOD], "rejected": [{"role": "assistant", "content": 5}]},
        UnusableRecordError, r"rejected\[0\].content holds a number",
    ),
    "a label that is a number": (
        {"completion": [Q, GOOD], "label": 2},
        UnusableRecordError, "column 'label' holds 2, not true",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_shapes(name):
    record, error, sentence = REFUSED[name]
    fine = {"rejected": "bad"} if isinstance(record.get("rejected"), int) else {}
    fine |= {"label": True} if record.get("label") == 2 else {}
    with pytest.raises(error, match=sentence):
        make_record_reader(detect_schema([{**record, **fine}] * 3))(record)
