"""Conversations that are too long: whole turns, and never a document with nothing to train."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchloom.core.errors import InputError
from batchloom.preparation.chat_encoder import ChatEncoder
from batchloom.preparation.conversations import ChatRules, encode_conversations
from batchloom.preparation.overlong import fit_turns
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


def test_split_repeats_the_system_turn(encoder):
    limit = size(encoder, talk("q1", "a1", system="s"))
    whole, trained, _ = texts(encoder, LONG, max_tokens=limit, overlong="split")
    assert whole == [
        encoder.renderer.render(talk(f"q{n}", f"a{n}", system="s")).text for n in (1, 2, 3)
    ]
    assert trained == ["a1<|im_end|>", "a2<|im_end|>", "a3<|im_end|>"]


@pytest.mark.parametrize("way", ["truncate-turns", "split"])
def test_what_cannot_be_cut_is_dropped(encoder, way):
    whole, _, reasons = texts(encoder, talk("q", "a" * 500), max_tokens=20, overlong=way)
    assert not whole
    assert reasons == [reasons[0]]
    assert "no whole trained turns fit" in reasons[0]


def test_error_names_the_conversation(encoder):
    with pytest.raises(InputError, match="conversation 1 has .* where 20 are allowed"):
        rules = ChatRules(max_tokens=20, overlong="error")
        encode_conversations([talk("a", "b"), LONG], encoder, rules)


@given(
    turns=st.lists(
        st.tuples(st.sampled_from(["user", "assistant", "tool"]), st.integers(1, 9)), min_size=1
    ),
    system=st.integers(0, 5),
    limit=st.integers(1, 40),
    split=st.booleans(),
)
def test_pieces_fit_train_and_keep_order(turns, system, limit, split):
    if system:
        turns = [("system", system), *turns]
    roles, lengths = [role for role, _ in turns], [length for _, length in turns]
    heads = [0, *np.cumsum(lengths)[:-1].tolist()]
    mask = np.repeat([role == "assistant" for role in roles], lengths)
    pieces = fit_turns(mask, heads, roles, limit, split=split)
    ends = {*heads, sum(lengths)}
    assert split or len(pieces) <= 1
    before = 0
    for piece in pieces:
        assert piece.head + piece.stop - piece.start <= limit
        assert mask[piece.start : piece.stop].any()
        assert piece.start in ends
        assert piece.stop in ends
        assert piece.start >= before
        assert piece.head in (0, system)
        before = piece.stop
