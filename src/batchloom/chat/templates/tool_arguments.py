"""Tools, calls and results as templates take them."""

import json
from typing import Any, Literal, NoReturn

ToolArguments = Literal["as-is", "parse", "text"]

# Changes in words, as of a template.
PARSED_ARGUMENTS = "takes no JSON text as arguments of calls, and gets objects"
DUMPED_ARGUMENTS = "takes no objects as arguments of calls, and gets their JSON text"
QUOTED_ARGUMENTS = (
    "writes arguments that are JSON text as a quoted string, or in braces of its own (--tool-arguments parse gives "
    "them as objects)"
)

_UNKNOWN_RESULTS = "gets results whose tool_call_id is that of no call before them"
_UNORDERED_RESULTS = "gets results in another order than their calls, which it may tell apart by their order alone"
_MISSING_RESULTS = "gets calls that have no result before the next turn"
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


def switch_arguments(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """Return messages with arguments in another form, and the change in words."""
    if isinstance(next(iter(_list_arguments(messages)), None), str):
        return convert_arguments(messages, "parse"), PARSED_ARGUMENTS
    return convert_arguments(messages, "text"), DUMPED_ARGUMENTS


def are_arguments_quoted(messages: list[dict[str, Any]], text: str) -> bool:
    """Return whether a text holds JSON of arguments in quotes or further braces."""
    return any(
        isinstance(arguments, str)
        and (f"{{{arguments}}}" in text or ('"' in arguments and json.dumps(arguments, ensure_ascii=False) in text))
        for arguments in _list_arguments(messages)
    )


def describe_results(messages: list[dict[str, Any]]) -> tuple[str, ...]:
    """Describe the results that do not fit the calls before them by their ids."""
    changes = []
    known: set[str] = set()
    calls: list[str | None] = []
    results: list[str | None] = []
    for message in (*messages, None):
        if message is not None and message.get("role") == "tool":
            results.append(message.get("tool_call_id"))
            continue
        if None not in calls:
            named = [result for result in results if result is not None]
            order = [calls.index(result) for result in named if result in calls]
            # At the end of a conversation calls are what it trains. A result without an id may be that of any call.
            unanswered = len(set(calls) - set(named)) - results.count(None)
            is_missing = (message is not None or bool(results)) and unanswered > 0
            changes += [_UNKNOWN_RESULTS] * (not known.issuperset(named))
            changes += [_UNORDERED_RESULTS] * (order != sorted(order))
            changes += [_MISSING_RESULTS] * is_missing
        calls = [call.get("id") for call in message.get("tool_calls") or []] if message is not None else []
        known.update(filter(None, calls))
        results = []
    return tuple(dict.fromkeys(changes))


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
