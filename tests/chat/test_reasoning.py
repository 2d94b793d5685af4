"""Policies for the reasoning of answers under the templates of TRL."""

import itertools

import numpy as np
import pytest

from batchloom import SettingsError
from batchloom.core.document import ContentRange, Conversation, PreferencePair, TurnWeight
from batchloom.preparation import ChatRecipe, encode_conversations, encode_preference_pairs
from chat.template_cases import CASES, MARKED
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
        (decode(encoded.ids[start:stop]), decode(encoded.ids[start:stop][encoded.mask[start:stop]]))
        for start, stop in itertools.pairwise(bounds)
    ]


def remove_tags(text):
    return "".join(text.replace("<think>", "").replace("</think>", "").split())


def holds_thoughts(text):
    return [thought in text for thought in THOUGHTS]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in FAST)) for n in MARKED])
@pytest.mark.parametrize("messages", [KEYED, TAGGED], ids=["keyed", "tagged"])
def test_each_policy_under_each_template(make_trl_encoder, name, messages):
    encoder = make_trl_encoder(name)
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
def test_calls_are_trained_without_the_thought_before_them(make_trl_encoder, name, expected):
    [[call, *answer]] = list_trained_texts(make_trl_encoder(name), [(CALLING, TOOLS)], reasoning="mask")
    assert answer == expected
    assert '"city": "Oslo"' in call
    assert "Look it up" not in call
    [dropped] = list_trained_texts(make_trl_encoder(name), [(CALLING, TOOLS)], reasoning="drop")
    assert call in dropped[0]


def test_a_template_that_leaves_thoughts_out_is_announced_with_the_remedy(make_trl_encoder):
    encoder = make_trl_encoder("qwen3")
    encoded = encode_conversations(
        [Conversation(messages) for messages in (PLAIN, KEYED, TAGGED)], encoder, ChatRecipe(prove=True)
    )
    [(change, numbers)] = encoded.altered.items()
    assert "--reasoning split" in change
    assert numbers == [1, 2]
    split = encode_conversations([Conversation(KEYED)], encoder, ChatRecipe(prove=True, reasoning="split"))
    assert len(split.lengths) == 2
    assert split.numbers.tolist() == [0, 0]
    assert not split.altered


def test_split_follows_what_is_trained(make_trl_encoder):
    encoder = make_trl_encoder("qwen3")
    assert len(list_samples(encoder, KEYED, reasoning="split", train_on="last")) == 1
    flagged = Conversation(KEYED, trained=[None, False, None, None])
    encoded = encode_conversations([flagged], encoder, ChatRecipe(prove=True, reasoning="split"))
    assert len(encoded.lengths) == 1
    untrained = Conversation(KEYED, trained=[False] * 4)
    encoded = encode_conversations([untrained], encoder, ChatRecipe(prove=True, reasoning="split"))
    assert "no assistant turn is trained" in encoded.dropped[0].reason
    with pytest.raises(SettingsError, match="reasoning: split makes samples of single answers"):
        ChatRecipe(reasoning="split", train_on="all")


def test_a_fault_in_a_sample_leaves_the_record_out(make_trl_encoder):
    """The second turn of the prefix is alone the fault, and the first would be a sample."""
    broken = [*KEYED[:2], *CALLING]
    encoded = encode_conversations(
        [Conversation(broken, TOOLS)], make_trl_encoder("gemma"), ChatRecipe(reasoning="split")
    )
    assert [fault.number for fault in encoded.faults] == [0]
    assert encoded.lengths.size == 0


def test_what_cannot_be_dropped_is_refused(make_trl_encoder):
    encoder, chat = make_trl_encoder("qwen3"), ChatRecipe(reasoning="drop")
    alone = Conversation([KEYED[0], {"role": "assistant", "content": "", "reasoning_content": "Hm."}])
    ranges = Conversation(TAGGED[:2], trained=[None, TurnWeight(None, 1.0, (ContentRange(0, 3, 1.0),))])
    encoded = encode_conversations([alone, ranges], encoder, chat)
    assert "turn 2 is reasoning alone" in encoded.faults[0].reason
    assert "count the characters of its reasoning" in encoded.faults[1].reason


def test_preferences_take_the_policy(make_trl_encoder):
    answers = [{**KEYED[1], "content": content} for content in ("Four.", "Five.")]
    pair = PreferencePair(*(Conversation([KEYED[0], answer], completion=1) for answer in answers))
    encoder = make_trl_encoder("qwen3")
    encoded = encode_preference_pairs(
        [pair], encoder, ChatRecipe(reasoning="drop", train_on="completion"), np.dtype(np.uint32)
    )
    text = encoder.tokenizer.decode(encoded.ids)
    assert "Four." in text
    assert "Five." in text
    assert THOUGHTS[0] not in text
