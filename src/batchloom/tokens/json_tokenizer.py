"""Tokenizer of a tokenizer.json, on fastokens or on HF tokenizers (exact)."""

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, final

import numpy as np
import orjson
from numpy.typing import NDArray

from batchloom.core.errors import TokenizerError
from batchloom.tokens.tokenizer import (
    ChatTemplates,
    EncodedIds,
    EncodedIdsWithOffsets,
    EncodingEngine,
    concat_ids,
    raise_surrogate_error,
    validate_ids,
)
from batchloom.tokens.tokenizer_definition import TokenizerDefinition, hide_control_tokens, make_byte_alphabet

# tokenizers needs 100 to 150 bytes of memory per byte of text.
_BATCH_CHARACTERS = 1 << 18

_MAX_SHOWN_CHARACTERS = 40

# Normalizers that leave most texts unchanged. The sum of the bytes reveals the others.
_LOSSLESS_NORMALIZERS = frozenset(("NFC",))


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


def compute_id_bytes(definition: TokenizerDefinition) -> NDArray[np.int64] | None:
    """Return bytes per id, int64 [vocab_size]; None if this is no byte-level BPE.

    An id without text has -1. Every character of a byte-level BPE token stands for one byte; an added token stands
    for its spelling. This requires that nothing is prepended to a text or stripped around a control token.
    """
    tokenizer_json = orjson.loads(definition.text)
    model = tokenizer_json["model"]
    is_supported = (
        model.get("type", "BPE") == "BPE"
        and not model.get("continuing_subword_prefix")
        and not model.get("end_of_word_suffix")
        and all(step.get("type") in _LOSSLESS_NORMALIZERS for step in _iter_steps(tokenizer_json.get("normalizer")))
        and _is_byte_level(list(_iter_steps(tokenizer_json.get("pre_tokenizer"))))
        and not any(
            token[flag] for token in tokenizer_json["added_tokens"] for flag in ("lstrip", "rstrip", "single_word")
        )
    )
    if not is_supported:
        return None
    alphabet = frozenset(make_byte_alphabet())
    lengths = np.full(definition.vocab_size, -1, np.int64)
    for token, number in model["vocab"].items():
        if alphabet.issuperset(token):
            lengths[number] = len(token)
    for token in tokenizer_json["added_tokens"]:
        lengths[token["id"]] = len(token["content"].encode())
    return lengths


def _is_byte_level(steps: list[Mapping[str, Any]]) -> bool:
    kinds = [step.get("type") for step in steps]
    return (
        kinds.count("ByteLevel") == 1
        and set(kinds) <= {"ByteLevel", "Split", "Digits", "Punctuation"}
        and not any(step.get("add_prefix_space") for step in steps)
        and not any(step.get("behavior") == "Removed" for step in steps)
    )


def _iter_steps(step: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the single steps of a normalizer or pre-tokenizer."""
    if isinstance(step, Mapping):
        if step.get("type") != "Sequence":
            yield step
        for key in ("normalizers", "pretokenizers"):
            for part in step.get(key) or ():
                yield from _iter_steps(part)


@final
class JsonTokenizer:
    """Tokenizer of a tokenizer.json. Engines are loaded on first use.

    Attributes:
        definition: the validated tokenizer.json.
    """

    def __init__(
        self,
        name: str,
        definition: TokenizerDefinition,
        *,
        fast: FastEngine | str | None = None,
        reference: ReferenceEngine | None = None,
        apart: tuple[str, str] = ("", ""),
        chat: ChatTemplates | None = None,
    ) -> None:
        """Create a tokenizer.

        Args:
            name: name that the user gave.
            definition: the validated tokenizer.json.
            fast: the fast engine, or the reason not to use it; None loads it when needed.
            reference: the exact engine; None loads it when needed.
            apart: characters whose texts need the exact engine, and the reason.
            chat: chat settings in its files.
        """
        self.name = name
        self.definition = definition
        self.vocab_size = definition.vocab_size
        self.end_id = definition.end_id
        self.bos_id = definition.bos_id
        self.fingerprint = definition.fingerprint
        self.vocabulary_hash = definition.vocabulary_hash
        self.lossy = definition.lossy
        self._loaded_fast = fast
        self._loaded_reference = reference
        self._apart, self._apart_note = apart
        self.control = definition.control
        self.added = definition.added
        self.chat = chat or ChatTemplates()

    @property
    def engine(self) -> EncodingEngine:
        fast = self._fast_engine
        if isinstance(fast, FastEngine):
            return EncodingEngine("fastokens", fast.version, self._apart_note)
        return EncodingEngine("tokenizers", get_package_version("tokenizers"), fast)

    @property
    def apart(self) -> str:
        """Characters whose texts need the exact engine."""
        return self._apart

    @property
    def _fast_engine(self) -> FastEngine | str:
        """Fast engine, or the reason why it is not used."""
        if self._loaded_fast is None:
            try:
                self._loaded_fast = FastEngine(self.definition)
            except FastEngineError as error:
                self._loaded_fast = str(error)
        return self._loaded_fast

    @property
    def reference(self) -> ReferenceEngine:
        """HF tokenizers with the same definition, loaded on first use."""
        if self._loaded_reference is None:
            self._loaded_reference = ReferenceEngine(self.definition, self.name)
        return self._loaded_reference

    def id_bytes(self) -> NDArray[np.int64] | None:
        return compute_id_bytes(self.definition)

    def encode_batch(self, texts: Sequence[str], *, control: bool = False) -> EncodedIds:
        fast = self._fast_engine
        if not isinstance(fast, FastEngine):
            return self.reference.encode(texts, control=control)
        # Searching every text costs a twentieth of encoding it, so do it only if needed.
        if not self._apart:
            return fast.encode(texts, control=control)
        exact_indices = [i for i, text in enumerate(texts) if any(odd in text for odd in self._apart)]
        if not exact_indices:
            return fast.encode(texts, control=control)
        fast_texts = list(texts)
        for index in exact_indices:
            fast_texts[index] = ""
        ids, offsets = fast.encode(fast_texts, control=control)
        id_arrays = np.split(ids, offsets[1:-1])
        for index in exact_indices:
            id_arrays[index] = self.reference.encode([texts[index]], control=control)[0]
        return concat_ids(id_arrays)

    def encode_placed(self, text: str) -> EncodedIdsWithOffsets:
        return self.reference.encode_placed(text)

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        return self.reference.decode(validate_ids(ids, self).tolist())

    def state(self) -> dict[str, Any]:
        state = {
            "state_version": 1,
            "kind": "tokenizer.json",
            "name": self.name,
            "fingerprint": self.fingerprint,
            "end_id": self.end_id,
            "bos_id": self.bos_id,
            "tokenizer": orjson.loads(self.definition.text),
        }
        if self.chat.templates or self.chat.tokens:
            tokens, templates = dict(self.chat.tokens), dict(self.chat.templates)
            state["chat"] = {"templates": templates, "tokens": tokens}
        return state

    def with_exact_engine(self, why: str, reference: ReferenceEngine) -> "JsonTokenizer":
        """Return the tokenizer on the exact engine, with ``why`` as the engine's note."""
        return JsonTokenizer(self.name, self.definition, fast=why, reference=reference, chat=self.chat)

    def with_exact_characters(self, characters: str, why: str, reference: ReferenceEngine) -> "JsonTokenizer":
        """Return the tokenizer with the exact engine for texts with ``characters``."""
        return JsonTokenizer(
            self.name,
            self.definition,
            fast=self._fast_engine,
            reference=reference,
            apart=(characters, why),
            chat=self.chat,
        )
