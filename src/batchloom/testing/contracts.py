"""What a loader and a source promise, as assertions for those who write one, or wrap one of ours.

They look at what comes out alone. Each runs the whole of what it is given several times over: give it little.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from batchloom.batches import IGNORE_INDEX
from batchloom.core.errors import SettingsError
from batchloom.core.settings import as_int, quote_value
from batchloom.store import Store
from batchloom.testing.coverage import check_coverage, check_labels

BatchMapping = Mapping[str, Any]
_BATCH_KEYS = ("input_ids", "labels", "position_ids")


class LoaderLike(Protocol):
    """What is looked at of a loader; also ``len``, and either its state or ``loader[step]``, where it has them."""

    def __iter__(self) -> Iterator[BatchMapping]:
        """The batches of one rank: arrays or CPU tensors, rows or varlen."""
        ...


class LoaderMaker(Protocol):
    """Makes a fresh loader of one rank."""

    def __call__(self, *, rank: int, world_size: int) -> LoaderLike:
        """The loader of ``rank`` of ``world_size``."""
        ...


def check_loader(
    make: LoaderMaker,
    *,
    documents: Store | None = None,
    epochs: int = 1,
    left_out: int = 0,
    worlds: Sequence[int] = (1, 2),
) -> None:
    """Assert what every loader promises.

    All ranks have the same number of steps, and batches of one shape; a step holds the same rows over any number of
    ranks; a state of any step, through JSON and on any number of ranks, goes on with exactly the rest (what has no
    state gives any step by ``loader[step]``); every token of every document comes once an epoch; labels are the ids, or
    the next ids, of what the documents' masks have trained, and -100 elsewhere.

    Args:
        make: gives a loader of the same run, fresh each time, for a rank and world size.
        documents: what the run passes through; None for a run that is no number of epochs: then coverage and labels
            are not looked at.
        epochs: how often it passes.
        left_out: tokens that were announced as left out, of all epochs.
        worlds: numbers of ranks; one alone where a state belongs to its ranks, as that of a stream does.

    Raises:
        AssertionError: says what is broken, at which step, on how many ranks.
        SettingsError: numbers of ranks that are none.
    """
    if not worlds or any((as_int(world) or 0) < 1 for world in worlds):
        raise SettingsError(
            [f"worlds: {quote_value(worlds)} are no numbers of ranks, each from 1 on"]
        )
    runs = {world: _collect_batches(make, world) for world in worlds}
    first = runs[worlds[0]]
    if not first[0]:
        raise AssertionError("The loader gives no batch: nothing can be checked.")
    for world, ranks in runs.items():
        for step, (wanted, found) in enumerate(
            zip(_iter_steps(first), _iter_steps(ranks), strict=False)
        ):
            _check_same_rows(wanted, found, f"Step {step} over {world} ranks", f"over {worlds[0]}")
        if len(ranks[0]) != len(first[0]):
            raise AssertionError(
                f"A run over {world} ranks has {len(ranks[0])} steps, over {worlds[0]} it has {len(first[0])}."
            )
    if hasattr(make(rank=0, world_size=worlds[0]), "load_state_dict"):
        _check_resume(make, first, worlds)
    else:
        _check_random_access(make, first)
    if documents is not None:
        batches = [batch for rank in first for batch in rank]
        check_coverage(batches, documents, epochs, left_out)
        check_labels(batches, documents, epochs, left_out)


def _collect_batches(make: LoaderMaker, world: int) -> list[list[BatchMapping]]:
    """The batches of every rank, after looking at their numbers and shapes."""
    loaders = [make(rank=rank, world_size=world) for rank in range(world)]
    ranks = [list(loader) for loader in loaders]
    for rank, (loader, batches) in enumerate(zip(loaders, ranks, strict=True)):
        if len(batches) != len(ranks[0]):
            raise AssertionError(
                f"Rank {rank} of {world} has {len(batches)} steps and rank 0 has {len(ranks[0])}: a collective of the "
                "longer one would hang."
            )
        told = len(loader) if isinstance(loader, Sized) else len(batches)
        if told != len(batches):
            raise AssertionError(
                f"len of rank {rank} of {world} is {told}, and it gives {len(batches)} steps."
            )
    for step, together in enumerate(_iter_steps(ranks)):
        shapes = {np.shape(batch["input_ids"]) for batch in together}
        if len(shapes) > 1 and "cu_seq_lens_q" not in together[0]:
            raise AssertionError(
                f"Step {step} has batches of other shapes on {world} ranks: {shapes}."
            )
    return ranks


def _iter_steps(ranks: Sequence[Sequence[BatchMapping]]) -> Iterator[tuple[BatchMapping, ...]]:
    """The batches of all ranks, step by step."""
    return zip(*ranks, strict=True)


def _iter_rows(batch: BatchMapping) -> Iterator[tuple[bytes, ...]]:
    """The rows of a batch, or spans of a varlen one, but those that only fill it up."""
    arrays = [np.asarray(batch[name], np.int64) for name in _BATCH_KEYS]
    if "cu_seq_lens_q" in batch:
        bounds = np.asarray(batch["cu_seq_lens_q"]).tolist()
        rows = [[array[0, a:b] for array in arrays] for a, b in pairwise(bounds)]
    else:
        rows = [list(row) for row in zip(*arrays, strict=True)]
    for ids, labels, places in rows:
        if (labels != IGNORE_INDEX).any() or (ids != ids[0]).any() or (np.diff(places) != 1).any():
            yield ids.tobytes(), labels.tobytes(), places.tobytes()


def _check_same_rows(
    wanted: Iterable[BatchMapping], found: Iterable[BatchMapping], where: str, other: str
) -> None:
    """Refuse batches that do not hold the same rows, in whatever order."""
    one, two = (
        Counter(row for batch in batches for row in _iter_rows(batch))
        for batches in (wanted, found)
    )
    missing, strange = one - two, two - one
    if not (missing or strange):
        return
    row = next(iter(missing or strange))
    raise AssertionError(
        f"{where} does not hold the rows it does {other}: {missing.total()} are missing and {strange.total()} are "
        f"others, such as ids {np.frombuffer(row[0], np.int64)[:8].tolist()}..., labels "
        f"{np.frombuffer(row[1], np.int64)[:8].tolist()}..."
    )


def _check_resume(make: LoaderMaker, run: list[list[BatchMapping]], worlds: Sequence[int]) -> None:
    """Go on from the state of every step, each time on another number of ranks."""
    home = worlds[0]
    states = [_collect_states(make(rank=rank, world_size=home)) for rank in range(home)]
    for step in range(len(run[0]) + 1):
        world = worlds[step % len(worlds)]
        rests = []
        for rank in range(world):
            loader: Any = make(rank=rank, world_size=world)
            # A state of our own where there is one: of another number of ranks it belongs to none.
            loader.load_state_dict(json.loads(states[rank if world == home else 0][step]))
            rests.append(list(loader))
        lengths = {len(rest) for rest in rests}
        if lengths != {len(run[0]) - step}:
            raise AssertionError(
                f"From the state of step {step} {world} ranks go on for {sorted(lengths)} steps, and "
                f"{len(run[0]) - step} were left."
            )
        rest_of_run = [batches[step:] for batches in run]
        for ahead, (wanted, found) in enumerate(
            zip(_iter_steps(rest_of_run), _iter_steps(rests), strict=True)
        ):
            where = f"Step {step + ahead}, resumed at step {step} on {world} ranks,"
            _check_same_rows(wanted, found, where, "without a stop")


def _collect_states(loader: Any) -> list[str]:
    """The state before the first step and after each, as JSON."""
    before = _encode_state(loader.state_dict(), 0)
    return [before, *(_encode_state(loader.state_dict(), n) for n, _ in enumerate(loader, 1))]


def _encode_state(state: Any, step: int) -> str:
    try:
        return json.dumps(state)
    except (TypeError, ValueError) as error:
        raise AssertionError(f"The state of step {step} is no plain JSON: {error}.") from error


def _check_random_access(make: LoaderMaker, run: list[list[BatchMapping]]) -> None:
    """Ask for every step alone, from the last to the first."""
    for rank, batches in enumerate(run):
        loader: Any = make(rank=rank, world_size=len(run))
        if not hasattr(loader, "__getitem__"):
            raise AssertionError(
                "The loader has no load_state_dict and no loader[step]: no run could go on."
            )
        for step in reversed(range(len(batches))):
            _check_same_rows(
                [batches[step]], [loader[step]], f"loader[{step}] of rank {rank}", "in turn"
            )


class RecordColumns(Protocol):
    """Records of a part in columns of equal length, as ``batchloom.core.document.Records`` has them.

    ``values`` and, of each, its number in the part (``records``) and its byte (``offsets``); ``bad`` with ``record``
    and ``offset`` each; ``seen`` records in all, good, bad and empty ones.
    """

    values: list[Any]
    records: list[int]
    offsets: list[int]
    bad: Sequence[Any]
    seen: int


class PartsMaker(Protocol):
    """Makes the parts of an input."""

    def __call__(self, unit_bytes: int, /) -> Sequence[Iterable[RecordColumns]]:
        """The parts in order, cut about every ``unit_bytes``; none was read yet."""
        ...


def check_source(make: PartsMaker, *, size: int) -> None:
    """Assert what everything promises that reads a format.

    Read again it gives the same; cut anywhere, in parts that are read alone and in any order, it gives the same
    documents, each once; and every document has an origin, a record number and a byte, that do not depend on the cut.

    Args:
        make: gives the parts of the same input, fresh each time.
        size: its bytes; it is also cut at every one of them, so some thousands are enough.

    Raises:
        AssertionError: says what is broken, and for which cut.
    """
    whole = _read_records(make(size), "The input in one part")
    if not whole:
        raise AssertionError("The input gives no record: nothing can be checked.")
    _check_same_records(whole, _read_records(make(size), "The input, read again"), "read again")
    for unit in sorted({1, 2, 7, max(1, size // 3), max(1, size - 1)}):
        _check_same_records(
            whole,
            _read_records(make(unit), f"The input in parts of {unit} bytes"),
            f"in parts of {unit} bytes",
        )


def _read_records(
    parts: Sequence[Iterable[RecordColumns]], what: str
) -> list[tuple[int, int, str]]:
    """(record, offset, value) of all records, read from the last part to the first."""
    columns: list[list[tuple[int, int, str]]] = []
    counts = []
    for part in reversed(parts):
        seen = 0
        mine: list[tuple[int, int, str]] = []
        for found in part:
            if not len(found.values) == len(found.records) == len(found.offsets):
                raise AssertionError(
                    f"{what}: {len(found.values)} values have {len(found.records)} record numbers and "
                    f"{len(found.offsets)} offsets; each has its own."
                )
            mine += zip(found.records, found.offsets, map(repr, found.values), strict=True)
            mine += [(bad.record, bad.offset, "bad") for bad in found.bad]
            seen += found.seen
        columns.append(sorted(mine))
        counts.append(seen)
    before, records = 0, []
    for mine, seen in zip(reversed(columns), reversed(counts), strict=True):
        if any(not 0 <= record < seen for record, *_ in mine):
            raise AssertionError(
                f"{what}: a part that saw {seen} records has a number beyond them."
            )
        records += [(before + record, offset, value) for record, offset, value in mine]
        before += seen
    _check_origins(records, what)
    return records


def _check_origins(records: Sequence[tuple[int, int, str]], what: str) -> None:
    """Refuse numbers that two records have, and places that go back."""
    for (record, offset, _), (following, later, _) in pairwise(records):
        if following == record:
            raise AssertionError(f"{what}: two records have the number {record}.")
        if later < offset:
            raise AssertionError(
                f"{what}: record {record} lies at byte {offset} and record {following}, behind it, at byte {later}."
            )


def _check_same_records(
    wanted: Sequence[tuple[int, int, str]], found: Sequence[tuple[int, int, str]], how: str
) -> None:
    if wanted == found:
        return
    pairs = enumerate(zip(wanted, found, strict=False))
    at = next((n for n, (one, two) in pairs if one != two), min(len(wanted), len(found)))
    one, two = (
        f"(record {records[at][0]}, byte {records[at][1]}) {records[at][2]:.60}"
        if at < len(records)
        else "nothing"
        for records in (wanted, found)
    )
    raise AssertionError(
        f"The input gives {len(wanted)} records and {how} {len(found)}; the first that differs is {one}, "
        f"and {how} {two}."
    )
