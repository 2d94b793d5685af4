"""Plans of the inputs of a loader: stores, mixtures, plans and streams."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, cast

from batchloom.batches.assembly.augment import TokenizerSource
from batchloom.batches.loading.combined_store import CombinedStore
from batchloom.batches.loading.stream_steps import RawStream
from batchloom.core.errors import InputError, SettingsError, StateError
from batchloom.plan import Mixture, Plan, PlanSpec, SourceSpec
from batchloom.plan.order import SOURCE
from batchloom.store import Store
from batchloom.store.format import OBJECTIVES, find_generation
from batchloom.store.read import choose_default_overlong

LoaderData = Store | Mixture | Plan | RawStream


def require_open_stores(stores: Mapping[str, object]) -> dict[str, Store]:
    open_stores = {name: store for name, store in stores.items() if isinstance(store, Store)}
    for name, store in stores.items():
        if name not in open_stores:
            raise InputError(
                f"A Loader reads the tokens of open stores; source {name!r} is {type(store).__name__}. Give "
                "open_store(path)."
            )
    return open_stores


def get_first_store(stores: Mapping[str, object]) -> Store:
    """Return the first of a plan's stores, which share a tokenizer."""
    return next(iter(require_open_stores(stores).values()))


def find_tokenizer_source(data: LoaderData, plan: Plan) -> TokenizerSource:
    """Return the store or stream that names the tokenizer of the ids."""
    if isinstance(data, RawStream):
        # RawStream omits this member: isinstance() of a store would load its tokenizer.
        return cast("TokenizerSource", data)
    return get_first_store(plan.stores)


def make_plan_store(plan: Plan) -> Store | CombinedStore:
    """Return the plan's store, or a ``CombinedStore`` of several or with bans."""
    stores = require_open_stores(plan.stores)
    bans = any(segment.bans for segment in plan.segments)
    for store in stores.values():
        check_next_token_objective(store)
    is_single = plan.mixture is None and not bans
    return next(iter(stores.values())) if is_single else CombinedStore(stores, bans=bans)


def check_generation(store: Store, state: dict[str, Any], name: str = SOURCE) -> None:
    """Reject a state of another store generation; the plan checks all else."""
    try:
        saved_fingerprint = state["identity"]["sources"][name]["store"]
    except (KeyError, TypeError):
        return
    if saved_fingerprint == store.fingerprint or store.manifest is None or not store.location.on_disk:
        return
    newest = store.reader.read_manifest()
    number = find_generation(newest, store.split, saved_fingerprint, store.contents.media)
    if number is None:
        return
    # Raises GenerationError if the generation was compacted away.
    store.reader.read_manifest(number)
    raise StateError(
        f"The state was made on generation {number} of {store.location.name}, but generation "
        f"{store.location.generation} is open. Give open_store({store.location.name!r}, {store.split!r}, "
        f"generation={number}, removals={newest.generation}), which serves documents that were removed since as "
        "padding; without removals= they are trained."
    )


def check_next_token_objective(store: Store) -> None:
    """Reject a store for another objective than the next token."""
    if store.contents.objective:
        raise InputError(OBJECTIVES[store.contents.objective].describe_refusal(store.location.name))


def make_loader_plan(data: LoaderData, plan: PlanSpec | None, settings: Mapping[str, Any]) -> Plan:
    """Return the given plan or stream, or make a plan for a store or mixture.

    Args:
        data: what a ``Loader`` is given.
        plan: all settings of the data order; None to make them from ``settings``.
        settings: fields of ``PlanSpec`` that are given one by one.
    """
    if isinstance(data, Plan | RawStream):
        if given := [*(["plan"] if plan is not None else []), *_list_changed(settings)]:
            raise SettingsError([f"{name}: belongs to the plan, and a finished plan was given" for name in given])
        # A stream provides the members that all plans need: spec, steps and fingerprint.
        return cast("Plan", data)
    if not isinstance(data, (Store, Mixture)):
        raise InputError(
            f"Loader takes an open store, a Mixture, a Plan or a stream, not {type(data).__name__}; open a path with "
            "open_store(path)."
        )
    if plan is not None:
        if settings:
            raise SettingsError([f"{name}: is a field of the PlanSpec, which was given as plan" for name in settings])
        return Plan(data, plan)
    missing = [name for name in ("seq_len", "global_batch_size") if name not in settings]
    if missing:
        raise SettingsError([f"{name}: missing; a whole number of at least 1" for name in missing])
    if "overlong" not in settings and isinstance(data, Mixture):
        data = _with_default_overlong(data)
    overlong = choose_default_overlong(data) if isinstance(data, Store) else "split"
    return Plan(data, PlanSpec(**{"overlong": overlong, **settings}))


def _list_changed(settings: Mapping[str, Any]) -> list[str]:
    """Return the names of the settings that are not at their defaults."""
    defaults = {field.name: field.default for field in fields(PlanSpec)}
    return [name for name, value in settings.items() if value != defaults[name]]


def _with_default_overlong(mixture: Mixture) -> Mixture:
    """Return the mixture with each source's default overlong policy filled in."""
    sources = dict(mixture.sources)
    for name, store in mixture.stores.items():
        own = sources.get(name, SourceSpec())
        if isinstance(store, Store) and choose_default_overlong(store) == "drop" and own.overlong is None:
            sources[name] = replace(own, overlong="drop")
    return replace(mixture, sources=sources)
