"""Tool formats: tools, calls and results written into the contents of messages.

They are those of LLaMA-Factory's ``tool_format``, under its names, and ms-swift's agent template ``hermes``. They serve
templates that do not write tools themselves. The rewritten conversation has neither tools nor calls, so any template
renders it.
"""

import datetime as dt
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from batchloom.chat.templates.chat_template import RenderError
from batchloom.chat.templates.turn_positions import ASSISTANT
from batchloom.core.document import Conversation, TrainFlag
from batchloom.core.errors import TemplateError
from batchloom.core.wording import describe_json_type

Tool = dict[str, Any]


class ToolCall(NamedTuple):
    """A call; ``arguments`` is a JSON value."""

    name: str
    arguments: Any


class ToolFormat(NamedTuple):
    """A way to write tools, calls and results.

    Attributes:
        write_tools: returns the text after the system prompt, for the tools and a date.
        write_calls: returns the text of an assistant's calls, after its content.
        result: (before, after) of a result in a user turn, in which consecutive results are lines; None to leave
            results in tool turns, which the template writes.
        control: control tokens of the model whose format it is; no content may hold them.
    """

    write_tools: Callable[[Sequence[Tool], dt.date], str]
    write_calls: Callable[[Sequence[ToolCall]], str]
    result: tuple[str, str] | None = None
    control: tuple[str, ...] = ()


def _to_json(value: Any, indent: int | None = None) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent)
    except ValueError as error:
        raise RenderError(f"a tool or call holds a number that JSON cannot hold (NaN or infinity): {error}") from None


def _unwrap(tool: Tool) -> Tool:
    function = tool.get("function") if tool.get("type") == "function" else tool
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RenderError("a tool has no name, which --tool-format writes; describe it as a function with a name")
    return function


def _wrap(tool: Tool) -> Tool:
    function = _unwrap(tool)
    return tool if function is not tool else {"type": "function", "function": tool}


def _get_arguments(call: ToolCall) -> dict[str, Any]:
    if not isinstance(call.arguments, dict):
        raise RenderError(f"the arguments of {call.name} are not an object, whose keys --tool-format writes")
    return call.arguments


def _write_value(value: Any) -> str:
    return value if isinstance(value, str) else _to_json(value)


def _write_default_tools(tools: Sequence[Tool], _date: dt.date) -> str:
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


def _get_value(values: dict[str, Any], key: str, kind: type[Any]) -> Any:
    """Return a value of a tool's schema, empty if there is none; check its type."""
    value = values.get(key) or kind()
    if not isinstance(value, kind):
        raise RenderError(
            f"{key} of a tool holds {describe_json_type(value)}, which --tool-format default cannot describe; write "
            "the parameters as JSON Schema"
        )
    return value


def _describe_parameters(function: Tool) -> list[str]:
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


def _write_default_calls(calls: Sequence[ToolCall]) -> str:
    return "\n".join(f"Action: {call.name}\nAction Input: {_to_json(call.arguments)}" for call in calls)


_SIGNATURES = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>{}\n</tools>\n\n"
)
_JSON_CALLS = (
    "For each function call, return a json object with function name and arguments within <tool_call></tool_call> "
    'XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)


def _write_signatures(tools: Sequence[Tool]) -> str:
    return _SIGNATURES.format("".join(f"\n{_to_json(_wrap(tool))}" for tool in tools))


def _write_qwen_tools(tools: Sequence[Tool], _date: dt.date) -> str:
    return f"\n\n{_write_signatures(tools)}{_JSON_CALLS}"


def _write_ling_tools(tools: Sequence[Tool], _date: dt.date) -> str:
    return f"{_write_signatures(tools)}{_JSON_CALLS}\ndetailed thinking off"


def _to_object(call: ToolCall, arguments: str = "arguments") -> dict[str, Any]:
    return {"name": call.name, arguments: call.arguments}


def _write_qwen_calls(calls: Sequence[ToolCall]) -> str:
    return "\n".join(f"<tool_call>\n{_to_json(_to_object(call))}\n</tool_call>" for call in calls)


def _write_qwen35_tools(tools: Sequence[Tool], _date: dt.date) -> str:
    listed = "".join(f"\n{_to_json(_unwrap(tool))}" for tool in tools)
    return (
        f"\n\n# Tools\n\nYou have access to the following functions:\n\n<tools>{listed}\n</tools>\n\n"
        "If you choose to call a function ONLY reply in the following format with NO suffix:\n\n"
        "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>\n"
        "<parameter=example_parameter_2>\nThis is the value for the second parameter\nthat can span\nmultiple lines\n"
        "</parameter>\n</function>\n</tool_call>\n\n<IMPORTANT>\nReminder:\n"
        "- Function calls MUST follow the specified format: an inner <function=...></function> block must be nested "
        "within <tool_call></tool_call> XML tags\n- Required parameters MUST be specified\n"
        "- You may provide optional reasoning for your function call in natural language BEFORE the function call, but "
        "NOT after\n- If there is no function call available, answer the question like normal with your current "
        "knowledge and do not tell the user about function calls\n</IMPORTANT>"
    )


def _write_qwen35_calls(calls: Sequence[ToolCall]) -> str:
    return "\n".join(
        f"<tool_call>\n<function={call.name}>"
        + "".join(f"\n<parameter={key}>\n{_write_value(v)}\n</parameter>" for key, v in _get_arguments(call).items())
        + "\n</function>\n</tool_call>"
        for call in calls
    )


def _write_llama3_tools(tools: Sequence[Tool], date: dt.date) -> str:
    listed = "".join(f"{_to_json(_wrap(tool), 4)}\n\n" for tool in tools)
    return (
        f"Cutting Knowledge Date: December 2023\nToday Date: {date:%d %b %Y}\n\n"
        "You have access to the following functions. To call a function, please respond with JSON for a function call. "
        'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}. '
        f"Do not use variables.\n\n{listed}"
    )


def _write_llama3_calls(calls: Sequence[ToolCall]) -> str:
    objects = [_to_object(call, "parameters") for call in calls]
    return _to_json(objects[0] if len(objects) == 1 else objects)


def _write_glm4_tools(tools: Sequence[Tool], _date: dt.date) -> str:
    listed = "".join(
        f"\n\n## {function['name']}\n\n{_to_json(function, 4)}\n在调用上述函数时，请使用 Json 格式表示调用的参数。"  # noqa: RUF001
        for function in map(_unwrap, tools)
    )
    return (
        "你是一个名为 ChatGLM 的人工智能助手。你是基于智谱 AI 公司训练的语言模型 GLM-4 模型开发的，"  # noqa: RUF001
        f"你的任务是针对用户的问题和要求提供适当的答复和支持。\n\n# 可用工具{listed}"
    )


def _write_glm4_calls(calls: Sequence[ToolCall]) -> str:
    if len(calls) > 1:
        raise RenderError("it calls several tools at once, which the tool format glm4 has no form for")
    return f"{calls[0].name}\n{_to_json(calls[0].arguments)}"


def _write_mistral_tools(tools: Sequence[Tool], _date: dt.date) -> str:
    return f"[AVAILABLE_TOOLS] {_to_json(list(map(_wrap, tools)))}[/AVAILABLE_TOOLS]"


def _write_mistral_calls(calls: Sequence[ToolCall]) -> str:
    return _to_json(list(map(_to_object, calls)))


def _write_lfm2_tools(tools: Sequence[Tool], _date: dt.date) -> str:
    return f"List of tools: <|tool_list_start|>{_to_json(list(map(_unwrap, tools)))}<|tool_list_end|>"


def _write_lfm2_calls(calls: Sequence[ToolCall]) -> str:
    written = (
        f"{call.name}({', '.join(f'{key}={_quote_lfm2_value(v)}' for key, v in _get_arguments(call).items())})"
        for call in calls
    )
    return f"<|tool_call_start|>[{', '.join(written)}]<|tool_call_end|>"


def _quote_lfm2_value(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else _to_json(value)


_TOOL_RESPONSE = ("<tool_response>\n", "\n</tool_response>")
_QWEN = ToolFormat(_write_qwen_tools, _write_qwen_calls, _TOOL_RESPONSE)
_LFM2_CONTROL = ("<|tool_list_start|>", "<|tool_list_end|>", "<|tool_call_start|>", "<|tool_call_end|>")
TOOL_FORMATS: dict[str, ToolFormat] = {
    "default": ToolFormat(_write_default_tools, _write_default_calls, ("", "")),
    "glm4": ToolFormat(_write_glm4_tools, _write_glm4_calls),
    "hermes": _QWEN,
    "lfm2": ToolFormat(_write_lfm2_tools, _write_lfm2_calls, control=_LFM2_CONTROL),
    "ling": ToolFormat(_write_ling_tools, _write_qwen_calls, _TOOL_RESPONSE),
    "llama3": ToolFormat(_write_llama3_tools, _write_llama3_calls),
    "mistral": ToolFormat(
        _write_mistral_tools, _write_mistral_calls, control=("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]")
    ),
    "qwen": _QWEN,
    "qwen3_5": ToolFormat(_write_qwen35_tools, _write_qwen35_calls, _TOOL_RESPONSE),
}


def choose_tool_format(name: str, control: Sequence[str], tokenizer: str) -> ToolFormat:
    """Return a tool format; raise TemplateError if contents cannot hold it."""
    tool_format = TOOL_FORMATS[name]
    if spelled := [token for token in tool_format.control if token in control]:
        raise TemplateError(
            f"tool format {name} writes {', '.join(spelled)}, control tokens of tokenizer {tokenizer!r}, which "
            "contents of messages cannot hold: use the model's own template, which writes tools (leave --tool-format "
            "out)"
        )
    return tool_format


def write_tools(conversation: Conversation, tool_format: ToolFormat, date: dt.date) -> Conversation:
    """Return the conversation with its tools, calls and results in contents.

    Raises:
        RenderError: a tool without a name, or arguments that the format cannot write.
    """
    messages: list[dict[str, Any]] = []
    # Index of each message in the result, for flags and the completion.
    numbers: list[int] = []
    if conversation.tools and not _is_system(conversation.messages[:1]):
        messages.append({"role": "system", "content": ""})
    for message in conversation.messages:
        is_result = message.get("role") == "tool" and tool_format.result is not None
        if is_result and numbers and conversation.messages[len(numbers) - 1].get("role") == "tool":
            messages[-1] = _append_text(messages[-1], f"\n{_write_result(message, tool_format)}")
        elif is_result:
            messages.append({"role": "user", "content": _write_result(message, tool_format)})
        else:
            messages.append(_write_message(message, tool_format))
        numbers.append(len(messages) - 1)
    if conversation.tools:
        messages[0] = _append_text(messages[0], tool_format.write_tools(conversation.tools, date))
    trained: list[TrainFlag] = [None] * len(messages) if conversation.trained else []
    for number, flag in zip(numbers, conversation.trained, strict=False):
        trained[number] = flag if trained[number] is None else trained[number]
    # The completion of a prompt begins after its last message.
    completion = None if conversation.completion is None else [*numbers, len(messages)][conversation.completion]
    return replace(conversation, messages=messages, tools=None, trained=trained, completion=completion)


def _is_system(messages: Sequence[dict[str, Any]]) -> bool:
    return bool(messages) and messages[0].get("role") == "system"


def _write_message(message: dict[str, Any], tool_format: ToolFormat) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if message.get("role") != ASSISTANT or not calls:
        return message
    text = tool_format.write_calls(list(map(_parse_call, calls)))
    fields = {key: value for key, value in message.items() if key != "tool_calls"}
    has_content = bool(_read_text(message))
    return _append_text(fields, f"\n{text}" if has_content else text)


def _parse_call(call: dict[str, Any]) -> ToolCall:
    function = call.get("function") or call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except ValueError as error:
            raise RenderError(f"the arguments of {function['name']} are no JSON: {error}") from None
    return ToolCall(function["name"], {} if arguments is None else arguments)


def _write_result(message: dict[str, Any], tool_format: ToolFormat) -> str:
    content = message.get("content")
    if isinstance(content, list) and not all("text" in part for part in content):
        raise RenderError("a tool returns media, which --tool-format does not write; leave it out, or the record")
    before, after = tool_format.result or ("", "")
    return f"{before}{_read_text(message)}{after}"


def _read_text(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""


def _append_text(message: dict[str, Any], text: str) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, list):
        return {**message, "content": [*content, {"type": "text", "text": text}]}
    return {**message, "content": (content or "") + text}
