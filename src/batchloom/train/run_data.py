"""Data of a run: a store, a mixture, a stream, or inputs that are prepared first.

A resumed run reads the generation of each store that it was started on, without the documents removed since.
"""

import logging
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

import numpy as np

import batchloom
from batchloom import DatasetConfig, Mixture, Store, open_store, stream
from batchloom.adapters.rank_group import RankGroup
from batchloom.batches import open_recorded_data
from batchloom.core.addresses import is_url
from batchloom.core.errors import (
    InputError,
    InputMissingError,
    SettingsError,
    StateError,
    StoreMissingError,
    TrainError,
)
from batchloom.core.files import describe_missing_path, refuse_url
from batchloom.core.synthetic_data import DISTRIBUTED_DUMMY, SyntheticSpec, parse_synthetic_spec
from batchloom.core.wording import format_count
from batchloom.streaming import Stream
from batchloom.train.request import DataRequest, TrainRequest, list_given
from batchloom.train.run_folder import MAX_LISTED, PrintLine, RunFolder, RunLog, read_checkpoint_state
from batchloom.train.train_settings import TrainSettings

_LOG = logging.getLogger("batchloom")
_MANIFEST_SUFFIXES = (".yaml", ".yml")
_OVERLONG_RESULTS = {"drop": "left out", "split": "cut", "truncate": "cut short"}


@contextmanager
def open_run_data(
    request: TrainRequest,
    dataset: DatasetConfig | None,
    settings: TrainSettings,
    model_vocabulary: int | None,
    folder: RunFolder,
    ranks: RankGroup,
    log: RunLog,
) -> Iterator[Store | Mixture | Stream]:
    """Yield the data that a request names, prepared if needed."""
    data = request.data
    if data.stream is not None:
        yield open_stream(data, settings)
        return
    folder.is_data_temporary = data.input_file is not None
    with _prepare_data(request, dataset, model_vocabulary, folder, ranks, log) as location:
        yield open_source(
            location,
            folder,
            ranks,
            resume=request.resume,
            generation=data.generation,
            open_options=list_given(data.store),
        )


@contextmanager
def _prepare_data(
    request: TrainRequest,
    dataset: DatasetConfig | None,
    model_vocabulary: int | None,
    folder: RunFolder,
    ranks: RankGroup,
    log: RunLog,
) -> Iterator[Path | str | Mixture]:
    """Yield the location of the data that a request names, prepared if needed."""
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
            log.print_line(f"input  {dataset.location.name} {state} in {folder.data}, by tokenizer {result.tokenizer}")

        ranks.run_exclusively(prepare if ranks.first else None)
        yield folder.data
    elif data.if_missing == "synthetic" and _is_data_missing(data, ranks):
        vocabulary = model_vocabulary or SyntheticSpec().vocab
        yield Path(SyntheticSpec(name=DISTRIBUTED_DUMMY, vocab=vocabulary).spec_string)
    elif data.input_file is not None:
        with _prepare_temporary_store(data.input_file, data, ranks, log) as store:
            yield store
    else:
        yield data.data or find_recorded_data(folder)


def find_recorded_data(folder: RunFolder) -> str | Mixture:
    """Return the data that a run recorded: the path of a store, or a mixture.

    Raises:
        SettingsError: it did not record where they are.
    """
    recorded = folder.read().get("data")
    data = open_recorded_data(recorded) if isinstance(recorded, dict) else None
    if data is None:
        raise SettingsError(
            [f"--data: missing; the run in {folder.path} does not say where its data are: give what it was started on"]
        )
    is_path = isinstance(data, str) and not is_url(data) and parse_synthetic_spec(data) is None
    if is_path and not any(Path(f"{data}{suffix}").exists() for suffix in ("", ".bin", ".idx")):
        raise InputMissingError(
            f"The data of the run in {folder.path} are no longer at {data}: name their place with --data."
        )
    return data


def describe_order(settings: TrainSettings, *, is_continuation: bool) -> str:
    """Describe how documents become sequences."""
    order = settings.order
    packed = "one document per sequence" if order.packing == "none" else f"packing {order.packing}"
    facts = [f"{packed} of {settings.seq_len:,} tokens"]
    if order.overlong in _OVERLONG_RESULTS:
        facts.append(f"longer documents are {_OVERLONG_RESULTS[order.overlong]}")
    facts.append("shuffled" if order.shuffle else "in store order")
    return f"order  {', '.join(facts)}{', as the run was started' if is_continuation else ''}"


def _is_data_missing(data: DataRequest, ranks: RankGroup) -> bool:
    """Return whether the data is missing and synthetic data replaces it."""
    reason = _describe_missing_data(data)
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


def _describe_missing_data(data: DataRequest) -> str:
    """Return the error text if the data is missing; empty if it exists."""
    path = data.input_file or Path(data.data or "")
    stem = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    if is_url(str(data.data)) or not all(map(_is_absent, (path, Path(f"{stem}.bin"), Path(f"{stem}.idx")))):
        return ""
    if data.input_file is not None:
        return _describe_missing_input(data.input_file)
    try:
        open_store(path)
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
def _prepare_temporary_store(inputs: Path, data: DataRequest, ranks: RankGroup, log: RunLog) -> Iterator[Path]:
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
    with _exit_on_sigterm(), tempfile.TemporaryDirectory(prefix="batchloom-") as folder:
        # The log and the plots show the name of this folder as the name of the data.
        store = Path(folder) / (inputs.name.split(".")[0] or "input")
        log.print_line(f"input  {inputs} is prepared in {store}, which is removed at the end")
        ranks.run_exclusively(
            lambda: batchloom.prepare(
                inputs,
                out=store,
                tokenizer=data.tokenizer,
                media=list_given(data.media) or None,
                encoding=data.options.encoding,
                include=data.options.include,
                exclude=data.options.exclude,
                follow_links=data.options.follow_links,
                for_loader=True,
            )
        )
        yield Path(ranks.broadcast_local_path(str(store)))


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
    announces: bool = True,
) -> Store | Mixture:
    """Open the data of a run; on ``resume`` at the generations it was started on.

    Documents that were removed since are padding, unless the user chose the generation.

    Raises:
        GenerationError: a generation was compacted away.
        StateError: the user chose another generation than the run was started on.
    """
    if isinstance(data, Mixture) and generation is not None:
        raise SettingsError([f"--generation: {generation} is of one store; choose those of a mixture in its file"])
    source = data if isinstance(data, Mixture) else open_store(data, generation=generation, **open_options)
    recorded = folder.read().get("data") if resume else None
    if isinstance(recorded, dict):
        stores = get_stores(source)
        # Ranks must agree on what is removed, also if a generation is made while they start.
        newest = ranks.all_gather({name: store.location.generation for name, store in stores.items()})[0]
        added = _list_added_sources(folder) if isinstance(source, Mixture) else {}
        for name, store in stores.items():
            if (place := _find_recorded_place(recorded, name, added)) is None:
                continue
            opened = stores[name] = _open_recorded_generation(store, *place, newest[name])
            if opened is not store and ranks.first and announces:
                is_local = not isinstance(source, Mixture) and not store.location.is_remote
                _announce_generation(opened, data if is_local else store.location.name, newest[name])
        source = replace(source, stores={**source.stores, **stores}) if isinstance(source, Mixture) else stores[""]
    if ranks.first and announces:
        _log_stores([*get_stores(source).values()], data)
    return source


def _log_stores(stores: list[Store], data: Path | str | Mixture) -> None:
    """Log the opened stores of real data, under the path that the user gave."""
    if any(store.contents.synthetic for store in stores):
        return
    for store in stores[:MAX_LISTED]:
        is_named = isinstance(data, Path) and not store.location.is_remote
        _LOG.info("Loaded real indexed dataset from %s", data if is_named else store.location.name)
        _LOG.info("Dataset contains %d documents", len(store))
    if len(stores) > MAX_LISTED:
        _LOG.info("Loaded %d more real indexed datasets", len(stores) - MAX_LISTED)


def _find_recorded_place(recorded: dict[str, Any], name: str, added: Mapping[str, Any]) -> tuple[object, Any] | None:
    """Return fingerprint and generation of a run's store; None for a new source.

    ``added`` has the sources that edits have added.
    """
    if not name:
        return recorded.get("fingerprint"), recorded.get("generation")
    source = recorded.get("sources", {}).get(name, added.get(name))
    return None if source is None else (source.get("store"), recorded.get("places", {}).get(name, {}).get("generation"))


def _list_added_sources(folder: RunFolder) -> dict[str, Any]:
    """Return the identities of the sources that edits have added."""
    newest = folder.find_newest_checkpoint()
    edits = read_checkpoint_state(newest)[1].get("edits", ()) if newest is not None else ()
    return {name: source for edit in edits for name, source in (edit.get("added") or {}).items()}


def _open_recorded_generation(store: Store, fingerprint: object, number: Any, newest: int | None) -> Store:
    """Open the generation that a run recorded, without what was removed since.

    A generation that the user chose is read as it is.

    Raises:
        StateError: the user chose another one.
    """
    current = store.location.generation
    if store.manifest is None or current is None:
        return store
    options = {**store.location.options, "generation": None}
    # A chosen generation does not know those after it.
    is_chosen = store.location.is_chosen
    history: Any = store.location.open(store.location.address, store.split, **options) if is_chosen else store
    fingerprints = {entry.number: entry.fingerprints.get(store.split) for entry in history.manifest.all_history}
    if fingerprints.get(number) != fingerprint:
        # The run predates generations, or was started on another copy, so search by fingerprint.
        number = history.contents.find_generation(str(fingerprint))
    if number is None or number == current:
        return store
    if is_chosen:
        raise StateError(
            f"The run was started on generation {number} of {store.location.name}, and generation {current} is given: "
            "leave it out to continue, or start another run."
        )
    opened: Store = store.location.open(
        store.location.address, store.split, **{**options, "generation": number, "removals": newest}
    )
    return opened


def _announce_generation(store: Store, name: object, newest: int) -> None:
    """Log that a run continues with an older generation; warn of what was removed."""
    number = store.location.generation
    _LOG.info(
        "The run was started on generation %d of %s and continues with it; the newest is %d.", number, name, newest
    )
    for split in store.subsets:
        subset = store.subset(split)
        before = open_store(store.location.address, split, generation=number).contents.removed
        documents = np.setdiff1d(subset.contents.removed, before)
        if documents.size:
            verb = "is" if documents.size == 1 else "are"
            _LOG.warning(
                "%s (%s tokens) of %s/%s %s removed: from here on padding without loss, while all others keep their "
                "places. Only if you choose generation %d they are %s.",
                format_count(documents.size, "document"),
                f"{int(subset.lengths.take(documents).sum()):,}",
                name,
                split,
                verb,
                number,
                "trained" if split == "train" else "evaluated",
            )


def open_stream(request: DataRequest, settings: TrainSettings) -> Stream:
    order = settings.order
    options = request.options
    return stream(
        list(request.stream or ()),
        tokenizer=request.tokenizer,
        media=list_given(request.media) or None,
        encoding=options.encoding,
        include=options.include,
        exclude=options.exclude,
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


def finish_stream_store(data: Stream, request: DataRequest, print_line: PrintLine) -> None:
    """Finish the store if all inputs were written to it; else print how to."""
    prepare_command = _format_prepare_command(request)
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


def _format_prepare_command(request: DataRequest) -> str:
    """Return the command that prepares the inputs of a stream, without ``--out``."""
    words = ["batchloom", "prepare", *(request.stream or ())]
    options = request.options
    files = {"encoding": options.encoding, "include": options.include, "exclude": options.exclude}
    named = {"tokenizer": request.tokenizer, **files, **list_given(request.media)}
    for name, value in named.items():
        words += [f"--{name.replace('_', '-')}", value] if value is not None else []
    words += ["--follow-links"] if options.follow_links else []
    return join([*words, "--dedup", "none", "--no-balance-subsets"])
