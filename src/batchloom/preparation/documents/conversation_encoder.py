"""Encoding of conversations to token ids and verified masks."""

import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchloom.chat import RenderError
from batchloom.chat.templates import ConversationText, NothingTrainedError, compute_trained_spans
from batchloom.core.conversation import Conversation
from batchloom.preparation.documents.chat_encoding import ChatEncoder, MaskedTokens, RenderedText, mask_texts
from batchloom.preparation.documents.media_tokens import (
    MediaText,
    PlacedMedium,
    expand_media_tokens,
    subtract_media,
    write_expansions,
)
from batchloom.preparation.settings.chat_rules import ChatRules, OverlongError, count_fitting_tokens, split_at_limit


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
        mask: True for trained tokens, bool [tokens]; None if all are trained.
        numbers: index of each document in the input [documents], repeated if one was split; None if all are
            included.
        faults: documents that cannot be used.
        dropped: documents dropped by rule: nothing to train, or overlong.
        sides: side of each document, as in ``.pairs``; None if they are no preferences.
        altered: number of conversations that the template changed, by kind of change.
        added: number of control tokens added before and after the text of each document.
        moved: number of texts changed by fill-in-the-middle.
        plain: tokens and lengths of the texts before fill-in-the-middle, if documents are compared.
        media: media of each document; empty if none has any.
    """

    ids: NDArray[np.generic]
    lengths: NDArray[np.uint32]
    mask: NDArray[np.bool_] | None = None
    numbers: NDArray[np.int64] | None = None
    faults: list[EncodeFault] = field(default_factory=list)
    dropped: list[EncodeFault] = field(default_factory=list)
    sides: NDArray[np.uint8] | None = None
    altered: Counter[str] = field(default_factory=Counter)
    added: tuple[int, int] = (0, 0)
    moved: int = 0
    plain: PlainTokens | None = None
    media: Sequence[Sequence[PlacedMedium]] = ()


@dataclass(slots=True)
class EncodedBatchBuilder:
    """Collector of the documents, faults and drops of a batch."""

    ids: list[NDArray[np.generic]] = field(default_factory=list)
    masks: list[NDArray[np.bool_]] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    sides: list[int] = field(default_factory=list)
    faults: list[EncodeFault] = field(default_factory=list)
    dropped: list[EncodeFault] = field(default_factory=list)
    altered: Counter[str] = field(default_factory=Counter)
    media: list[list[PlacedMedium]] = field(default_factory=list)

    def add(
        self,
        number: int,
        ids: NDArray[np.generic],
        mask: NDArray[np.bool_],
        media: Sequence[PlacedMedium] = (),
        side: int | None = None,
    ) -> None:
        """Add a document of input ``number``."""
        self.ids.append(ids)
        self.masks.append(mask)
        self.numbers.append(number)
        self.media.append(list(media))
        if side is not None:
            self.sides.append(side)

    def build(self, dtype: np.dtype[np.generic]) -> EncodedBatch:
        return EncodedBatch(
            ids=np.concatenate([np.zeros(0, np.uint32), *self.ids]).astype(dtype),
            lengths=np.array([ids.size for ids in self.ids], np.uint32),
            mask=np.concatenate([np.zeros(0, np.bool_), *self.masks]),
            numbers=np.array(self.numbers, np.int64),
            faults=sorted(self.faults),
            dropped=sorted(self.dropped),
            sides=np.array(self.sides, np.uint8) if self.sides else None,
            altered=self.altered,
            media=self.media if any(self.media) else [],
        )


_UINT32 = np.dtype(np.uint32)


def encode_conversations(
    conversations: Sequence[Conversation],
    encoder: ChatEncoder,
    rules: ChatRules,
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
    for number, conversation in enumerate(conversations):
        try:
            rendered, media = encoder.renderer.render(conversation), None
            if conversation.media:
                media = write_expansions(conversation.media, rendered, encoder)
                rendered = media.rendered
            trained_spans = compute_trained_spans(conversation, rendered, rules.train_on)
            check_surrogates(rendered.text)
        except RenderError as error:
            out.faults.append(EncodeFault(number, str(error)))
        except NothingTrainedError as error:
            out.dropped.append(EncodeFault(number, str(error)))
        else:
            lenient = rendered.generation is not None
            texts.append(RenderedText(rendered.text, rendered.control, trained_spans, lenient))
            rendered_conversations.append(_RenderedConversation(number, conversation, rendered, media))
    results = mask_texts(encoder, texts) if texts else []
    for rendered_conversation, text, masked_tokens in zip(rendered_conversations, texts, results, strict=True):
        try:
            proved, placed = _mask_and_verify(encoder, rendered_conversation, text, masked_tokens, prove=rules.prove)
        except RenderError as error:
            out.faults.append(EncodeFault(rendered_conversation.number, str(error)))
            continue
        if rendered_conversation.rendered.altered:
            out.altered.update(rendered_conversation.rendered.altered)
        if rules.max_tokens is not None and proved.ids.size > rules.max_tokens:
            _apply_overlong(out, rendered_conversation, proved, placed, rules)
        elif proved.mask.any():
            out.add(rendered_conversation.number, proved.ids, proved.mask, placed)
        else:
            out.dropped.append(
                EncodeFault(rendered_conversation.number, "nothing to train: its trained turns have no tokens")
            )
    return out.build(dtype)


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
        text = text._replace(trained_spans=subtract_media(text.trained_spans, rendered_conversation.media.media))
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
    rules: ChatRules,
) -> None:
    number, rendered, limit = (rendered_conversation.number, rendered_conversation.rendered, rules.max_tokens or 0)
    excess = f"{masked_tokens.ids.size:,} tokens where {limit:,} are allowed"
    if rules.overlong == "error":
        raise OverlongError(
            number, f"has {excess}: allow more, or choose a policy for long conversations (drop, truncate-turns, split)"
        )
    if rules.overlong == "drop":
        out.dropped.append(EncodeFault(number, f"overlong: {excess}"))
        return
    if rules.overlong == "split" and placed:
        out.dropped.append(EncodeFault(number, f"overlong: {excess}, and conversations with media are never cut"))
        return
    if rules.overlong == "split":
        _split_conversation(out, number, masked_tokens, limit)
        return
    turns = sorted(turn.head for turn in rendered.turns if turn is not None)
    heads = masked_tokens.find_tokens(rendered.text, turns)
    if not heads:
        reason = rendered.problem or "its turns do not begin at token boundaries"
        out.dropped.append(EncodeFault(number, f"overlong: {excess}, and it cannot be cut: {reason}"))
        return
    heads[0] = 0
    fitting_tokens = count_fitting_tokens(masked_tokens.mask, heads, limit)
    if fitting_tokens:
        out.add(
            number,
            masked_tokens.ids[:fitting_tokens],
            masked_tokens.mask[:fitting_tokens],
            [medium for medium in placed if medium.start + medium.tokens <= fitting_tokens],
        )
    else:
        out.dropped.append(EncodeFault(number, f"overlong: {excess}, and no complete trained turn fits"))


def _split_conversation(out: EncodedBatchBuilder, number: int, masked_tokens: MaskedTokens, limit: int) -> None:
    """Add each part of a split conversation as a document."""
    for start, stop, trains in split_at_limit(masked_tokens.mask, limit):
        if trains:
            out.add(number, masked_tokens.ids[start:stop], masked_tokens.mask[start:stop])
        else:
            token_range = f"tokens {start:,} to {stop:,} of {masked_tokens.mask.size:,} in a split conversation"
            out.dropped.append(EncodeFault(number, f"nothing to train: {token_range}"))


def _find_mask_mismatch(encoder: ChatEncoder, text: RenderedText, masked_tokens: MaskedTokens) -> str:
    """Describe how the decoded trained tokens differ from the trained text, else "".

    A byte-level tokenizer must reproduce the text exactly. Others may add a space before a text, strip
    whitespace at its ends, or normalize it: they are compared without whitespace and in NFKC.
    """
    control = int(encoder.is_control[masked_tokens.ids].sum())
    if text.lenient or control > len(text.control):  # Unknown tokens decode to no text.
        return ""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], masked_tokens.mask.astype(np.int8), [0]])))
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
