"""Recognition of next-token labels, which a model may not shift again."""

import threading
from typing import Any

from batchloom.batches.assembly.array_filling import IGNORE_INDEX

# Comparing labels waits for a GPU, so processes without such labels do not.
_IN_USE = threading.Event()


def note_shifted_labels() -> None:
    """Remember that batches of this process have labels of next tokens."""
    _IN_USE.set()


def may_be_shifted() -> bool:
    """Return whether some batch of this process has labels of next tokens."""
    return _IN_USE.is_set()


def are_next_tokens(input_ids: Any, labels: Any) -> bool:
    """Return whether labels [R, S] are the next tokens of ids [R, S].

    Most must be, since an augmentation replaces some ids; and more than are the tokens themselves.
    """
    if not may_be_shifted():
        return False
    targets = labels[:, :-1]
    trained = (targets != IGNORE_INDEX).sum()
    following = (targets == input_ids[:, 1:]).sum()
    own = (targets == input_ids[:, :-1]).sum()
    return bool((following > own) & (2 * following >= trained))
