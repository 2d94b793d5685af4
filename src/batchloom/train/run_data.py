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
from dataclasses import replace
from pathlib import Path
from shlex import join, quote
from types import FrameType, MappingProxyType
from typing import Any

import batchloom
from batchloom import DatasetConfig, Mixture, Store, open_store, stream
from batchloom.adapters.rank_group import RankGroup
from batchloom.core.addresses import is_url
from batchloom.core.errors import InputError, InputMissingError, StoreMissingError, TrainError
from batchloom.core.files import describe_missing_path, refuse_url
from batchloom.core.synthetic_data import DISTRIBUTED_DUMMY, SyntheticSpec
from batchloom.streaming import Stream
from batchloom.train.request import DataRequest, TrainRequest
from batchloom.train.run_folder import PrintLine, RunFolder
from batchloom.train.train_settings import TrainSettings

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
    dataset: DatasetConfig | None,
    model_vocabulary: int | None,
    folder: RunFolder,
    ranks: RankGroup,
    print_line: PrintLine,
) -> Iterator[Path | str | Mixture]:
    """Yield the data that a request names, prepared if needed; unused for a stream."""
    data = request.data
    if data.mixture is not None:
        yield data.mixture
    elif dataset is not None:
        tokenizer = data.tokenizer or dataset.tokenizer
        if tokenizer is None and request.init is not None and (request.init / "tokenizer.json").is_file():
            tokenizer = str(request.init)

        def prepare() -> None:
            result = batchloom.prepare(dataset, out=folder.data, tokenizer=tokenizer, for_loader=True)
            state = "is prepared already" if result.already_done else "was prepared"
            print_line(f"input  {dataset.location.name} {state} in {folder.data}, by tokenizer {result.tokenizer}")

        ranks.run_exclusively(prepare if ranks.first else None)
        yield folder.data
    elif data.if_missing == "synthetic" and _is_data_missing(data, ranks):
        vocabulary = model_vocabulary or SyntheticSpec().vocab
        yield Path(SyntheticSpec(name=DISTRIBUTED_DUMMY, vocab=vocabulary).spec_string)
    elif data.input_file is not None:
        with _prepare_temporary_store(data.input_file, data, ranks, print_line) as store:
            yield store
    else:
        yield data.data or Path()


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
        differs = f"; {config.location.name} now says {', '.join(differences)}" if differences else ""
        return f"{description}, as the run was started{differs}"
    if not dataset_settings:
        return f"{description}; {config.location.name} sets none of these"
    overrides = [
        f"{_COMMAND_OPTIONS[name]} {value} overrides {_CONFIG_KEYS[name]} {dataset_settings[name]}"
        for name, value in run_order.items()
        if value != dataset_settings[name]
    ]
    return "; ".join([f"{description}, as {config.location.name} says", *overrides])


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
                for_loader=True,
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
    """Open the data of a run; on ``resume`` at the generations it was started on.

    GenerationError is raised for a generation that was compacted away.
    """
    source = data if isinstance(data, Mixture) else open_store(data, generation=generation, **open_options)
    recorded = folder.read().get("data") if resume else None
    if not isinstance(recorded, dict):
        return source
    if isinstance(source, Store):
        if generation is not None:
            return source
        name = source.location.name if source.location.is_remote else data
        return _open_generation(source, recorded.get("fingerprint"), recorded.get("generation"), name, ranks)
    sources, places = recorded.get("sources", {}), recorded.get("places", {})
    stores = {
        name: _open_generation(
            store, sources[name].get("store"), places.get(name, {}).get("generation"), store.location.name, ranks
        )
        for name, store in get_stores(source).items()
        if name in sources
    }
    return replace(source, stores={**source.stores, **stores})


def _open_generation(store: Store, fingerprint: object, number: Any, name: object, ranks: RankGroup) -> Store:
    """Open the generation of a store that a run recorded; log one that is not open."""
    newest = store.location.generation
    if store.manifest is None or newest is None:
        return store
    fingerprints = {entry.number: entry.fingerprints.get(store.split) for entry in store.manifest.all_history}
    if fingerprints.get(number) != fingerprint:
        # The run predates generations, or was started on another copy, so search by fingerprint.
        number = store.contents.find_generation(str(fingerprint))
    if number is None or number == newest:
        return store
    older = open_store(store.location.address, store.split, **{**store.location.options, "generation": number})
    if ranks.first:
        _LOG.info(
            "The run was started on generation %d of %s and continues with it; the newest is %d.", number, name, newest
        )
    return older


def open_stream(request: DataRequest, settings: TrainSettings) -> Stream:
    order, options = settings.order, request.options
    return stream(
        list(request.stream or ()),
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


def get_stores(data: Store | Mixture) -> dict[str, Store]:
    """Return the stores by the names of their sources; a single store has no name."""
    stores = data.stores if isinstance(data, Mixture) else {"": data}
    return {name: store for name, store in stores.items() if isinstance(store, Store)}


def get_data_name(data: Store | Stream) -> str:
    """Return the name of a store or of the first input of a stream, for messages."""
    return data.location.name if isinstance(data, Store) else data.recipe.inputs[0]


def has_tokenizer(data: Store | Stream) -> bool:
    """Return whether the data names its tokenizer."""
    return isinstance(data, Stream) or data.manifest is not None


def finish_stream_store(data: Stream, prepare_command: str, print_line: PrintLine) -> None:
    """Finish the store if all inputs were written to it; else print how to."""
    if data.abandoned is not None:
        print_line(
            f"keep   {data.abandoned} is unfinished, and nothing was written to it since --resume; finish it with: "
            f"{prepare_command} --out {quote(str(data.abandoned))}"
        )
    if data.keeping is None or data.keeping.finished:
        return
    out = data.keeping.out
    cached_units, units = data.count_cached_units()
    if cached_units < units:
        print_line(
            f"keep   {cached_units:,} of {units:,} units of the input are in {out}; add the others with: "
            f"{prepare_command} --out {quote(str(out))}"
        )
        return
    data.finish(workers=1)
    print_line(f"keep   {out} is the store of the inputs")


def format_prepare_command(request: DataRequest) -> str:
    """Return the command that prepares the inputs of a stream, without ``--out``."""
    words = ["batchloom", "prepare", *(request.stream or ())]
    for name, value in {"tokenizer": request.tokenizer, **request.media}.items():
        words += [f"--{name.replace('_', '-')}", value] if value is not None else []
    words += ["--follow-links"] if request.options.follow_links else []
    return join([*words, "--dedup", "none", "--no-balance-subsets"])
