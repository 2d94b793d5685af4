"""Overlong conversations: complete turns, and no document without trained tokens."""

import itertools

import numpy as np
import pytest
from hypothesis import given, strategies as st

from batchloom import InputError
from batchloom.preparation import ChatEncoder, ChatRecipe, encode_conversations
from batchloom.preparation.documents.overlong_policies import count_fitting_tokens
from chat.conversations import make_conversation

LONG = make_conversation("q1", "a1", "q2", "a2", "q3", "a3", system="s")


def encode_and_decode(encoder, conversation, **rules):
    encoded = encode_conversations([conversation], encoder, ChatRecipe(prove=True, **rules))
    bounds = [0, *encoded.lengths.cumsum().tolist()]
    ranges = list(itertools.pairwise(bounds))
    assert all(encoded.flags.trained[a:b].any() for a, b in ranges)
    assert all(b - a <= rules["max_tokens"] for a, b in ranges)
    documents = [encoder.tokenizer.decode(encoded.ids[a:b]) for a, b in ranges]
    trained = [encoder.tokenizer.decode(encoded.ids[a:b][encoded.flags.trained[a:b]]) for a, b in ranges]
    return documents, trained, [fault.reason for fault in encoded.dropped]


@pytest.fixture(scope="module")
def encoder(tokenizers):
    return ChatEncoder(tokenizers["bytes"], "chatml")


def count_tokens(encoder, conversation):
    return int(encode_conversations([conversation], encoder, ChatRecipe()).lengths[0])


def test_drop_is_counted(encoder):
    documents, _, reasons = encode_and_decode(encoder, LONG, max_tokens=20)
    assert not documents
    assert reasons[0].startswith("overlong: ")


def test_truncate_keeps_whole_turns_from_the_beginning(encoder):
    limit = count_tokens(encoder, make_conversation("q1", "a1", "q2", "a2", system="s")) + 1
    documents, trained, _ = encode_and_decode(encoder, LONG, max_tokens=limit, overlong="truncate-turns")
    assert documents == [encoder.renderer.render(make_conversation("q1", "a1", "q2", "a2", system="s")).text]
    assert trained == ["a1<|im_end|>a2<|im_end|>"]


@pytest.mark.parametrize("limit", [1, 2, 7, 16, 30])
def test_a_split_gives_every_part_with_trained_tokens(encoder, limit):
    (length,) = encode_conversations([LONG], encoder, ChatRecipe()).lengths
    encoded = encode_conversations([LONG], encoder, ChatRecipe())
    cuts = range(limit, int(length), limit)
    parts = list(zip(np.split(encoded.ids, cuts), np.split(encoded.flags.trained, cuts), strict=True))
    expected = [(ids.tolist(), mask.tolist()) for ids, mask in parts if mask[1:].any()]
    split = encode_conversations([LONG], encoder, ChatRecipe(max_tokens=limit, overlong="split"))
    cuts = np.cumsum(split.lengths)[:-1]
    split_parts = list(zip(np.split(split.ids, cuts), np.split(split.flags.trained, cuts), strict=True))
    assert [(a.tolist(), b.tolist()) for a, b in split_parts if a.size] == expected
    assert len(split.dropped) == len(parts) - len(expected)
    assert all(fault.reason.startswith("nothing to train: tokens ") for fault in split.dropped)


@pytest.mark.parametrize("limit", [1, 2, 7, 16, 30, 45])
@pytest.mark.parametrize("overlong", ["truncate", "truncate-left"])
def test_truncation_keeps_one_end(encoder, overlong, limit):
    uncut = encode_conversations([LONG], encoder, ChatRecipe())
    kept = slice(limit) if overlong == "truncate" else slice(-limit, None)
    encoded = encode_conversations([LONG], encoder, ChatRecipe(max_tokens=limit, overlong=overlong))
    trains = uncut.flags.trained[kept][1:].any()
    assert encoded.ids.tolist() == (uncut.ids[kept].tolist() if trains else [])
    assert encoded.flags.trained.tolist() == (uncut.flags.trained[kept].tolist() if trains else [])
    assert list(encoded.truncated) == ([0] if trains else [])
    assert [fault.rule for fault in encoded.dropped] == ([] if trains else ["nothing to train"])


@pytest.mark.parametrize("overlong", ["truncate", "truncate-left", "truncate-turns", "split"])
def test_conversations_that_fit_stay(encoder, overlong):
    length = count_tokens(encoder, LONG)
    encoded = encode_conversations([LONG], encoder, ChatRecipe(max_tokens=length, overlong=overlong))
    assert encoded.ids.tolist() == encode_conversations([LONG], encoder, ChatRecipe()).ids.tolist()
    assert (list(encoded.truncated), encoded.dropped) == ([], [])


def test_a_conversation_without_fitting_turns_is_dropped(encoder):
    documents, _, reasons = encode_and_decode(
        encoder, make_conversation("q", "a" * 500), max_tokens=20, overlong="truncate-turns"
    )
    assert not documents
    assert reasons == [reasons[0]]
    assert "no complete trained turn fits" in reasons[0]


def test_error_names_the_conversation(encoder):
    with pytest.raises(InputError, match="conversation 1 has .* where 20 are allowed"):
        rules = ChatRecipe(max_tokens=20, overlong="error")
        encode_conversations([make_conversation("a", "b"), LONG], encoder, rules)


@given(
    turns=st.lists(st.tuples(st.sampled_from(["user", "assistant", "tool"]), st.integers(1, 9)), min_size=1),
    system=st.integers(0, 5),
    limit=st.integers(1, 40),
)
def test_truncation_ends_after_the_last_fitting_assistant_turn(turns, system, limit):
    if system:
        turns = [("system", system), *turns]
    roles, lengths = [role for role, _ in turns], [length for _, length in turns]
    heads = [0, *np.cumsum(lengths)[:-1].tolist()]
    mask = np.repeat([role == "assistant" for role in roles], lengths)
    count = count_fitting_tokens(mask, heads, limit)
    ends = np.cumsum(lengths)
    assistant_ends = [end for role, end in zip(roles, ends, strict=True) if role == "assistant"]
    assert count == max((end for end in assistant_ends if end <= limit), default=0)
