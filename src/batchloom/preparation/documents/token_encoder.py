"""Encoding of texts, token rows, texts with media, and fill-in-the-middle (FIM).

FIM is that of Bavarian et al., Efficient Training of Language Models to Fill in the Middle (2022): a text is cut at two
characters, each part is tokenized alone, and the parts are joined behind sentinel tokens, as prefix, suffix, middle
(PSM) or as suffix, prefix, middle (SPM, in the form that the paper trains jointly with PSM: prefix token, suffix token,
suffix, middle token, prefix, middle).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from batchloom.chat import RenderError
from batchloom.chat.schema import TokenRow
from batchloom.chat.templates import TEXT_PLACEHOLDERS, ConversationText, PlaceholderSpan, subtract_spans
from batchloom.core.document import (
    CarryingPrompt,
    Conversation,
    InterleavedText,
    LabelledConversation,
    PreferencePair,
    SegmentedText,
)
from batchloom.core.errors import TokenizerError, UnusableRecordError
from batchloom.core.fingerprint import derive_key
from batchloom.core.keyed_hashing import GOLDEN, HashKey, hash_indices, mix_in_place
from batchloom.core.loss_weights import LossFlags
from batchloom.core.medium import PLACEHOLDER_PATTERN, Medium
from batchloom.core.settings import suggest
from batchloom.preparation.documents.chat_encoding import (
    ControlEncoder,
    MediaText,
    PlacedMedium,
    RenderedText,
    expand_media_tokens,
    mask_texts,
    write_expansions,
)
from batchloom.preparation.documents.conversation_encoder import (
    UNTRAINED_RULE,
    EncodedBatch,
    EncodedBatchBuilder,
    EncodeFault,
    add_control_tokens,
    check_surrogates,
    describe_excess,
    write_with_control,
)
from batchloom.preparation.settings.read_recipe import FimRecipe
from batchloom.preparation.settings.recipe import ChatRecipe
from batchloom.sources.formats import excerpt_record
from batchloom.tokens import Tokenizer, verify_control_tokens

_UNTRAINED = f"{UNTRAINED_RULE}: none of its tokens is trained"
# Sentinels before prefix, suffix and middle, as published models have them.
_KNOWN_SENTINELS = (
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("<PRE>", "<SUF>", "<MID>"),
    ("[PREFIX]", "[SUFFIX]", "[MIDDLE]"),
)
_NO_TOKEN = -1
_U32_SHIFT = np.uint64(32)


@dataclass(frozen=True, slots=True)
class FimCutter:
    """Fill-in-the-middle settings resolved for a tokenizer."""

    rate: float
    spm_rate: float
    key: HashKey  # Hash key that selects texts and cut offsets
    prefix: int
    suffix: int
    middle: int


@dataclass(frozen=True, slots=True)
class FimSegments:
    """Texts as segments that are tokenized separately, in output order."""

    parts: list[str]
    before: NDArray[np.int64]  # Id of the sentinel before each segment, -1 for none, int64 [segments]
    bounds: NDArray[np.int64]  # Index of the first segment of each text, and the total, int64 [texts + 1]
    moved: int  # Number of texts that were cut


def make_fim_cutter(fim: FimRecipe | None, tokenizer: Tokenizer) -> FimCutter | None:
    """Resolve the sentinel tokens of a tokenizer; None without a FIM recipe."""
    if fim is None:
        return None
    words = {**tokenizer.added, **tokenizer.control}
    names = _find_sentinels(fim, words, tokenizer.name)
    parts, _ = tokenizer.encode_batch(["a", "a"])
    if (decoded := tokenizer.decode(parts)) != "aa":
        raise TokenizerError(
            f"fim: tokenizer {tokenizer.name!r} adds text at the beginning of a text ('a' and 'a' together decode "
            f"to {decoded!r}), so the parts of a text would not decode to the text: choose a byte-level one, or "
            "leave --fim out."
        )
    key = derive_key("fim", fim.seed)
    return FimCutter(float(fim.rate), float(fim.spm_rate), key, *(words[name] for name in names))


def _find_sentinels(fim: FimRecipe, words: Mapping[str, int], tokenizer_name: str) -> Sequence[str]:
    """Return the names of the prefix, suffix and middle tokens."""
    configured_names = [name for name in fim.sentinels if name is not None]
    for name in configured_names:
        if name not in words:
            raise TokenizerError(f"fim: tokenizer {tokenizer_name!r} has no token {name!r}{suggest(name, words)}")
    if configured_names:
        return configured_names
    for names in _KNOWN_SENTINELS:
        if all(name in words for name in names):
            return names
    examples = "; ".join(" ".join(names) for names in _KNOWN_SENTINELS[:2])
    raise TokenizerError(
        f"fim: tokenizer {tokenizer_name!r} has none of the known fill-in-the-middle tokens ({examples} and "
        "others): add three special tokens to its tokenizer.json, name those it has (fim: {rate: 0.5, prefix: "
        "..., suffix: ..., middle: ...}), or leave --fim out."
    )


def apply_fim(texts: list[str], hashes: NDArray[np.uint64], cutter: FimCutter) -> FimSegments:
    """Cut some of the texts and reorder their segments.

    ``hashes`` are the document hashes of the store, uint64 [texts, 2]; they alone decide.
    """
    seeds = mix_in_place(hash_indices(hashes[:, 0].view(np.int64), cutter.key) ^ hashes[:, 1])
    cut_mask, suffix_first = (_random_uniform(seeds, 1) < cutter.rate, _random_uniform(seeds, 2) < cutter.spm_rate)
    sizes = np.array([len(text) for text in texts], np.uint64) + np.uint64(1)
    cut_offsets = np.sort([_random_below(seeds, 3, sizes), _random_below(seeds, 4, sizes)], axis=0)
    parts: list[str] = []
    before: list[int] = []
    bounds = np.zeros(len(texts) + 1, np.int64)
    psm, spm = ((cutter.prefix, cutter.suffix, cutter.middle), (cutter.prefix, cutter.suffix, cutter.middle, _NO_TOKEN))
    rows = zip(texts, cut_mask.tolist(), suffix_first.tolist(), *cut_offsets.tolist(), strict=True)
    for number, (text, is_cut, first, start, stop) in enumerate(rows, 1):
        if not is_cut:
            parts.append(text)
            before.append(_NO_TOKEN)
        elif first:
            parts += ("", text[stop:], text[:start], text[start:stop])
            before += spm
        else:
            parts += (text[:start], text[stop:], text[start:stop])
            before += psm
        bounds[number] = len(parts)
    return FimSegments(parts, np.array(before, np.int64), bounds, int(cut_mask.sum()))


def insert_sentinels(
    ids: NDArray[np.uint32], starts: NDArray[np.int64], segments: FimSegments
) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """Insert the sentinels into the ids, and return the offset of each text.

    ``starts`` are the offsets of the segments in ``ids`` [segments + 1].
    """
    has_sentinel = segments.before != _NO_TOKEN
    ids_with_sentinels = np.insert(ids, starts[:-1][has_sentinel], segments.before[has_sentinel].astype(np.uint32))
    sentinel_counts = np.concatenate([[0], np.cumsum(has_sentinel)])
    return ids_with_sentinels, (starts + sentinel_counts)[segments.bounds]


def _random_words(seeds: NDArray[np.uint64], number: int) -> NDArray[np.uint64]:
    """Return word ``number`` of each text's own SplitMix64 generator."""
    return mix_in_place(seeds + np.uint64(GOLDEN * number % (1 << 64)))


def _random_uniform(seeds: NDArray[np.uint64], number: int) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each text."""
    return (_random_words(seeds, number) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _random_below(seeds: NDArray[np.uint64], number: int, sizes: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return an integer below its size for each text; sizes are below 2**32."""
    return (((_random_words(seeds, number) >> _U32_SHIFT) * sizes) >> _U32_SHIFT).astype(np.int64)


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
            start, size = stop, 0
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
            out.faults.append(EncodeFault(number, reason))
        elif not row.flags.is_plain and not row.flags.count_trained():
            out.dropped.append(EncodeFault(number, _UNTRAINED))
        elif row.ids.size:
            out.add(number, row.ids, row.flags)
    return out.build(dtype)


def encode_segments(
    documents: Sequence[SegmentedText], tokenizer: Tokenizer, chat: ChatRecipe | None, dtype: np.dtype[np.generic]
) -> EncodedBatch:
    """Encode each segment alone, without adding tokens, as axolotl does.

    With ``train_on`` ``all``, every segment is trained. A text that is too long is dropped, never cut.
    """
    out, texts, numbers = EncodedBatchBuilder(), list[str](), list[int]()
    flags: list[LossFlags] = []
    least = 1.0 if chat is not None and chat.train_on == "all" else 0.0
    for number, document in enumerate(documents):
        weights = np.array(document.trained, np.float64)
        try:
            check_surrogates("".join(document.texts))
            flags.append(LossFlags.from_weights(np.where(weights > 0, weights, least) * document.weight))
        except (RenderError, UnusableRecordError) as error:
            out.faults.append(EncodeFault(number, str(error)))
            continue
        numbers.append(number)
        texts += document.texts
    ids, bounds = _get_exact_tokenizer(tokenizer).encode_batch(texts, control=True)
    sizes, first = np.diff(bounds), 0
    for number, segment_flags in zip(numbers, flags, strict=True):
        segments = slice(first, first + len(documents[number].texts))
        first = segments.stop
        begin, end = int(bounds[segments.start]), int(bounds[segments.stop])
        token_flags = segment_flags.repeat(sizes[segments])
        if chat is not None and (excess := describe_excess(end - begin, number, chat)):
            out.dropped.append(EncodeFault(number, f"overlong: {excess}"))
        elif token_flags.count_trained():
            out.add(number, ids[begin:end], token_flags)
        else:
            out.dropped.append(EncodeFault(number, _UNTRAINED))
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


def hash_documents(documents: Sequence[Any]) -> NDArray[np.uint64]:
    """Return the hash of each document as (low, high) halves, uint64 [D, 2].

    XXH3-128 of the UTF-8 of a text; of ids as uint32; of the JSON of everything else: text segments and media,
    the messages, tools and flags of a conversation, both sides of a pair, a labelled conversation without
    its label.
    """
    return split_digests(hash_and_measure(documents)[0])


def hash_and_measure(documents: Sequence[Any]) -> tuple[list[bytes], NDArray[np.int64]]:
    """Return the hash of each document as 16 bytes, and its size in bytes, int64 [D]."""
    content = str.encode if documents and isinstance(documents[0], str) else _document_bytes
    sizes, digests = [], []
    for document in documents:
        data = content(document)
        sizes.append(len(data))
        digests.append(xxhash.xxh3_128_digest(data))
    return digests, np.array(sizes, np.int64)


def split_digests(digests: Sequence[bytes]) -> NDArray[np.uint64]:
    """Convert 16-byte hashes to (low, high) halves, uint64 [D, 2]."""
    # A digest is big-endian, with its high half first.
    halves = np.frombuffer(b"".join(digests), ">u8").reshape(-1, 2)
    return halves[:, ::-1].astype(np.uint64)


def _document_bytes(
    document: Conversation
    | InterleavedText
    | SegmentedText
    | PreferencePair
    | LabelledConversation
    | CarryingPrompt
    | TokenRow,
) -> bytes:
    if isinstance(document, TokenRow):
        return document.ids.astype("<u4").tobytes()
    content: Any
    if isinstance(document, InterleavedText):
        if not document.media:
            return document.texts[0].encode()
        content = document.texts, _media_identity(document.media)
    elif isinstance(document, SegmentedText):
        content = document.texts, document.trained
    elif isinstance(document, PreferencePair):
        content = [_side_content(document.chosen), _side_content(document.rejected)]
    elif isinstance(document, CarryingPrompt):
        # Equal prompts with other columns, such as another solution, are no duplicates.
        content = _side_content(document.conversation), document.fields.decode()
    else:
        content = _side_content(document.conversation if isinstance(document, LabelledConversation) else document)
    return msgspec.json.encode(content, enc_hook=str)


def _side_content(side: Conversation | str) -> Any:
    if isinstance(side, str):
        return side
    content: tuple[Any, ...] = side.messages, side.tools, side.trained, side.completion
    if side.template_args is not None:
        content = (*content, {"template_args": side.template_args})
    if side.weight != 1:
        content = (*content, {"weight": side.weight})
    return (*content, _media_identity(side.media)) if side.media else content


def _media_identity(media: Sequence[Medium]) -> list[tuple[str, str]]:
    return [(medium.kind, medium.info.digest.hex() if medium.info else medium.location) for medium in media]


def make_snippet(
    document: str
    | InterleavedText
    | SegmentedText
    | Conversation
    | PreferencePair
    | LabelledConversation
    | CarryingPrompt
    | TokenRow,
) -> str:
    if isinstance(document, TokenRow):
        return str(document.ids[:16].tolist())
    if isinstance(document, InterleavedText | SegmentedText):
        document = "".join(document.texts)
    elif isinstance(document, PreferencePair):
        document = document.chosen
    elif isinstance(document, LabelledConversation | CarryingPrompt):
        document = document.conversation
    content = document if isinstance(document, str) else document.messages[:4]
    return excerpt_record(msgspec.json.encode(content, enc_hook=str))


def estimate_characters(document: Any) -> int:
    """Estimate the number of characters of a document, to bound batch sizes."""
    if isinstance(document, str):
        return len(document)
    if isinstance(document, TokenRow):
        return 4 * int(document.ids.size)
    if isinstance(document, PreferencePair):
        return estimate_characters(document.chosen) + estimate_characters(document.rejected)
    if isinstance(document, LabelledConversation):
        return estimate_characters(document.conversation)
    if isinstance(document, CarryingPrompt):
        return estimate_characters(document.conversation) + len(document.fields)
    if isinstance(document, InterleavedText | SegmentedText):
        media = document.media if isinstance(document, InterleavedText) else ()
        return sum(map(len, document.texts)) + _embedded_bytes(media)
    contents = [message.get("content") for message in document.messages]
    text_characters = sum(len(text) if isinstance(text, str) else 1000 for text in contents)
    return text_characters + _embedded_bytes(document.media)


def _embedded_bytes(media: Sequence[Medium]) -> int:
    return sum(len(medium.data or b"") for medium in media)


# Marks a medium until the processor's text replaces it; offsets are known, so any character works.
_MEDIUM_MARK = "\ue000"


def encode_interleaved(
    documents: Sequence[InterleavedText], encoder: ControlEncoder, dtype: np.dtype[np.generic]
) -> EncodedBatch:
    """Encode texts with media, with end tokens and, if the model expects it, BOS.

    Texts without media are tokenized as plain text. The ids of others are those that the processor makes of
    the text and its media; a control token that a text spells stays text.
    """
    out, tokenizer = EncodedBatchBuilder(), encoder.tokenizer
    document_tokens = _encode_with_media(documents, encoder, out.faults)
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
            out.dropped.append(EncodeFault(number, _UNTRAINED))
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
    documents: Sequence[InterleavedText], encoder: ControlEncoder, faults: list[EncodeFault]
) -> dict[int, tuple[NDArray[np.uint32], LossFlags, list[PlacedMedium]]]:
    """Return ids, mask and media of documents with media; append others to ``faults``."""
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
            faults.append(EncodeFault(number, str(error)))
            continue
        trained_spans = subtract_spans([(0, len(text.rendered.text))], text.placeholder_ranges)
        numbers.append(number)
        media_texts.append(text)
        texts.append(RenderedText(text.rendered.text, text.rendered.control, trained_spans, lenient=True))
    document_tokens = {}
    results = mask_texts(encoder, texts) if texts else []
    for number, text, masked_tokens in zip(numbers, media_texts, results, strict=True):
        if isinstance(masked_tokens, str):
            faults.append(EncodeFault(number, masked_tokens))
            continue
        try:
            expanded, placed = expand_media_tokens(masked_tokens, text, documents[number].media, encoder)
        except RenderError as error:
            faults.append(EncodeFault(number, str(error)))
        else:
            document_tokens[number] = expanded.ids, expanded.flags, placed
    return document_tokens


def _mark_media(document: InterleavedText) -> ConversationText:
    """Return a document as text with one mark per medium."""
    placeholders, offset = [], 0
    for text, medium in zip(document.texts, document.media, strict=False):
        offset += len(text)
        placeholders.append(PlaceholderSpan(offset, offset + 1, medium.kind, typed=False))
        offset += 1
    text = _MEDIUM_MARK.join(document.texts)
    return ConversationText(text, [], "", [], None, (), tuple(placeholders))


# Answers of one text with different labels are no duplicates, so the bad label is XORed into the key.
BAD_LABEL = np.uint64(0x9E3779B97F4A7C15)


def make_duplicate_keys(hashes: NDArray[np.uint64], bad: NDArray[np.bool_]) -> NDArray[np.uint64]:
    """Return the keys that duplicates share: content hash and label, uint64 [D, 2]."""
    keys = hashes.copy()
    keys[bad, 0] ^= BAD_LABEL
    return keys


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
