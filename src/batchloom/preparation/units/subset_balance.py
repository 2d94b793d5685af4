"""Subset shares in tokens: move single documents if hashes alone miss a share.

The rule and its reasons are in docs/decisions/0031-subset-shares.md, the exact text in docs/format.md.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.wording import format_count
from batchloom.preparation.documents.subsets import hash_to_unit_interval

# Tolerated relative deviation of a token share from the requested one.
TOLERANCE = 0.2
# Maximum number of move candidates per subset; the manifest lists every moved document.
_MAX_CANDIDATES = 1 << 16
# Documents above this fraction of a subset are tried in pairs, so their number is bounded.
_LARGE_FRACTION = 2 * TOLERANCE
_MAX_LARGE = 256


class DocumentGroup(NamedTuple):
    """All documents of one hash, which are always in one subset.

    Attributes:
        position: the hash mapped to [0, 1), which selects the subset.
        hash: 128-bit integer.
        tokens: tokens of all its documents.
    """

    position: float
    hash: int
    tokens: int


def misses_share(share: float, tokens: int, total: int) -> bool:
    """Return whether tokens miss a share of the total by more than the tolerance."""
    return share > 0 and abs(tokens - share * total) > TOLERANCE * share * total


@final
class MoveCandidates:
    """Documents that may leave a subset, collected by hash with bounded memory.

    Args:
        heaviest: keep the hashes with the most tokens; else those with the lowest positions.
        most: maximum number of hashes.
    """

    def __init__(self, *, heaviest: bool, most: int = _MAX_CANDIDATES) -> None:
        self._heaviest, self._most = heaviest, most
        self._hashes = [np.zeros((0, 2), np.uint64)]
        self._tokens = [np.zeros(0, np.int64)]
        self._pending = 0

    def add(self, hashes: NDArray[np.uint64], lengths: NDArray[np.unsignedinteger]) -> None:
        """Add documents: hashes uint64 [D, 2] (low, high) and their lengths in tokens [D]."""
        self._hashes.append(hashes)
        self._tokens.append(lengths.astype(np.int64))
        self._pending += len(hashes)
        if self._pending > 4 * self._most:
            self._merge()

    def groups(self) -> list[DocumentGroup]:
        """Return the collected hashes by ascending position."""
        self._merge()
        hashes, tokens = self._hashes[0], self._tokens[0]
        positions = hash_to_unit_interval(hashes[:, 1])
        rows = zip(positions.tolist(), hashes.tolist(), tokens.tolist(), strict=True)
        document_groups = [DocumentGroup(position, (high << 64) | low, count) for position, (low, high), count in rows]
        return sorted(document_groups)

    def _merge(self) -> None:
        hashes, tokens = np.concatenate(self._hashes), np.concatenate(self._tokens)
        order = np.lexsort((hashes[:, 0], hashes[:, 1]))
        hashes, tokens = hashes[order], tokens[order]
        fresh = np.ones(len(hashes), bool)
        fresh[1:] = (hashes[1:] != hashes[:-1]).any(axis=1)
        starts = np.flatnonzero(fresh)
        if len(starts):
            hashes, tokens = hashes[starts], np.add.reduceat(tokens, starts)
        if len(hashes) > self._most:
            key = -tokens if self._heaviest else hash_to_unit_interval(hashes[:, 1])
            some = np.sort(np.argsort(key, kind="stable")[: self._most])
            hashes, tokens = hashes[some], tokens[some]
        self._hashes, self._tokens, self._pending = [hashes], [tokens], 0


@dataclass(frozen=True, slots=True)
class DocumentMoves:
    """Documents that enter and leave a subset."""

    entering: tuple[DocumentGroup, ...] = ()
    leaving: tuple[DocumentGroup, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens that the subset gains; negative for a loss."""
        return sum(group.tokens for group in self.entering) - sum(group.tokens for group in self.leaving)


def choose_moves(
    subset_groups: Iterable[DocumentGroup], train_groups: Iterable[DocumentGroup], tokens: int, target: float
) -> DocumentMoves:
    """Choose the documents that bring a subset to its target.

    Documents up to 40 % of the target (the width of the tolerated range) come first: enough of them
    always end within that range. One or two larger ones are used only if the small ones do not suffice.
    Groups are those that may move, by position; ``tokens`` includes documents that may not.
    """
    subset_groups, train_groups = list(subset_groups), list(train_groups)
    small = [group for group in subset_groups if group.tokens <= _LARGE_FRACTION * target]
    small_train_groups = [group for group in train_groups if group.tokens <= _LARGE_FRACTION * target]
    large = [group for group in (*subset_groups, *train_groups) if group.tokens > _LARGE_FRACTION * target]
    subset_hashes = {group.hash for group in subset_groups}
    current_tokens = tokens - sum(group.tokens for group in subset_groups if group.tokens > _LARGE_FRACTION * target)
    least = current_tokens - sum(group.tokens for group in small)
    selected_large = _choose_large(
        large, least, current_tokens + sum(group.tokens for group in small_train_groups), target
    )
    current_tokens += sum(group.tokens for group in selected_large)
    entering = [group for group in selected_large if group.hash not in subset_hashes]
    selected_hashes = {group.hash for group in selected_large}
    leaving = [
        group
        for group in subset_groups
        if group.tokens > _LARGE_FRACTION * target and group.hash not in selected_hashes
    ]
    for group in sorted(small, key=lambda group: -group.tokens):
        if group.tokens < 2 * (current_tokens - target):
            leaving.append(group)
            current_tokens -= group.tokens
    for group in small_train_groups:
        if group.tokens < 2 * (target - current_tokens):
            entering.append(group)
            current_tokens += group.tokens
    return DocumentMoves(tuple(entering), tuple(leaving))


def _choose_large(large: list[DocumentGroup], least: int, most: int, target: float) -> tuple[DocumentGroup, ...]:
    """Choose up to two large documents, to come closest to a target with small ones.

    ``large`` is in order of preference. ``least`` are the tokens of the subset without any that may leave it,
    ``most`` those with all small ones that may enter it.
    """

    def distance(groups: tuple[DocumentGroup, ...]) -> float:
        added = sum(group.tokens for group in groups)
        return max(0.0, target - (most + added), least + added - target)

    # Of the documents that alone are too long, only the shortest can be the best choice.
    fitting = [group for group in large if group.tokens <= (1 + TOLERANCE) * target][:_MAX_LARGE]
    shortest = sorted(large, key=lambda group: group.tokens)[:1]
    choices = ((), *((group,) for group in (*fitting, *shortest)), *combinations(fitting, 2))
    return min(choices, key=distance)


def balance_subsets(
    shares: Mapping[str, float], tokens: Mapping[str, int], groups: Mapping[str, list[DocumentGroup]]
) -> dict[int, str]:
    """Return the subset of each hash that must move to balance the token shares.

    A subset with a share is not left empty if another can spare a document: the shortest one.

    Args:
        shares: requested share of the tokens of each subset but ``train``, in order.
        tokens: tokens of each subset by hash alone, including earlier generations.
        groups: documents of each subset that may move, by position.
    """
    total, counts = sum(tokens.values()), dict(tokens)
    members = {name: list(groups[name]) for name in ("train", *shares)}

    def move(documents: Iterable[DocumentGroup], source: str, destination: str) -> None:
        moving = set(documents)
        members[source] = [group for group in members[source] if group not in moving]
        members[destination].extend(moving)
        counts[source] -= sum(group.tokens for group in moving)
        counts[destination] += sum(group.tokens for group in moving)

    for name, share in shares.items():
        if misses_share(share, tokens[name], total):
            train = sorted(members["train"])
            moves = choose_moves(groups[name], train, tokens[name], share * total)
            move(moves.entering, "train", name)
            move(moves.leaving, name, "train")
    for name in (*shares, "train"):
        if counts[name] == 0 and (name == "train" or shares[name] > 0):
            spared = _find_spare_document(members, counts, required=name == "train")
            if spared is not None:
                move([spared[1]], spared[0], name)
    natural = {group.hash: name for name, documents in groups.items() for group in documents}
    moved = {
        group.hash: name for name, documents in members.items() for group in documents if natural[group.hash] != name
    }
    return dict(sorted(moved.items()))


def _find_spare_document(
    members: Mapping[str, list[DocumentGroup]], counts: Mapping[str, int], *, required: bool
) -> tuple[str, DocumentGroup] | None:
    """Return a subset and its shortest document for a subset that is empty.

    ``train`` gives first, then any subset that keeps a document. If none can, a required
    subset takes the last document of another.
    """
    choices = [
        (counts[name] == group.tokens, name != "train", group.tokens, group.position, name, group)
        for name, documents in members.items()
        for group in documents
        if required or counts[name] > group.tokens
    ]
    if not choices:
        return None
    *_, name, document = min(choices)
    return name, document


def describe_missed_shares(
    shares: Mapping[str, float],
    tokens: Mapping[str, int],
    documents: int,
    *,
    balance: bool = True,
    texts: bool = True,
    splits: bool = True,
) -> list[str]:
    """Return a note for each subset that misses its share of the tokens.

    Args:
        shares: requested share of the tokens of each subset but ``train``.
        tokens: tokens of each subset.
        documents: number of documents of all subsets.
        balance: single documents may move; else hashes alone decide.
        texts: all documents are texts.
        splits: the inputs have plain-text files, which can be split into more documents.
    """
    total = sum(tokens.values())
    reason = "documents stay whole" if balance else "hashes alone decide, and document lengths are ignored"
    remedies = [
        "Add data",
        *(["leave --no-balance-subsets out"] if texts and not balance else []),
        *(["cut texts into smaller documents (--split-on paragraph)"] if splits else []),
    ]
    return [
        f"The {name} subset has {_format_percent(tokens[name] / total)} of the tokens instead of "
        f"{_format_percent(share)} "
        f"(--{name}-fraction): {reason}, and there are {format_count(documents, 'document')}. "
        f"{', '.join(remedies)}, or "
        f"prepare {name} as a separate store."
        for name, share in shares.items()
        if tokens.get(name) and misses_share(share, tokens[name], total)
    ]


def _format_percent(share: float) -> str:
    return f"{100 * share:.3g} %"
