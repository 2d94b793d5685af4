"""Setup of a run: its data, model and folder, checked before the first step."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from batchloom import Loader, Mixture, Plan, Store, open_store
from batchloom.adapters.agreement import flatten_values, require_agreement
from batchloom.adapters.logging import truncate_log
from batchloom.adapters.optimizer_step import make_parameter_groups
from batchloom.adapters.rank_group import RankGroup
from batchloom.batches import STORE_OPTIONS, BatchSpec, MediaOptions
from batchloom.batches.assembly import DEFAULT_MEDIA_SPEC
from batchloom.core.errors import PlanError, SettingsError, StateError, TrainError
from batchloom.core.settings import to_plain
from batchloom.core.wording import format_count, format_list
from batchloom.streaming import Stream
from batchloom.train.model.model_build import (
    TrainableModel,
    build_blueprint,
    build_model,
    check_memory,
    count_parameters,
    explain_memory_errors,
)
from batchloom.train.model.pretrained import compute_folder_fingerprint
from batchloom.train.request import NEW_SOURCE_REMEDY
from batchloom.train.run_data import get_data_name, get_stores
from batchloom.train.run_folder import MAX_LISTED, RunFolder, RunLog, load_checkpoint, read_checkpoint_state
from batchloom.train.train_settings import (
    MAX_STEPS,
    PretrainedSettings,
    TrainSettings,
)

# Settings that a resumed run cannot change: the model, the data and their order.
_FIXED_SETTINGS = (
    "model",
    "init.fingerprint",
    "seq_len",
    "global_batch_size",
    "order.packing",
    "order.overlong",
    "order.shuffle",
    "order.noise_prob",
    "seed",
    "data.fingerprint",
    "data.mixture",
    "data.sources",
)
# Locations may change, because fingerprints identify the data and the model.
_LOCATION_SETTINGS = (
    "data.name",
    "data.path",
    "data.generation",
    "data.removals",
    "data.places",
    "model.init",
    *(f"data.{name}" for name in STORE_OPTIONS),
)
# Steps that are searched for a target; usually the first has one.
_MAX_CHECKED_STEPS = 256
# Exhaustion depends on the sequence counts. For up to this many documents they take about a second.
_MAX_INLINE_COUNT = 1 << 20


@dataclass(frozen=True, slots=True)
class TrainRun:
    """Objects that the steps of a run share.

    Attributes:
        settings: settings of the run.
        ranks: rank group of this process.
        store: train subset; for a mixture the store that has the tokenizer; or the stream.
        loader: this rank's batches of the train subset.
        val: this rank's batches of the val subset, by source name for a mixture; empty without one.
        model: model with the weights.
        learner: callable model: compiled, and wrapped for several ranks.
        optimizer: AdamW over the weights.
        folder: folder of the run.
        log: log of the run.
    """

    settings: TrainSettings
    ranks: RankGroup
    store: Store | Stream
    loader: Loader
    val: dict[str, Loader]
    model: TrainableModel
    learner: nn.Module
    optimizer: torch.optim.Optimizer
    folder: RunFolder
    log: RunLog


def set_up_run(
    data: Path | str | Store | Mixture | Stream,
    settings: TrainSettings,
    folder: RunFolder,
    ranks: RankGroup,
    log: RunLog,
    *,
    media: MediaOptions = DEFAULT_MEDIA_SPEC,
) -> TrainRun:
    """Open the data and build the model, without writing anything.

    Args:
        data: open store, its folder or URL, a bare Megatron prefix, a name of synthetic data, a mixture, or a
            stream.
        settings: settings of the run.
        folder: folder of the run.
        ranks: rank group of this process.
        log: log of the run.
        media: options of reading images and audio.

    Raises:
        StoreError: there is no store, it is damaged, or has no such generation.
        SettingsError: the vocabulary size is unknown.
        PlanError: a store gives no sequence, or sizes do not divide.
        TrainError: no step has a target, or the memory cannot suffice.
    """
    source = open_store(data) if isinstance(data, (Path, str)) else data
    if not isinstance(source, Stream) and any(store.contents.synthetic for store in get_stores(source).values()):
        # Every line is marked, so that no result on synthetic data passes for another.
        log.mark = "  source=synthetic"
    store = _find_tokenizer_store(source)
    blueprint = build_blueprint(settings, store, media=_holds_media(source))
    check_memory(settings, count_parameters(blueprint), ranks)
    loader = make_loader(source, settings, ranks, settings.steps, media)
    if loader.streamed and settings.log_row_loss:
        problem = "the rows of a stream have no numbers by which explain could list their documents"
        raise SettingsError([f"log_row_loss: {problem}; prepare the data, or leave it out"])
    if not loader.streamed and not has_targets(loader, settings.steps):
        trained = "a trained token after another" if loader.store.masked else "two tokens"
        raise TrainError(
            f"None of the first {min(settings.steps, _MAX_CHECKED_STEPS)} steps on {get_data_name(store)} has anything "
            f"to predict: no sequence of {settings.seq_len} tokens ({settings.order.packing}) holds {trained} of one "
            "document. Prepare longer documents, or raise --seq-len."
        )
    model, learner = build_model(blueprint, settings, store, loader, ranks, log)
    optim = settings.optim
    groups = make_parameter_groups(model, optim.weight_decay)
    optimizer = torch.optim.AdamW(groups, optim.lr, (optim.beta1, optim.beta2), fused=True)
    return TrainRun(
        settings=settings,
        ranks=ranks,
        store=store,
        loader=loader,
        val={} if isinstance(source, Stream) else _make_val_loaders(source, settings, ranks, log, media),
        model=model,
        learner=learner,
        optimizer=optimizer,
        folder=folder,
        log=log,
    )


def _holds_media(data: Store | Mixture | Stream) -> bool:
    """Return whether a store was prepared with a processor, or a stream reads media."""
    if isinstance(data, Stream):
        return data.processor is not None
    return any(store.manifest is not None and bool(store.manifest.processor) for store in get_stores(data).values())


def _find_tokenizer_store(data: Store | Mixture | Stream) -> Store | Stream:
    """Return the first store that has a tokenizer, or the stream."""
    if isinstance(data, Stream):
        return data
    stores = [*get_stores(data).values()]
    return next((store for store in stores if store.vocab_size is not None), stores[0])


def has_targets(loader: Loader, steps: int) -> bool:
    """Return whether steps may have a token to predict; only the first are checked."""
    if not _count_trained_tokens(loader):
        return False
    checked_steps = range(min(steps, _MAX_CHECKED_STEPS))
    return steps > _MAX_CHECKED_STEPS or any(
        loader.plan.has_step(step) and loader.trained_tokens(step) for step in checked_steps
    )


def _make_val_loaders(
    source: Store | Mixture, settings: TrainSettings, ranks: RankGroup, log: RunLog, media: MediaOptions
) -> dict[str, Loader]:
    """Return the val loaders by source, and print a note for sources without val."""
    stores = get_stores(source)
    loaders = {}
    for name, store in stores.items():
        if "val" not in store.subsets:
            continue
        loader = make_loader(store.subset("val"), settings, ranks, None, media)
        fault = ""
        try:
            # Do not use its length: a large subset is counted in the background, and waiting for it would block here.
            if not has_targets(loader, settings.eval_batches or MAX_STEPS):
                fault = (
                    "the evaluated part of the val subset has nothing to predict: no sequence holds two tokens of one "
                    "document (raise --eval-batches, or prepare with more --val-fraction)"
                )
        except PlanError as error:
            fault = str(error)
        if fault:
            log.print_line(f"val    none{f' of {name}' if name else ''}: {fault}")
        else:
            loaders[name] = loader
    names_without_val = [name for name, store in stores.items() if "val" not in store.subsets]
    if names_without_val:
        source_note = f" of {format_list(names_without_val, MAX_LISTED)}" if isinstance(source, Mixture) else ""
        log.print_line(f"val    none{source_note}: the data has no val subset (prepare makes one with --val-fraction)")
    return loaders


def make_loader(
    data: Store | Mixture | Stream,
    settings: TrainSettings,
    ranks: RankGroup,
    steps: int | None,
    media: MediaOptions = DEFAULT_MEDIA_SPEC,
) -> Loader:
    """Return this rank's loader for ``steps`` steps, or for one pass over the store."""
    augment: dict[str, Any] | None = None
    if settings.order.noise_prob is not None and steps is not None:
        # Without a tokenizer the vocabulary size is that of the model.
        has_vocabulary = _find_tokenizer_store(data).vocab_size is not None
        vocab_size = None if has_vocabulary else getattr(settings.model, "vocab_size", None)
        augment = {"noise_prob": settings.order.noise_prob, "vocab_size": vocab_size}
    spec = BatchSpec(
        rank=ranks.rank,
        world_size=ranks.world_size,
        uneven=settings.order.uneven,
        micro_batch_size=settings.batch_size,
        balance=settings.order.balance,
        device=str(ranks.device),
        media=media,
    )
    if isinstance(data, Stream):
        return Loader(data, batch=spec, augment=augment)
    return Loader(
        data,
        batch=spec,
        seq_len=settings.seq_len,
        global_batch_size=settings.global_batch_size,
        packing=settings.order.packing,
        overlong=settings.order.overlong,
        shuffle=settings.order.shuffle,
        seed=settings.seed,
        steps=steps,
        augment=augment,
    )


@contextmanager
def hold_run_folder(run: TrainRun, *, resume: bool) -> Iterator[int]:
    """Lock and open the run's folder; yield the steps done.

    A new run that fails before its first step leaves nothing behind.
    """
    with (
        run.folder.lock() if run.ranks.first else nullcontext(),
        explain_memory_errors(run.settings, count_parameters(run.model)),
    ):
        start_step = _open_run_folder(run, resume=resume)
        try:
            yield start_step
        except Exception:
            if run.ranks.first and not resume:
                run.folder.withdraw()
            raise


def _open_run_folder(run: TrainRun, *, resume: bool) -> int:
    """Create the run's folder, or resume its newest checkpoint; return the steps done."""
    folder = run.folder
    log = run.log
    run_description = {"data": _describe_run(run), **to_plain(run.settings)}
    if isinstance(run.settings.model, PretrainedSettings):
        run_description["init"] = {"fingerprint": compute_folder_fingerprint(Path(run.settings.model.init))}
    changes: list[str] = []
    done = 0
    if resume:
        newest = folder.find_newest_checkpoint()
        if newest is not None and isinstance(run.store, Stream):
            run.store.check_state_stream(read_checkpoint_state(newest)[1])
        changes = _list_allowed_changes(folder.read(), run_description, folder.path)
        if newest is not None:
            done, state = load_checkpoint(newest, run.model, run.optimizer)
            run.loader.load_state_dict(state)
            if not run.loader.streamed:
                check_edited_plan(run, run.loader.plan)
    else:
        folder.check_new()
    # The exchange also ensures that every rank has checked the folder before the first rank writes.
    check_ranks_agree(run)
    if run.ranks.first:
        if resume:
            truncate_log(folder.log, done)
        folder.begin(run_description)
    run.ranks.wait()
    _announce_run(run, done)
    if resume and not done:
        log.print_line("resume from the start: the run has no checkpoint yet")
    for change in changes:
        log.print_line(f"changed   {change}, after {format_count(done, 'step')}")
    log.write({"kind": "start", "step": done, "origin": run.loader.origin, "run": run_description})
    return done


def _describe_run(run: TrainRun) -> dict[str, Any]:
    """Return the fingerprints that must not change, and the location of the data."""
    plan = run.loader.plan
    if run.loader.streamed or plan.mixture is None:
        location = describe_store_location(run.store)
        if run.folder.is_data_temporary:
            del location["path"]
        return {**location, "fingerprint": run.store.fingerprint}
    # Sources without a weight, which an edit may add, are not part of the initial identity.
    return {
        "mixture": plan.identity["mixture"],
        "sources": plan.identity["sources"],
        "places": {name: describe_store_location(store) for name, store in get_stores(plan.mixture).items()},
    }


def describe_store_location(store: Store | Stream) -> dict[str, Any]:
    if isinstance(store, Stream):
        return {"name": Path(get_data_name(store)).name}
    # The name of a remote store has no credentials.
    has_secret = store.location.is_remote and "@" in store.location.address
    path = store.location.name if has_secret else store.location.address
    location: dict[str, Any] = {"name": store.path.name, "path": path}
    if (store.location.generation or 1) > 1:
        location["generation"] = store.location.generation
    # What is needed to open it again, and whose removals a start has applied.
    options = {name: store.location.options.get(name) for name in (*STORE_OPTIONS, "removals")}
    return location | {name: value for name, value in options.items() if value is not None}


def check_ranks_agree(run: TrainRun) -> None:
    """Check that all ranks read the same plan, each its own share."""
    if run.ranks.world_size > 1:
        with run.ranks.collective_errors():
            require_agreement(run.loader)


def check_edited_plan(run: TrainRun, plan: Plan) -> None:
    """Refuse edits to sequences that are longer than the model takes."""
    seq_len = max(segment.seq_len for segment in plan.segments)
    if seq_len > run.settings.seq_len:
        build_blueprint(replace(run.settings, seq_len=seq_len), run.store, media=run.loader.holds_media)


def _list_allowed_changes(
    previous_description: dict[str, Any], run_description: dict[str, Any], run_path: Path
) -> list[str]:
    """List allowed differences between a run and its continuation."""
    old = flatten_values(previous_description)
    new = flatten_values(run_description)
    names = sorted(name for name in {*old, *new} if not name.startswith(_LOCATION_SETTINGS))
    changed_names = [name for name in names if old.get(name) != new.get(name)]
    refused_names = [name for name in changed_names if name.startswith(_FIXED_SETTINGS)]
    if refused_names:
        if problem := _describe_other_data(previous_description["data"], run_description["data"], run_path):
            raise StateError(problem)
        fields = "; ".join(f"{n} was {old.get(n)!r} and is {new.get(n)!r}" for n in refused_names)
        remedy = "Give the settings the run was started with, or another --out for a new run."
        if any(name.startswith("data.mixture.weights.") for name in refused_names):
            remedy += f" Weights change by an edit: {_format_edit_command(run_path)}."
        raise StateError(f"--resume needs the same model, data and order, but {fields}. {remedy}")
    return [f"{name} was {old.get(name)!r} and is {new.get(name)!r}" for name in changed_names]


def _describe_other_data(old: dict[str, Any], new: dict[str, Any], run_path: Path) -> str:
    """Say that a resumed run is given other data; empty if they are its own."""
    old_stores = _list_fingerprints(old)
    new_stores = _list_fingerprints(new)
    if old_stores == new_stores:
        return ""
    old_name = _describe_data(old)
    new_name = _describe_data(new)
    sentence = f"The run in {run_path} was started on {old_name}, and {new_name} is given."
    if "mixture" in old and old_stores.items() < new_stores.items():
        return f"{sentence} Sources are added by an edit: {_format_edit_command(run_path)}; {NEW_SOURCE_REMEDY}."
    if old_name == new_name:
        names = sorted(name for name in old_stores if name and old_stores[name] != new_stores[name])
        sentence = (
            f"The run in {run_path} was started on other contents of {format_list(names, MAX_LISTED) or old_name}."
        )
    hint = " (train --resume alone finds them)" if old.get("path") or old.get("places") else ""
    return f"{sentence} Give the data it was started on{hint if old_name != new_name else ''}, or another --out."


def _format_edit_command(run_path: Path) -> str:
    return f"batchloom edit {run_path} --at-step STEP --weights WEIGHTS"


def _list_fingerprints(data: dict[str, Any]) -> dict[str, Any]:
    """Return the fingerprints of the stores of a run by the names of their sources."""
    if "mixture" in data:
        return {name: source["store"] for name, source in data["sources"].items()}
    return {"": data.get("fingerprint")}


def _describe_data(data: dict[str, Any]) -> str:
    if "mixture" in data:
        return f"the mixture of {format_list(sorted(data['sources']), MAX_LISTED)}"
    return str(data.get("path") or data["name"])


def _announce_run(run: TrainRun, done: int) -> None:
    settings = run.settings
    ranks = run.ranks
    print_line = run.log.print_line
    plan = run.loader.plan
    share = run.loader.feed.share_at(0)
    is_single_store = not run.loader.streamed and plan.mixture is None
    # A plan of many pools is counted in the background, so its counts are not used here.
    is_counted = is_single_store and (plan.orders.is_counted or plan.orders.pools.count == 1)
    sequences = plan.orders.sequences_per_epoch if is_counted else 0
    trained_sequences = settings.steps * settings.global_batch_size
    epochs = f", {trained_sequences / sequences:.2f} epochs" if sequences else ""
    if isinstance(run.store, Stream):
        print_line(f"data   {run.loader.origin}: {run.store!r}, tokenizer {run.store.tokenizer.name}")
        print_line("val    none: a stream has no val subset; its share of the documents is not trained on")
        if run.store.keeping is not None:
            print_line(f"keep   the inputs are written to the store {run.store.keeping.out}")
    else:
        _announce_store(run)
    print_line(
        f"model  {run.model.description}, vocabulary {run.model.vocab_size:,}, "
        f"{count_parameters(run.model):,} parameters"
    )
    parts = " x ".join(
        [
            format_count(ranks.world_size, "rank"),
            format_count(share.passes, "pass"),
            format_count(share.micro_batch_size, "row"),
        ]
    )
    print_line(
        f"step   {settings.global_batch_size} sequences of {settings.seq_len} tokens ({parts}) on "
        f"{ranks.device.type}; {format_count(settings.steps, 'step')}{epochs}"
    )
    if done:
        print_line(f"resume from the checkpoint after {format_count(done, 'step')}")


def _count_trained_tokens(loader: Loader) -> int:
    store = loader.store
    return store.contents.trained_tokens if isinstance(store, Store) else store.trained_tokens


def _announce_store(run: TrainRun) -> None:
    print_line = run.log.print_line
    plan = run.loader.plan
    data = run.loader.store
    share_trained = _count_trained_tokens(run.loader) / max(data.tokens, 1)
    trained = f", {share_trained:.1%} of them trained" if data.masked else ""
    print_line(f"data   {run.loader.origin}: {len(data):,} documents, {data.tokens:,} tokens{trained}")
    for line in describe_mixture(plan, run.settings.steps):
        print_line(line)
    if run.settings.order.noise_prob:
        print_line(
            f"data   {run.settings.order.noise_prob:.1%} of the trained input tokens are replaced by random tokens "
            "(noise_prob); labels are unchanged"
        )


def describe_mixture(plan: Plan, steps: int) -> list[str]:
    """Describe source shares, changes by stages and edits, and exhausted sources.

    Args:
        plan: plan of the run.
        steps: number of steps of the run.
    """
    lines = []
    if plan.mixture is not None:
        lines = _list_mixture_lines(plan, plan.mixture.exhausted, steps)
    if plan.journal:
        last = plan.journal[-1]
        note = f" ({last['note']})" if "note" in last else ""
        lines.append(
            f"edits  {format_count(len(plan.journal), 'edit')} in the journal, the last applies after "
            f"{format_count(last['step'], 'step')}{note}"
        )
    return lines


def _list_mixture_lines(plan: Plan, exhausted: str, steps: int) -> list[str]:
    end = plan.positions_of(steps)[0]
    documents = sum(store.lengths.size for store in plan.stores.values())
    is_exhaustion_known = exhausted == "repeat" or plan.orders.is_counted or documents <= _MAX_INLINE_COUNT
    served = plan.serve_until(end if is_exhaustion_known else 1)
    lines = []
    previous_shares: dict[str, float] = {}
    for number, (segment, _) in enumerate(served.segments[:MAX_LISTED]):
        shares = {
            plan.names[source]: count / segment.schedule.period
            for source, count in zip(segment.sources.tolist(), segment.schedule.counts, strict=True)
        }
        largest = sorted(shares, key=lambda name: (-shares[name], name))
        share_list = format_list([f"{name} {shares[name]:.2%}" for name in largest], MAX_LISTED)
        since = f", after {_format_steps(plan, segment.position)}" if number else ""
        dropped = sorted({*previous_shares} - {*shares} - {plan.names[source] for source in served.exhausted})
        dropped_note = f"; no longer read: {format_list(dropped, MAX_LISTED)}" if dropped else ""
        lines.append(f"mix    {share_list} of the sequences{since}{dropped_note}")
        previous_shares = shares
    if len(served.segments) > MAX_LISTED:
        lines.append(f"mix    {len(served.segments) - MAX_LISTED:,} later changes of the shares are not shown")
    if not is_exhaustion_known:
        lines.append(
            f"mix    exhausted={exhausted}: the first source to run out is known once the sequences are counted"
        )
    exhausted_sources = sorted((exhausted_at, source) for source, exhausted_at in served.exhausted.items())
    for exhausted_at, source in exhausted_sources[:MAX_LISTED]:
        consequence = "the run ends" if exhausted == "stop" else "the others take its share"
        lines.append(
            f"mix    {plan.names[source]} is exhausted after {_format_steps(plan, exhausted_at)}: {consequence}"
        )
    if exhausted == "redistribute" and served.has_ended and served.segments[-1][1] < end:
        done = _format_steps(plan, served.segments[-1][1])
        lines.append(f"mix    all sources are exhausted after {done}, and the run ends")
    return lines


def _format_steps(plan: Plan, position: int) -> str:
    return format_count(plan.steps_until(position), "step")
