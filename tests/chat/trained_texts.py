"""Trained texts of conversations."""

import numpy as np

from batchloom.core.document import Conversation
from batchloom.preparation import ChatRecipe, encode_conversations


def list_trained_texts(encoder, cases, **settings):
    """Return for each conversation the trained texts, or why it is refused."""
    conversations = [Conversation(messages, tools) for messages, tools in cases]
    encoded = encode_conversations(conversations, encoder, ChatRecipe(prove=True, **settings))
    results = {fault.number: fault.reason for fault in [*encoded.faults, *encoded.dropped]}
    starts = np.concatenate([[0], np.cumsum(encoded.lengths, dtype=np.int64)])
    for number, start, stop in zip(encoded.numbers.tolist(), starts[:-1], starts[1:], strict=True):
        ids, mask = encoded.ids[start:stop], encoded.flags.trained[start:stop]
        edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
        results[number] = [encoder.tokenizer.decode(ids[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]
    return [results[number] for number in range(len(cases))]
