"""Conversations that are too long: whole turns, and never a document with nothing to train."""

import itertools

import numpy as np
import pytest
from hypothesis import given, strategies as st

from batchloom import InputError
from batchloom.preparation import ChatEncoder, ChatRules, encode_conversations
from batchloom.preparation.settings import count_fitting_tokens
from chat.conversations import talk

LONG = talk("q1", "a1", "q2", "a2", "q3", "a3", system="s")


def texts(encoder, conversation, **rules):
    made = encode_conversations([conversation], encoder, ChatRules(prove=True, **rules))
    bounds = [0, *made.lengths.cumsum().tolist()]
    pieces = list(itertools.pairwise(bounds))
    assert all(made.mask[a:b].any() for a, b in pieces)
    assert all(b - a <= rules["max_tokens"] for a, b in pieces)
    whole = [encoder.tokenizer.decode(made.ids[a:b]) for a, b in pieces]
    trained = [encoder.tokenizer.decode(made.ids[a:b][made.mask[a:b]]) for a, b in pieces]
    return whole, trained, [left.reason for left in made.dropped]


@pytest.fixture(scope="module")
def encoder(tokenizers):
    return ChatEncoder(tokenizers["bytes"], "chatml")


def size(encoder, conversation):
    return int(encode_conversations([conversation], encoder, ChatRules()).lengths[0])


def test_drop_is_counted(encoder):
    whole, _, reasons = texts(encoder, LONG, max_tokens=20)
    assert not whole
    assert reasons[0].startswith("overlong: ")


def test_truncate_keeps_whole_turns_from_the_beginning(encoder):
    limit = size(encoder, talk("q1", "a1", "q2", "a2", system="s")) + 1
    whole, trained, _ = texts(encoder, LONG, max_tokens=limit, overlong="truncate-turns")
    assert whole == [encoder.renderer.render(talk("q1", "a1", "q2", "a2", system="s")).text]
    assert trained == ["a1<|im_end|>a2<|im_end|>"]


@pytest.mark.parametrize("limit", [1, 2, 7, 16, 30])
def test_a_split_gives_every_piece_that_trains(encoder, limit):
    (one,) = encode_conversations([LONG], encoder, ChatRules()).lengths
    made = encode_conversations([LONG], encoder, ChatRules())
    cuts = range(limit, int(one), limit)
    pieces = list(zip(np.split(made.ids, cuts), np.split(made.mask, cuts), strict=True))
    kept = [(ids.tolist(), mask.tolist()) for ids, mask in pieces if mask[1:].any()]
    cut = encode_conversations([LONG], encoder, ChatRules(max_tokens=limit, overlong="split"))
    cuts = np.cumsum(cut.lengths)[:-1]
    found = list(zip(np.split(cut.ids, cuts), np.split(cut.mask, cuts), strict=True))
    assert [(a.tolist(), b.tolist()) for a, b in found if a.size] == kept
    assert len(cut.dropped) == len(pieces) - len(kept)
    assert all(left.reason.startswith("nothing to train: tokens ") for left in cut.dropped)


def test_what_has_no_turns_that_fit_is_dropped(encoder):
    whole, _, reasons = texts(encoder, talk("q", "a" * 500), max_tokens=20, overlong="truncate-turns")
    assert not whole
    assert reasons == [reasons[0]]
    assert "no complete trained turn fits" in reasons[0]


def test_error_names_the_conversation(encoder):
    with pytest.raises(InputError, match="conversation 1 has .* where 20 are allowed"):
        rules = ChatRules(max_tokens=20, overlong="error")
        encode_conversations([talk("a", "b"), LONG], encoder, rules)


@given(
    turns=st.lists(st.tuples(st.sampled_from(["user", "assistant", "tool"]), st.integers(1, 9)), min_size=1),
    system=st.integers(0, 5),
    limit=st.integers(1, 40),
)
def test_turns_that_are_kept_fit_and_train(turns, system, limit):
    if system:
        turns = [("system", system), *turns]
    roles, lengths = [role for role, _ in turns], [length for _, length in turns]
    heads = [0, *np.cumsum(lengths)[:-1].tolist()]
    mask = np.repeat([role == "assistant" for role in roles], lengths)
    kept = count_fitting_tokens(mask, heads, limit)
    ends = np.cumsum(lengths)
    whole = [end for role, end in zip(roles, ends, strict=True) if role == "assistant"]
    assert kept == max((end for end in whole if end <= limit), default=0)
