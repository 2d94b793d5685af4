"""Ids and masks of rendered conversations, verified by bytes or tokenizer offsets."""

import unicodedata
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchloom.chat.templates import CharacterSpan
from batchloom.preparation.documents.chat_encoding import ControlEncoder
from batchloom.preparation.documents.token_positions import (
    CharacterRanges,
    TokenBytes,
    find_misaligned_texts,
    mark_tokens,
    to_byte_offsets,
    token_byte_ranges,
)

EncodedIds = tuple[NDArray[np.uint32], NDArray[np.int64]]


class RenderedText(NamedTuple):
    """Rendered conversation to encode, with offsets in characters.

    Attributes:
        text: the text.
        control: offsets of the control tokens that the template wrote.
        trained_spans: trained spans.
        lenient: allow a token at an edge of a trained span to extend beyond it.
    """

    text: str
    control: Sequence[int]
    trained_spans: Sequence[CharacterSpan]
    lenient: bool


class MaskedTokens(NamedTuple):
    """Tokens of a text.

    Attributes:
        ids: token ids, uint32 [tokens].
        mask: True for trained tokens, bool [tokens].
        starts: offset of each token in the text, int64 [tokens].
        in_bytes: offsets count UTF-8 bytes instead of characters.
    """

    ids: NDArray[np.uint32]
    mask: NDArray[np.bool_]
    starts: NDArray[np.int64]
    in_bytes: bool

    def find_tokens(self, text: str, character_offsets: Sequence[int]) -> list[int] | None:
        """Return the tokens that begin at the offsets; None if one is inside a token."""
        start_offsets = to_byte_offsets(text, character_offsets) if self.in_bytes else list(character_offsets)
        token_indices = np.searchsorted(self.starts, start_offsets)
        in_range = token_indices < self.starts.size
        if np.any(self.starts[token_indices[in_range]] != np.array(start_offsets, np.int64)[in_range]):
            return None
        return [int(number) for number in token_indices]


def mask_texts(encoder: ControlEncoder, texts: Sequence[RenderedText]) -> list[MaskedTokens | str]:
    """Return the tokens of each text, or the reason why it cannot be used."""
    sizes = encoder.sizes
    if sizes is None:
        return [_mask_by_offsets(encoder, text) for text in texts]
    ids = encoder.tokenizer.encode_batch([text.text for text in texts], control=True)
    results = _mask_by_bytes(encoder, texts, ids, sizes)
    spelled_numbers = [n for n, result in enumerate(results) if result is _SPELLED_CONTROL]
    if spelled_numbers:
        spelled_texts = [texts[n] for n in spelled_numbers]
        spelled_results = _mask_by_bytes(encoder, spelled_texts, _encode_segments(encoder, spelled_texts), sizes)
        for n, result in zip(spelled_numbers, spelled_results, strict=True):
            results[n] = result
    return [
        _mask_by_offsets(encoder, text) if result is _BYTES_DIFFER else result
        for text, result in zip(texts, results, strict=True)
    ]


_SPELLED_CONTROL = "it spells a control token that cannot be distinguished from the template's own"
_BYTES_DIFFER = "the bytes of its tokens differ from the bytes of its text"


def _mask_by_bytes(
    encoder: ControlEncoder, texts: Sequence[RenderedText], encoded: EncodedIds, sizes: NDArray[np.int64]
) -> list[MaskedTokens | str]:
    """Compute masks from the bytes of ids, and verify that they are the text's bytes."""
    ids, bounds = encoded
    tokens = token_byte_ranges(ids, bounds, sizes)
    lengths: list[int] = []
    control: list[Sequence[int]] = []
    edges: list[Sequence[int]] = []
    for text, control_offsets, trained_spans, _ in texts:
        is_ascii = text.isascii()
        if is_ascii or unicodedata.is_normalized("NFC", text):
            lengths.append(len(text) if is_ascii else len(text.encode()))
        else:
            lengths.append(-1)
        ends = trained_spans[0] if len(trained_spans) == 1 else list(chain(*trained_spans))
        control.append(control_offsets if is_ascii else to_byte_offsets(text, control_offsets))
        edges.append(ends if is_ascii else to_byte_offsets(text, ends))
    differing = np.diff(tokens.base) != lengths
    misaligned = find_misaligned_texts(tokens, encoder.is_control[ids], bounds, control)
    mask, edge_problems = _mark_trained(tokens, texts, edges)
    results: list[MaskedTokens | str] = []
    starts = tokens.starts - np.repeat(tokens.base[:-1], np.diff(bounds))
    token_bounds = bounds.tolist()
    for n in range(len(texts)):
        part = slice(token_bounds[n], token_bounds[n + 1])
        results.append(MaskedTokens(ids[part], mask[part], starts[part], in_bytes=True))
    for n, problem in edge_problems.items():
        results[n] = problem
    for problem, flags in ((_SPELLED_CONTROL, misaligned), (_BYTES_DIFFER, differing)):
        for n in np.flatnonzero(flags).tolist():
            results[n] = problem
    return results


def _mark_trained(
    tokens: TokenBytes, texts: Sequence[RenderedText], edges: Sequence[Sequence[int]]
) -> tuple[NDArray[np.bool_], dict[int, str]]:
    """Return the mask of a batch, and the misaligned span edges by text number."""
    flat = np.fromiter(chain.from_iterable(edges), np.int64)
    counts = np.array([len(text.trained_spans) for text in texts], np.int64)
    owner = np.repeat(np.arange(len(texts)), counts)
    mask, early, late = mark_tokens(tokens, CharacterRanges(owner, flat[::2], flat[1::2]))
    first = np.cumsum(counts) - counts
    edge_problems: dict[int, str] = {}
    for span_index in np.flatnonzero(early | late).tolist():
        number = int(owner[span_index])
        text = texts[number]
        if not text.lenient:
            span = text.trained_spans[span_index - int(first[number])]
            edge_problems.setdefault(number, _describe_straddle(text.text, span, at_start=bool(early[span_index])))
    return mask, edge_problems


def _describe_straddle(text: str, span: CharacterSpan, *, at_start: bool) -> str:
    edge = span[0] if at_start else span[1]
    around = f"{text[max(0, edge - 12) : edge]!a} and {text[edge : edge + 12]!a}"
    side = "begins" if at_start else "ends"
    return (
        f"a token crosses the position where trained text {side}, between {around}: strip white space from the "
        "content, or use a template that ends its header with a control token"
    )


def _encode_segments(encoder: ControlEncoder, texts: Sequence[RenderedText]) -> EncodedIds:
    """Encode texts split at the template's own control tokens, the rest as plain text."""
    segments: list[str] = []
    control_ids: list[list[int]] = []
    for text in texts:
        ids, segment_start = [], 0
        for offset in text.control:
            match = encoder.control.match(text.text, offset)
            if match is None or offset < segment_start:
                continue
            segments.append(text.text[segment_start:offset])
            ids.append(encoder.tokenizer.control[match.group()])
            segment_start = match.end()
        segments.append(text.text[segment_start:])
        control_ids.append(ids)
    plain, segment_bounds = encoder.tokenizer.encode_batch(segments)
    id_arrays: list[NDArray[np.uint32]] = []
    lengths = [0]
    segment_index = 0
    for ids in control_ids:
        before = len(id_arrays)
        for number in ids:
            id_arrays += [
                plain[segment_bounds[segment_index] : segment_bounds[segment_index + 1]],
                np.array([number], np.uint32),
            ]
            segment_index += 1
        id_arrays.append(plain[segment_bounds[segment_index] : segment_bounds[segment_index + 1]])
        segment_index += 1
        lengths.append(sum(part.size for part in id_arrays[before:]))
    return np.concatenate(id_arrays), np.cumsum(lengths)


def _mask_by_offsets(encoder: ControlEncoder, text: RenderedText) -> MaskedTokens | str:
    """Mask one text by the token offsets that the tokenizer returns."""
    ids, starts, stops = encoder.tokenizer.encode_placed(text.text)
    if not ids.size:
        return "it has no tokens"
    if np.any(np.diff(starts) < 0) or np.any(np.diff(stops) < 0):
        return "the tokenizer's offsets are out of order"
    # The unknown token is a control token too, but no text spells it.
    control = [
        start
        for number, start, stop in zip(ids.tolist(), starts.tolist(), stops.tolist(), strict=True)
        if encoder.is_control[number] and encoder.tokenizer.control.get(text.text[start:stop]) == number
    ]
    if control != list(text.control):
        return _SPELLED_CONTROL
    tokens = TokenBytes(starts, stops, np.array([0, len(text.text)], np.int64))
    mask, edge_problems = _mark_trained(tokens, [text], [list(chain(*text.trained_spans))])
    return edge_problems[0] if edge_problems else MaskedTokens(ids, mask, starts, in_bytes=False)
