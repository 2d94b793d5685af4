"""Encoding of texts with media: all text is trained, media tokens are not."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchloom.chat import RenderError
from batchloom.chat.templates import ConversationText, PlaceholderSpan
from batchloom.core.conversation import InterleavedText
from batchloom.preparation.documents.chat_encoding import ControlEncoder
from batchloom.preparation.documents.chat_masks import MaskedTokens, RenderedText, mask_texts
from batchloom.preparation.documents.conversation_encoder import EncodeFault, check_surrogates
from batchloom.preparation.documents.document_arrays import add_control_tokens
from batchloom.preparation.documents.media_tokens import (
    MediaText,
    PlacedMedium,
    expand_media_tokens,
    subtract_media,
    write_expansions,
)
from batchloom.preparation.documents.token_encoder import EncodedBatch

# Marks a medium until the processor's text replaces it; offsets are known, so any character works.
_MEDIUM_MARK = "\ue000"


class _InterleavedTokens(NamedTuple):
    """Tokens of a document without added control tokens, and their trained flags."""

    ids: NDArray[np.uint32]
    trained: NDArray[np.bool_]
    media: list[PlacedMedium]


def encode_interleaved(
    documents: Sequence[InterleavedText], encoder: ControlEncoder, dtype: np.dtype[np.generic]
) -> EncodedBatch:
    """Encode texts with media, with end tokens and, if the model expects it, BOS.

    Texts without media are tokenized as plain text. The ids of others are those that the processor makes of
    the text and its media; a control token that a text spells stays text.
    """
    faults: list[EncodeFault] = []
    document_tokens = _encode_plain(documents, encoder) | _encode_with_media(documents, encoder, faults)
    numbers = sorted(document_tokens)
    tokenizer = encoder.tokenizer
    before = 0 if tokenizer.bos_id is None else 1
    lengths = np.array([document_tokens[number].ids.size for number in numbers], np.int64)
    bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    ids = np.concatenate([np.zeros(0, np.uint32), *(document_tokens[number].ids for number in numbers)])
    control_flag = np.ones(1, np.bool_)
    trained = [
        flags for n in numbers for flags in (*([control_flag] * before), document_tokens[n].trained, control_flag)
    ]
    return EncodedBatch(
        add_control_tokens(ids, bounds, tokenizer, dtype),
        (lengths + before + 1).astype(np.uint32),
        np.concatenate([np.zeros(0, np.bool_), *trained]),
        np.array(numbers, np.int64),
        sorted(faults),
        added=(before, 1),
        media=[[medium._replace(start=medium.start + before) for medium in document_tokens[n].media] for n in numbers],
    )


def _encode_plain(documents: Sequence[InterleavedText], encoder: ControlEncoder) -> dict[int, _InterleavedTokens]:
    """Encode the documents without media."""
    numbers = [number for number, document in enumerate(documents) if not document.media]
    ids, bounds = encoder.tokenizer.encode_batch([documents[n].texts[0] for n in numbers])
    document_tokens = {}
    for index, number in enumerate(numbers):
        document_ids = ids[bounds[index] : bounds[index + 1]]
        document_tokens[number] = _InterleavedTokens(document_ids, np.ones(document_ids.size, np.bool_), [])
    return document_tokens


def _encode_with_media(
    documents: Sequence[InterleavedText], encoder: ControlEncoder, faults: list[EncodeFault]
) -> dict[int, _InterleavedTokens]:
    """Encode the documents with media; unusable ones are appended to ``faults``."""
    numbers: list[int] = []
    media_texts: list[MediaText] = []
    texts: list[RenderedText] = []
    for number, document in enumerate(documents):
        if not document.media:
            continue
        try:
            text = write_expansions(document.media, _mark_media(document), encoder)
            check_surrogates(text.rendered.text)
        except RenderError as error:
            faults.append(EncodeFault(number, str(error)))
            continue
        text_spans = [(0, len(text.rendered.text))]
        trained_spans = subtract_media(text_spans, text.placeholder_ranges)
        numbers.append(number)
        media_texts.append(text)
        texts.append(RenderedText(text.rendered.text, text.rendered.control, trained_spans, lenient=True))
    document_tokens = {}
    results = mask_texts(encoder, texts) if texts else []
    for number, text, masked_tokens in zip(numbers, media_texts, results, strict=True):
        try:
            document_tokens[number] = _expand_media(masked_tokens, text, documents[number], encoder)
        except RenderError as error:
            faults.append(EncodeFault(number, str(error)))
    return document_tokens


def _expand_media(
    masked_tokens: MaskedTokens | str, text: MediaText, document: InterleavedText, encoder: ControlEncoder
) -> _InterleavedTokens:
    if isinstance(masked_tokens, str):
        raise RenderError(masked_tokens)
    expanded_tokens, placed = expand_media_tokens(masked_tokens, text, document.media, encoder)
    return _InterleavedTokens(expanded_tokens.ids, expanded_tokens.mask, placed)


def _mark_media(document: InterleavedText) -> ConversationText:
    """Return a document as text with one mark per medium."""
    placeholders, offset = [], 0
    for text, medium in zip(document.texts, document.media, strict=False):
        offset += len(text)
        placeholders.append(PlaceholderSpan(offset, offset + 1, medium.kind, typed=False))
        offset += 1
    text = _MEDIUM_MARK.join(document.texts)
    return ConversationText(text, [], "", [], None, (), tuple(placeholders))
