"""Traces of agents as messages.

Reads the content blocks of Anthropic's Messages and the items of OpenAI's Responses. Reasoning, text and calls of an
answer become one message, in the order in which templates write them. Whatever has no place in a message is refused by
name.
"""

from collections.abc import Mapping
from typing import Any

from batchloom.chat.schema.record_keys import PART_FLAGS, PART_KEYS, TRAIN_FLAGS, check_keys
from batchloom.core.errors import UnusableRecordError
from batchloom.core.wording import describe_json_type

_TEXT_TYPES = frozenset(("text", "input_text", "output_text"))
_BLOCK_TYPES = frozenset(
    ("thinking", "redacted_thinking", "tool_use", "tool_result", "input_text", "output_text", "refusal")
)
# Keys of items that hold no text that a model reads or writes.
_ITEM_METADATA = frozenset(("type", "id", "status", "content", "phase"))
_REASONING_KEYS = frozenset(("type", "id", "status", "summary", "content", "encrypted_content"))

SESSION_REMEDY = (
    "they are the events of a session of an agent, and the file is one conversation: make rows with messages of such "
    "files with datasets (pip install datasets teich), load_dataset('json', data_files='*.jsonl', "
    "split='train').to_parquet('sessions.parquet'), and give sessions.parquet"
)

_Message = dict[str, Any]


def is_session_event(row: Mapping[str, Any]) -> bool:
    """Return whether a record is an event of Claude Code, Codex, Pi or another agent."""
    has_content = isinstance(row.get("message"), dict) or isinstance(row.get("payload"), dict)
    return isinstance(row.get("type"), str) and (has_content or row["type"] in ("session", "session_start", "system"))


def is_trace_message(message: object) -> bool:
    """Return whether a message has a form that only traces of agents have."""
    if not isinstance(message, dict) or isinstance(message.get("content"), str):
        return False
    if not _has_sender(message):
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
    names: dict[str, Any] = {}
    for number, item in enumerate(items):
        path = f"{column}[{number}]"
        if not isinstance(item, dict):
            messages.append(item)
        elif not _has_sender(item):
            _add_item(messages, names, item, path)
        elif item.get("role") == "assistant":
            _add_answer(messages, _convert_answer(item, names, path), path)
        elif isinstance(item.get("content"), list):
            messages += _convert_sender_blocks(item, names, path)
        else:
            messages.append(item)
    if any(map(_is_thought, messages)):
        raise UnusableRecordError(f"{column} has reasoning without an answer behind it; remove it, or add the answer")
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


def _has_sender(item: _Message) -> bool:
    return item.get("role") is not None or item.get("from") is not None


def _get_type(block: object) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    return kind if isinstance(kind, str) else ""


def _add_item(messages: list[Any], names: dict[str, Any], item: _Message, path: str) -> None:
    """Add an item of the Responses that is no message."""
    kind = _get_type(item)
    check_keys(item, PART_KEYS, path)
    if kind == "reasoning":
        if reasoning := _read_reasoning(item, path):
            _add_answer(messages, {"role": "assistant", "content": "", "reasoning_content": reasoning}, path)
    elif kind == "function_call":
        call = _make_call(names, item, "call_id", "arguments", path)
        _add_answer(messages, {"role": "assistant", "content": "", "tool_calls": [call]}, path)
    elif kind == "function_call_output":
        messages.append(_make_result(names, item, "call_id", "output", path))
    else:
        raise _make_type_error(path, kind or "none")


def _add_answer(messages: list[Any], answer: _Message, path: str) -> None:
    """Add an answer, or join it to the one before it if one of them is a part.

    Agents write a thought, a text and calls as items of their own. A message of its own would teach the model to stop
    between them.
    """
    last = messages[-1] if messages and _is_answer(messages[-1]) else None
    has_same_flags = last is not None and all(last.get(flag) == answer.get(flag) for flag in TRAIN_FLAGS)
    calls = answer.get("tool_calls") or []
    is_call_alone = bool(calls) and not answer.get("content") and not answer.get("reasoning_content")
    if last is None or not has_same_flags:
        messages.append(answer)
    elif is_call_alone:
        messages[-1] = {**last, "tool_calls": [*(last.get("tool_calls") or []), *calls]}
    elif last.get("tool_calls"):
        raise UnusableRecordError(f"{path} stands between a call and its result; move it behind the result")
    elif last.get("content") and _is_thought(answer):
        raise UnusableRecordError(f"{path} is reasoning behind the text of its answer; move it before the text")
    elif _is_thought(last):
        if answer.get("thinking") or answer.get("reasoning"):
            raise UnusableRecordError(f"{path} has reasoning, and follows an item of reasoning; leave one of them out")
        thoughts = [last["reasoning_content"], answer.get("reasoning_content")]
        messages[-1] = {**last, **answer, "reasoning_content": "\n\n".join(filter(None, thoughts))}
    else:
        messages.append(answer)


def _convert_answer(message: _Message, names: dict[str, Any], path: str) -> _Message:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    thoughts: list[str] = []
    texts: list[Any] = []
    calls: list[Any] = []
    for number, block in enumerate(content):
        kind = _get_type(block)
        block_path = f"{path}.content[{number}]"
        if (kind == "thinking" and (texts or calls)) or (kind != "tool_use" and calls):
            raise UnusableRecordError(
                f"{block_path} is of type {kind!r} after blocks that templates write behind it; the order is "
                "thinking, text, tool_use: write what follows as a message of its own"
            )
        if kind == "thinking":
            check_keys(block, PART_KEYS, block_path)
            thoughts.append(_require_text(block.get("thinking"), f"{block_path}.thinking"))
        elif kind == "tool_use":
            check_keys(block, PART_KEYS, block_path)
            calls.append(_make_call(names, block, "id", "input", block_path))
        elif kind == "redacted_thinking":
            raise _make_type_error(block_path, kind)
        else:
            texts.append(_convert_text(block, block_path))
    answer = {key: value for key, value in message.items() if key not in _ITEM_METADATA}
    answer["content"] = _join_single(texts)
    for key, value in (("reasoning_content", "\n\n".join(thoughts)), ("tool_calls", calls)):
        if value and answer.get(key):
            raise UnusableRecordError(f"{path} has {key} and blocks with the same meaning; leave one of them out")
        if value:
            answer[key] = value
    return answer


def _convert_sender_blocks(message: _Message, names: Mapping[str, Any], path: str) -> list[_Message]:
    """Return the results in a message as messages, then what its sender says."""
    rest = {key: value for key, value in message.items() if key not in _ITEM_METADATA}
    results: list[_Message] = []
    parts: list[Any] = []
    for number, block in enumerate(message["content"]):
        block_path = f"{path}.content[{number}]"
        if _get_type(block) != "tool_result":
            parts.append(_convert_text(block, block_path))
            continue
        if parts:
            raise UnusableRecordError(
                f"{block_path} is of type 'tool_result' behind what the user says; move it to the beginning"
            )
        check_keys(block, PART_KEYS, block_path)
        results.append({**rest, **_make_result(names, block, "tool_use_id", "content", block_path)})
    return results if results and not parts else [*results, {**rest, "content": _join_single(parts)}]


def _make_call(names: dict[str, Any], block: _Message, id_key: str, arguments_key: str, path: str) -> _Message:
    call_id = _read_id(block, id_key, path)
    if call_id is not None:
        names[call_id] = block.get("name")
    function = {"name": block.get("name"), "arguments": block.get(arguments_key)}
    return {"type": "function", "id": call_id, "function": function}


def _make_result(names: Mapping[str, Any], block: _Message, id_key: str, output_key: str, path: str) -> _Message:
    call_id = _read_id(block, id_key, path)
    output = block.get(output_key)
    if isinstance(output, list):
        parts = [_convert_text(part, f"{path}.{output_key}[{number}]") for number, part in enumerate(output)]
        output = _join_single(parts)
    result = {"role": "tool", "tool_call_id": call_id, "content": "" if output is None else output}
    name = names.get(call_id or "")
    return {**result, "name": name} if name else result


def _read_id(block: _Message, key: str, path: str) -> str | None:
    value = block.get(key)
    return None if value is None else _require_text(value, f"{path}.{key}")


def _read_reasoning(item: _Message, path: str) -> str:
    """Return the text of a reasoning item; its summary if there is no other."""
    unknown = [key for key, value in item.items() if key not in _REASONING_KEYS and value is not None]
    if unknown:
        raise UnusableRecordError(f"{path} has {', '.join(unknown)}, which reasoning of the Responses has not")
    for key, separator in (("content", ""), ("summary", "\n\n")):
        parts = item.get(key)
        if isinstance(parts, str) and parts:
            return parts
        if isinstance(parts, list) and parts:
            texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
            return separator.join(_require_text(text, f"{path}.{key}[{number}]") for number, text in enumerate(texts))
        if not isinstance(parts, str | list | None):
            raise UnusableRecordError(f"{path}.{key} holds {describe_json_type(parts)}, not parts of text")
    if item.get("encrypted_content"):
        raise _make_type_error(path, "reasoning", "encrypted ")
    return ""


def _convert_text(block: Any, path: str) -> Any:
    """Return a block of text as a part with its flags; other blocks unchanged."""
    kind = _get_type(block)
    if kind not in _TEXT_TYPES and kind != "refusal":
        return block
    key = "refusal" if kind == "refusal" else "text"
    flags = {flag: block[flag] for flag in PART_FLAGS & block.keys()}
    return {"type": "text", "text": _require_text(block.get(key), f"{path}.{key}"), **flags}


def _join_single(parts: list[Any]) -> Any:
    """Return the text of a single text part without flags; else the parts."""
    if not parts:
        return ""
    part = parts[0]
    return part["text"] if len(parts) == 1 and isinstance(part, dict) and part.keys() == {"type", "text"} else parts


def _is_answer(message: object) -> bool:
    return isinstance(message, dict) and message.get("role") == "assistant"


def _is_thought(message: object) -> bool:
    """Return whether a message is reasoning without text and calls."""
    return (
        isinstance(message, dict)
        and _is_answer(message)
        and bool(message.get("reasoning_content"))
        and not (message.get("content") or message.get("tool_calls"))
    )


def _require_text(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise UnusableRecordError(f"{path} holds {describe_json_type(value)}, not text")
    return value


def _make_type_error(path: str, kind: str, adjective: str = "") -> UnusableRecordError:
    return UnusableRecordError(
        f"{path} is {adjective}{kind!r}, which has no place in a chat message; remove it, or leave the record out"
    )
