"""Texts with media to tokens: all of the text is trained, nothing of what stands for a medium."""

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

# Holds the place of a medium until what the processor writes is put there; places are known, so any character does.
_MEDIUM_MARK = "\ue000"


class _InterleavedTokens(NamedTuple):
    """The tokens of a document without control tokens around them, and what is trained of them."""

    ids: NDArray[np.uint32]
    trained: NDArray[np.bool_]
    media: list[PlacedMedium]


def encode_interleaved(
    documents: Sequence[InterleavedText], encoder: ControlEncoder, dtype: np.dtype[np.generic]
) -> EncodedBatch:
    """Ids of texts with media, each with its end token and, where models expect it, BOS.

    Texts without any are tokenized as all plain text. Of the others the ids are those that the processor makes of the
    text and its media; a control token that a text spells stays text.

    Args:
        documents: a batch.
        encoder: the tokenizer, which knows the processor's tokens.
        dtype: of a token on disk.
    """
    faults: list[EncodeFault] = []
    made = _encode_plain(documents, encoder) | _encode_with_media(documents, encoder, faults)
    kept = sorted(made)
    tokenizer = encoder.tokenizer
    before = 0 if tokenizer.bos_id is None else 1
    lengths = np.array([made[number].ids.size for number in kept], np.int64)
    bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    ids = np.concatenate([np.zeros(0, np.uint32), *(made[number].ids for number in kept)])
    around = np.ones(1, np.bool_)
    trained = [flags for n in kept for flags in (*([around] * before), made[n].trained, around)]
    return EncodedBatch(
        add_control_tokens(ids, bounds, tokenizer, dtype),
        (lengths + before + 1).astype(np.uint32),
        np.concatenate([np.zeros(0, np.bool_), *trained]),
        np.array(kept, np.int64),
        sorted(faults),
        added=(before, 1),
        media=[[one._replace(start=one.start + before) for one in made[n].media] for n in kept],
    )


def _encode_plain(
    documents: Sequence[InterleavedText], encoder: ControlEncoder
) -> dict[int, _InterleavedTokens]:
    """Those without media."""
    numbers = [number for number, one in enumerate(documents) if not one.media]
    ids, bounds = encoder.tokenizer.encode_batch([documents[n].texts[0] for n in numbers])
    found = {}
    for at, number in enumerate(numbers):
        own = ids[bounds[at] : bounds[at + 1]]
        found[number] = _InterleavedTokens(own, np.ones(own.size, np.bool_), [])
    return found


def _encode_with_media(
    documents: Sequence[InterleavedText], encoder: ControlEncoder, faults: list[EncodeFault]
) -> dict[int, _InterleavedTokens]:
    """Those with media; what cannot be used goes to ``faults``."""
    numbers: list[int] = []
    written: list[MediaText] = []
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
        whole = [(0, len(text.rendered.text))]
        stretches = subtract_media(whole, text.written)
        numbers.append(number)
        written.append(text)
        texts.append(
            RenderedText(text.rendered.text, text.rendered.control, stretches, lenient=True)
        )
    found = {}
    masked = mask_texts(encoder, texts) if texts else []
    for number, text, one in zip(numbers, written, masked, strict=True):
        try:
            found[number] = _expand_media(one, text, documents[number], encoder)
        except RenderError as error:
            faults.append(EncodeFault(number, str(error)))
    return found


def _expand_media(
    one: MaskedTokens | str, text: MediaText, document: InterleavedText, encoder: ControlEncoder
) -> _InterleavedTokens:
    if isinstance(one, str):
        raise RenderError(one)
    masked, placed = expand_media_tokens(one, text, document.media, encoder)
    return _InterleavedTokens(masked.ids, masked.mask, placed)


def _mark_media(document: InterleavedText) -> ConversationText:
    """A document as a text with a mark for each medium."""
    places, at = [], 0
    for text, medium in zip(document.texts, document.media, strict=False):
        at += len(text)
        places.append(PlaceholderSpan(at, at + 1, medium.kind, typed=False))
        at += 1
    text = _MEDIUM_MARK.join(document.texts)
    return ConversationText(text, [], "", [], None, (), tuple(places))
