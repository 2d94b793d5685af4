"""Template arguments: values that a chat template reads as variables.

They are the keyword arguments of transformers' ``apply_chat_template`` beyond its own, and TRL's column
``chat_template_kwargs``.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

import orjson

from batchloom.core.errors import UnusableRecordError
from batchloom.core.settings import is_text, quote_value, raise_problems
from batchloom.core.wording import describe_json_type

TemplateArguments = Mapping[str, Any]

# Names that ``apply_chat_template`` or the template environment defines.
RESERVED_ARGUMENTS = frozenset(
    (
        "messages",
        "conversation",
        "tools",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "tokenizer_kwargs",
        "return_assistant_tokens_mask",
        "processor_kwargs",
        "additional_special_tokens",
        "extra_special_tokens",
        *(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")),
        "raise_exception",
        "strftime_now",
        "range",
        "dict",
        "lipsum",
        "cycler",
        "joiner",
        "namespace",
        "loop",
        "self",
        "super",
        "caller",
        "varargs",
        "kwargs",
        "true",
        "false",
        "none",
        "True",
        "False",
        "None",
    )
)
_MAX_DEPTH = 32
_NAME_PATTERN = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_MAX_INTEGER_BITS = 63


def find_argument_problems(arguments: object) -> list[str]:
    """List the problems of template arguments, each as ``name: problem``."""
    if not isinstance(arguments, Mapping):
        return [f"{quote_value(arguments)} is no mapping of names to values; write {{enable_thinking: false}}"]
    problems = []
    for name, value in arguments.items():
        if not isinstance(name, str) or not _NAME_PATTERN.fullmatch(name):
            problems.append(f"{quote_value(name)} is not the name of a variable; give letters, digits and underscores")
        elif name in RESERVED_ARGUMENTS:
            problems.append(f"{name} is a name that templates get from the record or the tokenizer; choose another")
        elif problem := _find_value_problem(value, _MAX_DEPTH):
            problems.append(f"{name}: {quote_value(value)} {problem}")
    return problems


def _find_value_problem(value: object, depth: int) -> str:
    """Return why a value is not JSON; "" if it is."""
    # Exact types: JSON has no form for the numbers of numpy.
    kind = type(value)
    if value is None or kind in (bool, str):
        return "" if kind is not str or not value or is_text(value) else "is not valid Unicode"
    if not depth:
        return f"is nested deeper than {_MAX_DEPTH} levels"
    if isinstance(value, int) and kind is int:
        return "is beyond 64 bits" if value.bit_length() > _MAX_INTEGER_BITS else ""
    if isinstance(value, float) and kind is float:
        return "" if math.isfinite(value) else "is no finite number"
    if isinstance(value, dict):
        if not all(map(is_text, value)):
            return "has keys that are no text"
        value = list(value.values())
    if not isinstance(value, list | tuple):
        return "is no JSON value; give text, a number, true, false, a list or an object"
    return next((problem for item in value if (problem := _find_value_problem(item, depth - 1))), "")


def parse_template_arguments(value: object) -> object:
    """Parse ``NAME=VALUE`` texts to a mapping; the recipe checks other values.

    VALUE is JSON, else text.

    Raises:
        SettingsError: a text without a name, or a repeated one.
    """
    if not isinstance(value, str | list | tuple):
        return value
    problems = []
    arguments = dict[str, Any]()
    for text in [value] if isinstance(value, str) else value:
        name, equals, content = text.partition("=") if isinstance(text, str) else ("", "", "")
        if not equals or not name.strip():
            problems.append(f"template_args: {quote_value(text)} is not NAME=VALUE")
        elif name.strip() in arguments:
            problems.append(f"template_args: {name.strip()} is given twice; give it once")
        elif content.lstrip().startswith(("{", "[")) and _parse_value(content) == content:
            problems.append(f"template_args: {name.strip()} is {quote_value(content)}, which is not valid JSON")
        else:
            arguments[name.strip()] = _parse_value(content)
    raise_problems(problems)
    return arguments


def _parse_value(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text


def format_template_argument(name: str, value: Any) -> str:
    """Return the ``NAME=VALUE`` that :func:`parse_template_arguments` reads back."""
    is_plain = isinstance(value, str) and _parse_value(value) == value
    return f"{name}={value if is_plain else orjson.dumps(value).decode()}"


def read_template_arguments(value: object, column: str) -> dict[str, Any] | None:
    """Read the template arguments of a record, or JSON text of them; None without any.

    Null values are left out: tables add every name to every record.
    """
    if isinstance(value, str):
        if not value.strip():
            return None
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise UnusableRecordError(
                f"column {column!r} holds text that is not a JSON object of template arguments: {error.msg} at "
                f"character {error.pos + 1}"
            ) from None
    if value is None or value == []:
        return None
    if not isinstance(value, dict):
        raise UnusableRecordError(
            f"column {column!r} holds {describe_json_type(value)}, not an object of template arguments such as "
            '{"enable_thinking": false}'
        )
    arguments = {name: item for name, item in value.items() if item is not None}
    if problems := find_argument_problems(arguments):
        raise UnusableRecordError(f"{column}: {'; '.join(problems)}")
    return arguments or None
