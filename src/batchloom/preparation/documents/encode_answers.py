"""Encoding of preferences, labelled answers and prompts.

Preference pairs stay complete, and answers end their documents.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from batchloom.chat import RenderError
from batchloom.chat.templates import OMITTED_REASONING
from batchloom.core.document import CarryingPrompt, Conversation, LabelledConversation, PreferencePair
from batchloom.core.loss_weights import LossFlags
from batchloom.preparation.documents.encode_chat import (
    ChatEncoder,
    collect_conversations,
    count_common_tokens,
    prepare_conversation,
)
from batchloom.preparation.documents.encode_text import add_control_tokens
from batchloom.preparation.documents.encoded_batch import (
    EncodedBatch,
    EncodedBatchBuilder,
    EncodeFault,
    OverlongError,
    describe_excess,
)
from batchloom.preparation.documents.masked_tokens import RenderedText, check_surrogates, mask_texts
from batchloom.preparation.documents.media_tokens import PlacedMedium, is_medium_cut, select_media
from batchloom.preparation.settings.recipe import TRUNCATIONS, ChatRecipe, OverlongPolicy
from batchloom.store import BAD, CHOSEN, GOOD, PROMPT, REJECTED
from batchloom.tokens import Tokenizer

_PAIR_SIDES = ("chosen", "rejected")
_FLAGS_PROBLEM = (
    "its flags (train, weight) select tokens outside the answer, or weight them: only the answer of a preference is "
    "trained, with weight 1; remove the flags"
)
_SAME_ANSWERS = "its chosen and rejected answers are the same tokens: it expresses no preference"
_PROMPTS_DIFFER = (
    "the tokens before its chosen answer differ from those before its rejected one: give both the same prompt, or "
    "use a template that writes the prompt independently of the answer"
)
_OVERLONG_PAIR = "overlong: its parts would not answer the same prompt"
_MASKED_PAIR = (
    "a preference is trained from the beginning of its answer on, so that its reasoning cannot be masked: keep or drop "
    "it (--reasoning)"
)
_SPLIT_PAIR = (
    "its completion has several answers, and --reasoning split makes a sample of each: write them as records of their "
    "own, or choose another policy"
)


@dataclass(frozen=True, slots=True)
class _AnswerTokens:
    """Document, the token index from which it is trained, and its media."""

    ids: NDArray[np.generic]
    start: int
    media: Sequence[PlacedMedium] = ()


def encode_preference_pairs(
    pairs: Sequence[PreferencePair[Conversation]], encoder: ChatEncoder, chat: ChatRecipe, dtype: np.dtype[np.generic]
) -> EncodedBatch:
    """Render, tokenize and mask both sides of pairs of conversations.

    A pair gives two documents, chosen before rejected. It gives none if a side is a fault or dropped, or if
    the two differ before the answers.
    """
    sides = [side for pair in pairs for side in (pair.chosen, pair.rejected)]
    try:
        encoded = collect_conversations(sides, encoder, _disable_truncation(chat))
    except OverlongError as error:
        number, side = divmod(error.number, 2)
        raise OverlongError(number, f"on its {_PAIR_SIDES[side]} side {error.reason}") from None
    altered = {change: sorted({number // 2 for number in numbers}) for change, numbers in encoded.altered.items()}
    out = EncodedBatchBuilder(altered=altered)
    faults = dict[int, str]()
    dropped = dict[int, str]()
    for fault in sorted(encoded.faults):
        faults.setdefault(fault.number // 2, f"its {_PAIR_SIDES[fault.number % 2]} side: {fault.reason}")
    for fault in sorted(encoded.dropped):
        dropped.setdefault(fault.number // 2, fault.reason)
    answers = _list_documents(encoded)
    for number in range(len(pairs)):
        pair_answers = [answers.get(2 * number, []), answers.get(2 * number + 1, [])]
        if number in faults or number in dropped:
            continue
        if any(len(side_answers) != 1 for side_answers in pair_answers):
            dropped[number] = _SPLIT_PAIR if chat.reasoning == "split" else _OVERLONG_PAIR
            continue
        (chosen,), (rejected,) = pair_answers
        if encoder.joins_texts and chosen is not None and rejected is not None:
            # A token of both the prompt and one answer does not belong to the common prompt.
            start = min(chosen.start, rejected.start)
            chosen = replace(chosen, start=start)
            rejected = replace(rejected, start=start)
        if chosen is None or rejected is None:
            faults[number] = _MASKED_PAIR if chat.reasoning == "mask" else _FLAGS_PROBLEM
        elif problem := _find_pair_problem(chosen, rejected):
            faults[number] = problem
        elif reason := _add_answers(out, number, (chosen, rejected), (CHOSEN, REJECTED), chat):
            dropped[number] = reason
    return _build_batch(out, faults, dropped, dtype)


def encode_text_pairs(
    pairs: Sequence[PreferencePair[str]], tokenizer: Tokenizer, chat: ChatRecipe, dtype: np.dtype[np.generic]
) -> EncodedBatch:
    """Tokenize pairs of plain texts, each with its end token.

    The prompt is the common prefix of both texts (a space before the answers belongs to them), and its tokens
    are the common prefix of their tokens, like TRL's ``extract_prompt`` and ``DPOTrainer``.
    """
    out = EncodedBatchBuilder()
    faults = dict[int, str]()
    dropped = dict[int, str]()
    texts = [
        text for pair in pairs for text in (_find_common_prompt(pair.chosen, pair.rejected), pair.chosen, pair.rejected)
    ]
    plain, bounds = tokenizer.encode_batch(texts)
    ids = add_control_tokens(plain, bounds, tokenizer, np.dtype(np.uint32))
    lengths = np.diff(bounds) + (1 if tokenizer.bos_id is None else 2)
    documents = np.split(ids, np.cumsum(lengths)[:-1])
    for number in range(len(pairs)):
        prompt, chosen, rejected = documents[3 * number : 3 * number + 3]
        is_cut = chat.overlong in TRUNCATIONS
        if not is_cut and (excess := describe_excess(max(chosen.size, rejected.size), number, chat)):
            dropped[number] = f"overlong: {excess}"
            continue
        # The encoded prompt ends with an end token, which the prompt inside a document lacks.
        start = min(count_common_tokens(prompt[:-1], chosen), count_common_tokens(prompt[:-1], rejected))
        pair_answers = _AnswerTokens(chosen, start), _AnswerTokens(rejected, start)
        if problem := _find_pair_problem(*pair_answers):
            faults[number] = problem
        elif reason := _add_answers(out, number, pair_answers, (CHOSEN, REJECTED), chat):
            dropped[number] = reason
    return _build_batch(out, faults, dropped, dtype)


def encode_labelled_answers(
    labelled: Sequence[LabelledConversation], encoder: ChatEncoder, chat: ChatRecipe, dtype: np.dtype[np.generic]
) -> EncodedBatch:
    """Render, tokenize and mask conversations with labelled answers."""
    conversations = [example.conversation for example in labelled]
    encoded = collect_conversations(conversations, encoder, _disable_truncation(chat))
    faults = {fault.number: fault.reason for fault in sorted(encoded.faults)}
    dropped = {fault.number: fault.reason for fault in sorted(encoded.dropped)}
    out = EncodedBatchBuilder(altered=encoded.altered)
    for number, answers in _list_documents(encoded).items():
        answer = answers[0]
        if len(answers) != 1 or number in dropped:
            # A split conversation loses the parts without an answer, so none of its parts is kept.
            dropped[number] = _SPLIT_PAIR if chat.reasoning == "split" else _OVERLONG_PAIR
        elif answer is None:
            faults[number] = _MASKED_PAIR if chat.reasoning == "mask" else _FLAGS_PROBLEM
        elif reason := _add_answers(out, number, (answer,), (GOOD if labelled[number].label else BAD,), chat):
            dropped[number] = reason
    return _build_batch(out, faults, dropped, dtype)


def encode_prompts(
    prompts: Sequence[CarryingPrompt], encoder: ChatEncoder, chat: ChatRecipe, dtype: np.dtype[np.generic]
) -> EncodedBatch:
    """Render and tokenize prompts up to the beginning of the answer.

    No token is trained. A prompt is never cut: one that is too long is dropped.
    """
    out = EncodedBatchBuilder()
    numbers: list[int] = []
    texts: list[RenderedText] = []
    for number, prompt in enumerate(prompts):
        try:
            rendered = encoder.renderer.render(encoder.write_tools(prepare_conversation(prompt.conversation, chat)))
            check_surrogates(rendered.text)
        except RenderError as error:
            out.refuse(number, str(error))
            continue
        # No token of a prompt is trained, so its reasoning needs no remedy.
        out.note_altered(number, [change for change in rendered.altered if change != OMITTED_REASONING])
        texts.append(RenderedText(rendered.text, rendered.control, (), lenient=True))
        numbers.append(number)
    results = mask_texts(encoder, texts) if texts else []
    bos_id = encoder.tokenizer.bos_id if encoder.joins_texts else None
    bos = np.array([] if bos_id is None else [bos_id], np.uint32)
    for number, tokens in zip(numbers, results, strict=True):
        if isinstance(tokens, str):
            out.refuse(number, tokens)
            continue
        ids = np.concatenate([bos, tokens.ids])
        if excess := describe_excess(ids.size, number, chat):
            out.drop(number, f"overlong: {excess}")
        else:
            out.add(number, ids, LossFlags.none_trained(ids.size), side=PROMPT, fields=prompts[number].fields)
    return out.build(dtype)


def _build_batch(
    out: EncodedBatchBuilder, faults: dict[int, str], dropped: dict[int, str], dtype: np.dtype[np.generic]
) -> EncodedBatch:
    """Concatenate the results; each preference has at most one reported reason."""
    out.faults = [EncodeFault(*entry) for entry in faults.items()]
    out.dropped = [EncodeFault(*entry) for entry in dropped.items() if entry[0] not in faults]
    return out.build(dtype)


def _disable_truncation(chat: ChatRecipe) -> ChatRecipe:
    """Return the settings without truncation.

    Preferences are cut later, prompt and answers together.
    """
    return replace(chat, max_tokens=None, overlong="drop") if chat.overlong in TRUNCATIONS else chat


def _add_answers(
    out: EncodedBatchBuilder,
    number: int,
    answers: tuple[_AnswerTokens, ...],
    sides: Sequence[int],
    chat: ChatRecipe,
) -> str:
    """Add the answers to one prompt, cut if necessary; return why they cannot be."""
    if chat.max_tokens is not None and max(answer.ids.size for answer in answers) > chat.max_tokens:
        cut_answers = _truncate_answers(answers, chat.max_tokens, chat.overlong)
        if isinstance(cut_answers, str):
            return cut_answers
        answers = cut_answers
        out.truncated.append(number)
    for answer, side in zip(answers, sides, strict=True):
        _add_answer(out, number, answer, side)
    return ""


def _truncate_answers(
    answers: tuple[_AnswerTokens, ...], limit: int, policy: OverlongPolicy
) -> tuple[_AnswerTokens, ...] | str:
    """Cut answers to one prompt to ``limit`` tokens; return why if that is impossible.

    The prompt stays the same for all: ``truncate`` cuts the ends of the answers, ``truncate-left`` the beginning of
    the prompt.
    """
    excess = max(answer.ids.size for answer in answers) - limit
    prompt_tokens = answers[0].start
    allowed = f"{excess + limit:,} tokens where {limit:,} are allowed"
    if policy == "truncate-left":
        if excess >= prompt_tokens:
            return f"overlong: {allowed}, and its answer leaves no room for the prompt"
        edges = excess, excess + limit
    else:
        if prompt_tokens >= limit:
            return f"overlong: {allowed}, and its prompt leaves no room for the answer"
        edges = 0, limit
    if any(is_medium_cut(answer.media, *edges) for answer in answers):
        return f"overlong: {allowed}, and a medium is never cut"
    cut_answers = tuple(_cut_answer(answer, *edges) for answer in answers)
    if len(answers) > 1 and all(np.array_equal(answer.ids, cut_answers[0].ids) for answer in cut_answers):
        return f"overlong: {allowed}, and its answers are equal up to there"
    return cut_answers


def _cut_answer(answer: _AnswerTokens, start: int, stop: int) -> _AnswerTokens:
    """Return a token range of an answer with the media inside."""
    return _AnswerTokens(answer.ids[start:stop], answer.start - start, select_media(answer.media, start, stop))


def _add_answer(out: EncodedBatchBuilder, number: int, answer: _AnswerTokens, side: int) -> None:
    flags = LossFlags.from_codes(np.arange(answer.ids.size) >= answer.start)
    out.add(number, answer.ids, flags, answer.media, side=side)


def _list_documents(encoded: EncodedBatchBuilder) -> dict[int, list[_AnswerTokens | None]]:
    """Return the documents of each conversation by number.

    A document is None if its trained tokens are not exactly its end.
    """
    answers: dict[int, list[_AnswerTokens | None]] = {}
    documents = zip(encoded.numbers, encoded.ids, encoded.flags, encoded.media, strict=True)
    for number, ids, flags, media in documents:
        start = ids.size - flags.count_trained()
        # Code 1 is that of a trained token without another weight.
        is_answer = bool((flags.codes[start:] == 1).all())
        answers.setdefault(number, []).append(_AnswerTokens(ids, start, media) if is_answer else None)
    return answers


def _find_pair_problem(chosen: _AnswerTokens, rejected: _AnswerTokens) -> str:
    """Describe why two documents are no pair, else ""."""
    start = chosen.start
    if start != rejected.start or not np.array_equal(chosen.ids[:start], rejected.ids[:start]):
        return _PROMPTS_DIFFER
    return _SAME_ANSWERS if np.array_equal(chosen.ids, rejected.ids) else ""


def _find_common_prompt(chosen: str, rejected: str) -> str:
    """Return the common prefix of two texts, leaving each at least one character."""
    low = 0
    high = min(len(chosen), len(rejected)) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if chosen[low:middle] == rejected[low:middle]:
            low = middle
        else:
            high = middle - 1
    return chosen[: low - 1] if low and chosen[low - 1] == " " else chosen[:low]
