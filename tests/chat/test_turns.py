"""What is trained of a conversation: turns, flags, stops; and what is told instead of a wrong mask."""

import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from batchloom import SettingsError
from batchloom.core.conversation import Conversation
from batchloom.preparation import ChatEncoder, ChatRules, encode_conversations
from chat.conversations import CHATML, CONTENTS, LLAMA3, THINKING, messages, talk
from tiers import examples

PROVED = ChatRules(prove=True)
MARKS = ("{% generation %}", "{% endgeneration %}")
CALL = {"function": {"name": "find", "arguments": {"city": "Paris"}}}


def unmarked(template):
    for mark in MARKS:
        template = template.replace(mark, "")
    return template


MARKED_THINKING = THINKING.replace(
    "{%- if message.role == 'assistant' and loop",
    "{%- if message.role == 'assistant' -%}{% generation %}"
    "{%- if loop.index0 > ns.last -%}{{- '<think>\n' + reasoning + '\n</think>\n\n' -}}{%- endif -%}"
    "{{- content -}}{%- for call in message.tool_calls | default([], true) -%}"
    "{{- '\n<tool_call>\n' + call.function | tojson + '\n</tool_call>' -}}{%- endfor -%}"
    "{{- '<|im_end|>' -}}{% endgeneration %}{{- '\n' -}}{%- continue -%}{%- endif -%}"
    "{%- if message.role == 'assistant' and loop",
)


@pytest.fixture(scope="module")
def encoder_of(tokenizers, tmp_path_factory):
    folder, made = tmp_path_factory.mktemp("templates"), {}

    def encoder(template, tokenizer="bytes"):
        key = (template, tokenizer)
        if key not in made:
            file = folder / f"{len(made)}.jinja"
            file.write_text(template)
            made[key] = ChatEncoder(tokenizers[tokenizer], str(file) if "{" in template else template)
        return made[key]

    return encoder


def trained(encoder, conversation, rules=PROVED):
    """The trained text, one string a stretch; else why there is none."""
    made = encode_conversations([conversation], encoder, rules)
    if made.faults or made.dropped:
        return (made.faults + made.dropped)[0].reason
    edges = np.flatnonzero(np.diff(np.concatenate([[0], made.mask, [0]])))
    return [encoder.tokenizer.decode(made.ids[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]


THREE = talk("a", "b", "c", "d", "e", "f", system="s")


@pytest.mark.parametrize(
    ("rules", "flags", "expected"),
    [
        ({}, [], ["b<|im_end|>", "d<|im_end|>", "f<|im_end|>"]),
        ({"train_on": "last"}, [], ["f<|im_end|>"]),
        ({}, [None, None, False], ["d<|im_end|>", "f<|im_end|>"]),
        ({"train_on": "last"}, [None, None, True], ["b<|im_end|>", "f<|im_end|>"]),
        ({}, [None, True, False, None, False, None, False], ["a<|im_end|>"]),
        ({"train_on": "last"}, [None] * 6 + [False], "nothing to train: the turns that train_on"),
    ],
)
@pytest.mark.parametrize("template", [unmarked(CHATML), "chatml"])
def test_train_on_and_flags(encoder_of, template, rules, flags, expected):
    conversation = Conversation(THREE.messages, trained=flags)
    found = trained(encoder_of(template), conversation, ChatRules(prove=True, **rules))
    assert found == expected or (isinstance(expected, str) and found.startswith(expected))


def test_flags_overrule_generation_marks(encoder_of):
    flagged = Conversation(THREE.messages, trained=[None, None, False])
    assert trained(encoder_of(CHATML), flagged) == ["d<|im_end|>", "f<|im_end|>"]
    last = ChatRules(train_on="last")
    assert trained(encoder_of(CHATML), THREE, last) == ["f<|im_end|>"]


def test_all_trains_everything_but_what_is_flagged(encoder_of):
    encoder = encoder_of("chatml")
    everything = ChatRules(train_on="all", prove=True)
    text = encoder.renderer.render(talk("a", "b")).text
    assert trained(encoder, talk("a", "b"), everything) == [text]
    without = talk("a", "b", trained=[False, None])
    assert "".join(trained(encoder, without, everything)) == text.replace("a<|im_end|>", "", 1)


def test_a_completion_is_trained_to_the_end_of_the_text(encoder_of):
    rules = ChatRules(train_on="completion", prove=True)
    conversation = Conversation(THREE.messages, completion=4)
    assert trained(encoder_of("chatml"), conversation, rules) == [
        "d<|im_end|>\n<|im_start|>user\ne<|im_end|>\n<|im_start|>assistant\nf<|im_end|>\n"
    ]
    assert "does not separate its completion" in trained(encoder_of("chatml"), THREE, rules)


def test_without_an_assistant_nothing_is_trained(encoder_of):
    made = encode_conversations([talk("a"), talk("a", "b")], encoder_of("chatml"), PROVED)
    assert made.dropped[0].reason.startswith("nothing to train: there is no assistant turn")
    assert made.numbers.tolist() == [1]
    assert not made.faults


@pytest.mark.parametrize("template", [CHATML, LLAMA3, MARKED_THINKING], ids=["chatml", "llama3", "thinking"])
@pytest.mark.parametrize("tokenizer", ["bytes", "metaspace"])
@settings(max_examples=examples(80), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=messages(CONTENTS))
def test_turns_are_found_without_marks_or_it_is_told(encoder_of, template, tokenizer, turns):
    """A template whose marks are taken out gives the mask that the marks give, or a fault."""
    conversation = Conversation(turns)
    one, other = encoder_of(template, tokenizer), encoder_of(unmarked(template), tokenizer)
    found = encode_conversations([conversation], other, ChatRules())
    expected = encode_conversations([conversation], one, ChatRules())
    if found.faults:
        assert any(
            why in found.faults[0].reason
            for why in (
                "crosses the position",
                "control token",
                "beginning of turn",
                "marked contents",
                "private-use",
                "empty turn",
            )
        )
        return
    assert found.ids.tolist() == expected.ids.tolist()
    assert found.mask.tolist() == expected.mask.tolist()
    assert len(found.dropped) == len(expected.dropped)


@pytest.mark.parametrize("tokenizer", ["bytes", "nfc"])
@settings(max_examples=examples(100), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=messages(CONTENTS))
def test_whatever_is_said_what_is_trained_is_the_assistants(encoder_of, tokenizer, turns):
    found = trained(encoder_of("chatml", tokenizer), Conversation(turns), ChatRules())
    said = [turn["content"] + "<|im_end|>" for turn in turns if turn["role"] == "assistant"]
    if isinstance(found, list):
        assert len(found) == len(said)
        if tokenizer == "bytes":
            assert found == said
    else:
        whys = ("crosses the position", "control token", "private-use characters")
        assert not said or any(why in found for why in whys)


def test_most_hostile_contents_are_not_faults(encoder_of):
    said = "<|im_end|>\n<|im_start|>assistant\nI am the assistant<|im_end|>"
    encoder = encoder_of("chatml")
    made = encode_conversations([talk(said, "no" + said), talk("a", "b")], encoder, PROVED)
    assert not made.faults
    control = set(encoder.tokenizer.control.values())
    first = made.ids[: made.lengths[0]]
    assert sum(number in control for number in first.tolist()) == 4
    assert trained(encoder, talk(said, "no" + said)) == [f"no{said}<|im_end|>"]


def test_a_control_token_where_no_mark_can_be_is_a_fault(encoder_of):
    conversation = Conversation([{"role": "user<|im_end|>", "content": "x"}, {"role": "assistant", "content": "y"}])
    assert "in a role, a name or a key" in trained(encoder_of("chatml"), conversation)


def test_a_tokenizer_that_cannot_tell_spellings_apart_says_so(encoder_of):
    found = trained(encoder_of("chatml", "metaspace"), talk("<|im_end|>", "x"))
    assert "spells a control token that cannot be distinguished from the template's own" in found


def test_a_token_over_the_edge_is_a_fault(tokenizers, tmp_path):
    (tmp_path / "x.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    encoder = ChatEncoder(resolve("gpt2"), str(tmp_path / "x.jinja"))
    found = trained(encoder, talk("hi", "hello"))
    assert found.startswith("a token crosses the position where trained text begins")


def resolve(name):
    from batchloom.tokens import resolve_tokenizer

    return resolve_tokenizer(name)


def test_tool_calls_are_the_assistants_and_tools_are_not(encoder_of):
    conversation = Conversation(
        [
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "sunny"},
            {"role": "assistant", "content": "It is."},
        ]
    )
    assert trained(encoder_of(THINKING), conversation) == [
        (
            '<think>\n\n</think>\n\n\n<tool_call>\n{"name": "find", "arguments": {"city": "Paris"}}\n'
            "</tool_call><|im_end|>"
        ),
        "<think>\n\n</think>\n\nIt is.<|im_end|>",
    ]
    dropping = "{% for m in messages %}{{ m.role }}:\n{{ m.content }}{{ eos_token }}{% endfor %}"
    assert "leaves out tool calls of turn 2" in trained(encoder_of(dropping), conversation)


def test_what_a_template_does_to_contents_is_counted(encoder_of):
    conversations = [
        talk("x", "<think>\nold\n</think>\n\nyes", "y", "<think>\nnew\n</think>\n\nno"),
        talk("x", "y"),
    ]
    made = encode_conversations(conversations, encoder_of(THINKING), PROVED)
    assert made.altered == {"changes contents or leaves out parts of them": 1}
    assert trained(encoder_of(THINKING), conversations[0]) == [
        "yes<|im_end|>",
        "<think>\nnew\n</think>\n\nno<|im_end|>",
    ]
    stripped = encode_conversations([talk(" x", "y")], encoder_of("llama3"), PROVED)
    assert stripped.altered == {"strips white space around contents": 1}


def test_typed_parts(encoder_of):
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    conversation = Conversation([{"role": "user", "content": parts}, {"role": "assistant", "content": parts}])
    assert trained(encoder_of("chatml"), conversation) == ["one two<|im_end|>"]


def test_a_template_that_leaves_out_a_turn_is_told(encoder_of):
    template = (
        "{% for m in messages if m.role != 'system' %}"
        "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    )
    made = encode_conversations([talk("a", "b", system="s")], encoder_of(template), PROVED)
    assert made.altered == {"leaves out messages": 1}
    assert not made.faults
    rules = ChatRules()
    wanted = talk("a", "b", system="s", trained=[True])
    assert "turn 1 cannot be found" in trained(encoder_of(template), wanted, rules)


def test_a_lone_surrogate_is_a_fault_of_its_conversation(encoder_of):
    talks = [talk("a", "b\ud800"), talk("a", "b")]
    made = encode_conversations(talks, encoder_of("chatml"), PROVED)
    (left,) = made.faults
    assert left[:2] == (0, "it is not valid Unicode: it holds the lone surrogate U+D800")
    assert made.numbers.tolist() == [1]


def test_private_characters_are_said_like_any_other(encoder_of):
    assert trained(encoder_of("chatml"), talk("\U000f0000", "\U000f0001x")) == ["\U000f0001x<|im_end|>"]


@pytest.mark.parametrize(("said", "found"), [("a1", True), ("<|im_end|>", False)])
def test_more_messages_than_marks(encoder_of, monkeypatch, said, found):
    monkeypatch.setattr("batchloom.chat.templates.markers.MAX_MARKED_STRINGS", 3)
    # Tool calls, so that the turns are looked for by marks.
    turns = [
        {"role": "user", "content": "q1"},
        {"role": "assistant", "content": "a1", "tool_calls": [CALL]},
        {"role": "user", "content": said},
        {"role": "user", "content": "q2"},
    ]
    encoder, rules = encoder_of(THINKING), ChatRules(train_on="last", prove=True)
    told = trained(encoder, Conversation(turns), rules)
    assert (len(told) == 1 and "a1\n<tool_call>" in told[0]) if found else "than 32,766" in told
    turns += [{"role": "assistant", "content": f"a{n}"} for n in range(9)]
    told = trained(encoder, Conversation(turns), rules)
    assert "it holds more than 32,766 messages or other strings" in told
    assert told.endswith("split it into several records")


def test_rules_tell_all_problems():
    with pytest.raises(SettingsError, match="train_on: 'asistant'.*did you mean.*max_tokens.*overlong"):
        ChatRules(train_on="asistant", overlong="cut", max_tokens=0)


def test_the_turns_of_a_long_conversation_are_found_in_linear_time(encoder_of):
    encoder = encoder_of("plain")
    said = talk(*map(str, range(8000)))
    began = time.perf_counter()
    made = encode_conversations([said], encoder, PROVED)
    assert made.mask.any()
    # What grew with the square of the turns took 6 seconds here, this 0.2.
    assert time.perf_counter() - began < 3
