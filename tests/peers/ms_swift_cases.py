"""Records in the formats that ms-swift documents for its own data sets."""

import json
from typing import Any

from peers.cases import Case

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer", "description": "x"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS}}
CALL = {"name": "add", "arguments": {"a": 1}}
SYSTEM = {"role": "system", "content": "Be brief."}
MESSAGES = [
    SYSTEM,
    {"role": "user", "content": "What is 1 + 1?"},
    {"role": "assistant", "content": "2, ça va?"},
    {"role": "user", "content": "And 2 + 2?"},
    {"role": "assistant", "content": "4 😀"},
]
QUESTION = [SYSTEM, {"role": "user", "content": "What is 1 + 1?"}]
TWO, THREE = {"role": "assistant", "content": "Two."}, {"role": "assistant", "content": "Three."}
QUERY = {"query": "What is 1 + 1?", "response": "2."}
CALLS = [
    SYSTEM,
    {"role": "user", "content": "What is 1?"},
    {"role": "tool_call", "content": json.dumps(CALL)},
    {"role": "tool_response", "content": "1"},
    {"role": "assistant", "content": "It is 1."},
]
OPENAI_CALLS = [
    *CALLS[:2],
    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]},
    {"role": "tool", "content": "1"},
    CALLS[-1],
]


def flag(number: int, **flags: Any) -> list[dict[str, Any]]:
    """Return the messages with flags at one of them."""
    return [{**message, **flags} if n == number else message for n, message in enumerate(MESSAGES)]


def sft(name: str, record: dict[str, Any], template: str = "chatml", **fields: Any) -> Case:
    """Return a case of supervised training."""
    objective = fields.pop("objective", "sft")
    settings = {"template": template, **fields.pop("settings", {})}
    differs = fields.pop("differs", "" if template == "llama3" else "line ends")
    return Case(name, [record], objective, {"template": template, **fields}, settings, differs)


def preference(name: str, record: dict[str, Any], mode: str, differs: str = "") -> Case:
    """Return a case of pairs or labelled answers."""
    objective: Any = {"rlhf": "pairs", "kto": "labels"}[mode]
    return Case(name, [record], objective, {"template": "chatml", "mode": mode}, {"template": "chatml"}, differs)


CASES = [
    sft("messages", {"messages": MESSAGES}),
    sft("messages, llama3", {"messages": MESSAGES}, "llama3"),
    sft("messages, no system", {"messages": MESSAGES[1:]}),
    sft("messages, loss false", {"messages": flag(2, loss=False)}),
    sft(
        "messages, loss true", {"messages": flag(2, loss=True)}, loss_scale="last_round", settings={"train_on": "last"}
    ),
    sft(
        "messages, loss_scale of a message",
        {"messages": flag(4, loss_scale=0.5)},
        "llama3",
        objective="weighted",
        is_binary_loss_scale=False,
    ),
    sft("loss_scale last_round", {"messages": MESSAGES}, loss_scale="last_round", settings={"train_on": "last"}),
    sft(
        "loss_scale all", {"messages": MESSAGES}, loss_scale="all", settings={"train_on": "all"}, differs="first token"
    ),
    sft("query, response", QUERY),
    sft(
        "query, response, history, system",
        {**QUERY, "history": [["Hi", "Ho!"]], "system": "Be brief."},
    ),
    sft("instruction, input, output", {"instruction": "Add.", "input": "1 + 1", "output": "2."}),
    sft(
        "conversations (from, value)",
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho!"}]},
    ),
    sft(
        "conversation (human, assistant)",
        {
            "system": "Be brief.",
            "conversation": [{"human": "Hi", "assistant": "Ho!"}, {"human": "1", "assistant": "2"}],
        },
    ),
    sft("tool_call, tool_response", {"messages": CALLS, "tools": [TOOL]}, agent_template="hermes"),
    sft(
        "tool_call, loss_scale last_round",
        {"messages": CALLS, "tools": [TOOL]},
        agent_template="hermes",
        loss_scale="last_round",
        settings={"train_on": "last"},
    ),
    sft(
        "truncation_strategy right",
        {"messages": MESSAGES},
        max_length=36,
        truncation_strategy="right",
        settings={"max_tokens": 36, "overlong": "truncate"},
        differs="",
    ),
    sft(
        "truncation_strategy left",
        {"messages": MESSAGES},
        max_length=20,
        truncation_strategy="left",
        settings={"max_tokens": 20, "overlong": "truncate-left"},
    ),
    sft("tool_calls of OpenAI", {"messages": OPENAI_CALLS, "tools": [TOOL]}, agent_template="hermes"),
    sft("tools as text", {"messages": OPENAI_CALLS, "tools": json.dumps([TOOL])}, agent_template="hermes"),
    sft(
        "pretraining",
        {"messages": [{"role": "assistant", "content": "Rivers run to the sea."}]},
        use_chat_template=False,
        settings={"template": None, "mapping": {"text": "messages[0].content"}},
        differs="first token",
    ),
    preference("rejected_response", {"messages": [*QUESTION, TWO], "rejected_response": "Three."}, "rlhf"),
    preference("rejected_messages", {"messages": [*QUESTION, TWO], "rejected_messages": [*QUESTION, THREE]}, "rlhf"),
    preference(
        "rejected_response, several turns",
        {"messages": MESSAGES, "rejected_response": "Five."},
        "rlhf",
        differs="earlier answers",
    ),
    preference("query, response, rejected_response", {**QUERY, "rejected_response": "3."}, "rlhf"),
    preference("label", {"messages": [*QUESTION, TWO], "label": True}, "kto"),
    Case(
        "prompts",
        [{"messages": QUESTION, "solution": "2"}],
        "prompts",
        {"template": "chatml"},
        {"template": "chatml", "prompts": True},
    ),
]
