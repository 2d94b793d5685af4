"""The loader: a store (or a ready plan) in, the batches of one rank out."""

import os
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, final

import numpy as np

from batchloom.batches.ahead import Ahead
from batchloom.batches.assemble import Batch
from batchloom.batches.augment import Augment, make_augmentation, with_augment, without_augment
from batchloom.batches.device import require_torch, to_torch
from batchloom.batches.left_out import announce_cut, announce_left_out, count_left_out
from batchloom.batches.origin import origin_of
from batchloom.batches.share import (
    Share,
    make_arrays,
    measured,
    rank_rows,
    share_of,
    trained_tokens,
)
from batchloom.batches.shelf import Shelf, shelf_of
from batchloom.batches.spec import BatchSpec, Form, Labels, Output
from batchloom.batches.tables import IN_PLACE, count_beside, load_tables, wait_for_tables
from batchloom.batches.world import find_world
from batchloom.core.errors import InputError, PlanError, SettingsError, StateError
from batchloom.core.spec import shown, to_plain, whole
from batchloom.plan.deal import Imbalance
from batchloom.plan.edits import Edit
from batchloom.plan.mixture import Mixture, SourceSpec
from batchloom.plan.plan import SOURCE, Plan
from batchloom.plan.ranks import DATA_PARALLEL, Mesh, Uneven
from batchloom.plan.rows import Rows
from batchloom.plan.spec import Last, Overlong, PlanSpec
from batchloom.plan.state import with_journal
from batchloom.store.manifest import generation_with, read_manifest
from batchloom.store.reader import Store

# glibc keeps no larger blocks than this (DEFAULT_MMAP_THRESHOLD_MAX).
_MOST_KEPT = 32 << 20


@final
class Loader:
    """Iterates the batches of one rank; ``len`` is the exact number of steps.

    Every iteration starts at step 0, or once at the step of a loaded state. ``loader[step]``
    gives any step, on its own. Which tokens a step holds depends only on the plan's
    fingerprint, the step, the rank and the world size (of a store that is ``replicated`` every
    rank holds what rank 0 does).

    Args:
        data: an open store, a ``Mixture`` of several, or a ready ``Plan`` (then the
            settings of ``PlanSpec`` stay unset).
        seq_len: tokens of a sequence.
        global_batch_size: sequences of a step over all ranks; this rank's batches have
            global_batch_size / world_size rows.
        packing, seed, shuffle, epochs, steps, last, pool_size, block, lanes, align: see ``PlanSpec``.
        overlong: see ``PlanSpec``; None is ``drop`` for a store of conversations alone, which half
            of is worth nothing, and ``split`` for any other.
        rank: data-parallel rank; found out when neither it nor ``world_size`` is given: from an
            initialised torch.distributed, torchrun, SLURM or MPI variables, else 0 of 1.
        world_size: number of data-parallel ranks.
        mesh: how processes stand together that are tensor-, context- or pipeline-parallel: then
            ``rank`` and ``world_size`` count all processes. Peers are given the same rows,
            context-parallel ones each its slice of them.
        uneven: ``refuse`` a world size that does not divide the batch, or ``pad`` ranks with rows
            that carry no loss, so that all have the same number.
        micro_batch_size: rows of one forward pass: a rank's rows are to divide into it (with
            ``pad`` they are filled up to do); ``batch.split(micro_batch_size)`` cuts a batch.
        balance: deal the rows of each step so that every rank has about the same sum of squared
            span lengths; which rows a step holds stays as it is.
        labels: ``aligned`` (Hugging Face models shift them) or ``shifted`` (next-token targets).
        output: ``torch`` or ``numpy``.
        form: ``rows`` or ``varlen``; shapes in ``batches.assemble`` and docs/batches.md.
        prefetch: batches made ahead by one producer thread; 0 for none.
        augment: tokens that are masked or replaced: an ``Augment`` of ``batches.augment``, or its settings
            by name (``{"noise_prob": 0.1}``); None for none.

    Attributes:
        augmentation: ``augment`` made ready for the store; None where nothing is changed.
        plan: the order, as a value.
        store: the open store the tokens are read from; of several the shelf they stand on (``batches.shelf``).
        spec: how batches are made, and this rank.

    Raises:
        SettingsError: settings that are unknown or contradict each other.
        PlanError: a world size or micro-batch that does not divide the batch, a mesh that does not
            fit (names what would), a batch of 2**31 tokens or more, or a store without documents.
        InputError: a store of preferences, whose rejected answers are not to be imitated.
        MissingDependencyError: torch is asked for and not installed.
    """

    def __init__(
        self,
        data: Store | Plan | Mixture,
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
        pool_size: int = 0,
        block: int = 0,
        lanes: int = 1,
        align: int = 1,
        rank: int | None = None,
        world_size: int | None = None,
        mesh: Mesh = DATA_PARALLEL,
        uneven: Uneven = "refuse",
        micro_batch_size: int | None = None,
        balance: bool = False,
        labels: Labels = "aligned",
        output: Output = "torch",
        form: Form = "rows",
        prefetch: int = 4,
        augment: Augment | Mapping[str, Any] | None = None,
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
            "lanes": lanes,
            "align": align,
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
            mesh=mesh,
            uneven=uneven,
            micro_batch_size=micro_batch_size,
            balance=balance,
        )
        if output == "torch":
            require_torch()
        self._shares: dict[PlanSpec, Share] = {}
        self.store: Store | Shelf = _store_of(self.plan)
        opened = next(iter(self.plan.stores.values()))
        if isinstance(opened, Store):
            self.augmentation = make_augmentation(augment, opened, labels)
        self._share_of(0)
        self._start = self._made = 0
        self._resumed = self._told = False
        # Nobody has said that conversations may be cut, and they are.
        self._cuts_all = overlong is None and not isinstance(data, Plan)
        self._iterations: list[_Iteration] = []
        self._latest: _Iteration | None = None
        _LOADERS.add(self)
        load_tables(self.plan)

    @cached_property
    def origin(self) -> str:
        """Where the data comes from, as log lines and batches say it."""
        return origin_of(*(self.plan.stores.values()))

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
            yield from Ahead(self._next, first, self.spec.prefetch)
            return
        step = first
        while (made := self._next(step)) is not None:
            yield made
            step += 1

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
        share, spec = self._share_of(step), self.plan.spec_at(step)
        rows, positions = rank_rows(self.plan, step, share, balance=self.spec.balance)
        augment = (self.augmentation, positions) if self.augmentation else None
        arrays, cuts = make_arrays(
            self.store, self._numbered(rows), spec, self.spec, share.place.context_rank, augment
        )
        arrays = to_torch(arrays) if self.spec.output == "torch" else arrays
        return Batch(arrays, step, self.origin, cuts)

    def trained_tokens(self, step: int) -> int:
        """Tokens that carry a loss in a step, over all ranks: what its summed loss is divided by (at least by 1).

        Every rank finds out by itself: of the plan, and in a store that masks tokens of the masks of
        the whole step.
        """
        if self.store.replicated:
            share = self._share_of(step)
            rows, _ = rank_rows(self.plan, step, share, balance=self.spec.balance)
            return share.place.world_size * trained_tokens(self.store, self._numbered(rows))
        rows = self.plan.rows(*self.plan.positions_of(step))
        return trained_tokens(self.store, self._numbered(rows))

    def imbalance(self, step: int) -> Imbalance:
        """How unevenly the attention cost of a step lies on ranks, in stretches and as it is dealt."""
        return measured(self.plan, step, self._share_of(step), balance=self.spec.balance)

    def _share_of(self, step: int) -> Share:
        """This process's share of a step, which edits may change."""
        spec = self.plan.spec_at(step)
        share = self._shares.get(spec)
        if share is None:
            share = share_of(spec, self.spec)
            if self.store.replicated:
                share = Share(replace(share.place, rank=0), share.rows)
            self._shares[spec] = share
        return share

    def _numbered(self, rows: Rows) -> Rows:
        """The rows as the store numbers its documents."""
        return self.store.numbered(rows) if isinstance(self.store, Shelf) else rows

    def edit(self, edit: Edit) -> None:
        """Change the rest of the run from a step on; the journal in the state keeps it.

        Raises:
            PlanError: a step that was made already, or lies before an earlier edit; or what cannot change.
            SettingsError: weights or documents that are none.
        """
        if edit.step < self._made:
            raise PlanError(
                f"Step {edit.step} was made already (up to {self.spec.prefetch} steps are made ahead); the first that "
                f"can change is {self._made}."
            )
        plan = self.plan.edited(edit)
        self._use(plan)

    def _use(self, plan: Plan) -> None:
        """Go on by another plan of the same stores."""
        for stretch in plan.course.stretches:
            share_of(plan.spec_at(stretch.step), self.spec)
        self.store = _store_of(plan)
        self.plan = plan

    def _next(self, step: int) -> Batch | None:
        if not self.plan.has_step(step):
            return None
        self._made = max(self._made, step + 1)
        return self.batch(step)

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
        state = self.plan.state(self.plan.positions_of(step)[0])
        return with_augment(state, self.augmentation)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken, on any rank of any world size.

        Raises:
            StateError: the state is of another store, tokenizer, plan or augmentation; names each field that differs.
        """
        for name, store in self.plan.stores.items():
            if isinstance(store, Store):
                refuse_other_generation(store, state, name)
        state = without_augment(state, self.augmentation)
        plan = with_journal(self.plan, state)
        position = plan.resume(state)
        if plan is not self.plan:
            self._use(plan)
        step, inside = plan.course.step_at(position)
        if inside:
            raise StateError(
                f"The state's position {position} lies inside step {step}; the state was changed by hand."
            )
        self._start, self._resumed, self._latest, self._made = step, True, None, step

    def _wait(self) -> None:
        """Have the counts of all pools: at once for small plans, else from the table."""
        wait_for_tables(self.plan)

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
        batch = 3 * 8 * self._share_of(0).rows * self.plan.spec.seq_len
        np.empty(min((self.spec.prefetch + 2) * batch, _MOST_KEPT), np.uint8)

    def _count_beside(self) -> None:
        """Start counting once a run has begun, in one process of the node."""
        local = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0"
        if local == "0" and any(
            order.pools.count > IN_PLACE and not order.counted for order in self.plan.orders()
        ):
            count_beside(self.plan)


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


def _store_of(plan: Plan) -> Store | Shelf:
    """What batches read: the store of a plan of one, else all of them on a shelf.

    Raises:
        InputError: stores that are only lengths, or of preferences.
    """
    shelf = shelf_of(plan.stores, bans=bool(plan.course.bans))
    for store in shelf.stores.values():
        refuse_preferences(store)
    alone = not isinstance(plan.data, Mixture) and not plan.course.bans
    return next(iter(shelf.stores.values())) if alone else shelf


def refuse_other_generation(store: Store, state: dict[str, Any], name: str = SOURCE) -> None:
    """Refuse a state that was made on another generation of the store; any other is the plan's to judge.

    Raises:
        StateError: says which generation to open.
        GenerationError: it was compacted away.
    """
    try:
        theirs = state["identity"]["sources"][name]["store"]
    except (KeyError, TypeError):
        return
    if theirs == store.fingerprint or store.manifest is None or not store.on_disk:
        return
    newest = read_manifest(store.path)
    number = generation_with(newest, store.split, theirs)
    if number is None:
        return
    # Where it was compacted away, this says so.
    read_manifest(store.path, number)
    raise StateError(
        f"The state was made on generation {number} of {store.path}, and generation {store.generation} is open: "
        f"open_store({str(store.path)!r}, {store.split!r}, generation={number}) goes on with it exactly."
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
        f"{store.path} holds preferences ({store.preferences}): a loader would train the answers that are not wanted, "
        f"too. Preference trainers read them with batchloom.store.preferences. {remedy}."
    )


def _plan(
    data: Store | Plan | Mixture,
    seq_len: int | None,
    global_batch_size: int | None,
    settings: dict[str, Any],
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
    if not isinstance(data, (Store, Mixture)):
        raise InputError(
            f"Loader takes an open store, a Mixture or a Plan, not {type(data).__name__}; open a path with "
            "open_store(path)."
        )
    missing = [
        f"{name}: missing; a whole number of at least 1"
        for name, value in (("seq_len", seq_len), ("global_batch_size", global_batch_size))
        if value is None
    ]
    if seq_len is None or global_batch_size is None:
        raise SettingsError(missing)
    if settings["overlong"] is None:
        alone = isinstance(data, Store) and data.conversations
        settings = {**settings, "overlong": "drop" if alone else "split"}
        data = _dropping_conversations(data) if isinstance(data, Mixture) else data
    return Plan(data, PlanSpec(seq_len=seq_len, global_batch_size=global_batch_size, **settings))


def _dropping_conversations(mixture: Mixture) -> Mixture:
    """The same mixture, whose sources of conversations alone leave out what is too long, unless it says otherwise."""
    sources = dict(mixture.sources)
    for name, store in mixture.stores.items():
        own = sources.get(name, SourceSpec())
        if isinstance(store, Store) and store.conversations and own.overlong is None:
            sources[name] = replace(own, overlong="drop")
    return replace(mixture, sources=sources)


_DEFAULTS = {
    name: value
    for name, value in to_plain(PlanSpec(seq_len=1, global_batch_size=1)).items()
    if name not in ("seq_len", "global_batch_size")
}
