"""Tokenizer of a tokenizer.json, which encodes on the fast or the exact engine."""

from collections.abc import Sequence
from typing import Any, final

import numpy as np
import orjson
from numpy.typing import NDArray

from batchloom.tokens.engines import (
    EncodedIds,
    EncodedIdsWithOffsets,
    FastEngine,
    FastEngineError,
    ReferenceEngine,
    concat_ids,
    get_package_version,
)
from batchloom.tokens.id_bytes import compute_id_bytes
from batchloom.tokens.tokenizer import ChatTemplates, EncodingEngine, validate_ids
from batchloom.tokens.tokenizer_definition import TokenizerDefinition


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
