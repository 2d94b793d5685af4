"""Conversations for tests, generated and hand-made."""

from hypothesis import strategies as st

from batchloom.core.conversation import Conversation

CHATML = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}\
{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}\
{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

LLAMA3 = """{{ bos_token }}{% for message in messages %}\
{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}\
{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] | trim }}{{ '<|eot_id|>' }}\
{% endgeneration %}{% else %}{{ message['content'] | trim + '<|eot_id|>' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

# As Qwen3's: reasoning of earlier turns is dropped, an empty thought is written before the last one.
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

PARTS = [
    "", " ", "\n", "\n\n", "a", "hello ", "The fox", "x\u0301", "e\u0301", "\u0301", "é", "日本", "😀",
    "<|im_end|>", "<|im_start|>", "<|im_start|>assistant\n", "<|im_end|>\n", "<|eot_id|>",
    "<|end_header_id|>\n\n", "assistant\n", "<|im_", "end|>", "<|", "|>", "<think>", "</think>",
    "\n</think>\n\n", "Assistant:\n", "### Response:\n", "\u0338", "\u00a0", "\t", "\r\n", "\u1e9b\u0323",
]  # fmt: skip

CONTENTS = st.lists(st.sampled_from(PARTS) | st.text(max_size=6), max_size=6).map("".join)
GENTLE = CONTENTS.filter(lambda text: "<|" not in text and "|>" not in text)


def messages(contents=CONTENTS, system=True):
    """Lists of turns: perhaps a system's, then users and assistants in any order."""
    turn = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": contents})
    first = st.fixed_dictionaries({"role": st.just("system"), "content": contents})
    turns = st.lists(turn, min_size=1, max_size=6)
    return st.tuples(st.lists(first, max_size=1) if system else st.just([]), turns).map(lambda pair: pair[0] + pair[1])


def talk(*contents, system=None, **fields):
    """A conversation of a user and an assistant in turn."""
    roles = ("user", "assistant")
    turns = [{"role": roles[n % 2], "content": text} for n, text in enumerate(contents)]
    if system is not None:
        turns.insert(0, {"role": "system", "content": system})
    return Conversation(turns, **fields)


# All that a message may hold, as the templates of today read it, with its generation marks.
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
    """What a tool is called with: an object of any values, or JSON text."""
    values = st.recursive(
        st.none() | st.booleans() | st.integers() | contents,
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=2),
        max_leaves=4,
    )
    return st.dictionaries(NAMES, values, max_size=2) | contents


def rich_messages(contents):
    """Turns of every role with typed parts, tool calls, reasoning and names; any number of system turns."""
    parts = st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": contents}), min_size=1, max_size=3)
    said = contents | parts
    call = st.fixed_dictionaries(
        {
            "type": st.just("function"),
            "function": st.fixed_dictionaries({"name": NAMES, "arguments": arguments(contents)}),
        }
    )
    others = st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "developer", "user", "user", "tool"]), "content": said},
        optional={"name": NAMES},
    )
    answers = st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": said},
        optional={
            "reasoning_content": contents,
            "tool_calls": st.lists(call, min_size=1, max_size=2),
        },
    )
    return st.lists(others | answers, min_size=1, max_size=5)


def tools_of(contents):
    """Tools as OpenAI describes them."""
    described = st.fixed_dictionaries(
        {"name": NAMES, "description": contents, "parameters": st.just({"type": "object"})}
    )
    tool = st.fixed_dictionaries({"type": st.just("function"), "function": described})
    return st.none() | st.lists(tool, min_size=1, max_size=2)
