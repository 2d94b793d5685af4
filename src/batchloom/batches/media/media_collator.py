"""Collator that adds the media of preference pairs to the batches of a trainer."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import numpy as np

from batchloom.batches.assembly.batch_assembly import BatchLayout
from batchloom.batches.assembly.batch_spec import DEFAULT_MEDIA_SPEC
from batchloom.batches.assembly.device import to_torch
from batchloom.batches.media.media_stores import make_media_of_stores
from batchloom.core.errors import InputError
from batchloom.plan.packing import Rows
from batchloom.store import PreferencePairs
from batchloom.store.read import has_media


@final
class PairMediaCollator:
    """Collator of preference pairs that adds the inputs of a multimodal model.

    It adds the features of the processor, such as ``pixel_values``, in the order of the rows: those of the chosen
    answers, then those of the rejected ones. Models with M-RoPE also get ``position_ids``, and models that mark the
    tokens of images ``token_type_ids``.

    Args:
        pairs: the pairs of a store with media.
        collate: collator of their items that makes ``input_ids`` of B chosen and then B rejected answers, as a tensor
            [2 * B, tokens] with padding at its end, such as TRL's ``DataCollatorForPreference``. It must not cut.

    Raises:
        InputError: the store holds no media.
    """

    def __init__(
        self, pairs: PreferencePairs, collate: Callable[[Sequence[Mapping[str, Any]]], Mapping[str, Any]]
    ) -> None:
        if not has_media(pairs.store):
            raise InputError(f"{pairs.store.location.name} holds no media: use the other collator alone.")
        self._store, self._collate = pairs.store, collate
        self._media = make_media_of_stores([pairs.store], DEFAULT_MEDIA_SPEC)

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        if "documents" not in examples[0]:
            raise InputError(
                "The items have no documents, which name their media: set remove_unused_columns=False in the settings "
                "of the trainer, which removes them otherwise."
            )
        batch = dict(self._collate(examples))
        documents = np.array([example["documents"] for example in examples], np.int64).T.ravel()
        lengths, zeros = self._store.lengths.take(documents).astype(np.int64), np.zeros_like(documents)
        pointers = np.arange(len(documents) + 1)
        rows = Rows(pointers, zeros.astype(np.int32), documents, zeros, lengths, zeros)
        ids = np.asarray(batch["input_ids"])
        arrays = {"input_ids": ids, "position_ids": np.broadcast_to(np.arange(ids.shape[1]), ids.shape)}
        layout = BatchLayout(pointers, lengths, zeros, 1, "aligned", sliced=False)
        self._media.begin(arrays, self._store.reader, rows, layout, varlen=False).finish()
        del arrays["input_ids"]
        if not self._media.traits.mrope:
            del arrays["position_ids"]
        return batch | to_torch(arrays)
