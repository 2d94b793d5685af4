"""Records in the formats that axolotl documents, with the keys of its ``datasets`` block."""

from typing import Any

from peers.cases import Case

SYSTEM = {"role": "system", "content": "Be brief."}
MESSAGES = [
    SYSTEM,
    {"role": "user", "content": "What is 1 + 1?"},
    {"role": "assistant", "content": "2, ça va?"},
    {"role": "user", "content": "And 2 + 2?"},
    {"role": "assistant", "content": "4 😀"},
]
SENDERS = {"system": "system", "user": "human", "assistant": "gpt"}
SHAREGPT = [{"from": SENDERS[message["role"]], "value": message["content"]} for message in MESSAGES]
SPEAKERS = {"system": "rules", "user": "client", "assistant": "bot"}
OWN_MESSAGES = [{"speaker": SPEAKERS[message["role"]], "utterance": message["content"]} for message in MESSAGES]
MAPPING = {"role": "from", "content": "value"}
TEXT = "Rivers run to the sea."
DETAIL_TEXT = "First this. Then that."


def chat(name: str, record: dict[str, Any], **peer: Any) -> Case:
    """Return a case of the type ``chat_template``; ``settings`` are batchloom's, all others axolotl's."""
    settings = {"template": "chatml", **peer.pop("settings", {})}
    return Case(name, [record], "sft", {"type": "chat_template", **peer}, settings)


def flag(number: int, **flags: Any) -> list[dict[str, Any]]:
    """Return the messages with flags at one of them."""
    return [{**message, **flags} if n == number else message for n, message in enumerate(MESSAGES)]


def detail(begin: int, end: int, *, train: bool) -> dict[str, Any]:
    """Return a range of characters, the end included."""
    return {"begin_offset": begin, "end_offset": end, "train": train}


CASES = [
    chat("chat_template", {"messages": MESSAGES}),
    chat("chat_template, system column", {"messages": MESSAGES[1:], "system": "Be brief."}),
    chat(
        "chat_template, conversations",
        {"conversations": SHAREGPT},
        field_messages="conversations",
        message_property_mappings=MAPPING,
    ),
    chat(
        "chat_template, own names",
        {"dialog": OWN_MESSAGES},
        field_messages="dialog",
        message_property_mappings={"role": "speaker", "content": "utterance"},
        roles={"user": ["client"], "assistant": ["bot"], "system": ["rules"]},
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
    chat(
        "roles_to_train user, assistant",
        {"messages": MESSAGES},
        roles_to_train=["user", "assistant"],
        settings={"train_on": "user,assistant"},
    ),
    chat(
        "roles_to_train empty",
        {"messages": flag(2, train=True)},
        roles_to_train=[],
        message_field_training="train",
        settings={"train_on": "flagged"},
    ),
    chat("train_on_eos turn", {"messages": MESSAGES}, train_on_eos="turn"),
    chat("train_on_eos all", {"messages": MESSAGES}, train_on_eos="all", settings={"train_on_eos": "all"}),
    chat("train_on_eos last", {"messages": MESSAGES}, train_on_eos="last", settings={"train_on_eos": "last"}),
    chat("train_on_eos none", {"messages": MESSAGES}, train_on_eos="none", settings={"train_on_eos": "none"}),
    chat(
        "train_on_inputs",
        {"messages": MESSAGES},
        train_on_inputs=True,
        settings={"train_on": "system,user,assistant"},
    ),
    chat("training false", {"messages": flag(2, training=False)}, message_field_training="training"),
    chat("training true", {"messages": flag(1, training=True)}, message_field_training="training"),
    chat("train false", {"messages": flag(4, train=False)}, message_field_training="train"),
    chat(
        "train_detail",
        {
            "messages": [
                *MESSAGES[:2],
                {
                    "role": "assistant",
                    "content": DETAIL_TEXT,
                    "train_detail": [detail(0, 10, train=False), detail(11, len(DETAIL_TEXT) - 1, train=True)],
                },
            ]
        },
        message_field_training_detail="train_detail",
    ),
    chat(
        "parts with train",
        {
            "messages": [
                *MESSAGES[:2],
                {
                    "role": "assistant",
                    "content": [
                        {"type": "text", "text": "First this.", "train": False},
                        {"type": "text", "text": " Then that.", "train": True},
                    ],
                },
            ]
        },
    ),
    chat(
        "parts with weight",
        {
            "messages": [
                *MESSAGES[:2],
                {
                    "role": "assistant",
                    "content": [
                        {"type": "text", "text": "First this.", "weight": 0},
                        {"type": "text", "text": " Then that."},
                    ],
                },
            ]
        },
    ),
    Case(
        "input_output",
        [
            {
                "segments": [
                    {"label": True, "text": "<|im_start|>"},
                    {"label": False, "text": "Question: 1 + 1?\nAnswer:"},
                    {"label": True, "text": " 2."},
                    {"label": False, "text": " Then"},
                    {"label": True, "text": " 4.<|endoftext|>"},
                ]
            }
        ],
        peer={"type": "input_output"},
    ),
    Case(
        "alpaca",
        [{"instruction": "Add.", "input": "1 + 1", "output": "2."}],
        peer={"type": "alpaca"},
        settings={"template": "alpaca"},
        differs="alpaca text",
    ),
    Case("completion", [{"text": TEXT}], peer={"type": "completion"}),
    Case(
        "completion, field",
        [{"body": TEXT}],
        peer={"type": "completion", "field": "body"},
        settings={"text_field": "body"},
    ),
    Case("pretraining", [{"text": TEXT}], peer={"type": "pretrain"}),
]
