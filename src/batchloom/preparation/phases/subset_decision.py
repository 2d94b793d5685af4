"""Decision over all units: the subset of each document, and the numbers of shards."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from batchloom.preparation.documents.subsets import (
    MoveCandidates,
    SmallestHashes,
    SubsetRule,
    balance_subsets,
    misses_share,
)
from batchloom.preparation.phases.base_generations import BaseGenerations
from batchloom.preparation.phases.remaining_rows import iter_remaining_rows
from batchloom.preparation.units.subset_writer import ShardCutter
from batchloom.preparation.units.work_folder import (
    DECISION_NAME,
    Decision,
    TokenizedUnit,
    UnitDedupCounts,
    WorkFolder,
    read_json,
)
from batchloom.store import write_file
from batchloom.store.format import SUBSETS, Banding


@dataclass(frozen=True, slots=True)
class ShardSettings:
    """Settings that decide the subset and shard of each document."""

    # Subset rule of the shares, by which the temporary token files are split.
    membership: SubsetRule
    # The same with the overrides of earlier generations.
    base_membership: SubsetRule
    tokens_per_shard: int
    dtype: np.dtype[np.generic]
    # MinHash parameters of the signatures to store; None to store none.
    banding: Banding | None

    def add_overrides(self, overrides: tuple[tuple[int, str], ...]) -> SubsetRule:
        """Return the subset rule with all earlier overrides and the given ones."""
        return replace(self.base_membership, overrides=(*self.base_membership.overrides, *overrides))


def decide(
    work: WorkFolder,
    units: Sequence[TokenizedUnit],
    dedup_counts: Sequence[UnitDedupCounts],
    settings: ShardSettings,
    base: BaseGenerations,
    *,
    balance: bool,
) -> Decision:
    """Decide subset overrides and shard numbers, once for all units.

    With ``balance``, single documents move when a subset misses its share of the tokens.
    """
    path = work.path / DECISION_NAME
    if (decision := read_json(path, Decision)) is not None:
        return decision
    folders = [(unit.folder, work.resolution_folder(unit.unit.number)) for unit in units]
    # Documents of earlier generations keep their subset, and so do equal ones.
    find_present_hashes = partial(base.find_present_hashes, work.out)
    tokens = {name: base.tokens.get(name, 0) for name in SUBSETS}
    for unit in dedup_counts:
        for name, count in unit.subsets.items():
            tokens[name] += count
    total = sum(tokens.values())
    shares = settings.membership.shares
    if balance and any(misses_share(shares[name], tokens[name], total) for name in shares):
        overrides = _balance_shares(folders, settings, tokens, find_present_hashes)
    else:
        overrides = _fill_empty(dedup_counts, settings, base, find_present_hashes)
    membership = settings.add_overrides(overrides)
    shards = []
    moved = []
    counts = {name: base.shards.get(name, 0) for name in SUBSETS}
    tokens = dict(base.tokens)
    for number, (unit, (folder, resolution_folder)) in enumerate(zip(dedup_counts, folders, strict=True)):
        shard_counts = unit.shards
        subset_tokens = unit.subsets
        if unit.moved or overrides:
            is_moved = unit.moved
            cutters = {name: ShardCutter(settings.tokens_per_shard) for name in SUBSETS}
            added = np.zeros(len(SUBSETS), np.int64)
            for rows in iter_remaining_rows(folder, resolution_folder):
                codes = membership.codes(rows)
                is_moved |= bool((codes != settings.base_membership.codes(rows)).any())
                added += count_subset_tokens(rows, codes)
                for code, name in enumerate(SUBSETS):
                    cutters[name].cut(rows[codes == code])
            if is_moved:
                moved.append(number)
                shard_counts = {name: cutter.shards for name, cutter in cutters.items()}
                subset_tokens = dict(zip(SUBSETS, added.tolist(), strict=True))
        shards.append({name: (counts[name], shard_counts[name]) for name in SUBSETS})
        for name in SUBSETS:
            counts[name] += shard_counts[name]
            tokens[name] = tokens.get(name, 0) + subset_tokens[name]
    override_names = {f"{value:032x}": name for value, name in overrides}
    decision = Decision(override_names, shards, moved, tokens)
    write_file(path, msgspec.json.encode(decision))
    return decision


def _fill_empty(
    dedup_counts: Sequence[UnitDedupCounts],
    settings: ShardSettings,
    base: BaseGenerations,
    find_present_hashes: Callable[[Collection[int]], Collection[int]],
) -> tuple[tuple[int, str], ...]:
    """Choose the hashes that move so that no required subset is empty."""
    smallest = SmallestHashes()
    for unit in dedup_counts:
        smallest.merge(unit.smallest)
    missing_subsets = [name for name in settings.membership.list_required() if name not in base.nonempty_subsets]
    return smallest.overrides(missing_subsets, find_present_hashes(smallest.hashes()) if missing_subsets else ())


def _balance_shares(
    folders: Sequence[tuple[Path, Path]],
    settings: ShardSettings,
    tokens: Mapping[str, int],
    find_present_hashes: Callable[[Collection[int]], Collection[int]],
) -> tuple[tuple[int, str], ...]:
    """Choose the hashes that move so that subsets have their shares of the tokens."""
    candidates = {name: MoveCandidates(heaviest=name != SUBSETS[0]) for name in SUBSETS}
    for folder, resolution_folder in folders:
        for rows in iter_remaining_rows(folder, resolution_folder):
            codes = settings.base_membership.codes(rows)
            for code, name in enumerate(SUBSETS):
                subset_rows = rows[(codes == code) & (rows["subset"] == 0)]
                candidates[name].add(subset_rows["hash"], subset_rows["length"])
    groups = {name: subset_candidates.groups() for name, subset_candidates in candidates.items()}
    # Equal documents of earlier generations cannot change their subset.
    fixed_hashes = {value for value, _ in settings.base_membership.overrides}
    fixed_hashes |= set(find_present_hashes({group.hash for members in groups.values() for group in members}))
    movable_groups = {
        name: [group for group in members if group.hash not in fixed_hashes] for name, members in groups.items()
    }
    return tuple(balance_subsets(settings.membership.shares, tokens, movable_groups).items())


def count_subset_tokens(rows: NDArray[np.void], codes: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return the tokens of each subset, int64 in the order of ``SUBSETS``."""
    lengths = rows["length"].astype(np.int64)
    return np.array([lengths[codes == code].sum() for code in range(len(SUBSETS))], np.int64)
