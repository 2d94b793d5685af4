"""Batches of one process from a stream: its steps are read in order."""

from collections.abc import Generator, Mapping
from typing import Any, cast, final

import numpy as np

from batchloom.batches.assembly.augment import (
    Augment,
    TokenizerSource,
    add_augment_state,
    make_augmentation,
    remove_augment_state,
)
from batchloom.batches.assembly.batch_assembly import Batch
from batchloom.batches.assembly.batch_spec import BatchSpec
from batchloom.batches.assembly.device import StagedBatch
from batchloom.batches.loading.feed import BatchMaker
from batchloom.batches.loading.iterations import Iteration, Iterations
from batchloom.batches.loading.loader_media import make_stream_media
from batchloom.batches.loading.rank_share import RankShare, make_rank_share, pad_rank_rows
from batchloom.batches.loading.stream_steps import RawStream, make_random_access_error
from batchloom.batches.media.media_stores import make_no_replacement_error
from batchloom.batches.producer_thread import PendingItem, iter_in_order
from batchloom.core.errors import SettingsError
from batchloom.plan import Plan


@final
class StreamFeed:
    """Batches of one process from a stream; attributes as of ``Feed``.

    Attributes:
        stream: the stream.

    Raises:
        SettingsError: ``balance``, for which a rank would have to know the rows of the others.
        PlanError: documents with missing media are to be replaced.
    """

    def __init__(self, stream: RawStream, spec: BatchSpec, augment: Augment | Mapping[str, Any] | None) -> None:
        if spec.balance:
            raise SettingsError(
                ["balance: the rows of a stream belong to lanes, which each rank reads by itself; leave it out"]
            )
        if spec.media.replace:
            raise make_no_replacement_error()
        self.stream = stream
        self.spec = spec
        self.origin = stream.origin
        self.iterations = Iterations()
        # RawStream omits the tokenizer: isinstance() of a store would load it.
        self.augmentation = make_augmentation(augment, cast("TokenizerSource", stream), spec.labels)
        self.media = make_stream_media(stream, spec, augment)
        self._maker = BatchMaker(spec, self.origin, self.augmentation, self.media)
        self._share = make_rank_share(stream.spec, spec)
        # Lane positions of the next iteration, and of a loaded state.
        self._begin = stream.begin(*self._ranks)
        self._loaded: Mapping[int, Any] | None = None

    @property
    def _ranks(self) -> tuple[int, int]:
        return self._share.placement.rank, self._share.placement.world_size

    @property
    def plan(self) -> Plan:
        return cast("Plan", self.stream)

    def __len__(self) -> int:
        return self.stream.steps

    def share_at(self, step: int) -> RankShare:
        return self._share

    def iter_batches(self, run: Iteration) -> Generator[Batch]:
        steps = run.steps = self.stream.open(*self._ranks, self._get_start())
        spec = self.stream.spec
        rank, world_size = self._ranks
        rank_positions = np.arange(rank, spec.global_batch_size, world_size)

        def begin(step: int) -> PendingItem[StagedBatch] | None:
            if step >= self.stream.steps:
                return None
            reader, rows = steps.take(step)
            rows, positions = pad_rank_rows(rows, rank_positions + step * spec.global_batch_size, self._share)
            pending = self._maker.begin(step, spec, reader, rows, positions, self._share.placement.context_rank)

            def release(staged: StagedBatch) -> StagedBatch:
                steps.done(step)
                return staged

            return pending.then(release)

        together = self.media is not None
        try:
            yield from iter_in_order(
                begin, StagedBatch.take_batch, run.next_step, self.spec.prefetch, together=together
            )
        finally:
            steps.close()

    def tokens(self, step: int) -> int:
        steps = self.iterations.steps
        if steps is None:
            raise make_random_access_error(str(step))
        return steps.tokens(step)

    def state(self) -> dict[str, Any]:
        step, steps = self.iterations.position, self.iterations.steps
        cursors = self._get_start() if steps is None else steps.cursors(step)
        return add_augment_state(self.stream.state(step, cursors), self.augmentation)

    def load(self, state: dict[str, Any]) -> None:
        step, self._loaded = self.stream.resume(remove_augment_state(state, self.augmentation), *self._ranks)
        self.iterations.load(step)

    def _get_start(self) -> Mapping[int, Any]:
        return self._loaded if self.iterations.resumed and self._loaded is not None else self._begin
