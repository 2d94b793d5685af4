"""Journal of a state: its edits are applied to a plan that has none."""

from typing import Any, NoReturn

from batchloom.core.errors import PlanError, SettingsError, StateError
from batchloom.core.fingerprint import find_broken_link
from batchloom.plan.order.edits import edit_from_plain
from batchloom.plan.order.plan import Plan


def with_journal(plan: Plan, state: Any) -> Plan:
    """Return the plan with the edits of a state's journal, if it has none of its own.

    Raises:
        StateError: the journal is invalid, or adds a source whose store the plan does not have.
    """
    journal = state.get("edits") if isinstance(state, dict) else None
    if not journal or plan.edits:
        return plan
    try:
        number = find_broken_link(state.get("identity"), journal)
        if number is not None:
            _refuse_changed(number, journal[number])
        _refuse_without_stores(plan, journal)
        plain_edits = [{k: v for k, v in entry.items() if k not in ("added", "fingerprint")} for entry in journal]
        return plan.edited(*(edit_from_plain(entry) for entry in plain_edits))
    except StateError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError, PlanError, SettingsError) as error:
        raise StateError(
            f"The state's journal of edits cannot be used: {error}. Use the state as it was saved."
        ) from error


def _refuse_without_stores(plan: Plan, journal: list[dict[str, Any]]) -> None:
    """Refuse a journal that adds a source whose store the plan does not have."""
    for entry in journal:
        for name in entry.get("added", {}):
            if name not in plan.stores:
                raise StateError(
                    f"The run's journal adds source {name!r} at step {entry['step']}: add its store to the stores of "
                    f"the mixture (fingerprint {entry['added'][name]['store'][:12]})."
                )


def _refuse_changed(number: int, edit: dict[str, Any]) -> NoReturn:
    """Refuse a journal entry whose fields do not match its stored fingerprint."""
    fields = ", ".join(name for name in edit if name != "fingerprint")
    raise StateError(
        f"Edit {number} of the journal, at step {edit.get('step')}, was changed after it was written: one of "
        f"{fields} does not match its fingerprint. Use the journal as it was saved; append a new edit instead "
        "(loader.edit, batchloom edit)."
    )
