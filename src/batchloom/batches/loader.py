"""The loader: a store (or a ready plan) in, the batches of one rank out."""

import os
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import numpy as np

from batchloom.batches.ahead import Ahead
from batchloom.batches.assemble import Batch, assemble_rows, assemble_varlen
from batchloom.batches.device import require_torch, to_torch
from batchloom.batches.fetching import Fetching
from batchloom.batches.id_range import refuse_beyond
from batchloom.batches.left_out import announce_cut, announce_left_out, count_left_out
from batchloom.batches.origin import origin_of
from batchloom.batches.spec import BatchSpec, Form, Labels, Output
from batchloom.batches.tables import (
    IN_PLACE,
    count_beside,
    load_table,
    table_folders,
    wait_for_table,
)
from batchloom.batches.world import find_world
from batchloom.core.errors import InputError, PlanError, SettingsError, StateError
from batchloom.core.spec import shown, to_plain, whole
from batchloom.plan.plan import SOURCE, Plan
from batchloom.plan.ranks import check_world, rank_positions
from batchloom.plan.rows import Rows
from batchloom.plan.spec import POOL_SIZE, Last, Overlong, PlanSpec
from batchloom.store.manifest import generation_with
from batchloom.store.reader import Store

# glibc keeps no larger blocks than this (DEFAULT_MMAP_THRESHOLD_MAX).
_MOST_KEPT = 32 << 20
# Where spans begin in a batch is counted in 32 bits (cu_seq_lens).
_MOST_TOKENS = (1 << 31) - 1


@final
class Loader:
    """Iterates the batches of one rank; ``len`` is the exact number of steps.

    Every iteration starts at step 0, or once at the step of a loaded state. ``loader[step]``
    gives any step, on its own. Which tokens a step holds depends only on the plan's
    fingerprint, the step, the rank and the world size (of a store that is ``replicated`` every
    rank holds what rank 0 does).

    Args:
        data: an open store, or a ready ``Plan`` (then the settings of ``PlanSpec`` stay unset).
        seq_len: tokens of a sequence.
        global_batch_size: sequences of a step over all ranks; this rank's batches have
            global_batch_size / world_size rows.
        packing, seed, shuffle, epochs, steps, last, pool_size, block: see ``PlanSpec``.
        overlong: see ``PlanSpec``; None is ``drop`` for a store of conversations alone, which half
            of is worth nothing, and ``split`` for any other.
        rank: data-parallel rank; found out when neither it nor ``world_size`` is given: from an
            initialised torch.distributed, torchrun, SLURM or MPI variables, else 0 of 1.
        world_size: number of data-parallel ranks.
        labels: ``aligned`` (Hugging Face models shift them) or ``shifted`` (next-token targets).
        output: ``torch`` or ``numpy``.
        form: ``rows`` or ``varlen``; shapes in ``batches.assemble`` and docs/batches.md.
        prefetch: batches made ahead by one producer thread; 0 for none.

    Attributes:
        plan: the order, as a value.
        store: the open store the tokens are read from.
        spec: how batches are made, and this rank.

    Raises:
        SettingsError: settings that are unknown or contradict each other.
        PlanError: a world size that does not divide the batch (names those that do), a batch
            of 2**31 tokens or more, or a store without documents.
        InputError: a store of preferences, whose rejected answers are not to be imitated.
        MissingDependencyError: torch is asked for and not installed.
    """

    def __init__(
        self,
        data: Store | Plan,
        *,
        seq_len: int | None = None,
        global_batch_size: int | None = None,
        packing: str = "best_fit",
        overlong: Overlong | None = None,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int | None = None,
        steps: int | None = None,
        last: Last = "fill",
        pool_size: int = POOL_SIZE,
        block: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        labels: Labels = "aligned",
        output: Output = "torch",
        form: Form = "rows",
        prefetch: int = 4,
    ) -> None:
        settings = {
            "packing": packing,
            "overlong": overlong,
            "seed": seed,
            "shuffle": shuffle,
            "epochs": epochs,
            "steps": steps,
            "last": last,
            "pool_size": pool_size,
            "block": block,
        }
        self.plan = _plan(data, seq_len, global_batch_size, settings)
        rank, world_size = find_world(rank, world_size)
        self.spec = BatchSpec(
            labels=labels,
            output=output,
            form=form,
            prefetch=prefetch,
            rank=rank,
            world_size=world_size,
        )
        if output == "torch":
            require_torch()
        self._rows = _share(self.plan.spec, self.spec)
        self.store = _store_of(self.plan)
        refuse_preferences(self.store)
        self._share_of = 0 if self.store.replicated else self.spec.rank
        self._folders = table_folders(self.store)
        self._start = 0
        self._resumed = self._told = False
        # Nobody has said that conversations may be cut, and they are.
        self._cuts_all = overlong is None and isinstance(data, Store) and data.mixed
        self._iterations: list[_Iteration] = []
        self._latest: _Iteration | None = None
        _LOADERS.add(self)
        if self.plan.pools.count > IN_PLACE:
            load_table(self.plan, self._folders)

    @cached_property
    def origin(self) -> str:
        """Where the data comes from, as log lines and batches say it."""
        return origin_of(self.store)

    def __iter__(self) -> Iterator[Batch]:
        return self._iterate(self.next_step)

    def _iterate(self, first: int) -> Iterator[Batch]:
        run = _Iteration(first)
        self._iterations.append(run)
        uncounted = self._announce()
        try:
            for batch in self._batches(first):
                run.taken += 1
                run.next_step = batch.step + 1
                self._latest = run
                if run.taken == 1 and self.spec.prefetch:
                    self._count_beside()
                if run.taken == 1 and uncounted:
                    count_left_out(self.plan)
                # Whoever only looks at the first batch of a resumed loader has not resumed it.
                self._resumed = self._resumed and run.taken == 1
                yield batch
            self._resumed = False
        finally:
            self._iterations.remove(run)
            if run.taken <= 1 and self._latest is run and self._iterations:
                self._latest = self._iterations[-1]

    def _batches(self, first: int) -> Iterator[Batch]:
        if self.spec.prefetch:
            self._reserve()
            if self.store.is_far:
                yield from self._fetched(first)
                return
            yield from Ahead(self._next, first, self.spec.prefetch)
            return
        step = first
        while (made := self._next(step)) is not None:
            yield made
            step += 1

    def _fetched(self, first: int) -> Iterator[Batch]:
        """The batches of a store that lies elsewhere, whose coming steps are fetched meanwhile."""
        # A plan of its own: who packs a pool holds the plan, and its lengths may be on their way.
        plan = self.plan.twin()
        fetching = Fetching(
            [self.store],
            [self._block],
            lambda step: self._rows_of(plan, step) if plan.has_step(step) else None,
            first,
            self._rows * self.plan.spec.seq_len,
        )

        def make(step: int) -> Batch | None:
            fetching.reach(step)
            return self._next(step)

        try:
            yield from Ahead(make, first, self.spec.prefetch)
        finally:
            fetching.end()

    def __len__(self) -> int:
        self._wait()
        return self.plan.steps

    def __bool__(self) -> bool:
        return True

    def __getitem__(self, asked: int) -> Batch:
        step = whole(asked)
        if step is None:
            raise TypeError(
                f"Steps are taken one by one, by a whole number, not by {shown(asked)}: "
                "[loader[step] for step in range(2)]"
            )
        if self.plan.spec.steps is None:
            self._wait()
        if step < 0:
            step += self.plan.steps
        if not 0 <= step < self.plan.steps:
            raise IndexError(
                f"There is no step {asked}: there are {self.plan.steps:,}, numbered from 0 to "
                f"{self.plan.steps - 1}."
            )
        if not self.plan.has_counts and step > 0:
            self._wait()
        return self.batch(step)

    def batch(self, step: int) -> Batch:
        """The batch of a step of this rank, whether or not the run is that long."""
        spec = self.plan.spec
        rows = self._rows_of(self.plan, step)
        if self.store.is_far and not self.spec.prefetch:
            self.store.fetch(np.unique(rows.documents), self._block)
        if self.spec.form == "varlen":
            arrays = assemble_varlen(self.store, rows, self.spec.labels)
        else:
            arrays = assemble_rows(self.store, rows, spec.seq_len, self.spec.labels)
        refuse_beyond(self.store, arrays["input_ids"], rows)
        return Batch(to_torch(arrays) if self.spec.output == "torch" else arrays, step, self.origin)

    @property
    def _block(self) -> int:
        """How many neighbouring documents the plan keeps together."""
        return (
            self.plan.spec.block_for(max(self.plan.pools.layers)) if self.plan.spec.shuffle else 1
        )

    def _rows_of(self, plan: Plan, step: int) -> Rows:
        size, ranks = plan.spec.global_batch_size, self.spec.world_size
        return plan.rows(*rank_positions(step, size, self._share_of, ranks))

    def _next(self, step: int) -> Batch | None:
        return self.batch(step) if self.plan.has_step(step) else None

    @property
    def next_step(self) -> int:
        """The step the next iteration begins with."""
        return self._start if self._resumed else 0

    def state_dict(self) -> dict[str, Any]:
        """One position and the plan it belongs to, as plain JSON values.

        The position is that after the batch given last. A look at a first batch
        (``next(iter(loader))``) beside a running iteration does not move it.
        """
        step = self._latest.next_step if self._latest else self.next_step
        return self.plan.state(step * self.plan.spec.global_batch_size)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken, on any rank of any world size.

        Raises:
            StateError: the state is of another store, tokenizer or plan; names each field that differs.
        """
        refuse_other_generation(self.store, state)
        position = self.plan.resume(state)
        step, inside = divmod(position, self.plan.spec.global_batch_size)
        if inside:
            raise StateError(
                f"The state's position {position} lies inside step {step}; the state was changed by hand."
            )
        self._start, self._resumed, self._latest = step, True, None

    def _wait(self) -> None:
        """Have the counts of all pools: at once for small plans, else from the table."""
        if self.plan.pools.count <= IN_PLACE:
            self.plan.count_all()
        else:
            wait_for_table(self.plan, self._folders)

    def _announce(self) -> bool:
        """Tell once, from one rank, what the run leaves out; whether it remains to be counted."""
        told, self._told = self._told, True
        if told or self.spec.rank:
            return False
        if self._cuts_all:
            announce_cut(self.plan)
        return announce_left_out(self.plan)

    def _reserve(self) -> None:
        """Let the allocator keep what batches are made of, instead of giving it back each time.

        glibc learns from the largest block freed so far which sizes to keep (mallopt(3),
        M_MMAP_THRESHOLD): without this, freed batches go back to the system and come again as
        page faults. The block is never touched, so it costs no memory.
        """
        batch = 3 * 8 * self._rows * self.plan.spec.seq_len
        np.empty(min((self.spec.prefetch + 2) * batch, _MOST_KEPT), np.uint8)

    def _count_beside(self) -> None:
        """Start counting once a run has begun, in one process of the node."""
        local = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0"
        if local != "0" or self.plan.pools.count <= IN_PLACE or self.plan.has_counts:
            return
        count_beside(self.store, to_plain(self.plan.spec))


@dataclass(slots=True, eq=False)
class _Iteration:
    """One iteration over a loader: its next step, and how many batches it gave."""

    next_step: int
    taken: int = 0


# A producer thread does not live on in a forked child, but the lock it held would.
_LOADERS: "weakref.WeakSet[Loader]" = weakref.WeakSet()


def _after_fork() -> None:
    for loader in _LOADERS:
        loader.plan = loader.plan.twin()


os.register_at_fork(after_in_child=_after_fork)


def _store_of(plan: Plan) -> Store:
    if not isinstance(plan.store, Store):
        raise InputError(
            f"A Loader reads the tokens of an open store; this plan was made of {type(plan.store).__name__}. "
            "Give Plan(open_store(path), spec)."
        )
    return plan.store


def refuse_other_generation(store: Store, state: dict[str, Any]) -> None:
    """Refuse a state that was made on another generation of the store; any other is the plan's to judge.

    Raises:
        StateError: says which generation to open.
        GenerationError: it was compacted away.
    """
    try:
        theirs = state["identity"]["sources"][SOURCE]["store"]
    except (KeyError, TypeError):
        return
    if theirs == store.fingerprint or store.manifest is None or not store.on_disk:
        return
    newest = store.manifest_of()
    number = generation_with(newest, store.split, theirs)
    if number is None:
        return
    # Where it was compacted away, this says so.
    store.manifest_of(number)
    raise StateError(
        f"The state was made on generation {number} of {store.place}, and generation {store.generation} is open: "
        f"open_store({store.place!r}, {store.split!r}, generation={number}) goes on with it exactly."
    )


def refuse_preferences(store: Store) -> None:
    """Refuse a store of preferences, of which some answers are not to be imitated.

    Raises:
        InputError: it is one.
    """
    if not store.preferences:
        return
    remedy = {
        "pairs": "To train the chosen answers alone, prepare the data again with --map prompt=prompt,completion=chosen "
        "(where chosen holds whole conversations --map messages=chosen, whole texts --map text=chosen)",
        "labels": "To train the good answers alone, keep their records only and prepare those with --map label=",
    }[store.preferences]
    raise InputError(
        f"{store.place} holds preferences ({store.preferences}): a loader would train the answers that are not wanted, "
        f"too. Preference trainers read them with batchloom.store.preferences. {remedy}."
    )


def _share(plan: PlanSpec, spec: BatchSpec) -> int:
    """Rows of a rank's batches, after checking that they can be dealt and counted."""
    check_world(plan.global_batch_size, spec.rank, spec.world_size)
    rows = plan.global_batch_size // spec.world_size
    if rows * plan.seq_len > _MOST_TOKENS:
        raise PlanError(
            f"A batch of {rows} sequences of {plan.seq_len} tokens holds {rows * plan.seq_len}, more than "
            f"{_MOST_TOKENS}: lower global_batch_size or seq_len, or use more ranks."
        )
    return rows


def _plan(
    data: Store | Plan, seq_len: int | None, global_batch_size: int | None, settings: dict[str, Any]
) -> Plan:
    if isinstance(data, Plan):
        defaults = {**_DEFAULTS, "overlong": None}
        given = [name for name, value in settings.items() if value != defaults[name]]
        given += [
            name
            for name, value in (("seq_len", seq_len), ("global_batch_size", global_batch_size))
            if value is not None
        ]
        if given:
            raise SettingsError(
                [f"{name}: belongs to the plan, which is given ready" for name in given]
            )
        return data
    if not isinstance(data, Store):
        raise InputError(
            f"Loader takes an open store or a Plan, not {type(data).__name__}; open a path with open_store(path)."
        )
    missing = [
        f"{name}: missing; a whole number of at least 1"
        for name, value in (("seq_len", seq_len), ("global_batch_size", global_batch_size))
        if value is None
    ]
    if seq_len is None or global_batch_size is None:
        raise SettingsError(missing)
    if settings["overlong"] is None:
        settings = {**settings, "overlong": "drop" if data.conversations else "split"}
    return Plan(data, PlanSpec(seq_len=seq_len, global_batch_size=global_batch_size, **settings))


_DEFAULTS = {
    name: value
    for name, value in to_plain(PlanSpec(seq_len=1, global_batch_size=1)).items()
    if name not in ("seq_len", "global_batch_size")
}
