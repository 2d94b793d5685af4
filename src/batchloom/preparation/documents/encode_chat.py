"""Encoding of conversations to token ids and verified masks."""

import datetime as dt
import itertools
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from batchloom.chat import NO_TEMPLATE, RenderError, choose_template
from batchloom.chat.templates import (
    DEFAULT_DATE,
    OMITTED_REASONING,
    ConversationRenderer,
    ConversationText,
    NothingTrainedError,
    PlaceholderFormat,
    TemplateArguments,
    TextJoiner,
    compute_trained_spans,
    compute_weighted_spans,
    convert_arguments,
    drop_reasoning,
    find_thoughts,
    split_answers,
    subtract_spans,
    write_tools,
)
from batchloom.core.document import Conversation
from batchloom.core.loss_weights import LossFlags
from batchloom.core.medium import MediumKind
from batchloom.media import ProcessorFamily
from batchloom.preparation.documents.encoded_batch import EncodedBatch, EncodedBatchBuilder, EncodeFault, OverlongError
from batchloom.preparation.documents.masked_tokens import (
    ControlEncoder,
    MaskedTokens,
    RenderedText,
    check_surrogates,
    mask_texts,
    weight_texts,
)
from batchloom.preparation.documents.media_tokens import MediaText, PlacedMedium, expand_media_tokens, write_expansions
from batchloom.preparation.settings.recipe import TRUNCATIONS, ChatRecipe, OverlongPolicy
from batchloom.tokens import Tokenizer


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


_UINT32 = np.dtype(np.uint32)


def encode_conversations(
    conversations: Sequence[Conversation],
    encoder: ChatEncoder,
    chat: ChatRecipe,
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
    for number, record in enumerate(conversations):
        try:
            samples = [_render_sample(number, sample, encoder, chat) for sample in _prepare_samples(record, chat)]
        except RenderError as error:
            out.faults.append(EncodeFault(number, str(error)))
        except NothingTrainedError as error:
            out.dropped.append(EncodeFault(number, str(error)))
        else:
            rendered_conversations += [conversation for conversation, _ in samples]
            texts += [text for _, text in samples]
    results = mask_texts(encoder, texts) if texts else []
    if encoder.joins_texts:
        prompts = [_join_prompt(rendered.conversation) for rendered in rendered_conversations]
        joined_texts = _start_where_prompts_end(encoder, prompts, results, all_trained=chat.train_on == "all")
        results = weight_texts(texts, joined_texts)
    encoded_samples = zip(rendered_conversations, texts, results, strict=True)
    for number, sample_group in itertools.groupby(encoded_samples, key=lambda sample: sample[0].number):
        try:
            # One faulty sample makes the record faulty, so none of its samples is stored.
            proved_samples = [
                (rendered, *_mask_and_verify(encoder, rendered, text, masked_tokens, prove=chat.prove))
                for rendered, text, masked_tokens in sample_group
            ]
        except RenderError as error:
            out.faults.append(EncodeFault(number, str(error)))
            continue
        if changes := [change for rendered, *_ in proved_samples for change in rendered.rendered.altered]:
            # Each earlier thought is the last one of another sample, or is not wanted.
            is_kept = chat.reasoning == "keep"
            out.note_altered(number, [change for change in changes if is_kept or change != OMITTED_REASONING])
        for rendered, proved, placed in proved_samples:
            if chat.max_tokens is not None and proved.ids.size > chat.max_tokens:
                _apply_overlong(out, rendered, proved, placed, chat)
            elif proved.flags.count_trained():
                out.add(number, proved.ids, proved.flags, placed)
            else:
                out.dropped.append(EncodeFault(number, "nothing to train: its trained turns have no tokens"))
    return out.build(dtype)


def _prepare_samples(record: Conversation, chat: ChatRecipe) -> list[Conversation]:
    """Return the conversations to render for a record: one, or one of each answer.

    Raises:
        NothingTrainedError: no answer is to be split off.
    """
    conversation = prepare_conversation(record, chat)
    if chat.reasoning != "split":
        return [conversation]
    samples = split_answers(conversation, chat.train_on or "assistant")
    if not samples:
        raise NothingTrainedError("nothing to train: no assistant turn is trained")
    return samples


def prepare_conversation(conversation: Conversation, chat: ChatRecipe) -> Conversation:
    """Return a conversation with its calls and reasoning as the job wants them.

    Raises:
        RenderError: nothing is left of an answer.
    """
    messages = convert_arguments(conversation.messages, chat.tool_arguments)
    if messages is not conversation.messages:
        conversation = replace(conversation, messages=messages)
    return drop_reasoning(conversation) if chat.reasoning == "drop" else conversation


def _join_prompt(conversation: Conversation) -> str:
    """Return the text before the answer, which may be none."""
    return "".join(message["content"] for message in conversation.messages[:-1])


def _render_sample(
    number: int, sample: Conversation, encoder: ChatEncoder, chat: ChatRecipe
) -> tuple["_RenderedConversation", RenderedText]:
    """Render a conversation of input ``number``, and choose its trained text.

    Raises:
        RenderError: the template rejects it, or a trained turn cannot be located.
        NothingTrainedError: no text is trained.
    """
    conversation = encoder.write_tools(sample)
    # A tool format adds and joins messages, so thoughts are searched in what the template gets.
    plain = drop_reasoning(conversation, keeps_empty=True) if chat.reasoning == "mask" else conversation
    rendered = encoder.renderer.render(conversation, with_strings=plain is not conversation)
    media = None
    if plain is not conversation:
        thoughts = find_thoughts(conversation, rendered, encoder.renderer.render(plain))
        rendered = rendered._replace(thoughts=thoughts)
    if conversation.media:
        media = write_expansions(conversation.media, rendered, encoder)
        rendered = media.rendered
    trained_spans = compute_trained_spans(conversation, rendered, chat.train_on or "assistant", chat.train_on_eos)
    weighted_spans = compute_weighted_spans(conversation, rendered)
    check_surrogates(rendered.text)
    lenient = rendered.generation is not None
    text = RenderedText(rendered.text, rendered.control, trained_spans, lenient, weighted_spans)
    return _RenderedConversation(number, conversation, rendered, media), text


def _start_where_prompts_end(
    encoder: ChatEncoder, prompts: Sequence[str], results: Sequence[MaskedTokens | str], *, all_trained: bool
) -> list[MaskedTokens | str]:
    """Train each text from the token at which it differs from its prompt alone.

    That is TRL's rule (``common_prefix_length``). It matters if a token holds text of both, which a model never sees
    after the prompt alone. A BOS token is prepended if models expect it.
    """
    tokenizer = encoder.tokenizer
    ids, bounds = tokenizer.encode_batch(prompts)
    bos = np.array([] if tokenizer.bos_id is None else [tokenizer.bos_id], np.uint32)
    masked_texts: list[MaskedTokens | str] = []
    for number, text in enumerate(results):
        if isinstance(text, str):
            masked_texts.append(text)
            continue
        start = count_common_tokens(ids[bounds[number] : bounds[number + 1]], text.ids)
        trained = np.arange(-bos.size, text.ids.size) >= (-bos.size if all_trained else start)
        flags = LossFlags.from_codes(trained)
        starts = np.concatenate([np.zeros(bos.size, np.int64), text.starts])
        masked_texts.append(MaskedTokens(np.concatenate([bos, text.ids]), flags, starts, text.in_bytes))
    return masked_texts


def count_common_tokens(first_ids: NDArray[np.generic], second_ids: NDArray[np.generic]) -> int:
    shorter_length = min(first_ids.size, second_ids.size)
    differ = np.flatnonzero(first_ids[:shorter_length] != second_ids[:shorter_length])
    return int(differ[0]) if differ.size else shorter_length


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
        text = text._replace(trained_spans=subtract_spans(text.trained_spans, rendered_conversation.media.media))
    if prove and (problem := _find_mask_mismatch(encoder, text, masked_tokens)):
        raise RenderError(problem)
    return masked_tokens, placed


def _find_mask_mismatch(encoder: ChatEncoder, text: RenderedText, masked_tokens: MaskedTokens) -> str:
    """Describe how the decoded trained tokens differ from the trained text, else "".

    A byte-level tokenizer must reproduce the text exactly. Others may add a space before a text, strip
    whitespace at its ends, or normalize it: they are compared without whitespace and in NFKC.
    """
    control = int(encoder.is_control[masked_tokens.ids].sum())
    has_untrained_ranges = any(span.weight == 0 for span in text.weighted_spans)
    # Unknown tokens decode to no text.
    if text.lenient or has_untrained_ranges or control > len(text.control):
        return ""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], masked_tokens.flags.trained.astype(np.int8), [0]])))
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


def _apply_overlong(
    out: EncodedBatchBuilder,
    rendered_conversation: _RenderedConversation,
    masked_tokens: MaskedTokens,
    placed: Sequence[PlacedMedium],
    chat: ChatRecipe,
) -> None:
    number, rendered, limit = (rendered_conversation.number, rendered_conversation.rendered, chat.max_tokens or 0)
    excess = f"{masked_tokens.ids.size:,} tokens where {limit:,} are allowed"
    if chat.overlong == "error":
        raise OverlongError(
            number,
            f"has {excess}: allow more, or choose a policy for long conversations (drop, truncate, truncate-left, "
            "truncate-turns, split)",
        )
    if chat.overlong == "drop":
        out.dropped.append(EncodeFault(number, f"overlong: {excess}"))
        return
    if chat.overlong == "split" and placed:
        out.dropped.append(EncodeFault(number, f"overlong: {excess}, and conversations with media are never cut"))
        return
    if chat.overlong == "split":
        _split_conversation(out, number, masked_tokens, limit)
        return
    if chat.overlong in TRUNCATIONS:
        start, stop = find_kept_range(masked_tokens.ids.size, limit, chat.overlong)
        # A record may have several samples.
        if _add_token_range(out, number, masked_tokens, placed, start, stop) and number not in out.truncated[-1:]:
            out.truncated.append(number)
        return
    turns = sorted(turn.head for turn in rendered.turns if turn is not None)
    heads = masked_tokens.find_tokens(rendered.text, turns)
    if not heads:
        reason = rendered.problem or "its turns do not begin at token boundaries"
        out.dropped.append(EncodeFault(number, f"overlong: {excess}, and it cannot be cut: {reason}"))
        return
    heads[0] = 0
    fitting_tokens = count_fitting_tokens(masked_tokens.flags.trained, heads, limit)
    if fitting_tokens:
        _add_token_range(out, number, masked_tokens, placed, 0, fitting_tokens)
    else:
        out.dropped.append(EncodeFault(number, f"overlong: {excess}, and no complete trained turn fits"))


def _add_token_range(
    out: EncodedBatchBuilder,
    number: int,
    masked_tokens: MaskedTokens,
    placed: Sequence[PlacedMedium],
    start: int,
    stop: int,
) -> bool:
    """Add a token range of a conversation with the media inside, or drop it.

    It is dropped if a medium would be cut, or if no token is trained (no token predicts the first one). Returns whether
    it was added.
    """
    size = masked_tokens.ids.size
    if any(medium.start < edge < medium.start + medium.tokens for medium in placed for edge in (start, stop)):
        reason = f"overlong: {size:,} tokens where {stop - start:,} are allowed, and a medium is never cut"
        out.dropped.append(EncodeFault(number, reason))
        return False
    if not masked_tokens.flags[start + 1 : stop].count_trained():
        out.dropped.append(EncodeFault(number, f"nothing to train: tokens {start:,} to {stop:,} of {size:,}"))
        return False
    media = [medium._replace(start=medium.start - start) for medium in placed if start <= medium.start < stop]
    out.add(number, masked_tokens.ids[start:stop], masked_tokens.flags[start:stop], media)
    return True


def find_kept_range(tokens: int, limit: int, policy: OverlongPolicy) -> tuple[int, int]:
    """Return the token range that remains of a document longer than ``limit``."""
    return (tokens - limit, tokens) if policy == "truncate-left" else (0, limit)


class ConversationSegment(NamedTuple):
    """Token range of a conversation that becomes a document."""

    start: int
    stop: int
    trains: bool  # Some of its tokens are trained


def _split_conversation(out: EncodedBatchBuilder, number: int, masked_tokens: MaskedTokens, limit: int) -> None:
    """Add each part of a split conversation as a document."""
    for start, stop, trains in split_at_limit(masked_tokens.flags.trained, limit):
        if trains:
            out.add(number, masked_tokens.ids[start:stop], masked_tokens.flags[start:stop])
        else:
            token_range = f"tokens {start:,} to {stop:,} of {masked_tokens.ids.size:,} in a split conversation"
            out.dropped.append(EncodeFault(number, f"nothing to train: {token_range}"))


def split_at_limit(mask: NDArray[np.bool_], limit: int) -> list[ConversationSegment]:
    """Split into consecutive segments of ``limit`` tokens; the last may be shorter.

    The first token of a segment is not trained, because no token predicts it.
    """
    return [
        ConversationSegment(start, min(start + limit, mask.size), bool(mask[start + 1 : start + limit].any()))
        for start in range(0, mask.size, limit)
    ]


def count_fitting_tokens(mask: NDArray[np.bool_], heads: Sequence[int], limit: int) -> int:
    """Count the tokens that fit after turns are dropped from a conversation's end.

    Every remaining turn still follows the turn it answers, and the last one is trained. ``heads`` is the first token
    of each turn. Returns 0 if no complete turns with trained tokens fit.
    """
    trained = np.concatenate([[0], np.cumsum(mask, dtype=np.int64)])
    edges = [*heads[1:], mask.size]
    ends = [stop for start, stop in zip(heads, edges, strict=True) if trained[stop] > trained[start]]
    return max((stop for stop in ends if stop <= limit), default=0)
