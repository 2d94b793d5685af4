"""Tool formats against the tools and calls that LLaMA-Factory 0.9.5 writes (``record_tool_formats.py``)."""

import datetime as dt
import json
from pathlib import Path

import pytest

from batchloom.chat import RenderError
from batchloom.chat.templates import TOOL_FORMATS, write_tools
from batchloom.core.document import Conversation
from peers.tool_cases import CALLS, TOOLS

RECORDED = json.loads((Path(__file__).parent / "expected/tool_formats.json").read_text("utf-8"))
# ms-swift's hermes is LLaMA-Factory's qwen.
OURS = {**{name: name for name in TOOL_FORMATS}, "hermes": "qwen"}
# Models with these formats have templates of their own; glm4_moe lacks the end of a call, which GLM-4.5 writes.
LEFT_OUT = {"gemma4", "glm4_moe", "minimax1", "minimax2", "seed_oss"}


def write(name, tools=None, calls=None, arguments=lambda value: value):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    functions = [{"name": call["name"], "arguments": arguments(call["arguments"])} for call in calls or ()]
    listed = [{"type": "function", "function": function} for function in functions]
    messages.append({"role": "assistant", "content": "" if calls else "yes", "tool_calls": listed or None})
    return write_tools(Conversation(messages, tools), TOOL_FORMATS[name], dt.date(2026, 7, 26))


@pytest.mark.parametrize("case", TOOLS)
@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_tools_are_those_of_llama_factory(name, case):
    written = write(name, tools=TOOLS[case])
    text = RECORDED[OURS[name]]["tools"][case].replace("<date>", "26 Jul 2026")
    assert written.messages[0]["content"] == "Be brief." + text
    assert written.tools is None


@pytest.mark.parametrize("arguments", [lambda value: value, json.dumps], ids=["objects", "json"])
@pytest.mark.parametrize(("name", "case"), [(name, case) for name in TOOL_FORMATS for case in CALLS])
def test_calls_are_those_of_llama_factory(name, case, arguments):
    expected = RECORDED[OURS[name]]["calls"][case]
    if isinstance(expected, dict):
        with pytest.raises(Exception, match="it calls several tools at once"):
            write(name, calls=CALLS[case], arguments=arguments)
        return
    message = write(name, calls=CALLS[case], arguments=arguments).messages[-1]
    assert message == {"role": "assistant", "content": expected}


def test_every_format_is_offered_or_left_out():
    assert RECORDED.keys() - TOOL_FORMATS.keys() == LEFT_OUT


@pytest.mark.parametrize(
    "parameters",
    [[1], {"properties": [1]}, {"properties": {"b": 5}}, {"properties": {"b": {"enum": 4}}}, {"required": "b"}],
)
def test_parameters_that_are_no_schema_are_a_fault_of_the_record(parameters):
    if isinstance(parameters, dict):
        parameters = {"properties": {"b": {"type": "string"}}, **parameters}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    conversation = Conversation([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], [tool])
    with pytest.raises(RenderError, match="of a tool holds"):
        write_tools(conversation, TOOL_FORMATS["default"], dt.date(2024, 7, 26))
