"""Media among the tokens of a document: where chat, tokens and processors meet."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from batchloom.chat import RenderError
from batchloom.chat.templates import ConversationText, expand_placeholders
from batchloom.core.addresses import redact_url
from batchloom.core.errors import UnusableRecordError
from batchloom.core.medium import Medium
from batchloom.media import PlaceholderExpansion, ProcessorFamily
from batchloom.preparation.documents.chat_encoding import ControlEncoder
from batchloom.preparation.documents.chat_masks import MaskedTokens
from batchloom.preparation.documents.token_positions import to_byte_offsets


class MediaText(NamedTuple):
    """A rendered conversation in which stands what its processor writes for its media.

    Attributes:
        rendered: the conversation; each run of a medium's token is a single one.
        media: (start, stop) of what stands for each medium, in characters.
        expansions: of each medium.
        written: (start, stop) of the same with the marks that stand around it where no template wrote any.
    """

    rendered: ConversationText
    media: list[tuple[int, int]]
    expansions: list[PlaceholderExpansion]
    written: list[tuple[int, int]]


class PlacedMedium(NamedTuple):
    """A medium among the tokens of its document.

    Attributes:
        medium: which.
        start: its first token inside the document.
        tokens: how many stand for it.
        grid: its patches in time, height and width; zeros where the model asks for none.
    """

    medium: Medium
    start: int
    tokens: int
    grid: tuple[int, int, int]


def write_expansions(
    media: Sequence[Medium], rendered: ConversationText, encoder: ControlEncoder
) -> MediaText:
    """Write what the processor does where media stand in a text.

    Raises:
        RenderError: a medium that the processor does not take; says which.
    """
    expansions, written, before = [], [], []
    for number, (medium, place) in enumerate(zip(media, rendered.places, strict=True), 1):
        family = encoder.families[medium.kind]
        expansion = _expand_medium(medium, family, number)
        alone = family.placeholder if place.typed else family.alone
        expansions.append(expansion)
        written.append(alone.replace(family.placeholder, expansion.text))
        before.append(alone.index(family.placeholder))
    made = expand_placeholders(
        *(rendered.text, rendered.turns, rendered.control, rendered.generation),
        *(rendered.places, written, encoder.control),
    )
    whole = rendered._replace(
        text=made.text, turns=made.turns, control=made.control, generation=made.generation
    )
    stand = [
        (start + skipped, start + skipped + len(expansion.text))
        for (start, _), skipped, expansion in zip(made.media, before, expansions, strict=True)
    ]
    return MediaText(whole, stand, expansions, made.media)


def _expand_medium(medium: Medium, family: ProcessorFamily, number: int) -> PlaceholderExpansion:
    if medium.seen is None:
        raise AssertionError("media are looked at before they are encoded")
    try:
        return family.expand(medium.seen.facts)
    except UnusableRecordError as error:
        raise RenderError(
            f"{medium.kind} {number} ({describe_medium(medium)}) {error.reason}"
        ) from error


def describe_medium(medium: Medium) -> str:
    """What a medium is called in a sentence."""
    return redact_url(medium.place) if medium.place else "in the record"


def expand_media_tokens(
    made: MaskedTokens, text: MediaText, media: Sequence[Medium], encoder: ControlEncoder
) -> tuple[MaskedTokens, list[PlacedMedium]]:
    """Tokens with each medium's token as often as the processor writes it, and where media stand among them.

    Nothing is trained of what stands for a medium.

    Args:
        made: the tokens of the text, a single one for each run.
        text: the text.
        media: those in it.
        encoder: knows the tokens of media.

    Raises:
        RenderError: a medium's token is no token of its own here.
    """
    whole = text.rendered.text
    repeats = np.ones(made.ids.size, np.int64)
    mask = made.mask.copy()
    bounds = []
    for medium, (start, stop), expansion in zip(media, text.media, text.expansions, strict=True):
        token = encoder.families[medium.kind].token
        at = _control_tokens_at(made, whole, _find_all(whole, token, start, stop), token)
        repeats[at] = expansion.runs
        first, behind = _covering_tokens(made, whole, start, stop)
        mask[first:behind] = False
        bounds.append(_covering_tokens(made, whole, *_media_bounds(whole, start, stop, encoder)))
    if any(behind > first for (_, behind), (first, _) in pairwise(bounds)):
        raise RenderError("the tokens of two media that stand side by side are joined into one")
    edges = np.concatenate([[0], np.cumsum(repeats)]).tolist()
    placed = [
        PlacedMedium(medium, edges[first], edges[behind] - edges[first], expansion.grid)
        for medium, (first, behind), expansion in zip(media, bounds, text.expansions, strict=True)
    ]
    ids, starts = np.repeat(made.ids, repeats), np.repeat(made.starts, repeats)
    return MaskedTokens(ids, np.repeat(mask, repeats), starts, made.in_bytes), placed


def _media_bounds(text: str, start: int, stop: int, encoder: ControlEncoder) -> tuple[int, int]:
    """From the first to the last control token of what stands for a medium: what is around may join its neighbours."""
    found = list(encoder.control.finditer(text, start, stop))
    return (found[0].start(), found[-1].end()) if found else (start, stop)


def _find_all(text: str, token: str, start: int, stop: int) -> list[int]:
    places = []
    at = text.find(token, start, stop)
    while at >= 0:
        places.append(at)
        at = text.find(token, at + len(token), stop)
    return places


def _control_tokens_at(
    made: MaskedTokens, text: str, places: Sequence[int], token: str
) -> list[int]:
    at = made.tokens_at(text, places)
    if at is None or any(number >= made.ids.size for number in at):
        raise RenderError(f"{token!r} is no token of its own in this text")
    return at


def _covering_tokens(made: MaskedTokens, text: str, start: int, stop: int) -> tuple[int, int]:
    """The tokens that lie in a stretch of a text, in whole or in part."""
    places = to_byte_offsets(text, [start, stop]) if made.in_bytes else [start, stop]
    first = int(np.searchsorted(made.starts, places[0], side="right")) - 1
    return max(first, 0), int(np.searchsorted(made.starts, places[1], side="left"))


def subtract_media(
    stretches: Sequence[tuple[int, int]], media: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Stretches of a text without what stands for media in them."""
    left = list(stretches)
    for start, stop in media:
        cut = []
        for a, b in left:
            if stop <= a or b <= start:
                cut.append((a, b))
                continue
            cut += [piece for piece in ((a, start), (stop, b)) if piece[0] < piece[1]]
        left = cut
    return left


def truncate_media(placed: Sequence[PlacedMedium], tokens: int) -> list[PlacedMedium]:
    """The media that are left of a document of which the first tokens are."""
    return [one for one in placed if one.start + one.tokens <= tokens]
