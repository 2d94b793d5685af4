"""The loader: batches of one rank from a store, mixture, plan or stream."""

import copy
import inspect
import os
import threading
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Never, final

import numpy as np
from numpy.typing import NDArray

from batchloom.batches.assembly.array_filling import IGNORE_INDEX, TokenReader
from batchloom.batches.assembly.augment import Augment, add_augment_state, make_augmentation, remove_augment_state
from batchloom.batches.assembly.batch_assembly import Batch
from batchloom.batches.assembly.batch_spec import (
    DEFAULT_BATCH_OPTIONS,
    DEFAULT_MEDIA_SPEC,
    DEFAULT_PLAN_OPTIONS,
    BatchOptions,
    BatchSpec,
    Form,
    Labels,
    MediaOptions,
    Output,
    PlanArguments,
    PlanOptions,
    refuse_other_names,
    refuse_other_types,
)
from batchloom.batches.assembly.device import StagedBatch, make_stager
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
)
from batchloom.batches.loading.data_logging import describe_data_source
from batchloom.batches.loading.loader_media import check_edit_keeps_media, make_store_media, make_stream_media
from batchloom.batches.loading.loader_plans import (
    LoaderData,
    check_generation,
    find_tokenizer_source,
    make_loader_plan,
    make_plan_store,
)
from batchloom.batches.loading.pool_tables import load_tables, start_counting_once_per_node, wait_for_tables
from batchloom.batches.loading.rank_share import (
    RankShare,
    RowCosts,
    as_step,
    assemble_arrays,
    check_shares_after_edits,
    count_trained_tokens,
    find_world,
    make_rank_share,
    measure_imbalance,
    pad_rank_rows,
    select_rank_rows,
)
from batchloom.batches.loading.remote_fetch import RemotePrefetcher, StepRows, fetch_rows, get_block_sizes
from batchloom.batches.loading.second_share import refuse_data_loader
from batchloom.batches.loading.stream_steps import (
    Iterations,
    RawStream,
    StreamCursor,
    make_random_access_error,
    open_stream_cursor,
)
from batchloom.batches.media.media_stores import replace_missing_documents, resume_with_missing
from batchloom.batches.model_import import check_later_model_calls
from batchloom.batches.producer_thread import PendingItem, iter_in_order, reserve_allocator_blocks
from batchloom.core.errors import InputError, PlanError, StateError
from batchloom.core.settings import as_int, quote_value
from batchloom.plan import Edit, Plan, PlanSpec
from batchloom.plan.order import DATA_PARALLEL, Imbalance, refuse_past_end
from batchloom.plan.packing import OverlongMode, Rows
from batchloom.store import Store


@final
class Loader:
    """Iterator over the batches of one rank; ``len`` is the exact number of steps.

    Every iteration starts at step 0, except the first one after a state is loaded. ``loader[step]``
    returns any single step. The tokens of a step depend only on the plan's fingerprint, the step,
    the rank and the world size (with a ``replicated`` store, every rank has the tokens of rank 0).

    Args:
        data: an open store, a ``Mixture`` of several, or a ready ``Plan`` or stream (then the settings of
            ``PlanSpec`` stay unset). A stream has no ``loader[step]``: its steps are sequential.
        seq_len: tokens of a sequence.
        global_batch_size: sequences of a step over all ranks; this rank's batches have
            global_batch_size / world_size rows.
        packing, seed, shuffle, epochs, steps: see ``PlanSpec``.
        overlong: see ``PlanSpec``. None is ``drop`` for stores with media or with conversations only (a partial
            conversation is useless), and ``split`` for others; in a mixture it applies to each store.
        rank: data-parallel rank. If neither it nor ``world_size`` is given, both come from an
            initialised torch.distributed, or torchrun, SLURM or MPI variables, else 0 of 1.
        world_size: number of data-parallel ranks.
        labels: ``aligned`` (Hugging Face models shift them) or ``shifted`` (next-token targets).
        output: ``torch`` or ``numpy``.
        form: ``rows`` or ``varlen``; for shapes see ``batches.assembly`` and docs/how-to/train/loader.md.
        prefetch: number of batches that one producer thread makes ahead; 0 for none.
        device: ``cpu``, ``cuda`` (torch's current one now), ``cuda:N`` or a ``torch.device``: device of the
            tensors, which are copied ahead on a stream of their own. None for tensors in the memory they were
            made in.
        plan: other settings of the data order: a ``PlanOptions`` of ``batchloom.batches``.
        batch: distribution of a step's rows: a ``BatchOptions`` of ``batchloom.batches``. With a ``mesh``, ``rank``
            and ``world_size`` count all processes; peers get the same rows, context-parallel ones each a slice
            of them. ``uneven="pad"`` also pads a rank's rows to full micro-batches, and
            ``batch.split(micro_batch_size)`` cuts a batch into them.
        augment: masking or replacement of tokens: an ``Augment`` of ``batchloom.batches``, its settings, or None.
        media: settings for images and audio in the stores: a ``MediaOptions`` of ``batchloom.batches``.

    Attributes:
        augmentation: ``augment`` prepared for the store; None if nothing is changed.
        costs: row costs that ``balance`` uses.
        media: maker of image and audio features; None without media.
        holds_media: whether the data holds images or audio.
        replaced: documents with missing media, by source.
        plan: the data order, as a value.
        store: the open store of the tokens, or a ``CombinedStore`` of several; not set for a stream.
        spec: the batch settings and this rank.

    Raises:
        SettingsError: settings that are unknown or contradict each other.
        PlanError: a world size or micro-batch that does not divide the batch, a mesh that does not
            fit (names what would), a batch of 2**31 tokens or more, or a store without documents.
        InputError: a GPU that torch does not see; or a store of another objective, such as pairs, whose
            rejected answers must not be trained on.
        MissingDependencyError: torch is requested and not installed.
    """

    def __init__(
        self,
        data: LoaderData,
        *,
        seq_len: int | None = None,
        global_batch_size: int | None = None,
        packing: str = "best_fit",
        overlong: OverlongMode | None = None,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int | None = None,
        steps: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        labels: Labels = "aligned",
        output: Output = "torch",
        form: Form = "rows",
        prefetch: int = 4,
        device: object = None,
        plan: PlanOptions = DEFAULT_PLAN_OPTIONS,
        batch: BatchOptions = DEFAULT_BATCH_OPTIONS,
        augment: Augment | Mapping[str, Any] | None = None,
        media: MediaOptions = DEFAULT_MEDIA_SPEC,
        **_: Never,
    ) -> None:
        refuse_other_names(_, inspect.signature(Loader).parameters)
        refuse_other_types(plan, batch)
        check_later_model_calls()
        request = PlanArguments(
            seq_len=seq_len,
            global_batch_size=global_batch_size,
            packing=packing,
            overlong=overlong,
            seed=seed,
            shuffle=shuffle,
            epochs=epochs,
            steps=steps,
            options=plan,
        )
        self.plan = make_loader_plan(data, request)
        rank, world_size = find_world(rank, world_size)
        self.spec = BatchSpec(
            labels=labels,
            output=output,
            form=form,
            prefetch=prefetch,
            rank=rank,
            world_size=world_size,
            mesh=batch.mesh,
            uneven=batch.uneven,
            micro_batch_size=batch.micro_batch_size,
            balance=batch.balance,
            dtype=batch.dtype,
            device=None if device is None else str(device),
            media=media,
        )
        self.plan, self.replaced = replace_missing_documents(self.plan, media.replace)
        self._stage = make_stager(self.spec)
        self.costs = RowCosts()
        self._balance = self.costs if batch.balance else None
        self._latest_share: tuple[PlanSpec | None, RankShare | None] = None, None
        self._turn = threading.RLock()
        # The fetch thread has its own reference: packing a pool locks the plan, possibly until its lengths are
        # downloaded.
        self._fetch_plan = self.plan
        self._iterations = Iterations()
        self._announced = False
        self._cuts_all = overlong is None and not isinstance(data, Plan)  # the user has not chosen a policy
        self._stream = open_stream_cursor(data, self.spec) if isinstance(data, RawStream) else None
        self.augmentation = make_augmentation(augment, find_tokenizer_source(data, self.plan), labels)
        if self._stream is not None:
            self.media = make_stream_media(self._stream.stream, self.spec, augment)
        else:
            self.store: Store | CombinedStore = make_plan_store(self.plan)
            self.media = make_store_media(self._list_stores(), self.plan, self.spec, augment)
        self.holds_media = self.media is not None
        self.share_at(0)
        if self._stream is None:
            _OPEN_LOADERS.add(self)
            load_tables(self.plan)

    @property
    def stream(self) -> RawStream | None:
        """The stream that is read, without random access to steps; None for a plan."""
        return None if self._stream is None else self._stream.stream

    @property
    def streamed(self) -> bool:
        """True if a stream is read."""
        return self._stream is not None

    @cached_property
    def origin(self) -> str:
        """Origin of the data, as in log lines and batches."""
        if self._stream is not None:
            return self._stream.stream.origin
        return describe_data_source(*(self.plan.stores.values()))

    def __iter__(self) -> Iterator[Batch]:
        if self._stream is not None:
            return self._iterate_stream(self._stream, self.next_step)
        return self._iterate(self.next_step)

    def step_numbers(self, first: int | None = None) -> Iterator[int]:
        """Yield an iteration's step numbers and advance the position, without reading.

        Args:
            first: first step, if not that of the next iteration.
        """
        if self._stream is not None:
            raise make_random_access_error("0")
        start = self.next_step if first is None else first
        return self._iterations.walk(start, lambda step: self.plan.has_step(step))  # noqa: PLW0108 - edits replace it

    def _iterate_stream(self, stream: StreamCursor, first: int) -> Iterator[Batch]:
        steps = stream.open(resumed=self._iterations.resumed)
        run = self._iterations.begin(first, steps)
        share = self.share_at(0)
        size = self.plan.spec.global_batch_size

        def begin(step: int) -> PendingItem[StagedBatch] | None:
            if step >= stream.stream.steps:
                return None
            reader, rows = steps.take(step)
            positions = np.arange(share.placement.rank, size, share.placement.world_size) + step * size
            pending = self._assemble_batch(reader, *pad_rank_rows(rows, positions, share), step)

            def release(staged: StagedBatch) -> StagedBatch:
                steps.done(step)
                return staged

            return pending.then(release)

        take = StagedBatch.take_batch
        batches = iter_in_order(begin, take, first, self.spec.prefetch, together=self.media is not None)
        try:
            for batch in batches:
                self._iterations.record_batch(run, batch.step)
                yield batch
            self._iterations.resumed = False
        finally:
            steps.close()
            self._iterations.end(run)

    def _iterate(self, first: int) -> Iterator[Batch]:
        run = self._iterations.begin(first)
        uncounted = self.announce()
        try:
            if self.spec.prefetch:
                start_counting_once_per_node(self.plan)
            for batch in self._iter_batches(first):
                self._iterations.record_batch(run, batch.step)
                if run.batch_count == 1 and uncounted:
                    count_left_out(self.plan)
                yield batch
            self._iterations.resumed = False
        finally:
            self._iterations.end(run)

    def _iter_batches(self, first: int) -> Iterator[Batch]:
        if self.spec.prefetch:
            batch = 3 * 8 * self.share_at(0).rows * self.plan.spec.seq_len
            reserve_allocator_blocks((self.spec.prefetch + 2) * batch)
        if self.spec.prefetch and self._is_remote:
            yield from self._iter_prefetched(first)
            return
        together = self.media is not None
        yield from iter_in_order(self._next, StagedBatch.take_batch, first, self.spec.prefetch, together=together)

    @cached_property
    def _is_remote(self) -> bool:
        return any(store.location.is_remote for store in self._list_stores())

    def _list_stores(self) -> list[Store]:
        return list_stores(self.store)

    def _iter_prefetched(self, first: int) -> Iterator[Batch]:
        """Yield batches of remote stores while later steps are fetched."""
        # Exclude edits: prefetched rows must belong to the plan that batches are made of.
        with self._turn:
            plan = self._fetch_plan = copy.copy(self.plan)
        prefetcher = self._make_prefetcher(plan, first)
        over = False

        def begin(step: int) -> PendingItem[StagedBatch] | None:
            nonlocal plan, prefetcher
            if self._fetch_plan is not plan:
                # The prefetched rows belong to the order before an edit.
                prefetcher.end()
                plan = self._fetch_plan
                prefetcher = self._make_prefetcher(plan, step)
                if over:
                    prefetcher.end()
            prefetcher.reach(step)
            return self._next(step, (plan, prefetcher.take_rows(step)))

        try:
            # Start batches one by one: a small cache must hold the data that is needed next.
            yield from iter_in_order(begin, StagedBatch.take_batch, first, self.spec.prefetch, together=False)
        finally:
            # The producer thread may still run and may start another prefetcher.
            over = True
            prefetcher.end()

    def _make_prefetcher(self, plan: Plan, first: int) -> RemotePrefetcher:
        def select_rows(step: int) -> StepRows | None:
            if not plan.has_step(step):
                return None
            return select_rank_rows(plan, step, self._share(plan.spec_at(step)), self._balance)

        def count_tokens(step: int) -> int:
            spec = plan.spec_at(step)
            return self._share(spec).rows * spec.seq_len

        return RemotePrefetcher(self._list_stores(), plan, first, select_rows, count_tokens)

    def __repr__(self) -> str:
        placement = self.share_at(self.next_step).placement
        return f"Loader({self.origin}: {self.plan!r}, rank {placement.rank} of {placement.world_size})"

    def __len__(self) -> int:
        refuse_data_loader()
        if self._stream is None:
            self._wait()
        return self.plan.steps

    def __bool__(self) -> bool:
        return True

    def __getitem__(self, index: int) -> Batch:
        refuse_data_loader()
        if self._stream is not None:
            raise make_random_access_error(quote_value(index))
        step = as_int(index)
        if step is None:
            raise TypeError(
                f"A step index must be a whole number, not {quote_value(index)}. Take several steps one by one: "
                "[loader[step] for step in range(begin, end)]"
            )
        if self.plan.spec.steps is None:
            self._wait()
        if step < 0:
            step += self.plan.steps
        if not 0 <= step < self.plan.steps:
            raise IndexError(
                f"There is no step {index}: there are {self.plan.steps:,}, numbered from 0 to {self.plan.steps - 1}."
            )
        if not self.plan.orders.is_counted and step > 0:
            self._wait()
        if self.plan.orders.is_counted:
            self.announce()
        return self.batch(step)

    def batch(self, step: int) -> Batch:
        """Return this rank's batch of a step, even beyond the end of the run.

        Raises:
            SettingsError: an invalid step number.
        """
        if self._stream is not None:
            raise make_random_access_error(str(step))
        return self._begin_step(step).finish().take_batch()

    def show(self, step: int, *, rows: int = 16) -> None:
        """Print this rank's rows of a step in the terminal: spans, padding and loss.

        Args:
            step: the step.
            rows: largest number of printed rows.

        Raises:
            SettingsError: an invalid step number.
        """
        # The terminal's library is needed for this alone.
        from batchloom.batches.loading.terminal_rows import print_rows  # noqa: PLC0415

        if self._stream is not None:
            raise make_random_access_error(str(step))
        with self._turn:
            step_rows = select_rank_rows(self.plan, step, self.share_at(step), self._balance)[0]
        print_rows(self.plan, step, step_rows, rows)

    def _begin_step(self, step: int, step_rows: StepRows | None = None) -> PendingItem[StagedBatch]:
        # Edits wait until the batch's rows are selected: they must come from one plan and one store.
        with self._turn:
            if step_rows is None:
                step_rows = select_rank_rows(self.plan, step, self.share_at(step), self._balance)
                if not self.spec.prefetch and self._is_remote:
                    fetch_rows(self._list_stores(), get_block_sizes(self.plan), step_rows[0])
            rows, positions = step_rows
            return self._assemble_batch(self._token_reader, self._to_global_documents(rows), positions, step)

    @property
    def _token_reader(self) -> TokenReader:
        return get_token_reader(self.store)

    def _assemble_batch(
        self, reader: TokenReader, rows: Rows, positions: NDArray[np.int64], step: int
    ) -> PendingItem[StagedBatch]:
        spec = self._spec_at(step)
        context = self._share(spec).placement.context_rank
        augment = (self.augmentation, positions) if self.augmentation else None
        check_ids = None if self._stream is not None else partial(check_id_range, self.store, rows)
        arrays, layout = assemble_arrays(reader, rows, spec, self.spec, context, augment, check_ids)
        pending = PendingItem(lambda: layout)
        if self.media is not None:
            varlen = self.spec.form == "varlen"
            pending = self.media.begin(arrays, reader, rows, layout, varlen=varlen)
        return pending.then(lambda final_layout: self._stage(Batch(arrays, step, self.origin, final_layout)))

    def trained_tokens(self, step: int) -> int:
        """Return the tokens with a loss in a step over all ranks.

        Divide the summed loss by it, at least by 1. Every rank computes the number from the plan and the masks.
        A stream does not know the other ranks' rows and raises.
        """
        if self._stream is not None:
            raise make_random_access_error(quote_value(step))
        step = as_step(step)
        # An edit in between would pass rows of one plan to the store of another.
        with self._turn:
            if is_replicated(self.store):
                share = self.share_at(step)
                rows, _ = select_rank_rows(self.plan, step, share, self._balance)
                return share.placement.world_size * count_trained_tokens(
                    self._token_reader, self._to_global_documents(rows)
                )
            start, stop = self.plan.positions_of(step)
            rows = self._to_global_documents(self.plan.rows(start, stop))
            if self.augmentation and self.augmentation.drops_loss:
                # The loss of each token is drawn at random, so the labels are counted.
                augment = (self.augmentation, np.arange(start, stop))
                unsliced_spec = replace(self.spec, mesh=DATA_PARALLEL)
                arrays, _ = assemble_arrays(
                    self._token_reader, rows, self.plan.spec_at(step), unsliced_spec, 0, augment
                )
                return int((arrays["labels"] != IGNORE_INDEX).sum())
            return count_trained_tokens(self._token_reader, rows)

    def tokens(self, step: int) -> int:
        """Return the tokens of this rank's rows of a step; with a stream, of a past step."""
        if self._stream is None:
            rows, _ = select_rank_rows(self.plan, step, self.share_at(step), self._balance)
            return int(rows.lengths.sum())
        steps = self._iterations.steps
        if steps is None:
            raise make_random_access_error(str(step))
        return steps.tokens(step)

    def imbalance(self, step: int) -> Imbalance:
        """Return the imbalance of a step's costs over ranks, in order and as distributed."""
        if self._stream is not None:
            raise make_random_access_error(str(step))
        share = self.share_at(step)
        balance = self.spec.balance
        return measure_imbalance(self.plan, step, share, self.costs, balance=balance)

    def _spec_at(self, step: int) -> PlanSpec:
        step = as_step(step)
        return self.plan.spec if self._stream is not None else self.plan.spec_at(step)

    def share_at(self, step: int) -> RankShare:
        """Return this process's share of a step, which edits may change."""
        return self._share(self._spec_at(step))

    def _share(self, plan: PlanSpec) -> RankShare:
        latest_plan, share = self._latest_share
        # Comparing settings takes longer than the rest of a step's arithmetic.
        if plan is not latest_plan or share is None:
            share = make_rank_share(plan, self.spec, replicated=self._stream is None and is_replicated(self.store))
            self._latest_share = plan, share
        return share

    def _to_global_documents(self, rows: Rows) -> Rows:
        """Return the rows with the document numbers of the store."""
        return self.store.number_documents(rows) if isinstance(self.store, CombinedStore) else rows

    @property
    def first_editable_step(self) -> int:
        """First step that an edit may change.

        It is the same on every rank that was given as many batches, since it does not depend on how fast a
        thread makes steps ahead. It is the step after the last one given, plus ``prefetch`` + 1 during an iteration
        (the most that can be made by then). With ``group_by_length`` it is the first step of a window.
        """
        first_unmade = self._iterations.first_step_not_made(self.spec.prefetch + 1)
        window = max(self.plan.spec.group_by_length, 1)
        return -(-first_unmade // window) * window

    def edit(self, edit: Edit) -> None:
        """Change the rest of the run from a step on, and record the edit in the state.

        The step is at least ``first_editable_step``. Each rank is given the same edit after the same number of
        batches: then all ranks accept it, or all refuse it.

        Raises:
            PlanError: a step that may have been made, or precedes an earlier edit; or a setting that cannot change.
            SettingsError: invalid weights or documents.
        """
        with self._turn:
            self._use(self.edited(edit))

    def edited(self, edit: Edit) -> Plan:
        """Return the plan that :meth:`edit` would use, unchanged; raises as it does."""
        if self._stream is not None:
            raise PlanError("A stream cannot be edited: its order is that of its input. Prepare the data for that.")
        with self._turn:
            if edit.step < self.first_editable_step:
                raise PlanError(
                    f"Step {edit.step} was delivered, or may have been made ahead (prefetch {self.spec.prefetch}); "
                    f"the first step that can change is {self.first_editable_step}."
                )
            plan = self.plan.edited(edit)
        refuse_past_end(edit, plan.spec.steps)
        check_shares_after_edits(plan, self.spec)
        if self.holds_media and edit.seq_len is not None:
            check_edit_keeps_media(plan)
        return plan

    def __reduce__(self) -> tuple[Any, ...]:
        if self._stream is not None:
            raise TypeError(
                "The loader of a stream cannot be pickled or copied; open the stream again where it is needed."
            )
        return LoaderTemplate.open, (LoaderTemplate.of(self), self.state_dict())

    def reset_locks_after_fork(self) -> None:
        """Create new locks after a fork: locks of other threads are never released."""
        self._turn = threading.RLock()
        self.plan = copy.copy(self.plan)

    def _use(self, plan: Plan) -> None:
        """Switch to another plan of the same stores; the caller holds the lock."""
        # Copy the plan before others can change it.
        fetch_plan = copy.copy(plan) if self._is_remote else plan
        self.store = make_plan_store(plan)
        self.plan = plan
        self._fetch_plan = fetch_plan

    def _next(
        self, step: int, prefetched: tuple[Plan, StepRows | None] | None = None
    ) -> PendingItem[StagedBatch] | None:
        """Start the batch of a step; return None after the last step."""
        with self._turn:
            step_rows = prefetched[1] if prefetched and prefetched[0] is self._fetch_plan else None
            if step_rows is None and not self.plan.has_step(step):
                return None
            return self._begin_step(step, step_rows)

    @property
    def next_step(self) -> int:
        """First step of the next iteration."""
        return self._iterations.next_step

    def state_dict(self) -> dict[str, Any]:
        """Return the position and its plan as plain JSON values.

        The position is after the last batch given. With a stream, the state holds the lanes of this rank only;
        ``batchloom.streaming.merge_states`` merges those of all ranks. Reading a first batch
        (``next(iter(loader))``) during another iteration does not move the position.

        Raises:
            StateError: workers of a ``DataLoader``, or a ``LoaderDataset``, gave the last batches, or a loop of
                Accelerate or Lightning fetched them ahead.
        """
        if self._iterations.untracked:
            raise StateError(
                "The last batches came through workers of a DataLoader, a LoaderDataset or a loop that fetches ahead "
                "(Accelerate, Lightning), so the loader does not know which of them the training loop received. Take "
                "loader.state_at(batch.step + 1) of the last batch, or iterate the Loader itself."
            )
        step = self._iterations.position
        if self._stream is not None:
            resumed = self._iterations.resumed
            state = self._stream.state(step, self._iterations.steps, resumed=resumed)
            return add_augment_state(state, self.augmentation)
        return self.state_at(step)

    def state_at(self, step: int) -> dict[str, Any]:
        """Return the state before a step, for trainers that count steps and fetch ahead.

        Raises as :meth:`batch` does.
        """
        if self._stream is not None:
            raise make_random_access_error(quote_value(step))
        state = self.plan.state(self.plan.positions_of(as_step(step))[0])
        return add_augment_state(state, self.augmentation)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a ``state_dict``, on any rank of any world size.

        Raises:
            StateError: the state belongs to another store, tokenizer, plan or augmentation; names each field
                that differs.
        """
        if not isinstance(state, dict):
            raise StateError(f"{quote_value(state)} is not a loader's state: give the dict that state_dict() returned.")
        if self._stream is not None:
            step = self._stream.resume(remove_augment_state(state, self.augmentation))
            self._iterations.load(step)
            return
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
        self._iterations.load(step)

    def _wait(self) -> None:
        """Count all pools: at once for small plans, else from the table."""
        wait_for_tables(self.plan)

    def announce(self) -> bool:
        """Log what the run leaves out, once, from rank 0.

        Returns True if counts remain to be logged. An iteration calls this before its first batch; adapters
        with random access call it themselves.
        """
        was_announced = self._announced
        self._announced = True
        if was_announced or self.spec.rank or not isinstance(self.plan, Plan):
            return False
        if self._cuts_all:
            announce_split_conversations(self.plan)
        announce_loss_weights(self.plan)
        announce_unused_weights(self.plan)
        return announce_left_out(self.plan, self.replaced)


def lose_track(loader: Loader) -> None:
    """Mark a loader's position as unknown, until the next state load or iteration."""
    loader._iterations.untracked = True  # noqa: SLF001 - adapters alone need it


def check_text_only(loader: Loader, consumer: str) -> None:
    """Reject a loader with media for a consumer of token arrays only."""
    if loader.holds_media:
        raise InputError(
            f"{loader.origin} holds images or audio, which {consumer} does not pass on yet: the model would be "
            "trained on their placeholders only. Give the model the Loader's batches as they are "
            "(docs/how-to/prepare/media.md)."
        )


def make_run_share(loader: Loader, first: int = 0) -> RankShare:
    """Return a process's share for frameworks with a fixed number of passes per step."""
    share = loader.share_at(first)
    for segment in () if loader.streamed else loader.plan.segments:
        if segment.step > first and (later := loader.share_at(segment.step)).passes != share.passes:
            raise PlanError(
                f"A step takes {share.passes} passes of {share.micro_batch_size} of this process's {share.rows} "
                f"rows, but after an edit {later.passes} of {later.micro_batch_size} from step {segment.step} on, "
                "so the optimizer would step at the wrong passes. Leave global_batch_size out of the edits, or "
                "micro_batch_size out of the Loader: then each step is one pass."
            )
    return share


@dataclass(frozen=True, slots=True)
class LoaderTemplate:
    """A plan with batch settings, from which other processes open their own loader."""

    plan: Plan
    spec: BatchSpec
    augment: Augment | None

    @classmethod
    def of(cls, loader: Loader) -> "LoaderTemplate":
        """Return the template of a loader."""
        # The documents whose media are replaced are in the plan's journal.
        media = replace(loader.spec.media, replace=())
        augment = loader.augmentation.settings if loader.augmentation else None
        return cls(loader.plan, replace(loader.spec, media=media), augment)

    def open(self, state: dict[str, Any], *, prefetch: int | None = None) -> Loader:
        """Open a loader that resumes from a state."""
        spec = self.spec
        loader = Loader(
            copy.copy(self.plan),
            rank=spec.rank,
            world_size=spec.world_size,
            labels=spec.labels,
            output=spec.output,
            form=spec.form,
            prefetch=spec.prefetch if prefetch is None else prefetch,
            device=spec.device,
            batch=spec.options(),
            augment=self.augment,
            media=spec.media,
        )
        loader.load_state_dict(state)
        return loader


# A producer thread does not survive in a forked child, but a lock it held does.
_OPEN_LOADERS: "weakref.WeakSet[Loader]" = weakref.WeakSet()


def _reset_loaders_after_fork() -> None:
    for loader in _OPEN_LOADERS:
        loader.reset_locks_after_fork()


os.register_at_fork(after_in_child=_reset_loaders_after_fork)
