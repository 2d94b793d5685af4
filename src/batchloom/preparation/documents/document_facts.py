"""Hash, size and excerpt of documents before they are tokenized."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from batchloom.chat.schema import Document, TokenRow
from batchloom.core.document import (
    CarryingPrompt,
    Conversation,
    InterleavedText,
    LabelledConversation,
    PreferencePair,
    SegmentedText,
)
from batchloom.core.medium import Medium
from batchloom.sources.formats import excerpt_record


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
    sizes = []
    digests = []
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


def _document_bytes(document: Document) -> bytes:
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


# Answers of one text with different labels are no duplicates, so the bad label is XORed into the key.
BAD_LABEL = np.uint64(0x9E3779B97F4A7C15)


def make_duplicate_keys(hashes: NDArray[np.uint64], bad: NDArray[np.bool_]) -> NDArray[np.uint64]:
    """Return the keys that duplicates share: content hash and label, uint64 [D, 2]."""
    keys = hashes.copy()
    keys[bad, 0] ^= BAD_LABEL
    return keys


def iter_texts(document: Document) -> Iterator[str]:
    """Yield the texts of a document, for tokenizer training."""
    if isinstance(document, str):
        yield document
    elif isinstance(document, PreferencePair):
        yield from iter_texts(document.chosen)
        yield from iter_texts(document.rejected)
    elif isinstance(document, InterleavedText | SegmentedText):
        yield from document.texts
    elif isinstance(document, LabelledConversation | CarryingPrompt):
        yield from iter_texts(document.conversation)
    elif isinstance(document, Conversation):
        for message in document.messages:
            content = message.get("content")
            if isinstance(content, str):
                yield content
            elif isinstance(content, list):
                yield from (part["text"] for part in content if "text" in part)


def make_snippet(document: Document) -> str:
    """Return the beginning of a document, to help a person find it."""
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


def estimate_characters(document: Document) -> int:
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
