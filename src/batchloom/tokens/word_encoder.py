"""Encoding of texts word by word, so that an equal word is encoded once.

This is exact for a tokenizer that splits a text at white space before its model sees it, and that normalizes each word
by itself. Words are separated only between two characters that combine with no neighbour; all other white space stays
within a word.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, final

import numpy as np

from batchloom.tokens.tokenizer import EncodedIds, concat_ids

# Latin, Greek, Cyrillic, Armenian, Hebrew, Arabic, kana, Han, Hangul and some punctuation, without combining
# characters and without those that a normalizer maps to white space.
_SAFE = (
    r"[!-~\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f\u0386-\u0481\u048a-\u052f\u0531-\u0556\u0561-\u0587\u05d0-\u05ea"
    r"\u0620-\u064a\u0671-\u06d3\u3041-\u3096\u30a1-\u30fa\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7a3"
    r"\u2013\u2014\u2018\u2019\u201c\u201d\u2026\u00ab\u00bb\u3001\u3002\uff0c]"
)
# Compiled on use: that takes as long as importing ten modules, and few tokenizers need it.
_SINGLE_SPACE = rf" (?<={_SAFE}.)(?={_SAFE})"
_ANY_SPACE = rf"[ \n\t](?<={_SAFE}.)[ \n\t]*(?={_SAFE})"
_SPACE_EXAMPLES = ("a\nb", "a\tb", "a  b", "a \n\n\t b")
# Words of BERT's pre-tokenizer in ASCII text without control characters, which its normalizer removes.
_BERT_WORD = re.compile(r"[A-Za-z0-9]+|[!-/:-@\[-`{-~]")
_CONTROL_CHARACTER = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")

_NORMALIZERS = frozenset(
    ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "BertNormalizer", "Nmt", "Precompiled", "Strip")
)
_SPLITTERS = frozenset(("BertPreTokenizer", "Whitespace", "WhitespaceSplit"))
# Approximate memory of a cached word besides its characters, and of all of them.
_WORD_BYTES, _MAX_CACHE_BYTES = 200, 128 << 20
# Characters after which texts that consist of new words, such as code, are encoded at once: that is faster.
_LEARNED_CHARACTERS = 4 << 20


def is_word_by_word(normalizers: Sequence[Mapping[str, Any]], pre_tokenizers: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the ids of a word depend on it alone, from a tokenizer's steps."""
    if not pre_tokenizers or not all(map(_normalizes_words, normalizers)):
        return False
    first, *others = pre_tokenizers
    if first.get("type") == "Metaspace":
        return not others and _marks_words(first, ("always", "first"))
    return first.get("type") in _SPLITTERS and all(
        step.get("type") in ("Punctuation", "Digits", *_SPLITTERS) or _marks_words(step, ("always",)) for step in others
    )


def _normalizes_words(step: Mapping[str, Any]) -> bool:
    if step.get("type") != "Replace":
        return step.get("type") in _NORMALIZERS
    if step["pattern"] == {"Regex": " {2,}"}:
        return step["content"] in (" ", "\u2581")
    return not re.search(r"\s", step["pattern"].get("String", " ") + step["content"])


def _marks_words(step: Mapping[str, Any], schemes: Sequence[str]) -> bool:
    """Return whether a step marks the beginning of each word, wherever it is."""
    default = "always" if step.get("add_prefix_space", True) else "never"
    scheme = step.get("prepend_scheme", default)
    return step.get("type") == "Metaspace" and step.get("split", True) and scheme in schemes


@final
class WordEncoder:
    """Encoder of texts with a bounded cache of the ids of words.

    Args:
        encode: encoder of words as texts of their own.
        encode_texts: encoder of complete texts, with the same ids.
        is_bert: whether BERT's normalizer and pre-tokenizer are the only steps.
    """

    def __init__(
        self,
        encode: Callable[[Sequence[str]], EncodedIds],
        encode_texts: Callable[[Sequence[str]], EncodedIds],
        *,
        is_bert: bool,
    ) -> None:
        self._encode, self._encode_texts, self._is_bert = encode, encode_texts, is_bert
        self._ids: dict[str, bytes] = {}
        self._size = self._characters = 0
        ids, offsets = encode(["a b", *_SPACE_EXAMPLES])
        any_space = all(np.array_equal(ids[: offsets[1]], section) for section in np.split(ids, offsets[1:-1]))
        self._separator = re.compile(_ANY_SPACE if any_space else _SINGLE_SPACE, re.DOTALL)

    def _split(self, text: str) -> list[str]:
        if self._is_bert and text.isascii() and not _CONTROL_CHARACTER.search(text):
            return _BERT_WORD.findall(text)
        return self._separator.split(text)

    def encode_batch(self, texts: Sequence[str]) -> EncodedIds:
        """Encode texts; see :class:`~batchloom.tokens.Tokenizer`."""
        words_by_text = list(map(self._split, texts))
        if self._size > _MAX_CACHE_BYTES:
            self._ids, self._size = {}, 0
        # Another thread may replace the dict.
        ids_by_word = self._ids
        new_words = list(set(chain.from_iterable(words_by_text)).difference(ids_by_word))
        size, new_size = sum(map(len, texts)), sum(map(len, new_words))
        self._characters += size
        if self._characters > _LEARNED_CHARACTERS and 2 * new_size > size:
            return self._encode_texts(texts)
        if new_words:
            ids, offsets = self._encode(new_words)
            encoded, bounds = ids.astype("<u4").tobytes(), (4 * offsets).tolist()
            for word, start, stop in zip(new_words, bounds, bounds[1:], strict=False):
                ids_by_word[word] = encoded[start:stop]
            self._size += new_size + len(encoded) + _WORD_BYTES * len(new_words)
        get_ids = ids_by_word.__getitem__
        return concat_ids([np.frombuffer(b"".join(map(get_ids, words)), "<u4") for words in words_by_text])
