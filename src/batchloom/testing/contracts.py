"""Contracts of loaders and sources as assertions, for custom ones and wrappers.

They only check the output. Each runs its complete input several times, so use small inputs.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from batchloom.batches import IGNORE_INDEX
from batchloom.core.errors import SettingsError
from batchloom.core.settings import as_int, quote_value
from batchloom.store import Store

Ints = NDArray[np.int64]
_MAX_LISTED = 3

BatchMapping = Mapping[str, Any]
_BATCH_KEYS = ("input_ids", "labels", "position_ids")


def split_spans(batch: Mapping[str, Any], name: str = "input_ids") -> list[Ints]:
    """Return the ids of each span of a batch, with padding.

    Spans are cut where positions restart, or at ``cu_seq_lens_q``. ``name`` is the array to cut.
    """
    ids = np.asarray(batch[name])
    if "cu_seq_lens_q" in batch:
        return np.split(ids[0], np.asarray(batch["cu_seq_lens_q"])[1:-1])
    position_ids = np.asarray(batch["position_ids"])
    return [
        span
        for row, row_positions in zip(ids, position_ids, strict=True)
        for span in np.split(row, np.flatnonzero(row_positions[1:] == 0) + 1)
    ]


def check_coverage(batches: Iterable[Mapping[str, Any]], store: Store, epochs: int, left_out: int) -> None:
    """Assert that batches have every token of every document ``epochs`` times.

    It counts ids and adjacent pairs of ids. Spans and documents of only end tokens, such as padding, are not
    counted. ``left_out`` is the reported number of tokens left out in all epochs.
    """
    pad = store.end_id
    spans = [span for batch in batches for span in split_spans(batch) if (span != pad).any()]
    documents = [store[n].ids.astype(np.int64) for n in range(len(store))]
    documents = [ids for ids in documents if (ids != pad).any()] * epochs
    missing, extra = _count_differences(_collect_ids(documents, pad), _collect_ids(spans, pad))
    total = sum(map(len, documents)) - sum(map(len, spans))
    if extra or not missing <= left_out <= max(total, missing):
        raise AssertionError(
            f"In {epochs} epoch(s) of {store.location.name} {missing:,} tokens are missing and {extra:,} occur too "
            f"often; {left_out:,} were announced as left out.{_describe_missing_documents(documents, spans)}"
        )
    apart, strange = _count_differences(_make_adjacent_pairs(documents, pad), _make_adjacent_pairs(spans, pad))
    # Each cut of a document removes the pair across it.
    if strange or apart > max(0, len(spans) - len(documents)) + left_out:
        raise AssertionError(
            f"In {epochs} epoch(s) of {store.location.name} {strange:,} pairs of tokens are adjacent that are "
            f"adjacent in no document, and {apart:,} adjacent pairs were "
            f"separated.{_describe_missing_documents(documents, spans)}"
        )


def check_labels(batches: Iterable[Mapping[str, Any]], store: Store, epochs: int, left_out: int) -> None:
    """Assert that labels train exactly the tokens that the store's masks train.

    A label is its token's id (aligned) or the next one's (shifted), the same in the complete run. It is -100 at
    the first token of a span (or the last), on padding, and on masked tokens. It counts pairs of a trained
    token and its predecessor. ``left_out`` is the reported number of tokens left out in all epochs.
    """
    spans = [
        (ids.astype(np.int64), labels.astype(np.int64))
        for batch in batches
        for ids, labels in zip(split_spans(batch), split_spans(batch, "labels"), strict=True)
    ]
    aligned, shifted = (_make_trained_pairs(spans, shift) for shift in (0, 1))
    trained_pairs = shifted if aligned is None else aligned
    if trained_pairs is None:
        wrong = ([span for span in spans if _make_trained_pairs([span], n) is None] for n in (0, 1))
        ids, labels = min(wrong, key=len)[0]
        raise AssertionError(
            "Labels are neither the ids (aligned, -100 at a span's first token) nor the next ids (shifted, -100 at its "
            f"last): ids {ids[:8].tolist()}... have labels {labels[:8].tolist()}..."
        )
    documents = [store[n].ids.astype(np.int64) for n in range(len(store))]
    expected_pairs = np.tile(_make_expected_pairs(documents, store), epochs)
    pad = store.end_id
    end_token_pairs, other_pairs = (
        [pairs[_has_end_token(pairs, pad) == padded] for pairs in (expected_pairs, trained_pairs)]
        for padded in (True, False)
    )
    (ends, strange), (untrained, more) = (
        _count_differences(*end_token_pairs),
        _count_differences(*other_pairs),
    )
    ids_of_spans = [ids for ids, _ in spans]
    allowed_missing = (
        max(0, _count_real_spans(ids_of_spans, pad) - _count_real_spans(documents, pad) * epochs) + left_out
    )
    # The first token after a cut has no predecessor. A single end token there looks like padding.
    most = allowed_missing + len(spans) - _count_real_spans(ids_of_spans, pad)
    if strange or more or untrained > allowed_missing or ends > most:
        raise AssertionError(
            f"In {epochs} epoch(s) of {store.location.name} {strange + more:,} tokens have a label and are padding "
            f"or masked, and {ends + untrained:,} trained tokens have none; cuts and left-out tokens explain at most "
            f"{most:,} of them."
        )


def _make_expected_pairs(documents: Sequence[Ints], store: Store) -> Ints:
    """Return every token that a store trains, paired with its predecessor."""
    numbers = np.arange(len(documents))
    lengths = np.array([*map(len, documents)], np.int64)
    masks = store.mask(numbers, np.zeros_like(numbers), lengths)
    pairs = [_encode_pairs(ids[:-1], ids[1:])[mask[1:]] for ids, mask in zip(documents, masks, strict=True)]
    return np.concatenate([*pairs, np.empty(0, np.int64)])


def _has_end_token(pairs: Ints, pad: int) -> NDArray[np.bool_]:
    mask: NDArray[np.bool_] = (pairs >> 32 == pad) | (pairs & 0xFFFFFFFF == pad)
    return mask


def _count_real_spans(spans: Sequence[Ints], pad: int) -> int:
    return sum(bool((ids != pad).any()) for ids in spans)


def _make_trained_pairs(spans: Sequence[tuple[Ints, Ints]], shift: int) -> Ints | None:
    """Return every token with a label, paired with its predecessor.

    The result is None if a label is not the id ``shift`` tokens ahead.
    """
    pairs = [np.empty(0, np.int64)]
    for ids, labels in spans:
        # Labels of the second token on, aligned or shifted.
        token_labels = labels[1 - shift : len(labels) - shift]
        edge_labels = labels[:1] if shift == 0 else labels[-1:]
        trained_mask = token_labels != IGNORE_INDEX
        if (edge_labels != IGNORE_INDEX).any() or (token_labels != ids[1:])[trained_mask].any():
            return None
        pairs.append(_encode_pairs(ids[:-1], ids[1:])[trained_mask])
    return np.concatenate(pairs)


def _encode_pairs(first: Ints, second: Ints) -> Ints:
    pairs: Ints = (first << 32) + second
    return pairs


def _collect_ids(spans: Sequence[Ints], pad: int) -> Ints:
    all_ids: Ints = np.concatenate([*spans, np.empty(0, np.int64)])
    content_ids: Ints = all_ids[all_ids != pad]
    return content_ids


def _make_adjacent_pairs(spans: Sequence[Ints], pad: int) -> Ints:
    pairs = [np.stack([span[:-1], span[1:]]) for span in spans]
    first, second = np.concatenate([*pairs, np.empty((2, 0), np.int64)], axis=1)
    content_mask = (first != pad) & (second != pad)
    return _encode_pairs(first[content_mask], second[content_mask])


def _count_differences(expected: Ints, actual: Ints) -> tuple[int, int]:
    """Return the number of missing values and of surplus values."""
    values, value_indices = np.unique(np.concatenate([expected, actual]), return_inverse=True)
    counts = np.bincount(value_indices[: len(expected)], minlength=len(values))
    counts -= np.bincount(value_indices[len(expected) :], minlength=len(values))
    return int(counts.clip(0).sum()), int((-counts).clip(0).sum())


def _describe_missing_documents(documents: Sequence[Ints], spans: Sequence[Ints]) -> str:
    span_counts = Counter(span.tobytes() for span in spans)
    missing_documents = []
    for ids in documents:
        if span_counts[ids.tobytes()]:
            span_counts[ids.tobytes()] -= 1
        else:
            missing_documents.append(ids)
    beginnings = "; ".join(f"{ids[:4].tolist()}... of {len(ids)} tokens" for ids in missing_documents[:_MAX_LISTED])
    return f" Documents not served completely (or not often enough): {beginnings}." if missing_documents else ""


class LoaderLike(Protocol):
    """Protocol of a loader; ``len`` is optional, and a state or ``loader[step]``."""

    def __iter__(self) -> Iterator[BatchMapping]:
        """Yield the batches of one rank: arrays or CPU tensors, rows or varlen."""
        ...


class LoaderMaker(Protocol):
    """Factory of fresh loaders of one rank."""

    def __call__(self, *, rank: int, world_size: int) -> LoaderLike: ...


def check_loader(
    make: LoaderMaker,
    *,
    documents: Store | None = None,
    epochs: int = 1,
    left_out: int = 0,
    worlds: Sequence[int] = (1, 2),
) -> None:
    """Assert the contract of every loader.

    All ranks have the same number of steps, and batches of one shape. A step has the same rows for any number of
    ranks. A state of any step, through JSON and on any number of ranks, resumes with exactly the remaining rows
    (a loader without state returns any step as ``loader[step]``). Every token of every document comes once per
    epoch. Labels are the ids, or the next ids, of the tokens that the documents' masks train, and -100 for all
    others.

    Args:
        make: makes a fresh loader of the same run for a rank and world size.
        documents: store of the run; None if the run is not a number of epochs: then coverage and labels
            are not checked.
        epochs: number of epochs.
        left_out: tokens that were reported as left out, of all epochs.
        worlds: numbers of ranks; a single one if a state belongs to its ranks, as that of a stream does.

    Raises:
        AssertionError: the error names the violation, the step and the number of ranks.
        SettingsError: ``worlds`` are not numbers of ranks.
    """
    if not worlds or any((as_int(world) or 0) < 1 for world in worlds):
        raise SettingsError([f"worlds: {quote_value(worlds)} are not numbers of ranks, each at least 1"])
    runs = {world: _collect_batches(make, world) for world in worlds}
    first = runs[worlds[0]]
    if not first[0]:
        raise AssertionError("The loader gives no batch, so nothing can be checked.")
    for world, ranks in runs.items():
        for step, (expected, actual) in enumerate(
            zip(zip(*first, strict=True), zip(*ranks, strict=True), strict=False)
        ):
            _check_same_rows(expected, actual, f"Step {step} over {world} ranks", f"over {worlds[0]}")
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
    """Return the batches of every rank, after a check of their numbers and shapes."""
    loaders = [make(rank=rank, world_size=world) for rank in range(world)]
    ranks = [list(loader) for loader in loaders]
    for rank, (loader, batches) in enumerate(zip(loaders, ranks, strict=True)):
        if len(batches) != len(ranks[0]):
            raise AssertionError(
                f"Rank {rank} of {world} has {len(batches)} steps and rank 0 has {len(ranks[0])}: a collective of "
                "the longer rank would hang."
            )
        step_count = len(loader) if isinstance(loader, Sized) else len(batches)
        if step_count != len(batches):
            raise AssertionError(f"len of rank {rank} of {world} is {step_count}, and it gives {len(batches)} steps.")
    for step, rank_batches in enumerate(zip(*ranks, strict=True)):
        shapes = {np.shape(batch["input_ids"]) for batch in rank_batches}
        if len(shapes) > 1 and "cu_seq_lens_q" not in rank_batches[0]:
            raise AssertionError(f"Step {step} has batches of different shapes on {world} ranks: {shapes}.")
    return ranks


def _iter_rows(batch: BatchMapping) -> Iterator[tuple[bytes, ...]]:
    """Yield the rows of a batch, or spans of a varlen one, without padding."""
    arrays = [np.asarray(batch[name], np.int64) for name in _BATCH_KEYS]
    if "cu_seq_lens_q" in batch:
        bounds = np.asarray(batch["cu_seq_lens_q"]).tolist()
        rows = [[array[0, a:b] for array in arrays] for a, b in pairwise(bounds)]
    else:
        rows = [list(row) for row in zip(*arrays, strict=True)]
    for ids, labels, positions in rows:
        if (labels != IGNORE_INDEX).any() or (ids != ids[0]).any() or (np.diff(positions) != 1).any():
            yield ids.tobytes(), labels.tobytes(), positions.tobytes()


def _check_same_rows(
    expected: Iterable[BatchMapping], actual: Iterable[BatchMapping], subject: str, reference: str
) -> None:
    """Reject batches that do not have the same rows, in any order."""
    expected_rows, actual_rows = (
        Counter(row for batch in batches for row in _iter_rows(batch)) for batches in (expected, actual)
    )
    missing = expected_rows - actual_rows
    extra = actual_rows - expected_rows
    if not (missing or extra):
        return
    row = next(iter(missing or extra))
    raise AssertionError(
        f"{subject} does not hold the same rows as {reference}: {missing.total()} are missing and {extra.total()} "
        f"are different, such as ids {np.frombuffer(row[0], np.int64)[:8].tolist()}..., labels "
        f"{np.frombuffer(row[1], np.int64)[:8].tolist()}..."
    )


def _check_resume(make: LoaderMaker, run: list[list[BatchMapping]], worlds: Sequence[int]) -> None:
    """Resume from the state of every step, each time on another number of ranks."""
    home = worlds[0]
    states = [_collect_states(make(rank=rank, world_size=home)) for rank in range(home)]
    for step in range(len(run[0]) + 1):
        world = worlds[step % len(worlds)]
        remaining_ranks = []
        for rank in range(world):
            loader: Any = make(rank=rank, world_size=world)
            # On the same number of ranks each rank loads its own state, otherwise that of rank 0.
            loader.load_state_dict(json.loads(states[rank if world == home else 0][step]))
            remaining_ranks.append(list(loader))
        lengths = {len(remaining_batches) for remaining_batches in remaining_ranks}
        if lengths != {len(run[0]) - step}:
            raise AssertionError(
                f"From the state of step {step} {world} ranks read {sorted(lengths)} more steps, and "
                f"{len(run[0]) - step} remain."
            )
        rest_of_run = [batches[step:] for batches in run]
        for ahead, (expected, actual) in enumerate(
            zip(zip(*rest_of_run, strict=True), zip(*remaining_ranks, strict=True), strict=True)
        ):
            subject = f"Step {step + ahead}, resumed at step {step} on {world} ranks,"
            _check_same_rows(expected, actual, subject, "without a stop")


def _collect_states(loader: Any) -> list[str]:
    """Return the state before the first step and after each, as JSON."""
    initial_state = _encode_state(loader.state_dict(), 0)
    return [
        initial_state,
        *(_encode_state(loader.state_dict(), n) for n, _ in enumerate(loader, 1)),
    ]


def _encode_state(state: Any, step: int) -> str:
    try:
        return json.dumps(state)
    except (TypeError, ValueError) as error:
        raise AssertionError(f"The state of step {step} is not plain JSON: {error}.") from error


def _check_random_access(make: LoaderMaker, run: list[list[BatchMapping]]) -> None:
    """Read every step alone, from the last to the first."""
    for rank, batches in enumerate(run):
        loader: Any = make(rank=rank, world_size=len(run))
        if not hasattr(loader, "__getitem__"):
            raise AssertionError("The loader has no load_state_dict and no loader[step], so no run can resume.")
        for step in reversed(range(len(batches))):
            _check_same_rows([batches[step]], [loader[step]], f"loader[{step}] of rank {rank}", "in sequence")


class RecordColumns(Protocol):
    """Records of a part in equal columns, see ``batchloom.core.document.Records``.

    Attributes:
        values: good records.
        records: number of each in the part.
        offsets: byte offset of each.
        bad: bad records, each with ``record`` and ``offset``.
        records_read: number of good, bad and empty records.
    """

    values: list[Any]
    records: list[int]
    offsets: list[int]
    bad: Sequence[Any]
    records_read: int


class PartsMaker(Protocol):
    """Factory of the parts of an input."""

    def __call__(self, unit_bytes: int, /) -> Sequence[Iterable[RecordColumns]]:
        """Return the unread parts in order, cut about every ``unit_bytes``."""
        ...


def check_source(make: PartsMaker, *, size: int) -> None:
    """Assert the contract of every format reader.

    Reading again gives the same. Any cut into parts, which are read alone and in any order, gives the same
    documents, each once. Every document has a record number and a byte offset that do not depend on the cut.

    Args:
        make: makes fresh parts of the same input.
        size: size of the input in bytes; it is also cut at every byte, so use some thousands.

    Raises:
        AssertionError: the error names the violation and the cut.
    """
    reference_records = _read_records(make(size), "The input in one part")
    if not reference_records:
        raise AssertionError("The input gives no record, so nothing can be checked.")
    _check_same_records(reference_records, _read_records(make(size), "The input, read again"), "read again")
    for unit in sorted({1, 2, 7, max(1, size // 3), max(1, size - 1)}):
        _check_same_records(
            reference_records,
            _read_records(make(unit), f"The input in parts of {unit} bytes"),
            f"in parts of {unit} bytes",
        )


def _read_records(parts: Sequence[Iterable[RecordColumns]], subject: str) -> list[tuple[int, int, str]]:
    """Return (record, offset, value) of all records, reading the last part first."""
    columns: list[list[tuple[int, int, str]]] = []
    counts = []
    for part in reversed(parts):
        record_count = 0
        part_records: list[tuple[int, int, str]] = []
        for record_columns in part:
            if not len(record_columns.values) == len(record_columns.records) == len(record_columns.offsets):
                raise AssertionError(
                    f"{subject}: {len(record_columns.values)} values have {len(record_columns.records)} record "
                    f"numbers and {len(record_columns.offsets)} offsets; every value needs one of each."
                )
            part_records += zip(
                record_columns.records,
                record_columns.offsets,
                map(repr, record_columns.values),
                strict=True,
            )
            part_records += [(bad.record, bad.offset, "bad") for bad in record_columns.bad]
            record_count += record_columns.records_read
        columns.append(sorted(part_records))
        counts.append(record_count)
    records_before = 0
    records = []
    for part_records, record_count in zip(reversed(columns), reversed(counts), strict=True):
        if any(not 0 <= record < record_count for record, *_ in part_records):
            raise AssertionError(f"{subject}: a part with {record_count} records has a record number beyond them.")
        records += [(records_before + record, offset, value) for record, offset, value in part_records]
        records_before += record_count
    _check_origins(records, subject)
    return records


def _check_origins(records: Sequence[tuple[int, int, str]], subject: str) -> None:
    for (record, offset, _), (next_record, next_offset, _) in pairwise(records):
        if next_record == record:
            raise AssertionError(f"{subject}: two records have the number {record}.")
        if next_offset < offset:
            raise AssertionError(
                f"{subject}: record {record} is at byte {offset} and record {next_record}, after it, at byte "
                f"{next_offset}."
            )


def _check_same_records(
    expected: Sequence[tuple[int, int, str]], actual: Sequence[tuple[int, int, str]], condition: str
) -> None:
    if expected == actual:
        return
    pairs = enumerate(zip(expected, actual, strict=False))
    index = next(
        (n for n, (expected_record, actual_record) in pairs if expected_record != actual_record),
        min(len(expected), len(actual)),
    )
    expected_text, actual_text = (
        f"(record {records[index][0]}, byte {records[index][1]}) {records[index][2]:.60}"
        if index < len(records)
        else "nothing"
        for records in (expected, actual)
    )
    raise AssertionError(
        f"The input gives {len(expected)} records and {condition} {len(actual)}; the first that differs is "
        f"{expected_text}, "
        f"and {condition} {actual_text}."
    )
