"""Policies for conversations with more tokens than allowed."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchloom.chat.templates import ConversationText
from batchloom.preparation.documents.encoded_batch import EncodedBatchBuilder, OverlongError
from batchloom.preparation.documents.masked_tokens import MaskedTokens
from batchloom.preparation.documents.media_tokens import PlacedMedium, is_medium_cut, select_media
from batchloom.preparation.settings.recipe import OverlongPolicy


class VerifiedConversation(NamedTuple):
    """Conversation whose tokens are verified, with the media among them."""

    number: int
    rendered: ConversationText
    tokens: MaskedTokens
    media: list[PlacedMedium]

    def describe_excess(self, limit: int) -> str:
        return f"{self.tokens.ids.size:,} tokens where {limit:,} are allowed"


def _refuse_overlong(_out: EncodedBatchBuilder, conversation: VerifiedConversation, limit: int) -> None:
    raise OverlongError(
        conversation.number,
        f"has {conversation.describe_excess(limit)}: allow more, or choose a policy for long conversations (drop, "
        "truncate, truncate-left, truncate-turns, split)",
    )


def _drop_overlong(out: EncodedBatchBuilder, conversation: VerifiedConversation, limit: int) -> None:
    out.drop(conversation.number, f"overlong: {conversation.describe_excess(limit)}")


def _keep_beginning(out: EncodedBatchBuilder, conversation: VerifiedConversation, limit: int) -> None:
    _truncate(out, conversation, 0, limit)


def _keep_end(out: EncodedBatchBuilder, conversation: VerifiedConversation, limit: int) -> None:
    size = conversation.tokens.ids.size
    _truncate(out, conversation, size - limit, size)


def _truncate(out: EncodedBatchBuilder, conversation: VerifiedConversation, start: int, stop: int) -> None:
    """Add a token range of a conversation, and note that it was truncated."""
    # A record may have several samples.
    if _add_token_range(out, conversation, start, stop) and conversation.number not in out.truncated[-1:]:
        out.truncated.append(conversation.number)


def _drop_last_turns(out: EncodedBatchBuilder, conversation: VerifiedConversation, limit: int) -> None:
    """Add the complete turns that fit; the last of them is trained."""
    number, rendered, tokens, _ = conversation
    excess = conversation.describe_excess(limit)
    heads = tokens.find_tokens(rendered.text, sorted(turn.head for turn in rendered.turns if turn is not None))
    if not heads:
        reason = rendered.problem or "its turns do not begin at token boundaries"
        out.drop(number, f"overlong: {excess}, and it cannot be cut: {reason}")
        return
    heads[0] = 0
    if fitting_tokens := count_fitting_tokens(tokens.flags.trained, heads, limit):
        _add_token_range(out, conversation, 0, fitting_tokens)
    else:
        out.drop(number, f"overlong: {excess}, and no complete trained turn fits")


def count_fitting_tokens(mask: NDArray[np.bool_], heads: Sequence[int], limit: int) -> int:
    """Count the tokens that fit after turns are dropped from a conversation's end.

    Every remaining turn still follows the turn it answers, and the last one is trained. ``heads`` is the first token
    of each turn. Returns 0 if no complete turns with trained tokens fit.
    """
    trained = np.concatenate([[0], np.cumsum(mask, dtype=np.int64)])
    edges = [*heads[1:], mask.size]
    ends = [stop for start, stop in zip(heads, edges, strict=True) if trained[stop] > trained[start]]
    return max((stop for stop in ends if stop <= limit), default=0)


def _split(out: EncodedBatchBuilder, conversation: VerifiedConversation, limit: int) -> None:
    """Add consecutive parts of ``limit`` tokens as documents; the last may be shorter."""
    number, _, tokens, media = conversation
    size = tokens.ids.size
    if media:
        reason = f"overlong: {conversation.describe_excess(limit)}, and conversations with media are never cut"
        out.drop(number, reason)
        return
    for start in range(0, size, limit):
        stop = min(start + limit, size)
        # The first token of a part is not trained, because no token predicts it.
        if tokens.flags[start + 1 : stop].count_trained():
            out.add(number, tokens.ids[start:stop], tokens.flags[start:stop])
        else:
            out.drop(number, f"nothing to train: tokens {start:,} to {stop:,} of {size:,} in a split conversation")


def _add_token_range(out: EncodedBatchBuilder, conversation: VerifiedConversation, start: int, stop: int) -> bool:
    """Add a token range of a conversation with the media inside, or drop it.

    It is dropped if a medium would be cut, or if no token is trained (no token predicts the first one). Returns whether
    it was added.
    """
    number, _, tokens, media = conversation
    if is_medium_cut(media, start, stop):
        reason = f"overlong: {conversation.describe_excess(stop - start)}, and a medium is never cut"
        out.drop(number, reason)
        return False
    if not tokens.flags[start + 1 : stop].count_trained():
        out.drop(number, f"nothing to train: tokens {start:,} to {stop:,} of {tokens.ids.size:,}")
        return False
    out.add(number, tokens.ids[start:stop], tokens.flags[start:stop], select_media(media, start, stop))
    return True


# Each adds what remains of a conversation to a batch, given the allowed number of tokens.
OVERLONG: dict[OverlongPolicy, Callable[[EncodedBatchBuilder, VerifiedConversation, int], None]] = {
    "drop": _drop_overlong,
    "truncate": _keep_beginning,
    "truncate-left": _keep_end,
    "truncate-turns": _drop_last_turns,
    "split": _split,
    "error": _refuse_overlong,
}
