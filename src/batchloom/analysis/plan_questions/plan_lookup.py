"""From what somebody asks about to a plan: a store, a mixture, what is only assumed, or a checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from batchloom.analysis.plan_questions.checkpoint_plan import (
    SavedPosition,
    read_checkpoint,
    rebuild_plan,
)
from batchloom.batches import Loader, PlanOptions, read_mixture
from batchloom.core.errors import InputError, SettingsError, StateError
from batchloom.core.fingerprint import fingerprint
from batchloom.plan import Mixture, Plan, PlanSpec, parse_assumed_stores
from batchloom.plan.mixture import PlanStore
from batchloom.plan.order import SOURCE, AssumedStore
from batchloom.store import Store, open_store

# With a checkpoint: how long the run is, and nothing that decides its order.
_CHECKPOINT_SETTINGS = {"steps"}
_OPTIONS = {field.name for field in fields(PlanOptions)}
_OWN_DATA_KEY = "data"
_NO_STORE = "store: missing; give a store, --mixture or (to plan) --assume"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What a question is about.

    Attributes:
        store: a store's folder, a prefix or a name of synthetic data.
        mixture: a mixture as ``read_mixture`` reads it; with ``assume``, ``NAME=WEIGHT,...`` over its names.
        assume: sources that do not exist, as ``parse_assumed_stores`` reads them.
        checkpoint: a run's folder, a checkpoint's, or a JSON file of a loader's state.
        split: the subset.
        generation: of the store; None for the newest, or the one that the checkpoint was made on.
        settings: those of ``PlanSpec`` that were given.
    """

    store: str | None = None
    mixture: str | None = None
    assume: str | None = None
    checkpoint: Path | None = None
    split: str = "train"
    generation: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


def resolve_plan(asked: PlanRequest) -> tuple[Plan, SavedPosition | None]:
    """The plan that is asked about, and the checkpoint it was made from.

    Raises:
        SettingsError: settings that are missing, unknown or contradict each other; every problem.
        InputError, StoreError: there are no such stores.
        StateError: the checkpoint is of other stores; names each field that differs.
    """
    problems = _find_request_problems(asked)
    if problems:
        raise SettingsError(problems)
    if asked.checkpoint is not None:
        found = read_checkpoint(asked.checkpoint)
        _check_not_stream(found)
        own = found.place.parent.parent.parent / _OWN_DATA_KEY
        if asked.store is None and asked.mixture is None:
            # A run that prepares its data has it beside its checkpoints.
            if not own.is_dir():
                raise SettingsError([_NO_STORE])
            asked = replace(asked, store=str(own))
        stores = _open_checkpoint_stores(asked, found)
        return rebuild_plan(found, stores, asked.settings.get("steps")), found
    data = _open_request_data(asked)
    missing = [
        f"{name}: missing; a whole number of at least 1"
        for name in ("seq_len", "global_batch_size")
        if asked.settings.get(name) is None
    ]
    if missing:
        raise SettingsError(missing)
    given = {name: value for name, value in asked.settings.items() if value is not None}
    if isinstance(data, Store) or (isinstance(data, Mixture) and asked.assume is None):
        # What a loader of these settings would serve, whatever it chooses by itself.
        options = PlanOptions(**{name: given.pop(name) for name in _OPTIONS & given.keys()})
        loader = Loader(
            data, **given, plan=options, output="numpy", rank=0, world_size=1, prefetch=0
        )
        return loader.plan, None
    return Plan(data, PlanSpec(**given)), None


def _find_request_problems(asked: PlanRequest) -> list[str]:
    named = [n for n in ("store", "mixture", "assume") if getattr(asked, n) is not None]
    problems = []
    if not named and asked.checkpoint is None:
        problems.append(_NO_STORE)
    if len(named) > 1 and named != ["mixture", "assume"]:
        problems.append(f"{named[1]}: {named[0]} and {named[1]} exclude each other; give one")
    if asked.checkpoint is None:
        return problems
    if asked.assume is not None:
        problems.append("assume: a checkpoint is of stores that exist")
    given = [name for name, value in asked.settings.items() if value is not None]
    return problems + [
        f"{name}: the checkpoint says so; leave it out"
        for name in given
        if name not in _CHECKPOINT_SETTINGS
    ]


def _open_request_data(asked: PlanRequest) -> PlanStore | Mixture:
    if asked.assume is not None:
        return _parse_assumed(asked.assume, asked.mixture)
    if asked.mixture is not None:
        return read_mixture(asked.mixture)
    return open_store(asked.store or "", asked.split, generation=asked.generation)


def _parse_assumed(text: str, mixture: str | None) -> AssumedStore | Mixture:
    stores = parse_assumed_stores(text)
    if mixture is not None:
        return Mixture(parse_weights(mixture), stores=stores)
    return next(iter(stores.values())) if len(stores) == 1 else Mixture("size", stores=stores)


def parse_weights(text: str) -> dict[str, float]:
    """The weights in ``web=0.7,code=0.3``.

    Raises:
        SettingsError: there are none.
    """
    found: dict[str, float] = {}
    for word in text.split(","):
        name, equals, weight = word.strip().rpartition("=")
        try:
            found[name] = float(weight)
        except ValueError:
            equals = ""
        if not equals or not name:
            raise SettingsError([f"mixture: {word!r} is no NAME=WEIGHT"])
    return found


def _open_checkpoint_stores(asked: PlanRequest, found: SavedPosition) -> dict[str, PlanStore]:
    """The stores a checkpoint is asked about with, in the generations it was made on where that can be told."""
    told = found.state["identity"].get("sources", {})
    if asked.mixture is not None:
        stores = read_mixture(asked.mixture).stores
        return {
            name: _open_initial_generation(store, told.get(name)) for name, store in stores.items()
        }
    if SOURCE not in told:
        raise InputError(
            f"The run was on a mixture of {', '.join(told)}; one store is given. Give --mixture with the run's file, "
            "or the paths of its stores."
        )
    store = open_store(asked.store or "", asked.split, generation=asked.generation)
    return {
        SOURCE: store
        if asked.generation is not None
        else _open_initial_generation(store, told[SOURCE])
    }


def _check_not_stream(found: SavedPosition) -> None:
    """Refuse what a run on a stream cannot be asked.

    Raises:
        InputError: says what can be asked instead.
    """
    identity = found.state["identity"]
    if "lanes_version" in identity:
        verb = "was on" if "inputs" in identity else "repeats"
        raise InputError(
            f"The run of {found.place} {verb} a stream: it takes no edits, and explain, when and plan cannot be asked "
            "of it. They can of a run on prepared data: batchloom prepare, or the store that a stream keeps (--keep)."
        )


def _open_initial_generation(store: PlanStore, told: Mapping[str, Any] | None) -> PlanStore:
    """A store in the generation a run was begun on; as it is where it never was what the run was on."""
    if not isinstance(store, Store) or store.location.generation is None or told is None:
        return store
    number = store.contents.find_generation(str(told.get("store")))
    if number is None or number == store.location.generation:
        return store
    return open_store(
        store.location.address, store.split, **{**store.location.options, "generation": number}
    )


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """An edit of a run.

    Attributes:
        step: the first it holds for.
        changes: what changes, by the name of the setting.
        note: why.
        fingerprint: of the plan after it.
    """

    step: int
    changes: Mapping[str, Any]
    note: str
    fingerprint: str


def make_journal_entry(edit: Mapping[str, Any]) -> JournalEntry:
    """An edit as a journal has it."""
    changes = {k: v for k, v in edit.items() if k not in ("step", "note", "added", "fingerprint")}
    return JournalEntry(edit["step"], changes, str(edit.get("note", "")), edit["fingerprint"])


def read_journal(found: SavedPosition) -> tuple[str, tuple[JournalEntry, ...]]:
    """Fingerprint of the plan a run began with, and the edits since; needs no store.

    Raises:
        InputError: the run was on a stream.
        StateError: the journal was changed by hand; names the edit.
    """
    _check_not_stream(found)
    state = found.state
    first = name = fingerprint(state["identity"])
    entries = []
    try:
        for number, edit in enumerate(state["edits"]):
            told = {key: value for key, value in edit.items() if key != "fingerprint"}
            name = fingerprint([name, told])
            if name != edit["fingerprint"]:
                raise StateError(
                    f"{found.place}: edit {number} of the journal (step {edit['step']}) was changed by hand: its "
                    "fingerprint does not follow from it. Use the journal that was saved."
                )
            entries.append(make_journal_entry(edit))
    except (AttributeError, KeyError, TypeError) as error:
        raise StateError(f"{found.place} holds no journal of edits ({error!r}).") from error
    if name != state.get("fingerprint"):
        raise StateError(
            f"{found.place}: the journal does not lead to the plan's fingerprint {state.get('fingerprint')!r}: an "
            "edit is missing. Use the journal that was saved."
        )
    return first, tuple(entries)
