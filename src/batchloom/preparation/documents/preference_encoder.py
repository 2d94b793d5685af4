"""Encoding of preferences: pairs stay complete, and answers end their documents."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from batchloom.core.conversation import Conversation, LabelledConversation, PreferencePair
from batchloom.preparation.documents.chat_encoding import ChatEncoder
from batchloom.preparation.documents.conversation_encoder import (
    EncodedBatch,
    EncodedBatchBuilder,
    EncodeFault,
    encode_conversations,
)
from batchloom.preparation.documents.token_encoder import add_control_tokens
from batchloom.preparation.settings.chat_rules import ChatRules, OverlongError
from batchloom.store import BAD, CHOSEN, GOOD, REJECTED
from batchloom.tokens import Tokenizer

_PAIR_SIDES = ("chosen", "rejected")
_FLAGS_PROBLEM = (
    "its flags (train, weight) select tokens outside the answer: only the answer of a preference is trained, "
    "remove the flags"
)
_SAME_ANSWERS = "its chosen and rejected answers are the same tokens: it expresses no preference"
_PROMPTS_DIFFER = (
    "the tokens before its chosen answer differ from those before its rejected one: give both the same prompt, or "
    "use a template that writes the prompt independently of the answer"
)
_OVERLONG_PAIR = "overlong: its parts would not answer the same prompt"


@dataclass(frozen=True, slots=True)
class _AnswerTokens:
    """Document, and the token index from which it is trained."""

    ids: NDArray[np.generic]
    start: int


def _build_batch(
    out: EncodedBatchBuilder, faults: dict[int, str], dropped: dict[int, str], dtype: np.dtype[np.generic]
) -> EncodedBatch:
    """Concatenate the results; each preference has at most one reported reason."""
    out.faults = [EncodeFault(*entry) for entry in faults.items()]
    out.dropped = [EncodeFault(*entry) for entry in dropped.items() if entry[0] not in faults]
    return replace(out.build(dtype), sides=np.array(out.sides, np.uint8))


def _add_answer(out: EncodedBatchBuilder, number: int, answer: _AnswerTokens, side: int) -> None:
    out.add(number, answer.ids, np.arange(answer.ids.size) >= answer.start, side=side)


def encode_preference_pairs(
    pairs: Sequence[PreferencePair], encoder: ChatEncoder, rules: ChatRules, dtype: np.dtype[np.generic]
) -> EncodedBatch:
    """Render, tokenize and mask both sides of pairs of conversations.

    A pair gives two documents, chosen before rejected. It gives none if a side is a fault or dropped, or if
    the two differ before the answers.
    """
    sides = [side for pair in pairs for side in (pair.chosen, pair.rejected)]
    if not all(isinstance(side, Conversation) for side in sides):
        raise AssertionError("encode texts with encode_text_pairs")
    try:
        encoded = encode_conversations(cast("list[Conversation]", sides), encoder, rules)
    except OverlongError as error:
        number, side = divmod(error.number, 2)
        raise OverlongError(number, f"on its {_PAIR_SIDES[side]} side {error.reason}") from None
    out, faults, dropped = EncodedBatchBuilder(altered=encoded.altered), dict[int, str](), dict[int, str]()
    for fault in encoded.faults:
        faults.setdefault(fault.number // 2, f"its {_PAIR_SIDES[fault.number % 2]} side: {fault.reason}")
    for fault in encoded.dropped:
        dropped.setdefault(fault.number // 2, fault.reason)
    answers = _split_answers(encoded)
    for number in range(len(pairs)):
        pair_answers = [answers.get(2 * number, []), answers.get(2 * number + 1, [])]
        if number in faults or number in dropped:
            continue
        if any(len(side_answers) != 1 for side_answers in pair_answers):
            dropped[number] = _OVERLONG_PAIR
            continue
        (chosen,), (rejected,) = pair_answers
        if chosen is None or rejected is None:
            faults[number] = _FLAGS_PROBLEM
        elif problem := _find_pair_problem(chosen, rejected):
            faults[number] = problem
        else:
            _add_answer(out, number, chosen, CHOSEN)
            _add_answer(out, number, rejected, REJECTED)
    return _build_batch(out, faults, dropped, dtype)


def encode_labelled_answers(
    labelled: Sequence[LabelledConversation], encoder: ChatEncoder, rules: ChatRules, dtype: np.dtype[np.generic]
) -> EncodedBatch:
    """Render, tokenize and mask conversations with labelled answers."""
    conversations = [example.conversation for example in labelled]
    encoded = encode_conversations(conversations, encoder, rules)
    faults, dropped = ({fault.number: fault.reason for fault in some} for some in (encoded.faults, encoded.dropped))
    out = EncodedBatchBuilder(altered=encoded.altered)
    for number, answers in _split_answers(encoded).items():
        answer = answers[0]
        if len(answers) != 1 or number in dropped:
            # A split conversation loses the parts without an answer, so none of its parts is kept.
            dropped[number] = _OVERLONG_PAIR
        elif answer is None:
            faults[number] = _FLAGS_PROBLEM
        else:
            _add_answer(out, number, answer, GOOD if labelled[number].label else BAD)
    return _build_batch(out, faults, dropped, dtype)


def encode_text_pairs(
    pairs: Sequence[PreferencePair], tokenizer: Tokenizer, rules: ChatRules, dtype: np.dtype[np.generic]
) -> EncodedBatch:
    """Tokenize pairs of plain texts, each with its end token.

    The prompt is the common prefix of both texts (a space before the answers belongs to them), and its tokens
    are the common prefix of their tokens, like TRL's ``extract_prompt`` and ``DPOTrainer``.
    """
    out, faults, dropped = EncodedBatchBuilder(), dict[int, str](), dict[int, str]()
    sides = [(str(pair.chosen), str(pair.rejected)) for pair in pairs]
    plain, bounds = tokenizer.encode_batch([t for c, r in sides for t in (_find_common_prompt(c, r), c, r)])
    ids = add_control_tokens(plain, bounds, tokenizer, np.dtype(np.uint32))
    lengths = np.diff(bounds) + (1 if tokenizer.bos_id is None else 2)
    documents = np.split(ids, np.cumsum(lengths)[:-1])
    for number in range(len(pairs)):
        prompt, chosen, rejected = documents[3 * number : 3 * number + 3]
        if rules.max_tokens is not None and max(chosen.size, rejected.size) > rules.max_tokens:
            excess = f"{max(chosen.size, rejected.size):,} tokens where {rules.max_tokens:,} are allowed"
            if rules.overlong == "error":
                raise OverlongError(number, f"has {excess}: allow more, or drop it (--overlong drop)")
            dropped[number] = f"overlong: {excess}"
            continue
        # The encoded prompt ends with an end token, which the prompt inside a document lacks.
        start = min(_count_common_tokens(prompt[:-1], chosen), _count_common_tokens(prompt[:-1], rejected))
        pair_answers = _AnswerTokens(chosen, start), _AnswerTokens(rejected, start)
        if problem := _find_pair_problem(*pair_answers):
            faults[number] = problem
        else:
            _add_answer(out, number, pair_answers[0], CHOSEN)
            _add_answer(out, number, pair_answers[1], REJECTED)
    return _build_batch(out, faults, dropped, dtype)


def _find_common_prompt(chosen: str, rejected: str) -> str:
    """Return the common prefix of two texts, leaving each at least one character."""
    low, high = 0, min(len(chosen), len(rejected)) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if chosen[low:middle] == rejected[low:middle]:
            low = middle
        else:
            high = middle - 1
    return chosen[: low - 1] if low and chosen[low - 1] == " " else chosen[:low]


def _count_common_tokens(first_ids: NDArray[np.generic], second_ids: NDArray[np.generic]) -> int:
    shorter_length = min(first_ids.size, second_ids.size)
    differ = np.flatnonzero(first_ids[:shorter_length] != second_ids[:shorter_length])
    return int(differ[0]) if differ.size else shorter_length


def _split_answers(encoded: EncodedBatch) -> dict[int, list[_AnswerTokens | None]]:
    """Return the documents of each conversation by number.

    A document is None if its trained tokens are not exactly its end.
    """
    if encoded.numbers is None or encoded.mask is None:
        raise AssertionError("encoded conversations have numbers and a mask")
    answers: dict[int, list[_AnswerTokens | None]] = {}
    stops = np.cumsum(encoded.lengths, dtype=np.int64).tolist()
    for number, begin, stop in zip(encoded.numbers.tolist(), [0, *stops[:-1]], stops, strict=False):
        mask = encoded.mask[begin:stop]
        start = mask.size - int(np.count_nonzero(mask))
        answer = _AnswerTokens(encoded.ids[begin:stop], start) if mask[start:].all() else None
        answers.setdefault(number, []).append(answer)
    return answers


def _find_pair_problem(chosen: _AnswerTokens, rejected: _AnswerTokens) -> str:
    """Describe why two documents are no pair, else ""."""
    start = chosen.start
    if start != rejected.start or not np.array_equal(chosen.ids[:start], rejected.ids[:start]):
        return _PROMPTS_DIFFER
    return _SAME_ANSWERS if np.array_equal(chosen.ids, rejected.ids) else ""
