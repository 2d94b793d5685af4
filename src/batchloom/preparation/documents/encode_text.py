"""Encoding of texts, token rows, text segments and texts with media."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from batchloom.chat import RenderError
from batchloom.chat.schema import TokenRow
from batchloom.chat.templates import TEXT_PLACEHOLDERS, ConversationText, PlaceholderSpan, subtract_spans
from batchloom.core.document import InterleavedText, SegmentedText
from batchloom.core.errors import UnusableRecordError
from batchloom.core.loss_weights import LossFlags
from batchloom.core.medium import PLACEHOLDER_PATTERN
from batchloom.preparation.documents.document_facts import hash_documents
from batchloom.preparation.documents.encoded_batch import (
    UNTRAINED_RULE,
    EncodedBatch,
    EncodedBatchBuilder,
    describe_excess,
)
from batchloom.preparation.documents.fill_in_the_middle import FimCutter, apply_fim, insert_sentinels
from batchloom.preparation.documents.masked_tokens import ControlEncoder, RenderedText, check_surrogates, mask_texts
from batchloom.preparation.documents.media_tokens import MediaText, PlacedMedium, expand_media_tokens, write_expansions
from batchloom.preparation.settings.recipe import ChatRecipe
from batchloom.tokens import Tokenizer, verify_control_tokens

_UNTRAINED = f"{UNTRAINED_RULE}: none of its tokens is trained"
_CACHE_CHARACTERS = 1 << 18


def encode_texts(texts: list[str], tokenizer: Tokenizer, dtype: np.dtype[np.generic]) -> EncodedBatch:
    """Tokenize ``texts`` and clear the list as soon as they are encoded."""
    encoded_chunks = [tokenizer.encode_batch(texts[a:b]) for a, b in _iter_cache_batches(texts)]
    texts.clear()
    added = (0 if tokenizer.bos_id is None else 1, 1)
    lengths = [np.diff(bounds) + sum(added) for _, bounds in encoded_chunks]
    tokens = np.empty(sum(int(chunk_lengths.sum()) for chunk_lengths in lengths), dtype)
    offset = 0
    for ids, bounds in encoded_chunks:
        size = len(ids) + sum(added) * (len(bounds) - 1)
        write_with_control(ids, bounds, tokenizer, tokens[offset : offset + size])
        offset += size
    document_lengths = np.concatenate([np.zeros(0, np.int64), *lengths]).astype(np.uint32)
    return EncodedBatch(tokens, document_lengths, LossFlags.all_trained(tokens.size), added=added)


def encode_fim_texts(
    texts: list[str], tokenizer: Tokenizer, dtype: np.dtype[np.generic], fim: FimCutter, *, compared: bool
) -> EncodedBatch:
    """Tokenize ``texts`` with fill-in-the-middle and clear the list."""
    segments = apply_fim(texts, hash_documents(texts), fim)
    plain = encode_texts(list(texts), tokenizer, dtype) if compared else None
    texts.clear()
    encoded_chunks = [tokenizer.encode_batch(segments.parts[a:b]) for a, b in _iter_cache_batches(segments.parts)]
    sizes = np.concatenate([np.zeros(1, np.int64), *(np.diff(bounds) for _, bounds in encoded_chunks)])
    ids = np.concatenate([np.zeros(0, np.uint32), *(chunk_ids for chunk_ids, _ in encoded_chunks)])
    ids, bounds = insert_sentinels(ids, np.cumsum(sizes), segments)
    tokens = add_control_tokens(ids, bounds, tokenizer, dtype)
    added = (0 if tokenizer.bos_id is None else 1, 1)
    lengths = (np.diff(bounds) + sum(added)).astype(np.uint32)
    original_tokens = (plain.ids, plain.lengths) if plain else None
    flags = LossFlags.all_trained(tokens.size)
    return EncodedBatch(tokens, lengths, flags, added=added, moved=segments.moved, plain=original_tokens)


def _iter_cache_batches(texts: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield ranges of texts small enough to stay with their ids in a core's cache."""
    start = size = 0
    for stop, text in enumerate(texts, 1):
        size += len(text)
        if size >= _CACHE_CHARACTERS:
            yield start, stop
            start = stop
            size = 0
    if start < len(texts):
        yield start, len(texts)


def encode_token_rows(rows: Sequence[TokenRow], vocab_size: int, dtype: np.dtype[np.generic]) -> EncodedBatch:
    """Use the ids as they are; a row with an id outside the vocabulary is a fault."""
    out = EncodedBatchBuilder()
    for number, row in enumerate(rows):
        if row.ids.size and int(row.ids.max()) >= vocab_size:
            reason = (
                f"holds token id {int(row.ids.max())}; the vocabulary has ids 0 to {vocab_size - 1}: another "
                "tokenizer made these ids, name it with --tokenizer"
            )
            out.refuse(number, reason)
        elif not row.flags.is_plain and not row.flags.count_trained():
            out.drop(number, _UNTRAINED)
        elif row.ids.size:
            out.add(number, row.ids, row.flags)
    return out.build(dtype)


def encode_segments(
    documents: Sequence[SegmentedText], tokenizer: Tokenizer, chat: ChatRecipe, dtype: np.dtype[np.generic]
) -> EncodedBatch:
    """Encode each segment alone, without adding tokens, as axolotl does.

    With ``train_on`` ``all``, every segment is trained. A text that is too long is dropped, never cut.
    """
    out = EncodedBatchBuilder()
    texts = list[str]()
    numbers = list[int]()
    flags: list[LossFlags] = []
    least = 1.0 if chat.train_on == "all" else 0.0
    for number, document in enumerate(documents):
        weights = np.array(document.trained, np.float64)
        try:
            check_surrogates("".join(document.texts))
            flags.append(LossFlags.from_weights(np.where(weights > 0, weights, least) * document.weight))
        except (RenderError, UnusableRecordError) as error:
            out.refuse(number, str(error))
            continue
        numbers.append(number)
        texts += document.texts
    ids, bounds = _get_exact_tokenizer(tokenizer).encode_batch(texts, control=True)
    sizes = np.diff(bounds)
    first = 0
    for number, segment_flags in zip(numbers, flags, strict=True):
        segments = slice(first, first + len(documents[number].texts))
        first = segments.stop
        begin = int(bounds[segments.start])
        end = int(bounds[segments.stop])
        token_flags = segment_flags.repeat(sizes[segments])
        if excess := describe_excess(end - begin, number, chat):
            out.drop(number, f"overlong: {excess}")
        elif token_flags.count_trained():
            out.add(number, ids[begin:end], token_flags)
        else:
            out.drop(number, _UNTRAINED)
    return out.build(dtype)


def weigh_documents(batch: EncodedBatch, weights: Sequence[float]) -> EncodedBatch:
    """Give all trained tokens of a document the weight of its record."""
    document_weights = np.array(weights)
    if batch.numbers is not None:
        document_weights = document_weights[batch.numbers]
    flags = LossFlags.from_weights(document_weights).repeat(batch.lengths)
    if not batch.flags.is_plain:
        flags = LossFlags.from_codes(flags.codes * batch.flags.trained, rounded=flags.rounded)
    return replace(batch, flags=flags)


# The last tokenizer of this process, and the same on an engine that parses control tokens exactly.
_exact_tokenizers: dict[int, tuple[Tokenizer, Tokenizer]] = {}


def _get_exact_tokenizer(tokenizer: Tokenizer) -> Tokenizer:
    tokenizers = _exact_tokenizers.get(id(tokenizer))
    if tokenizers is None:
        tokenizers = tokenizer, verify_control_tokens(tokenizer)
        _exact_tokenizers.clear()
        _exact_tokenizers[id(tokenizer)] = tokenizers
    return tokenizers[1]


# Marks a medium until the processor's text replaces it; offsets are known, so any character works.
_MEDIUM_MARK = "\ue000"


def encode_interleaved(
    documents: Sequence[InterleavedText], encoder: ControlEncoder, dtype: np.dtype[np.generic]
) -> EncodedBatch:
    """Encode texts with media, with end tokens and, if the model expects it, BOS.

    Texts without media are tokenized as plain text. The ids of others are those that the processor makes of
    the text and its media; a control token that a text spells stays text.
    """
    out = EncodedBatchBuilder()
    tokenizer = encoder.tokenizer
    document_tokens = _encode_with_media(documents, encoder, out)
    plain_numbers = [number for number, document in enumerate(documents) if not document.media]
    ids, bounds = tokenizer.encode_batch([documents[number].texts[0] for number in plain_numbers])
    for number, start, stop in zip(plain_numbers, bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        document_tokens[number] = ids[start:stop], LossFlags.all_trained(stop - start), []
    for number in sorted(document_tokens):
        if documents[number].weight:
            out.add(number, *document_tokens[number])
            if any(map(PLACEHOLDER_PATTERN.search, documents[number].texts)):
                out.note_altered(number, [TEXT_PLACEHOLDERS])
        else:
            out.drop(number, _UNTRAINED)
    batch = out.build(np.dtype(np.uint32))
    before = 0 if tokenizer.bos_id is None else 1
    bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(batch.lengths, dtype=np.int64)])
    control_offsets = np.concatenate([bounds[1:], bounds[: -1 if before else 0]])
    batch = replace(
        batch,
        ids=add_control_tokens(batch.ids, bounds, tokenizer, dtype),
        lengths=batch.lengths + np.uint32(before + 1),
        flags=LossFlags.from_codes(np.insert(batch.flags.codes, control_offsets, 1)),
        added=(before, 1),
        media=[[medium._replace(start=medium.start + before) for medium in media] for media in out.media],
    )
    weights = [document.weight for document in documents]
    return weigh_documents(batch, weights) if set(weights) != {1.0} else batch


def _encode_with_media(
    documents: Sequence[InterleavedText], encoder: ControlEncoder, out: EncodedBatchBuilder
) -> dict[int, tuple[NDArray[np.uint32], LossFlags, list[PlacedMedium]]]:
    """Return ids, flags and media of documents with media; refuse the others."""
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
            out.refuse(number, str(error))
            continue
        trained_spans = subtract_spans([(0, len(text.rendered.text))], text.placeholder_ranges)
        numbers.append(number)
        media_texts.append(text)
        texts.append(RenderedText(text.rendered.text, text.rendered.control, trained_spans, lenient=True))
    document_tokens = {}
    results = mask_texts(encoder, texts) if texts else []
    for number, text, masked_tokens in zip(numbers, media_texts, results, strict=True):
        if isinstance(masked_tokens, str):
            out.refuse(number, masked_tokens)
            continue
        try:
            expanded, placed = expand_media_tokens(masked_tokens, text, documents[number].media, encoder)
        except RenderError as error:
            out.refuse(number, str(error))
        else:
            document_tokens[number] = expanded.ids, expanded.flags, placed
    return document_tokens


def _mark_media(document: InterleavedText) -> ConversationText:
    """Return a document as text with one mark per medium."""
    placeholders = []
    offset = 0
    for text, medium in zip(document.texts, document.media, strict=False):
        offset += len(text)
        placeholders.append(PlaceholderSpan(offset, offset + 1, medium.kind, typed=False))
        offset += 1
    text = _MEDIUM_MARK.join(document.texts)
    return ConversationText(text, [], "", [], None, (), tuple(placeholders))


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


def strip_control_tokens(
    ids: NDArray[np.generic], lengths: NDArray[np.int64], added: tuple[int, int]
) -> tuple[NDArray[np.generic], NDArray[np.uint32]]:
    """Remove ``added`` tokens before and after each document; return ids and lengths."""
    before, behind = added
    if not before + behind:
        return ids, lengths.astype(np.uint32)
    stops = np.cumsum(lengths)
    keep_mask = np.ones(len(ids), bool)
    for offset in range(before):
        keep_mask[stops - lengths + offset] = False
    for offset in range(behind):
        keep_mask[stops - 1 - offset] = False
    return ids[keep_mask], (lengths - (before + behind)).astype(np.uint32)
