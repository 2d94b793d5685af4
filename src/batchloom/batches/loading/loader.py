"""The loader: batches of one rank from a store, mixture, plan or stream."""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any, Unpack, final

from batchloom.batches.assembly.augment import Augment
from batchloom.batches.assembly.batch_assembly import Batch
from batchloom.batches.assembly.batch_spec import BatchSpec, refuse_other_names
from batchloom.batches.loading.combined_store import CombinedStore
from batchloom.batches.loading.feed import Feed
from batchloom.batches.loading.loader_keywords import LoaderOptions
from batchloom.batches.loading.loader_plans import LoaderData, make_loader_plan
from batchloom.batches.loading.plan_feed import PlanFeed, copy_settings
from batchloom.batches.loading.rank_share import RankShare, find_world, measure_imbalance
from batchloom.batches.loading.second_share import refuse_data_loader
from batchloom.batches.loading.stream_feed import StreamFeed
from batchloom.batches.loading.stream_steps import RawStream, make_random_access_error
from batchloom.batches.model_import import check_later_model_calls
from batchloom.batches.shifted_labels import note_shifted_labels
from batchloom.core.errors import InputError, PlanError, SettingsError, StateError
from batchloom.core.settings import as_int, quote_value, raise_problems
from batchloom.plan import Edit, Plan, PlanSpec
from batchloom.plan.order import Imbalance
from batchloom.store import Store

_PLAN_SETTINGS = {field.name for field in fields(PlanSpec)}
_BATCH_SETTINGS = {field.name for field in fields(BatchSpec)}


@final
class Loader:
    """Iterator over the batches of one rank; ``len`` is the exact number of steps.

    Every iteration starts at step 0, except the first one after a state is loaded. ``loader[step]``
    returns any single step. The tokens of a step depend only on the plan's fingerprint, the step,
    the rank and the world size (with a ``replicated`` store, every rank has the tokens of rank 0).

    Args:
        data: an open store, a ``Mixture`` of several, or a ready ``Plan`` or stream (then the settings of the order
            stay unset). A stream has no ``loader[step]``: its steps are sequential.
        plan: all settings of the order, instead of its keywords below.
        batch: all settings of batches, instead of their keywords below.
        augment: masking or replacement of tokens: an ``Augment`` of ``batchloom.batches``, its settings, or None.
        seq_len: tokens of a sequence.
        global_batch_size: sequences of a step over all ranks; this rank's batches have
            global_batch_size / world_size rows.
        packing, seed, shuffle, epochs, steps, last: see ``PlanSpec``.
        pool_size, block, lanes, align, group_by_length: rarely needed settings of the order; see ``PlanSpec``.
        overlong: see ``PlanSpec``. None is ``drop`` for stores with media or with conversations only (a partial
            conversation is useless), and ``split`` for others; in a mixture it applies to each store.
        rank: data-parallel rank. If neither it nor ``world_size`` is given, both come from an
            initialised torch.distributed, or torchrun, SLURM or MPI variables, else 0 of 1.
        world_size: number of data-parallel ranks. With a ``mesh``, both count all processes.
        labels: ``aligned`` (Hugging Face models shift them) or ``shifted`` (next-token targets).
        output: ``torch`` or ``numpy``.
        form: ``rows`` or ``varlen``; for shapes see ``batches.assembly`` and docs/how-to/train/loader.md.
        prefetch: number of batches that one producer thread makes ahead; 0 for none.
        device: ``cpu``, ``cuda`` (torch's current one now), ``cuda:N`` or a ``torch.device``: device of the
            tensors, which are copied ahead on a stream of their own. None for tensors in the memory they were
            made in.
        mesh, uneven, micro_batch_size, balance, dtype: distribution of a step's rows and type of ids; see
            ``BatchSpec``.
        media: settings for images and audio in the stores: a ``MediaOptions`` of ``batchloom.batches``.

    Attributes:
        feed: what is read: a ``PlanFeed``, or the ``StreamFeed`` of a stream.
        spec: the batch settings and this rank.
        origin: origin of the data, as in log lines and batches.
        streamed: whether a stream is read.
        holds_media: whether the data holds images or audio.

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
        data: LoaderData | PlanFeed,
        plan: PlanSpec | None = None,
        batch: BatchSpec | None = None,
        *,
        augment: Augment | Mapping[str, Any] | None = None,
        **settings: Unpack[LoaderOptions],
    ) -> None:
        check_later_model_calls()
        self.feed: Feed = data if isinstance(data, PlanFeed) else _make_feed(data, plan, batch, augment, settings)
        self.spec = self.feed.spec
        if self.spec.labels == "shifted":
            note_shifted_labels()
        self.origin = self.feed.origin
        self.streamed = not isinstance(self.feed, PlanFeed)
        self.holds_media = self.feed.media is not None

    @property
    def store(self) -> Store | CombinedStore:
        """Open store of the tokens, or a ``CombinedStore`` of several; a stream has none."""
        return require_plan_feed(self.feed, self.next_step).store

    @property
    def plan(self) -> Plan:
        """Data order; of a stream only ``spec``, ``steps`` and ``fingerprint``."""
        return self.feed.plan

    def __iter__(self) -> Iterator[Batch]:
        return self.feed.iterations.follow(self.next_step, self.feed.iter_batches)

    def __repr__(self) -> str:
        placement = self.feed.share_at(self.next_step).placement
        return f"Loader({self.origin}: {self.plan!r}, rank {placement.rank} of {placement.world_size})"

    def __len__(self) -> int:
        refuse_data_loader()
        return len(self.feed)

    def __bool__(self) -> bool:
        return True

    def __getitem__(self, index: int) -> Batch:
        refuse_data_loader()
        feed = require_plan_feed(self.feed, index)
        number = as_int(index)
        if number is None:
            raise TypeError(
                f"A step index must be a whole number, not {quote_value(index)}. Take several steps one by one: "
                "[loader[step] for step in range(begin, end)]"
            )
        step = feed.find_step(number)
        if feed.plan.orders.is_counted:
            feed.announce()
        return feed.batch(step)

    def batch(self, step: int) -> Batch:
        """Return this rank's batch of a step, even beyond the end of the run.

        Raises:
            SettingsError: an invalid step number.
        """
        return require_plan_feed(self.feed, step).batch(step)

    def show(self, step: int, *, rows: int = 16) -> None:
        """Print this rank's rows of a step in the terminal: spans, padding and loss.

        Args:
            step: the step.
            rows: largest number of printed rows.

        Raises:
            IndexError: the run has no such step.
            SettingsError: an invalid step number.
        """
        # The terminal's library is needed for this alone.
        from batchloom.batches.loading.terminal_rows import print_rows

        feed = require_plan_feed(self.feed, step)
        print_rows(feed.plan, step, feed.select_rows(feed.check_step(step))[0], rows)

    def trained_tokens(self, step: int) -> int:
        """Return the tokens with a loss in a step over all ranks.

        Divide the summed loss by it, at least by 1. Every rank computes the number from the plan and the masks.
        A stream does not know the other ranks' rows and raises.

        Raises:
            IndexError: the run has no such step.
            SettingsError: an invalid step number.
        """
        return require_plan_feed(self.feed, step).trained_tokens(step)

    def tokens(self, step: int) -> int:
        """Return the tokens of this rank's rows of a step; with a stream, of a past step."""
        return self.feed.tokens(step)

    def imbalance(self, step: int) -> Imbalance:
        """Return the imbalance of a step's costs over ranks, in order and as distributed."""
        feed = require_plan_feed(self.feed, step)
        return measure_imbalance(
            feed.plan, feed.check_step(step), feed.share_at(step), feed.costs, balance=feed.spec.balance
        )

    @property
    def first_editable_step(self) -> int:
        """First step that an edit may change.

        It is the same on every rank that was given as many batches, since it does not depend on how fast a
        thread makes steps ahead. It is the step after the last one given, plus ``prefetch`` + 1 during an iteration
        (the most that can be made by then). With ``group_by_length`` it is the first step of a window.
        """
        return require_plan_feed(self.feed, self.next_step).first_editable_step

    def edit(self, edit: Edit) -> None:
        """Change the rest of the run from a step on, and record the edit in the state.

        The step is at least ``first_editable_step``. Each rank is given the same edit after the same number of
        batches: then all ranks accept it, or all refuse it.

        Raises:
            PlanError: a step that may have been made, or precedes an earlier edit; or a setting that cannot change.
            SettingsError: invalid weights or documents.
        """
        if not isinstance(self.feed, PlanFeed):
            raise PlanError("A stream cannot be edited: its order is that of its input. Prepare the data for that.")
        self.feed.edit(edit)

    def __reduce__(self) -> tuple[Any, ...]:
        if not isinstance(self.feed, PlanFeed):
            raise TypeError(
                "The loader of a stream cannot be pickled or copied; open the stream again where it is needed."
            )
        return reopen_loader, (*copy_settings(self.feed), self.state_dict())

    @property
    def next_step(self) -> int:
        """First step of the next iteration."""
        return self.feed.iterations.next_step

    def state_dict(self) -> dict[str, Any]:
        """Return the position and its plan as plain JSON values.

        The position is after the last batch given. With a stream, the state holds the lanes of this rank only;
        ``batchloom.streaming.merge_states`` merges those of all ranks. Reading a first batch
        (``next(iter(loader))``) during another iteration does not move the position.

        Raises:
            StateError: workers of a ``DataLoader``, or a ``LoaderDataset``, gave the last batches, or a loop of
                Accelerate or Lightning fetched them ahead.
        """
        if self.feed.iterations.untracked:
            raise StateError(
                "The last batches came through workers of a DataLoader, a LoaderDataset or a loop that fetches ahead "
                "(Accelerate, Lightning), so the loader does not know which of them the training loop received. Take "
                "loader.state_at(batch.step + 1) of the last batch, or iterate the Loader itself."
            )
        return self.feed.state()

    def state_at(self, step: int) -> dict[str, Any]:
        """Return the state before a step, for trainers that count steps and fetch ahead.

        Raises as :meth:`batch` does.
        """
        return require_plan_feed(self.feed, step).state_at(step)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a ``state_dict``, on any rank of any world size.

        Raises:
            StateError: the state belongs to another store, tokenizer, plan or augmentation; names each field
                that differs.
        """
        if not isinstance(state, dict):
            raise StateError(f"{quote_value(state)} is not a loader's state: give the dict that state_dict() returned.")
        self.feed.load(state)


def _make_feed(
    data: LoaderData,
    plan: PlanSpec | None,
    batch: BatchSpec | None,
    augment: Augment | Mapping[str, Any] | None,
    settings: Mapping[str, Any],
) -> Feed:
    """Return the feed of data with the settings of a ``Loader``."""
    known = _PLAN_SETTINGS | _BATCH_SETTINGS
    refuse_other_names(settings.keys() - known, known)
    refuse_other_types(plan, batch)
    given = {name: value for name, value in settings.items() if value is not None}
    plan_settings = {name: value for name, value in given.items() if name in _PLAN_SETTINGS}
    batch_settings = {name: value for name, value in given.items() if name in _BATCH_SETTINGS}
    loader_plan = make_loader_plan(data, plan, plan_settings)
    spec = _make_batch_spec(batch, batch_settings)
    if isinstance(data, RawStream):
        return StreamFeed(data, spec, augment)
    # Cuts are announced if the user has not chosen what happens to long documents.
    announces_cuts = "overlong" not in plan_settings and not isinstance(data, Plan)
    return PlanFeed(loader_plan, spec, augment, announces_cuts=announces_cuts)


def _make_batch_spec(batch: BatchSpec | None, settings: Mapping[str, Any]) -> BatchSpec:
    if batch is not None:
        if settings:
            raise SettingsError([f"{name}: is a field of the BatchSpec, which was given as batch" for name in settings])
        return batch
    rank, world_size = find_world(settings.get("rank"), settings.get("world_size"))
    device = {"device": str(settings["device"])} if "device" in settings else {}
    return BatchSpec(**{**settings, **device, "rank": rank, "world_size": world_size})


def refuse_other_types(plan: object, batch: object) -> None:
    """Raise if settings that are given as a whole have another type."""
    problems = []
    if plan is not None and not isinstance(plan, PlanSpec):
        problems.append(f"plan: {quote_value(plan)} is not a PlanSpec; give its fields one by one, as last='drop'")
    if batch is not None and not isinstance(batch, BatchSpec):
        problems.append(f"batch: {quote_value(batch)} is not a BatchSpec; give its fields one by one, as uneven='pad'")
    raise_problems(problems)


def require_plan_feed(feed: Feed, step: object) -> PlanFeed:
    """Return the feed of a plan, which any step can be read from.

    Raises:
        PlanError: it reads a stream.
    """
    if not isinstance(feed, PlanFeed):
        raise make_random_access_error(quote_value(step))
    return feed


def make_run_share(loader: Loader, first: int = 0) -> RankShare:
    """Return a process's share for frameworks with a fixed number of passes per step."""
    feed = loader.feed
    share = feed.share_at(first)
    for segment in feed.plan.segments if isinstance(feed, PlanFeed) else ():
        if segment.step > first and (later := feed.share_at(segment.step)).passes != share.passes:
            raise PlanError(
                f"A step takes {share.passes} passes of {share.micro_batch_size} of this process's {share.rows} "
                f"rows, but after an edit {later.passes} of {later.micro_batch_size} from step {segment.step} on, "
                "so the optimizer would step at the wrong passes. Leave global_batch_size out of the edits, or "
                "micro_batch_size out of the Loader: then each step is one pass."
            )
    return share


def reopen_loader(plan: Plan, spec: BatchSpec, augment: Augment | None, state: dict[str, Any]) -> Loader:
    """Open a loader with the settings of another one, which resumes from a state."""
    loader = Loader(PlanFeed(copy.copy(plan), spec, augment))
    loader.load_state_dict(state)
    return loader


def check_text_only(loader: Loader, consumer: str) -> None:
    """Reject a loader with media for a consumer of token arrays only."""
    if loader.holds_media:
        raise InputError(
            f"{loader.origin} holds images or audio, which {consumer} does not pass on yet: the model would be "
            "trained on their placeholders only. Give the model the Loader's batches as they are "
            "(docs/how-to/prepare/media.md)."
        )
