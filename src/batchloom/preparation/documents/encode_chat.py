"""Encoding of conversations to token ids and verified masks."""

import datetime as dt
import itertools
import unicodedata
from collections.abc import Callable, Mapping, Sequence
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
from batchloom.preparation.documents.encoded_batch import EncodedBatch, EncodedBatchBuilder, OverlongError
from batchloom.preparation.documents.masked_tokens import (
    ControlEncoder,
    MaskedTokens,
    RenderedText,
    check_surrogates,
    mask_texts,
    weight_texts,
)
from batchloom.preparation.documents.media_tokens import (
    MediaText,
    PlacedMedium,
    expand_media_tokens,
    is_medium_cut,
    select_media,
    write_expansions,
)
from batchloom.preparation.settings.recipe import ChatRecipe, OverlongPolicy
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


def _add_conversation(out: EncodedBatchBuilder, conversation: "_VerifiedConversation", chat: ChatRecipe) -> None:
    """Add a conversation, or what the policy keeps of one that is too long."""
    tokens = conversation.tokens
    if chat.max_tokens is not None and tokens.ids.size > chat.max_tokens:
        _OVERLONG[chat.overlong](out, conversation, chat.max_tokens)
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


class _VerifiedConversation(NamedTuple):
    """Conversation whose tokens are verified, with the media among them."""

    number: int
    rendered: ConversationText
    tokens: MaskedTokens
    media: list[PlacedMedium]

    def describe_excess(self, limit: int) -> str:
        return f"{self.tokens.ids.size:,} tokens where {limit:,} are allowed"


def _expand_and_verify(
    encoder: ChatEncoder,
    rendered_conversation: _RenderedConversation,
    text: RenderedText,
    masked_tokens: MaskedTokens | str,
    *,
    prove: bool,
) -> _VerifiedConversation:
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
    return _VerifiedConversation(number, rendered, masked_tokens, placed)


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


def _refuse_overlong(_out: EncodedBatchBuilder, conversation: _VerifiedConversation, limit: int) -> None:
    raise OverlongError(
        conversation.number,
        f"has {conversation.describe_excess(limit)}: allow more, or choose a policy for long conversations (drop, "
        "truncate, truncate-left, truncate-turns, split)",
    )


def _drop_overlong(out: EncodedBatchBuilder, conversation: _VerifiedConversation, limit: int) -> None:
    out.drop(conversation.number, f"overlong: {conversation.describe_excess(limit)}")


def _keep_beginning(out: EncodedBatchBuilder, conversation: _VerifiedConversation, limit: int) -> None:
    _truncate(out, conversation, 0, limit)


def _keep_end(out: EncodedBatchBuilder, conversation: _VerifiedConversation, limit: int) -> None:
    size = conversation.tokens.ids.size
    _truncate(out, conversation, size - limit, size)


def _truncate(out: EncodedBatchBuilder, conversation: _VerifiedConversation, start: int, stop: int) -> None:
    """Add a token range of a conversation, and note that it was truncated."""
    # A record may have several samples.
    if _add_token_range(out, conversation, start, stop) and conversation.number not in out.truncated[-1:]:
        out.truncated.append(conversation.number)


def _drop_last_turns(out: EncodedBatchBuilder, conversation: _VerifiedConversation, limit: int) -> None:
    """Add the complete turns that fit; the last of them is trained."""
    number, rendered, tokens, _ = conversation
    excess = conversation.describe_excess(limit)
    heads = tokens.find_tokens(rendered.text, sorted(turn.head for turn in rendered.turns if turn is not None))
    if not heads:
        reason = rendered.problem or "its turns do not begin at token boundaries"
        out.drop(number, f"overlong: {excess}, and it cannot be cut: {reason}")
        return
    heads[0] = 0
    if fitting_tokens := count_fitting_tokens(tokens.flags.trained, heads, limit):
        _add_token_range(out, conversation, 0, fitting_tokens)
    else:
        out.drop(number, f"overlong: {excess}, and no complete trained turn fits")


def count_fitting_tokens(mask: NDArray[np.bool_], heads: Sequence[int], limit: int) -> int:
    """Count the tokens that fit after turns are dropped from a conversation's end.

    Every remaining turn still follows the turn it answers, and the last one is trained. ``heads`` is the first token
    of each turn. Returns 0 if no complete turns with trained tokens fit.
    """
    trained = np.concatenate([[0], np.cumsum(mask, dtype=np.int64)])
    edges = [*heads[1:], mask.size]
    ends = [stop for start, stop in zip(heads, edges, strict=True) if trained[stop] > trained[start]]
    return max((stop for stop in ends if stop <= limit), default=0)


def _split(out: EncodedBatchBuilder, conversation: _VerifiedConversation, limit: int) -> None:
    """Add consecutive parts of ``limit`` tokens as documents; the last may be shorter."""
    number, _, tokens, media = conversation
    size = tokens.ids.size
    if media:
        reason = f"overlong: {conversation.describe_excess(limit)}, and conversations with media are never cut"
        out.drop(number, reason)
        return
    for start in range(0, size, limit):
        stop = min(start + limit, size)
        # The first token of a part is not trained, because no token predicts it.
        if tokens.flags[start + 1 : stop].count_trained():
            out.add(number, tokens.ids[start:stop], tokens.flags[start:stop])
        else:
            out.drop(number, f"nothing to train: tokens {start:,} to {stop:,} of {size:,} in a split conversation")


def _add_token_range(out: EncodedBatchBuilder, conversation: _VerifiedConversation, start: int, stop: int) -> bool:
    """Add a token range of a conversation with the media inside, or drop it.

    It is dropped if a medium would be cut, or if no token is trained (no token predicts the first one). Returns whether
    it was added.
    """
    number, _, tokens, media = conversation
    if is_medium_cut(media, start, stop):
        reason = f"overlong: {conversation.describe_excess(stop - start)}, and a medium is never cut"
        out.drop(number, reason)
        return False
    if not tokens.flags[start + 1 : stop].count_trained():
        out.drop(number, f"nothing to train: tokens {start:,} to {stop:,} of {tokens.ids.size:,}")
        return False
    out.add(number, tokens.ids[start:stop], tokens.flags[start:stop], select_media(media, start, stop))
    return True


# Handling of a conversation with more tokens than allowed, by policy.
_OVERLONG: dict[OverlongPolicy, Callable[[EncodedBatchBuilder, _VerifiedConversation, int], None]] = {
    "drop": _drop_overlong,
    "truncate": _keep_beginning,
    "truncate-left": _keep_end,
    "truncate-turns": _drop_last_turns,
    "split": _split,
    "error": _refuse_overlong,
}
