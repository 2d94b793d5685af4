"""Preferences to documents: ids of each side, where answers begin, and both sides or none."""

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings, strategies as st

from batchloom.core.conversation import Conversation, LabelledConversation, PreferencePair
from batchloom.preparation import (
    ChatEncoder,
    ChatRules,
    OverlongError,
    encode_labelled_answers,
    encode_preference_pairs,
    encode_text_pairs,
)
from batchloom.store import BAD, CHOSEN, GOOD, REJECTED
from batchloom.tokens import resolve_tokenizer
from chat.conversations import CHATML, CONTENTS, GENTLE, LLAMA3, THINKING, messages
from tiers import examples

ANSWER = ChatRules(train_on="completion", prove=True)
IDS = np.dtype("<i4")
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "thinking": THINKING}
MANY = settings(
    max_examples=examples(40),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def pair(prompt, chosen, rejected, **fields):
    return PreferencePair(*(Conversation(prompt + end, completion=len(prompt), **fields) for end in (chosen, rejected)))


@pytest.fixture(scope="module")
def encoders(tokenizers, tmp_path_factory):
    folder, made = tmp_path_factory.mktemp("templates"), {}
    for template, text in TEMPLATES.items():
        (folder / f"{template}.jinja").write_text(text)
        for name, tokenizer in tokenizers.items():
            made[name, template] = ChatEncoder(tokenizer, str(folder / f"{template}.jinja"))
    return made


def documents(made):
    """Of each document the number of its pair, its side, its prompt and its answer."""
    bounds = [0, *np.cumsum(made.lengths).tolist()]
    found = []
    for at, (begin, stop) in enumerate(itertools.pairwise(bounds)):
        ids, mask = made.tokens[begin:stop], made.trained[begin:stop]
        start = int(mask.argmax())
        assert mask[start:].all()
        where = int(made.numbers[at]), int(made.sides[at])
        found.append((*where, ids[:start].tolist(), ids[start:].tolist()))
    return found


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("name", ["bytes", "nfc", "metaspace"])
@MANY
@given(turns=messages(GENTLE), chosen=GENTLE, rejected=GENTLE)
def test_each_side_is_what_apply_chat_template_gives(encoders, theirs, name, template, turns, chosen, rejected):
    prompt = [*turns, user("p")]
    sides = [[*prompt, assistant(chosen)], [*prompt, assistant(rejected)]]
    made = encode_preference_pairs(
        [pair(prompt, [assistant(chosen)], [assistant(rejected)])],
        encoders[name, template], ANSWER, IDS,
    )  # fmt: skip
    expected = [
        theirs[name].apply_chat_template(side, chat_template=TEMPLATES[template], return_dict=True)["input_ids"]
        for side in sides
    ]
    if expected[0] == expected[1]:
        assert made.faults
        return
    event("left out" if made.faults else "kept")
    if made.faults:  # a token reaches over the edge of a turn, private-use characters: told in test_turns
        assert not made.tokens.size
        return
    found = documents(made)
    assert [prompt + answer for _, _, prompt, answer in found] == expected
    assert [one[:2] for one in found] == [(0, CHOSEN), (0, REJECTED)]
    assert found[0][2] == found[1][2]
    asked = theirs[name].apply_chat_template(
        prompt,
        chat_template=TEMPLATES[template],
        add_generation_prompt=True,
        return_dict=True,
    )["input_ids"]
    # Line ends at the end of a header are other tokens before some texts than at the end of one.
    if template != "llama3" and chosen[:1].strip() and rejected[:1].strip():
        assert found[0][2] == asked


@MANY
@given(st.lists(st.tuples(CONTENTS, CONTENTS, CONTENTS), max_size=6))
def test_both_sides_or_none_and_one_reason_each(encoders, rows):
    pairs = [pair([user(p)], [assistant(a)], [assistant(b)]) for p, a, b in rows]
    made = encode_preference_pairs(pairs, encoders["bytes", "chatml"], ANSWER, IDS)
    found = documents(made)
    assert [one[1] for one in found] == [CHOSEN, REJECTED] * (len(found) // 2)
    assert [one[0] for one in found[::2]] == [one[0] for one in found[1::2]]
    numbers = [one[0] for one in found[::2]]
    numbers += [left.number for left in made.faults + made.dropped]
    assert sorted(numbers) == list(range(len(rows)))


def test_answers_of_several_turns_and_tools_around_them(encoders, theirs):
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    chosen = [assistant("", tool_calls=[call]), {"role": "tool", "content": "1"}, assistant("one")]
    made = encode_preference_pairs(
        [pair([user("p")], chosen, [assistant("two")])],
        encoders["bytes", "thinking"], ANSWER, IDS,
    )  # fmt: skip
    (_, _, prompt, first), (_, _, other, second) = documents(made)
    assert prompt == other
    assert "<tool_call>" in theirs["bytes"].decode(first)
    assert theirs["bytes"].decode(second).endswith("two<|im_end|>\n")


P, Q = [user("p")], [user("q")]
FAULTS = {
    "prompts that differ": (
        PreferencePair(Conversation([*P, assistant("a")], completion=1), Conversation([*Q, assistant("b")], completion=1)),
        "differ from those before its rejected one: give both the same prompt",
    ),
    "answers alike when rendered": (
        pair(P, [assistant(" a")], [assistant("a ")]),
        "its chosen and rejected answers are the same tokens",
    ),
    "flags": (
        pair(P, [assistant("a")], [assistant("b")], trained=[True, None]),
        "its flags (train, weight) select tokens outside the answer",
    ),
    "a side that cannot be encoded": (
        pair(P, [assistant("a")], [assistant("\ud800")]),
        "its rejected side: it is not valid Unicode",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_no_pair(encoders, name):
    bad, sentence = FAULTS[name]
    fine = pair(P, [assistant("good")], [assistant("bad")])
    made = encode_preference_pairs([fine, bad, fine], encoders["bytes", "llama3"], ANSWER, IDS)
    assert [left.number for left in made.faults] == [1]
    assert sentence in made.faults[0].reason
    assert made.numbers.tolist() == [0, 0, 2, 2]


def test_a_template_that_writes_the_prompt_by_the_answer(tokenizers, tmp_path):
    (tmp_path / "x.jinja").write_text("{{ messages | length }} messages\n" + CHATML)
    encoder = ChatEncoder(tokenizers["bytes"], str(tmp_path / "x.jinja"))
    longer = [assistant("b"), user("c"), assistant("d")]
    pairs = [pair(P, [assistant("a")], longer), pair(P, [assistant("a")], [assistant("b")])]
    made = encode_preference_pairs(pairs, encoder, ANSWER, IDS)
    assert [left.number for left in made.faults] == [0]
    assert "independently of the answer" in made.faults[0].reason
    assert made.numbers.tolist() == [1, 1]


@pytest.mark.parametrize("overlong", ["drop", "truncate-turns", "split"])
def test_a_side_that_is_too_long_takes_the_other_with_it(encoders, overlong):
    rules = ChatRules("completion", 60, overlong)
    long = "the fox " * 60
    turns = [assistant("a"), user("b"), assistant(long), user("c"), assistant("d")]
    pairs = [
        pair(P, [assistant("good")], [assistant(long)]),
        pair(P, [assistant("good")], [assistant("bad")]),
        pair(P, [assistant("good")], turns),
    ]
    made = encode_preference_pairs(pairs, encoders["bytes", "chatml"], rules, IDS)
    assert not made.faults
    left = [(one.number, one.reason.partition(":")[0]) for one in made.dropped]
    # Of the last one whole turns can be cut off, and what is left is an answer.
    kept = overlong == "truncate-turns"
    assert left == [(0, "overlong"), *([] if kept else [(2, "overlong")])]
    assert made.numbers.tolist() == [1, 1, *([2, 2] if kept else [])]
    assert max(made.lengths) <= 60
    with pytest.raises(OverlongError, match="on its rejected side has .* tokens") as caught:
        encode_preference_pairs(pairs[1:], encoders["bytes", "chatml"], ChatRules("completion", 60, "error"), IDS)
    assert caught.value.number == 1


def test_labels(encoders):
    talks = [Conversation([user("p"), assistant(text)], completion=1) for text in ("a", "b")]
    flagged = Conversation([user("p"), assistant("c")], completion=1, trained=[True, None])
    given_ = [LabelledConversation(talks[0], label=True), LabelledConversation(flagged, label=True), LabelledConversation(talks[1], label=False)]  # fmt: skip
    made = encode_labelled_answers(given_, encoders["bytes", "chatml"], ANSWER, IDS)
    assert [(n, side) for n, side, _, _ in documents(made)] == [(0, GOOD), (2, BAD)]
    assert made.faults[0].number == 1


@pytest.mark.parametrize("name", ["bytes", "gpt2-like"])
def test_two_texts_share_their_first_tokens(tokenizers, name):
    tokenizer = resolve_tokenizer("bytes") if name == "bytes" else tokenizers["bytes"]
    texts = [
        ("\n\nHuman: hi\n\nAssistant: good", "\n\nHuman: hi\n\nAssistant: bad"),
        ("The fox", "The fox jumps"),
        ("same", "same"),
    ]
    made = encode_text_pairs([PreferencePair(*one) for one in texts], tokenizer, ChatRules(), IDS)
    assert [(left.number, left.reason[:35]) for left in made.faults] == [(2, "its chosen and rejected answers are")]
    found = documents(made)
    ends = [tokenizer.decode(np.array(prompt + answer)) for _, _, prompt, answer in found]
    words = tokenizer.decode(np.array([tokenizer.end_id]))
    assert [end.removesuffix(words).removeprefix("<|begin_of_text|>") for end in ends] == [
        text for one in texts[:2] for text in one
    ]
    assert [one[2] for one in found[::2]] == [one[2] for one in found[1::2]]
    prompts = [tokenizer.decode(np.array(one[2])).removeprefix("<|begin_of_text|>") for one in found[::2]]
    assert prompts == ["\n\nHuman: hi\n\nAssistant:", "The fo" if name == "bytes" else "The"]


def test_texts_that_are_too_long():
    pairs = [PreferencePair("ab", "ac"), PreferencePair("ab", "a" * 99)]
    tokenizer = resolve_tokenizer("bytes")
    made = encode_text_pairs(pairs, tokenizer, ChatRules(max_tokens=50), IDS)
    assert [left[:2] for left in made.dropped] == [(1, "overlong: 100 tokens where 50 are allowed")]
    with pytest.raises(OverlongError, match="has 100 tokens where 50 are allowed"):
        encode_text_pairs(pairs, tokenizer, ChatRules(max_tokens=50, overlong="error"), IDS)


def test_nothing_gives_nothing(encoders):
    for made in (
        encode_preference_pairs([], encoders["bytes", "chatml"], ANSWER, IDS),
        encode_labelled_answers([], encoders["bytes", "chatml"], ANSWER, IDS),
    ):
        assert (made.tokens.size, made.lengths.size, made.sides.size) == (0, 0, 0)
