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
from batchloom.preparation.documents.encoded_batch import EncodedBatch, EncodedBatchBuilder
from batchloom.preparation.documents.masked_tokens import (
    ControlEncoder,
    MaskedTokens,
    RenderedText,
    check_surrogates,
    mask_texts,
    weight_texts,
)
from batchloom.preparation.documents.media_tokens import MediaText, PlacedMedium, expand_media_tokens, write_expansions
from batchloom.preparation.documents.overlong_policies import OVERLONG, VerifiedConversation
from batchloom.preparation.settings.recipe import ChatRecipe
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
        control = tokenizer.control
        chat = tokenizer.chat
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
    return collect_conversations(conversations, encoder, chat).build(dtype)


def collect_conversations(
    conversations: Sequence[Conversation], encoder: ChatEncoder, chat: ChatRecipe
) -> EncodedBatchBuilder:
    """Encode conversations without joining them; see :func:`encode_conversations`."""
    out = EncodedBatchBuilder()
    rendered_conversations: list[_RenderedConversation] = []
    texts: list[RenderedText] = []
    for number, record in enumerate(conversations):
        try:
            samples = [_render_sample(number, sample, encoder, chat) for sample in _prepare_samples(record, chat)]
        except RenderError as error:
            out.refuse(number, str(error))
        except NothingTrainedError as error:
            out.drop(number, str(error))
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
            verified_samples = [_expand_and_verify(encoder, *sample, prove=chat.prove) for sample in sample_group]
        except RenderError as error:
            out.refuse(number, str(error))
            continue
        if changes := [change for sample in verified_samples for change in sample.rendered.altered]:
            # Each earlier thought is the last one of another sample, or is not wanted.
            is_kept = chat.reasoning == "keep"
            out.note_altered(number, [change for change in changes if is_kept or change != OMITTED_REASONING])
        for sample in verified_samples:
            _add_conversation(out, sample, chat)
    return out


def _add_conversation(out: EncodedBatchBuilder, conversation: VerifiedConversation, chat: ChatRecipe) -> None:
    """Add a conversation, or what the policy keeps of one that is too long."""
    tokens = conversation.tokens
    if chat.max_tokens is not None and tokens.ids.size > chat.max_tokens:
        OVERLONG[chat.overlong](out, conversation, chat.max_tokens)
    elif tokens.flags.count_trained():
        out.add(conversation.number, tokens.ids, tokens.flags, conversation.media)
    else:
        out.drop(conversation.number, "nothing to train: its trained turns have no tokens")


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


def _expand_and_verify(
    encoder: ChatEncoder,
    rendered_conversation: _RenderedConversation,
    text: RenderedText,
    masked_tokens: MaskedTokens | str,
    *,
    prove: bool,
) -> VerifiedConversation:
    """Return a conversation with its final tokens.

    Raises:
        RenderError: it has no verified tokens, or they are not those of the trained text.
    """
    if isinstance(masked_tokens, str):
        raise RenderError(masked_tokens)
    number, conversation, rendered, media_text = rendered_conversation
    placed: list[PlacedMedium] = []
    if media_text is not None:
        masked_tokens, placed = expand_media_tokens(masked_tokens, media_text, conversation.media, encoder)
        text = text._replace(trained_spans=subtract_spans(text.trained_spans, media_text.media))
    if prove and (problem := _find_mask_mismatch(encoder, text, masked_tokens)):
        raise RenderError(problem)
    return VerifiedConversation(number, rendered, masked_tokens, placed)


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
