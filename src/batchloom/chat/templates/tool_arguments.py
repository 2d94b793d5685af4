"""Forms of tools, and of the arguments of calls: objects or JSON text."""

import json
from typing import Any, Literal, NoReturn

ToolArguments = Literal["as-is", "parse", "text"]

# Changes in words, as of a template.
CONVERTED_ARGUMENTS = "takes the arguments of calls in the other form alone, and gets them converted"
QUOTED_ARGUMENTS = (
    "writes arguments that are JSON text as a quoted string (--tool-arguments parse gives them as objects)"
)

WRAPPED_TOOLS = "reads tools as functions, and gets tools without a type wrapped as such"


def is_bare_tool(tool: Any) -> bool:
    """Return whether a tool is the description of a function without its type."""
    return isinstance(tool, dict) and "name" in tool and tool.keys().isdisjoint(("function", "type"))


def wrap_tool(tool: Any) -> Any:
    """Return a tool with its type."""
    return {"type": "function", "function": tool} if is_bare_tool(tool) else tool


def convert_arguments(messages: list[dict[str, Any]], form: ToolArguments) -> list[dict[str, Any]]:
    """Return messages with the arguments of their calls in a form.

    ``parse`` gives objects, and ``text`` JSON text. Text that is no JSON of an object stays as it is.
    """
    if form == "as-is" or not any(message.get("tool_calls") for message in messages):
        return messages
    return [
        {**message, "tool_calls": [_convert_call(call, form) for call in calls]}
        if (calls := message.get("tool_calls"))
        else message
        for message in messages
    ]


def switch_arguments(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with arguments in the other form than the first call's."""
    arguments = next(iter(_list_arguments(messages)), None)
    return convert_arguments(messages, "parse" if isinstance(arguments, str) else "text")


def are_arguments_quoted(messages: list[dict[str, Any]], text: str) -> bool:
    """Return whether a rendered text holds the arguments of a call as a quoted string."""
    return any(
        isinstance(arguments, str) and '"' in arguments and json.dumps(arguments, ensure_ascii=False) in text
        for arguments in _list_arguments(messages)
    )


def _list_arguments(messages: list[dict[str, Any]]) -> list[Any]:
    functions = (call.get("function") or call for message in messages for call in message.get("tool_calls") or [])
    return [function.get("arguments") for function in functions]


def _convert_call(call: dict[str, Any], form: ToolArguments) -> dict[str, Any]:
    function = call.get("function") or call
    arguments = function.get("arguments")
    try:
        if form == "text" and isinstance(arguments, dict):
            arguments = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        elif form == "parse" and isinstance(arguments, str):
            # orjson has no integers beyond 64 bits.
            value = json.loads(arguments, parse_constant=_refuse_constant)
            arguments = value if isinstance(value, dict) else arguments
    except ValueError:
        # JSON has no such value, or the text is none.
        return call
    if arguments is function.get("arguments"):
        return call
    changed = {**function, "arguments": arguments}
    return {**call, "function": changed} if "function" in call else changed


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)
