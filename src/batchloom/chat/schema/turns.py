"""Turns of a conversation in their known forms, and their train flags.

Messages stay unchanged, except that ShareGPT's two keys get the names that chat templates read, and calls
(``function_call``, ``tool_call``) become ``tool_calls`` of an assistant turn. Senders are those of FastChat,
LLaMA-Factory, axolotl and ms-swift.
"""

import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson

from batchloom.chat.schema.agent_traces import convert_tool, convert_trace, is_trace_message
from batchloom.chat.schema.record_keys import (
    MESSAGE_KEYS,
    PART_FLAGS,
    PART_KEYS,
    SEGMENT_FLAGS,
    TEXT_PART_KEYS,
    TRAIN_FLAGS,
    FlagRule,
    check_keys,
)
from batchloom.chat.schema.record_media import is_extracted_medium
from batchloom.chat.schema.schemas import NAMED_ROLES, ROLE_GUESSES
from batchloom.chat.templates.chat_template import find_thought_end
from batchloom.core.document import MESSAGE_ROLES, ContentRange, TrainFlag, TurnWeight
from batchloom.core.errors import UnusableRecordError
from batchloom.core.loss_weights import parse_loss_weight
from batchloom.core.settings import as_int, suggest
from batchloom.core.wording import describe_json_type

Message = dict[str, Any]
# Messages, and the train flag of each, None where the record has none. No flags at all is an empty list.
Turns = tuple[list[Message], list[TrainFlag]]

# Senders of calls, whose content is the call itself: LLaMA-Factory's, and ms-swift's two.
_CALL_ROLES = frozenset(("function_call", "function-call", "tool_call"))
# Roles that other libraries read without any setting, as ``role`` or ``from``.
ROLE_BY_SENDER = {
    # FastChat, LLaMA-Factory, axolotl and ms-swift.
    "human": "user",
    "gpt": "assistant",
    # FastChat.
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    # ms-swift.
    "bot": "assistant",
    # LLaMA-Factory and ms-swift.
    "observation": "tool",
    # ms-swift.
    **dict.fromkeys(("observations", "function_response", "function-response", "tool_response"), "tool"),
    **dict.fromkeys(_CALL_ROLES, "assistant"),
    **{role: role for role in MESSAGE_ROLES},
}
# Roles of a turn that the model answers.
ASKING_ROLES = ("user", "tool")
_MAX_DEPTH = 100
# White space and zero-width characters: spaces, joiners, soft hyphens, byte order marks.
_INVISIBLE_CHARACTERS = (
    "\u00ad\u180e\u200b\u200c\u200d\u200e\u200f\u2060\ufeff"
    + "".join(map(chr, (*range(9, 14), *range(28, 33), 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B))))
    + "\u2028\u2029\u202f\u205f\u3000"
)
_MESSAGE_KEYS = frozenset(("role", "content", "from", "value"))
_CONTENT_KEYS = frozenset(("content", "value", "tool_calls"))
# ms-swift's keys of a question and its answer in one object.
_EXCHANGE_KEYS = (("user", ("user", "human")), ("assistant", ("assistant", "gpt", "bot")))
_MEDIA_PART_TYPES = ("image", "audio", "video")
_ASSISTANT = "assistant"
_DETAIL_KEYS = ("begin_offset", "end_offset", "train")
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
    value = _convert_form(value, column)
    turns = value
    flags: list[TrainFlag] = []
    call_numbers: list[int] = []
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
            if get_sender(message) in _CALL_ROLES:
                call_numbers.append(number)
        if flag is not None:
            flags += [None] * (number - len(flags))
            flags.append(flag)
    if flags:
        flags += [None] * (len(value) - len(flags))
    return _merge_calls((turns, flags), call_numbers, column) if call_numbers else (turns, flags)


def _convert_form(items: list[Any], column: str) -> list[Any]:
    """Return exchanges and traces of agents as messages; messages unchanged."""
    if _is_exchange(items[0]):
        return _expand_exchanges(items, column)
    return convert_trace(items, column) if any(map(is_trace_message, items)) else items


def get_sender(message: object) -> Any:
    """Return the role of a message under either name, or None."""
    if not isinstance(message, dict):
        return None
    return message.get("from") if message.get("role") is None else message["role"]


def get_role(message: object) -> str | None:
    """Return the role of a message as templates read it; None if it is unknown."""
    sender = get_sender(message)
    return ROLE_BY_SENDER.get(sender) if isinstance(sender, str) else None


def has_readable_names(message: dict[str, Any]) -> bool:
    """Return whether a message has a known role and content, or is an exchange."""
    return (get_role(message) is not None and not _CONTENT_KEYS.isdisjoint(message)) or _is_exchange(message)


def _is_exchange(message: object) -> bool:
    """Return whether a message is ms-swift's pair of a question and its answer."""
    return isinstance(message, dict) and _MESSAGE_KEYS.isdisjoint(message) and len(_find_exchange_keys(message)) == 2


def _find_exchange_keys(message: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the role and key of the question and the answer of an exchange."""
    return [(role, name) for role, names in _EXCHANGE_KEYS for name in names if name in message]


def _expand_exchanges(exchanges: list[Any], column: str) -> list[Message]:
    """Return two messages for each exchange."""
    messages: list[Message] = []
    for number, exchange in enumerate(exchanges):
        keys = _find_exchange_keys(exchange) if isinstance(exchange, dict) else []
        if [role for role, _ in keys] != [role for role, _ in _EXCHANGE_KEYS]:
            raise UnusableRecordError(
                f"{column}[{number}] is not an object with a user's question and its answer, like the one before it"
            )
        names = [name for _, name in keys]
        if others := [str(key) for key, item in exchange.items() if key not in names and item is not None]:
            raise UnusableRecordError(
                f"{column}[{number}] has {', '.join(map(repr, others))} next to {' and '.join(map(repr, names))}; "
                f"leave it out with --ignore {','.join(others)}"
            )
        for role, name in keys:
            text = exchange[name]
            if not isinstance(text, str) or is_empty_text(text):
                problem = "is empty" if isinstance(text, str) else f"holds {describe_json_type(text)}, not text"
                raise UnusableRecordError(f"{column}[{number}].{name} {problem}; fill it in or remove the turn")
            messages.append({"role": role, "content": text})
    return messages


def _merge_calls(turns: Turns, call_numbers: list[int], column: str) -> Turns:
    """Join calls to the assistant turn that they follow, as ms-swift does."""
    messages: list[Message] = []
    flags: list[TrainFlag] = []
    all_flags = turns[1] or [None] * len(turns[0])
    for number, (message, flag) in enumerate(zip(turns[0], all_flags, strict=True)):
        follows_answer = messages and messages[-1]["role"] == "assistant"
        # A call with a thought is a turn of its own.
        if number not in call_numbers or not follows_answer or message["content"]:
            messages.append(message)
            flags.append(flag)
            continue
        if flag is not None and flags[-1] is not None and flag != flags[-1]:
            raise UnusableRecordError(
                f"{column}[{number}] is a call of the turn before it, and their training flags contradict each other; "
                "leave one out"
            )
        calls = [*(messages[-1].get("tool_calls") or []), *message["tool_calls"]]
        messages[-1] = {**messages[-1], "tool_calls": calls}
        flags[-1] = flag if flags[-1] is None else flags[-1]
    return messages, flags if turns[1] else []


def _is_plain_message(message: object) -> bool:
    """Return whether a message is only a known role and non-empty text."""
    if type(message) is not dict or len(message) != 2:
        return False
    role = message.get("role")
    content = message.get("content")
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
    converted = [convert_tool(tool) for tool in value]
    return value if all(map(operator.is_, converted, value)) else converted


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
    role_key = "from" if message.get("role") is None and message.get("from") is not None else "role"
    role = message.get(role_key)
    if not isinstance(role, str) or role not in ROLE_BY_SENDER:
        raise UnusableRecordError(_describe_unknown_role(message, role, f"{field_path}.{role_key}"))
    if role_key == "from" or role not in MESSAGE_ROLES or ("content" not in message and "value" in message):
        message = _convert_sender(message, role_key, field_path)
        role = message["role"]
    if isinstance(message.get("content"), list):
        message = _normalize_parts(message, field_path)
    calls = message.get("tool_calls")
    _check_calls(calls, field_path)
    for key in ("name", "reasoning_content"):
        if not isinstance(message.get(key), str | None):
            raise UnusableRecordError(f"{field_path}.{key} holds {describe_json_type(message[key])}, not text")
    _check_content(message, role, field_path)
    return message


def _normalize_parts(message: Message, field_path: str) -> Message:
    """Convert LLaMA-Factory's parts, whose content is a ``value``, to templates' keys.

    Reasoning and calls become keys of the message. Templates write reasoning, text and calls in this order, so parts in
    another order are refused.
    """
    parts = message["content"]
    if not any(isinstance(part, dict) and "value" in part for part in parts):
        return message
    reasoning = list[str]()
    content = list[Any]()
    calls = list[Any]()
    for number, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) and "value" in part else None
        part_path = f"{field_path}.content[{number}]"
        if kind not in ("reasoning", "tool_call"):
            is_text = kind == "text" and "text" not in part
            content.append(_rename_key(part, "value", "text") if is_text else part)
            is_late = bool(calls)
        else:
            if message.get("role") != "assistant":
                raise UnusableRecordError(f"{part_path} is of type {kind!r}, which belongs to an assistant message")
            check_keys(part, PART_KEYS, part_path)
            is_late = kind == "reasoning" and bool(content or calls)
            if kind == "tool_call":
                calls += _parse_function_calls(part["value"], f"{part_path}.value")
            elif isinstance(part["value"], str):
                reasoning.append(part["value"])
            else:
                raise UnusableRecordError(f"{part_path}.value holds {describe_json_type(part['value'])}, not text")
        if is_late:
            raise UnusableRecordError(
                f"{part_path} is of type {kind!r} after parts that templates write behind it; the order is reasoning, "
                "text, tool_call"
            )
    extracted = {"reasoning_content": "".join(reasoning), "tool_calls": calls}
    for key, value in extracted.items():
        if value and message.get(key):
            raise UnusableRecordError(f"{field_path} has {key} and parts with the same meaning; leave one of them out")
    return {**message, "content": content or "", **{key: value for key, value in extracted.items() if value}}


def _rename_key(part: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    return {**{key: value for key, value in part.items() if key != old}, new: part[old]}


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
            raise UnusableRecordError(
                f"{part_path} is of type {kind!r}: images and audio need --processor, and prompts take none"
            )
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
        arguments = function.get("arguments")
        path = f"{call_path}.arguments"
        if isinstance(arguments, str):
            value = _parse_json(arguments, f"{path} holds text that is not JSON of an object ({{}} for none)")
            if not isinstance(value, dict):
                raise UnusableRecordError(f"{path} holds JSON of {describe_json_type(value)}, not of an object")
        elif not isinstance(arguments, dict | None):
            raise UnusableRecordError(f"{path} holds {describe_json_type(arguments)}, not an object or its JSON text")


def _convert_sender(message: Message, role_key: str, field_path: str) -> Message:
    """Rename the sender and the content of a message as templates read them."""
    sender = message[role_key]
    value_keys = ("value", "content") if role_key == "from" else ("content", "value")
    value_key = next((key for key in value_keys if key in message), value_keys[0])
    other_fields = {key: value for key, value in message.items() if key not in _MESSAGE_KEYS}
    value = message.get(value_key)
    if sender in _CALL_ROLES:
        # LLaMA-Factory writes a thought before the call, and the text is what its templates write.
        content = value[: find_thought_end(value)] if isinstance(value, str) else ""
        call_text = value[len(content) :] if isinstance(value, str) else value
        calls = _parse_function_calls(call_text, f"{field_path}.{value_key}")
        return {"role": "assistant", "content": content, **other_fields, "tool_calls": calls}
    return {"role": ROLE_BY_SENDER[sender], **other_fields, "content": value}


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


def _describe_unknown_role(message: Message, role: object, field_path: str) -> str:
    if role is None:
        keys = ", ".join(repr(str(key)) for key in message) or "nothing"
        return f"{field_path} is missing: the message has {keys}; a message has role and content (or from and value)"
    if not isinstance(role, str):
        return f"{field_path} holds {describe_json_type(role)}, not one of {_ROLE_LIST}"
    # Role names that no library reads without a setting, and known ones in another case.
    name = ROLE_GUESSES.get(role.lower()) or ROLE_BY_SENDER.get(role.lower())
    if name is not None:
        hint = f"; did you mean {NAMED_ROLES[name]!r}? --map {name}={role} reads it so"
    else:
        hint = suggest(role.lower(), sorted(ROLE_BY_SENDER))
    return f"{field_path} is {role!r}, not one of {_ROLE_LIST}{hint}"


class _Flags(NamedTuple):
    """Flags of a message or part: whether it is trained, and weights of its loss."""

    trained: bool | None
    # Weight of the content.
    weight: float
    # Weight of the stop token, which has no factor.
    stop_weight: float


class _Selection(NamedTuple):
    """Trained ranges of a content (None: all of it), and its message's own flag."""

    ranges: tuple[ContentRange, ...] | None
    trained: bool | None


def read_train_flag(message: Mapping[str, Any], field_path: str) -> TrainFlag:
    """Return what the flags of a message and of its parts say; None if it has none.

    A content with flagged parts must be joined to one text afterwards (:func:`join_flagged_parts`).
    """
    content = message.get("content")
    detail = message.get("train_detail")
    flags = _read_flags(message, field_path, is_assistant=message["role"] == _ASSISTANT)
    selection = _Selection(None, None)
    if isinstance(content, list) and has_part_flags(content):
        join_flagged_parts(content, f"{field_path}.content")
        selection = _read_part_flags(content, f"{field_path}.content")
    if detail is not None:
        if selection.ranges is not None:
            raise UnusableRecordError(f"{field_path} has train_detail and flags of parts; leave one out")
        selection = _read_train_detail(detail, content, f"{field_path}.train_detail")
    if flags.trained is False and selection.trained:
        raise UnusableRecordError(
            f"{field_path} is marked as not trained, but a part of its content as trained; leave one of the two out"
        )
    trained = selection.trained if flags.trained is None else flags.trained
    if trained is False or not flags.weight or selection.ranges == ():
        return False
    stop_weight = None if flags.stop_weight == flags.weight else flags.stop_weight
    if flags.weight == 1 and stop_weight is None and selection.ranges is None:
        return trained
    return TurnWeight(trained, flags.weight, selection.ranges or (), stop_weight)


def read_segment_weight(segment: Mapping[str, Any], field_path: str) -> float:
    """Return the weight of the loss of a text segment, 0 if it is not trained."""
    flags = _read_flags(segment, field_path, SEGMENT_FLAGS, is_assistant=True)
    return 0.0 if flags.trained is False else flags.weight


def has_part_flags(content: list[Any]) -> bool:
    """Return whether a part of a content has a flag."""
    return any(
        isinstance(part, dict) and any(part.get(name) is not None for name in PART_FLAGS & part.keys())
        for part in content
    )


def join_flagged_parts(content: Any, field_path: str) -> Any:
    """Join text parts to one text if any has a flag; return others unchanged."""
    if not isinstance(content, list) or not has_part_flags(content):
        return content
    for number, part in enumerate(content):
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise UnusableRecordError(
                f"{field_path}[{number}] is no text, and another part has a train flag: flags of parts are for "
                "contents of text alone; flag the message instead"
            )
    return "".join(part["text"] for part in content)


def _read_flags(
    values: Mapping[str, Any], field_path: str, rules: Mapping[str, FlagRule] = TRAIN_FLAGS, *, is_assistant: bool
) -> _Flags:
    """Read switches, weights and factors, and refuse those that contradict each other."""
    trained: dict[str, bool] = {}
    weights: dict[str, float] = {}
    factor = 1.0
    for name, rule in rules.items():
        value = values.get(name)
        if value is None or rule.kind == "ranges":
            continue
        if rule.kind.endswith("switch"):
            if not isinstance(value, bool):
                raise UnusableRecordError(f"{field_path}.{name} is {value!r:.40}; it can be true or false")
            trained[name] = value != (rule.kind == "inverted switch")
            continue
        weight = parse_loss_weight(value, f"{field_path}.{name}")
        if rule.kind == "factor":
            factor *= weight if is_assistant else 1
        else:
            trained[name] = weight > 0
            if weight and (is_assistant or not rule.is_assistant_only):
                weights[name] = weight
    if len(set(trained.values())) > 1:
        raise _make_contradiction_error(values, trained, field_path)
    if len(set(weights.values())) > 1:
        raise _make_contradiction_error(values, weights, field_path)
    if not is_assistant:
        trained = {name: flag for name, flag in trained.items() if not flag or not rules[name].is_assistant_only}
    weight = next(iter(weights.values()), 1.0)
    return _Flags(next(iter(trained.values()), None), weight * factor, weight)


def _make_contradiction_error(
    values: Mapping[str, Any], names: Mapping[str, object], field_path: str
) -> UnusableRecordError:
    flag_list = " and ".join(f"{name} {values[name]}" for name in names)
    return UnusableRecordError(f"{field_path} has {flag_list}, which contradict each other; leave one out")


def _read_part_flags(content: list[Any], field_path: str) -> _Selection:
    """Return the weights of text parts.

    As in axolotl, a part without a flag is trained if the message is, and a switch of any part selects the message.
    """
    ranges: list[ContentRange] = []
    trained = None
    offset = 0
    for number, part in enumerate(content):
        flags = _read_flags(part, f"{field_path}[{number}]", is_assistant=True)
        stop = offset + len(part["text"])
        weight = 0.0 if flags.trained is False else flags.weight
        if weight and stop > offset:
            ranges.append(ContentRange(offset, stop, weight))
        if flags.trained is not None:
            trained = True
        offset = stop
    return _Selection(tuple(ranges), bool(ranges) if trained else None)


def _read_train_detail(value: object, content: object, field_path: str) -> _Selection:
    """Return the trained ranges of ``train_detail``, whose ends are included."""
    if not isinstance(value, list):
        raise UnusableRecordError(f"{field_path} holds {describe_json_type(value)}, not a list of ranges")
    if not isinstance(content, str):
        raise UnusableRecordError(f"{field_path} counts characters of a text, but the content is no text")
    ranges = []
    for number, detail in enumerate(value):
        item_path = f"{field_path}[{number}]"
        if not isinstance(detail, dict) or any(detail.get(key) is None for key in _DETAIL_KEYS):
            raise UnusableRecordError(f"{item_path} is not an object with {', '.join(_DETAIL_KEYS)}")
        begin = as_int(detail["begin_offset"])
        end = as_int(detail["end_offset"])
        if not isinstance(detail["train"], bool):
            raise UnusableRecordError(f"{item_path}.train is {detail['train']!r:.40}; it can be true or false")
        if begin is None or end is None or not 0 <= begin <= end or begin >= len(content):
            raise UnusableRecordError(
                f"{item_path} is from {detail['begin_offset']!r:.40} to {detail['end_offset']!r:.40}; offsets count "
                f"the {len(content):,} characters of the content from 0, and the end is included"
            )
        if detail["train"]:
            ranges.append(ContentRange(begin, min(end + 1, len(content)), 1.0))
    return _Selection(tuple(ranges), bool(ranges))
