"""Traces of agents as messages.

They are the content blocks of Anthropic and the items of OpenAI's Responses. Reasoning, text and calls of an answer
become one message, in the order in which templates write them. Whatever has no place in a message is refused by name.
"""

from collections.abc import Mapping
from typing import Any

from batchloom.core.errors import UnusableRecordError
from batchloom.core.wording import describe_json_type

_TEXT_TYPES = frozenset(("text", "input_text", "output_text"))
_BLOCK_TYPES = frozenset(
    ("thinking", "redacted_thinking", "tool_use", "tool_result", "input_text", "output_text", "refusal")
)
# Keys of items that hold no text that a model reads or writes.
_ITEM_METADATA = frozenset(("type", "id", "status", "content", "phase"))

SESSION_REMEDY = (
    "they are the events of a session of an agent, and the file is one conversation: make a row with messages of each "
    "file with load_dataset('json', data_files=...) of datasets (pip install datasets teich), save the rows with "
    "to_parquet, and give that file"
)


def is_session_event(row: Mapping[str, Any]) -> bool:
    """Return whether a record is an event of Claude Code, Codex, Pi or another agent."""
    is_event = isinstance(row.get("message"), dict) or isinstance(row.get("payload"), dict)
    return isinstance(row.get("type"), str) and (is_event or row["type"] in ("session", "session_start", "system"))


def is_trace_message(message: object) -> bool:
    """Return whether a message has a form that only traces of agents have."""
    if not isinstance(message, dict) or isinstance(message.get("content"), str):
        return False
    if "role" not in message and "from" not in message:
        return isinstance(message.get("type"), str)
    content = message.get("content")
    return isinstance(content, list) and any(_get_type(block) in _BLOCK_TYPES for block in content)


def convert_trace(items: list[Any], column: str) -> list[Any]:
    """Return the messages of a trace; items that are messages already stay.

    Raises:
        UnusableRecordError: an item or a block has no place in a message.
    """
    messages: list[Any] = []
    # Name of the function that each call names.
    names: dict[Any, Any] = {}
    for number, item in enumerate(items):
        path = f"{column}[{number}]"
        if not isinstance(item, dict):
            messages.append(item)
        elif "role" not in item and "from" not in item:
            _add_item(messages, names, item, path)
        elif item.get("role") == "assistant":
            _add_answer(messages, names, item, path)
        elif isinstance(item.get("content"), list):
            messages += _split_results(item, names, path)
        else:
            messages.append(item)
    return messages


def convert_tool(tool: Any) -> Any:
    """Return a tool of Anthropic's or of the Responses as templates read it."""
    if not isinstance(tool, dict) or "function" in tool or not isinstance(tool.get("name"), str):
        return tool
    if "input_schema" in tool:
        kept = {key: tool[key] for key in ("name", "description") if key in tool}
        return {"type": "function", "function": {**kept, "parameters": tool["input_schema"]}}
    if tool.get("type") == "function":
        return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}
    return tool


def _get_type(block: object) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    return kind if isinstance(kind, str) else ""


def _add_item(messages: list[Any], names: dict[Any, Any], item: dict[str, Any], path: str) -> None:
    """Add an item of the Responses that is no message."""
    kind = _get_type(item)
    if kind == "reasoning":
        if reasoning := _read_reasoning(item, path):
            _check_calls_answered(messages, path)
            messages.append({"role": "assistant", "content": "", "reasoning_content": reasoning})
    elif kind == "function_call":
        names[item.get("call_id")] = item.get("name")
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"type": "function", "id": item.get("call_id"), "function": function}
        answer = messages.pop() if messages and _is_answer(messages[-1]) else {"role": "assistant", "content": ""}
        messages.append({**answer, "tool_calls": [*answer.get("tool_calls", ()), call]})
    elif kind == "function_call_output":
        messages.append(_make_result(names, item.get("call_id"), item.get("output"), f"{path}.output"))
    else:
        raise _make_type_error(path, kind or "none")


def _add_answer(messages: list[Any], names: dict[Any, Any], message: dict[str, Any], path: str) -> None:
    """Add an assistant's message, whose thought may be the item before it."""
    answer = _convert_answer(message, names, path)
    _check_calls_answered(messages, path)
    if messages and _is_answer(messages[-1]) and _is_thought(messages[-1]) and "reasoning_content" not in answer:
        answer = {**answer, "reasoning_content": messages.pop()["reasoning_content"]}
    messages.append(answer)


def _convert_answer(message: dict[str, Any], names: dict[Any, Any], path: str) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    reasoning, texts, calls = list[str](), list[Any](), list[Any]()
    for number, block in enumerate(content):
        kind, block_path = _get_type(block), f"{path}.content[{number}]"
        if (kind == "thinking" and (texts or calls)) or (kind != "tool_use" and calls):
            raise UnusableRecordError(
                f"{block_path} is of type {kind!r} after blocks that templates write behind it; the order is "
                "thinking, text, tool_use: write what follows as a message of its own"
            )
        if kind == "thinking":
            reasoning.append(_require_text(block.get("thinking"), f"{block_path}.thinking"))
        elif kind == "tool_use":
            names[block.get("id")] = block.get("name")
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append({"type": "function", "id": block.get("id"), "function": function})
        elif kind == "redacted_thinking":
            raise _make_type_error(block_path, kind)
        else:
            texts.append(_convert_text(block, block_path))
    answer = {key: value for key, value in message.items() if key not in _ITEM_METADATA}
    answer["content"] = _join_single(texts)
    if reasoning:
        answer["reasoning_content"] = "".join(reasoning)
    if calls:
        answer["tool_calls"] = calls
    return answer


def _split_results(message: dict[str, Any], names: Mapping[Any, Any], path: str) -> list[dict[str, Any]]:
    """Return the results in a message as messages, before what its sender says."""
    results: list[dict[str, Any]] = []
    blocks: list[Any] = []
    for number, block in enumerate(message["content"]):
        block_path = f"{path}.content[{number}]"
        if _get_type(block) != "tool_result":
            blocks.append(_convert_text(block, block_path))
            continue
        if blocks:
            raise UnusableRecordError(
                f"{block_path} is of type 'tool_result' behind what the user says; move it to the beginning"
            )
        results.append(_make_result(names, block.get("tool_use_id"), block.get("content", ""), f"{block_path}.content"))
    rest = {key: value for key, value in message.items() if key not in _ITEM_METADATA}
    return results if results and not blocks else [*results, {**rest, "content": _join_single(blocks)}]


def _make_result(names: Mapping[Any, Any], call_id: Any, output: Any, path: str) -> dict[str, Any]:
    if isinstance(output, list):
        output = _join_single([_convert_text(block, f"{path}[{number}]") for number, block in enumerate(output)])
    result = {"role": "tool", "tool_call_id": call_id, "content": "" if output is None else output}
    return {**result, "name": names[call_id]} if names.get(call_id) else result


def _read_reasoning(item: dict[str, Any], path: str) -> str:
    """Return the text of a reasoning item; its summary if there is no other."""
    for key in ("content", "summary"):
        parts = item.get(key) or []
        if isinstance(parts, list) and parts:
            texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
            separator = "" if key == "content" else "\n\n"
            return separator.join(_require_text(text, f"{path}.{key}[{number}]") for number, text in enumerate(texts))
    if item.get("encrypted_content"):
        raise _make_type_error(path, "reasoning", "encrypted ")
    return ""


def _convert_text(block: Any, path: str) -> Any:
    """Return a block of text as a part; others, such as media, unchanged."""
    kind = _get_type(block)
    if kind == "refusal":
        return {"type": "text", "text": _require_text(block.get("refusal"), f"{path}.refusal")}
    if kind in _TEXT_TYPES:
        return {"type": "text", "text": _require_text(block.get("text"), f"{path}.text")}
    return block


def _join_single(parts: list[Any]) -> Any:
    """Return the text of a single text part; else the parts."""
    if not parts:
        return ""
    return parts[0]["text"] if len(parts) == 1 and _get_type(parts[0]) == "text" else parts


def _is_answer(message: object) -> bool:
    return isinstance(message, dict) and message.get("role") == "assistant"


def _is_thought(answer: dict[str, Any]) -> bool:
    return "reasoning_content" in answer and not answer["content"] and not answer.get("tool_calls")


def _check_calls_answered(messages: list[Any], path: str) -> None:
    """Refuse what an assistant says between its calls and their results."""
    if messages and _is_answer(messages[-1]) and messages[-1].get("tool_calls"):
        raise UnusableRecordError(f"{path} stands between a call and its result; move it behind the result")


def _require_text(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise UnusableRecordError(f"{path} holds {describe_json_type(value)}, not text")
    return value


def _make_type_error(path: str, kind: str, adjective: str = "") -> UnusableRecordError:
    return UnusableRecordError(
        f"{path} is {adjective}{kind!r}, which has no place in a chat message; remove it, or leave the record out"
    )
