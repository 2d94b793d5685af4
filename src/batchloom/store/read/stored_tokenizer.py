"""Loading of the tokenizer saved in a store."""

import json
from collections.abc import Callable

from batchloom.core.errors import StoreError, TokenizerError
from batchloom.core.files import describe_os_error
from batchloom.store.format.layout import TOKENIZER_NAME
from batchloom.store.format.manifest import TokenizerEntry
from batchloom.tokens import Tokenizer, restore_tokenizer

_RESTORE_REMEDY = "restore it from the original store"


def load_stored_tokenizer(read_file: Callable[[str], bytes], store_path: str, entry: TokenizerEntry) -> Tokenizer:
    """Load the tokenizer of a store and check it against the manifest.

    Raises StoreError if it cannot be read or is not the manifest's, and TokenizerError if its state is invalid.
    """
    path = f"{store_path}/{TOKENIZER_NAME}"
    try:
        state = json.loads(read_file(TOKENIZER_NAME))
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {describe_os_error(error)}; {_RESTORE_REMEDY}.") from error
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path} cannot be read: {error}; {_RESTORE_REMEDY}.") from error
    try:
        tokenizer = restore_tokenizer(state)
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from error
    if (tokenizer.vocab_size, tokenizer.end_id, tokenizer.bos_id) != (
        entry.vocab_size,
        entry.end_id,
        entry.bos_id,
    ):
        raise StoreError(
            f"{path} has {tokenizer.vocab_size} ids, end {tokenizer.end_id} and BOS {tokenizer.bos_id}; the "
            f"manifest says {entry.vocab_size}, {entry.end_id} and {entry.bos_id}: it is another tokenizer."
        )
    if tokenizer.fingerprint != entry.fingerprint:
        raise StoreError(
            f"{path} has fingerprint {tokenizer.fingerprint}, the manifest says {entry.fingerprint}: it is another "
            "tokenizer."
        )
    return tokenizer
