"""Tokens and verified masks of texts with control tokens."""

import unicodedata
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchloom.chat import RenderError
from batchloom.chat.templates import CONTROL_LIKE, CharacterSpan, WeightedSpan, make_control_pattern
from batchloom.core.errors import TokenizerError
from batchloom.core.loss_weights import LossFlags
from batchloom.core.medium import MediumKind
from batchloom.media import ProcessorFamily
from batchloom.tokens import Tokenizer


class TokenBytes(NamedTuple):
    """Offsets of the tokens of a batch of texts, counted over the complete batch."""

    starts: NDArray[np.int64]  # Start of each token, ascending, int64 [tokens]
    stops: NDArray[np.int64]  # End of each token, ascending, int64 [tokens]
    base: NDArray[np.int64]  # Start of each text, int64 [texts + 1]


def mark_tokens(
    tokens: TokenBytes, texts: NDArray[np.int64], starts: NDArray[np.int64], stops: NDArray[np.int64]
) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.bool_]]:
    """Mark the tokens that overlap ranges (text, start and stop offset) [ranges].

    Returns the mask [tokens] and, for each range, whether its first token begins before it and whether its last
    token ends after it.
    """
    shift = tokens.base[texts]
    begin = starts + shift
    end = stops + shift
    first = np.searchsorted(tokens.stops, begin, side="right")
    last = np.searchsorted(tokens.starts, end, side="left")
    edges = np.zeros(tokens.stops.size + 1, np.int64)
    np.add.at(edges, first, 1)
    np.add.at(edges, last, -1)
    mask = np.cumsum(edges[:-1]) > 0
    early = first < last
    late = first < last
    early[early] = tokens.starts[first[early]] < begin[early]
    late[late] = tokens.stops[last[late] - 1] > end[late]
    return mask, early, late


def to_byte_offsets(text: str, character_offsets: Sequence[int]) -> list[int]:
    if text.isascii():
        return list(character_offsets)
    byte_offsets = {0: 0}
    previous_offset = 0
    byte_count = 0
    for character_offset in sorted(set(character_offsets)):
        byte_count += len(text[previous_offset:character_offset].encode())
        byte_offsets[character_offset] = byte_count
        previous_offset = character_offset
    return [byte_offsets[character_offset] for character_offset in character_offsets]


def find_misaligned_texts(
    tokens: TokenBytes, flagged: NDArray[np.bool_], bounds: NDArray[np.int64], expected: Sequence[Sequence[int]]
) -> NDArray[np.bool_]:
    """Flag texts whose flagged tokens begin at unexpected offsets, bool [texts]."""
    token_indices = np.flatnonzero(flagged)
    text_indices = np.searchsorted(bounds, token_indices, side="right") - 1
    counts = np.array([len(offsets) for offsets in expected], np.int64)
    misaligned: NDArray[np.bool_] = np.bincount(text_indices, minlength=len(expected)) != counts
    actual_starts = (tokens.starts[token_indices] - tokens.base[text_indices])[~misaligned[text_indices]]
    owner = np.repeat(np.arange(len(expected)), counts)
    expected_starts = np.fromiter(chain.from_iterable(expected), np.int64)
    comparable = ~misaligned[owner]
    misaligned[owner[comparable][actual_starts != expected_starts[comparable]]] = True
    return misaligned


class ControlEncoder:
    """Tokenizer for texts with control tokens at known positions, and with media.

    Attributes:
        tokenizer: the tokenizer.
        families: processor family of each kind of media that texts may hold.
        sizes: UTF-8 bytes of each id, int64 [vocab]; None if texts are aligned one at a time.
        is_control: True for ids of control tokens, bool [vocab].
        control: pattern that matches control tokens in text.
    """

    def __init__(self, tokenizer: Tokenizer, families: Mapping[MediumKind, ProcessorFamily]) -> None:
        self.tokenizer = tokenizer
        self.families = families
        for kind, family in families.items():
            for token in (family.placeholder, family.token):
                if token not in tokenizer.control:
                    raise TokenizerError(
                        f"tokenizer {tokenizer.name!r} has no control token {token!r}, which the processor writes for "
                        f"{kind}: give the tokenizer that the processor was saved with, the same folder for "
                        "--tokenizer and --processor"
                    )
        self.sizes = tokenizer.id_bytes()
        self.is_control = np.zeros(tokenizer.vocab_size, np.bool_)
        self.is_control[list(tokenizer.control.values())] = True
        self.control = make_control_pattern(list(tokenizer.control))


EncodedIds = tuple[NDArray[np.uint32], NDArray[np.int64]]


class RenderedText(NamedTuple):
    """Rendered conversation to encode, with offsets in characters."""

    text: str
    control: Sequence[int]  # Offsets of the control tokens that the template wrote
    trained_spans: Sequence[CharacterSpan]
    lenient: bool  # Allow a token at an edge of a trained span to extend beyond it
    weighted_spans: Sequence[WeightedSpan] = ()  # Loss weights of trained tokens, in ascending precedence


class MaskedTokens(NamedTuple):
    ids: NDArray[np.uint32]
    flags: LossFlags
    starts: NDArray[np.int64]  # Offset of each token in the text, int64 [tokens]
    in_bytes: bool  # Offsets count UTF-8 bytes instead of characters

    def find_tokens(self, text: str, character_offsets: Sequence[int]) -> list[int] | None:
        """Return the tokens that begin at the offsets; None if one is inside a token."""
        start_offsets = to_byte_offsets(text, character_offsets) if self.in_bytes else list(character_offsets)
        token_indices = np.searchsorted(self.starts, start_offsets)
        in_range = token_indices < self.starts.size
        if np.any(self.starts[token_indices[in_range]] != np.array(start_offsets, np.int64)[in_range]):
            return None
        return [int(number) for number in token_indices]

    def find_span_tokens(self, text: str, span: WeightedSpan) -> tuple[int, int]:
        """Return the first token of a span, and the one after its last."""
        start, stop, _, is_aligned = span
        # A token that reaches over an end must share two characters with the span.
        margins = [start, stop] if is_aligned else [min(start + 1, stop), max(stop - 1, start)]
        character_offsets = [start, stop, *margins, len(text)]
        offsets = to_byte_offsets(text, character_offsets) if self.in_bytes else character_offsets
        begin, end, inner_begin, inner_end, size = offsets
        token_stops = np.append(self.starts[1:], size)
        first = int(np.searchsorted(token_stops, inner_begin, side="right"))
        behind = int(np.searchsorted(self.starts, inner_end, side="left"))
        if not is_aligned:
            first = min(first, int(np.searchsorted(self.starts, begin, side="left")))
            behind = max(behind, int(np.searchsorted(token_stops, end, side="right")))
        return first, behind


def mask_texts(encoder: ControlEncoder, texts: Sequence[RenderedText]) -> list[MaskedTokens | str]:
    """Return the tokens of each text, or the reason why it cannot be used."""
    return weight_texts(texts, _mask_texts(encoder, texts))


def weight_texts(texts: Sequence[RenderedText], results: Sequence[MaskedTokens | str]) -> list[MaskedTokens | str]:
    """Give the trained tokens of weighted spans their weights."""
    return [
        _apply_weights(result, text) if text.weighted_spans and not isinstance(result, str) else result
        for text, result in zip(texts, results, strict=True)
    ]


def _mask_texts(encoder: ControlEncoder, texts: Sequence[RenderedText]) -> list[MaskedTokens | str]:
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


def _apply_weights(masked_tokens: MaskedTokens, text: RenderedText) -> MaskedTokens:
    """Give the trained tokens of weighted spans their weights."""
    is_trained = masked_tokens.flags.trained
    weights = is_trained.astype(np.float64)
    for span in text.weighted_spans:
        first, behind = masked_tokens.find_span_tokens(text.text, span)
        weights[first:behind] = span.weight
    weights[~is_trained] = 0
    return masked_tokens._replace(flags=LossFlags.from_weights(weights))


_SPELLED_CONTROL = "it spells a control token that cannot be distinguished from the template's own"
_BYTES_DIFFER = "the bytes of its tokens differ from the bytes of its text"


def _mask_by_bytes(
    encoder: ControlEncoder, texts: Sequence[RenderedText], encoded: EncodedIds, sizes: NDArray[np.int64]
) -> list[MaskedTokens | str]:
    """Compute masks from the bytes of ids, and verify that they are the text's bytes."""
    ids, bounds = encoded
    token_stops = np.cumsum(np.maximum(sizes[ids], 0))
    token_starts = np.concatenate([[0], token_stops])
    tokens = TokenBytes(token_starts[:-1], token_stops, token_starts[bounds])
    lengths: list[int] = []
    control: list[Sequence[int]] = []
    edges: list[Sequence[int]] = []
    for text, control_offsets, trained_spans, *_ in texts:
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
    trained, edge_problems = _mark_trained(tokens, texts, edges)
    flags = LossFlags.from_codes(trained)
    results: list[MaskedTokens | str] = []
    starts = tokens.starts - np.repeat(tokens.base[:-1], np.diff(bounds))
    token_bounds = bounds.tolist()
    for n in range(len(texts)):
        part = slice(token_bounds[n], token_bounds[n + 1])
        results.append(MaskedTokens(ids[part], flags[part], starts[part], in_bytes=True))
    for n, problem in edge_problems.items():
        results[n] = problem
    for problem, has_problem in ((_SPELLED_CONTROL, misaligned), (_BYTES_DIFFER, differing)):
        for n in np.flatnonzero(has_problem).tolist():
            results[n] = problem
    return results


def _mark_trained(
    tokens: TokenBytes, texts: Sequence[RenderedText], edges: Sequence[Sequence[int]]
) -> tuple[NDArray[np.bool_], dict[int, str]]:
    """Return the mask of a batch, and the misaligned span edges by text number."""
    flat = np.fromiter(chain.from_iterable(edges), np.int64)
    counts = np.array([len(text.trained_spans) for text in texts], np.int64)
    owner = np.repeat(np.arange(len(texts)), counts)
    mask, early, late = mark_tokens(tokens, owner, flat[::2], flat[1::2])
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
    for match in CONTROL_LIKE.finditer(text, max(0, edge - 50), edge + 50):
        if match.start() <= edge <= match.end():
            return (
                f"the template writes {match.group()}, which the tokenizer does not have as a control token: use a "
                "tokenizer that has it, or another template"
            )
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
        ids = []
        segment_start = 0
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
    trained, edge_problems = _mark_trained(tokens, [text], [list(chain(*text.trained_spans))])
    if edge_problems:
        return edge_problems[0]
    return MaskedTokens(ids, LossFlags.from_codes(trained), starts, in_bytes=False)


def check_surrogates(text: str) -> None:
    """Raise RenderError for a text with lone surrogates, which no tokenizer accepts."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RenderError(
                f"it is not valid Unicode: it holds the lone surrogate U+{ord(text[error.start]):04X}"
            ) from error
