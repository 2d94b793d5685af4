"""Plans to report on: of stores, mixtures or a checkpoint; without torch."""

import json
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from batchloom.batches import Loader, RowCosts, open_recorded_data, read_mixture, rebuild_mixture
from batchloom.batches.loading import (
    MAX_INLINE_POOLS,
    RawStream,
    get_open_store,
    list_table_folders,
    load_table,
    make_table_name,
    require_plan_feed,
    wait_for_table,
)
from batchloom.core.errors import InputError, InputMissingError, PlanError, SettingsError, StateError
from batchloom.core.files import describe_missing_path, read_json_object
from batchloom.core.fingerprint import find_broken_link, fingerprint
from batchloom.core.run_files import STATE_NAME, RunFiles, get_run_folder
from batchloom.core.settings import Setting, as_int, from_plain, quote_value, raise_problems
from batchloom.core.wording import format_count
from batchloom.plan import (
    Edit,
    Mixture,
    Plan,
    PlanSpec,
    PlanStore,
    check_world,
    deal_balanced,
    parse_assumed_stores,
    with_journal,
)
from batchloom.plan.order import SOURCE, AssumedStore, Costs, deal_in_order, sort_by_cost
from batchloom.plan.packing import MAX_STEPS
from batchloom.store import Store, open_store

_MAX_BYTES = 64 << 20
_SAVED_REMEDY = "Use the file as it was saved"

# Settings allowed with a checkpoint: the length of the run, but nothing that determines its order.
_CHECKPOINT_SETTINGS = {"steps"}
_DATA_PANEL = "Data"
_NO_STORE = "store: missing; give a store, --mixture or (to plan) --assume"

# Walking over more pools than this takes seconds, so the table is computed and cached instead.
_MAX_WALKED_POOLS = 128

Ints = NDArray[np.int64]
S = TypeVar("S", bound=PlanStore)


@dataclass(frozen=True, slots=True)
class SavedPosition:
    """Saved state; in a run's checkpoint also its step and the steps of the run."""

    path: Path
    state: Mapping[str, Any]
    step: int | None
    steps: int | None

    @property
    def run(self) -> RunFiles:
        """Files of the run, if this is the state of a run's checkpoint."""
        return RunFiles(get_run_folder(self.path.parent))


def read_checkpoint(path: Path) -> SavedPosition:
    """Read the state from a run folder (newest checkpoint), checkpoint or JSON file.

    Raises:
        InputMissingError: nothing exists there, or the run has no checkpoint yet.
        StateError: the content is damaged or not a state.
    """
    file = find_state_file(path)
    try:
        plain = _read_json_object(file)
    except StateError:
        # A run deletes old checkpoints after it wrote a new one.
        newest = find_state_file(path)
        if newest == file:
            raise
        file = newest
        plain = _read_json_object(newest)
    if "loader" in plain:
        checked_fields = {name: value for name, value in plain.items() if name != "check"}
        if plain.get("check") != fingerprint(checked_fields) or not isinstance(plain["loader"], dict):
            raise StateError(
                f"{file} was changed after it was written: its checksum does not match its fields. {_SAVED_REMEDY}."
            )
        state = plain["loader"]
        step = plain.get("step")
    else:
        state = plain
        step = None
    if not isinstance(state.get("identity"), dict) or "position" not in state:
        raise StateError(f"{file} holds no loader state. Give the value that state_dict() returned.")
    saved_position = SavedPosition(file, state, step, None)
    if step is None or not saved_position.run.description.is_file():
        return saved_position
    return replace(saved_position, steps=as_int(_read_json_object(saved_position.run.description).get("steps")))


def find_state_file(path: Path) -> Path:
    """Return the file with a state: of a run (newest checkpoint), or of a checkpoint.

    Raises:
        InputMissingError: nothing exists there, or the run has no checkpoint yet.
    """
    if path.is_file():
        return path
    if (path / STATE_NAME).is_file():
        return path / STATE_NAME
    run = RunFiles(path)
    if run.description.is_file():
        # A run may replace its only checkpoint between the listing of the folders and that of their files.
        for _ in range(3):
            state_files = [checkpoint / STATE_NAME for checkpoint in run.list_checkpoints()]
            if existing_files := [file for file in state_files if file.is_file()]:
                return existing_files[-1]
        raise InputMissingError(
            f"The run in {path} has no checkpoint yet (--save-interval sets how often one is made)."
        )
    if path.is_dir():
        raise InputMissingError(
            f"{path} is neither the folder of a run (with {run.description.name}) nor of a checkpoint (with "
            f"{STATE_NAME})."
        )
    remedy = "name a checkpoint, or the folder of a run"
    raise InputMissingError(describe_missing_path(str(path), remedy))


def _read_json_object(file: Path) -> dict[str, Any]:
    try:
        return read_json_object(file, _MAX_BYTES)
    except ValueError as error:
        raise StateError(f"{file} {error}. {_SAVED_REMEDY}.") from error


def rebuild_plan(saved_position: SavedPosition, stores: Mapping[str, PlanStore], steps: int | None) -> Plan:
    """Rebuild the plan of a checkpoint with its journal, and check the state.

    ``stores`` maps source names to stores; for a run on one store the name does not matter. ``steps`` is
    used if the checkpoint does not record the steps of the run. Raises ``StateError`` if the stores are not those
    of the run; it names each field that differs, and the stores that would continue it.
    """
    identity = saved_position.state["identity"]
    total = saved_position.steps if steps is None else steps
    try:
        # A requested and a chosen block give the same order, but different plans for later generations; try both.
        block = identity["spec"]["block"]
        plans = [
            Plan(_make_plan_data(identity, stores), _make_plan_spec(identity, total, block=number))
            for number in ([block] if "mixture" in identity else [0, block])
        ]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, (PlanError, SettingsError)):
            raise
        raise StateError(f"{saved_position.path} does not identify a plan ({error!r}). {_SAVED_REMEDY}.") from error
    matching_plans = [plan for plan in plans if plan.identity == identity]
    plan = with_journal((matching_plans or plans)[0], saved_position.state)
    plan.resume(dict(saved_position.state))
    return plan


def _make_plan_spec(identity: Mapping[str, Any], steps: int | None, *, block: int) -> PlanSpec:
    spec = identity["spec"]
    settings = {**spec, "block": block}
    if settings.get("epochs") is not None or settings.get("steps") is not None:
        # The order of rows grouped by length depends on the end of the run.
        return from_plain(PlanSpec, settings)
    if steps is None and "mixture" in identity:
        steps = identity["mixture"].get("steps") or _choose_endless_steps(settings)
    return from_plain(PlanSpec, {**settings, "steps": steps or _choose_endless_steps(settings)})


def _choose_endless_steps(settings: Mapping[str, Any]) -> int:
    """Return the largest number of steps, for a run of unknown length."""
    most = min(MAX_STEPS, (1 << 62) // int(settings["global_batch_size"]))
    return most - most % max(int(settings.get("group_by_length", 0)), 1)


def is_endless(plan: Plan) -> bool:
    """Return whether a plan has no given length."""
    spec = plan.spec
    names = ("global_batch_size", "group_by_length")
    return spec.steps == _choose_endless_steps({name: getattr(spec, name) for name in names})


def choose_last_step(plan: Plan, done_steps: int | None) -> int | None:
    """Return the last step done of a plan without length; None for other plans."""
    return max((done_steps or 0) - 1, 0) if is_endless(plan) else None


def _make_plan_data(identity: Mapping[str, Any], stores: Mapping[str, PlanStore]) -> PlanStore | Mixture:
    source_entries = identity["sources"]
    if identity.get("mixture") is None:
        if len(stores) != 1:
            raise StateError(
                f"The run was on one store ({source_entries[SOURCE]['documents']:,} documents, fingerprint "
                f"{source_entries[SOURCE]['store'][:12]}); {len(stores)} are given. Give that store."
            )
        return next(iter(stores.values()))
    missing = [name for name in source_entries if name not in stores]
    if missing:
        prints = ", ".join(f"{name} (fingerprint {source_entries[name]['store'][:12]})" for name in missing)
        raise StateError(
            f"The run was on a mixture, and no store is given for {prints}; the given stores are "
            f"{', '.join(stores)}. Name every store: --mixture with the run's file, or with the paths of its stores."
        )
    return rebuild_mixture(identity, stores)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """Data and settings of a plan to report on.

    Attributes:
        store: a store's folder, a prefix or a name of synthetic data; or a run's folder.
        mixture: a mixture as ``read_mixture`` accepts it; with ``assume``, ``NAME=WEIGHT,...`` over its names.
        assume: sources that do not exist, as ``parse_assumed_stores`` accepts them.
        checkpoint: a run's folder, a checkpoint's, or a JSON file of a loader's state.
        split: the subset.
        generation: generation of the store; None for the newest, or the one of the checkpoint.
        settings: the given settings of ``PlanSpec``.
    """

    store: str | None = None
    mixture: Annotated[
        str | None,
        Setting(
            help="YAML file of a mixture, or PATH=WEIGHT,PATH=WEIGHT (a PATH alone waits for an edit); replaces STORE.",
            panel=_DATA_PANEL,
        ),
    ] = None
    assume: str | None = None
    checkpoint: Annotated[
        Path | None,
        Setting(
            help="Folder of a run or checkpoint, or JSON file of a loader's state, whose plan is used.",
            panel=_DATA_PANEL,
        ),
    ] = None
    split: Annotated[str, Setting(help="Subset: train, val or test.", panel=_DATA_PANEL)] = "train"
    generation: Annotated[
        int | None,
        Setting(
            help="Generation of the store.",
            shown_default="the newest, or that of the checkpoint",
            panel=_DATA_PANEL,
        ),
    ] = None
    settings: Annotated[Mapping[str, Any], PlanSpec] = field(default_factory=dict)


def resolve_plan(request: PlanRequest, step: int | None = None) -> tuple[Plan, SavedPosition | None]:
    """Return the requested plan, and the checkpoint it was made from.

    Args:
        request: data and settings of the plan.
        step: step of a run that is reported on: what was removed later was trained in it.

    Raises:
        SettingsError: settings are missing, unknown or contradict each other; lists every problem.
        InputError, StoreError: there are no such stores.
        StateError: the checkpoint belongs to other stores; names each field that differs.
    """
    if request.checkpoint is None and request.store is not None and RunFiles(Path(request.store)).description.is_file():
        request = replace(request, store=None, checkpoint=Path(request.store))
    problems = _find_request_problems(request)
    if problems:
        raise SettingsError(problems)
    if request.checkpoint is not None:
        run = RunFiles(request.checkpoint)
        if run.description.is_file() and not run.list_checkpoints():
            return resolve_first_plan(request), None
        saved_position = read_checkpoint(request.checkpoint)
        _check_not_stream(saved_position)
        sources = saved_position.state["identity"].get("sources", {})
        names = [name for name in sources if name != SOURCE]
        run_data = _find_run_data(request, saved_position.run, saved_position.path, names)
        removals = _find_removals(saved_position, step)
        stores = _open_checkpoint_stores(request, run_data, saved_position, removals)
        return rebuild_plan(saved_position, stores, request.settings.get("steps")), saved_position
    data = _open_request_data(request)
    missing = [
        f"{name}: missing; give a whole number of at least 1"
        for name in ("seq_len", "global_batch_size")
        if request.settings.get(name) is None
    ]
    if missing:
        raise SettingsError(missing)
    settings = {name: value for name, value in request.settings.items() if value is not None}
    if isinstance(data, Store) or (isinstance(data, Mixture) and request.assume is None):
        return _make_loader_plan(data, settings), None
    return Plan(data, PlanSpec(**settings)), None


@final
class MissingDataError(SettingsError):
    """A run whose folder does not hold the path of its data."""

    @property
    def option(self) -> str:
        """Setting that names the data: ``store`` or ``mixture``."""
        return self.problems[0].partition(":")[0]


def _make_missing_data_error(path: Path, sources: Collection[str]) -> MissingDataError:
    """Return the error of a run without the path of its store or ``sources``."""
    name = "mixture" if sources else "store"
    remedy = f"--mixture with the stores {', '.join(sources)}" if sources else "the store"
    return MissingDataError([f"{name}: missing; {path} does not hold the path of its data: give {remedy} of the run"])


def _make_loader_plan(data: Store | Mixture, settings: Mapping[str, Any]) -> Plan:
    """Return the plan that a loader would serve, which chooses defaults of its own."""
    return Loader(data, **settings, output="numpy", rank=0, world_size=1, prefetch=0).plan


def resolve_first_plan(request: PlanRequest) -> Plan:
    """Return the plan that a run begins with, from the settings in its folder.

    It is for a run without a checkpoint.

    Args:
        request: the folder of the run as ``checkpoint``, and its store or mixture.

    Raises:
        SettingsError: the data of the run are not given.
        StateError: ``run.json`` is no JSON, or the data are not those of the run.
        InputError, StoreError: there are no such stores.
    """
    files = RunFiles(request.checkpoint or Path())
    run = _read_json_object(files.description)
    recorded = run.get("data")
    order = run.get("order")
    if not isinstance(recorded, dict) or not isinstance(order, dict):
        raise InputError(f"{files.description} does not say which data the run is on. {_SAVED_REMEDY}.")
    found = _find_run_data(request, files, files.path, recorded.get("sources", {}))
    data: Store | Mixture
    if isinstance(found, Mixture):
        entries = recorded.get("sources", {})
        stores = {name: _open_initial_generation(store, entries.get(name)) for name, store in found.stores.items()}
        data = replace(found, stores=stores)
    else:
        data = open_store(found, request.split, generation=request.generation)
        if request.generation is None:
            data = _open_initial_generation(data, {"store": recorded.get("fingerprint")})
    settings = {name: run.get(name) for name in ("seq_len", "global_batch_size", "steps", "seed")}
    settings |= {name: order.get(name) for name in ("packing", "overlong", "shuffle")}
    plan = _make_loader_plan(data, settings)
    expected = recorded if "mixture" in recorded else {"sources": {SOURCE: {"store": recorded.get("fingerprint")}}}
    names = [name for name in ("mixture", "sources") if not _includes(plan.identity.get(name), expected.get(name))]
    if names:
        raise StateError(
            f"The given data are not those of the run in {files.path}: {' and '.join(names)} differ from its "
            f"{files.description.name}. Give the store or the mixture that the run was started on."
        )
    return plan


def _includes(actual: object, expected: object) -> bool:
    """Return whether a value holds every key of an expected one, with equal values."""
    if isinstance(actual, Mapping) and isinstance(expected, Mapping):
        return all(name in actual and _includes(actual[name], value) for name, value in expected.items())
    return expected is None or actual == expected


def apply_logged_edits(plan: Plan, entries: Iterable[Mapping[str, Any]]) -> Plan:
    """Apply the edits in a run's log that a plan does not have yet.

    Raises:
        PlanError, SettingsError, TypeError: an edit cannot be applied.
    """
    for entry in entries:
        changes = {name: value for name, value in entry.items() if name != "fingerprint"}
        if entry.get("fingerprint") == fingerprint([plan.fingerprint, changes]):
            changes.pop("added", None)
            plan = plan.edited(Edit(**changes))
    return plan


def _find_request_problems(request: PlanRequest) -> list[str]:
    data_options = [n for n in ("store", "mixture", "assume") if getattr(request, n) is not None]
    problems = []
    if not data_options and request.checkpoint is None:
        problems.append(_NO_STORE)
    if len(data_options) > 1 and data_options != ["mixture", "assume"]:
        problems.append(f"{data_options[1]}: {data_options[0]} and {data_options[1]} exclude each other; give one")
    if request.checkpoint is None:
        return problems
    if request.assume is not None:
        problems.append("assume: a checkpoint belongs to existing stores; leave it out")
    setting_names = [name for name, value in request.settings.items() if value is not None]
    return problems + [
        f"{name}: the checkpoint sets it; leave it out" for name in setting_names if name not in _CHECKPOINT_SETTINGS
    ]


def _open_request_data(request: PlanRequest) -> PlanStore | Mixture:
    if request.assume is None:
        if request.mixture is not None:
            return read_mixture(request.mixture)
        return open_store(request.store or "", request.split, generation=request.generation)
    stores = parse_assumed_stores(request.assume)
    if request.mixture is not None:
        return Mixture(parse_weights(request.mixture, "mixture"), stores=stores)
    return next(iter(stores.values())) if len(stores) == 1 else Mixture("size", stores=stores)


def parse_weights(text: str, path: str) -> dict[str, float]:
    """Parse weights such as ``web=0.7,code=0.3``; problems begin with ``path``."""
    weights: dict[str, float] = {}
    problems = []
    for word in text.split(","):
        name, _, weight = word.strip().rpartition("=")
        try:
            number = float(weight)
        except ValueError:
            number = math.nan
        if not name or not number >= 0:
            problems.append(f"{path}: {quote_value(word)} is not NAME=WEIGHT")
        elif name in weights:
            problems.append(f"{path}: {name} is given twice; give it one weight")
        weights[name] = number
    raise_problems(problems)
    return weights


def _find_run_data(request: PlanRequest, run: RunFiles, path: Path, sources: Collection[str]) -> str | Mixture:
    """Return the data of a run: as requested, its own, or what it recorded."""
    if request.mixture is not None:
        return read_mixture(request.mixture)
    # A run that prepares its own data stores it next to its checkpoints.
    if request.store is not None or run.data.is_dir():
        return request.store or str(run.data)
    recorded = _read_json_object(run.description).get("data") if run.description.is_file() else None
    data = open_recorded_data(recorded) if isinstance(recorded, dict) else None
    if data is None:
        raise _make_missing_data_error(path, sources)
    return data


def _open_checkpoint_stores(
    request: PlanRequest, data: str | Mixture, saved_position: SavedPosition, removals: Mapping[str, int | None]
) -> dict[str, PlanStore]:
    """Open the stores of a checkpoint, in its generations if they are known.

    ``removals`` are those in force, by source; without an entry those of the newest generation.
    """
    source_entries = dict(saved_position.state["identity"].get("sources", {}))
    for edit in saved_position.state.get("edits", ()):
        source_entries |= edit.get("added") or {}
    if isinstance(data, Mixture):
        return {
            name: _open_initial_generation(store, source_entries.get(name), removals.get(name, _NEWEST))
            for name, store in data.stores.items()
        }
    if SOURCE not in source_entries:
        raise InputError(
            f"The run was on a mixture of {', '.join(source_entries)}; one store is given. Give --mixture with the "
            "run's file, or the paths of its stores."
        )
    store = open_store(data, request.split, generation=request.generation)
    if request.generation is None:
        store = _open_initial_generation(store, source_entries[SOURCE], removals.get(SOURCE, _NEWEST))
    return {SOURCE: store}


def _find_removals(saved_position: SavedPosition, step: int | None) -> dict[str, int | None]:
    """Return the removals in force in a step of a run, by source.

    They are those of a generation, None if there were none. A step to come has no entries.
    """
    log = saved_position.run.log
    if step is None or saved_position.step is None or step >= saved_position.step or not log.is_file():
        return {}
    data: Mapping[str, Any] = {}
    with log.open(encoding="utf-8") as lines:
        for line in lines:
            # A run is resumed at a checkpoint, and may do steps again: the last start before a step counts.
            if line.startswith('{"kind": "start"') and (start := json.loads(line))["step"] <= step:
                data = start["run"]["data"]
    places = data.get("places") or {SOURCE: data}
    return {name: place.get("removals") for name, place in places.items()}


def _check_not_stream(saved_position: SavedPosition) -> None:
    """Raise ``InputError`` for a run on a stream, which has no plan to report on."""
    identity = saved_position.state["identity"]
    if "lanes_version" in identity:
        verb = "was on" if "inputs" in identity else "repeats"
        raise InputError(
            f"The run of {saved_position.path} {verb} a stream: streams take no edits, and explain, when and plan do "
            "not support them. Use a run on prepared data: batchloom prepare, or the store that a stream writes "
            "(--keep)."
        )


# The removals of the newest generation of a store.
_NEWEST = -1


def _open_initial_generation(store: S, source_entry: Mapping[str, Any] | None, removals: int | None = _NEWEST) -> S:
    """Open a store in the generation a run started on, less some removals.

    Returns it unchanged if no generation of it is the one of the run.
    """
    if not isinstance(store, Store) or store.location.generation is None or source_entry is None:
        return store
    number = store.contents.find_generation(str(source_entry.get("store")))
    if number is None or number == store.location.generation:
        return store
    newest = store.location.generation
    options = {**store.location.options, "generation": number, "removals": newest if removals == _NEWEST else removals}
    opened: S = store.location.open(store.location.address, store.split, **options)
    return opened


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """An edit of a run.

    Attributes:
        step: first step it applies to.
        changes: changed values, by the name of the setting.
        note: reason for the edit.
        fingerprint: fingerprint of the plan after it.
    """

    step: int
    changes: Mapping[str, Any]
    note: str
    fingerprint: str

    def __str__(self) -> str:
        return f"after {format_count(self.step, 'step')}: {self.describe_changes()}"

    def describe_changes(self) -> str:
        """Describe the changed values, and the note in parentheses."""
        change_texts = []
        for name, value in self.changes.items():
            if name == "ban":
                change_texts += [
                    f"ban {format_count(len(numbers), 'document')} of {source}" for source, numbers in value.items()
                ]
            elif name == "skip":
                change_texts.append(f"skip {format_count(value, 'step')}")
            else:
                change_texts.append(f"{name} {_format_change_value(value)}")
        return ", ".join(change_texts) + (f" ({self.note})" if self.note else "")


def _format_change_value(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    parts = (f"{key}={_format_change_value(item)}" for key, item in value.items())
    return "{" + ", ".join(parts) + "}"


def make_journal_entry(edit: Mapping[str, Any]) -> JournalEntry:
    """Return the journal entry of an edit."""
    changes = {k: v for k, v in edit.items() if k not in ("step", "note", "added", "fingerprint")}
    return JournalEntry(edit["step"], changes, str(edit.get("note", "")), edit["fingerprint"])


def read_journal(saved_position: SavedPosition) -> tuple[str, tuple[JournalEntry, ...]]:
    """Return the fingerprint of a run's first plan, and its edits; needs no store.

    Raises:
        InputError: the run was on a stream.
        StateError: the journal was changed by hand; names the edit.
    """
    _check_not_stream(saved_position)
    state = saved_position.state
    first = fingerprint(state["identity"])
    try:
        number = find_broken_link(state["identity"], state["edits"])
        if number is not None:
            raise StateError(
                f"{saved_position.path}: edit {number} of the journal (step {state['edits'][number]['step']}) was "
                "changed by hand: its fingerprint does not match its fields. Use the journal that was saved."
            )
        entries = tuple(map(make_journal_entry, state["edits"]))
    except (AttributeError, KeyError, TypeError) as error:
        raise StateError(f"{saved_position.path} holds no journal of edits ({error!r}).") from error
    if (entries[-1].fingerprint if entries else first) != state.get("fingerprint"):
        raise StateError(
            f"{saved_position.path}: the journal does not lead to the plan's fingerprint "
            f"{state.get('fingerprint')!r}: an edit is missing. Use the journal that was saved."
        )
    return first, entries


def make_data_label(plan: Plan) -> dict[str, str]:
    """Return ``source``: ``assumed`` or ``synthetic``; an empty dict for real data."""
    stores = plan.stores.values()
    if any(isinstance(store, AssumedStore) for store in stores):
        return {"source": "assumed"}
    if any(isinstance(store, Store) and store.contents.synthetic for store in stores):
        return {"source": "synthetic"}
    return {}


def adopt_tables(plan: Plan) -> bool:
    """Adopt the cached tables of a plan's sources; return whether all have one."""
    for era, numbers in enumerate(plan.orders.weighted_sources_by_era):
        orders = [plan.orders.order(number, era) for number in numbers]
        for order in orders:
            if not order.counts.is_complete and isinstance(order.store, Store):
                load_table(order)
        # The position at which an edit packs again follows from the counts before it.
        if not all(order.counts.is_complete for order in orders):
            return False
    return True


def ensure_tables(plan: Plan) -> None:
    """Load or compute the counts of all pools; progress is logged to ``batchloom``.

    Computed tables of stores on disk are cached.
    """
    for era, numbers in enumerate(plan.orders.weighted_sources_by_era):
        for number in numbers:
            order = plan.orders.order(number, era)
            if order.counts.is_complete:
                continue
            if order.pools.count <= MAX_INLINE_POOLS or not isinstance(order.store, Store):
                order.counts.count_all()
            else:
                wait_for_table(order)


def ensure_tables_for(plan: Plan, position: int) -> None:
    """Prepare to find a position: walk to a near one, use tables for a distant one."""
    if adopt_tables(plan):
        return
    orders = [plan.orders.order(number) for number in plan.orders.weighted_sources]
    if all(order.pools.count <= MAX_INLINE_POOLS for order in orders):
        return
    pools = sum(order.pools.count for order in orders)
    tokens = sum(order.store.tokens for order in orders) / pools
    # Positions from the nearest known pool to the requested one.
    near = position
    if len(plan.names) == 1:
        near -= max((cursor.before for cursor in orders[0].anchors if cursor.before <= position), default=0)
    if near * plan.spec.seq_len / max(tokens, 1) > _MAX_WALKED_POOLS:
        ensure_tables(plan)


def write_tables(plan: Plan) -> tuple[Path, ...]:
    """Count the sequences of every pool and cache the tables; progress is logged.

    Returns:
        Paths of the table files.

    Raises:
        InputError: a source has only lengths.
        StoreError: no folder for the tables is writable.
    """
    table_files = []
    for era, numbers in enumerate(plan.orders.weighted_sources_by_era):
        for number in numbers:
            order = plan.orders.order(number, era)
            folders = list_table_folders(get_open_store(order))
            if not load_table(order):
                wait_for_table(order)
            name = make_table_name(order)
            table_files += [folder / name for folder in folders if (folder / name).is_file()][:1]
    return tuple(dict.fromkeys(table_files))


def get_plan(data: Plan | Loader) -> Plan:
    plan: object = data.plan if isinstance(data, Loader) else data
    if isinstance(plan, RawStream):
        raise PlanError(
            "A stream cannot be used with explain or when: its steps come one after the other. Make a plan of pools "
            "over prepared data: batchloom prepare, or the store of stream(keep=FOLDER)."
        )
    if isinstance(data, Loader):
        return data.plan
    if not isinstance(data, Plan):
        raise TypeError(
            f"Give a Plan or a Loader, not {type(data).__name__}: explain(Loader(store, seq_len=..., "
            "global_batch_size=...), step)"
        )
    return data


def assign_step_ranks(data: Plan | Loader, step: int, world_size: int, *, balance: bool = False) -> Ints:
    """Return the data-parallel rank of each row of a step, int64 [global_batch_size].

    Args:
        data: a plan, or a loader, whose ``balance`` and ``uneven`` apply.
        step: the step.
        world_size: number of data-parallel ranks.
        balance: assign the rows of a plan by their costs.

    Raises:
        PlanError: the world size does not divide the step.
    """
    plan = get_plan(data)
    start, stop = plan.positions_of(step)
    size = stop - start
    uneven = data.spec.uneven if isinstance(data, Loader) else "refuse"
    check_world(size, 0, world_size, uneven)
    if world_size > 1 and (costs := _measure_balanced_costs(data, step, balance=balance)) is not None:
        return deal_balanced(costs, world_size)
    return deal_in_order(plan.spec.lanes, size, world_size)


def sort_by_rank(data: Plan | Loader, step: int, row_ranks: Ints, *, balance: bool = False) -> Ints:
    """Return the rows of a step rank by rank, those of each rank in batch order.

    Args:
        data: a plan, or a loader.
        step: the step.
        row_ranks: rank of each row, int64 [global_batch_size].
        balance: as for :func:`assign_step_ranks`.
    """
    if row_ranks.any() and (costs := _measure_balanced_costs(data, step, balance=balance)) is not None:
        order = sort_by_cost(costs)
        return order[np.argsort(row_ranks[order], kind="stable")]
    return np.argsort(row_ranks, kind="stable")


def _measure_balanced_costs(data: Plan | Loader, step: int, *, balance: bool) -> Costs | None:
    """Return the costs by which rows are assigned to ranks; None without balance."""
    plan = get_plan(data)
    row_costs = RowCosts()
    if isinstance(data, Loader):
        balance = data.spec.balance
        row_costs = require_plan_feed(data.feed, step).costs
    return row_costs.of(plan, plan.rows(*plan.positions_of(step))) if balance else None


def resolve_world(data: Plan | Loader, rank: int | None, world_size: int | None) -> tuple[int | None, int]:
    """Return the data-parallel rank (None for all) and world size of a request."""
    ranks = as_int(world_size)
    number = as_int(rank)
    problems = [
        f"{name}: {quote_value(value)} is not a whole number of at least {least}"
        for name, value, parsed_value, least in (
            ("world_size", world_size, ranks, 1),
            ("rank", rank, number, 0),
        )
        if value is not None and (parsed_value is None or parsed_value < least)
    ]
    own = data.spec.mesh.get_placement(data.spec.rank, data.spec.world_size) if isinstance(data, Loader) else None
    if rank is not None and world_size is None and own is None:
        problems.append("world_size: missing; a rank needs the number of ranks")
    if problems:
        raise SettingsError(problems)
    ranks = ranks or (own.world_size if own else 1)
    if number is not None and number >= ranks:
        raise PlanError(f"rank {number} of world_size {ranks} does not exist; ranks run from 0 to {ranks - 1}.")
    return number, ranks
