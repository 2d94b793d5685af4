"""Tokens and verified masks of texts with control tokens, and expansion of media."""

import datetime as dt
import re
import unicodedata
from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from types import MappingProxyType
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from batchloom.chat import NO_TEMPLATE, RenderError, choose_template
from batchloom.chat.templates import (
    CONTROL_LIKE,
    DEFAULT_DATE,
    CharacterSpan,
    ConversationRenderer,
    ConversationText,
    PlaceholderFormat,
    TemplateArguments,
    TextJoiner,
    WeightedSpan,
    expand_placeholders,
    make_control_pattern,
    write_tools,
)
from batchloom.core.addresses import redact_url
from batchloom.core.document import Conversation
from batchloom.core.errors import TokenizerError, UnusableRecordError
from batchloom.core.loss_weights import LossFlags
from batchloom.core.medium import Medium, MediumKind
from batchloom.media import PlaceholderExpansion, ProcessorFamily
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
    begin, end = starts + shift, stops + shift
    first = np.searchsorted(tokens.stops, begin, side="right")
    last = np.searchsorted(tokens.starts, end, side="left")
    edges = np.zeros(tokens.stops.size + 1, np.int64)
    np.add.at(edges, first, 1)
    np.add.at(edges, last, -1)
    mask = np.cumsum(edges[:-1]) > 0
    early, late = first < last, first < last
    early[early] = tokens.starts[first[early]] < begin[early]
    late[late] = tokens.stops[last[late] - 1] > end[late]
    return mask, early, late


def to_byte_offsets(text: str, character_offsets: Sequence[int]) -> list[int]:
    if text.isascii():
        return list(character_offsets)
    byte_offsets, previous_offset, byte_count = {0: 0}, 0, 0
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
        self.tokenizer, self.families = tokenizer, families
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


@final
class ChatEncoder(ControlEncoder):
    """Tokenizer and template for conversations; made once, used for many batches.

    Attributes:
        renderer: renders conversations as text.
        joins_texts: whether it joins texts without a template.
    """

    renderer: ConversationRenderer | TextJoiner

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str | None = None,
        *,
        date: dt.date = DEFAULT_DATE,
        arguments: TemplateArguments = MappingProxyType({}),
        tool_format: str | None = None,
        families: Mapping[MediumKind, ProcessorFamily] = MappingProxyType({}),
        templates: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Choose and probe a template.

        Args:
            tokenizer: the tokenizer.
            template: ``chatml``, ``llama3``, ``alpaca``, ``plain``, the name of one of the tokenizer's own
                templates, or a file path; ``none`` to join the texts of a prompt and its completion; None for the
                tokenizer's own, else plain.
            date: date that ``strftime_now`` of templates returns.
            arguments: variables of the template; those of a conversation override them.
            tool_format: ``default`` to write tools and calls into contents; None leaves them to the template.
            families: processor family by media kind.
            templates: templates by name, which take precedence over the tokenizer's own.

        Raises:
            TokenizerError: the tokenizer has no control token for media.
            TemplateError: the template does not exist or cannot be used.
            InputMissingError: the template file does not exist.
        """
        super().__init__(tokenizer, families)
        control, chat = tokenizer.control, tokenizer.chat
        token_by_id = {number: token for token, number in control.items()}
        special_tokens = {"eos_token": token_by_id[tokenizer.end_id]}
        if tokenizer.bos_id is not None:
            special_tokens["bos_token"] = token_by_id[tokenizer.bos_id]
        self._tool_format = tool_format
        self.joins_texts = template == NO_TEMPLATE
        if self.joins_texts:
            self.renderer = TextJoiner(special_tokens["eos_token"])
            return
        self.renderer = ConversationRenderer(
            choose_template(template, {**chat.templates, **templates}, control, tokenizer.name),
            {**special_tokens, **chat.tokens},
            control,
            added=tokenizer.added,
            date=date,
            arguments=arguments,
            media={
                kind: PlaceholderFormat(family.placeholder, family.fallback_text) for kind, family in families.items()
            },
        )

    def write_tools(self, conversation: Conversation) -> Conversation:
        """Return a conversation with its tools and calls in the tool format, if any.

        Raises:
            RenderError: the tool format cannot write its tools or calls.
        """
        return write_tools(conversation) if self._tool_format else conversation

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on the template and the tokenizer for the user."""
        if self.sizes is not None:
            return self.renderer.notes
        slow = (
            f"tokens of {self.tokenizer.name!r} cannot be mapped to byte ranges: conversations are encoded with "
            "tokenizers, one at a time"
        )
        return (*self.renderer.notes, slow)


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
    trained, edge_problems = _mark_trained(tokens, [text], [list(chain(*text.trained_spans))])
    if edge_problems:
        return edge_problems[0]
    return MaskedTokens(ids, LossFlags.from_codes(trained), starts, in_bytes=False)


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


def write_expansions(media: Sequence[Medium], rendered: ConversationText, encoder: ControlEncoder) -> MediaText:
    """Replace the media placeholders of a text with the processor's expansions."""
    expansions, placeholder_texts, prefix_lengths = [], [], []
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
    ids, starts = np.repeat(masked_tokens.ids, repeats), np.repeat(masked_tokens.starts, repeats)
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
