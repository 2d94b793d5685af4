"""Data of a run: a store, a mixture, a stream, or inputs that are prepared first.

A resumed run reads the generation of each store that it was started on.
"""

import logging
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from shlex import quote
from types import FrameType, MappingProxyType
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

import batchloom
from batchloom import DatasetConfig, Loader, Mixture, Store, open_store, stream
from batchloom.adapters.rank_group import RankGroup
from batchloom.core.addresses import is_url
from batchloom.core.errors import InputError, InputMissingError, StateError, StoreMissingError, TrainError
from batchloom.core.files import describe_missing_path, refuse_url
from batchloom.core.synthetic_data import DISTRIBUTED_DUMMY, SyntheticSpec
from batchloom.train.model.pretrained import read_model_config
from batchloom.train.request import DataRequest, TrainRequest
from batchloom.train.run_folder import PrintLine, RunFolder
from batchloom.train.train_settings import PretrainedSettings, TrainSettings

_LOG = logging.getLogger("batchloom")
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - a folder of random name and mode 0700 is made in it
# Bytes of temporary and final token files per byte of text in the worst case (one id per byte).
_STORE_SIZE_FACTOR = 6
_COMPRESSION_FACTOR = 8
_COMPRESSED_SUFFIXES = (".gz", ".zst")
_MANIFEST_SUFFIXES = (".yaml", ".yml")
# Names under which users know each setting, on the command line and in the file of data sets.
_COMMAND_OPTIONS = {"seq_len": "--seq-len", "packing": "--packing", "overlong": "--overlong"}
_CONFIG_KEYS = {"seq_len": "packing_length", "packing": "packing", "overlong": "filter_overlong, which says"}
_OVERLONG_RESULTS = {"drop": "left out", "split": "cut", "truncate": "cut short"}


@contextmanager
def open_run_data(
    request: TrainRequest,
    settings: TrainSettings,
    dataset: DatasetConfig | None,
    folder: RunFolder,
    ranks: RankGroup,
    print_line: PrintLine,
) -> Iterator[Path | str | Mixture | DataRequest]:
    """Yield the data that a request names, in the form :func:`set_up_run` takes."""
    data = request.data
    if data.stream is not None:
        yield data
    elif data.mixture is not None:
        yield data.mixture
    elif dataset is not None:
        _prepare_dataset_store(dataset, folder.data, _choose_tokenizer(dataset, request), ranks, print_line)
        yield folder.data
    elif data.if_missing == "synthetic" and _is_data_missing(data, ranks):
        vocabulary = _get_model_vocabulary(settings) or SyntheticSpec().vocab
        yield Path(SyntheticSpec(name=DISTRIBUTED_DUMMY, vocab=vocabulary).spec_string)
    elif data.input_file is not None:
        with _prepare_temporary_store(data.input_file, data, ranks, print_line) as store:
            yield store
    else:
        yield data.data or Path()


def _prepare_dataset_store(
    config: DatasetConfig, folder: Path, tokenizer: str | None, ranks: RankGroup, print_line: PrintLine
) -> None:
    def prepare() -> None:
        result = batchloom.prepare(config, out=folder, tokenizer=tokenizer)
        state = "is prepared already" if result.already_done else "was prepared"
        print_line(f"input  {config.location.file} {state} in {folder}, by tokenizer {result.tokenizer}")

    ranks.run_exclusively(prepare if ranks.first else None)


def _choose_tokenizer(config: DatasetConfig, request: TrainRequest) -> str | None:
    """Return the requested tokenizer, else the file's, else the pretrained model's."""
    init = request.init
    if request.data.tokenizer is not None or config.tokenizer is not None:
        return request.data.tokenizer or config.tokenizer
    return str(init) if init is not None and (init / "tokenizer.json").is_file() else None


def describe_order(
    config: DatasetConfig, dataset_settings: dict[str, Any], settings: TrainSettings, *, is_continuation: bool
) -> str:
    """Describe how documents become sequences, and the origin of each setting."""
    order = settings.order
    packed = "one document per sequence" if order.packing == "none" else f"packing {order.packing}"
    facts = [f"{packed} of {settings.seq_len:,} tokens"]
    if order.overlong in _OVERLONG_RESULTS:
        facts.append(f"longer documents are {_OVERLONG_RESULTS[order.overlong]}")
    facts.append("shuffled" if order.shuffle else "in store order")
    description = f"order  {', '.join(facts)}"
    run_order = {"seq_len": settings.seq_len, "packing": order.packing, "overlong": order.overlong}
    if is_continuation:
        differences = [
            f"{_CONFIG_KEYS[name]} {value}"
            for name, value in config.plan_settings(settings.seq_len).items()
            if name in run_order and value != run_order[name]
        ]
        differs = f"; {config.location.file} now says {', '.join(differences)}" if differences else ""
        return f"{description}, as the run was started{differs}"
    if not dataset_settings:
        return f"{description}; {config.location.file} sets none of these"
    overrides = [
        f"{_COMMAND_OPTIONS[name]} {value} overrides {_CONFIG_KEYS[name]} {dataset_settings[name]}"
        for name, value in run_order.items()
        if value != dataset_settings[name]
    ]
    return "; ".join([f"{description}, as {config.location.file} says", *overrides])


def _is_data_missing(data: DataRequest, ranks: RankGroup) -> bool:
    """Return whether the data is missing and synthetic data replaces it."""
    reason = _describe_absent_store(Path(data.data)) if data.data is not None and not is_url(str(data.data)) else ""
    if data.input_file is not None and _is_absent(data.input_file):
        reason = _describe_missing_input(data.input_file)
    absent = int(ranks.total(float(bool(reason)))[0])
    if not absent:
        return False
    if absent < ranks.world_size:
        raise TrainError(
            f"{data.data or data.input_file} is missing for {absent} of {ranks.world_size} ranks only, so synthetic "
            "data cannot replace it. Put it where every rank can read it."
        )
    if ranks.first:
        _LOG.warning("Could not load real data: %s", reason)
        _LOG.warning("Falling back to synthetic data")
    return True


def _describe_absent_store(data: Path) -> str:
    """Return the error text of a store that does not exist; empty if it exists."""
    stem = data.with_suffix("") if data.suffix in (".bin", ".idx") else data
    halves = (stem.with_name(stem.name + ending) for ending in (".bin", ".idx") if stem.name)
    if not all(_is_absent(path) for path in (data, *halves)):
        return ""
    try:
        open_store(data)
    except StoreMissingError as error:
        return str(error)
    return ""


def _is_absent(path: Path) -> bool:
    """Return whether a path does not exist, as opposed to being unreadable.

    A path behind a broken symbolic link does not count as absent, because its data may only be unmounted.
    """
    try:
        path.lstat()
    except OSError as error:
        behind = any(above.is_symlink() and not above.exists() for above in path.parents)
        return isinstance(error, FileNotFoundError) and not behind
    return False


def _describe_missing_input(inputs: Path) -> str:
    return f"--input-file: {describe_missing_path(str(inputs), 'name a file or folder that exists')}"


def _get_model_vocabulary(settings: TrainSettings) -> int | None:
    """Return the model's vocabulary size; None if it adapts to any."""
    if not isinstance(settings.model, PretrainedSettings):
        return settings.model.vocab_size
    vocab_size = getattr(read_model_config(settings.model), "vocab_size", None)
    return vocab_size if isinstance(vocab_size, int) else None


@contextmanager
def _prepare_temporary_store(
    inputs: Path, data: DataRequest, ranks: RankGroup, print_line: PrintLine
) -> Iterator[Path]:
    """Prepare an input into a temporary store, once on each machine."""
    if not inputs.exists():
        refuse_url(inputs, "--input-file")
        raise InputMissingError(_describe_missing_input(inputs))
    if inputs.suffix.lower() in _MANIFEST_SUFFIXES and inputs.is_file():
        raise InputError(f"--input-file: {inputs} is named like a manifest; give it as --dataset-config {inputs}")
    if ranks.local_rank:
        ranks.run_exclusively(None)
        yield Path(ranks.broadcast_local_path(""))
        return
    parent_folder = _SHARED_MEMORY if _fits_in_memory(inputs) else None
    with _exit_on_sigterm(), tempfile.TemporaryDirectory(prefix="batchloom-", dir=parent_folder) as folder:
        # The log and the plots show the name of this folder as the name of the data.
        store = Path(folder) / (inputs.name.split(".")[0] or "input")
        if ranks.first:
            print_line(f"input  {inputs} is prepared in {store}, which is removed at the end")
        ranks.run_exclusively(
            lambda: batchloom.prepare(
                inputs,
                out=store,
                tokenizer=data.tokenizer,
                media=data.media or None,
                follow_links=data.options.follow_links,
            )
        )
        yield Path(ranks.broadcast_local_path(str(store)))


def _fits_in_memory(inputs: Path) -> bool:
    """Return whether memory has room for twice the store and its temporary files."""
    if not _SHARED_MEMORY.is_dir():
        return False
    files = [f for f in inputs.rglob("*") if f.is_file()] if inputs.is_dir() else [inputs]
    needed = sum(
        file.stat().st_size * _STORE_SIZE_FACTOR * (_COMPRESSION_FACTOR if file.suffix in _COMPRESSED_SUFFIXES else 1)
        for file in files
    )
    return 2 * needed < shutil.disk_usage(_SHARED_MEMORY).free


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Run the clean-up on SIGTERM (from a scheduler or torchrun), as on Ctrl-C."""

    def end(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    previous_handler = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous_handler)


def open_source(
    data: Path | str | Mixture,
    folder: RunFolder,
    ranks: RankGroup,
    *,
    resume: bool,
    generation: int | None = None,
    open_options: Mapping[str, Any] = MappingProxyType({}),
) -> Store | Mixture:
    """Open the data of a run; on ``resume`` at the generations it was started on."""
    if isinstance(data, Mixture):
        return _open_mixture_generations(data, folder, ranks) if resume else data
    if resume and generation is None:
        generation = _find_initial_generation(data, folder, ranks, open_options)
    return open_store(data, generation=generation, **open_options)


def _find_initial_generation(
    data: Path | str, folder: RunFolder, ranks: RankGroup, open_options: Mapping[str, Any]
) -> int | None:
    """Return the store generation a run was started on; None for the newest."""
    recorded_data = folder.read().get("data")
    newest = open_store(data, **open_options)
    if not isinstance(recorded_data, dict) or newest.manifest is None or newest.location.generation is None:
        return None
    recorded_fingerprint = recorded_data.get("fingerprint")
    number = recorded_data.get("generation")
    fingerprints_by_generation = {entry.number: entry.fingerprints for entry in newest.manifest.all_history}
    if (
        not isinstance(number, int)
        or fingerprints_by_generation.get(number, {}).get(newest.split) != recorded_fingerprint
    ):
        # The run predates generations, or was started on another copy, so search by fingerprint.
        number = newest.contents.find_generation(str(recorded_fingerprint))
    if number is None or number == newest.location.generation:
        return None
    # Reading the manifest raises GenerationError for a compacted generation before anything is built.
    newest.reader.read_manifest(number)
    _log_generation(number, newest, newest.location.name if newest.location.is_remote else data, ranks)
    return number


def _open_mixture_generations(mixture: Mixture, folder: RunFolder, ranks: RankGroup) -> Mixture:
    """Open each store of a mixture at the generation the run was started on.

    A generation that is not the given one is logged; one that was compacted away raises GenerationError.
    """
    recorded_data = folder.read().get("data")
    sources: Any = recorded_data.get("sources") if isinstance(recorded_data, dict) else None
    stores = dict(mixture.stores)
    for name, store in mixture.stores.items():
        recorded_source = sources.get(name) if isinstance(sources, dict) else None
        if not isinstance(recorded_source, dict) or not isinstance(store, Store):
            continue
        recorded_fingerprint = str(recorded_source.get("store"))
        number = (
            None if recorded_fingerprint == store.fingerprint else store.contents.find_generation(recorded_fingerprint)
        )
        if number is None or number == store.location.generation:
            continue
        open_options = {**store.location.options, "generation": number}
        stores[name] = open_store(store.location.address, store.split, **open_options)
        _log_generation(number, store, store.location.name, ranks)
    return replace(mixture, stores=stores)


def _log_generation(number: int, newest: Store, name: Path | str, ranks: RankGroup) -> None:
    if ranks.first:
        _LOG.info(
            "The run was started on generation %d of %s and continues with it; the newest is %d.",
            number,
            name,
            newest.location.generation,
        )


@dataclass(frozen=True, slots=True)
class _StreamLocation:
    """Members of a store's ``location`` that a run uses."""

    name: str
    is_remote: bool = False
    on_disk: bool = True
    generation: int | None = None


@dataclass(frozen=True, slots=True)
class _StreamContents:
    """Members of a store's ``contents`` that a run uses."""

    weights: tuple[tuple[str, float], ...] = ()
    synthetic: bool = False
    removed: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))


@dataclass(frozen=True, slots=True)
class _StreamLengths:
    """Lengths of the documents of a stream's first batch, uint32."""

    values: NDArray[np.uint32]

    def slice(self, start: int, stop: int) -> NDArray[np.uint32]:
        return self.values[start:stop]


@dataclass(frozen=True, slots=True)
class _StreamDocument:
    ids: NDArray[np.int64]


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
        self.location, self.contents = _StreamLocation(self.inputs[0]), _StreamContents()
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
    def lengths(self) -> _StreamLengths:
        """Lengths of the documents."""
        return _StreamLengths(np.array([len(span) for span in self._documents], np.uint32))

    def __getitem__(self, number: int) -> _StreamDocument:
        return _StreamDocument(self._documents[number])


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
