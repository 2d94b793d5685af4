"""``create_huggingface_dataset``: batches of a Hub dataset, sharded by document."""

import logging
import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import count
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from batchloom.batches import assemble_rows
from batchloom.compat.script_arguments import as_asked, check_output, tokenizer_of
from batchloom.core.document import BadRecord
from batchloom.core.errors import InputError, InputMissingError
from batchloom.core.settings import as_int, quote_value, raise_problems
from batchloom.plan import PlanSpec, Pools
from batchloom.plan.packing import MAX_POOL_SIZE, slice_rows
from batchloom.preparation import Recipe
from batchloom.preparation.documents import (
    DirectEncoder,
    EncodedBatch,
    EncodedDocuments,
    RecordParsers,
)
from batchloom.preparation.report import JobCounters
from batchloom.sources import ReadLimits, SourceListing, list_datasets, list_sources, make_bad_record_error
from batchloom.sources.files import Source
from batchloom.tokens import Tokenizer

# Maximum number of tokens of a buffer, which bounds the memory for long documents.
_MOST_TOKENS = 1 << 24
_SHOWN = 10

_LOG = logging.getLogger("batchloom")
Pair = tuple[Any, Any]
Row = NDArray[np.int64]


def list_available_datasets() -> list[dict[str, Any]]:
    """List the data sets of the Hub with a short name: name, description, ..."""
    return [entry for entry in list_datasets() if entry["source"] == "real"]


def create_huggingface_dataset(
    dataset_name: str | os.PathLike[str],
    rank: int = 0,
    world_size: int = 1,
    num_batches: int = 1000,
    batch_size: int = 8,
    tokenizer_name: Any = "gpt2",
    seq_len: int = 1024,
    *,
    streaming: bool = True,
    seed: int = 0,
    buffer_size: int = 10_000,
    output: str = "torch",
) -> "RankedBatches":
    """Return a sequence of ``num_batches`` batches ``(inputs, labels)`` of this rank.

    Nothing is read or downloaded before the first batch is requested. Document i of the
    dataset, without bad and empty records, belongs only to rank i mod ``world_size``.
    Every rank reads everything and encodes its share; a prepared store avoids both.

    Args:
        dataset_name: ``org/name[:config][/split][@revision]``, a short name, or a local input.
        rank: rank of this process.
        world_size: number of ranks.
        num_batches: length of the sequence; the data is repeated as often as needed.
        batch_size: rows of a batch.
        tokenizer_name: see :func:`batchloom.compat.script_arguments.tokenizer_of`.
        seq_len: tokens of a row. Documents are packed into rows (best fit; a longer document is
            split and all its parts are used); empty positions are padding without loss.
        streaming: True to read files remotely, False to download them first.
        seed: seed of the data order.
        buffer_size: documents that are shuffled and packed together (fewer if they have more than
            16 Mi tokens together).
        output: ``torch`` or ``numpy``.

    Raises:
        SettingsError: a size or the rank is invalid.
    """
    sizes = {
        "world_size": world_size,
        "num_batches": num_batches,
        "batch_size": batch_size,
        "buffer_size": buffer_size,
    }
    problems = [
        f"{name}: {quote_value(value)} is not a whole number from 1 to {MAX_POOL_SIZE:,}"
        for name, value in sizes.items()
        if not 1 <= (as_int(value) or 0) <= MAX_POOL_SIZE
    ]
    if not problems and not 0 <= (-1 if as_int(rank) is None else rank) < world_size:
        problems.append(f"rank: {quote_value(rank)} is not one of 0 to {world_size - 1}")
    raise_problems(problems)
    check_output(output)
    return RankedBatches(
        os.fspath(dataset_name),
        (rank, world_size),
        (num_batches, batch_size),
        tokenizer_name,
        PlanSpec(seq_len=seq_len, global_batch_size=1, seed=seed, pool_size=buffer_size),
        streaming=streaming,
        output=output,
    )


@final
class RankedBatches(Sequence[Pair]):
    """Result of :func:`create_huggingface_dataset`.

    ``inputs`` and ``labels`` are int64 [batch_size, seq_len]. Labels are the next tokens, and -100 at
    the end of each document, in padding, and in untrained parts of a conversation. Each iteration begins
    at the first batch. Batches are made in order: an earlier index restarts from the beginning, and a
    later one makes all batches in between.
    """

    def __init__(
        self,
        name: str,
        ranks: tuple[int, int],
        sizes: tuple[int, int],
        tokenizer: Any,
        spec: PlanSpec,
        *,
        streaming: bool,
        output: str,
    ) -> None:
        self._name = name
        self._ranks = ranks
        self._tokenizer = tokenizer
        self._spec = spec
        self._count, self._rows = sizes
        self._streaming = streaming
        self._output = output
        self._cursor: tuple[int, Iterator[Pair]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cursor": None}

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Pair]:
        batches = self._batches()
        for _ in range(self._count):
            yield next(batches)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[n] for n in range(*number.indices(self._count))]
        index = number + self._count if number < 0 else number
        if not 0 <= index < self._count:
            raise IndexError(f"There is no batch {number}: there are {self._count:,}.")
        next_index, batches = self._cursor or (0, self._batches())
        if next_index > index:
            next_index = 0
            batches = self._batches()
        for _ in range(index - next_index):
            next(batches)
        batch = next(batches)
        self._cursor = index + 1, batches
        return batch

    @cached_property
    def _inputs(self) -> tuple[Tokenizer, SourceListing]:
        return tokenizer_of(self._tokenizer), list_sources([self._name], streaming=self._streaming)

    def _batches(self) -> Iterator[Pair]:
        """Yield batches endlessly."""
        pending_rows: list[tuple[Row, Row]] = []
        for row in self._all_rows():
            pending_rows.append(row)
            if len(pending_rows) == self._rows:
                inputs, labels = map(np.stack, zip(*pending_rows, strict=True))
                arrays = as_asked({"inputs": inputs, "labels": labels}, self._output)
                yield arrays["inputs"], arrays["labels"]
                pending_rows = []

    def _all_rows(self) -> Iterator[tuple[Row, Row]]:
        tokenizer, _ = self._inputs
        for epoch in count():
            is_empty = True
            for number, buffer in enumerate(self._buffers()):
                documents = EncodedDocuments(buffer, tokenizer.end_id)
                if documents.weighted:
                    raise InputError(
                        f"{self._name} has loss weights, which a pair of inputs and labels cannot express; use "
                        "batchloom.Loader, whose batches have loss_weights."
                    )
                pool = Pools(documents.lengths, self._spec, f"buffer {number}").rows(0, epoch)
                for start in range(0, len(pool), self._rows):
                    rows = slice_rows(pool, start, min(start + self._rows, len(pool)))
                    arrays = assemble_rows(documents, rows, self._spec.seq_len, "shifted")
                    is_empty = False
                    yield from zip(arrays["input_ids"], arrays["labels"], strict=True)
            if is_empty:
                rank, world_size = self._ranks
                raise InputMissingError(
                    f"{self._name} has no document for rank {rank} of {world_size}; use fewer ranks, or more data."
                )

    def _buffers(self) -> Iterator[list[EncodedBatch]]:
        """Yield this rank's documents in order, ``buffer_size`` at a time."""
        tokenizer, listing = self._inputs
        recipe = Recipe(inputs=(self._name,))
        counters = JobCounters(lambda _: None, recipe.max_bad, listing.bytes)

        def refuse(source: Source, bad: BadRecord) -> None:
            sentence = str(make_bad_record_error(source, recipe.reading.rules(ReadLimits()), 0, bad))
            if counters.quarantined < _SHOWN:
                _LOG.warning("Left out: %s", sentence)
            counters.count_bad(sentence, 1)

        parsers = RecordParsers(recipe, ReadLimits())
        encoder = DirectEncoder(tokenizer, parsers.get_parser, refuse, on_read=counters.count_read)
        buffer: list[EncodedBatch] = []
        size = tokens = 0
        for batch in encoder.encode(listing.sources, *self._ranks):
            for batch_part in _split_batch(batch, self._spec.pool_size - size, self._spec.pool_size):
                buffer.append(batch_part)
                size = size + batch_part.lengths.size
                tokens = tokens + batch_part.ids.size
                if size >= self._spec.pool_size or tokens >= _MOST_TOKENS:
                    yield buffer
                    buffer = []
                    size = 0
                    tokens = 0
        counters.check_bad_records()
        if buffer:
            yield buffer


def _split_batch(batch: EncodedBatch, first: int, most: int) -> Iterator[EncodedBatch]:
    """Split encoded documents after the first ``first``, then after each ``most``."""
    ends = np.concatenate([[0], np.cumsum(batch.lengths, dtype=np.int64)])
    start = 0
    while start < batch.lengths.size:
        stop = min(start + (first if start == 0 else most), batch.lengths.size)
        part = slice(int(ends[start]), int(ends[stop]))
        yield EncodedBatch(batch.ids[part], batch.lengths[start:stop], batch.flags[part])
        start = stop
