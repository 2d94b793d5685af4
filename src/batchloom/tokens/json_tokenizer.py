"""A tokenizer.json at work: encoding on the fast engine or the exact one, decoding on the exact."""

from collections.abc import Sequence
from typing import Any, final

import numpy as np
import orjson
from numpy.typing import NDArray

from batchloom.tokens.definition import Definition
from batchloom.tokens.engines import (
    FastEngine,
    FastEngineError,
    Ids,
    ReferenceEngine,
    joined,
    version_of,
)
from batchloom.tokens.seam import Engine, checked_ids


@final
class JsonTokenizer:
    """Any tokenizer that a tokenizer.json describes. Engines are loaded when first needed.

    Attributes:
        definition: the checked tokenizer.json.
    """

    def __init__(
        self,
        name: str,
        definition: Definition,
        *,
        fast: FastEngine | str | None = None,
        reference: ReferenceEngine | None = None,
        apart: tuple[str, str] = ("", ""),
    ) -> None:
        """Wrap a definition.

        Args:
            name: what the user called it.
            definition: the checked tokenizer.json.
            fast: the fast engine, or why it is not to be used; None loads it when needed.
            reference: the exact engine; None loads it when needed.
            apart: characters whose texts go to the exact engine, and why.
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

    @property
    def engine(self) -> Engine:
        """What encodes here."""
        fast = self._fast
        if isinstance(fast, FastEngine):
            return Engine("fastokens", fast.version, self._apart_note)
        return Engine("tokenizers", version_of("tokenizers"), fast)

    @property
    def _fast(self) -> FastEngine | str:
        """The fast engine, or why it is not used."""
        if self._loaded_fast is None:
            try:
                self._loaded_fast = FastEngine(self.definition)
            except FastEngineError as error:
                self._loaded_fast = str(error)
        return self._loaded_fast

    @property
    def _reference(self) -> ReferenceEngine:
        if self._loaded_reference is None:
            self._loaded_reference = ReferenceEngine(self.definition, self.name)
        return self._loaded_reference

    def encode_batch(self, texts: Sequence[str]) -> Ids:
        """See :class:`~batchloom.tokens.seam.Tokenizer`."""
        fast = self._fast
        if not isinstance(fast, FastEngine):
            return self._reference.encode(texts)
        # Looking into every text costs a twentieth of encoding it: only where there is a reason.
        if not self._apart:
            return fast.encode(texts)
        apart = [i for i, text in enumerate(texts) if any(odd in text for odd in self._apart)]
        if not apart:
            return fast.encode(texts)
        rest = list(texts)
        for place in apart:
            rest[place] = ""
        ids, offsets = fast.encode(rest)
        pieces = np.split(ids, offsets[1:-1])
        for place in apart:
            pieces[place] = self._reference.encode([texts[place]])[0]
        return joined(pieces)

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        """See :class:`~batchloom.tokens.seam.Tokenizer`."""
        return self._reference.decode(checked_ids(ids, self).tolist())

    def state(self) -> dict[str, Any]:
        """See :class:`~batchloom.tokens.seam.Tokenizer`."""
        return {
            "state_version": 1,
            "kind": "tokenizer.json",
            "name": self.name,
            "fingerprint": self.fingerprint,
            "end_id": self.end_id,
            "bos_id": self.bos_id,
            "tokenizer": orjson.loads(self.definition.text),
        }

    def on_exact(self, why: str, reference: ReferenceEngine) -> "JsonTokenizer":
        """The same tokenizer, encoding on the exact engine; ``why`` becomes the engine's note."""
        return JsonTokenizer(self.name, self.definition, fast=why, reference=reference)

    def with_apart(self, characters: str, why: str, reference: ReferenceEngine) -> "JsonTokenizer":
        """The same tokenizer, texts that hold one of ``characters`` encoded on the exact engine."""
        return JsonTokenizer(
            self.name,
            self.definition,
            fast=self._fast,
            reference=reference,
            apart=(characters, why),
        )
