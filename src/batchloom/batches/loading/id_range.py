"""Final check that all ids of a batch are in the vocabulary."""

import numpy as np
from numpy.typing import NDArray

from batchloom.batches.loading.combined_store import CombinedStore
from batchloom.core.errors import StoreError
from batchloom.plan.packing import Rows
from batchloom.store import Store


def check_id_range(store: Store | CombinedStore, ids: NDArray[np.int64], rows: Rows) -> None:
    """Reject ids outside the vocabulary, including negative ones.

    Raises:
        StoreError: names the shard and the document.
    """
    # As unsigned numbers, negative ids are the largest, so one pass finds both.
    if store.vocab_size is None or int(ids.view(np.uint64).max()) < store.vocab_size:
        return
    name_of = store.shard_of if isinstance(store, CombinedStore) else store.shards.name_of
    span_tokens = store.read(rows.documents, rows.starts, rows.lengths)
    for document, tokens in zip(rows.documents.tolist(), span_tokens, strict=True):
        wide = tokens.astype(np.int64)
        wrong = wide[(wide < 0) | (wide >= store.vocab_size)]
        if wrong.size:
            raise StoreError(
                f"{name_of(document)} holds token id {wrong[0]} in document {document}, and the vocabulary has "
                f"ids 0 to {store.vocab_size - 1}: the shard was changed or damaged. Run batchloom check on the store."
            )
