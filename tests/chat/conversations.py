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
    turn = st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant"]), "content": contents}
    )
    first = st.fixed_dictionaries({"role": st.just("system"), "content": contents})
    turns = st.lists(turn, min_size=1, max_size=6)
    return st.tuples(st.lists(first, max_size=1) if system else st.just([]), turns).map(
        lambda pair: pair[0] + pair[1]
    )


def talk(*contents, system=None, **fields):
    """A conversation of a user and an assistant in turn."""
    roles = ("user", "assistant")
    turns = [{"role": roles[n % 2], "content": text} for n, text in enumerate(contents)]
    if system is not None:
        turns.insert(0, {"role": "system", "content": system})
    return Conversation(turns, **fields)
