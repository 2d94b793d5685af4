"""Training of a byte-level BPE on text: ``train:8192``."""

import re
from collections.abc import Iterable, Iterator

import orjson

from batchloom.core.errors import TokenizerError
from batchloom.tokens.json_tokenizer import JsonTokenizer
from batchloom.tokens.tokenizer import END_OF_TEXT, Tokenizer, raise_surrogate_error
from batchloom.tokens.tokenizer_definition import clean_tokenizer_json

# The bytes, the end token and one merge. A smaller vocabulary would be the tokenizer `bytes`.
MIN_VOCAB_SIZE = 258
MAX_VOCAB_SIZE = 1 << 20


def parse_train_spec(spec: str) -> int | None:
    """Return the vocabulary size of ``train:N``, None for any other spec.

    Raises:
        TokenizerError: N is not a number, or an unsupported vocabulary size.
    """
    kind, colon, number = spec.partition(":")
    if kind != "train" or not colon:
        return None
    if not re.fullmatch("[0-9]{1,18}", number):
        raise TokenizerError(f"{spec!r}: {number!r} is not a vocabulary size; write it in digits, such as train:8192")
    size = int(number)
    if size < MIN_VOCAB_SIZE:
        raise TokenizerError(
            f"{spec!r}: a vocabulary holds the 256 bytes, the end token and at least one merge, so "
            f"{MIN_VOCAB_SIZE} is the smallest; give train:{MIN_VOCAB_SIZE} or more, or bytes"
        )
    if size > MAX_VOCAB_SIZE:
        raise TokenizerError(f"{spec!r}: the largest vocabulary size is {MAX_VOCAB_SIZE}")
    return size


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE with GPT-2's pre-tokenizer.

    The algorithm is that of Sennrich et al. 2016 and Radford et al. 2019. The same texts give the same tokenizer
    in any order. Every text can be encoded, because the 256 bytes are always tokens.

    Args:
        texts: training texts, read once.
        vocab_size: number of tokens, including the 256 bytes and ``<|endoftext|>`` (the last id).
            Too little text gives fewer: a pair must occur twice to be merged.

    Raises:
        TokenizerError: a size that ``train:N`` would refuse, or a text that is not Unicode.
    """
    size = parse_train_spec(f"train:{vocab_size}")
    from tokenizers import (  # noqa: PLC0415 - reading a store needs none
        AddedToken,
        Tokenizer as Trained,
        decoders,
        models,
        pre_tokenizers,
        trainers,
    )

    trained = Trained(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        min_frequency=2,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    trained.train_from_iterator(_iter_valid_unicode(texts), trainer)
    trained.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    name = f"train:{size}"
    cleaned = clean_tokenizer_json(orjson.loads(trained.to_str()), name)
    return JsonTokenizer(name, cleaned, end=END_OF_TEXT, bos=None)


def _iter_valid_unicode(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise_surrogate_error([text], error)
        yield text
