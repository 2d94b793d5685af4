"""Protocol of what a loader reads, and the maker of its batches."""

from collections.abc import Generator
from typing import Any, Protocol, final

import numpy as np
from numpy.typing import NDArray

from batchloom.batches.assembly.array_filling import TokenReader
from batchloom.batches.assembly.augment import Augmentation
from batchloom.batches.assembly.batch_assembly import Batch, IdCheck
from batchloom.batches.assembly.batch_spec import BatchSpec
from batchloom.batches.assembly.device import StagedBatch, make_stager
from batchloom.batches.loading.iterations import Iteration, Iterations
from batchloom.batches.loading.rank_share import RankShare, assemble_arrays
from batchloom.batches.media.batch_media import BatchMedia
from batchloom.batches.producer_thread import PendingItem
from batchloom.plan import Plan, PlanSpec
from batchloom.plan.packing import Rows


class Feed(Protocol):
    """Batches of one process, in the order of a plan or of a stream.

    Attributes:
        spec: the batch settings and this rank.
        origin: origin of the data, as in log lines and batches.
        iterations: the running iterations, and the position.
        augmentation: ``augment`` prepared for the data; None if nothing is changed.
        media: maker of image and audio features; None without media.
        plan: the data order; a stream has only its ``spec``, ``steps`` and ``fingerprint``.
    """

    spec: BatchSpec
    origin: str
    iterations: Iterations
    augmentation: Augmentation | None
    media: BatchMedia | None

    @property
    def plan(self) -> Plan: ...

    def __len__(self) -> int:
        """Return the number of steps of the run."""

    def share_at(self, step: int) -> RankShare:
        """Return this process's share of a step."""

    def iter_batches(self, run: Iteration) -> Generator[Batch]:
        """Yield the batches of an iteration that begins."""

    def tokens(self, step: int) -> int:
        """Return the tokens of this rank's rows of a step."""

    def state(self) -> dict[str, Any]:
        """Return the position after the last batch given, as plain JSON values."""

    def load(self, state: dict[str, Any]) -> None:
        """Resume the next iteration from a state."""


@final
class BatchMaker:
    """Maker of a process's batches from the rows of its steps."""

    def __init__(
        self, spec: BatchSpec, origin: str, augmentation: Augmentation | None, media: BatchMedia | None
    ) -> None:
        self._spec = spec
        self._origin = origin
        self._augmentation = augmentation
        self._media = media
        self._stage = make_stager(spec)

    def begin(
        self,
        step: int,
        plan_spec: PlanSpec,
        reader: TokenReader,
        rows: Rows,
        positions: NDArray[np.int64],
        context_rank: int,
        check_ids: IdCheck | None = None,
    ) -> PendingItem[StagedBatch]:
        """Begin to make the batch of a step.

        Args:
            step: number of the step.
            plan_spec: plan settings of the step.
            reader: reader of the tokens.
            rows: rows of the data-parallel rank.
            positions: position of each row in the run, int64 [R].
            context_rank: slice of the rows that this process gets.
            check_ids: refuses ids outside the vocabulary.
        """
        augment = (self._augmentation, positions) if self._augmentation else None
        arrays, layout = assemble_arrays(reader, rows, plan_spec, self._spec, context_rank, augment, check_ids)
        pending = PendingItem(lambda: layout)
        if self._media is not None:
            varlen = self._spec.form == "varlen"
            pending = self._media.begin(arrays, reader, rows, layout, varlen=varlen)
        return pending.then(lambda final_layout: self._stage(Batch(arrays, step, self._origin, final_layout)))
