"""Records in the formats that LLaMA-Factory documents, with the entries of its ``dataset_info.json``."""

import json
from typing import Any

from peers.cases import Case

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer", "description": "x"}}, "required": ["a"]}
TOOL = {"name": "add", "description": "Adds.", "parameters": PARAMETERS}
QWEN_TOOL = {"type": "function", "function": TOOL}
CALL = {"name": "add", "arguments": {"a": 1}}

ALPACA = {
    "instruction": "Add.",
    "input": "1 + 1",
    "output": "It's 2.",
    "system": "Be brief.",
    "history": [["Hi", "Ho!"]],
}
ALPACA_COLUMNS = {
    "prompt": "instruction",
    "query": "input",
    "response": "output",
    "system": "system",
    "history": "history",
}
SHAREGPT = [
    {"from": "human", "value": "What is 1 + 1?"},
    {"from": "gpt", "value": "2, ça va?"},
    {"from": "human", "value": "And 2 + 2?"},
    {"from": "gpt", "value": "4 😀"},
]
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 1 + 1?"},
    {"role": "assistant", "content": "2."},
    {"role": "user", "content": "And 2 + 2?"},
    {"role": "assistant", "content": "4."},
]
OPENAI_TAGS = {
    "role_tag": "role",
    "content_tag": "content",
    "user_tag": "user",
    "assistant_tag": "assistant",
    "system_tag": "system",
    "observation_tag": "tool",
}
OWN_TAGS = {
    "role_tag": "speaker",
    "content_tag": "utterance",
    "user_tag": "client",
    "assistant_tag": "bot",
    "system_tag": "rules",
}
OWN_MESSAGES = [
    {"speaker": "rules", "utterance": "Be brief."},
    {"speaker": "client", "utterance": "What is 1 + 1?"},
    {"speaker": "bot", "utterance": "2."},
]
WITH_CALLS = [
    {"from": "human", "value": "What is 1?"},
    {"from": "function_call", "value": json.dumps(CALL)},
    {"from": "observation", "value": "1"},
    {"from": "gpt", "value": "It is 1."},
]
RANKING = {"chosen": {"from": "gpt", "value": "Two."}, "rejected": {"from": "gpt", "value": "Three."}}


def sharegpt(columns: dict[str, str], **info: Any) -> dict[str, Any]:
    return {"formatting": "sharegpt", "columns": {"messages": "conversations", **columns}, **info}


def sft(name: str, record: dict[str, Any], info: dict[str, Any], template: str = "chatml", **fields: Any) -> Case:
    """Return a case of supervised training."""
    peer = {"info": info, "template": template, **fields.pop("peer", {})}
    settings = {"template": "chatml" if template == "qwen" else template, **fields.pop("settings", {})}
    differs = "" if template == "llama3" else "line ends"
    return Case(name, [record], peer=peer, settings=settings, differs=fields.pop("differs", differs), **fields)


def preference(name: str, records: list[dict[str, Any]], info: dict[str, Any], stage: str, **fields: Any) -> Case:
    """Return a case of pairs or labelled answers."""
    objective: Any = {"rm": "pairs", "kto": "labels"}[stage]
    peer = {"info": info, "template": "chatml", "stage": stage}
    return Case(name, records, objective, peer, {"template": "chatml", **fields.pop("settings", {})}, **fields)


ALPACA_INFO = {"columns": ALPACA_COLUMNS}
CASES = [
    sft("alpaca", ALPACA, ALPACA_INFO),
    sft("alpaca, llama3", ALPACA, ALPACA_INFO, "llama3"),
    sft("alpaca, empty input", {**ALPACA, "input": "", "history": []}, ALPACA_INFO),
    sft("alpaca, no system and history", {"instruction": "Add.", "input": "1", "output": "1."}, {}),
    sft("alpaca, mask_history", ALPACA, ALPACA_INFO, peer={"mask_history": True}, settings={"train_on": "last"}),
    sft(
        "alpaca, train_on_prompt",
        ALPACA,
        ALPACA_INFO,
        peer={"train_on_prompt": True},
        settings={"train_on": "all"},
        differs="",
    ),
    sft(
        "alpaca, own columns",
        {"q": "Add 1 and 1.", "a": "2."},
        {"columns": {"prompt": "q", "response": "a"}},
        settings={"mapping": {"prompt": "q", "response": "a"}},
    ),
    sft(
        "alpaca, default_system",
        {"instruction": "Add.", "output": "1."},
        {},
        "qwen",
        settings={"default_system": "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."},
    ),
    sft("sharegpt", {"conversations": SHAREGPT}, sharegpt({})),
    sft("sharegpt, llama3", {"conversations": SHAREGPT}, sharegpt({}), "llama3"),
    sft("sharegpt, system column", {"conversations": SHAREGPT, "system": "Be brief."}, sharegpt({"system": "system"})),
    sft(
        "sharegpt, system turn",
        {"conversations": [{"from": "system", "value": "Be brief."}, *SHAREGPT]},
        sharegpt({}),
    ),
    sft(
        "sharegpt, mask_history",
        {"conversations": SHAREGPT},
        sharegpt({}),
        peer={"mask_history": True},
        settings={"train_on": "last"},
    ),
    sft(
        "sharegpt, tools (qwen)",
        {"conversations": WITH_CALLS, "system": "Be brief.", "tools": json.dumps([TOOL])},
        sharegpt({"system": "system", "tools": "tools"}),
        "qwen",
    ),
    sft(
        "sharegpt, tools with their type (qwen)",
        {"conversations": WITH_CALLS, "system": "Be brief.", "tools": json.dumps([QWEN_TOOL])},
        sharegpt({"system": "system", "tools": "tools"}),
        "qwen",
    ),
    sft(
        "sharegpt, own tags",
        {"dialog": OWN_MESSAGES},
        {"formatting": "sharegpt", "columns": {"messages": "dialog"}, "tags": OWN_TAGS},
        settings={
            "mapping": {
                "messages": "dialog",
                "role": "speaker",
                "content": "utterance",
                "user": "client",
                "assistant": "bot",
                "system_role": "rules",
            }
        },
    ),
    sft(
        "sharegpt, tags of openai",
        {"messages": MESSAGES},
        {"formatting": "sharegpt", "columns": {"messages": "messages"}, "tags": OPENAI_TAGS},
    ),
    sft(
        "openai",
        {"messages": MESSAGES},
        {"formatting": "openai", "columns": {"messages": "messages"}, "tags": OPENAI_TAGS},
        differs="detailed thinking",
    ),
    sft(
        "openai, tool calls (qwen)",
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "What is 1?"},
                {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]},
                {"role": "tool", "content": "1"},
                {"role": "assistant", "content": "It is 1."},
            ],
            "tools": json.dumps([QWEN_TOOL]),
        },
        {"formatting": "openai", "columns": {"messages": "messages", "tools": "tools"}, "tags": OPENAI_TAGS},
        "qwen",
        differs="detailed thinking",
    ),
    Case(
        "pretraining",
        [{"text": "Rivers run to the sea."}, {"text": "日本語 😀"}],
        peer={"info": {"columns": {"prompt": "text"}}, "template": "default", "stage": "pt"},
    ),
    Case(
        "pretraining, eos of chatml",
        [{"text": "Rivers run to the sea."}],
        peer={"info": {"columns": {"prompt": "text"}}, "template": "chatml", "stage": "pt"},
        settings={"end_token": "<|im_end|>"},
    ),
    preference(
        "ranking, alpaca",
        [{"instruction": "Add.", "input": "1 + 1", "chosen": "2.", "rejected": "3."}],
        {
            "ranking": True,
            "columns": {"prompt": "instruction", "query": "input", "chosen": "chosen", "rejected": "rejected"},
        },
        "rm",
    ),
    preference(
        "ranking, sharegpt",
        [{"conversations": [*SHAREGPT[:3]], **RANKING}],
        sharegpt({"chosen": "chosen", "rejected": "rejected"}, ranking=True),
        "rm",
    ),
    preference(
        "kto, alpaca",
        [
            {"instruction": "Add.", "output": "1.", "kto_tag": True},
            {"instruction": "Sum.", "output": "7.", "kto_tag": False},
        ],
        {"columns": {"prompt": "instruction", "response": "output", "kto_tag": "kto_tag"}},
        "kto",
    ),
    preference(
        "kto, sharegpt",
        [{"conversations": SHAREGPT, "kto_tag": True}, {"conversations": SHAREGPT[:2], "kto_tag": False}],
        sharegpt({"kto_tag": "kto_tag"}),
        "kto",
    ),
    preference(
        "kto, openai",
        [{"messages": MESSAGES, "label": True}, {"messages": MESSAGES[:3], "label": False}],
        {
            "formatting": "openai",
            "columns": {"messages": "messages", "kto_tag": "label"},
            "tags": OPENAI_TAGS,
        },
        "kto",
        differs="detailed thinking",
    ),
    Case(
        "v1, loss_weight",
        [
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "value": "What is 1 + 1?"}]},
                    {"role": "assistant", "content": [{"type": "text", "value": "2."}], "loss_weight": 0.0},
                    {"role": "user", "content": [{"type": "text", "value": "And 2 + 2?"}]},
                    {"role": "assistant", "content": [{"type": "text", "value": "4."}], "loss_weight": 1.0},
                ]
            }
        ],
        peer={"stage": "v1"},
        settings={"template": "chatml"},
        differs="headers and line ends",
    ),
    Case(
        "v1, loss_weight of a share",
        [
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "value": "What is 1 + 1?"}]},
                    {"role": "assistant", "content": [{"type": "text", "value": "2."}], "loss_weight": 0.5},
                ]
            }
        ],
        "weighted",
        {"stage": "v1"},
        {"template": "chatml"},
        "headers and line ends",
    ),
]
