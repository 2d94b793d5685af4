"""Resolution of a request to a plan: from stores, mixtures or a checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any

from batchloom.analysis.plan_questions.checkpoint_plan import (
    SavedPosition,
    read_checkpoint,
    rebuild_plan,
)
from batchloom.batches import Loader, PlanOptions, read_mixture
from batchloom.core.errors import InputError, SettingsError, StateError
from batchloom.core.fingerprint import fingerprint
from batchloom.core.settings import Setting
from batchloom.plan import Mixture, Plan, PlanSpec, parse_assumed_stores
from batchloom.plan.mixture import PlanStore
from batchloom.plan.order import SOURCE, AssumedStore
from batchloom.store import Store, open_store

# Settings allowed with a checkpoint: the length of the run, but nothing that determines its order.
_CHECKPOINT_SETTINGS = {"steps"}
_OPTIONS = {field.name for field in fields(PlanOptions)}
_OWN_DATA_KEY = "data"
_DATA_PANEL = "Data"
_NO_STORE = "store: missing; give a store, --mixture or (to plan) --assume"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """Data and settings of a plan to report on.

    Attributes:
        store: a store's folder, a prefix or a name of synthetic data.
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
            help="YAML file of a mixture, or PATH=WEIGHT,PATH=WEIGHT; used instead of a store.",
            panel=_DATA_PANEL,
        ),
    ] = None
    assume: str | None = None
    checkpoint: Annotated[
        Path | None,
        Setting(
            help="Folder of a run or checkpoint, or JSON file of a loader's state; its plan replaces the settings "
            "below.",
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


def resolve_plan(request: PlanRequest) -> tuple[Plan, SavedPosition | None]:
    """Return the requested plan, and the checkpoint it was made from.

    Raises:
        SettingsError: settings are missing, unknown or contradict each other; lists every problem.
        InputError, StoreError: there are no such stores.
        StateError: the checkpoint belongs to other stores; names each field that differs.
    """
    problems = _find_request_problems(request)
    if problems:
        raise SettingsError(problems)
    if request.checkpoint is not None:
        saved_position = read_checkpoint(request.checkpoint)
        _check_not_stream(saved_position)
        data_folder = saved_position.path.parent.parent.parent / _OWN_DATA_KEY
        if request.store is None and request.mixture is None:
            # A run that prepares its own data stores it next to its checkpoints.
            if not data_folder.is_dir():
                raise SettingsError([_NO_STORE])
            request = replace(request, store=str(data_folder))
        stores = _open_checkpoint_stores(request, saved_position)
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
        # A loader chooses defaults of its own, and the plan must be the one it would serve.
        options = PlanOptions(**{name: settings.pop(name) for name in _OPTIONS & settings.keys()})
        loader = Loader(data, **settings, plan=options, output="numpy", rank=0, world_size=1, prefetch=0)
        return loader.plan, None
    return Plan(data, PlanSpec(**settings)), None


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
    if request.assume is not None:
        return _parse_assumed(request.assume, request.mixture)
    if request.mixture is not None:
        return read_mixture(request.mixture)
    return open_store(request.store or "", request.split, generation=request.generation)


def _parse_assumed(text: str, mixture: str | None) -> AssumedStore | Mixture:
    stores = parse_assumed_stores(text)
    if mixture is not None:
        return Mixture(parse_weights(mixture), stores=stores)
    return next(iter(stores.values())) if len(stores) == 1 else Mixture("size", stores=stores)


def parse_weights(text: str) -> dict[str, float]:
    """Parse weights such as ``web=0.7,code=0.3``."""
    weights: dict[str, float] = {}
    for word in text.split(","):
        name, equals, weight = word.strip().rpartition("=")
        try:
            weights[name] = float(weight)
        except ValueError:
            equals = ""
        if not equals or not name:
            raise SettingsError([f"mixture: {word!r} is not NAME=WEIGHT"])
    return weights


def _open_checkpoint_stores(request: PlanRequest, saved_position: SavedPosition) -> dict[str, PlanStore]:
    """Open the stores of a checkpoint, in its generations if they are known."""
    source_entries = saved_position.state["identity"].get("sources", {})
    if request.mixture is not None:
        stores = read_mixture(request.mixture).stores
        return {name: _open_initial_generation(store, source_entries.get(name)) for name, store in stores.items()}
    if SOURCE not in source_entries:
        raise InputError(
            f"The run was on a mixture of {', '.join(source_entries)}; one store is given. Give --mixture with the "
            "run's file, "
            "or the paths of its stores."
        )
    store = open_store(request.store or "", request.split, generation=request.generation)
    return {
        SOURCE: store if request.generation is not None else _open_initial_generation(store, source_entries[SOURCE])
    }


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


def _open_initial_generation(store: PlanStore, source_entry: Mapping[str, Any] | None) -> PlanStore:
    """Open a store in the generation a run started on.

    Returns it unchanged if no generation of it is the one of the run.
    """
    if not isinstance(store, Store) or store.location.generation is None or source_entry is None:
        return store
    number = store.contents.find_generation(str(source_entry.get("store")))
    if number is None or number == store.location.generation:
        return store
    return open_store(store.location.address, store.split, **{**store.location.options, "generation": number})


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
    first = name = fingerprint(state["identity"])
    entries = []
    try:
        for number, edit in enumerate(state["edits"]):
            edit_fields = {key: value for key, value in edit.items() if key != "fingerprint"}
            name = fingerprint([name, edit_fields])
            if name != edit["fingerprint"]:
                raise StateError(
                    f"{saved_position.path}: edit {number} of the journal (step {edit['step']}) was changed by hand: "
                    "its fingerprint does not match its fields. Use the journal that was saved."
                )
            entries.append(make_journal_entry(edit))
    except (AttributeError, KeyError, TypeError) as error:
        raise StateError(f"{saved_position.path} holds no journal of edits ({error!r}).") from error
    if name != state.get("fingerprint"):
        raise StateError(
            f"{saved_position.path}: the journal does not lead to the plan's fingerprint "
            f"{state.get('fingerprint')!r}: an "
            "edit is missing. Use the journal that was saved."
        )
    return first, tuple(entries)
