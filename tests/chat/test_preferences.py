"""Encoding of preferences: ids of each side and starts of answers."""

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings, strategies as st

from batchloom.core.document import Conversation, LabelledConversation, PreferencePair
from batchloom.preparation import (
    ChatEncoder,
    ChatRecipe,
    OverlongError,
    encode_labelled_answers,
    encode_preference_pairs,
    encode_text_pairs,
)
from batchloom.store import BAD, CHOSEN, GOOD, REJECTED
from batchloom.tokens import resolve_tokenizer
from chat.conversations import CHATML, CONTENTS, GENTLE, LLAMA3, THINKING, messages
from tiers import examples

ANSWER_RULES = ChatRecipe(train_on="completion", prove=True)
IDS = np.dtype("<i4")
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "thinking": THINKING}
MANY = settings(
    max_examples=examples(40),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **fields):
    return {"role": "assistant", "content": text, **fields}


def make_pair(prompt, chosen, rejected, **fields):
    return PreferencePair(
        *(Conversation(prompt + answer, completion=len(prompt), **fields) for answer in (chosen, rejected))
    )


@pytest.fixture(scope="module")
def encoders(tokenizers, tmp_path_factory):
    folder, encoders_by_name = tmp_path_factory.mktemp("templates"), {}
    for template, source in TEMPLATES.items():
        (folder / f"{template}.jinja").write_text(source)
        for name, tokenizer in tokenizers.items():
            encoders_by_name[name, template] = ChatEncoder(tokenizer, str(folder / f"{template}.jinja"))
    return encoders_by_name


def split_documents(encoded):
    """Return pair number, side, prompt ids and answer ids of each document."""
    bounds = [0, *np.cumsum(encoded.lengths).tolist()]
    documents = []
    for index, (begin, stop) in enumerate(itertools.pairwise(bounds)):
        ids, mask = encoded.ids[begin:stop], encoded.flags.trained[begin:stop]
        start = int(mask.argmax())
        assert mask[start:].all()
        identity = int(encoded.numbers[index]), int(encoded.sides[index])
        documents.append((*identity, ids[:start].tolist(), ids[start:].tolist()))
    return documents


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("name", ["bytes", "nfc", "metaspace"])
@MANY
@given(turns=messages(GENTLE), chosen=GENTLE, rejected=GENTLE)
def test_each_side_is_what_apply_chat_template_gives(encoders, hf_tokenizers, name, template, turns, chosen, rejected):
    prompt = [*turns, user("p")]
    sides = [[*prompt, assistant(chosen)], [*prompt, assistant(rejected)]]
    encoded = encode_preference_pairs(
        [make_pair(prompt, [assistant(chosen)], [assistant(rejected)])],
        encoders[name, template], ANSWER_RULES, IDS,
    )  # fmt: skip
    expected = [
        hf_tokenizers[name].apply_chat_template(side, chat_template=TEMPLATES[template], return_dict=True)["input_ids"]
        for side in sides
    ]
    if expected[0] == expected[1]:
        assert encoded.faults
        return
    event("left out" if encoded.faults else "kept")
    if encoded.faults:  # Tokens across the edge of a turn, private-use characters: see test_turns.
        assert not encoded.ids.size
        return
    documents = split_documents(encoded)
    assert [prompt + answer for _, _, prompt, answer in documents] == expected
    assert [document[:2] for document in documents] == [(0, CHOSEN), (0, REJECTED)]
    assert documents[0][2] == documents[1][2]
    expected_prompt = hf_tokenizers[name].apply_chat_template(
        prompt,
        chat_template=TEMPLATES[template],
        add_generation_prompt=True,
        return_dict=True,
    )["input_ids"]
    # Newlines at the end of a header are tokenized differently before some texts than at the end of a text.
    if template != "llama3" and chosen[:1].strip() and rejected[:1].strip():
        assert documents[0][2] == expected_prompt


@MANY
@given(st.lists(st.tuples(CONTENTS, CONTENTS, CONTENTS), max_size=6))
def test_both_sides_or_none_and_one_reason_each(encoders, rows):
    pairs = [make_pair([user(p)], [assistant(a)], [assistant(b)]) for p, a, b in rows]
    encoded = encode_preference_pairs(pairs, encoders["bytes", "chatml"], ANSWER_RULES, IDS)
    documents = split_documents(encoded)
    assert [document[1] for document in documents] == [CHOSEN, REJECTED] * (len(documents) // 2)
    assert [document[0] for document in documents[::2]] == [document[0] for document in documents[1::2]]
    numbers = [document[0] for document in documents[::2]]
    numbers += [fault.number for fault in encoded.faults + encoded.dropped]
    assert sorted(numbers) == list(range(len(rows)))


def test_answers_of_several_turns_and_tools_around_them(encoders, hf_tokenizers):
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    chosen = [assistant("", tool_calls=[call]), {"role": "tool", "content": "1"}, assistant("one")]
    encoded = encode_preference_pairs(
        [make_pair([user("p")], chosen, [assistant("two")])],
        encoders["bytes", "thinking"], ANSWER_RULES, IDS,
    )  # fmt: skip
    (_, _, prompt, first_answer), (_, _, second_prompt, second_answer) = split_documents(encoded)
    assert prompt == second_prompt
    assert "<tool_call>" in hf_tokenizers["bytes"].decode(first_answer)
    assert hf_tokenizers["bytes"].decode(second_answer).endswith("two<|im_end|>\n")


P, Q = [user("p")], [user("q")]
FAULTS = {
    "prompts that differ": (
        PreferencePair(Conversation([*P, assistant("a")], completion=1), Conversation([*Q, assistant("b")], completion=1)),
        "differ from those before its rejected one: give both the same prompt",
    ),
    "answers alike when rendered": (
        make_pair(P, [assistant(" a")], [assistant("a ")]),
        "its chosen and rejected answers are the same tokens",
    ),
    "flags": (
        make_pair(P, [assistant("a")], [assistant("b")], trained=[True, None]),
        "its flags (train, weight) select tokens outside the answer",
    ),
    "a side that cannot be encoded": (
        make_pair(P, [assistant("a")], [assistant("\ud800")]),
        "its rejected side: it is not valid Unicode",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_invalid_pairs(encoders, name):
    bad, sentence = FAULTS[name]
    fine = make_pair(P, [assistant("good")], [assistant("bad")])
    encoded = encode_preference_pairs([fine, bad, fine], encoders["bytes", "llama3"], ANSWER_RULES, IDS)
    assert [fault.number for fault in encoded.faults] == [1]
    assert sentence in encoded.faults[0].reason
    assert encoded.numbers.tolist() == [0, 0, 2, 2]


def test_a_template_that_writes_the_prompt_by_the_answer(tokenizers, tmp_path):
    (tmp_path / "x.jinja").write_text("{{ messages | length }} messages\n" + CHATML)
    encoder = ChatEncoder(tokenizers["bytes"], str(tmp_path / "x.jinja"))
    longer = [assistant("b"), user("c"), assistant("d")]
    pairs = [make_pair(P, [assistant("a")], longer), make_pair(P, [assistant("a")], [assistant("b")])]
    encoded = encode_preference_pairs(pairs, encoder, ANSWER_RULES, IDS)
    assert [fault.number for fault in encoded.faults] == [0]
    assert "independently of the answer" in encoded.faults[0].reason
    assert encoded.numbers.tolist() == [1, 1]


@pytest.mark.parametrize("overlong", ["drop", "truncate-turns", "split"])
def test_a_side_that_is_too_long_takes_the_other_with_it(encoders, overlong):
    rules = ChatRecipe(train_on="completion", max_tokens=60, overlong=overlong)
    long = "the fox " * 60
    turns = [assistant("a"), user("b"), assistant(long), user("c"), assistant("d")]
    pairs = [
        make_pair(P, [assistant("good")], [assistant(long)]),
        make_pair(P, [assistant("good")], [assistant("bad")]),
        make_pair(P, [assistant("good")], turns),
    ]
    encoded = encode_preference_pairs(pairs, encoders["bytes", "chatml"], rules, IDS)
    assert not encoded.faults
    dropped = [(fault.number, fault.reason.partition(":")[0]) for fault in encoded.dropped]
    # Complete turns of the last pair can be cut off, and the remaining turns are an answer.
    is_truncated = overlong == "truncate-turns"
    assert dropped == [(0, "overlong"), *([] if is_truncated else [(2, "overlong")])]
    assert encoded.numbers.tolist() == [1, 1, *([2, 2] if is_truncated else [])]
    assert max(encoded.lengths) <= 60
    with pytest.raises(OverlongError, match="on its rejected side has .* tokens") as caught:
        encode_preference_pairs(
            pairs[1:],
            encoders["bytes", "chatml"],
            ChatRecipe(train_on="completion", max_tokens=60, overlong="error"),
            IDS,
        )
    assert caught.value.number == 1


CUT_PAIRS = {
    # (prompt, chosen, rejected, policy, limit) gives both sides, "." for the end token, or the reason to drop the pair.
    "end of the longer answer": ("p", "good", "b" * 9, "truncate", 8, ["p|good.", "p|bbbbbbb"]),
    "ends of both": ("ppp", "good", "bad", "truncate", 5, ["ppp|go", "ppp|ba"]),
    "beginning of the prompt": ("pqrstu", "good", "bad", "truncate-left", 9, ["rstu|good.", "rstu|bad."]),
    "fits": ("p", "good", "bad", "truncate-left", 6, ["p|good.", "p|bad."]),
    "no answer": ("pqrst", "good", "bad", "truncate", 5, "its prompt leaves no room"),
    "no prompt": ("pq", "good", "bad", "truncate-left", 5, "its answer leaves no room"),
    "equal answers": ("pq", " good", " bad", "truncate", 3, "its answers are equal up to there"),
}


@pytest.mark.parametrize("name", CUT_PAIRS)
def test_both_sides_of_a_cut_pair_keep_one_prompt(name):
    prompt, chosen, rejected, policy, limit, expected = CUT_PAIRS[name]
    tokenizer = resolve_tokenizer("bytes")
    pair = PreferencePair(prompt + chosen, prompt + rejected)
    encoded = encode_text_pairs([pair], tokenizer, ChatRecipe(max_tokens=limit, overlong=policy), IDS)
    assert not encoded.faults
    if isinstance(expected, str):
        assert expected in encoded.dropped[0].reason
        assert (encoded.lengths.size, encoded.truncated) == (0, [])
    else:
        end = tokenizer.decode(np.array([tokenizer.end_id]))
        sides = ["|".join(tokenizer.decode(np.array(part)) for part in side[2:]) for side in split_documents(encoded)]
        assert [side.replace(end, ".") for side in sides] == expected
        assert encoded.truncated == ([] if name == "fits" else [0])


def test_labels(encoders):
    conversations = [Conversation([user("p"), assistant(text)], completion=1) for text in ("a", "b")]
    flagged = Conversation([user("p"), assistant("c")], completion=1, trained=[True, None])
    labelled = [LabelledConversation(conversations[0], label=True), LabelledConversation(flagged, label=True), LabelledConversation(conversations[1], label=False)]  # fmt: skip
    encoded = encode_labelled_answers(labelled, encoders["bytes", "chatml"], ANSWER_RULES, IDS)
    assert [(n, side) for n, side, _, _ in split_documents(encoded)] == [(0, GOOD), (2, BAD)]
    assert encoded.faults[0].number == 1


@pytest.mark.parametrize("name", ["bytes", "gpt2-like"])
def test_two_texts_share_their_first_tokens(tokenizers, name):
    tokenizer = resolve_tokenizer("bytes") if name == "bytes" else tokenizers["bytes"]
    texts = [
        ("\n\nHuman: hi\n\nAssistant: good", "\n\nHuman: hi\n\nAssistant: bad"),
        ("The fox", "The fox jumps"),
        ("same", "same"),
    ]
    encoded = encode_text_pairs([PreferencePair(*pair) for pair in texts], tokenizer, ChatRecipe(), IDS)
    assert [(fault.number, fault.reason[:35]) for fault in encoded.faults] == [
        (2, "its chosen and rejected answers are")
    ]
    documents = split_documents(encoded)
    decoded = [tokenizer.decode(np.array(prompt + answer)) for _, _, prompt, answer in documents]
    end_text = tokenizer.decode(np.array([tokenizer.end_id]))
    assert [document_text.removesuffix(end_text).removeprefix("<|begin_of_text|>") for document_text in decoded] == [
        text for pair in texts[:2] for text in pair
    ]
    assert [document[2] for document in documents[::2]] == [document[2] for document in documents[1::2]]
    prompts = [tokenizer.decode(np.array(document[2])).removeprefix("<|begin_of_text|>") for document in documents[::2]]
    assert prompts == ["\n\nHuman: hi\n\nAssistant:", "The fo" if name == "bytes" else "The"]


def test_texts_that_are_too_long():
    pairs = [PreferencePair("ab", "ac"), PreferencePair("ab", "a" * 99)]
    tokenizer = resolve_tokenizer("bytes")
    encoded = encode_text_pairs(pairs, tokenizer, ChatRecipe(max_tokens=50), IDS)
    assert [fault[:2] for fault in encoded.dropped] == [(1, "overlong: 100 tokens where 50 are allowed")]
    with pytest.raises(OverlongError, match="has 100 tokens where 50 are allowed"):
        encode_text_pairs(pairs, tokenizer, ChatRecipe(max_tokens=50, overlong="error"), IDS)


def test_nothing_gives_nothing(encoders):
    for encoded in (
        encode_preference_pairs([], encoders["bytes", "chatml"], ANSWER_RULES, IDS),
        encode_labelled_answers([], encoders["bytes", "chatml"], ANSWER_RULES, IDS),
    ):
        assert (encoded.ids.size, encoded.lengths.size, encoded.sides.size) == (0, 0, 0)
