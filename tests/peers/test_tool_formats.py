"""Tools and calls in contents against those that LLaMA-Factory 0.9.5 writes (``record_tool_formats.py``)."""

import json
from pathlib import Path

import pytest

from batchloom.chat import RenderError
from batchloom.chat.templates import write_tools
from batchloom.core.document import Conversation
from peers.tool_cases import CALLS, TOOLS

RECORDED = json.loads((Path(__file__).parent / "expected/tool_formats.json").read_text("utf-8"))


def write(tools=None, calls=None, arguments=lambda value: value):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    functions = [{"name": call["name"], "arguments": arguments(call["arguments"])} for call in calls or ()]
    listed = [{"type": "function", "function": function} for function in functions]
    messages.append({"role": "assistant", "content": "" if calls else "yes", "tool_calls": listed or None})
    return write_tools(Conversation(messages, tools))


@pytest.mark.parametrize("case", TOOLS)
def test_tools_are_those_of_llama_factory(case):
    written = write(tools=TOOLS[case])
    assert written.messages[0]["content"] == "Be brief." + RECORDED["tools"][case]
    assert written.tools is None


@pytest.mark.parametrize("arguments", [lambda value: value, json.dumps], ids=["objects", "json"])
@pytest.mark.parametrize("case", CALLS)
def test_calls_are_those_of_llama_factory(case, arguments):
    message = write(calls=CALLS[case], arguments=arguments).messages[-1]
    assert message == {"role": "assistant", "content": RECORDED["calls"][case]}


@pytest.mark.parametrize(
    "parameters",
    [[1], {"properties": [1]}, {"properties": {"b": 5}}, {"properties": {"b": {"enum": 4}}}, {"required": "b"}],
)
def test_parameters_that_are_no_schema_are_a_fault_of_the_record(parameters):
    if isinstance(parameters, dict):
        parameters = {"properties": {"b": {"type": "string"}}, **parameters}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    with pytest.raises(RenderError, match="of a tool holds"):
        write(tools=[tool])
