"""Encoding of preferences: pairs stay complete, and answers end their documents."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from batchloom.core.conversation import Conversation, LabelledConversation, PreferencePair
from batchloom.preparation.documents.chat_encoding import ChatEncoder
from batchloom.preparation.documents.conversation_encoder import EncodedConversations, EncodeFault, encode_conversations
from batchloom.preparation.documents.token_encoder import EncodedBatch, add_control_tokens
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


@dataclass(slots=True)
class _PreferenceResults:
    """Results of a batch; each preference has at most one reported reason."""

    altered: Counter[str] = field(default_factory=Counter)
    answers: list[_AnswerTokens] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    sides: list[int] = field(default_factory=list)
    faults: dict[int, str] = field(default_factory=dict)
    dropped: dict[int, str] = field(default_factory=dict)

    def keep(self, number: int, answers: Sequence[_AnswerTokens], sides: Sequence[int]) -> None:
        """Add the documents of a preference."""
        self.answers += answers
        self.sides += sides
        self.numbers += [number] * len(sides)

    def to_batch(self, dtype: np.dtype[np.generic]) -> EncodedBatch:
        """Concatenate the results."""
        lengths = np.array([answer.ids.size for answer in self.answers], np.uint32)
        ids = np.concatenate([np.zeros(0, dtype), *(answer.ids for answer in self.answers)])
        trained = [np.arange(answer.ids.size) >= answer.start for answer in self.answers]
        return EncodedBatch(
            ids.astype(dtype),
            lengths,
            np.concatenate([np.zeros(0, bool), *trained]),
            np.array(self.numbers, np.int64),
            [EncodeFault(*entry) for entry in sorted(self.faults.items())],
            [EncodeFault(*entry) for entry in sorted(self.dropped.items()) if entry[0] not in self.faults],
            np.array(self.sides, np.uint8),
            self.altered,
        )


def encode_preference_pairs(
    pairs: Sequence[PreferencePair], encoder: ChatEncoder, rules: ChatRules, dtype: np.dtype[np.generic]
) -> EncodedBatch:
    """Render, tokenize and mask both sides of pairs of conversations.

    A pair gives two documents, chosen before rejected. It gives none if a side is a fault or dropped, or if
    the two differ before the answers.
    """
    sides = [side for pair in pairs for side in (pair.chosen, pair.rejected)]
    encoded = _encode_sides(sides, encoder, rules, lambda n: (n // 2, f"on its {_PAIR_SIDES[n % 2]} side "))
    out = _PreferenceResults(encoded.altered)
    for fault in encoded.faults:
        out.faults.setdefault(fault.number // 2, f"its {_PAIR_SIDES[fault.number % 2]} side: {fault.reason}")
    for fault in encoded.dropped:
        out.dropped.setdefault(fault.number // 2, fault.reason)
    answers = _split_answers(encoded)
    for number in range(len(pairs)):
        pair_answers = [answers.get(2 * number, []), answers.get(2 * number + 1, [])]
        if number in out.faults or number in out.dropped:
            continue
        if any(len(side_answers) != 1 for side_answers in pair_answers):
            out.dropped[number] = _OVERLONG_PAIR
            continue
        (chosen,), (rejected,) = pair_answers
        if chosen is None or rejected is None:
            out.faults[number] = _FLAGS_PROBLEM
        elif problem := _find_pair_problem(chosen, rejected):
            out.faults[number] = problem
        else:
            out.keep(number, (chosen, rejected), (CHOSEN, REJECTED))
    return out.to_batch(dtype)


def encode_labelled_answers(
    labelled: Sequence[LabelledConversation], encoder: ChatEncoder, rules: ChatRules, dtype: np.dtype[np.generic]
) -> EncodedBatch:
    """Render, tokenize and mask conversations with labelled answers."""
    conversations = [example.conversation for example in labelled]
    encoded = _encode_sides(conversations, encoder, rules, lambda n: (n, ""))
    out = _PreferenceResults(
        encoded.altered, faults=_index_reasons(encoded.faults), dropped=_index_reasons(encoded.dropped)
    )
    for number, answers in _split_answers(encoded).items():
        answer = answers[0]
        if len(answers) != 1 or number in out.dropped:
            # A split conversation loses the parts without an answer, so none of its parts is kept.
            out.dropped[number] = _OVERLONG_PAIR
        elif answer is None:
            out.faults[number] = _FLAGS_PROBLEM
        else:
            out.keep(number, (answer,), (GOOD if labelled[number].label else BAD,))
    return out.to_batch(dtype)


def _index_reasons(faults: Sequence[EncodeFault]) -> dict[int, str]:
    return {fault.number: fault.reason for fault in faults}


def encode_text_pairs(
    pairs: Sequence[PreferencePair], tokenizer: Tokenizer, rules: ChatRules, dtype: np.dtype[np.generic]
) -> EncodedBatch:
    """Tokenize pairs of plain texts, each with its end token.

    The prompt is the common prefix of both texts (a space before the answers belongs to them), and its tokens
    are the common prefix of their tokens, like TRL's ``extract_prompt`` and ``DPOTrainer``.
    """
    out = _PreferenceResults()
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
            out.dropped[number] = f"overlong: {excess}"
            continue
        # The encoded prompt ends with an end token, which the prompt inside a document lacks.
        start = min(_count_common_tokens(prompt[:-1], chosen), _count_common_tokens(prompt[:-1], rejected))
        pair_answers = _AnswerTokens(chosen, start), _AnswerTokens(rejected, start)
        if problem := _find_pair_problem(*pair_answers):
            out.faults[number] = problem
        else:
            out.keep(number, pair_answers, (CHOSEN, REJECTED))
    return out.to_batch(dtype)


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
    """Return the length of the common prefix."""
    shorter_length = min(first_ids.size, second_ids.size)
    differ = np.flatnonzero(first_ids[:shorter_length] != second_ids[:shorter_length])
    return int(differ[0]) if differ.size else shorter_length


def _encode_sides(
    sides: Sequence[Conversation | str], encoder: ChatEncoder, rules: ChatRules, owner: Callable[[int], tuple[int, str]]
) -> EncodedConversations:
    """Encode sides; an overlong error is renumbered to the preference it belongs to."""
    conversations = [side for side in sides if isinstance(side, Conversation)]
    if len(conversations) != len(sides):
        raise AssertionError("encode texts with encode_text_pairs")
    try:
        return encode_conversations(conversations, encoder, rules)
    except OverlongError as error:
        _raise_overlong(error, *owner(error.number))


def _raise_overlong(error: OverlongError, number: int, side_prefix: str) -> NoReturn:
    raise OverlongError(number, f"{side_prefix}{error.reason}") from None


def _split_answers(encoded: EncodedConversations) -> dict[int, list[_AnswerTokens | None]]:
    """Return the documents of each conversation by number.

    A document is None if its trained tokens are not exactly its end.
    """
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
