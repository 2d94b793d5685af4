"""Names inside messages: their keys and role values under ``--map``.

``role=speaker,content=utterance`` names keys of messages, ``assistant=bot`` the value that a role has in the
records. Several values of one role are separated by ``|``.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batchloom.core.errors import UnusableRecordError

# Keys of a message that a mapping can name.
NAMED_KEYS = ("role", "content", "tool_calls", "reasoning_content", "train", "train_detail")
# Roles whose values a mapping can name. ``system`` is the role of a column, so its value has another name.
NAMED_ROLES = {
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "developer": "developer",
    "system_role": "system",
    "function_call": "function_call",
}
MESSAGE_MAPPING_NAMES = (*NAMED_KEYS, *NAMED_ROLES)
_VALUE_SEPARATOR = "|"
# Keys that other conventions use for the two parts of a message, and values that they use for roles. They are only
# suggested, because a key such as ``text`` may also be something else.
_ROLE_KEYS = ("role", "from", "speaker", "sender", "author", "participant", "actor", "who", "user", "agent")
_CONTENT_KEYS = ("content", "value", "utterance", "text", "message", "msg", "body", "sentence")
_ROLE_GUESSES = {
    **dict.fromkeys(("user", "human", "client", "customer", "usr", "person", "prompter"), "user"),
    **dict.fromkeys(("assistant", "bot", "gpt", "chatbot", "model", "ai", "agent", "chatgpt"), "assistant"),
    **dict.fromkeys(("tool", "function", "ipython", "tools"), "tool"),
    "system": "system_role",
}


@dataclass(frozen=True, slots=True)
class MessageNames:
    """Names of the keys and roles of messages in the records of one source.

    Attributes:
        keys: key in the records by the key that templates read.
        roles: role by its value in the records.
    """

    keys: Mapping[str, str]
    roles: Mapping[str, str]

    def occur_in(self, message: Mapping[str, Any]) -> bool:
        """Return whether a message has a role under its name."""
        return any(name in message for name in (self.keys.get("role", "role"), "from"))

    def rename(self, message: Mapping[str, Any], field_path: str) -> dict[str, Any]:
        """Return a message with the keys and roles that templates read.

        Raises:
            UnusableRecordError: the key of the role is missing, or a key occurs under both names.
        """
        renamed = dict(message)
        for key, own_key in self.keys.items():
            value = None if own_key == key else renamed.pop(own_key, None)
            if value is None:
                if key == "role" and renamed.get("role") is None:
                    keys = ", ".join(repr(str(name)) for name in message) or "nothing"
                    raise UnusableRecordError(f"{field_path} has no {own_key!r}: the message has {keys}")
                continue
            if renamed.get(key) is not None:
                raise UnusableRecordError(
                    f"{field_path} has {own_key!r} and {key!r}, and both mean the {key}; leave one of them out with "
                    f"--ignore 'messages[].{key}'"
                )
            renamed[key] = value
        if "role" in self.keys and "content" not in renamed and "value" in renamed:
            renamed["content"] = renamed.pop("value")
        sender_key = "role" if renamed.get("role") is not None else "from"
        sender = renamed.get(sender_key)
        if isinstance(sender, str):
            renamed[sender_key] = self.roles.get(sender, sender)
        return renamed


def make_message_names(mapping: Mapping[str, str]) -> MessageNames | None:
    """Return the names inside messages of a mapping; None if it has none."""
    keys = {key: mapping[key] for key in NAMED_KEYS if mapping.get(key)}
    roles = {
        value: role for name, role in NAMED_ROLES.items() for value in _split_values(mapping.get(name, "")) if value
    }
    return MessageNames(keys, roles) if keys or roles else None


def find_name_problems(mapping: Mapping[str, str]) -> list[str]:
    """List the problems of the names inside messages, one sentence each."""
    names = {role: value for role, value in mapping.items() if role in MESSAGE_MAPPING_NAMES}
    problems = [
        f"map.{role}: names no {'key' if role in NAMED_KEYS else 'value'} of messages; write one, or leave it out"
        for role, value in names.items()
        if not all(_split_values(value))
    ]
    for group in (NAMED_KEYS, tuple(NAMED_ROLES)):
        pairs = [(value, role) for role in group for value in _split_values(names.get(role, "")) if value]
        first_role = dict(reversed(pairs))
        problems += [
            f"map.{role}: {value!r} is already the name of {first_role[value]}; write each name once"
            for value, role in pairs
            if first_role[value] != role
        ]
    return problems


def _split_values(text: str) -> list[str]:
    return [value.strip() for value in text.split(_VALUE_SEPARATOR)]


def guess_message_names(messages: Sequence[Mapping[str, Any]]) -> tuple[dict[str, str], list[str]]:
    """Guess the mapping that reads messages of unknown keys or roles.

    Returns:
        The mapping, empty unless exactly one key can be the role and one the content; and the values of the role
        for which no role is known.
    """
    keys = {key: value for message in messages for key, value in message.items() if isinstance(value, str)}
    role_key, content_key = _find_key(keys, _ROLE_KEYS), _find_key(keys, _CONTENT_KEYS)
    if role_key is None or content_key is None:
        return {}, []
    mapping = {
        role: key
        for role, key, known_keys in (("role", role_key, ("role", "from")), ("content", content_key, _CONTENT_KEYS[:2]))
        if key not in known_keys
    }
    values_by_role: dict[str, list[str]] = {}
    for value in dict.fromkeys(message.get(role_key) for message in messages):
        if isinstance(value, str):
            values_by_role.setdefault(_ROLE_GUESSES.get(value.lower(), ""), []).append(value)
    unknown_values = values_by_role.pop("", [])
    for role, values in values_by_role.items():
        if values != [NAMED_ROLES[role]]:
            mapping[role] = _VALUE_SEPARATOR.join(values)
    return mapping, unknown_values


def _find_key(keys: Iterable[str], known_keys: Sequence[str]) -> str | None:
    """Return the key that is or resembles a known one; None if none or several do."""
    names = list(keys)
    for known_key in known_keys[:2]:
        if known_key in names:
            return known_key
    similar_keys = [name for name in names if name.lower() in known_keys]
    return similar_keys[0] if len(similar_keys) == 1 else None
