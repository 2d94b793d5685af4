"""Batches of one process from a plan, with access to any step, and edits."""

import copy
import os
import threading
import weakref
from collections.abc import Generator, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, final

import numpy as np

from batchloom.batches.assembly.array_filling import IGNORE_INDEX
from batchloom.batches.assembly.augment import Augment, add_augment_state, make_augmentation, remove_augment_state
from batchloom.batches.assembly.batch_assembly import Batch
from batchloom.batches.assembly.batch_spec import BatchSpec
from batchloom.batches.assembly.device import StagedBatch
from batchloom.batches.loading.announcements import (
    announce_left_out,
    announce_loss_weights,
    announce_split_conversations,
    announce_unused_weights,
    count_left_out,
)
from batchloom.batches.loading.combined_store import (
    CombinedStore,
    check_id_range,
    get_token_reader,
    is_replicated,
    list_stores,
    number_documents,
)
from batchloom.batches.loading.data_logging import describe_data_source
from batchloom.batches.loading.feed import BatchMaker
from batchloom.batches.loading.iterations import Iteration, Iterations
from batchloom.batches.loading.loader_media import check_edit_keeps_media, make_store_media
from batchloom.batches.loading.loader_plans import check_generation, get_first_store, make_plan_store
from batchloom.batches.loading.pool_tables import load_tables, start_counting_once_per_node, wait_for_tables
from batchloom.batches.loading.rank_share import (
    RankShare,
    RowCosts,
    as_step,
    assemble_arrays,
    check_shares_after_edits,
    count_trained_tokens,
    make_rank_share,
    select_rank_rows,
)
from batchloom.batches.loading.remote_fetch import FetchedSteps, StepRows, fetch_rows, get_block_sizes
from batchloom.batches.media.media_stores import replace_missing_documents, resume_with_missing
from batchloom.batches.producer_thread import PendingItem, iter_in_order, reserve_allocator_blocks
from batchloom.core.errors import PlanError, SettingsError, StateError
from batchloom.core.settings import quote_value
from batchloom.plan import Edit, Plan, PlanSpec
from batchloom.plan.order import DATA_PARALLEL, refuse_past_end
from batchloom.store import Store


@final
class PlanFeed:
    """Batches of one process from a plan; attributes as of ``Feed``.

    Attributes:
        store: the open store of the tokens, or a ``CombinedStore`` of several.
        costs: row costs that ``balance`` uses.
        replaced: documents with missing media, by source.
    """

    def __init__(
        self,
        plan: Plan,
        spec: BatchSpec,
        augment: Augment | Mapping[str, Any] | None,
        *,
        announces_cuts: bool = False,
    ) -> None:
        self.plan, self.replaced = replace_missing_documents(plan, spec.media.replace)
        self.spec = spec
        self.iterations = Iterations()
        self.costs = RowCosts()
        self.origin = describe_data_source(*self.plan.stores.values())
        self.augmentation = make_augmentation(augment, get_first_store(self.plan.stores), spec.labels)
        self.store: Store | CombinedStore = make_plan_store(self.plan)
        self.media = make_store_media(list_stores(self.store), self.plan, spec, augment)
        self._maker = BatchMaker(spec, self.origin, self.augmentation, self.media)
        self._balance = self.costs if spec.balance else None
        self._is_remote = any(store.location.is_remote for store in list_stores(self.store))
        self._latest_share: tuple[PlanSpec | None, RankShare | None] = None, None
        # Rows are selected from one plan and one store: edits wait for it.
        self._turn = threading.RLock()
        # The fetch thread has its own reference: packing a pool locks the plan, possibly until its lengths are
        # downloaded.
        self._fetch_plan = self.plan
        self._announces_cuts = announces_cuts
        self._is_announced = False
        self.share_at(0)
        _OPEN_FEEDS.add(self)
        load_tables(self.plan)

    def __len__(self) -> int:
        wait_for_tables(self.plan)
        return self.plan.steps

    def share_at(self, step: int) -> RankShare:
        """Return this process's share of a step, which edits may change."""
        return self._share(self.plan.spec_at(as_step(step)))

    def _share(self, plan_spec: PlanSpec) -> RankShare:
        latest_spec, share = self._latest_share
        # Comparing settings takes longer than the rest of a step's arithmetic.
        if plan_spec is not latest_spec or share is None:
            share = make_rank_share(plan_spec, self.spec, replicated=is_replicated(self.store))
            self._latest_share = plan_spec, share
        return share

    def iter_batches(self, run: Iteration) -> Generator[Batch]:
        is_uncounted = self.announce()
        first, prefetch = run.next_step, self.spec.prefetch
        fetched: FetchedSteps | None = None
        if prefetch:
            start_counting_once_per_node(self.plan)
            batch_bytes = 3 * 8 * self.share_at(0).rows * self.plan.spec.seq_len
            reserve_allocator_blocks((prefetch + 2) * batch_bytes)
            if self._is_remote:
                # Exclude edits: fetched rows must belong to the plan that batches are made of.
                with self._turn:
                    self._fetch_plan = copy.copy(self.plan)
                    fetched = FetchedSteps(
                        list_stores(self.store), self._fetch_plan, first, get_share=self._share, balance=self._balance
                    )

        def begin(step: int) -> PendingItem[StagedBatch] | None:
            # Outside of the lock: the fetch thread may keep its plan busy.
            plan = self._fetch_plan
            step_rows = fetched.take_rows(plan, step) if fetched else None
            with self._turn:
                if plan is not self._fetch_plan:
                    # An edit came in between.
                    step_rows = None
                if step_rows is None and not self.plan.has_step(step):
                    return None
                return self._begin_step(step, step_rows)

        # With remote stores batches begin one by one: a small cache must hold the data that is needed next.
        together = self.media is not None and fetched is None
        try:
            batches = iter_in_order(begin, StagedBatch.take_batch, first, prefetch, together=together)
            for number, batch in enumerate(batches):
                if number == 0 and is_uncounted:
                    count_left_out(self.plan)
                yield batch
        finally:
            if fetched:
                fetched.close()

    def _begin_step(self, step: int, step_rows: StepRows | None = None) -> PendingItem[StagedBatch]:
        with self._turn:
            if step_rows is None:
                step_rows = self.select_rows(step)
                if not self.spec.prefetch and self._is_remote:
                    fetch_rows(list_stores(self.store), get_block_sizes(self.plan), step_rows[0])
            rows = number_documents(self.store, step_rows[0])
            plan_spec = self.plan.spec_at(step)
            return self._maker.begin(
                step,
                plan_spec,
                get_token_reader(self.store),
                rows,
                step_rows[1],
                self._share(plan_spec).placement.context_rank,
                partial(check_id_range, self.store, rows),
            )

    def select_rows(self, step: int) -> StepRows:
        """Return this rank's rows of a step, and their positions, int64 [R]."""
        with self._turn:
            return select_rank_rows(self.plan, step, self.share_at(step), self._balance)

    def batch(self, step: int) -> Batch:
        """Return this rank's batch of a step, even beyond the end of the run."""
        return self._begin_step(step).finish().take_batch()

    def find_step(self, index: int) -> int:
        """Return the step of an index, which counts from the end if it is negative.

        Raises:
            IndexError: the run has no such step.
        """
        if self.plan.spec.steps is None:
            wait_for_tables(self.plan)
        step = index + self.plan.steps if index < 0 else index
        if not 0 <= step < self.plan.steps:
            raise IndexError(
                f"There is no step {index}: there are {self.plan.steps:,}, numbered from 0 to {self.plan.steps - 1}."
            )
        if step > 0:
            wait_for_tables(self.plan)
        return step

    def check_step(self, step: object) -> int:
        """Return the number of a step that the run has; counts no pools far ahead.

        Raises:
            IndexError: the run has no such step.
            SettingsError: an invalid step number.
        """
        number = as_step(step)
        return number if self.plan.has_step(number) else self.find_step(number)

    def tokens(self, step: int) -> int:
        return int(self.select_rows(self.check_step(step))[0].lengths.sum())

    def trained_tokens(self, step: int) -> int:
        """Return the tokens with a loss in a step over all ranks; see ``Loader``."""
        # An edit in between would pass rows of one plan to the store of another.
        with self._turn:
            step = self.check_step(step)
            if is_replicated(self.store):
                rows, _ = self.select_rows(step)
                own = count_trained_tokens(get_token_reader(self.store), number_documents(self.store, rows))
                return self.share_at(step).placement.world_size * own
            start, stop = self.plan.positions_of(step)
            reader = get_token_reader(self.store)
            rows = number_documents(self.store, self.plan.rows(start, stop))
            if self.augmentation and self.augmentation.drops_loss:
                # The loss of each token is drawn at random, so the labels are counted.
                augment = (self.augmentation, np.arange(start, stop))
                unsliced_spec = replace(self.spec, mesh=DATA_PARALLEL)
                arrays, _ = assemble_arrays(reader, rows, self.plan.spec_at(step), unsliced_spec, 0, augment)
                return int((arrays["labels"] != IGNORE_INDEX).sum())
            return count_trained_tokens(reader, rows)

    @property
    def first_editable_step(self) -> int:
        """First step that an edit may change; see ``Loader``."""
        first_unmade = self.iterations.first_step_not_made(self.spec.prefetch + 1)
        window = max(self.plan.spec.group_by_length, 1)
        return -(-first_unmade // window) * window

    def edit(self, edit: Edit) -> None:
        """Change the rest of the run from a step on; see ``Loader``."""
        with self._turn:
            self._use(self.edited(edit))

    def edited(self, edit: Edit) -> Plan:
        """Return the plan that :meth:`edit` would use, unchanged; raises as it does."""
        if not isinstance(edit, Edit):
            raise SettingsError([f"edit: {quote_value(edit)} is not an Edit; give Edit(step=..., ban=...)"])
        with self._turn:
            if edit.step < self.first_editable_step:
                raise PlanError(
                    f"Step {edit.step} was delivered, or may have been made ahead (prefetch {self.spec.prefetch}); "
                    f"the first step that can change is {self.first_editable_step}."
                )
            plan = self.plan.edited(edit)
        refuse_past_end(edit, plan.spec.steps)
        check_shares_after_edits(plan, self.spec)
        if self.media is not None and edit.seq_len is not None:
            check_edit_keeps_media(plan)
        return plan

    def _use(self, plan: Plan) -> None:
        """Switch to another plan of the same stores; the caller holds the lock."""
        # Copy the plan before others can change it.
        fetch_plan = copy.copy(plan) if self._is_remote else plan
        self.store = make_plan_store(plan)
        self.plan = plan
        self._fetch_plan = fetch_plan

    def state(self) -> dict[str, Any]:
        return self.state_at(self.iterations.position)

    def state_at(self, step: int) -> dict[str, Any]:
        """Return the state before a step."""
        state = self.plan.state(self.plan.positions_of(as_step(step))[0])
        return add_augment_state(state, self.augmentation)

    def load(self, state: dict[str, Any]) -> None:
        for name, store in self.plan.stores.items():
            if isinstance(store, Store):
                check_generation(store, state, name)
        state = remove_augment_state(state, self.augmentation)
        plan, position = resume_with_missing(self.plan, self.replaced, state)
        if plan is not self.plan:
            check_shares_after_edits(plan, self.spec)
            with self._turn:
                self._use(plan)
        step, inside = plan.step_at(position)
        if inside:
            raise StateError(f"The state's position {position} lies inside step {step}; the state was changed by hand.")
        self.iterations.load(step)

    def announce(self) -> bool:
        """Log what the run leaves out, once, from rank 0.

        Returns True if counts remain to be logged. An iteration calls this before its first batch; adapters
        with random access call it themselves.
        """
        was_announced = self._is_announced
        self._is_announced = True
        if was_announced or self.spec.rank:
            return False
        if self._announces_cuts:
            announce_split_conversations(self.plan)
        announce_loss_weights(self.plan)
        announce_unused_weights(self.plan)
        return announce_left_out(self.plan, self.replaced)

    def reset_locks_after_fork(self) -> None:
        """Create new locks after a fork: locks of other threads are never released."""
        self._turn = threading.RLock()
        self.plan = copy.copy(self.plan)


def iter_step_numbers(feed: PlanFeed, first: int) -> Iterator[int]:
    """Yield an iteration's step numbers and advance the position, without reading."""
    return feed.iterations.walk(first, lambda step: feed.plan.has_step(step))  # noqa: PLW0108 - edits replace the plan


def copy_settings(feed: PlanFeed) -> tuple[Plan, BatchSpec, Augment | None]:
    """Return the settings from which another process makes an equal feed."""
    # The documents whose media are replaced are in the plan's journal.
    spec = replace(feed.spec, media=replace(feed.spec.media, replace=()))
    return feed.plan, spec, feed.augmentation.settings if feed.augmentation else None


# A producer thread does not survive in a forked child, but a lock it held does.
_OPEN_FEEDS: "weakref.WeakSet[PlanFeed]" = weakref.WeakSet()


def _reset_feeds_after_fork() -> None:
    for feed in _OPEN_FEEDS:
        feed.reset_locks_after_fork()


os.register_at_fork(after_in_child=_reset_feeds_after_fork)
