"""Placeholder tokens of media in texts, as a processor writes them."""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from batchloom.chat import RenderError
from batchloom.chat.templates import ConversationText, expand_placeholders
from batchloom.core.addresses import redact_url
from batchloom.core.errors import UnusableRecordError
from batchloom.core.loss_weights import LossFlags
from batchloom.core.medium import Medium
from batchloom.media import PlaceholderExpansion, ProcessorFamily
from batchloom.preparation.documents.masked_tokens import ControlEncoder, MaskedTokens, to_byte_offsets


class MediaText(NamedTuple):
    """Rendered conversation with the processor's expansions of its media."""

    rendered: ConversationText  # Conversation; each run of a medium's token is a single token
    media: list[tuple[int, int]]  # (start, stop) of each medium's expansion, in characters
    expansions: list[PlaceholderExpansion]
    placeholder_ranges: list[tuple[int, int]]


class PlacedMedium(NamedTuple):
    """Medium among the tokens of its document.

    Attributes:
        medium: the medium.
        start: position of its first token in the document.
        tokens: number of its tokens.
        grid: patches in time, height and width; zeros if the model uses none.
    """

    medium: Medium
    start: int
    tokens: int
    grid: tuple[int, int, int]


def is_medium_cut(media: Sequence[PlacedMedium], start: int, stop: int) -> bool:
    """Return whether an end of a token range is inside a medium."""
    return any(medium.start < edge < medium.start + medium.tokens for medium in media for edge in (start, stop))


def select_media(media: Sequence[PlacedMedium], start: int, stop: int) -> list[PlacedMedium]:
    """Return the media of a token range, relative to its start."""
    return [medium._replace(start=medium.start - start) for medium in media if start <= medium.start < stop]


def write_expansions(media: Sequence[Medium], rendered: ConversationText, encoder: ControlEncoder) -> MediaText:
    """Replace the media placeholders of a text with the processor's expansions."""
    expansions = []
    placeholder_texts = []
    prefix_lengths = []
    for number, (medium, placeholder) in enumerate(zip(media, rendered.media_spans, strict=True), 1):
        family = encoder.families[medium.kind]
        expansion = _expand_medium(medium, family, number)
        placeholder_text = family.placeholder if placeholder.typed else family.fallback_text
        expansions.append(expansion)
        placeholder_texts.append(placeholder_text.replace(family.placeholder, expansion.text))
        prefix_lengths.append(placeholder_text.index(family.placeholder))
    expanded, placeholder_ranges = expand_placeholders(rendered, placeholder_texts, encoder.control)
    media_ranges = [
        (start + prefix_length, start + prefix_length + len(expansion.text))
        for (start, _), prefix_length, expansion in zip(placeholder_ranges, prefix_lengths, expansions, strict=True)
    ]
    return MediaText(expanded, media_ranges, expansions, placeholder_ranges)


def _expand_medium(medium: Medium, family: ProcessorFamily, number: int) -> PlaceholderExpansion:
    if medium.info is None:
        raise AssertionError("media must be inspected before they are encoded")
    try:
        return family.expand(medium.info.facts)
    except UnusableRecordError as error:
        location = redact_url(medium.location) if medium.location else "in the record"
        raise RenderError(f"{medium.kind} {number} ({location}) {error.reason}") from error


def expand_media_tokens(
    masked_tokens: MaskedTokens, text: MediaText, media: Sequence[Medium], encoder: ControlEncoder
) -> tuple[MaskedTokens, list[PlacedMedium]]:
    """Repeat each medium's token as the processor does, and locate the media.

    Tokens of media are not trained. ``masked_tokens`` has one token per run of a medium's token. Raises
    RenderError if a medium's token is merged with its neighbours.
    """
    rendered_text = text.rendered.text
    repeats = np.ones(masked_tokens.ids.size, np.int64)
    codes = masked_tokens.flags.codes.copy()
    bounds = []
    for medium, (start, stop), expansion in zip(media, text.media, text.expansions, strict=True):
        token = encoder.families[medium.kind].token
        offsets = [match.start() for match in re.compile(re.escape(token)).finditer(rendered_text, start, stop)]
        token_indices = masked_tokens.find_tokens(rendered_text, offsets)
        if token_indices is None or any(number >= masked_tokens.ids.size for number in token_indices):
            raise RenderError(f"{token!r} is not a separate token in this text")
        repeats[token_indices] = expansion.runs
        first, behind = _find_covering_tokens(masked_tokens, rendered_text, start, stop)
        codes[first:behind] = 0
        bounds.append(
            _find_covering_tokens(
                masked_tokens, rendered_text, *_find_media_bounds(rendered_text, start, stop, encoder)
            )
        )
    if any(behind > first for (_, behind), (first, _) in pairwise(bounds)):
        raise RenderError("the tokens of two adjacent media are merged into one")
    edges = np.concatenate([[0], np.cumsum(repeats)]).tolist()
    placed = [
        PlacedMedium(medium, edges[first], edges[behind] - edges[first], expansion.grid)
        for medium, (first, behind), expansion in zip(media, bounds, text.expansions, strict=True)
    ]
    ids = np.repeat(masked_tokens.ids, repeats)
    starts = np.repeat(masked_tokens.starts, repeats)
    flags = LossFlags.from_codes(codes, rounded=masked_tokens.flags.rounded).repeat(repeats)
    return masked_tokens._replace(ids=ids, flags=flags, starts=starts), placed


def _find_media_bounds(text: str, start: int, stop: int, encoder: ControlEncoder) -> tuple[int, int]:
    """Return the span from the first to the last control token of an expansion.

    Text around them may merge with neighbouring text into one token.
    """
    matches = list(encoder.control.finditer(text, start, stop))
    return (matches[0].start(), matches[-1].end()) if matches else (start, stop)


def _find_covering_tokens(masked_tokens: MaskedTokens, text: str, start: int, stop: int) -> tuple[int, int]:
    offsets = to_byte_offsets(text, [start, stop]) if masked_tokens.in_bytes else [start, stop]
    first = int(np.searchsorted(masked_tokens.starts, offsets[0], side="right")) - 1
    return max(first, 0), int(np.searchsorted(masked_tokens.starts, offsets[1], side="left"))
