"""Write tools and their calls into contents, for templates that write none.

The format is LLaMA-Factory's ``tool_format: default``. The rewritten conversation has neither tools nor calls, so any
template renders it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from batchloom.chat.templates.chat_template import RenderError
from batchloom.chat.templates.turn_positions import ASSISTANT
from batchloom.core.document import Conversation, TrainFlag
from batchloom.core.wording import describe_json_type


def write_tools(conversation: Conversation) -> Conversation:
    """Return the conversation with its tools, calls and results in contents.

    Consecutive results become the lines of one user turn.

    Raises:
        RenderError: a tool without a name, arguments that are no JSON, or a result with media.
    """
    messages: list[dict[str, Any]] = []
    # Index of each message in the result, for flags and the completion.
    numbers: list[int] = []
    if conversation.tools and not _is_system(conversation.messages[:1]):
        messages.append({"role": "system", "content": ""})
    for message in conversation.messages:
        is_result = message.get("role") == "tool"
        if is_result and numbers and conversation.messages[len(numbers) - 1].get("role") == "tool":
            messages[-1] = _append_text(messages[-1], f"\n{_read_result(message)}")
        elif is_result:
            messages.append({"role": "user", "content": _read_result(message)})
        else:
            messages.append(_write_message(message))
        numbers.append(len(messages) - 1)
    if conversation.tools:
        messages[0] = _append_text(messages[0], _describe_tools(conversation.tools))
    trained: list[TrainFlag] = [None] * len(messages) if conversation.trained else []
    for number, flag in zip(numbers, conversation.trained, strict=False):
        trained[number] = flag if trained[number] is None else trained[number]
    # The completion of a prompt begins after its last message.
    completion = None if conversation.completion is None else [*numbers, len(messages)][conversation.completion]
    return replace(conversation, messages=messages, tools=None, trained=trained, completion=completion)


def _describe_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    functions = list(map(_unwrap, tools))
    text = "".join(
        f"> Tool Name: {function['name']}\nTool Description: {function.get('description', '')}\nTool Args:\n"
        f"{''.join(_describe_parameters(function))}\n"
        for function in functions
    )
    return (
        f"You have access to the following tools:\n{text}Use the following format if using a tool:\n```\n"
        f"Action: tool name (one of [{', '.join(function['name'] for function in functions)}])\n"
        "Action Input: the input to the tool, in a JSON format representing the kwargs "
        '(e.g. ```{"input": "hello world", "num_beams": 5}```)\n```\n'
    )


def _unwrap(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function") if tool.get("type") == "function" else tool
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RenderError("a tool has no name, which --tool-format writes; describe it as a function with a name")
    return function


def _get_value(values: Mapping[str, Any], key: str, kind: type[Any]) -> Any:
    """Return a value of a tool's schema, empty if there is none; check its type."""
    value = values.get(key) or kind()
    if not isinstance(value, kind):
        raise RenderError(
            f"{key} of a tool holds {describe_json_type(value)}, which --tool-format default cannot describe; write "
            "the parameters as JSON Schema"
        )
    return value


def _describe_parameters(function: Mapping[str, Any]) -> list[str]:
    parameters = _get_value(function, "parameters", dict)
    properties = _get_value(parameters, "properties", dict)
    lines = []
    for name in properties:
        parameter = _get_value(properties, name, dict)
        required = ", required" if name in _get_value(parameters, "required", list) else ""
        choices = _get_value(parameter, "enum", list)
        items = _get_value(parameter, "items", dict)
        lines.append(
            f"  - {name} ({parameter.get('type', '')}{required}): {parameter.get('description', '')}"
            + (f", should be one of [{', '.join(map(str, choices))}]" if choices else "")
            + (f", where each item should be {items.get('type', '')}" if items else "")
            + "\n"
        )
    return lines


def _is_system(messages: Sequence[dict[str, Any]]) -> bool:
    return bool(messages) and messages[0].get("role") == "system"


def _write_message(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if message.get("role") != ASSISTANT or not calls:
        return message
    text = "\n".join(map(_write_call, calls))
    fields = {key: value for key, value in message.items() if key != "tool_calls"}
    has_content = bool(_read_text(message))
    return _append_text(fields, f"\n{text}" if has_content else text)


def _write_call(call: Mapping[str, Any]) -> str:
    function = call.get("function") or call
    name = function["name"]
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except ValueError as error:
            raise RenderError(f"the arguments of {name} are no JSON: {error}") from None
    try:
        text = json.dumps({} if arguments is None else arguments, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise RenderError(f"a call of {name} holds a number that JSON cannot hold (NaN or infinity): {error}") from None
    return f"Action: {name}\nAction Input: {text}"


def _read_result(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list) and not all("text" in part for part in content):
        raise RenderError("a tool returns media, which --tool-format does not write; leave it out, or the record")
    return _read_text(message)


def _read_text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""


def _append_text(message: dict[str, Any], text: str) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, list):
        return {**message, "content": [*content, {"type": "text", "text": text}]}
    return {**message, "content": (content or "") + text}
