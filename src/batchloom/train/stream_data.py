"""Adapter that lets a run on raw inputs use a stream in place of a store."""

from collections.abc import Mapping
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from shlex import quote
from types import SimpleNamespace
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from batchloom import Loader, Store, stream
from batchloom.adapters.rank_group import RankGroup
from batchloom.core.errors import StateError
from batchloom.train.request import DataRequest
from batchloom.train.train_log import PrintLine
from batchloom.train.train_settings import TrainSettings


@final
class StreamData:
    """Stream with the interface of a store that a run uses.

    Attributes:
        stream: the stream.
        request: the request it was opened with.
        inputs: its files, folders, globs and URLs.
        path: path of the first input.
    """

    split, subsets, masked = "train", (), False
    # The run reads a truthy manifest as a known tokenizer, which a stream always has.
    manifest = True

    def __init__(self, request: DataRequest, settings: TrainSettings, ranks: RankGroup) -> None:
        order, options, self.inputs = settings.order, request.options, request.stream or ()
        self.stream = stream(
            list(self.inputs),
            tokenizer=request.tokenizer,
            media=request.media or None,
            follow_links=options.follow_links,
            seq_len=settings.seq_len,
            global_batch_size=settings.global_batch_size,
            steps=settings.steps,
            packing=order.packing,
            overlong=order.overlong,
            shuffle=order.shuffle,
            seed=settings.seed,
            lanes=options.lanes,
            workers="auto" if options.workers is None else options.workers,
            keep=options.keep,
        )
        self.request = request
        self.path, self._ranks = Path(self.inputs[0]), ranks
        self.location = SimpleNamespace(name=self.inputs[0], is_remote=False, on_disk=True, generation=None)
        self.contents = SimpleNamespace(weights=(), synthetic=False, removed=np.empty(0, np.int64))
        self.fingerprint = self.stream.fingerprint
        self.tokenizer = self.stream.tokenizer
        self.vocab_size, self.end_id = self.tokenizer.vocab_size, self.tokenizer.end_id

    def loader(self, augment: dict[str, Any] | None) -> Loader:
        """Return this rank's loader."""
        ranks = self._ranks
        return Loader(self.stream, rank=ranks.rank, world_size=ranks.world_size, augment=augment, device=ranks.device)

    @cached_property
    def _documents(self) -> list[NDArray[np.int64]]:
        """Documents or parts of documents in this rank's first batch."""
        ranks = self._ranks.rank, self._ranks.world_size
        loader = Loader(self.stream, rank=ranks[0], world_size=ranks[1], output="numpy", form="varlen", prefetch=0)
        batches = iter(loader)
        batch = next(batches)
        batches.close()  # type: ignore[attr-defined]  # a generator
        ids, bounds = batch["input_ids"][0], batch["cu_seq_lens_q"]
        return [ids[a:b] for a, b in pairwise(bounds.tolist())]

    def __len__(self) -> int:
        return len(self._documents)

    @property
    def lengths(self) -> SimpleNamespace:
        """Lengths of the documents."""
        lengths = np.array([len(span) for span in self._documents], np.uint32)
        return SimpleNamespace(slice=lambda start, stop: lengths[start:stop])

    def __getitem__(self, number: int) -> SimpleNamespace:
        return SimpleNamespace(ids=self._documents[number])


def as_stream(store: Store) -> StreamData | None:
    """Return the stream behind a run's data; None if it is a store."""
    data: object = store
    return data if isinstance(data, StreamData) else None


def merge_loader_state(loader: Loader, data: StreamData | None, ranks: RankGroup) -> Mapping[str, Any]:
    """Return the loader state of all ranks."""
    rank_state = loader.state_dict()
    if data is None or ranks.world_size == 1:
        return rank_state
    rank_states = ranks.all_gather(rank_state)
    if len({state["position"] for state in rank_states}) > 1:
        raise StateError("The ranks are at different steps of the stream.")
    return data.stream.merged(rank_states)


def announce_stream(data: StreamData, loader: Loader, print_line: PrintLine) -> None:
    raw_stream = data.stream
    print_line(f"data   {loader.origin}: {raw_stream!r}, tokenizer {data.tokenizer.name}")
    print_line("val    none: a stream has no val subset; its share of the documents is not trained on")
    if raw_stream.keeping is not None:
        print_line(f"keep   the inputs are written to the store {raw_stream.keeping.out}")


def finish_stream_store(data: StreamData, print_line: PrintLine) -> None:
    """Finish the store if all inputs were written to it; else print how to."""
    keeping, abandoned_folder = data.stream.keeping, data.stream.abandoned
    if abandoned_folder is not None:
        print_line(
            f"keep   {abandoned_folder} is unfinished, and nothing was written to it since --resume; finish it with: "
            f"{_make_finish_command(data, abandoned_folder)}"
        )
    if keeping is None or keeping.finished:
        return
    cached_units, units = data.stream.count_cached_units()
    if cached_units < units:
        print_line(
            f"keep   {cached_units:,} of {units:,} units of the input are in {keeping.out}; add the others with: "
            f"{_make_finish_command(data, keeping.out)}"
        )
        return
    data.stream.finish(workers=1)
    print_line(f"keep   {keeping.out} is the store of the inputs")


def _make_finish_command(data: StreamData, out: Path) -> str:
    request = data.request
    inputs = " ".join(map(quote, data.inputs))
    option_values = {"tokenizer": request.tokenizer, **request.media}
    options = [
        f" --{name.replace('_', '-')} {quote(value)}" for name, value in option_values.items() if value is not None
    ]
    options += [" --follow-links"] if request.options.follow_links else []
    return f"batchloom prepare {inputs}{''.join(options)} --dedup none --no-balance-subsets --out {quote(str(out))}"
