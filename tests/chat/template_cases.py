"""Conversations of every form, and published templates, of which TRL's have marks around what it trains."""

import functools
import importlib.resources
import importlib.util
import re
from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

# Control tokens of all these templates: one tokenizer serves them all.
_CONTROL = re.compile(
    r"<\|[^|<>\s]+\|>|<\uff5c[^\uff5c<>]+\uff5c>|<[a-z_]+\|>|<\|[a-z_]+>|</?s>|<(?:start|end)_of_turn>|\[/?[A-Z_]+\]|<end_of_utterance>"
    r"|\[gMASK\]|<sop>|\[\|[a-z]+\|\]"
)
_MISTRAL_CONTROL = (
    "[THINK]",
    "[/THINK]",
    "[CALL_ID]",
    "[ARGS]",
    "[TOOL_CONTENT]",
    "[MODEL_SETTINGS]",
    "[/MODEL_SETTINGS]",
)
_MARK = re.compile(r"\{%(-?)\s*(end)?generation\s*(-?)%\}")
BOS, EOS = "<s>", "</s>"
_CALL_ID = "abcdefghi"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "City"}}},
        },
    }
]
ARGUMENTS: dict[str, dict[str, Any]] = {
    "integer": {"days": 2},
    "float": {"x": 1.5},
    "boolean": {"now": True},
    "null": {"city": None},
    "none at all": {},
    "empty string": {"city": ""},
    "list": {"days": [1, 2]},
    "strings": {"cities": ["Oslo", "Rome"]},
    "nested": {"a": {"b": 1}},
    "integer last": {"city": "Oslo", "days": 2},
    "string last": {"days": 2, "city": "Oslo"},
}
Case = tuple[list[dict[str, Any]], list[dict[str, Any]] | None]


def _user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _answer(content: str = "", *calls: dict[str, Any], **fields: str) -> dict[str, Any]:
    listed = [{"type": "function", "id": _CALL_ID, "function": {"name": "get_weather", "arguments": c}} for c in calls]
    return {"role": "assistant", "content": content, **fields, **({"tool_calls": listed} if calls else {})}


def _result(content: str = "7 degrees") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": _CALL_ID, "name": "get_weather", "content": content}


OSLO, ROME = {"city": "Oslo"}, {"city": "Rome"}
# A template may lack a form for some: it refuses them, or batchloom does because it leaves something out.
CASES: dict[str, Case] = {
    "plain": ([_user("Hi there"), _answer("Hello.")], None),
    "system": ([{"role": "system", "content": "Be brief."}, _user("Hi there"), _answer("Hello.")], None),
    "several turns": ([_user("Hi there"), _answer("Hello."), _user("More?"), _answer("Yes.")], None),
    "empty answer": ([_user("Hi"), _answer(), _user("More?"), _answer("Yes.")], None),
    "text and call": ([_user("Oslo?"), _answer("Let me see.", OSLO), _result(), _answer("Cold.")], TOOLS),
    "call alone": ([_user("Oslo?"), _answer("", OSLO), _result(), _answer("Cold.")], TOOLS),
    "no list of tools": ([_user("Oslo?"), _answer("", OSLO), _result(), _answer("Cold.")], None),
    "two calls": ([_user("Both?"), _answer("", OSLO, ROME), _result(), _result("20"), _answer("Cold.")], TOOLS),
    "calls in turn": (
        [
            *(_user("Both?"), _answer("", OSLO), _result(), _answer("", ROME), _result("20"), _answer("Cold.")),
            *(_user("Thanks."), _answer("Welcome.")),
        ],
        TOOLS,
    ),
    "thought in the last turn": ([_user("2 + 2?"), _answer("Four.", reasoning_content="Two and two.")], None),
    "thought in every turn": (
        [
            *(_user("2 + 2?"), _answer("Four.", reasoning_content="Two and two.")),
            *(_user("3 + 3?"), _answer("Six.", reasoning_content="Three and three.")),
        ],
        None,
    ),
    "thought before a call": (
        [
            *(_user("Oslo?"), _answer("", OSLO, reasoning_content="Look it up.")),
            *(_result(), _answer("Cold.", reasoning_content="Seven is cold.")),
        ],
        TOOLS,
    ),
    "thought in the content": ([_user("2 + 2?"), _answer("<think>\nTwo and two.\n</think>\n\nFour.")], None),
    **{f"{name}, at the end": ([_user("Go."), _answer("", values)], TOOLS) for name, values in ARGUMENTS.items()},
    **{
        f"{name}, and its result": ([_user("Go."), _answer("", values), _result(), _answer("Done.")], TOOLS)
        for name, values in ARGUMENTS.items()
    },
}

_FOLDER = Path(str(importlib.resources.files("trl")), "chat_templates")
TEMPLATES = {path.stem: path.read_text() for path in sorted(_FOLDER.glob("*.jinja"))}
MARKED = sorted(name for name in TEMPLATES if name.endswith("_training"))
UNMARKED = sorted(name for name in TEMPLATES if name not in MARKED and f"{name}_training" not in MARKED)
# Importing axolotl takes its dependencies, and reading its templates does not.
_AXOLOTL = Path(importlib.util.find_spec("axolotl").origin).parent
AXOLOTL = {
    f"axolotl/{path.stem}": path.read_text()
    for path in sorted((_AXOLOTL / "utils/chat_templates/templates").glob("*.jinja"))
}
_MISTRAL_OPTIONS: dict[str, dict[str, Any]] = {
    "v1": {"spm": True},
    "v2": {"spm": True},
    "v3": {"spm": True},
    "v3-tekken": {},
    "v7": {"spm": True},
    "v7-tekken": {},
    "v11": {},
    "v11-think": {"plain_thinking_support": True},
    "v13": {},
    "v13-think": {"thinking_support": True},
    "v15": {
        "thinking_support": True,
        "reasoning_effort_values": ("none", "high"),
        "reasoning_effort_default": "none",
    },
}
MISTRAL = [f"mistral/{name}" for name in _MISTRAL_OPTIONS]


def find_control_tokens() -> list[str]:
    """Find the control tokens of all templates."""
    texts = [*TEMPLATES.values(), *AXOLOTL.values()]
    found = {token for text in texts for token in _CONTROL.findall(text)}
    return sorted(found | {BOS, EOS, *_MISTRAL_CONTROL})


@functools.cache
def read_template(name: str) -> str:
    """Return the text of a published template, without generation marks.

    Args:
        name: key of TEMPLATES or AXOLOTL, or an element of MISTRAL.
    """
    if name not in MISTRAL:
        return remove_marks({**TEMPLATES, **AXOLOTL}[name])
    from mistral_common.integrations.chat_templates.template_generator import TemplateConfig, build_chat_template
    from mistral_common.tokens.tokenizers.base import TokenizerVersion

    kind = name.removeprefix("mistral/")
    version = TokenizerVersion(kind.partition("-")[0])
    return build_chat_template(TemplateConfig(version=version, **_MISTRAL_OPTIONS[kind]))


def remove_marks(template: str) -> str:
    """Return a template without its generation marks, which writes the same text."""
    return _MARK.sub(lambda mark: f"{{%{mark[1]} {'endif' if mark[2] else 'if true'} {mark[3]}%}}", template)


def list_marked_texts(name: str, case: Case) -> list[str]:
    """Return the texts that a template marks, of which those that touch are one.

    Raises:
        Exception: the template refuses the conversation.
    """
    messages, tools = case
    if name.startswith(("idefics", "smolvlm", "llava")):
        messages = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]
    [text], [spans] = render_jinja_template(
        [messages], tools=tools, chat_template=TEMPLATES[name], return_assistant_tokens_mask=True, bos_token=BOS,
        eos_token=EOS,
    )  # fmt: skip
    merged: list[list[int]] = []
    for start, stop in spans:
        if merged and start <= merged[-1][1]:
            merged[-1][1] = stop
        elif start < stop:
            merged.append([start, stop])
    return [text[start:stop] for start, stop in merged]
