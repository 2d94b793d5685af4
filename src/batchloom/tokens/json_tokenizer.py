"""Tokenizer of a tokenizer.json on one of three engines, and its training."""

import copy
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import chain
from typing import Any, final

import msgspec
import numpy as np
import orjson
from numpy.typing import NDArray

from batchloom.core.errors import TokenizerError
from batchloom.core.fingerprint import fingerprint
from batchloom.core.slow_loads import announce_load
from batchloom.tokens.splintr_encoder import SplintrEncoder
from batchloom.tokens.tokenizer import (
    END_OF_TEXT,
    ChatTemplates,
    EncodedIds,
    EncodedIdsWithOffsets,
    EncodingEngine,
    Tokenizer,
    concat_ids,
    raise_surrogate_error,
    validate_ids,
)
from batchloom.tokens.tokenizer_definition import (
    clean_tokenizer_json,
    fingerprint_definition,
    hide_control_tokens,
    is_lossy,
    iter_steps,
    make_byte_alphabet,
    mark_control_tokens,
    read_vocabulary,
    refuse_growth,
    replace_unsplit_metaspace,
)

# tokenizers needs 100 to 150 bytes of memory per byte of text.
_BATCH_CHARACTERS = 1 << 18

_MAX_SHOWN_CHARACTERS = 40

# Normalizers that leave most texts unchanged. The sum of the bytes reveals the others.
_LOSSLESS_NORMALIZERS = frozenset(("NFC",))


def get_package_version(package: str) -> str:
    """Return the installed version of a package, ``missing`` if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def _find_unencodable_text(encoder: Any, texts: Sequence[str]) -> str:
    """Return the beginning of a word that cannot be encoded, else of a text."""
    words = (word for text in texts for word in text.split())
    return next((text for text in chain(words, texts) if _fails_to_encode(encoder, text)), "")[:_MAX_SHOWN_CHARACTERS]


def _fails_to_encode(encoder: Any, text: str) -> bool:
    try:
        encoder.encode_batch_fast([text], add_special_tokens=False)
    except BaseException as error:
        if not _is_engine_failure(error):
            raise
        return True
    return False


def _is_engine_failure(error: BaseException) -> bool:
    """Return whether tokenizers could not encode a text.

    It raises the bare class for an unknown token, and a panic of Rust for a pattern that takes too many steps.
    """
    return type(error) is Exception or type(error).__name__ == "PanicException"


def _iter_batches(texts: Sequence[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        if batch and size + len(text) > _BATCH_CHARACTERS:
            yield batch
            batch = []
            size = 0
        batch.append(text)
        size += len(text)
    if batch:
        yield batch


def compute_id_bytes(text: bytes, vocab_size: int) -> NDArray[np.int64] | None:
    """Return bytes per id, int64 [vocab_size]; None if this is no byte-level BPE.

    An id without text has -1. Each character of a byte-level BPE token represents one byte, and an added token
    represents its spelling. This requires that nothing is prepended to a text or stripped around a control token.
    """
    tokenizer_json = orjson.loads(text)
    model = tokenizer_json["model"]
    is_supported = (
        model.get("type", "BPE") == "BPE"
        and not model.get("continuing_subword_prefix")
        and not model.get("end_of_word_suffix")
        and all(step.get("type") in _LOSSLESS_NORMALIZERS for step in iter_steps(tokenizer_json.get("normalizer")))
        and _is_byte_level(list(iter_steps(tokenizer_json.get("pre_tokenizer"))))
        and not any(
            token[flag] for token in tokenizer_json["added_tokens"] for flag in ("lstrip", "rstrip", "single_word")
        )
    )
    if not is_supported:
        return None
    alphabet = frozenset(make_byte_alphabet())
    lengths = np.full(vocab_size, -1, np.int64)
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


def _describe_failure(name: str, error: BaseException, encoder: Any, texts: Sequence[str]) -> TokenizerError:
    reason = (
        "its vocabulary has neither this text nor an unknown token; add one (unk_token, unk_id) to its "
        "tokenizer.json, or choose another --tokenizer"
    )
    if type(error) is not Exception:
        pattern = "a pattern of its normalizer or pre_tokenizer"
        reason = f"{pattern} takes too many steps on this text; choose another --tokenizer"
    text = _find_unencodable_text(encoder, texts)
    return TokenizerError(f"tokenizer {name!r} cannot encode {text!r} ({error}): {reason}")


def _load_exact(name: str, text: bytes, *, control: bool) -> Any:
    """Load a tokenizer.json by HF tokenizers; ``control`` parses control tokens."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_buffer(text)
    except BaseException as error:
        if not isinstance(error, ValueError) and not _is_engine_failure(error):
            raise
        version = get_package_version("tokenizers")
        raise TokenizerError(f"{name}: tokenizers {version} cannot read its tokenizer.json ({error})") from error
    tokenizer.encode_special_tokens = not control
    return tokenizer


@final
class _DefinitionDecoder:
    """Decoder of a complete tokenizer.json, loaded on first use."""

    def __init__(self, name: str, definition: bytes) -> None:
        self._name = name
        self._definition = definition

    @cached_property
    def _tokenizer(self) -> Any:
        return _load_exact(self._name, self._definition, control=False)

    def decode(self, ids: list[int]) -> str:
        """Decode ids with control tokens spelled out."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text


@final
class _TokenDecoder:
    """Decoder of the tokens of a BPE.

    It is loaded without the vocabulary and merges, which take 0.1 s for GPT-2.
    """

    def __init__(self, name: str, step: object, words: Mapping[str, int]) -> None:
        self._name = name
        self._step = step
        self._words = words

    @cached_property
    def _tokens(self) -> dict[int, str]:
        return {number: word for word, number in self._words.items()}

    @cached_property
    def _decoder(self) -> Any:
        """Decoder of tokens, None to join them by spaces."""
        model = {"type": "BPE", "vocab": {}, "merges": []}
        definition = {"version": "1.0", "model": model, "decoder": self._step}
        return _load_exact(self._name, orjson.dumps(definition), control=False).decoder

    def decode(self, ids: list[int]) -> str:
        """Decode ids with control tokens spelled out."""
        tokens = [self._tokens[number] for number in ids if number in self._tokens]
        return " ".join(tokens) if self._decoder is None else str(self._decoder.decode(tokens))


@final
class JsonTokenizer:
    """Tokenizer of a tokenizer.json. Engines are loaded on first use.

    fastokens gives the ids of HF tokenizers about forty times as fast; it supports BPE. splintr does so about ten
    times as fast for Unigram and WordPiece. An engine is not used if it is missing, does not support the tokenizer, or
    encodes texts differently (see ``engine_conformance.py``).
    """

    def __init__(
        self,
        name: str,
        cleaned: Mapping[str, Any],
        words: Mapping[str, int],
        *,
        end: str,
        bos: str | None,
        chat: ChatTemplates | None = None,
        label: str = "",
    ) -> None:
        """Create the tokenizer in which ``end`` and ``bos`` are control tokens.

        ``cleaned`` comes from :func:`clean_tokenizer_json`, ``words`` from :func:`read_vocabulary`; ``label`` is the
        name in errors. Raises TokenizerError for a token outside the vocabulary, and for steps that could make a text
        many times as long.
        """
        label = label or name
        for token in (end, bos):
            if token is not None and token not in words:
                raise TokenizerError(f"{label}: token {token!r} is not in its vocabulary")
        refuse_growth(cleaned, label)
        tokens = mark_control_tokens(cleaned["added_tokens"], words, [end, bos])
        tokenizer_json = {**cleaned, "added_tokens": tokens}
        try:
            # The JSON in UTF-8, without truncation and padding.
            self.json = orjson.dumps(tokenizer_json)
        except orjson.JSONEncodeError as error:
            raise TokenizerError(f"{label} cannot be written as JSON: {error}") from error
        self.name = name
        self.vocab_size = max(words.values()) + 1
        self.end_id = words[end]
        self.bos_id = None if bos is None else words[bos]
        self.control = {token["content"]: token["id"] for token in tokens if token["special"]}
        self.added = {token["content"]: token["id"] for token in tokens if not token["special"]}
        self.fingerprint = fingerprint_definition(tokenizer_json, self.end_id, self.bos_id)
        self._words = words
        supported_json = replace_unsplit_metaspace(tokenizer_json)
        self._fastokens_json = self.json if supported_json is tokenizer_json else orjson.dumps(supported_json)
        self.lossy = is_lossy(tokenizer_json["model"], words)
        self._is_bpe = tokenizer_json["model"].get("type", "BPE") == "BPE"
        self._decoder: _TokenDecoder | _DefinitionDecoder
        if self._is_bpe:
            self._decoder = _TokenDecoder(name, tokenizer_json.get("decoder"), words)
        else:
            self._decoder = _DefinitionDecoder(name, self.json)
        self.chat = chat or ChatTemplates()

    @cached_property
    def vocabulary_hash(self) -> str:
        return fingerprint(self._words)

    @cached_property
    def engine(self) -> EncodingEngine:
        try:
            package = "splintr-rs" if isinstance(self._fast, SplintrEncoder) else "fastokens"
        except TokenizerError as error:
            return EncodingEngine("tokenizers", get_package_version("tokenizers"), str(error))
        return EncodingEngine(package, get_package_version(package))

    def load_engines(self) -> None:
        """Load both engines side by side: the fast one takes half a second for GPT-2.

        Raises TokenizerError if HF tokenizers cannot load it.
        """
        with announce_load(f"tokenizer {self.name}"), ThreadPoolExecutor(1) as executor:
            exact = executor.submit(lambda: self._encoder)
            _ = self.engine
            exact.result()

    def with_engine(self, engine: EncodingEngine) -> "JsonTokenizer":
        """Return the tokenizer on another engine; both share what is already loaded."""
        tokenizer = copy.copy(self)
        tokenizer.engine = engine
        return tokenizer

    def id_bytes(self) -> NDArray[np.int64] | None:
        return compute_id_bytes(self.json, self.vocab_size)

    def encode_batch(self, texts: Sequence[str], *, control: bool = False) -> EncodedIds:
        if self.engine.name == "tokenizers" or (control and isinstance(self._fast, SplintrEncoder)):
            return self.encode_exactly(texts, control=control)
        exact_indices = self._find_exact_texts(texts)
        if not exact_indices:
            return self._encode_fast(texts, control=control)
        fast_texts = list(texts)
        for index in exact_indices:
            fast_texts[index] = ""
        ids, offsets = self._encode_fast(fast_texts, control=control)
        id_arrays = np.split(ids, offsets[1:-1])
        for index in exact_indices:
            id_arrays[index] = self.encode_exactly([texts[index]], control=control)[0]
        return concat_ids(id_arrays)

    def _find_exact_texts(self, texts: Sequence[str]) -> list[int]:
        """Return the indices of texts to which the fast engine may give other ids."""
        encoder = self._fast
        rare = self.engine.exact_characters
        if isinstance(encoder, SplintrEncoder):
            return [i for i, text in enumerate(texts) if encoder.differs(text) or any(odd in text for odd in rare)]
        # Searching every text costs a twentieth of encoding it, so do it only if needed.
        return [i for i, text in enumerate(texts) if any(odd in text for odd in rare)] if rare else []

    def _encode_fast(self, texts: Sequence[str], *, control: bool) -> EncodedIds:
        encoder = self._fast
        try:
            if isinstance(encoder, SplintrEncoder):
                return encoder.encode_batch(texts)
            ids, offsets = encoder.encode_batch_flat(
                list(texts), add_special_tokens=False, split_special_tokens=not control
            )
        except UnicodeEncodeError as error:
            raise_surrogate_error(texts, error)
            raise
        except ValueError:
            # Its pattern takes too many steps for one engine, often not for the other.
            return self.encode_exactly(texts, control=control)
        return np.frombuffer(ids, "<u4"), np.frombuffer(offsets, "<i8")

    def encode_exactly(self, texts: Sequence[str], *, control: bool = False) -> EncodedIds:
        """Encode texts like ``encode_batch``, with HF tokenizers."""
        encoder = self._control_encoder if control else self._encoder
        id_arrays: list[NDArray[np.uint32]] = []
        batch: list[str] = []
        try:
            for batch in _iter_batches(texts):
                encoded = encoder.encode_batch_fast(batch, add_special_tokens=False)
                id_arrays += [np.array(encoding.ids, np.uint32) for encoding in encoded]
        except TypeError as error:
            raise_surrogate_error(texts, error)
            raise
        except BaseException as error:
            if not _is_engine_failure(error):
                raise
            raise _describe_failure(self.name, error, encoder, batch) from error
        return concat_ids(id_arrays)

    def encode_placed(self, text: str) -> EncodedIdsWithOffsets:
        try:
            encoding = self._control_encoder.encode(text, add_special_tokens=False)
        except TypeError as error:
            raise_surrogate_error([text], error)
            raise
        except BaseException as error:
            if not _is_engine_failure(error):
                raise
            raise _describe_failure(self.name, error, self._control_encoder, [text]) from error
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        return np.array(encoding.ids, np.uint32), offsets[:, 0], offsets[:, 1]

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        return self._decoder.decode(validate_ids(ids, self).tolist())

    def state(self) -> dict[str, Any]:
        return self._make_state(orjson.loads(self.json))

    def encode_state(self) -> bytes:
        """Return the JSON of ``state()``, without parsing the definition again."""
        return msgspec.json.encode(self._make_state(msgspec.Raw(self.json)))

    def _make_state(self, definition: object) -> dict[str, Any]:
        state = {
            "state_version": 1,
            "kind": "tokenizer.json",
            "name": self.name,
            "fingerprint": self.fingerprint,
            "end_id": self.end_id,
            "bos_id": self.bos_id,
            "tokenizer": definition,
        }
        if self.chat.templates or self.chat.tokens:
            state["chat"] = {"templates": dict(self.chat.templates), "tokens": dict(self.chat.tokens)}
        return state

    @cached_property
    def _fast(self) -> Any:
        """Tokenizer of fastokens or splintr; raises TokenizerError without either."""
        reasons = []
        for package, load in (("fastokens", self._load_fastokens), ("splintr-rs", self._load_splintr)):
            try:
                return load()
            except ImportError as error:
                reasons.append(f"{package} cannot be imported ({error})")
            except BaseException as error:
                if not isinstance(error, ValueError) and not _is_engine_failure(error):
                    raise
                reasons.append(f"{package} {get_package_version(package)} does not support it ({error})")
        raise TokenizerError("; ".join(reasons))

    def _load_fastokens(self) -> Any:
        # Each of its threads, one per core, has a cache of up to 90 MiB and is no faster.
        os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")
        from fastokens import Tokenizer

        return Tokenizer.from_json_str(self._fastokens_json.decode())

    def _load_splintr(self) -> SplintrEncoder:
        if self.added:
            raise ValueError("it has added tokens that match in texts")
        return SplintrEncoder({**orjson.loads(hide_control_tokens(self.json, self.control)), "added_tokens": []})

    @cached_property
    def _encoder(self) -> Any:
        """Tokenizer that encodes control tokens as text."""
        text = self.json if self._is_bpe else hide_control_tokens(self.json, self.control)
        return _load_exact(self.name, text, control=False)

    @cached_property
    def _control_encoder(self) -> Any:
        """Tokenizer that parses control tokens and does not trim the offsets of others."""
        tokenizer_json = orjson.loads(self.json)
        return _load_exact(self.name, orjson.dumps({**tokenizer_json, "post_processor": None}), control=True)


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
    from tokenizers import (
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
    return JsonTokenizer(name, cleaned, read_vocabulary(cleaned, name), end=END_OF_TEXT, bos=None)


def _iter_valid_unicode(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise_surrogate_error([text], error)
        yield text
