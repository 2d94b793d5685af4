"""Encoding engines: fastokens, and HF tokenizers as the reference."""

import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, final

import numpy as np
import orjson
from numpy.typing import NDArray

from batchloom.core.errors import TokenizerError
from batchloom.tokens.tokenizer import raise_surrogate_error
from batchloom.tokens.tokenizer_definition import TokenizerDefinition, hide_control_tokens

# tokenizers needs 100 to 150 bytes of memory per byte of text.
_BATCH_CHARACTERS = 1 << 18

_MAX_SHOWN_CHARACTERS = 40

EncodedIds = tuple[NDArray[np.uint32], NDArray[np.int64]]
EncodedIdsWithOffsets = tuple[NDArray[np.uint32], NDArray[np.int64], NDArray[np.int64]]


class FastEngineError(Exception):
    """The fast engine does not support a tokenizer, so callers fall back."""


def get_package_version(package: str) -> str:
    """Return the installed version of a package, ``missing`` if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415 - slow to import

    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


@final
class FastEngine:
    """fastokens: the same ids, about forty times as fast.

    Raises:
        FastEngineError: fastokens is missing or does not support this tokenizer.
    """

    def __init__(self, definition: TokenizerDefinition) -> None:
        # Each of its threads, one per core, has a cache of up to 90 MiB and is no faster.
        os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")
        self.version = get_package_version("fastokens")
        try:
            from fastokens import Tokenizer  # noqa: PLC0415 - reading a store needs none

            self._tokenizer = Tokenizer.from_json_str(definition.text.decode())
        except ImportError as error:
            raise FastEngineError(f"fastokens cannot be imported ({error})") from error
        except ValueError as error:
            raise FastEngineError(f"fastokens {self.version} does not support it ({error})") from error

    def encode(self, texts: Sequence[str], *, control: bool = False) -> EncodedIds:
        """Implement ``Tokenizer.encode_batch``."""
        try:
            ids, offsets = self._tokenizer.encode_batch_flat(
                list(texts), add_special_tokens=False, split_special_tokens=not control
            )
        except UnicodeEncodeError as error:
            raise_surrogate_error(texts, error)
            raise
        return np.frombuffer(ids, "<u4"), np.frombuffer(offsets, "<i8")


@final
class ReferenceEngine:
    """HF tokenizers, the reference for other engines, loaded on first use.

    Every method raises TokenizerError if tokenizers refuses the definition.
    """

    def __init__(self, definition: TokenizerDefinition, label: str) -> None:
        self.version = get_package_version("tokenizers")
        self._definition, self._label = definition, label

    def encode(self, texts: Sequence[str], *, control: bool = False) -> EncodedIds:
        """Implement ``Tokenizer.encode_batch``.

        A huge text needs up to 150 bytes of memory per byte.

        Raises:
            TokenizerError: a text that is not Unicode, or that the vocabulary cannot spell.
        """
        encoder = self._control_tokenizer if control else self._encoder
        id_arrays: list[NDArray[np.uint32]] = []
        batch: list[str] = []
        try:
            for batch in _iter_batches(texts):
                encoded = encoder.encode_batch_fast(batch, add_special_tokens=False)
                id_arrays += [np.array(encoding.ids, np.uint32) for encoding in encoded]
        except TypeError as error:
            raise_surrogate_error(texts, error)
            raise
        except Exception as error:
            # tokenizers raises the bare class for an unknown token; subclasses are other errors.
            if type(error) is not Exception:
                raise
            raise TokenizerError(
                f"tokenizer {self._label!r} cannot encode {_find_unencodable_text(encoder, batch)!r} ({error}): "
                "its vocabulary has neither this text nor an unknown token; add one (unk_token, unk_id) to its "
                "tokenizer.json, or choose another --tokenizer"
            ) from error
        return concat_ids(id_arrays)

    def encode_placed(self, text: str) -> EncodedIdsWithOffsets:
        """Implement ``Tokenizer.encode_placed``."""
        try:
            encoding = self._control_tokenizer.encode(text, add_special_tokens=False)
        except TypeError as error:
            raise_surrogate_error([text], error)
            raise
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        return np.array(encoding.ids, np.uint32), offsets[:, 0], offsets[:, 1]

    @cached_property
    def _tokenizer(self) -> Any:
        """Tokenizer that treats control tokens as text."""
        return _load_tokenizer(self._definition.text, self._label, self.version)

    @cached_property
    def _encoder(self) -> Any:
        """Tokenizer that encodes text."""
        if self._definition.model == "BPE":
            return self._tokenizer
        return _load_tokenizer(hide_control_tokens(self._definition), self._label, self.version)

    @cached_property
    def _control_tokenizer(self) -> Any:
        """Tokenizer that parses control tokens and does not trim the offsets of others."""
        tokenizer_json = orjson.loads(self._definition.text)
        text = orjson.dumps({**tokenizer_json, "post_processor": None})
        tokenizer = _load_tokenizer(text, self._label, self.version)
        tokenizer.encode_special_tokens = False
        return tokenizer

    def decode(self, ids: list[int]) -> str:
        """Decode ids, including special tokens."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text


def _load_tokenizer(text: bytes, label: str, version: str) -> Any:
    from tokenizers import Tokenizer  # noqa: PLC0415 - reading a store needs none

    try:
        tokenizer = Tokenizer.from_buffer(text)
    except ValueError as error:
        raise TokenizerError(f"{label}: tokenizers {version} cannot read its tokenizer.json ({error})") from error
    tokenizer.encode_special_tokens = True
    return tokenizer


def _find_unencodable_text(encoder: Any, texts: Sequence[str]) -> str:
    """Return a short substring of these texts that cannot be encoded."""
    failing_text = next((text for text in texts if _fails_to_encode(encoder, text)), "")
    while len(failing_text) > 1:
        middle = len(failing_text) // 2
        halves = [half for half in (failing_text[:middle], failing_text[middle:]) if _fails_to_encode(encoder, half)]
        if not halves:
            break
        failing_text = halves[0]
    return failing_text[:_MAX_SHOWN_CHARACTERS]


def _fails_to_encode(encoder: Any, text: str) -> bool:
    try:
        encoder.encode_batch_fast([text], add_special_tokens=False)
    except Exception as error:
        # See ``ReferenceEngine.encode`` for the bare class.
        if type(error) is not Exception:
            raise
        return True
    return False


def concat_ids(id_arrays: Sequence[NDArray[np.uint32]]) -> EncodedIds:
    """Concatenate the ids of texts, and return their offsets."""
    offsets = np.zeros(len(id_arrays) + 1, np.int64)
    np.cumsum([ids.size for ids in id_arrays], out=offsets[1:])
    return np.concatenate([np.zeros(0, np.uint32), *id_arrays]), offsets


def _iter_batches(texts: Sequence[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        if batch and size + len(text) > _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
        batch.append(text)
        size += len(text)
    if batch:
        yield batch
