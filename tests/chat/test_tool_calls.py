"""Tool calls in the built-in templates, and templates that cannot write them."""

import json

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings

from batchloom.chat import BUILT_IN_TEMPLATES, RenderError, choose_template
from batchloom.core.document import Conversation
from batchloom.preparation import ChatEncoder, ChatRecipe, encode_conversations
from chat.conversations import CONTENTS, GENTLE, messages, rich_messages, tool_lists
from tiers import examples

PROVED = ChatRecipe(prove=True)
MANY = settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}


def make_call(arguments, **wrapper):
    return {**wrapper, "function": {"name": "find", "arguments": arguments}}


TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "weather?"},
    {"role": "assistant", "content": None, "tool_calls": [make_call({"city": "Zürich"}, id="1")]},
    {"role": "tool", "content": "sunny", "tool_call_id": "1"},
    {"role": "assistant", "content": "Two:", "tool_calls": [make_call('{"n":1}'), make_call({})]},
    {"role": "tool", "content": "a"},
    {"role": "tool", "content": "b"},
    {"role": "assistant", "content": "Fine."},
]
CALLS = (
    '<tool_call>\n{"name": "find", "arguments": {"city": "Zürich"}}\n</tool_call>',
    (
        'Two:\n<tool_call>\n{"name": "find", "arguments": {"n":1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "find", "arguments": {}}\n</tool_call>'
    ),
)
LLAMA_CALLS = (
    '{"name": "find", "parameters": {"city": "Zürich"}}',
    'Two:\n\n{"name": "find", "parameters": {"n":1}}; {"name": "find", "parameters": {}}',
)
TOOL_LINE = json.dumps(TOOL)
EXPECTED_TEXTS = {
    "plain": (
        f"Tools:\n{TOOL_LINE}\n\nSystem:\nBe brief.\n\nUser:\nweather?\n\n"
        f"Assistant:\n{CALLS[0]}<|endoftext|>\nTool:\nsunny\n\nAssistant:\n{CALLS[1]}<|endoftext|>\n"
        "Tool:\na\n\nTool:\nb\n\nAssistant:\nFine.<|endoftext|>\n"
    ),
    "alpaca": (
        f"### Tools:\n{TOOL_LINE}\n\nBe brief.\n\n### Instruction:\nweather?\n\n"
        f"### Response:\n{CALLS[0]}<|endoftext|>\n\n### Tool:\nsunny\n\n"
        f"### Response:\n{CALLS[1]}<|endoftext|>\n\n### Tool:\na\n\n### Tool:\nb\n\n"
        "### Response:\nFine.<|endoftext|>\n\n"
    ),
    "chatml": (
        "<|im_start|>system\nBe brief.\n\n# Tools\n\nYou may call one or more functions to assist with the user "
        "query.\n\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
        f"{TOOL_LINE}\n</tools>\n\nFor each function call, return a json object with function name and arguments "
        "within <tool_call></tool_call> XML tags:\n<tool_call>\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
        f"<|im_start|>user\nweather?<|im_end|>\n<|im_start|>assistant\n{CALLS[0]}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nsunny\n</tool_response><|im_end|>\n"
        f"<|im_start|>assistant\n{CALLS[1]}<|im_end|>\n<|im_start|>user\n<tool_response>\na\n</tool_response>\n"
        "<tool_response>\nb\n</tool_response><|im_end|>\n<|im_start|>assistant\nFine.<|im_end|>\n"
    ),
    "llama3": (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nEnvironment: ipython\n\nYou have access to the "
        "following functions. To call a function, please respond with JSON for a function call.Respond in the "
        'format {"name": function name, "parameters": dictionary of argument name and its value}.Do not use '
        f"variables.\n\n{json.dumps(TOOL, indent=4)}\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nweather?<|eot_id|>"
        f"<|start_header_id|>assistant<|end_header_id|>\n\n{LLAMA_CALLS[0]}<|eot_id|>"
        "<|start_header_id|>ipython<|end_header_id|>\n\nsunny<|eot_id|>"
        f"<|start_header_id|>assistant<|end_header_id|>\n\n{LLAMA_CALLS[1]}<|eot_id|>"
        "<|start_header_id|>ipython<|end_header_id|>\n\na<|eot_id|>"
        "<|start_header_id|>ipython<|end_header_id|>\n\nb<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nFine.<|eot_id|>"
    ),
}
STOP = {
    "plain": "<|endoftext|>",
    "alpaca": "<|endoftext|>",
    "chatml": "<|im_end|>",
    "llama3": "<|eot_id|>",
}


@pytest.fixture(scope="module")
def encoders(tokenizers):
    return {
        (name, template): ChatEncoder(tokenizer, template)
        for name, tokenizer in tokenizers.items()
        for template in BUILT_IN_TEMPLATES
    }


def decode_trained_spans(encoder, encoded):
    """Return the trained text of one document, one string per trained span."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], encoded.flags.trained, [0]])))
    return [encoder.tokenizer.decode(encoded.ids[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]


@pytest.mark.parametrize("template", BUILT_IN_TEMPLATES)
def test_calls_are_trained_and_tools_and_results_are_not(encoders, template):
    encoder = encoders["bytes", template]
    encoded = encode_conversations([Conversation(TURNS, [TOOL])], encoder, PROVED)
    assert not encoded.faults
    assert not encoded.altered
    assert encoder.tokenizer.decode(encoded.ids) == EXPECTED_TEXTS[template]
    calls, stop = LLAMA_CALLS if template == "llama3" else CALLS, STOP[template]
    assert decode_trained_spans(encoder, encoded) == [*(answer + stop for answer in calls), f"Fine.{stop}"]


@pytest.mark.parametrize("template", BUILT_IN_TEMPLATES)
def test_calls_without_a_list_of_tools(encoders, template):
    encoder = encoders["bytes", template]
    with_tools, without_tools = (
        encode_conversations([Conversation(TURNS, tools)], encoder, PROVED) for tools in ([TOOL], None)
    )
    assert decode_trained_spans(encoder, without_tools) == decode_trained_spans(encoder, with_tools)
    assert "find" not in encoder.tokenizer.decode(without_tools.ids[: np.flatnonzero(without_tools.flags.trained)[0]])


def format_answer(template, message):
    """Return the text that a model must write for a message, as documented."""
    content = message["content"]
    if not isinstance(content, str):
        content = "".join(part["text"] for part in content)
    if template != "chatml":
        content = content.strip()
    calls = []
    for call in message.get("tool_calls", ()):
        arguments = call["function"]["arguments"] or {}
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        key = "parameters" if template == "llama3" else "arguments"
        call_text = f'{{"name": "{call["function"]["name"]}", "{key}": {arguments}}}'
        calls.append(call_text if template == "llama3" else f"<tool_call>\n{call_text}\n</tool_call>")
    between, inner = ("\n\n", "; ") if template == "llama3" else ("\n", "\n")
    return content + (between if content and calls else "") + inner.join(calls) + STOP[template]


@pytest.mark.parametrize("template", BUILT_IN_TEMPLATES)
@MANY
@given(turns=rich_messages(GENTLE), tools=tool_lists(GENTLE))
def test_every_form_of_a_call_is_trained_whole(encoders, template, turns, tools):
    encoder = encoders["bytes", template]
    encoded = encode_conversations([Conversation(turns, tools)], encoder, PROVED)
    if encoded.faults:
        reasons = (
            "crosses the position",
            "beginning of turn",
            "private-use",
            "leaves it out",
        )
        assert any(reason in encoded.faults[0].reason for reason in reasons)
        return
    expected = [format_answer(template, turn) for turn in turns if turn["role"] == "assistant"]
    if not expected:
        assert encoded.dropped
        return
    assert decode_trained_spans(encoder, encoded) == expected


@pytest.mark.parametrize("name", ["bytes", "nfc", "metaspace"])
@pytest.mark.parametrize("template", BUILT_IN_TEMPLATES)
@MANY
@given(turns=rich_messages(GENTLE), tools=tool_lists(GENTLE))
def test_ids_are_those_of_apply_chat_template(encoders, hf_tokenizers, name, template, turns, tools):
    encoder = encoders[name, template]
    rules = ChatRecipe(prove=True, train_on="all")
    encoded = encode_conversations([Conversation(turns, tools)], encoder, rules)
    assert not encoded.faults
    template_text = choose_template(template, {}, dict.fromkeys(BUILT_IN_TEMPLATES[template], 0), "t").text
    expected = hf_tokenizers[name].apply_chat_template(
        turns, tools=tools, chat_template=template_text, return_dict=True
    )
    assert encoded.ids.tolist() == expected["input_ids"]


def render_without_tools(template, turns):
    """Return the text of turns without tools."""
    if template == "chatml":
        return "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in turns)
    if template == "llama3":
        head = "<|start_header_id|>{}<|end_header_id|>\n\n{}<|eot_id|>"
        return "<|begin_of_text|>" + "".join(head.format(turn["role"], turn["content"].strip()) for turn in turns)
    if template == "plain":
        ends = {"assistant": "<|endoftext|>\n"}
        return "".join(
            f"{turn['role'].capitalize()}:\n{turn['content'].strip()}{ends.get(turn['role'], chr(10) * 2)}"
            for turn in turns
        )
    forms = {
        "user": "### Instruction:\n{}\n\n",
        "assistant": "### Response:\n{}<|endoftext|>\n\n",
        "system": "{}\n\n",
    }
    start = (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    )
    text = "".join(forms[turn["role"]].format(turn["content"].strip()) for turn in turns)
    return text if turns[0]["role"] == "system" else start + text


@pytest.mark.parametrize("template", BUILT_IN_TEMPLATES)
@MANY
@given(turns=messages(CONTENTS))
def test_turns_without_tools_stay_as_they_were(encoders, template, turns):
    try:
        rendered = encoders["bytes", template].renderer.render(Conversation(turns))
    except RenderError as error:
        # Contents with private-use characters that spell a control token are refused.
        assume("spells a control token" not in str(error))
        raise
    assert rendered.text == render_without_tools(template, turns)


# The template that Qwen2.5-Instruct publishes (Apache-2.0).
QWEN25 = r"""{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- else %}
        {{- 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' }}
    {%- endif %}
    {{- "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools>\n\nFor each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call><|im_end|>\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\n' + message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\n<tool_call>\n{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' }}
        {{- message.content }}
        {{- '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
"""


def convert_for_qwen(turns):
    """Convert turns to the forms that Qwen's template reads."""
    converted = []
    for turn in turns:
        content, calls = turn["content"], turn.get("tool_calls", ())
        if not isinstance(content, str):
            content = "".join(part["text"] for part in content)
        converted.append({"role": turn["role"].replace("developer", "user"), "content": content})
        functions = [function["function"] for function in calls]
        if functions:
            converted[-1]["tool_calls"] = [
                {"function": {**function, "arguments": function["arguments"]}}
                if isinstance(function["arguments"], dict)
                else {"function": {**function, "arguments": {"text": function["arguments"]}}}
                for function in functions
            ]
    return [{"role": "system", "content": "Be brief."}, *converted]


@MANY
@given(turns=rich_messages(GENTLE), tools=tool_lists(GENTLE))
def test_chatml_writes_what_qwen_writes(encoders, hf_tokenizers, turns, tools):
    turns = convert_for_qwen(turns)
    text = encoders["bytes", "chatml"].renderer.render(Conversation(turns, tools)).text
    assert text == hf_tokenizers["bytes"].apply_chat_template(turns, tools=tools, chat_template=QWEN25, tokenize=False)


# Template that writes contents only. Its generation marks do not prove that an answer is complete.
SILENT = (
    "{% for m in messages %}{{ m.role + ': ' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content | default('') }}{{ eos_token }}{% endgeneration %}{% else %}"
    "{{ m.content }}{% endif %}{{ '\n' }}{% endfor %}"
)
STRICT = (
    "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length > 1 %}"
    "{{ raise_exception('single tool-calls only') }}{% endif %}"
    "{{ m.role }}:\n{{ m.content | default('') }}{{ m.tool_calls | default([]) | tojson }}{{ eos_token }}{% endfor %}"
)


@pytest.mark.parametrize("train_on", ["assistant", "all", "last"])
def test_a_template_that_drops_calls_is_refused(tokenizers, tmp_path, train_on):
    (tmp_path / "silent.jinja").write_text(SILENT)
    encoder = ChatEncoder(tokenizers["bytes"], str(tmp_path / "silent.jinja"))
    rules = ChatRecipe(prove=True, train_on=train_on)
    encoded = encode_conversations([Conversation(TURNS)], encoder, rules)
    (fault,) = encoded.faults
    assert fault.reason == (
        "template silent.jinja leaves out tool calls of turn 3: choose one that writes them, such as --template chatml"
    )


def test_a_template_that_refuses_calls_is_named_with_its_remedy(tokenizers, tmp_path):
    (tmp_path / "strict.jinja").write_text(STRICT)
    encoder = ChatEncoder(tokenizers["bytes"], str(tmp_path / "strict.jinja"))
    (fault,) = encode_conversations([Conversation(TURNS)], encoder, PROVED).faults
    assert "single tool-calls only); change the record, or choose another --template" in fault.reason


def test_left_out_tools_and_reasoning_are_reported_by_name(tokenizers, tmp_path):
    (tmp_path / "silent.jinja").write_text(SILENT)
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "c"},
    ]
    for encoder, altered in (
        (
            ChatEncoder(tokenizers["bytes"], str(tmp_path / "silent.jinja")),
            ["leaves out reasoning, also of the last answer", "leaves out the list of tools"],
        ),
        (ChatEncoder(tokenizers["bytes"], "plain"), ["leaves out reasoning, also of the last answer"]),
    ):
        encoded = encode_conversations([Conversation(turns, [TOOL])], encoder, PROVED)
        assert sorted(change.partition(" (")[0] for change in encoded.altered) == altered
        assert all(numbers == [0] for numbers in encoded.altered.values())


@pytest.mark.parametrize("template", BUILT_IN_TEMPLATES)
def test_a_call_that_json_cannot_hold_is_a_fault(encoders, template):
    turns = [*TURNS[:2], {"role": "assistant", "content": None, "tool_calls": [make_call({"x": float("nan")})]}]
    encoded = encode_conversations([Conversation(turns)], encoders["bytes", template], PROVED)
    assert "Out of range float values are not JSON compliant" in encoded.faults[0].reason
