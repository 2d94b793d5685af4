"""``stream``: raw inputs for a ``Loader`` without a store, and its states."""

import fcntl
import logging
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any, Literal, Unpack, final

from batchloom.core.errors import InputMissingError, PlanError, SettingsError, StateError
from batchloom.core.fingerprint import fingerprint
from batchloom.core.process_state import pause_gc
from batchloom.core.settings import as_int, is_text, quote_value
from batchloom.core.wording import format_count
from batchloom.plan import ORDER_VERSION, PlanSpec
from batchloom.plan.order import check_state, list_differences
from batchloom.plan.packing import CUTTING_STRATEGIES, OverlongMode
from batchloom.preparation import (
    UNIT_BYTES,
    ExecutionSettings,
    Note,
    Progress,
    Recipe,
    RunSettings,
    StreamedOptions,
    compute_recipe_fingerprint,
    make_request,
    parse_synthetic_input,
    recipe_to_plain,
)
from batchloom.preparation.documents import (
    RecordParsers,
    choose_dtype_name,
    choose_job_tokenizer,
    make_media_encoder,
)
from batchloom.preparation.identity import (
    build_step_indexes,
    get_processor_state,
    list_recipe_differences,
    open_job_processor,
)
from batchloom.preparation.listing import list_inputs
from batchloom.preparation.phases import WorkerSetup
from batchloom.preparation.report import PrepareResult, log_note
from batchloom.preparation.request import InputArgument, RecipeReference
from batchloom.preparation.settings import check_option_names, describe_unused_weights
from batchloom.preparation.units import plan_units
from batchloom.preparation.workers import collect_versions
from batchloom.sources.files import Source, Spool
from batchloom.store import write_file
from batchloom.streaming.keep import StreamStoreWriter, check_keep, find_abandoned_folder, resolve_keep_folder
from batchloom.streaming.lane import LanePosition, StreamSetup, make_range_groups
from batchloom.streaming.lane_order import (
    LANES_VERSION,
    check_lane_world,
    check_lanes,
    choose_default_lanes,
    choose_lane_pool_size,
    list_rank_lanes,
)
from batchloom.streaming.rank_feed import (
    FeedSettings,
    InlinePools,
    LaneCursors,
    RankFeed,
    WorkerPools,
    choose_worker_count,
)
from batchloom.tokens import encode_state

_LOG = logging.getLogger("batchloom")
_MAX_WORKERS = 1024
_TOKENIZER_STATE_FILE = "tokenizer_state.json"
_NOT_STREAM_SETTINGS = ("epochs", "steps", "last", "block", "group_by_length")

# Number of files that are searched for conversations, which by default are cut next to texts.
_MAX_SAMPLED_FILES = 64
# Kinds of files that always hold plain text.
_TEXT_KINDS = ("text", "code")

# Fields of a state that identify its stream.
_STATE_FACTS = ("fingerprint", "identity", "recipe", "keep")
_FOLDER_PREFIX = "batchloom-stream-"
_OWNER_FILE = "owner"


def stream(
    inputs: InputArgument | Sequence[InputArgument] | None = None,
    *,
    seq_len: int,
    global_batch_size: int,
    steps: int,
    recipe: RecipeReference | None = None,
    lanes: int | None = None,
    pool_size: int | None = None,
    packing: str = "best_fit",
    overlong: OverlongMode | None = None,
    seed: int = 0,
    shuffle: bool = True,
    workers: int | Literal["auto"] = "auto",
    keep: str | os.PathLike[str] | None = None,
    **options: Unpack[StreamedOptions],
) -> "Stream":
    """Train on raw inputs, tokenized on demand as ``prepare`` would tokenize them.

    ``Loader(stream)`` gives the batches of one rank. The sequence at a position depends only on
    inputs, recipe, seed, ``lanes`` and the settings of the order: not on ranks or workers. Duplicates
    are not removed. Documents of the ``val`` and ``test`` fractions are left out, as ``prepare`` separates them.

    Args:
        inputs: inputs as for ``prepare``.
        recipe: a :class:`Recipe`, a recipe file or a store, whose settings the options override.
        seq_len: tokens of a sequence.
        packing: packing strategy; see :class:`PlanSpec`.
        seed: seed of the data order.
        shuffle: False reads documents in the order of each lane.
        global_batch_size: sequences of a step over all ranks.
        steps: steps of the run; a stream has no length of its own.
        lanes: number of parallel read streams: divides ``global_batch_size`` and is
            a multiple of every world size. None: the greatest common divisor of the batch and 64.
        pool_size: documents of a lane that are packed together; None: 8,192, or 1,024 with media.
        overlong: policy for documents longer than ``seq_len``; None: ``drop`` if every input holds
            conversations, or documents may hold media, else ``split``.
        workers: tokenizer processes of each rank; 0: only its own process; ``auto``: its number of cores.
        keep: folder where the store of these inputs grows during training; ``Stream.finish`` completes it.
        **options: settings of the documents, as ``prepare`` takes them.

    Raises:
        SettingsError, InputMissingError, InputError, TokenizerError: invalid settings or inputs.
        PlanError: lanes that do not fit.
        StoreConflictError, OutputError: ``keep`` holds another job's store or work, or cannot be written.
    """
    check_option_names("stream", options, StreamedOptions)
    request = make_request(inputs, {**options, "dedup": "none"}, recipe)
    reading = request.recipe.reading
    sources = request.recipe.sources
    if reading.val_from is not None or any(source.subset not in (None, "train") for source in sources):
        raise SettingsError(["val_from, subset: a stream has no subsets; leave them out, or prepare a store"])
    if pool_size is None:
        pool_size = choose_lane_pool_size(media=request.recipe.reading.media is not None)
    spec = PlanSpec(
        seq_len=seq_len,
        global_batch_size=global_batch_size,
        steps=steps,
        packing=packing,
        overlong="split" if overlong is None else overlong,
        seed=seed,
        shuffle=shuffle,
        pool_size=pool_size,
    )
    settings = StreamSettings(
        spec=spec,
        choose_overlong=overlong is None,
        lanes=lanes,
        workers=workers,
        keep=resolve_keep_folder(keep),
    )
    for note in request.notes:
        _LOG.info("%s", note)
    return Stream(request.recipe, settings, tokenizer_state=request.tokenizer_state)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSettings:
    """Settings of a stream besides its recipe."""

    spec: PlanSpec  # settings of the data order
    choose_overlong: bool = False  # replace the overlong policy of ``spec`` by the one that fits the inputs
    lanes: int | None = None  # number of lanes; None to choose it
    workers: int | Literal["auto"] = "auto"  # worker processes of each rank; 0 for only its own process
    keep: Path | None = None  # folder of a store that grows during training
    # Sizes that determine the units; only tests change them.
    run: RunSettings = field(default_factory=partial(RunSettings, unit_bytes=UNIT_BYTES))

    def __post_init__(self) -> None:
        if self.spec.steps is None:
            raise SettingsError(["steps: missing; a stream has no fixed length"])
        if self.lanes is not None and (as_int(self.lanes) is None or self.lanes < 1):
            raise SettingsError([f"lanes: {quote_value(self.lanes)} is not a whole number of at least 1"])
        count = as_int(self.workers)
        if self.workers != "auto" and (count is None or not 0 <= count <= _MAX_WORKERS):
            raise SettingsError(
                [f"workers: {quote_value(self.workers)} is neither 'auto' nor a number from 0 to {_MAX_WORKERS:,}"]
            )


@final
class Stream:
    """Raw inputs in a fixed order; use :func:`batchloom.stream`.

    Attributes:
        recipe: how inputs become documents.
        spec: settings of the data order.
        lanes: number of lanes.
        fingerprint: 32 hex digits that identify the order.
        identity: fields of the fingerprint.
        tokenizer: tokenizer of the stream.
        processor: state of the media processor; None if no media are read.
        keeping: the store that grows during training; None without one.
    """

    def __init__(
        self,
        recipe: Recipe,
        settings: StreamSettings,
        *,
        tokenizer_state: Mapping[str, Any] | None = None,
    ) -> None:
        if parse_synthetic_input(recipe.inputs):
            raise SettingsError(
                [f"inputs: {recipe.inputs[0]} is synthetic and needs no stream; use open_store({recipe.inputs[0]!r})"]
            )
        if settings.keep is not None:
            check_keep(recipe.inputs, settings.keep)
        # A stream begins before all documents are known, so none of them can move between subsets.
        recipe = replace(recipe, balance_subsets=False)
        self._folder, lock_file = make_spill_folder()
        weakref.finalize(self, _remove_stream_folder, self._folder, lock_file, os.getpid())
        self.recipe = recipe
        self._settings = settings
        self._spool = Spool(self._folder / "spool")
        with pause_gc():
            self._listing = list_inputs(recipe, self._spool, exclude=settings.keep)
        if not self._listing.sources:
            raise InputMissingError("The inputs hold no file to read; name other inputs.")
        for note in self._listing.notes:
            _LOG.info("%s", note)
        if weights := describe_unused_weights(recipe.sources):
            _LOG.warning("%s", weights)
        record_parsers = RecordParsers(recipe, settings.run.limits)
        self._units = plan_units(self._listing.sources, record_parsers.rules, settings.run.unit_bytes)
        self._range_groups = make_range_groups(self._units, record_parsers.rules, settings.run.unit_bytes)
        sources = self._listing.sources
        # Only the first file of each input is checked; a stream checks others when it reads them.
        first = {source.input: source for source in reversed(sources)}
        unused = dict.fromkeys(
            name for source in first.values() for name in record_parsers.get_parser(source).unused_columns
        )
        if unused:
            _LOG.info("Unused columns: %s", ", ".join(unused))
        media = may_hold_media(sources, record_parsers)
        if media:
            check_no_cuts(settings.spec.packing, None if settings.choose_overlong else settings.spec.overlong)
        self.spec = settings.spec
        if settings.choose_overlong:
            self.spec = replace(self.spec, overlong=choose_overlong(sources, record_parsers))
        self._left_out = describe_left_out(self.spec, media=media)
        cuts_all = settings.choose_overlong and self.spec.overlong == "split"
        self._cuts_conversations = cuts_all and has_conversations(sources, record_parsers)
        self.lanes = self._choose_lanes(settings.lanes)
        self.tokenizer = choose_job_tokenizer(recipe, self._listing.sources, record_parsers, _LOG.info, tokenizer_state)
        self.processor = self._load_processor_state()
        self._dtype = choose_dtype_name(recipe, self.tokenizer)
        write_file(self._folder / _TOKENIZER_STATE_FILE, encode_state(self.tokenizer))
        self.identity = self._make_identity()
        self._recipe_plain = recipe_to_plain(recipe)
        self.fingerprint = fingerprint(self.identity)
        self._kept_in: str | None = None
        self._announced = False
        self.keeping = (
            StreamStoreWriter(settings.keep, recipe, self._listing, settings.run, self._units, self.tokenizer)
            if settings.keep is not None
            else None
        )

    def _load_processor_state(self) -> dict[str, Any] | None:
        """Return the processor state of the recipe, and check it against the tokenizer."""
        media = self.recipe.reading.media
        if media is None:
            return None
        for note in open_job_processor(media, self.recipe.tokenizer).notes:
            _LOG.info("%s.", note)
        make_media_encoder(self.tokenizer, self.recipe, None)
        return get_processor_state(media, self.recipe.tokenizer)

    def _choose_lanes(self, lanes: int | None) -> int:
        count = len(self._range_groups)
        if lanes is None:
            return choose_default_lanes(self.spec.global_batch_size, count)
        check_lanes(lanes, self.spec.global_batch_size)
        if lanes > count:
            raise PlanError(
                f"The input can be cut into {count} record ranges, too few for {lanes} lanes: compressed and decoded "
                "files, CSV and JSON lists are read as a whole. Give "
                f"lanes={choose_default_lanes(lanes, count)}, more or other files, or prepare the input "
                "(batchloom prepare)."
            )
        return lanes

    def _make_identity(self) -> dict[str, Any]:
        spec = {k: v for k, v in self.spec.identity_fields().items() if k not in _NOT_STREAM_SETTINGS}
        sources = self._listing.sources
        return {
            "order_version": ORDER_VERSION,
            "lanes_version": LANES_VERSION,
            "spec": {**spec, "order": "lanes", "lanes": self.lanes},
            "recipe": compute_recipe_fingerprint(self.recipe),
            "constants": self._settings.run.constants,
            "tokenizer": self.tokenizer.fingerprint,
            "inputs": {
                "files": len(sources),
                "bytes": self._listing.bytes,
                "fingerprint": fingerprint(
                    [[source.name, source.kind, source.size, source.mtime_ns] for source in sources]
                ),
            },
        }

    def __repr__(self) -> str:
        files = format_count(len(self._listing.sources), "file")
        lanes = format_count(self.lanes, "lane")
        return f"stream of {files}, {self._listing.bytes:,} bytes, {lanes}, {self.spec.steps} steps"

    @property
    def vocab_size(self) -> int:
        """Exclusive upper bound of the ids."""
        return self.tokenizer.vocab_size

    @property
    def control(self) -> Mapping[str, int]:
        """Ids of the control tokens."""
        return self.tokenizer.control

    @property
    def steps(self) -> int:
        """Number of steps of the run."""
        return int(self.spec.steps or 0)

    @property
    def origin(self) -> str:
        """Origin of the data, as in batches and log lines."""
        name = self._listing.sources[0].name
        more = f" and {len(self._listing.sources) - 1:,} more" if len(self._listing.sources) > 1 else ""
        return f"source=real stream of {name}{more} {self.fingerprint[:12]}"

    def begin(self, rank: int, world_size: int) -> LaneCursors:
        """Return the start positions of a rank's lanes.

        Raises:
            PlanError: a world size that does not divide the lanes; names those that fit.
        """
        check_lane_world(self.lanes, rank, world_size)
        return {lane: (LanePosition(), 0) for lane in list_rank_lanes(self.lanes, rank, world_size)}

    def state(self, step: int, cursors: LaneCursors) -> dict[str, Any]:
        """Return a step as plain JSON values, with the lane positions of this rank."""
        position = step * self.spec.global_batch_size
        return _make_state(self._facts, position, cursors)

    @property
    def abandoned(self) -> Path | None:
        """Previous ``keep`` folder that is no longer used; None if it holds a store."""
        return find_abandoned_folder(self._kept_in, self.keeping)

    @property
    def _facts(self) -> dict[str, Any]:
        """Fields of a state that identify the stream, and its ``keep`` folder."""
        keep = self.abandoned if self.keeping is None else self.keeping.out.absolute()
        keep_path = None if keep is None else str(keep)
        return {
            "fingerprint": self.fingerprint,
            "identity": dict(self.identity),
            "recipe": dict(self._recipe_plain),
            "keep": keep_path if is_text(keep_path) else None,
        }

    def resume(self, state: Mapping[str, Any], rank: int, world_size: int) -> tuple[int, LaneCursors]:
        """Return the step of a state, and the rank's lane positions.

        Raises:
            StateError: the state is of another stream, was changed, or lacks a lane of this rank.
        """
        rank_lanes = list_rank_lanes(self.lanes, rank, world_size)
        _check_same_stream(state, self._facts)
        cursors = _read_cursors(state, rank_lanes)
        self._kept_in = state["keep"]
        if self.abandoned is not None and rank == 0:
            _LOG.warning(
                "The stream wrote its documents to the store %s, and from here on it does not. Give keep=%s "
                "(--keep) to continue that store, or finish it with batchloom prepare.",
                self.abandoned,
                self.abandoned,
            )
        return state["position"] // self.spec.global_batch_size, cursors

    def check_state_stream(self, state: Mapping[str, Any]) -> None:
        """Reject the state of another stream.

        Raises:
            StateError: names each field that differs.
        """
        _check_same_stream(state, self._facts)

    def merged(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Merge the states of all ranks; see :func:`merge_states`."""
        return merge_states(states)

    def count_cached_units(self) -> tuple[int, int]:
        """Return the number of completely cached units, and of all units."""
        return (self.keeping.count_cached_units() if self.keeping is not None else 0), len(self._units)

    def open(self, rank: int, world_size: int, cursors: LaneCursors) -> RankFeed:
        """Return the steps of a rank from its lane positions; close it at the end."""
        keep = self.keeping.keep(rank) if self.keeping is not None else None
        groups_by_number = dict(enumerate(self._range_groups))
        media = None if self.processor is None else Path(tempfile.mkdtemp(dir=self._folder))
        setup = StreamSetup(
            self._make_worker_setup(),
            groups_by_number,
            len(groups_by_number),
            self.spec,
            self.lanes,
            keep,
            media,
        )
        rank_lanes = list_rank_lanes(self.lanes, rank, world_size)
        local = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
        workers = choose_worker_count(self._settings.workers, len(rank_lanes), local)
        pools = WorkerPools(setup, workers, rank_lanes, self) if workers else InlinePools(setup)
        share = FeedSettings(
            spec=self.spec,
            lanes=self.lanes,
            rank=rank,
            world_size=world_size,
            end_id=self.tokenizer.end_id,
            max_bad=self.recipe.max_bad,
        )
        if rank == 0:
            self._announce(workers, len(rank_lanes))
        return RankFeed(share, pools, cursors, media)

    def finish(
        self,
        *,
        workers: int | Literal["auto"] = "auto",
        progress: Callable[[Note | Progress], None] | None = None,
    ) -> PrepareResult:
        """Complete the store of ``keep``, as ``prepare(..., dedup="none")`` writes it.

        The documents are the same in the same order; inputs of 32 MiB to 8 GiB have shards of other sizes. Units that
        the stream has read completely are not read again. Call it in one process, when no other reads the stream any
        more.

        Args:
            workers: see ``prepare``.
            progress: see ``prepare``.

        Raises:
            SettingsError: ``keep`` was not given.
            BatchloomError: any error of ``prepare``.
        """
        if self.keeping is None:
            raise SettingsError(["keep: missing; give stream(keep=FOLDER) to write a store"])
        return self.keeping.finish(progress or log_note, ExecutionSettings(workers=workers))

    def _make_worker_setup(self) -> WorkerSetup:
        clean = self.recipe.reading.clean
        return WorkerSetup(
            self.recipe,
            self._settings.run.limits,
            self._folder / _TOKENIZER_STATE_FILE,
            self.tokenizer.engine,
            self._dtype,
            chat=False,
            clean=build_step_indexes(clean, self._folder, _LOG.info),
            overlap=False,
            versions=collect_versions(clean),
        )

    def _announce(self, workers: int, lane_count: int) -> None:
        if self._announced:
            return
        self._announced = True
        recipe = self.recipe
        if self._left_out:
            _LOG.warning("%s", self._left_out)
        elif self._cuts_conversations:
            _LOG.warning(
                "Documents longer than seq_len %d are cut, conversations too: overlong='drop' drops them all, "
                "stream(max_tokens=%d) only conversations.",
                self.spec.seq_len,
                self.spec.seq_len,
            )
        elif self._settings.choose_overlong:
            _LOG.info("Documents longer than seq_len %d are cut; overlong='drop' drops them.", self.spec.seq_len)
        left_out_shares = [
            f"{share:.3%} of them for {name}".replace(".000%", "%")
            for name, share in (("val", recipe.val_fraction), ("test", recipe.test_fraction))
            if share
        ]
        _LOG.info(
            "%s: %s per rank; up to two pools of %s documents per lane are in memory, %s in total on this rank. "
            "Duplicates are not removed%s.",
            # Handlers may keep the record, and with the stream itself its temporary folder.
            repr(self),
            format_count(workers, "worker") if workers else "no worker",
            f"{self.spec.pool_size:,}",
            f"{2 * lane_count * self.spec.pool_size:,}",
            f"; documents are excluded by hash: {' and '.join(left_out_shares)}" if left_out_shares else "",
        )


def _remove_stream_folder(folder: Path, lock_file: IO[bytes], owner: int) -> None:
    """Delete a stream's folder and release its lock, only in the process that made it."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
        lock_file.close()


def may_hold_media(sources: Sequence[Source], record_parsers: RecordParsers) -> bool:
    """Return whether documents of some source may hold media, by its record kind."""
    return record_parsers.reads_media and any(
        record_parsers.get_parser(source).record_kind in ("conversation", "interleaved") for source in sources
    )


def check_no_cuts(packing: str, overlong: OverlongMode | None) -> None:
    """Reject settings that cut documents, for a stream with images or audio."""
    cuts = packing in CUTTING_STRATEGIES
    setting = f"packing={packing!r}" if cuts else f"overlong={overlong!r}"
    if cuts or overlong in ("split", "truncate"):
        raise PlanError(
            f"{setting} cuts documents, and documents with images or audio are never cut: give packing='best_fit' "
            "and overlong='drop' or 'error'."
        )


def choose_overlong(sources: Sequence[Source], record_parsers: RecordParsers) -> OverlongMode:
    """Return ``drop`` if all inputs hold conversations or some media, else ``split``.

    A loader over their store chooses the same, except for conversations without media next to texts, with a
    processor:
    only reading all inputs shows whether they hold media.

    Files that are texts by their kind are not read, nor any file after the first without conversations.
    """
    if may_hold_media(sources, record_parsers):
        return "drop"
    texts_first = sorted(sources, key=lambda source: source.kind not in _TEXT_KINDS)
    alone = all(record_parsers.get_parser(source).templated for source in texts_first)
    return "drop" if alone else "split"


def has_conversations(sources: Sequence[Source], record_parsers: RecordParsers) -> bool:
    """Return whether sampled files hold conversations.

    The sample begins with the first file of each input that may hold them.
    """
    unsure = [source for source in sources if source.kind not in _TEXT_KINDS]
    first = {source.input: source for source in reversed(unsure)}
    other_sources = (source for source in unsure if first[source.input] is not source)
    sampled_sources = islice((*first.values(), *other_sources), _MAX_SAMPLED_FILES)
    return any(record_parsers.get_parser(source).templated for source in sampled_sources)


def describe_left_out(spec: PlanSpec, *, media: bool) -> str:
    """Return the warning about documents left out; empty if all are read."""
    if spec.overlong not in ("drop", "truncate"):
        return ""
    remedy = "a larger seq_len" if media else "overlong='split'"
    dropped_content = "documents" if spec.overlong == "drop" else "the ends of documents"
    return (
        f"overlong={spec.overlong!r} leaves out {dropped_content} longer than seq_len {spec.seq_len}; {remedy} keeps "
        "them."
    )


def make_spill_folder() -> tuple[Path, IO[bytes]]:
    """Create a temporary folder and the open, locked file that marks it as in use.

    The lock lasts while the file is open in any process, ends with its holder, and is
    visible to every process that sees the file, also from another container.
    """
    _remove_orphaned_folders(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX))
    file = (folder / f"{_OWNER_FILE}.new").open("wb")
    fcntl.flock(file, fcntl.LOCK_EX)
    # The rename makes the file visible only after it is locked.
    (folder / f"{_OWNER_FILE}.new").rename(folder / _OWNER_FILE)
    return folder, file


def _remove_orphaned_folders(home: Path) -> None:
    """Delete this user's folders whose owners have ended."""
    for owner_file in home.glob(f"{_FOLDER_PREFIX}*/{_OWNER_FILE}"):
        # A folder that is locked or unreadable has an owner.
        with suppress(OSError), owner_file.open("rb") as file:
            if owner_file.lstat().st_uid == os.getuid():
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(owner_file.parent, ignore_errors=True)


def _make_state(facts: Mapping[str, Any], position: int, cursors: LaneCursors) -> dict[str, Any]:
    """Return a position of a stream as plain JSON values."""
    plain = {
        "order_version": ORDER_VERSION,
        **facts,
        "position": position,
        "lanes": {str(lane): [*lane_position, before] for lane, (lane_position, before) in sorted(cursors.items())},
    }
    return {**plain, "check": fingerprint(plain)}


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the states of all ranks into one that any number of ranks can resume from.

    Args:
        states: ``Loader.state_dict()`` of each rank of a stream, all at the same step.

    Raises:
        StateError: the list is empty, or the states are of different streams or steps.
    """
    if not states:
        raise StateError("There are no states to merge; gather state_dict() of every rank.")
    lanes: dict[str, list[int]] = {}
    for state in states:
        check_state(state)
        if "lanes" not in state:
            raise StateError("This is the state of a loader of a store, not of a stream: load it as it is.")
        lanes |= state["lanes"]
    first = states[0]
    for state in states[1:]:
        for name in ("fingerprint", "position"):
            if state[name] != first[name]:
                raise StateError(
                    f"The states of the ranks do not belong together: {name} is {first[name]!r} and {state[name]!r}. "
                    "Save all of them at the same step of the same stream."
                )
    cursors = {int(lane): (LanePosition(*cursor[:-1]), cursor[-1]) for lane, cursor in lanes.items()}
    return _make_state({name: first[name] for name in _STATE_FACTS}, first["position"], cursors)


def _check_same_stream(state: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Reject the state of a stream with another fingerprint than ``facts``."""
    check_state(state)
    if state["fingerprint"] == facts["fingerprint"]:
        return
    saved_fields = dict(state["identity"])
    current_fields = dict(facts["identity"])
    # The state of a loader of a store has no recipe.
    saved_recipe = state.get("recipe")
    differences = list_recipe_differences(dict(saved_recipe), dict(facts["recipe"])) if saved_recipe else []
    if differences:
        # The recipe differences explain these two fingerprints.
        hidden = ("recipe", "tokenizer")[: 1 + any(difference.startswith("tokenizer:") for difference in differences)]
        saved_fields, current_fields = (
            {k: v for k, v in identity_fields.items() if k not in hidden}
            for identity_fields in (saved_fields, current_fields)
        )
    differences += list_differences(saved_fields, current_fields)
    raise StateError(
        f"The state belongs to another stream: {'; '.join(differences) or 'its fingerprint differs'}. Give the inputs "
        "and settings the state was made with, or start without it."
    )


def _read_cursors(state: Mapping[str, Any], rank_lanes: range) -> LaneCursors:
    """Return the positions of a rank's lanes in a state."""
    lanes = state["lanes"]
    missing = [lane for lane in rank_lanes if str(lane) not in lanes]
    if missing:
        raise StateError(
            f"The state has lanes {', '.join(sorted(lanes, key=int)[:8])}, and this rank needs lane {missing[0]}: it "
            "is the state of a single rank. Merge the states of all ranks with batchloom.streaming.merge_states."
        )
    return {lane: (LanePosition(*lanes[str(lane)][:-1]), lanes[str(lane)][-1]) for lane in rank_lanes}
