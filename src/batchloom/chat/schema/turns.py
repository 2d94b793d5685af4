"""Turns of a conversation: messages, and ShareGPT's ``from``/``value``.

Messages stay unchanged, except that ShareGPT's two keys get the names that chat templates
read, and its ``function_call`` becomes an assistant turn with ``tool_calls``. Senders are those of
FastChat, LLaMA-Factory and axolotl.
"""

from typing import Any

import orjson

from batchloom.chat.schema.record_keys import MESSAGE_KEYS, TEXT_PART_KEYS, check_keys
from batchloom.chat.schema.record_media import is_extracted_medium
from batchloom.chat.schema.train_flags import join_flagged_parts, read_train_flag
from batchloom.core.document import MESSAGE_ROLES, TrainFlag
from batchloom.core.errors import UnusableRecordError
from batchloom.core.settings import suggest
from batchloom.core.wording import describe_json_type

Message = dict[str, Any]
# Messages, and the train flag of each, None where the record has none. No flags at all is an empty list.
Turns = tuple[list[Message], list[TrainFlag]]

_ROLE_BY_SENDER = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "observation": "tool",
    "function_call": "assistant",
    **{role: role for role in MESSAGE_ROLES},
}
# Role names of other conventions and their equivalents.
_ROLE_SUGGESTIONS = {
    **{sender: role for sender, role in _ROLE_BY_SENDER.items() if sender != role},
    "model": "assistant",
    "bot": "assistant",
    "ai": "assistant",
    "function": "tool",
    "ipython": "tool",
    "tools": "tool",
    "tool_response": "tool",
}
# Senders of calls, whose content is the call itself.
_CALL_ROLES = frozenset(("tool_call", "tool_calls", "function_call"))
_MAX_DEPTH = 100
# White space and zero-width characters: spaces, joiners, soft hyphens, byte order marks.
_INVISIBLE_CHARACTERS = (
    "\u00ad\u180e\u200b\u200c\u200d\u200e\u200f\u2060\ufeff"
    + "".join(map(chr, (*range(9, 14), *range(28, 33), 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B))))
    + "\u2028\u2029\u202f\u205f\u3000"
)
_MEDIA_PART_TYPES = ("image", "audio", "video")
_ROLE_LIST = "system, user, assistant, tool, developer"


def is_turns(value: object) -> bool:
    """Return whether a value looks like a list of messages, or JSON text of one."""
    if isinstance(value, str):
        return value.lstrip().startswith("[")
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def read_turns(value: object, column: str) -> Turns:
    """Read a list of messages, which may be JSON text as in CSV and Parquet.

    The list and its dicts are returned unchanged if no key needs renaming.
    """
    if isinstance(value, str):
        value = _parse_json(value, f"column {column!r} holds text that is not a JSON list of messages")
    if not isinstance(value, list):
        raise UnusableRecordError(f"column {column!r} holds {describe_json_type(value)}, not a list of messages")
    if not value:
        raise UnusableRecordError(f"column {column!r} is empty: a conversation without turns")
    turns = value
    flags: list[TrainFlag] = []
    for number, message in enumerate(value):
        if _is_plain_message(message):
            continue
        message_path = f"{column}[{number}]"
        normalized_message = _normalize_message(message, message_path)
        flag = read_train_flag(normalized_message, message_path)
        content = normalized_message.get("content")
        joined_content = join_flagged_parts(content, f"{message_path}.content")
        if joined_content is not content:
            normalized_message = {**normalized_message, "content": joined_content}
        if normalized_message is not message:
            # Copy the list: the record's own stays unchanged.
            turns = list(value) if turns is value else turns
            turns[number] = normalized_message
        if flag is not None:
            flags += [None] * (number - len(flags))
            flags.append(flag)
    if flags:
        flags += [None] * (len(value) - len(flags))
    return turns, flags


def _is_plain_message(message: object) -> bool:
    """Return whether a message is only a known role and non-empty text."""
    if type(message) is not dict or len(message) != 2:
        return False
    role, content = message.get("role"), message.get("content")
    return type(role) is str and role in MESSAGE_ROLES and type(content) is str and not is_empty_text(content)


def read_tools(value: object, column: str) -> list[Any] | None:
    """Read a list of tools, or JSON text of one; None if there are none."""
    if isinstance(value, str) and value.strip():
        value = _parse_json(value, f"column {column!r} holds text that is not a JSON list of tools")
    if value is None or value in ("", []) or (isinstance(value, str) and value.isspace()):
        return None
    if not isinstance(value, list):
        raise UnusableRecordError(f"column {column!r} holds {describe_json_type(value)}, not a list of tools")
    for number, tool in enumerate(value):
        if not isinstance(tool, dict):
            raise UnusableRecordError(
                f"{column}[{number}] holds {describe_json_type(tool)}, not the object that describes a tool"
            )
        _check_depth(tool, f"{column}[{number}]")
    return value


def is_empty_text(text: str) -> bool:
    """Return whether a text is empty, or only white space and invisible characters."""
    return not text or text.isspace() or (not text.isascii() and not text.strip(_INVISIBLE_CHARACTERS))


def _parse_json(text: str, problem: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise UnusableRecordError(f"{problem}: {error.msg} at character {error.pos + 1}") from None


def _normalize_message(message: object, field_path: str) -> Message:
    """Rename keys as templates read them; return the same object if unchanged."""
    if not isinstance(message, dict):
        raise UnusableRecordError(
            f"{field_path} holds {describe_json_type(message)}, not a message with role and content"
        )
    _check_depth(message, field_path)
    check_keys(message, MESSAGE_KEYS.unsupported, field_path)
    if message.get("role") is None and message.get("from") is not None:
        message = _convert_sharegpt(message, field_path)
    role = message.get("role")
    if not isinstance(role, str) or role not in MESSAGE_ROLES:
        raise UnusableRecordError(_describe_unknown_role(message, role, f"{field_path}.role", MESSAGE_ROLES))
    if isinstance(message.get("content"), list):
        message = _normalize_text_parts(message)
    calls = message.get("tool_calls")
    _check_calls(calls, field_path)
    for key in ("name", "reasoning_content"):
        if not isinstance(message.get(key), str | None):
            raise UnusableRecordError(f"{field_path}.{key} holds {describe_json_type(message[key])}, not text")
    _check_content(message, role, field_path)
    return message


def _normalize_text_parts(message: Message) -> Message:
    """Rename ``value`` of LLaMA-Factory's text parts to templates' ``text``."""
    content = [
        {**{key: value for key, value in part.items() if key != "value"}, "text": part["value"]}
        if isinstance(part, dict) and part.get("type") == "text" and "value" in part and "text" not in part
        else part
        for part in message["content"]
    ]
    return message if content == message["content"] else {**message, "content": content}


def _check_depth(value: object, field_path: str) -> None:
    """Refuse nesting that would overflow the stack, above all in templates."""
    if _is_deeper(value, _MAX_DEPTH):
        raise UnusableRecordError(
            f"{field_path} is nested deeper than {_MAX_DEPTH} levels; flatten it, or write it as JSON text"
        )


def _is_deeper(value: object, levels: int) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        return False
    return not levels or any(_is_deeper(item, levels - 1) for item in value)


def _check_content(message: Message, role: str, field_path: str) -> None:
    content = message.get("content")
    if isinstance(content, list):
        is_empty = _check_parts(content, f"{field_path}.content")
    elif isinstance(content, str):
        is_empty = is_empty_text(content)
    elif content is None and role == "assistant" and message.get("tool_calls"):
        return
    elif "content" not in message:
        keys = ", ".join(repr(str(key)) for key in message)
        raise UnusableRecordError(f"{field_path} has no content: the message has {keys}")
    else:
        remedy = "; function_call is the old form, write tool_calls" if message.get("function_call") else ""
        raise UnusableRecordError(f"{field_path}.content holds {describe_json_type(content)}, not text{remedy}")
    # A tool may answer nothing, and an empty system turn means that there is no system prompt.
    if is_empty and (
        role == "user" or (role == "assistant" and not (message.get("tool_calls") or message.get("reasoning_content")))
    ):
        consequence = "there would be nothing to train" if role == "assistant" else "the prompt would be empty"
        raise UnusableRecordError(f"{field_path}.content is empty: {consequence}; fill it in or remove the turn")


def _check_parts(parts: list[Any], field_path: str) -> bool:
    """Check typed parts; return True if they hold neither text nor media."""
    for number, part in enumerate(parts):
        if is_extracted_medium(part):
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        part_path = f"{field_path}[{number}]"
        if kind == "text" and isinstance(part.get("text"), str):
            check_keys(part, TEXT_PART_KEYS, part_path)
            continue
        if isinstance(kind, str) and any(medium in kind for medium in _MEDIA_PART_TYPES):
            raise UnusableRecordError(f"{part_path} is of type {kind!r}: images and audio need --processor")
        problem = f"is of type {kind!r}" if isinstance(kind, str) else f"holds {describe_json_type(part)}"
        if kind == "text":
            problem = f"has {', '.join(map(repr, part))}"
        raise UnusableRecordError(f'{part_path} {problem}, not {{"type": "text", "text": "..."}}')
    return all("text" in part and is_empty_text(part["text"]) for part in parts)


def _check_calls(calls: object, field_path: str) -> None:
    if calls is None:
        return
    if not isinstance(calls, list):
        raise UnusableRecordError(f"{field_path}.tool_calls holds {describe_json_type(calls)}, not a list of calls")
    for number, call in enumerate(calls):
        call_path = f"{field_path}.tool_calls[{number}]"
        function = call.get("function") or call if isinstance(call, dict) else call
        if not isinstance(function, dict):
            raise UnusableRecordError(
                f"{call_path} holds {describe_json_type(function)}, not an object with name and arguments"
            )
        if not isinstance(function.get("name"), str):
            raise UnusableRecordError(f"{call_path} has no name: it must say which function is called")
        if not isinstance(function.get("arguments"), str | dict | None):
            arguments_type = describe_json_type(function["arguments"])
            raise UnusableRecordError(f"{call_path}.arguments holds {arguments_type}, not an object or its JSON text")


def _convert_sharegpt(message: Message, field_path: str) -> Message:
    sender = message["from"]
    if not isinstance(sender, str) or sender not in _ROLE_BY_SENDER:
        raise UnusableRecordError(_describe_unknown_role(message, sender, f"{field_path}.from", _ROLE_BY_SENDER))
    other_fields = {key: value for key, value in message.items() if key not in ("from", "value", "role")}
    value = message.get("value", message.get("content"))
    if sender == "function_call":
        calls = _parse_function_calls(value, f"{field_path}.value")
        return {"role": "assistant", "content": "", **other_fields, "tool_calls": calls}
    return {"role": _ROLE_BY_SENDER[sender], **other_fields, "content": value}


def _parse_function_calls(value: object, field_path: str) -> list[dict[str, Any]]:
    """Parse ``{"name": ..., "arguments": ...}`` or a list of such calls."""
    if isinstance(value, str):
        value = _parse_json(value, f"{field_path} is not JSON of a function call")
    calls = value if isinstance(value, list) else [value]
    if not calls or not all(isinstance(call, dict) for call in calls):
        raise UnusableRecordError(
            f"{field_path} holds {describe_json_type(value)}, not an object with name and arguments"
        )
    return [{"type": "function", "function": call} for call in calls]


def _describe_unknown_role(
    message: Message, role: object, field_path: str, known_roles: dict[str, str] | frozenset[str]
) -> str:
    if role is None:
        keys = ", ".join(repr(str(key)) for key in message) or "nothing"
        return f"{field_path} is missing: the message has {keys}; a message has role and content (or from and value)"
    if not isinstance(role, str):
        return f"{field_path} holds {describe_json_type(role)}, not one of {_ROLE_LIST}"
    if role.lower() in _CALL_ROLES:
        return (
            f"{field_path} is {role!r}, not one of {_ROLE_LIST}; write the call as tool_calls of an assistant message"
        )
    suggested_role = _ROLE_SUGGESTIONS.get(role.lower(), role.lower())
    hint = (
        f"; did you mean {suggested_role!r}?"
        if suggested_role in known_roles
        else suggest(suggested_role, sorted(known_roles))
    )
    return f"{field_path} is {role!r}, not one of {_ROLE_LIST}{hint}"
