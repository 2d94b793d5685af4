"""Reconstruction of a plan from a checkpoint and its stores, without torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchloom.core.errors import InputMissingError, PlanError, SettingsError, StateError
from batchloom.core.files import describe_missing_path, describe_os_error, read_regular_file
from batchloom.core.fingerprint import fingerprint
from batchloom.core.settings import from_plain
from batchloom.plan import Mixture, Plan, PlanSpec, SourceSpec, Stage, with_journal
from batchloom.plan.mixture import PlanStore
from batchloom.plan.order import SOURCE
from batchloom.plan.packing import MAX_STEPS, strategy_from_identity

_STATE_FILE, _RUN_FILE = "state.json", "run.json"
_MAX_BYTES = 64 << 20
_SAVED_REMEDY = "Use the file as it was saved"


@dataclass(frozen=True, slots=True)
class SavedPosition:
    """A saved position.

    Attributes:
        path: the file it was read from.
        state: state of the loader, as returned by ``state_dict``.
        step: number of completed steps; None if only the state is known.
        steps: steps of the complete run; None if they are not recorded.
    """

    path: Path
    state: Mapping[str, Any]
    step: int | None
    steps: int | None


def read_checkpoint(path: Path) -> SavedPosition:
    """Read the state from a run folder (newest checkpoint), checkpoint or JSON file.

    Raises:
        InputMissingError: nothing exists there, or the run has no checkpoint yet.
        StateError: the content is damaged or not a state.
    """
    file = _find_state_file(path)
    plain = _read_json_object(file)
    if "loader" in plain:
        checked_fields = {name: value for name, value in plain.items() if name != "check"}
        if plain.get("check") != fingerprint(checked_fields) or not isinstance(plain["loader"], dict):
            raise StateError(
                f"{file} was changed after it was written: its checksum does not match its fields. {_SAVED_REMEDY}."
            )
        state, step = plain["loader"], plain.get("step")
    else:
        state, step = plain, None
    if not isinstance(state.get("identity"), dict) or "position" not in state:
        raise StateError(f"{file} holds no loader state. Give the value that state_dict() returned.")
    run = file.parent.parent.parent / _RUN_FILE
    steps = _read_json_object(run).get("steps") if step is not None and run.is_file() else None
    return SavedPosition(file, state, step, steps if isinstance(steps, int) else None)


def _find_state_file(path: Path) -> Path:
    if path.is_file():
        return path
    if (path / _STATE_FILE).is_file():
        return path / _STATE_FILE
    if (path / _RUN_FILE).is_file():
        state_files = sorted(
            (file for file in path.glob(f"checkpoints/step_*/{_STATE_FILE}")),
            key=lambda file: (
                int(file.parent.name.removeprefix("step_") or 0)
                if file.parent.name.removeprefix("step_").isdigit()
                else -1
            ),
        )
        if not state_files:
            raise InputMissingError(
                f"The run in {path} has no checkpoint yet (--save-interval sets how often one is made)."
            )
        return state_files[-1]
    if path.is_dir():
        raise InputMissingError(
            f"{path} is neither the folder of a run (with {_RUN_FILE}) nor of a checkpoint (with {_STATE_FILE})."
        )
    remedy = "name a checkpoint, or the folder of a run"
    raise InputMissingError(describe_missing_path(str(path), remedy))


def _read_json_object(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(read_regular_file(file, _MAX_BYTES))
    except OSError as error:
        raise StateError(f"{file} cannot be read: {describe_os_error(error)}.") from error
    except (ValueError, RecursionError) as error:
        raise StateError(f"{file} is not JSON: {error}. {_SAVED_REMEDY}.") from error
    if not isinstance(value, dict):
        raise StateError(f"{file} holds no JSON object. {_SAVED_REMEDY}.")
    return value


def rebuild_plan(saved_position: SavedPosition, stores: Mapping[str, PlanStore], steps: int | None) -> Plan:
    """Rebuild the plan of a checkpoint with its journal, and check the state.

    ``stores`` maps source names to stores; for a run on one store the name does not matter. ``steps`` is
    used if the checkpoint does not record the steps of the run. Raises ``StateError`` if the stores are not those
    of the run; it names each field that differs, and the stores that would continue it.
    """
    identity = saved_position.state["identity"]
    total = saved_position.steps if steps is None else steps
    try:
        plans = [
            Plan(_make_plan_data(identity, stores), _make_plan_spec(identity, total, block=block))
            for block in _read_blocks(identity)
        ]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, (PlanError, SettingsError)):
            raise
        raise StateError(f"{saved_position.path} does not identify a plan ({error!r}). {_SAVED_REMEDY}.") from error
    # A requested and a chosen block give the same order, but different plans for later generations; try both.
    matching_plans = [plan for plan in plans if plan.identity == identity]
    plan = with_journal((matching_plans or plans)[0], saved_position.state)
    plan.resume(dict(saved_position.state))
    return plan


def _read_blocks(identity: Mapping[str, Any]) -> list[int]:
    block = identity["spec"]["block"]
    return [block] if "mixture" in identity else [0, block]


def _make_plan_spec(identity: Mapping[str, Any], steps: int | None, *, block: int) -> PlanSpec:
    spec = identity["spec"]
    settings = {**spec, "block": block, "packing": strategy_from_identity(spec["packing"])}
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


def _make_plan_data(identity: Mapping[str, Any], stores: Mapping[str, PlanStore]) -> PlanStore | Mixture:
    source_entries = identity["sources"]
    mixture = identity.get("mixture")
    if mixture is None:
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
    return Mixture(
        mixture["weights"],
        stores=stores,
        unit=mixture["unit"],
        temperature=mixture["temperature"],
        most_epochs=mixture["most_epochs"],
        exhausted=mixture["exhausted"],
        sources={name: _make_source_spec(entry) for name, entry in source_entries.items()},
        stages=[Stage(**stage) for stage in mixture["stages"]],
    )


def _make_source_spec(entry: Mapping[str, Any]) -> SourceSpec:
    return SourceSpec(**{n: entry[n] for n in ("epochs", "seed", "overlong") if n in entry})
