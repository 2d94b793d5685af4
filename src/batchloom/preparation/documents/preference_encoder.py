"""Preferences to tokens: both answers of a pair or neither, and the answer at the end of its document."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from batchloom.core.conversation import Conversation, LabelledConversation, PreferencePair
from batchloom.preparation.documents.chat_encoding import ChatEncoder
from batchloom.preparation.documents.conversation_encoder import (
    EncodedConversations,
    EncodeFault,
    encode_conversations,
)
from batchloom.preparation.documents.document_arrays import add_control_tokens
from batchloom.preparation.documents.token_encoder import EncodedBatch
from batchloom.preparation.settings import ChatRules, OverlongError
from batchloom.store import BAD, CHOSEN, GOOD, REJECTED
from batchloom.tokens import Tokenizer

_PAIR_SIDES = ("chosen", "rejected")
_FLAGS_PROBLEM = (
    "its flags (train, weight) ask for other tokens than the answer: of a preference the answer alone is trained, "
    "remove them"
)
_SAME_ANSWERS = (
    "its chosen and rejected answers are the same tokens: there is no preference in them"
)
_PROMPTS_DIFFER = (
    "the tokens before its chosen answer are not those before its rejected one: give both the same prompt, or use a "
    "template that writes it without looking at the answer"
)
_OVERLONG_PAIR = "overlong: its pieces would be no answers to one prompt"


@dataclass(frozen=True, slots=True)
class _AnswerTokens:
    """A document, and where the answer begins that is trained to its end."""

    ids: NDArray[np.generic]
    start: int


@dataclass(slots=True)
class _PreferenceResults:
    """What came of a batch, a preference at a time; at most one reason is told of each."""

    altered: Counter[str] = field(default_factory=Counter)
    kept: list[_AnswerTokens] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    sides: list[int] = field(default_factory=list)
    faults: dict[int, str] = field(default_factory=dict)
    dropped: dict[int, str] = field(default_factory=dict)

    def keep(self, number: int, answers: Sequence[_AnswerTokens], sides: Sequence[int]) -> None:
        """Keep the documents of a preference."""
        self.kept += answers
        self.sides += sides
        self.numbers += [number] * len(sides)

    def encoded(self, dtype: np.dtype[np.generic]) -> EncodedBatch:
        """All of it, flat."""
        lengths = np.array([answer.ids.size for answer in self.kept], np.uint32)
        ids = np.concatenate([np.zeros(0, dtype), *(answer.ids for answer in self.kept)])
        trained = [np.arange(answer.ids.size) >= answer.start for answer in self.kept]
        return EncodedBatch(
            ids.astype(dtype),
            lengths,
            np.concatenate([np.zeros(0, bool), *trained]),
            np.array(self.numbers, np.int64),
            [EncodeFault(*one) for one in sorted(self.faults.items())],
            [
                EncodeFault(*one)
                for one in sorted(self.dropped.items())
                if one[0] not in self.faults
            ],
            np.array(self.sides, np.uint8),
            self.altered,
        )


def encode_preference_pairs(
    pairs: Sequence[PreferencePair],
    encoder: ChatEncoder,
    rules: ChatRules,
    dtype: np.dtype[np.generic],
) -> EncodedBatch:
    """Render, tokenize and mask both sides of pairs of conversations.

    A pair gives two documents, the chosen before the rejected, or none: where a side is a fault or
    left out, or where the two do not share their tokens up to the answers.

    Raises:
        TemplateError: the template is to be stopped.
        OverlongError: a side is too long, and ``overlong`` is ``error``.
    """
    sides = [side for pair in pairs for side in (pair.chosen, pair.rejected)]
    made = _encode_sides(
        sides, encoder, rules, lambda n: (n // 2, f"on its {_PAIR_SIDES[n % 2]} side ")
    )
    out = _PreferenceResults(made.altered)
    for left in made.faults:
        out.faults.setdefault(
            left.number // 2, f"its {_PAIR_SIDES[left.number % 2]} side: {left.reason}"
        )
    for left in made.dropped:
        out.dropped.setdefault(left.number // 2, left.reason)
    answers = _split_answers(made)
    for number in range(len(pairs)):
        both = [answers.get(2 * number, []), answers.get(2 * number + 1, [])]
        if number in out.faults or number in out.dropped:
            continue
        if any(len(pieces) != 1 for pieces in both):
            out.dropped[number] = _OVERLONG_PAIR
            continue
        (chosen,), (rejected,) = both
        if chosen is None or rejected is None:
            out.faults[number] = _FLAGS_PROBLEM
        elif problem := _pair_problem(chosen, rejected):
            out.faults[number] = problem
        else:
            out.keep(number, (chosen, rejected), (CHOSEN, REJECTED))
    return out.encoded(dtype)


def encode_labelled_answers(
    labelled: Sequence[LabelledConversation],
    encoder: ChatEncoder,
    rules: ChatRules,
    dtype: np.dtype[np.generic],
) -> EncodedBatch:
    """Render, tokenize and mask conversations whose answers are labelled; raises as :func:`encode_preference_pairs`."""
    talks = [one.conversation for one in labelled]
    made = _encode_sides(talks, encoder, rules, lambda n: (n, ""))
    out = _PreferenceResults(
        made.altered, faults=_index_reasons(made.faults), dropped=_index_reasons(made.dropped)
    )
    for number, answers in _split_answers(made).items():
        answer = answers[0]
        if len(answers) != 1 or number in out.dropped:
            # Of a conversation that was cut a piece without an answer is left out, and none is kept.
            out.dropped[number] = _OVERLONG_PAIR
        elif answer is None:
            out.faults[number] = _FLAGS_PROBLEM
        else:
            out.keep(number, (answer,), (GOOD if labelled[number].label else BAD,))
    return out.encoded(dtype)


def _index_reasons(left: Sequence[EncodeFault]) -> dict[int, str]:
    return {one.number: one.reason for one in left}


def encode_text_pairs(
    pairs: Sequence[PreferencePair],
    tokenizer: Tokenizer,
    rules: ChatRules,
    dtype: np.dtype[np.generic],
) -> EncodedBatch:
    """Tokenize pairs of plain texts, each with its end token.

    The prompt is the text that both begin with (a space before the answers is theirs), and of its
    tokens those that both begin with, as TRL's ``extract_prompt`` and ``DPOTrainer`` have it.

    Raises:
        OverlongError: a text is too long, and ``overlong`` is ``error``.
    """
    out = _PreferenceResults()
    sides = [(str(pair.chosen), str(pair.rejected)) for pair in pairs]
    plain, bounds = tokenizer.encode_batch(
        [t for c, r in sides for t in (_common_prompt(c, r), c, r)]
    )
    ids = add_control_tokens(plain, bounds, tokenizer, np.dtype(np.uint32))
    lengths = np.diff(bounds) + (1 if tokenizer.bos_id is None else 2)
    documents = np.split(ids, np.cumsum(lengths)[:-1])
    for number in range(len(pairs)):
        prompt, chosen, rejected = documents[3 * number : 3 * number + 3]
        if rules.max_tokens is not None and max(chosen.size, rejected.size) > rules.max_tokens:
            long = (
                f"{max(chosen.size, rejected.size):,} tokens where {rules.max_tokens:,} are allowed"
            )
            if rules.overlong == "error":
                raise OverlongError(number, f"has {long}: allow more, or drop it (--overlong drop)")
            out.dropped[number] = f"overlong: {long}"
            continue
        # Its last token is the end token, which no prompt has.
        start = min(
            _count_common_tokens(prompt[:-1], chosen), _count_common_tokens(prompt[:-1], rejected)
        )
        both = _AnswerTokens(chosen, start), _AnswerTokens(rejected, start)
        if problem := _pair_problem(*both):
            out.faults[number] = problem
        else:
            out.keep(number, both, (CHOSEN, REJECTED))
    return out.encoded(dtype)


def _common_prompt(chosen: str, rejected: str) -> str:
    """The prompt of two texts: what both begin with, leaving each at least its last character."""
    low, high = 0, min(len(chosen), len(rejected)) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if chosen[low:middle] == rejected[low:middle]:
            low = middle
        else:
            high = middle - 1
    return chosen[: low - 1] if low and chosen[low - 1] == " " else chosen[:low]


def _count_common_tokens(one: NDArray[np.generic], other: NDArray[np.generic]) -> int:
    """How many tokens both begin with."""
    most = min(one.size, other.size)
    differ = np.flatnonzero(one[:most] != other[:most])
    return int(differ[0]) if differ.size else most


def _encode_sides(
    sides: Sequence[Conversation | str],
    encoder: ChatEncoder,
    rules: ChatRules,
    owner: Callable[[int], tuple[int, str]],
) -> EncodedConversations:
    """Encode sides; a conversation that is too long is told as the preference it is of."""
    talks = [side for side in sides if isinstance(side, Conversation)]
    if len(talks) != len(sides):
        raise AssertionError("texts are encoded with encode_text_pairs")
    try:
        return encode_conversations(talks, encoder, rules)
    except OverlongError as error:
        _raise_overlong(error, *owner(error.number))


def _raise_overlong(error: OverlongError, number: int, where: str) -> NoReturn:
    raise OverlongError(number, f"{where}{error.reason}") from None


def _split_answers(made: EncodedConversations) -> dict[int, list[_AnswerTokens | None]]:
    """The documents of each conversation; None for one whose trained tokens are not its end."""
    found: dict[int, list[_AnswerTokens | None]] = {}
    stops = np.cumsum(made.lengths, dtype=np.int64).tolist()
    for number, begin, stop in zip(made.numbers.tolist(), [0, *stops[:-1]], stops, strict=False):
        mask = made.mask[begin:stop]
        start = mask.size - int(np.count_nonzero(mask))
        answer = _AnswerTokens(made.ids[begin:stop], start) if mask[start:].all() else None
        found.setdefault(number, []).append(answer)
    return found


def _pair_problem(chosen: _AnswerTokens, rejected: _AnswerTokens) -> str:
    """Why two documents are no pair, empty where they are one."""
    start = chosen.start
    if start != rejected.start or not np.array_equal(chosen.ids[:start], rejected.ids[:start]):
        return _PROMPTS_DIFFER
    return _SAME_ANSWERS if np.array_equal(chosen.ids, rejected.ids) else ""
