"""Trained turns under templates of unusual makes: exact, or refused with the reason."""

import pytest

from batchloom.preparation import ChatEncoder
from chat.trained_texts import list_trained_texts

CHATML = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CALLS = "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
NEXT_END = "{% for m in messages %}{% if not loop.first %}<|im_end|>\n{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}<|im_end|>\n"
CHANNEL = (
    "{% set fo = COND %}{% for m in messages %}<|start|>{{ m.role }}{% if m.role=='assistant' %}<|channel|>final"
    "{% endif %}<|message|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant"
    "{% if fo %}<|channel|>final<|message|>{% endif %}{% endif %}"
)


def say(role, content, **keys):
    return {"role": role, "content": content, **keys}


TWO = [say("user", "Hi"), say("assistant", "Hello."), say("user", "More?"), say("assistant", "Yes.")]
CALL = say(
    "assistant", "", tool_calls=[{"type": "function", "id": "abcdefghi", "function": {"name": "f", "arguments": {}}}]
)
ENDED = ["Hello.</s>", "Yes.</s>"]
CALL_TEXT = '<tool_call>{"name": "f", "arguments": {}}</tool_call><|im_end|>'

# Template, messages, and the trained texts; or a part of the reason for which the record is refused.
CASES = {
    "blank lines behind a prompt in the loop": (
        ("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>\n{% if loop.last and add_generation_prompt %}"
        "<|assistant|>{% endif %}{% endfor %}\n\n\n"),
        TWO,
        ENDED,
    ),
    "blank lines without a prompt": (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>\n{% endfor %}\n\n\n",
        TWO,
        ENDED,
    ),
    "an end behind the loop": (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}</s>",
        TWO,
        ENDED,
    ),
    "a stop of the next message": (NEXT_END, TWO, ["Hello.<|im_end|>", "Yes.<|im_end|>"]),
    "a stop of the next message, and a prompt": (NEXT_END + PROMPT, TWO, ["Hello.<|im_end|>", "Yes.<|im_end|>"]),
    "one answer whose stop is behind the loop": (NEXT_END + PROMPT, TWO[:2], ["Hello.<|im_end|>"]),
    "a separator before later answers": (
        ("{% for m in messages %}{% if m.role=='user' %}<|user|>{{ m.content }}{% else %}{{ '\\n' if loop.index > 2 }}"
        "<|assistant|>{{ m.content }}</s>{% endif %}{% if loop.last and add_generation_prompt %}<|assistant|>{% endif %}"
        "{% endfor %}"),
        TWO,
        ENDED,
    ),
    "numbered headers": (
        ("{% for m in messages %}<|{{ m.role }}|>{{ loop.index }}\n{{ m.content }}</s>\n{% if loop.last and "
        "add_generation_prompt %}<|assistant|>{{ loop.index + 1 }}\n{% endif %}{% endfor %}"),
        TWO,
        ENDED,
    ),
    "different headers without a prompt": (
        ("{% for m in messages %}{% if m.role == 'user' %}Human: {{ m.content }}{% else %}"
        "{{ '\\n' if loop.last else '\\n\\n' }}AI:\n{{ m.content }}</s>{% endif %}{% endfor %}"),
        TWO,
        ENDED,
    ),
    "BOS before a first answer": (
        ("{% for m in messages %}{% if loop.first %}{{ bos_token }}{% endif %}{% if m.role=='user' %}[INST] "
        "{{ m.content }} [/INST]{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"),
        [say("assistant", "Greetings."), *TWO],
        [" Greetings.</s>", " Hello.</s>", " Yes.</s>"],
    ),
    "a default text before a first answer": (
        ("{% for m in messages %}{% if loop.first and m.role != 'system' %}You are helpful.\n\n{% endif %}"
        "{% if m.role=='user' %}[INST] {{ m.content }} [/INST]{% elif m.role=='system' %}{{ m.content }}{% else %} "
        "{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"),
        [say("assistant", "Greetings."), *TWO],
        [" Greetings.</s>", " Hello.</s>", " Yes.</s>"],
    ),
    "another turn behind a call": (
        ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% if m.tool_calls %}CALLS<|im_end|>\n"
        "<|im_start|>system\nRun it.{% endif %}<|im_end|>\n{% endfor %}PROMPT"),
        [say("user", "Hi"), CALL, say("tool", "7"), say("assistant", "Cold.")],
        "text behind the stop token of turn 2",
    ),
    "a repeated answer behind its stop": (
        "{% for m in messages %}" + CHATML + "{% if m.role == 'assistant' %}<|im_start|>summary\n{{ m.content }}"
        "<|im_end|>\n{% endif %}{% endfor %}PROMPT",
        TWO,
        "text behind the stop token of turn 2",
    ),
    "a blank result before its answer": (
        ("{% set ns=namespace(p='') %}{% for m in messages %}{% if m.role=='tool' %}{% set ns.p=ns.p ~ '[TOOL_RESULTS]' "
        "~ m.content ~ '[/TOOL_RESULTS]' %}{% elif m.role=='user' %}[INST]{{ m.content }}[/INST]{% else %}{{ ns.p }}"
        "{% set ns.p='' %}{{ m.content }}{% for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function|tojson }}"
        "{% endfor %}</s>{% endif %}{% endfor %}"),
        [say("user", "Hi"), CALL, say("tool", ""), say("assistant", "Cold.")],
        "inside turn 4",
    ),
    "a blank user in the round of an answer": (
        ("{% for m in messages %}{% if m.role=='assistant' %}<|im_start|>assistant\n{{ m.content }}<|im_end|>\n"
        "{% if loop.nextitem %}<|im_start|>user\n{{ loop.nextitem.content }}<|im_end|>\n{% endif %}{% elif loop.first %}"
        "<|im_start|>user\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}PROMPT"),
        [say("user", "a"), say("assistant", "b"), say("user", ""), say("assistant", "c")],
        ["b<|im_end|>", "c<|im_end|>"],
    ),
    "a prompt that a system message changes": (
        CHANNEL.replace("COND", "messages[0].role != 'system'"),
        [say("system", "Be brief"), *TWO],
        [f"<|channel|>final<|message|>{answer}<|end|>" for answer in ("Hello.", "Yes.")],
    ),
    "a prompt that a word changes": (
        CHANNEL.replace("COND", "'Reasoning: high' in messages[0].content"),
        [say("system", "Reasoning: high"), *TWO],
        ["Hello.<|end|>", "Yes.<|end|>"],
    ),
    "a prompt that a word leaves out": (
        CHANNEL.replace("COND", "'Reasoning: high' not in messages[0].content"),
        [say("system", "Reasoning: high"), *TWO],
        [f"<|channel|>final<|message|>{answer}<|end|>" for answer in ("Hello.", "Yes.")],
    ),
    "a prompt behind an empty thought": (
        ("{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role=='assistant' %}<think>\n\n</think>\n\nAnswer: "
        "{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>"
        "\n\n</think>\n\nAnswer: {% endif %}"),
        TWO,
        ["Hello.<|im_end|>", "Yes.<|im_end|>"],
    ),
    "a token that closes an answer before its stop": (
        ("{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role=='assistant' %}<|start|>{{ m.content }}<|end|>\n"
        "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}PROMPT"),
        TWO,
        ["<|start|>Hello.<|end|>\n<|im_end|>", "<|start|>Yes.<|end|>\n<|im_end|>"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_template_is_right_or_refused(published_tokenizer, tmp_path, case):
    template, messages, expected = CASES[case]
    (tmp_path / "t.jinja").write_text(template.replace("CALLS", CALLS).replace("PROMPT", PROMPT))
    encoder = ChatEncoder(published_tokenizer, str(tmp_path / "t.jinja"))
    # A conversation that is seen before decides nothing.
    *_, trained = list_trained_texts(encoder, [(TWO, None), (messages, None)])
    assert expected in trained if isinstance(expected, str) else trained == expected


MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% if m.reasoning_content %}"
    "{% generation %}<think>{{ m.reasoning_content }}</think>{% endgeneration %}\n\n{% endif %}{% if m.content %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}<|im_end|>{% endif %}\n{% else %}"
    "{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
)


def test_generation_marks_belong_to_the_turn_around_them(published_tokenizer, tmp_path):
    """Two marks in one answer, and none in the other."""
    from batchloom.core.document import Conversation
    from batchloom.preparation import ChatRecipe, encode_conversations

    (tmp_path / "t.jinja").write_text(MARKED + PROMPT)
    encoder = ChatEncoder(published_tokenizer, str(tmp_path / "t.jinja"))
    turns = [
        say("user", "a"),
        say("assistant", "Hello.", reasoning_content="hm"),
        say("user", "b"),
        say("assistant", ""),
    ]
    last = encode_conversations([Conversation(turns)], encoder, ChatRecipe(train_on="last"))
    assert [fault.rule for fault in last.dropped] == ["nothing to train"]
    flagged = encode_conversations([Conversation(turns, trained=[None, False, None, True])], encoder, ChatRecipe())
    assert [fault.rule for fault in flagged.dropped] == ["nothing to train"]
