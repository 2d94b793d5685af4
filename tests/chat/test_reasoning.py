"""Policies for the reasoning of answers under the templates of TRL."""

import itertools

import numpy as np
import pytest

from batchloom import SettingsError
from batchloom.chat.templates import split_answers
from batchloom.core.document import ContentRange, Conversation, PreferencePair, TurnWeight
from batchloom.core.medium import Medium
from batchloom.preparation import ChatEncoder, ChatRecipe, encode_conversations, encode_preference_pairs
from chat.template_cases import CASES, MARKED, TEMPLATES, remove_marks
from chat.trained_texts import list_trained_texts

KEYED, _ = CASES["thought in every turn"]
TAGGED = [
    {"role": turn["role"], "content": f"<think>\n{turn['reasoning_content']}\n</think>\n\n{turn['content']}"}
    if "reasoning_content" in turn
    else turn
    for turn in KEYED
]
CALLING, TOOLS = CASES["thought before a call"]
PLAIN = [{key: value for key, value in turn.items() if key != "reasoning_content"} for turn in KEYED]
THOUGHTS = "Two and two.", "Three and three."
FAST = ("gptoss_training", "qwen3_training")


def list_samples(encoder, messages, tools=None, **settings):
    """Return the complete and the trained text of each document of a conversation."""
    encoded = encode_conversations([Conversation(messages, tools)], encoder, ChatRecipe(prove=True, **settings))
    assert not encoded.faults
    bounds = np.concatenate([[0], np.cumsum(encoded.lengths, dtype=np.int64)])
    decode = encoder.tokenizer.decode
    return [
        (decode(encoded.ids[start:stop]), decode(encoded.ids[start:stop][encoded.flags.trained[start:stop]]))
        for start, stop in itertools.pairwise(bounds)
    ]


def remove_tags(text):
    return "".join(text.replace("<think>", "").replace("</think>", "").split())


def holds_thoughts(text):
    return [thought in text for thought in THOUGHTS]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in FAST)) for n in MARKED])
@pytest.mark.parametrize("messages", [KEYED, TAGGED], ids=["keyed", "tagged"])
def test_each_policy_under_each_template(make_published_encoder, name, messages):
    encoder = make_published_encoder(name)
    [(kept, kept_trained)] = list_samples(encoder, messages)
    [(masked, masked_trained)] = list_samples(encoder, messages, reasoning="mask")
    [(dropped, dropped_trained)] = list_samples(encoder, messages, reasoning="drop")
    assert masked == kept
    assert holds_thoughts(masked_trained) == holds_thoughts(dropped) == [False, False]
    assert (dropped, dropped_trained) == list_samples(encoder, PLAIN)[0]
    # What is trained is that of the conversation without thoughts; templates may write empty ones in it.
    assert remove_tags(masked_trained) == remove_tags(dropped_trained)
    samples = list_samples(encoder, messages, reasoning="split")
    assert len(samples) == 2
    for number, (text, trained) in enumerate(samples):
        # Each thought is trained if the template writes that of the last answer.
        assert holds_thoughts(trained)[number] == holds_thoughts(kept_trained)[1]
        assert not holds_thoughts(trained)[1 - number]
        assert ("Four." in trained, "Six." in trained) == (number == 0, number == 1)
        assert text.startswith(samples[0][0].partition("Four.")[0][:10])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen3_training", ["Cold.<|im_end|>"]),
        ("gptoss_training", ["<|channel|>final<|message|>Cold.<|return|>"]),
    ],
)
def test_calls_are_trained_without_the_thought_before_them(make_published_encoder, name, expected):
    [[call, *answer]] = list_trained_texts(make_published_encoder(name), [(CALLING, TOOLS)], reasoning="mask")
    assert answer == expected
    assert '"city": "Oslo"' in call
    assert "Look it up" not in call
    [dropped] = list_trained_texts(make_published_encoder(name), [(CALLING, TOOLS)], reasoning="drop")
    assert call in dropped[0]


def test_a_template_that_leaves_thoughts_out_is_announced_with_the_remedy(make_published_encoder):
    encoder = make_published_encoder("qwen3")
    conversations = [Conversation(messages) for messages in (PLAIN, KEYED, TAGGED)]
    encoded = encode_conversations(conversations, encoder, ChatRecipe(prove=True))
    [(change, numbers)] = encoded.altered.items()
    assert "of earlier answers (--reasoning split" in change
    assert numbers == [1, 2]
    split = encode_conversations([Conversation(KEYED)], encoder, ChatRecipe(prove=True, reasoning="split"))
    assert split.numbers.tolist() == [0, 0]
    assert not split.altered
    silent = encode_conversations([Conversation(KEYED)], make_published_encoder("gemma"), ChatRecipe(reasoning="split"))
    [change] = silent.altered
    assert "also of the last answer (choose another --template" in change
    asked = encode_conversations([Conversation([*KEYED, KEYED[0]])], encoder, ChatRecipe())
    assert list(asked.altered) == list(encoded.altered)


def list_split(encoder, trained=(), completion=None, **settings):
    """Return the trained answers of each sample of a conversation of two."""
    conversation = Conversation(KEYED, trained=list(trained), completion=completion)
    encoded = encode_conversations([conversation], encoder, ChatRecipe(prove=True, reasoning="split", **settings))
    bounds = np.concatenate([[0], np.cumsum(encoded.lengths, dtype=np.int64)])
    texts = [
        encoder.tokenizer.decode(encoded.ids[start:stop][encoded.flags.trained[start:stop] != 0])
        for start, stop in itertools.pairwise(bounds)
    ]
    return [[answer for answer in ("Four.", "Six.") if answer in text] for text in texts]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ["Four.", "Six."]),
        ({"train_on": "last"}, ["Six."]),
        ({"train_on": "last", "trained": [None, True, None, None]}, ["Four.", "Six."]),
        ({"train_on": "last", "trained": [None, None, None, False]}, []),
        ({"train_on": "flagged", "trained": [None, None, None, True]}, ["Six."]),
        ({"trained": [None, False, None, None]}, ["Six."]),
        ({"trained": [None, TurnWeight(trained=False), None, None]}, ["Six."]),
        ({"trained": [None, TurnWeight(None, 0.5), None, None]}, ["Four.", "Six."]),
        ({"trained": [False] * 4}, []),
        ({"train_on": "completion", "completion": 1}, ["Four.", "Six."]),
        ({"train_on": "completion", "completion": 3}, ["Six."]),
        ({"train_on": "assistant", "completion": 3}, ["Four.", "Six."]),
    ],
)
def test_split_trains_what_is_selected_once(make_published_encoder, settings, expected):
    assert list_split(make_published_encoder("qwen3"), **settings) == [[answer] for answer in expected]


def test_policies_that_contradict_other_settings_are_refused():
    with pytest.raises(SettingsError, match="reasoning: split makes samples of single answers"):
        ChatRecipe(reasoning="split", train_on="all")
    with pytest.raises(SettingsError, match="reasoning: split trains an answer once"):
        ChatRecipe(reasoning="split", train_on_eos="all")
    with pytest.raises(SettingsError, match="reasoning: mask needs the turns of a template"):
        ChatRecipe(reasoning="mask", template="none")


def test_split_cuts_the_media_with_the_turns():
    turns = [{"role": "user", "content": [{"type": "image"}]}, KEYED[1]] * 2
    media = [Medium("image", "a.png"), Medium("image", "b.png")]
    samples = split_answers(Conversation(turns, media=media), "assistant")
    assert [sample.media for sample in samples] == [media[:1], media]


@pytest.mark.parametrize("template", ["qwen3", "gptoss"])
def test_a_mask_counts_the_turns_that_a_tool_format_writes(
    make_published_encoder, published_tokenizer, tmp_path, template
):
    (tmp_path / "t.jinja").write_text(remove_marks(TEMPLATES[template]))
    encoder = ChatEncoder(published_tokenizer, str(tmp_path / "t.jinja"), tool_format="default")
    [trained] = list_trained_texts(encoder, [(CALLING, TOOLS)], reasoning="mask")
    assert "Look it up" not in "".join(trained)
    assert "Seven is cold" not in "".join(trained)
    assert "Oslo" in trained[0]


WITHOUT_EMPTY = (
    "{% for m in messages %}{{ m.role }}:{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>\n\n"
    "{% endif %}{{ m.content }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.mark.parametrize("name", ["gptoss", "muse_glimmer"])
def test_a_mask_holds_whole_tags(make_published_encoder, name):
    turns = [KEYED[0], {"role": "assistant", "content": "<think>Hm.</think>Four."}]
    [trained] = list_trained_texts(make_published_encoder(name), [(turns, None)], reasoning="mask")
    [plain] = list_trained_texts(make_published_encoder(name), [([KEYED[0], PLAIN[1]], None)])
    assert trained[-1].startswith("Four.")
    assert "".join(trained) == "".join(plain)


@pytest.mark.parametrize(
    "content",
    [
        "The tag </think> ends a thought.",
        "Hm.</think>Four.",
        "<think>\nA thought that was cut off",
        "<think>Hm.\n</think>\nHm again.\n</think>\n\nFour.",
        [{"type": "text", "text": "<think>Hm."}, {"type": "text", "text": "</think>Four."}],
    ],
)
@pytest.mark.parametrize("policy", ["mask", "drop"])
def test_a_thought_without_a_clear_end_is_refused(make_published_encoder, content, policy):
    turns = [KEYED[0], {"role": "assistant", "content": content}]
    [refusal] = list_trained_texts(make_published_encoder("qwen3"), [(turns, None)], reasoning=policy)
    assert "not clear where the thought of turn 2 ends" in refusal


# Thoughts that share characters with the answer or the tags around them.
@pytest.mark.parametrize(
    ("thought", "answer"),
    [
        ("Hm <b>x</b>", "Four."),
        ("Hm ends like.", "It ends like."),
        ("Four.", "Four."),
        ("a ->", "    x = 4\n    y"),
        ("b <i>", "a <b>x</b>"),
    ],
)
@pytest.mark.parametrize("name", ["glm4moe", "qwen3", "gptoss", "own", "behind"])
def test_a_mask_is_the_thought_whatever_its_characters_are(
    make_published_encoder, published_tokenizer, tmp_path, name, thought, answer
):
    if name in ("own", "behind"):
        template = WITHOUT_EMPTY
        if name == "behind":
            template = (
                "{% for m in messages %}{{ m.role }}:{{ m.content }}{% if m.reasoning_content %}\n<why>"
                "{{ m.reasoning_content }}</why>{% endif %}{{ eos_token }}{% endfor %}"
                "{% if add_generation_prompt %}assistant:{% endif %}"
            )
        (tmp_path / "t.jinja").write_text(template)
        encoder = ChatEncoder(published_tokenizer, str(tmp_path / "t.jinja"))
    else:
        encoder = make_published_encoder(name)
    turns = [KEYED[0], {"role": "assistant", "content": answer, "reasoning_content": thought}]
    [trained] = list_trained_texts(encoder, [(turns, None)], reasoning="mask")
    assert thought not in "".join(trained).replace(answer.strip(), "", 1)
    assert answer.strip() in "".join(trained)


@pytest.mark.parametrize("content", ["<reasoning>short</reasoning><answer>4</answer>", "[thinking] ok", "Hm. Four."])
def test_a_mask_ends_with_the_thought(published_tokenizer, tmp_path, content):
    (tmp_path / "t.jinja").write_text(WITHOUT_EMPTY)
    encoder = ChatEncoder(published_tokenizer, str(tmp_path / "t.jinja"))
    turns = [KEYED[0], {"role": "assistant", "content": content, "reasoning_content": "Hm."}]
    assert list_trained_texts(encoder, [(turns, None)], reasoning="mask") == [[f"{content}</s>"]]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"content": "Use </think>\nhere.", "reasoning_content": "Hm."}, "Use </think>\nhere."),
        ({"content": "Hm.\n</think>\n\nFour."}, "Four."),
        ({"content": "<think>Hm.</think>Four."}, "Four."),
        ({"content": "<think>Hm.</think> Four.", "reasoning_content": "Hm."}, "Four."),
        ({"content": "<think>Hm.</think>\n\n    x = 4\n    y"}, "    x = 4\n    y"),
        ({"content": [{"type": "text", "text": "<think>Hm.</think>Four."}]}, "Four."),
    ],
)
def test_only_a_thought_is_dropped(published_tokenizer, tmp_path, fields, expected):
    (tmp_path / "t.jinja").write_text(WITHOUT_EMPTY)
    encoder = ChatEncoder(published_tokenizer, str(tmp_path / "t.jinja"))
    turns = [KEYED[0], {"role": "assistant", **fields}]
    assert list_trained_texts(encoder, [(turns, None)], reasoning="drop") == [[f"{expected}</s>"]]


def test_a_fault_in_a_sample_leaves_the_record_out(make_published_encoder):
    """The second turn of the prefix is alone the fault, and the first would be a sample."""
    broken = [*KEYED[:2], *CALLING]
    encoded = encode_conversations(
        [Conversation(broken, TOOLS)], make_published_encoder("gemma"), ChatRecipe(reasoning="split")
    )
    assert [fault.number for fault in encoded.faults] == [0]
    assert encoded.lengths.size == 0


def test_what_cannot_be_dropped_is_refused(make_published_encoder):
    encoder, chat = make_published_encoder("qwen3"), ChatRecipe(reasoning="drop")
    alone = Conversation([KEYED[0], {"role": "assistant", "content": "", "reasoning_content": "Hm."}])
    blank = Conversation([KEYED[0], {"role": "assistant", "content": [{"type": "text", "text": "<think>a</think>"}]}])
    ranged = [None, TurnWeight(None, 1.0, (ContentRange(0, 3, 1.0),))]
    conversations = [alone, Conversation(TAGGED[:2], trained=ranged), blank, Conversation(KEYED[:2], trained=ranged)]
    encoded = encode_conversations(conversations, encoder, chat)
    assert [fault.number for fault in encoded.faults] == [0, 1, 2]
    assert "turn 2 is reasoning alone" in encoded.faults[2].reason
    assert "turn 2 is reasoning alone" in encoded.faults[0].reason
    assert "count the characters of its reasoning" in encoded.faults[1].reason


@pytest.mark.parametrize("text", ["<thinking>Hm.</thinking>Four.", "[THINK]Hm.[/THINK] Four."])
@pytest.mark.parametrize("policy", ["mask", "drop"])
def test_thoughts_between_other_tags_are_refused(make_published_encoder, text, policy):
    answer = {"role": "assistant", "content": text}
    conversations = [Conversation([KEYED[0], answer])]
    encoded = encode_conversations(conversations, make_published_encoder("qwen3"), ChatRecipe(reasoning=policy))
    assert "which are not read as reasoning" in encoded.faults[0].reason
    kept = encode_conversations(conversations, make_published_encoder("qwen3"), ChatRecipe())
    assert not kept.faults


def test_preferences_take_the_policy(make_published_encoder):
    answers = [{**KEYED[1], "content": content} for content in ("Four.", "Five.")]
    pair = PreferencePair(*(Conversation([KEYED[0], answer], completion=1) for answer in answers))
    encoder = make_published_encoder("qwen3")
    encoded = encode_preference_pairs(
        [pair], encoder, ChatRecipe(reasoning="drop", train_on="completion"), np.dtype(np.uint32)
    )
    text = encoder.tokenizer.decode(encoded.ids)
    assert "Four." in text
    assert "Five." in text
    assert THOUGHTS[0] not in text
