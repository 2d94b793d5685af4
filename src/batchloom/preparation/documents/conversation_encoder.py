"""Encoding of conversations and preferences to token ids and verified masks.

Preference pairs stay complete, and answers end their documents.
"""

import itertools
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self, cast

import numpy as np
from numpy.typing import NDArray

from batchloom.chat import RenderError
from batchloom.chat.templates import (
    OMITTED_REASONING,
    ConversationText,
    NothingTrainedError,
    compute_trained_spans,
    compute_weighted_spans,
    convert_arguments,
    drop_reasoning,
    find_thoughts,
    split_answers,
    subtract_spans,
)
from batchloom.core.document import CarryingPrompt, Conversation, LabelledConversation, PreferencePair
from batchloom.core.errors import InputError
from batchloom.core.loss_weights import LossFlags
from batchloom.preparation.documents.chat_encoding import (
    ChatEncoder,
    MaskedTokens,
    MediaText,
    PlacedMedium,
    RenderedText,
    expand_media_tokens,
    mask_texts,
    weight_texts,
    write_expansions,
)
from batchloom.preparation.settings.recipe import TRUNCATIONS, ChatRecipe, OverlongPolicy
from batchloom.store import BAD, CHOSEN, GOOD, PROMPT, REJECTED
from batchloom.tokens import Tokenizer


class OverlongError(InputError):
    """A conversation has more tokens than allowed, and the policy is ``error``.

    Attributes:
        number: index of the conversation in its batch.
        reason: its length, and the remedy.
    """

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(f"conversation {number} {reason}")
        self.number, self.reason = number, reason

    def __reduce__(self) -> tuple[type[Self], tuple[int, str]]:
        return type(self), (self.number, self.reason)


class ConversationSegment(NamedTuple):
    """Token range of a conversation that becomes a document."""

    start: int
    stop: int
    trains: bool  # Some of its tokens are trained


def count_fitting_tokens(mask: NDArray[np.bool_], heads: Sequence[int], limit: int) -> int:
    """Count the tokens that fit after turns are dropped from a conversation's end.

    Every remaining turn still follows the turn it answers, and the last one is trained. ``heads`` is the first token
    of each turn. Returns 0 if no complete turns with trained tokens fit.
    """
    trained = np.concatenate([[0], np.cumsum(mask, dtype=np.int64)])
    edges = [*heads[1:], mask.size]
    ends = [stop for start, stop in zip(heads, edges, strict=True) if trained[stop] > trained[start]]
    return max((stop for stop in ends if stop <= limit), default=0)


def split_at_limit(mask: NDArray[np.bool_], limit: int) -> list[ConversationSegment]:
    """Split into consecutive segments of ``limit`` tokens; the last may be shorter.

    The first token of a segment is not trained, because no token predicts it.
    """
    return [
        ConversationSegment(start, min(start + limit, mask.size), bool(mask[start + 1 : start + limit].any()))
        for start in range(0, mask.size, limit)
    ]


def find_kept_range(tokens: int, limit: int, policy: OverlongPolicy) -> tuple[int, int]:
    """Return the token range that remains of a document longer than ``limit``."""
    return (tokens - limit, tokens) if policy == "truncate-left" else (0, limit)


class EncodeFault(NamedTuple):
    """Conversation, or a part of one, that gives no document."""

    number: int  # Index of the conversation in the batch
    reason: str
    snippet: str = ""  # Beginning of the content, to help a person find it

    @property
    def rule(self) -> str:
        """The rule that dropped a document: the reason without the numbers."""
        return self.reason.partition(":")[0]


# Tokens of all documents, concatenated, and the length of each.
PlainTokens = tuple[NDArray[np.generic], NDArray[np.uint32]]


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    """Encoded batch of documents.

    Attributes:
        ids: token ids of all documents, concatenated [tokens].
        lengths: tokens of each document [documents].
        flags: loss flags of the tokens.
        numbers: index of each document in the input [documents], repeated if one was split; None if all are
            included.
        faults: documents that cannot be used.
        dropped: documents dropped by rule: nothing to train, or overlong.
        sides: side of each document, as in ``.pairs``; None without an objective.
        altered: index of each conversation that the template changed, by kind of change.
        added: number of control tokens added before and after the text of each document.
        moved: number of texts changed by fill-in-the-middle.
        plain: tokens and lengths of the texts before fill-in-the-middle, if documents are compared.
        media: media of each document; empty if none has any.
        fields: JSON of the columns that each document carries; empty if none carries any.
        truncated: index of each input whose documents were cut by ``truncate`` or ``truncate-left``.
    """

    ids: NDArray[np.generic]
    lengths: NDArray[np.uint32]
    flags: LossFlags
    numbers: NDArray[np.int64] | None = None
    faults: list[EncodeFault] = field(default_factory=list)
    dropped: list[EncodeFault] = field(default_factory=list)
    sides: NDArray[np.uint8] | None = None
    altered: dict[str, list[int]] = field(default_factory=dict)
    added: tuple[int, int] = (0, 0)
    moved: int = 0
    plain: PlainTokens | None = None
    media: Sequence[Sequence[PlacedMedium]] = ()
    fields: Sequence[bytes] = ()
    truncated: Sequence[int] = ()


@dataclass(slots=True)
class EncodedBatchBuilder:
    """Collector of the documents, faults and drops of a batch."""

    ids: list[NDArray[np.generic]] = field(default_factory=list)
    flags: list[LossFlags] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    sides: list[int] = field(default_factory=list)
    faults: list[EncodeFault] = field(default_factory=list)
    dropped: list[EncodeFault] = field(default_factory=list)
    altered: dict[str, list[int]] = field(default_factory=dict)
    media: list[list[PlacedMedium]] = field(default_factory=list)
    fields: list[bytes] = field(default_factory=list)
    truncated: list[int] = field(default_factory=list)

    def add(
        self,
        number: int,
        ids: NDArray[np.generic],
        flags: LossFlags,
        media: Sequence[PlacedMedium] = (),
        side: int | None = None,
        fields: bytes | None = None,
    ) -> None:
        """Add a document of input ``number``."""
        self.ids.append(ids)
        self.flags.append(flags)
        self.numbers.append(number)
        self.media.append(list(media))
        if side is not None:
            self.sides.append(side)
        if fields is not None:
            self.fields.append(fields)

    def note_altered(self, number: int, changes: Iterable[str]) -> None:
        """Note the changes that the template made to input ``number``."""
        for change in dict.fromkeys(changes):
            self.altered.setdefault(change, []).append(number)

    def build(self, dtype: np.dtype[np.generic]) -> EncodedBatch:
        return EncodedBatch(
            ids=np.concatenate([np.zeros(0, np.uint32), *self.ids]).astype(dtype),
            lengths=np.array([ids.size for ids in self.ids], np.uint32),
            flags=LossFlags.join(self.flags),
            numbers=np.array(self.numbers, np.int64),
            faults=sorted(self.faults),
            dropped=sorted(self.dropped),
            sides=np.array(self.sides, np.uint8) if self.sides else None,
            altered=self.altered,
            media=self.media if any(self.media) else [],
            fields=self.fields,
            truncated=self.truncated,
        )


# Drop reason of a document without a trained token.
UNTRAINED_RULE = "nothing to train"
# Note of a job with rounded loss weights.
ROUNDED_WEIGHTS = "Loss weights are rounded to the nearest of 256 values"
_UINT32 = np.dtype(np.uint32)


def encode_conversations(
    conversations: Sequence[Conversation],
    encoder: ChatEncoder,
    chat: ChatRecipe,
    dtype: np.dtype[np.generic] = _UINT32,
) -> EncodedBatch:
    """Encode conversations, each rendered once and verified.

    No token is added to those of the template. For every document the bytes of its ids equal its text, its
    control tokens are where the template wrote them, and its trained tokens begin and end exactly at its trained
    turns. Otherwise the conversation is a fault. Batches of some thousands are fastest.
    """
    out = EncodedBatchBuilder()
    rendered_conversations: list[_RenderedConversation] = []
    texts: list[RenderedText] = []
    for number, record in enumerate(conversations):
        try:
            samples = [_render_sample(number, sample, encoder, chat) for sample in _prepare_samples(record, chat)]
        except RenderError as error:
            out.faults.append(EncodeFault(number, str(error)))
        except NothingTrainedError as error:
            out.dropped.append(EncodeFault(number, str(error)))
        else:
            rendered_conversations += [conversation for conversation, _ in samples]
            texts += [text for _, text in samples]
    results = mask_texts(encoder, texts) if texts else []
    if encoder.joins_texts:
        prompts = [_join_prompt(rendered.conversation) for rendered in rendered_conversations]
        joined_texts = _start_where_prompts_end(encoder, prompts, results, all_trained=chat.train_on == "all")
        results = weight_texts(texts, joined_texts)
    encoded_samples = zip(rendered_conversations, texts, results, strict=True)
    for number, sample_group in itertools.groupby(encoded_samples, key=lambda sample: sample[0].number):
        try:
            # One faulty sample makes the record faulty, so none of its samples is stored.
            proved_samples = [
                (rendered, *_mask_and_verify(encoder, rendered, text, masked_tokens, prove=chat.prove))
                for rendered, text, masked_tokens in sample_group
            ]
        except RenderError as error:
            out.faults.append(EncodeFault(number, str(error)))
            continue
        if changes := [change for rendered, *_ in proved_samples for change in rendered.rendered.altered]:
            # Each earlier thought is the last one of another sample, or is not wanted.
            is_kept = chat.reasoning == "keep"
            out.note_altered(number, [change for change in changes if is_kept or change != OMITTED_REASONING])
        for rendered, proved, placed in proved_samples:
            if chat.max_tokens is not None and proved.ids.size > chat.max_tokens:
                _apply_overlong(out, rendered, proved, placed, chat)
            elif proved.flags.count_trained():
                out.add(number, proved.ids, proved.flags, placed)
            else:
                out.dropped.append(EncodeFault(number, "nothing to train: its trained turns have no tokens"))
    return out.build(dtype)


def _prepare_samples(record: Conversation, chat: ChatRecipe) -> list[Conversation]:
    """Return the conversations to render for a record: one, or one of each answer.

    Raises:
        NothingTrainedError: no answer is to be split off.
    """
    conversation = prepare_conversation(record, chat)
    if chat.reasoning != "split":
        return [conversation]
    samples = split_answers(conversation, chat.train_on or "assistant")
    if not samples:
        raise NothingTrainedError("nothing to train: no assistant turn is trained")
    return samples


def prepare_conversation(conversation: Conversation, chat: ChatRecipe) -> Conversation:
    """Return a conversation with its calls and reasoning as the job wants them.

    Raises:
        RenderError: nothing is left of an answer.
    """
    messages = convert_arguments(conversation.messages, chat.tool_arguments)
    if messages is not conversation.messages:
        conversation = replace(conversation, messages=messages)
    return drop_reasoning(conversation) if chat.reasoning == "drop" else conversation


def _join_prompt(conversation: Conversation) -> str:
    """Return the text before the answer, which may be none."""
    return "".join(message["content"] for message in conversation.messages[:-1])


def _render_sample(
    number: int, sample: Conversation, encoder: ChatEncoder, chat: ChatRecipe
) -> tuple["_RenderedConversation", RenderedText]:
    """Render a conversation of input ``number``, and choose its trained text.

    Raises:
        RenderError: the template rejects it, or a trained turn cannot be located.
        NothingTrainedError: no text is trained.
    """
    conversation = encoder.write_tools(sample)
    # A tool format adds and joins messages, so thoughts are searched in what the template gets.
    plain = drop_reasoning(conversation, keeps_empty=True) if chat.reasoning == "mask" else conversation
    rendered = encoder.renderer.render(conversation, with_strings=plain is not conversation)
    media = None
    if plain is not conversation:
        thoughts = find_thoughts(conversation, rendered, encoder.renderer.render(plain))
        rendered = rendered._replace(thoughts=thoughts)
    if conversation.media:
        media = write_expansions(conversation.media, rendered, encoder)
        rendered = media.rendered
    trained_spans = compute_trained_spans(conversation, rendered, chat.train_on or "assistant", chat.train_on_eos)
    weighted_spans = compute_weighted_spans(conversation, rendered)
    check_surrogates(rendered.text)
    lenient = rendered.generation is not None
    text = RenderedText(rendered.text, rendered.control, trained_spans, lenient, weighted_spans)
    return _RenderedConversation(number, conversation, rendered, media), text


def _start_where_prompts_end(
    encoder: ChatEncoder, prompts: Sequence[str], results: Sequence[MaskedTokens | str], *, all_trained: bool
) -> list[MaskedTokens | str]:
    """Train each text from the token at which it differs from its prompt alone.

    That is TRL's rule (``common_prefix_length``). It matters if a token holds text of both, which a model never sees
    after the prompt alone. A BOS token is prepended if models expect it.
    """
    tokenizer = encoder.tokenizer
    ids, bounds = tokenizer.encode_batch(prompts)
    bos = np.array([] if tokenizer.bos_id is None else [tokenizer.bos_id], np.uint32)
    masked_texts: list[MaskedTokens | str] = []
    for number, text in enumerate(results):
        if isinstance(text, str):
            masked_texts.append(text)
            continue
        start = _count_common_tokens(ids[bounds[number] : bounds[number + 1]], text.ids)
        trained = np.arange(-bos.size, text.ids.size) >= (-bos.size if all_trained else start)
        flags = LossFlags.from_codes(trained)
        starts = np.concatenate([np.zeros(bos.size, np.int64), text.starts])
        masked_texts.append(MaskedTokens(np.concatenate([bos, text.ids]), flags, starts, text.in_bytes))
    return masked_texts


class _RenderedConversation(NamedTuple):
    """Rendered conversation; ``media`` is None if it has none."""

    number: int
    conversation: Conversation
    rendered: ConversationText
    media: MediaText | None


def _mask_and_verify(
    encoder: ChatEncoder,
    rendered_conversation: _RenderedConversation,
    text: RenderedText,
    masked_tokens: MaskedTokens | str,
    *,
    prove: bool,
) -> tuple[MaskedTokens, list[PlacedMedium]]:
    """Return the final tokens of a conversation, and its media with their positions."""
    if isinstance(masked_tokens, str):
        raise RenderError(masked_tokens)
    placed: list[PlacedMedium] = []
    if rendered_conversation.media is not None:
        masked_tokens, placed = expand_media_tokens(
            masked_tokens, rendered_conversation.media, rendered_conversation.conversation.media, encoder
        )
        text = text._replace(trained_spans=subtract_spans(text.trained_spans, rendered_conversation.media.media))
    if prove and (problem := _find_mask_mismatch(encoder, text, masked_tokens)):
        raise RenderError(problem)
    return masked_tokens, placed


def check_surrogates(text: str) -> None:
    """Raise RenderError for a text with lone surrogates, which no tokenizer accepts."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RenderError(
                f"it is not valid Unicode: it holds the lone surrogate U+{ord(text[error.start]):04X}"
            ) from error


def _apply_overlong(
    out: EncodedBatchBuilder,
    rendered_conversation: _RenderedConversation,
    masked_tokens: MaskedTokens,
    placed: Sequence[PlacedMedium],
    chat: ChatRecipe,
) -> None:
    number, rendered, limit = (rendered_conversation.number, rendered_conversation.rendered, chat.max_tokens or 0)
    excess = f"{masked_tokens.ids.size:,} tokens where {limit:,} are allowed"
    if chat.overlong == "error":
        raise OverlongError(
            number,
            f"has {excess}: allow more, or choose a policy for long conversations (drop, truncate, truncate-left, "
            "truncate-turns, split)",
        )
    if chat.overlong == "drop":
        out.dropped.append(EncodeFault(number, f"overlong: {excess}"))
        return
    if chat.overlong == "split" and placed:
        out.dropped.append(EncodeFault(number, f"overlong: {excess}, and conversations with media are never cut"))
        return
    if chat.overlong == "split":
        _split_conversation(out, number, masked_tokens, limit)
        return
    if chat.overlong in TRUNCATIONS:
        start, stop = find_kept_range(masked_tokens.ids.size, limit, chat.overlong)
        # A record may have several samples.
        if _add_token_range(out, number, masked_tokens, placed, start, stop) and number not in out.truncated[-1:]:
            out.truncated.append(number)
        return
    turns = sorted(turn.head for turn in rendered.turns if turn is not None)
    heads = masked_tokens.find_tokens(rendered.text, turns)
    if not heads:
        reason = rendered.problem or "its turns do not begin at token boundaries"
        out.dropped.append(EncodeFault(number, f"overlong: {excess}, and it cannot be cut: {reason}"))
        return
    heads[0] = 0
    fitting_tokens = count_fitting_tokens(masked_tokens.flags.trained, heads, limit)
    if fitting_tokens:
        _add_token_range(out, number, masked_tokens, placed, 0, fitting_tokens)
    else:
        out.dropped.append(EncodeFault(number, f"overlong: {excess}, and no complete trained turn fits"))


def _add_token_range(
    out: EncodedBatchBuilder,
    number: int,
    masked_tokens: MaskedTokens,
    placed: Sequence[PlacedMedium],
    start: int,
    stop: int,
) -> bool:
    """Add a token range of a conversation with the media inside, or drop it.

    It is dropped if a medium would be cut, or if no token is trained (no token predicts the first one). Returns whether
    it was added.
    """
    size = masked_tokens.ids.size
    if any(medium.start < edge < medium.start + medium.tokens for medium in placed for edge in (start, stop)):
        reason = f"overlong: {size:,} tokens where {stop - start:,} are allowed, and a medium is never cut"
        out.dropped.append(EncodeFault(number, reason))
        return False
    if not masked_tokens.flags[start + 1 : stop].count_trained():
        out.dropped.append(EncodeFault(number, f"nothing to train: tokens {start:,} to {stop:,} of {size:,}"))
        return False
    media = [medium._replace(start=medium.start - start) for medium in placed if start <= medium.start < stop]
    out.add(number, masked_tokens.ids[start:stop], masked_tokens.flags[start:stop], media)
    return True


def _split_conversation(out: EncodedBatchBuilder, number: int, masked_tokens: MaskedTokens, limit: int) -> None:
    """Add each part of a split conversation as a document."""
    for start, stop, trains in split_at_limit(masked_tokens.flags.trained, limit):
        if trains:
            out.add(number, masked_tokens.ids[start:stop], masked_tokens.flags[start:stop])
        else:
            token_range = f"tokens {start:,} to {stop:,} of {masked_tokens.ids.size:,} in a split conversation"
            out.dropped.append(EncodeFault(number, f"nothing to train: {token_range}"))


def _find_mask_mismatch(encoder: ChatEncoder, text: RenderedText, masked_tokens: MaskedTokens) -> str:
    """Describe how the decoded trained tokens differ from the trained text, else "".

    A byte-level tokenizer must reproduce the text exactly. Others may add a space before a text, strip
    whitespace at its ends, or normalize it: they are compared without whitespace and in NFKC.
    """
    control = int(encoder.is_control[masked_tokens.ids].sum())
    has_untrained_ranges = any(span.weight == 0 for span in text.weighted_spans)
    # Unknown tokens decode to no text.
    if text.lenient or has_untrained_ranges or control > len(text.control):
        return ""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], masked_tokens.flags.trained.astype(np.int8), [0]])))
    runs = zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
    expected_text = "".join(text.text[start:stop] for start, stop in text.trained_spans)
    decoded_text = "".join(encoder.tokenizer.decode(masked_tokens.ids[start:stop]) for start, stop in runs)
    if not masked_tokens.in_bytes:
        expected_text, decoded_text = (
            "".join(unicodedata.normalize("NFKC", compared_text).split())
            for compared_text in (expected_text, decoded_text)
        )
    if expected_text == decoded_text:
        return ""
    mismatch_index = next(
        (n for n, (a, b) in enumerate(zip(expected_text, decoded_text, strict=False)) if a != b),
        min(len(expected_text), len(decoded_text)),
    )
    return (
        f"its trained tokens decode to other text: {decoded_text[mismatch_index : mismatch_index + 20]!a} instead "
        f"of {expected_text[mismatch_index : mismatch_index + 20]!a}"
    )


def add_control_tokens(
    ids: NDArray[np.generic], bounds: NDArray[np.int64], tokenizer: Tokenizer, dtype: np.dtype[np.generic]
) -> NDArray[np.generic]:
    """Concatenate documents with their end tokens and, if the model expects it, BOS."""
    extra = 1 if tokenizer.bos_id is None else 2
    output = np.empty(len(ids) + extra * (len(bounds) - 1), dtype)
    write_with_control(ids, bounds, tokenizer, output)
    return output


def write_with_control(
    ids: NDArray[np.generic], bounds: NDArray[np.int64], tokenizer: Tokenizer, output: NDArray[np.generic]
) -> None:
    """Write the result of :func:`add_control_tokens` into ``output``."""
    extra = 1 if tokenizer.bos_id is None else 2
    numbers = np.arange(len(bounds) - 1)
    ends = bounds[1:] + extra * numbers + (extra - 1)
    plain = np.ones(len(output), bool)
    plain[ends] = False
    if tokenizer.bos_id is not None:
        begins = bounds[:-1] + extra * numbers
        plain[begins] = False
        output[begins] = tokenizer.bos_id
    output[ends] = tokenizer.end_id
    output[plain] = ids


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


def _build_batch(
    out: EncodedBatchBuilder, faults: dict[int, str], dropped: dict[int, str], dtype: np.dtype[np.generic]
) -> EncodedBatch:
    """Concatenate the results; each preference has at most one reported reason."""
    out.faults = [EncodeFault(*entry) for entry in faults.items()]
    out.dropped = [EncodeFault(*entry) for entry in dropped.items() if entry[0] not in faults]
    return replace(out.build(dtype), sides=np.array(out.sides, np.uint8))


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
    if any(medium.start < edge < medium.start + medium.tokens for a in answers for medium in a.media for edge in edges):
        return f"overlong: {allowed}, and a medium is never cut"
    cut_answers = tuple(_cut_answer(answer, *edges) for answer in answers)
    if len(answers) > 1 and all(np.array_equal(answer.ids, cut_answers[0].ids) for answer in cut_answers):
        return f"overlong: {allowed}, and its answers are equal up to there"
    return cut_answers


def _cut_answer(answer: _AnswerTokens, start: int, stop: int) -> _AnswerTokens:
    """Return a token range of an answer with the media inside."""
    media = [medium._replace(start=medium.start - start) for medium in answer.media if start <= medium.start < stop]
    return _AnswerTokens(answer.ids[start:stop], answer.start - start, media)


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


def _disable_truncation(chat: ChatRecipe) -> ChatRecipe:
    """Return the settings without truncation.

    Preferences are cut later, prompt and answers together.
    """
    return replace(chat, max_tokens=None, overlong="drop") if chat.overlong in TRUNCATIONS else chat


def _add_answer(out: EncodedBatchBuilder, number: int, answer: _AnswerTokens, side: int) -> None:
    flags = LossFlags.from_codes(np.arange(answer.ids.size) >= answer.start)
    out.add(number, answer.ids, flags, answer.media, side=side)


def encode_preference_pairs(
    pairs: Sequence[PreferencePair], encoder: ChatEncoder, chat: ChatRecipe, dtype: np.dtype[np.generic]
) -> EncodedBatch:
    """Render, tokenize and mask both sides of pairs of conversations.

    A pair gives two documents, chosen before rejected. It gives none if a side is a fault or dropped, or if
    the two differ before the answers.
    """
    sides = [side for pair in pairs for side in (pair.chosen, pair.rejected)]
    if not all(isinstance(side, Conversation) for side in sides):
        raise AssertionError("encode texts with encode_text_pairs")
    try:
        encoded = encode_conversations(cast("list[Conversation]", sides), encoder, _disable_truncation(chat))
    except OverlongError as error:
        number, side = divmod(error.number, 2)
        raise OverlongError(number, f"on its {_PAIR_SIDES[side]} side {error.reason}") from None
    altered = {change: sorted({number // 2 for number in numbers}) for change, numbers in encoded.altered.items()}
    out, faults, dropped = EncodedBatchBuilder(altered=altered), dict[int, str](), dict[int, str]()
    for fault in encoded.faults:
        faults.setdefault(fault.number // 2, f"its {_PAIR_SIDES[fault.number % 2]} side: {fault.reason}")
    for fault in encoded.dropped:
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
            chosen, rejected = replace(chosen, start=start), replace(rejected, start=start)
        if chosen is None or rejected is None:
            faults[number] = _MASKED_PAIR if chat.reasoning == "mask" else _FLAGS_PROBLEM
        elif problem := _find_pair_problem(chosen, rejected):
            faults[number] = problem
        elif reason := _add_answers(out, number, (chosen, rejected), (CHOSEN, REJECTED), chat):
            dropped[number] = reason
    return _build_batch(out, faults, dropped, dtype)


def encode_labelled_answers(
    labelled: Sequence[LabelledConversation], encoder: ChatEncoder, chat: ChatRecipe, dtype: np.dtype[np.generic]
) -> EncodedBatch:
    """Render, tokenize and mask conversations with labelled answers."""
    conversations = [example.conversation for example in labelled]
    encoded = encode_conversations(conversations, encoder, _disable_truncation(chat))
    faults, dropped = ({fault.number: fault.reason for fault in some} for some in (encoded.faults, encoded.dropped))
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
            out.faults.append(EncodeFault(number, str(error)))
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
            out.faults.append(EncodeFault(number, tokens))
            continue
        ids = np.concatenate([bos, tokens.ids])
        if excess := describe_excess(ids.size, number, chat):
            out.dropped.append(EncodeFault(number, f"overlong: {excess}"))
        else:
            out.add(number, ids, LossFlags.none_trained(ids.size), side=PROMPT, fields=prompts[number].fields)
    return replace(out.build(dtype), sides=np.array(out.sides, np.uint8))


def describe_excess(tokens: int, number: int, chat: ChatRecipe) -> str:
    """Describe by how much a document is too long, else ""; raise if that is an error."""
    if chat.max_tokens is None or tokens <= chat.max_tokens:
        return ""
    excess = f"{tokens:,} tokens where {chat.max_tokens:,} are allowed"
    if chat.overlong == "error":
        raise OverlongError(number, f"has {excess}: allow more, or drop it (--overlong drop)")
    return excess


def encode_text_pairs(
    pairs: Sequence[PreferencePair], tokenizer: Tokenizer, chat: ChatRecipe, dtype: np.dtype[np.generic]
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
        is_cut = chat.overlong in TRUNCATIONS
        if not is_cut and (excess := describe_excess(max(chosen.size, rejected.size), number, chat)):
            dropped[number] = f"overlong: {excess}"
            continue
        # The encoded prompt ends with an end token, which the prompt inside a document lacks.
        start = min(_count_common_tokens(prompt[:-1], chosen), _count_common_tokens(prompt[:-1], rejected))
        pair_answers = _AnswerTokens(chosen, start), _AnswerTokens(rejected, start)
        if problem := _find_pair_problem(*pair_answers):
            faults[number] = problem
        elif reason := _add_answers(out, number, pair_answers, (CHOSEN, REJECTED), chat):
            dropped[number] = reason
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


def _list_documents(encoded: EncodedBatch) -> dict[int, list[_AnswerTokens | None]]:
    """Return the documents of each conversation by number.

    A document is None if its trained tokens are not exactly its end.
    """
    if encoded.numbers is None:
        raise AssertionError("encoded conversations have numbers")
    answers: dict[int, list[_AnswerTokens | None]] = {}
    stops = np.cumsum(encoded.lengths, dtype=np.int64).tolist()
    media = encoded.media or [()] * len(stops)
    codes = encoded.flags.codes
    for number, begin, stop, placed in zip(encoded.numbers.tolist(), [0, *stops[:-1]], stops, media, strict=False):
        start = stop - begin - int(np.count_nonzero(codes[begin:stop]))
        is_answer = bool((codes[begin + start : stop] == 1).all())
        answer = _AnswerTokens(encoded.ids[begin:stop], start, placed) if is_answer else None
        answers.setdefault(number, []).append(answer)
    return answers


def _find_pair_problem(chosen: _AnswerTokens, rejected: _AnswerTokens) -> str:
    """Describe why two documents are no pair, else ""."""
    start = chosen.start
    if start != rejected.start or not np.array_equal(chosen.ids[:start], rejected.ids[:start]):
        return _PROMPTS_DIFFER
    return _SAME_ANSWERS if np.array_equal(chosen.ids, rejected.ids) else ""
