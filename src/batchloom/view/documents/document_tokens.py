"""Tokens of a document with their text, loss and turns."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from batchloom.core.loss_weights import LossFlags
from batchloom.store import Store
from batchloom.tokens import Tokenizer

WINDOW_TOKENS = 2048
# Qwen, Hermes and the templates that follow them.
_CALL_BEGIN = "<tool_call>"
_CALL_END = "</tool_call>"
_REPLACEMENT = "\ufffd"
# A character has at most four bytes, and a token at least one; some tokenizers keep several replacements.
_MAX_GROUP = 8
# Repetitions of a control token that are shown as one.
_MIN_RUN = 4
# Enough for a role whose letters are a token each.
_MAX_ROLE_TOKENS = 16
ROLES = frozenset(
    (
        "system",
        "developer",
        "user",
        "human",
        "assistant",
        "model",
        "gpt",
        "tool",
        "function",
        "observation",
        "ipython",
        "environment",
    )
)


@dataclass(frozen=True, slots=True)
class TokenGroup:
    """Tokens that make whole characters together; usually one token.

    Attributes:
        ids: ids of the tokens.
        text: their text.
        control: whether it is a control token.
        weight: loss weight of the first of them; 0 if it is not trained.
        number: number of the first of them in the document.
    """

    ids: tuple[int, ...]
    text: str
    control: bool
    weight: float
    number: int


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of a conversation, or all tokens of another document.

    Attributes:
        role: role of the turn; empty for tokens outside of turns.
        groups: its tokens.
    """

    role: str
    groups: list[TokenGroup] = field(default_factory=list)

    @property
    def parts(self) -> list[tuple[bool, list[TokenGroup]]]:
        """Tokens in parts, each with whether it is a tool call."""
        calls = _find_calls("".join(group.text for group in self.groups))
        parts: list[tuple[bool, list[TokenGroup]]] = []
        end = 0
        for group in self.groups:
            start = end
            end += len(group.text)
            while calls and calls[0][1] <= start:
                calls.popleft()
            is_call = bool(calls) and calls[0][0] <= start
            if not parts or parts[-1][0] != is_call:
                parts.append((is_call, []))
            parts[-1][1].append(group)
        return parts

    @property
    def trained(self) -> bool:
        """True if any token of the turn is trained."""
        return any(group.weight for group in self.groups)


def _find_calls(text: str) -> deque[tuple[int, int]]:
    """Return the ranges of complete tool calls in a text."""
    calls: deque[tuple[int, int]] = deque()
    end = 0
    while (first := text.find(_CALL_BEGIN, end)) >= 0 and (last := text.find(_CALL_END, first)) >= 0:
        end = last + len(_CALL_END)
        calls.append((first, end))
    return calls


@dataclass(frozen=True, slots=True)
class DocumentWindow:
    """Part of a document that a page shows.

    Attributes:
        start, stop: token range of the part.
        tokens: number of tokens of the document.
        groups: tokens of the part.
        turns: the same tokens by turn.
        loss_weights: loss weight of each token; 0 if it is not trained.
    """

    start: int
    stop: int
    tokens: int
    groups: list[TokenGroup]
    turns: list[Turn]
    loss_weights: list[float]

    @property
    def text(self) -> str:
        """Text of the part, with control tokens spelled out."""
        return "".join(group.text for group in self.groups)


def read_window(store: Store, document: int, start: int, most: int = WINDOW_TOKENS) -> DocumentWindow:
    """Read and decode at most ``most`` tokens of a document from ``start`` on."""
    tokens = int(store.lengths.slice(document, document + 1)[0])
    start = max(0, min(start, tokens - 1))
    stop = min(start + most, tokens)
    token_range = (np.array([document]), np.array([start]), np.array([stop - start]))
    ids = store.read(*token_range)[0]
    weights = read_weights(store, *token_range)
    if store.manifest is None:
        groups = [
            TokenGroup((token,), f"{token} ", control=False, weight=weight, number=start + index)
            for index, (token, weight) in enumerate(zip(ids.tolist(), weights.tolist(), strict=True))
        ]
    else:
        groups = group_tokens(store.tokenizer, ids, weights, start)
    return DocumentWindow(start, stop, tokens, groups, split_turns(groups), weights.tolist())


def read_weights(
    store: Store, documents: NDArray[np.int64], starts: NDArray[np.int64], lengths: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Return the loss weight of each token of token ranges, back to back."""
    return LossFlags.join(store.reader.flags(documents, starts, lengths)).weights


def group_tokens(
    tokenizer: Tokenizer, ids: NDArray[np.generic], weights: NDArray[np.float32], start: int = 0
) -> list[TokenGroup]:
    """Decode tokens one by one; those that share a character become one group.

    The first has the number ``start``. Some tokenizers drop the space at the beginning of a text, so each token is
    decoded after the one before it.
    """
    control_ids = frozenset(tokenizer.control.values())
    numbers: list[int] = ids.tolist()
    groups: list[TokenGroup] = []
    context: list[int] = []
    position = 0
    while position < len(numbers):
        before = tokenizer.decode(context) if context else ""
        for count in range(1, _MAX_GROUP + 1):
            members = numbers[position : position + count]
            text = tokenizer.decode([*context, *members])[len(before) :]
            if not text.endswith(_REPLACEMENT) or position + count >= len(numbers):
                break
        else:
            # Bytes that are no UTF-8 stay one token each.
            members = numbers[position : position + 1]
            text = _REPLACEMENT
        is_control = len(members) == 1 and members[0] in control_ids
        groups.append(TokenGroup(tuple(members), text, is_control, float(weights[position]), start + position))
        # After a control token a text begins anew.
        context = [] if is_control else members
        position += len(members)
    return groups


def list_runs(groups: Sequence[TokenGroup]) -> list[tuple[TokenGroup, int]]:
    """Return groups with their number of repetitions; only control tokens have many."""
    runs: list[tuple[TokenGroup, int]] = []
    for _, members in groupby(groups, key=lambda group: group.ids if group.control else id(group)):
        same = list(members)
        runs += [(same[0], len(same))] if len(same) >= _MIN_RUN else [(group, 1) for group in same]
    return runs


def split_turns(groups: Sequence[TokenGroup]) -> list[Turn]:
    """Split a rendered conversation into turns.

    In ChatML, Llama 3, Gemma and most other templates, a turn begins with a control token and the name of its role.
    Another document is one turn without a role.
    """
    turns = [Turn("")]
    for index, group in enumerate(groups):
        if group.control and (role := _find_role(groups[index + 1 : index + 1 + _MAX_ROLE_TOKENS])):
            turns.append(Turn(role))
        turns[-1].groups.append(group)
    return [turn for turn in turns if turn.groups]


def _find_role(following: Sequence[TokenGroup]) -> str:
    text = ""
    for group in following:
        if group.control or "\n" in group.text:
            text += group.text.partition("\n")[0] if not group.control else ""
            break
        text += group.text
    name = text.strip().lower()
    return name if name in ROLES else ""
