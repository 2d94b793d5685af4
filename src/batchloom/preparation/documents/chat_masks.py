"""Ids and masks of rendered conversations, proved by bytes or by the tokenizer's own places."""

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
    """A rendered conversation to be encoded. Places are in characters.

    Attributes:
        text: the text.
        control: where the template wrote control tokens.
        stretches: what is trained.
        lenient: whether a token at an edge of a stretch may reach beyond it.
    """

    text: str
    control: Sequence[int]
    stretches: Sequence[CharacterSpan]
    lenient: bool


class MaskedTokens(NamedTuple):
    """A text's tokens.

    Attributes:
        ids: [tokens] uint32.
        mask: the trained ones [tokens] bool.
        starts: where each begins in the text [tokens] int64.
        in_bytes: whether that is counted in bytes of UTF-8, or in characters.
    """

    ids: NDArray[np.uint32]
    mask: NDArray[np.bool_]
    starts: NDArray[np.int64]
    in_bytes: bool

    def tokens_at(self, text: str, places: Sequence[int]) -> list[int] | None:
        """The tokens that begin at places of the text; None where one lies inside a token."""
        wanted = to_byte_offsets(text, places) if self.in_bytes else list(places)
        at = np.searchsorted(self.starts, wanted)
        inside = at < self.starts.size
        if np.any(self.starts[at[inside]] != np.array(wanted, np.int64)[inside]):
            return None
        return [int(number) for number in at]


def mask_texts(encoder: ControlEncoder, texts: Sequence[RenderedText]) -> list[MaskedTokens | str]:
    """The tokens of each text, or why it cannot be used.

    Raises:
        TokenizerError: a text that is not Unicode.
    """
    sizes = encoder.sizes
    if sizes is None:
        return [_mask_by_offsets(encoder, text) for text in texts]
    ids = encoder.tokenizer.encode_batch([text.text for text in texts], control=True)
    made = _mask_by_bytes(encoder, texts, ids, sizes)
    spelled = [n for n, one in enumerate(made) if one is _SPELLED_CONTROL]
    if spelled:
        some = [texts[n] for n in spelled]
        apart = _mask_by_bytes(encoder, some, _encode_segments(encoder, some), sizes)
        for n, one in zip(spelled, apart, strict=True):
            made[n] = one
    return [
        _mask_by_offsets(encoder, text) if one is _BYTES_DIFFER else one
        for text, one in zip(texts, made, strict=True)
    ]


_SPELLED_CONTROL = "it spells a control token that cannot be told from the template's own"
_BYTES_DIFFER = "the bytes of its tokens are not those of its text"


def _mask_by_bytes(
    encoder: ControlEncoder,
    texts: Sequence[RenderedText],
    encoded: EncodedIds,
    sizes: NDArray[np.int64],
) -> list[MaskedTokens | str]:
    """Masks by the bytes that ids stand for, and the proof that they are the text's."""
    ids, bounds = encoded
    tokens = token_byte_ranges(ids, bounds, sizes)
    lengths: list[int] = []
    control: list[Sequence[int]] = []
    edges: list[Sequence[int]] = []
    for text, written, stretches, _ in texts:
        bare = text.isascii()
        if bare or unicodedata.is_normalized("NFC", text):
            lengths.append(len(text) if bare else len(text.encode()))
        else:
            lengths.append(-1)
        ends = stretches[0] if len(stretches) == 1 else list(chain(*stretches))
        control.append(written if bare else to_byte_offsets(text, written))
        edges.append(ends if bare else to_byte_offsets(text, ends))
    uneven = np.diff(tokens.base) != lengths
    spelled = find_misaligned_texts(tokens, encoder.is_control[ids], bounds, control)
    mask, wrong = _mark_trained(tokens, texts, edges)
    made: list[MaskedTokens | str] = []
    starts = tokens.starts - np.repeat(tokens.base[:-1], np.diff(bounds))
    cuts = bounds.tolist()
    for n in range(len(texts)):
        part = slice(cuts[n], cuts[n + 1])
        made.append(MaskedTokens(ids[part], mask[part], starts[part], in_bytes=True))
    for n, why in wrong.items():
        made[n] = why
    for why, flags in ((_SPELLED_CONTROL, spelled), (_BYTES_DIFFER, uneven)):
        for n in np.flatnonzero(flags).tolist():
            made[n] = why
    return made


def _mark_trained(
    tokens: TokenBytes, texts: Sequence[RenderedText], edges: Sequence[Sequence[int]]
) -> tuple[NDArray[np.bool_], dict[int, str]]:
    """The mask of a batch, and what is wrong with the edges of a text's stretches."""
    flat = np.fromiter(chain.from_iterable(edges), np.int64)
    counts = np.array([len(text.stretches) for text in texts], np.int64)
    owner = np.repeat(np.arange(len(texts)), counts)
    mask, early, late = mark_tokens(tokens, CharacterRanges(owner, flat[::2], flat[1::2]))
    first = np.cumsum(counts) - counts
    wrong: dict[int, str] = {}
    for at in np.flatnonzero(early | late).tolist():
        number = int(owner[at])
        text = texts[number]
        if not text.lenient:
            stretch = text.stretches[at - int(first[number])]
            wrong.setdefault(
                number, _describe_straddle(text.text, stretch, at_start=bool(early[at]))
            )
    return mask, wrong


def _describe_straddle(text: str, stretch: CharacterSpan, *, at_start: bool) -> str:
    place = stretch[0] if at_start else stretch[1]
    around = f"{text[max(0, place - 12) : place]!a} and {text[place : place + 12]!a}"
    side = "begins" if at_start else "ends"
    return (
        f"a token reaches over the place where trained text {side}, between {around}: strip white "
        "space from the content, or use a template that ends its header with a control token"
    )


def _encode_segments(encoder: ControlEncoder, texts: Sequence[RenderedText]) -> EncodedIds:
    """Ids of texts cut at the template's own control tokens, the rest encoded as plain text."""
    pieces: list[str] = []
    plan: list[list[int]] = []
    for one in texts:
        ids, at = [], 0
        for place in one.control:
            match = encoder.control.match(one.text, place)
            if match is None or place < at:
                continue
            pieces.append(one.text[at:place])
            ids.append(encoder.tokenizer.control[match.group()])
            at = match.end()
        pieces.append(one.text[at:])
        plan.append(ids)
    plain, cuts = encoder.tokenizer.encode_batch(pieces)
    made: list[NDArray[np.uint32]] = []
    lengths = [0]
    piece = 0
    for ids in plan:
        before = len(made)
        for number in ids:
            made += [plain[cuts[piece] : cuts[piece + 1]], np.array([number], np.uint32)]
            piece += 1
        made.append(plain[cuts[piece] : cuts[piece + 1]])
        piece += 1
        lengths.append(sum(part.size for part in made[before:]))
    return np.concatenate(made), np.cumsum(lengths)


def _mask_by_offsets(encoder: ControlEncoder, text: RenderedText) -> MaskedTokens | str:
    """One text by the places that the tokenizer itself gives."""
    ids, starts, stops = encoder.tokenizer.encode_placed(text.text)
    if not ids.size:
        return "it has no tokens"
    if np.any(np.diff(starts) < 0) or np.any(np.diff(stops) < 0):
        return "the tokenizer's places are out of order"
    # The unknown token is a control token that no text has spelled.
    control = [
        start
        for number, start, stop in zip(ids.tolist(), starts.tolist(), stops.tolist(), strict=True)
        if encoder.is_control[number]
        and encoder.tokenizer.control.get(text.text[start:stop]) == number
    ]
    if control != list(text.control):
        return _SPELLED_CONTROL
    tokens = TokenBytes(starts, stops, np.array([0, len(text.text)], np.int64))
    mask, wrong = _mark_trained(tokens, [text], [list(chain(*text.stretches))])
    return wrong[0] if wrong else MaskedTokens(ids, mask, starts, in_bytes=False)
