"""Templates and conversations for tests, generated and hand-made."""

from hypothesis import strategies as st

from batchloom.core.document import Conversation

CHATML = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}\
{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}\
{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

LLAMA3 = """{{ bos_token }}{% for message in messages %}\
{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}\
{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] | trim }}{{ '<|eot_id|>' }}\
{% endgeneration %}{% else %}{{ message['content'] | trim + '<|eot_id|>' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

# Like Qwen3's template: it drops the reasoning of earlier turns and writes an empty thought before the last answer.
THINKING = r"""{%- set ns = namespace(last=-1) -%}
{%- for message in messages -%}{%- if message.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for message in messages -%}
{%- set content = message.content | default('', true) -%}
{%- set reasoning = message.reasoning_content | default('', true) -%}
{%- if not reasoning and '</think>' in content -%}
{%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\n') -%}
{%- endif -%}
{{- '<|im_start|>' + message.role + '\n' -}}
{%- if message.role == 'assistant' and loop.index0 > ns.last -%}
{{- '<think>\n' + reasoning + '\n</think>\n\n' -}}
{%- endif -%}
{{- content -}}
{%- for call in message.tool_calls | default([], true) -%}
{{- '\n<tool_call>\n' + call.function | tojson + '\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""

# Like Qwen3's: the argument adds an empty thought to the generation prompt.
NO_THOUGHT = "{%- if enable_thinking is defined and enable_thinking is false -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}"
GENERATION = "{{- '<|im_start|>assistant\\n' -}}"
SWITCHED = THINKING.replace(GENERATION, GENERATION + NO_THOUGHT)

PARTS = [
    "", " ", "\n", "\n\n", "a", "hello ", "The fox", "x\u0301", "e\u0301", "\u0301", "é", "日本", "😀",
    "<|im_end|>", "<|im_start|>", "<|im_start|>assistant\n", "<|im_end|>\n", "<|eot_id|>",
    "<|end_header_id|>\n\n", "assistant\n", "<|im_", "end|>", "<|", "|>", "<think>", "</think>",
    "\n</think>\n\n", "Assistant:\n", "### Response:\n", "\u0338", "\u00a0", "\t", "\r\n", "\u1e9b\u0323",
]  # fmt: skip

CONTENTS = st.lists(st.sampled_from(PARTS) | st.text(max_size=6), max_size=6).map("".join)
GENTLE = CONTENTS.filter(lambda text: "<|" not in text and "|>" not in text)


def messages(contents=CONTENTS, system=True):
    """Generate user and assistant turns in any order after an optional system turn."""
    turn = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": contents})
    system_turn = st.fixed_dictionaries({"role": st.just("system"), "content": contents})
    turns = st.lists(turn, min_size=1, max_size=6)
    return st.tuples(st.lists(system_turn, max_size=1) if system else st.just([]), turns).map(
        lambda pair: pair[0] + pair[1]
    )


def make_conversation(*contents, system=None, **fields):
    """Make a conversation of alternating user and assistant turns."""
    roles = ("user", "assistant")
    turns = [{"role": roles[n % 2], "content": content} for n, content in enumerate(contents)]
    if system is not None:
        turns.insert(0, {"role": "system", "content": system})
    return Conversation(turns, **fields)


# Template with generation marks that reads every field of a message.
RICH = r"""{%- macro said(content) -%}
{%- if content is string -%}{{- content -}}
{%- else -%}{%- for part in content or [] -%}{{- part.text -}}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- if tools -%}{{- '<|im_start|>system\n# Tools\n' -}}
{%- for tool in tools -%}{{- tool | tojson + '\n' -}}{%- endfor -%}{{- '<|im_end|>\n' -}}{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + ('(' + message.name + ')' if message.name else '') + '\n' -}}
{%- if message.role == 'assistant' -%}{% generation %}
{%- if message.reasoning_content -%}{{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' -}}{%- endif -%}
{{- said(message.content) -}}
{%- for call in message.tool_calls or [] -%}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' -}}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson -}}
{{- '}\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>' -}}{% endgeneration %}{{- '\n' -}}
{%- else -%}{{- said(message.content) + '<|im_end|>\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""

NAMES = st.from_regex(r"[a-z]{1,6}", fullmatch=True)


def arguments(contents):
    """Generate arguments of a tool call: an object of any values, or JSON text."""
    values = st.recursive(
        st.none() | st.booleans() | st.integers() | contents,
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=2),
        max_leaves=4,
    )
    return st.dictionaries(NAMES, values, max_size=2) | contents


def rich_messages(contents):
    """Generate turns of every role with parts, tool calls, reasoning and names."""
    parts = st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": contents}), min_size=1, max_size=3)
    content = contents | parts
    call = st.fixed_dictionaries(
        {
            "type": st.just("function"),
            "function": st.fixed_dictionaries({"name": NAMES, "arguments": arguments(contents)}),
        }
    )
    other_turns = st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "developer", "user", "user", "tool"]), "content": content},
        optional={"name": NAMES},
    )
    assistant_turns = st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": content},
        optional={
            "reasoning_content": contents,
            "tool_calls": st.lists(call, min_size=1, max_size=2),
        },
    )
    return st.lists(other_turns | assistant_turns, min_size=1, max_size=5)


def tool_lists(contents):
    """Generate optional lists of tools in OpenAI's format."""
    function = st.fixed_dictionaries(
        {"name": NAMES, "description": contents, "parameters": st.just({"type": "object"})}
    )
    tool = st.fixed_dictionaries({"type": st.just("function"), "function": function})
    return st.none() | st.lists(tool, min_size=1, max_size=2)
