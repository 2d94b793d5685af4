"""Assignment of documents to subsets by their hash, and balance of token shares.

If hashes alone miss a share, single documents move: the rule and its reasons are in
docs/explanation/decisions/0031-subset-shares.md, the exact text in docs/reference/format.md.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.wording import format_count
from batchloom.store.format import SUBSETS

# At most two subsets are filled from another, so a third hash proves that one remains.
_SMALLEST_COUNT = 4


@dataclass(frozen=True, slots=True)
class SubsetRule:
    """Rule that chooses the subset of each document.

    Attributes:
        val_fraction: share of documents in ``val``.
        test_fraction: share of documents in ``test``.
        overrides: subsets of single hashes (128-bit integers) that differ from the shares.
    """

    val_fraction: float
    test_fraction: float
    overrides: tuple[tuple[int, str], ...] = ()

    @property
    def shares(self) -> dict[str, float]:
        """Shares of all subsets but ``train``."""
        return {"val": self.val_fraction, "test": self.test_fraction}

    def list_required(self) -> tuple[str, ...]:
        """List the subsets that must not be empty if there are enough documents."""
        shares = {"train": 1.0, **self.shares}
        return tuple(name for name in SUBSETS if shares[name] > 0)

    def empty_notes(
        self, shards: Iterable[Mapping[str, tuple[int, int]]], existing_subsets: Iterable[str] = ()
    ) -> list[str]:
        """Return a note for each required subset that stays empty.

        Args:
            shards: for each unit, (number of the first shard, number of shards) by subset.
            existing_subsets: subsets that already hold documents.
        """
        filled = {*existing_subsets} | {name for unit in shards for name, (_, count) in unit.items() if count}
        return [
            f"There is no {name} subset: the input has too few distinct documents. Add data, cut texts into "
            f"smaller documents (--split-on paragraph), or set --{name}-fraction 0."
            for name in self.list_required()
            if name not in filled
        ]

    def codes(self, rows: NDArray[np.void]) -> NDArray[np.uint8]:
        """Return the index in ``SUBSETS`` of each document, uint8 [D].

        Args:
            rows: documents [D] with ``hash``, the (low, high) halves of the XXH3-128, and ``subset``: 0 if the hash
                chooses, else 1 plus the index in ``SUBSETS``.
        """
        hashes = rows["hash"]
        u = hash_to_unit_interval(hashes[:, 1])
        codes = np.zeros(len(u), np.uint8)
        codes[u < self.val_fraction + self.test_fraction] = SUBSETS.index("test")
        codes[u < self.val_fraction] = SUBSETS.index("val")
        if self.overrides:
            decided = dict(self.overrides)
            highs = np.array([value >> 64 for value in decided], np.uint64)
            for document_index in np.flatnonzero(np.isin(hashes[:, 1], highs)).tolist():
                low, high = hashes[document_index].tolist()
                if name := decided.get((high << 64) | low):
                    codes[document_index] = SUBSETS.index(name)
        fixed = rows["subset"]
        return np.where(fixed > 0, fixed - 1, codes) if fixed.any() else codes


def hash_to_unit_interval(high: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Map high halves of hashes to uniform numbers in [0, 1), in an unrelated order.

    One round of SplitMix64's finalizer (Steele, Lea, Flood 2014), then the top 53 bits.
    """
    z = high.astype(np.uint64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


@final
class SmallestHashes:
    """Collector of the few smallest distinct hashes of each subset."""

    def __init__(self) -> None:
        self._lists: dict[str, list[int]] = {name: [] for name in SUBSETS}

    def add(self, hashes: NDArray[np.uint64], codes: NDArray[np.uint8]) -> None:
        """Add documents whose subsets are chosen by hash.

        Args:
            hashes: (low, high) halves of the hashes, uint64 [D, 2].
            codes: subset code of each [D].
        """
        for code, name in enumerate(SUBSETS):
            subset_hashes = hashes[codes == code]
            highs = np.sort(subset_hashes[:, 1])
            distinct_highs = highs[np.flatnonzero(highs[1:] != highs[:-1])]
            if len(distinct_highs) >= _SMALLEST_COUNT:
                # Smaller hashes have smaller high halves.
                limit = distinct_highs[_SMALLEST_COUNT - 1]
                subset_hashes = subset_hashes[subset_hashes[:, 1] <= limit]
            values = {(high << 64) | low for low, high in subset_hashes.tolist()}
            self._lists[name] = sorted(values.union(self._lists[name]))[:_SMALLEST_COUNT]

    def merge(self, lists: Mapping[str, Iterable[str]]) -> None:
        """Merge the :meth:`to_hex` output of another collector."""
        for name, values in lists.items():
            new_hashes = {int(value, 16) for value in values}
            self._lists[name] = sorted(new_hashes.union(self._lists[name]))[:_SMALLEST_COUNT]

    def to_hex(self) -> dict[str, list[str]]:
        """Return the smallest hashes of each subset, 32 hex digits each, ascending."""
        return {name: [f"{value:032x}" for value in values] for name, values in self._lists.items()}

    def hashes(self) -> set[int]:
        return {value for values in self._lists.values() for value in values}

    def overrides(
        self, required_subsets: Iterable[str], fixed_hashes: Collection[int] = ()
    ) -> tuple[tuple[int, str], ...]:
        """Return the hashes that move so that no required subset stays empty.

        In the order train, val, test an empty subset takes the smallest hash of the subsets that hold at least
        two distinct ones; train also takes a single one. Hashes in ``fixed_hashes`` never move: earlier documents
        have them.
        """
        lists = {name: [value for value in values if value not in fixed_hashes] for name, values in self._lists.items()}
        moved: list[tuple[int, str]] = []
        for name in required_subsets:
            least = 1 if name == "train" else 2
            donors = [values for values in lists.values() if len(values) >= least]
            if lists[name] or self._lists[name] or not donors:
                continue
            donor = min(donors)
            value = donor.pop(0)
            lists[name] = [value]
            moved.append((value, name))
        return tuple(moved)


# Tolerated relative deviation of a token share from the requested one.
TOLERANCE = 0.2
# Maximum number of move candidates per subset; the manifest lists every moved document.
_MAX_CANDIDATES = 1 << 16
# Documents above this fraction of a subset are tried in pairs, so their number is bounded.
_LARGE_FRACTION = 2 * TOLERANCE
_MAX_LARGE = 256


class DocumentGroup(NamedTuple):
    """All documents of one hash whose subset it chooses.

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
        self._heaviest = heaviest
        self._most = most
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
        hashes = self._hashes[0]
        tokens = self._tokens[0]
        positions = hash_to_unit_interval(hashes[:, 1])
        rows = zip(positions.tolist(), hashes.tolist(), tokens.tolist(), strict=True)
        document_groups = [DocumentGroup(position, (high << 64) | low, count) for position, (low, high), count in rows]
        return sorted(document_groups)

    def _merge(self) -> None:
        hashes = np.concatenate(self._hashes)
        tokens = np.concatenate(self._tokens)
        order = np.lexsort((hashes[:, 0], hashes[:, 1]))
        hashes = hashes[order]
        tokens = tokens[order]
        fresh = np.ones(len(hashes), bool)
        fresh[1:] = (hashes[1:] != hashes[:-1]).any(axis=1)
        starts = np.flatnonzero(fresh)
        if len(starts):
            hashes = hashes[starts]
            tokens = np.add.reduceat(tokens, starts)
        if len(hashes) > self._most:
            key = -tokens if self._heaviest else hash_to_unit_interval(hashes[:, 1])
            some = np.sort(np.argsort(key, kind="stable")[: self._most])
            hashes = hashes[some]
            tokens = tokens[some]
        self._hashes = [hashes]
        self._tokens = [tokens]
        self._pending = 0


@dataclass(frozen=True, slots=True)
class DocumentMoves:
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
    subset_groups = list(subset_groups)
    train_groups = list(train_groups)
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
    total = sum(tokens.values())
    counts = dict(tokens)
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
