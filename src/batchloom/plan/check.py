"""What contradicts itself in the settings of a run, told before anything is planned."""

from collections.abc import Mapping, Sequence

from batchloom.core.errors import PlanError, SettingsError
from batchloom.plan.edits import Edit, check_edit
from batchloom.plan.mixture import Mixture, PlanStore
from batchloom.plan.spec import PlanSpec


def check_run(
    data: PlanStore | Mixture,
    stores: Mapping[str, PlanStore],
    spec: PlanSpec,
    edits: Sequence[Edit],
) -> None:
    """Refuse data, settings and edits that cannot be a run.

    Args:
        data: one store, or a mixture.
        stores: of its sources by name.
        spec: settings of the order.
        edits: in the order they were appended.

    Raises:
        PlanError: a source without documents; an edit before an earlier one.
        SettingsError: settings that contradict the mixture, or an edit that cannot be.
    """
    mixture = data if isinstance(data, Mixture) else None
    for name, store in stores.items():
        if not store.lengths.size:
            what = f"Source {name!r}" if mixture else "The store"
            raise PlanError(f"{what} has no documents in this subset; there is nothing to plan.")
    if mixture and spec.epochs is not None:
        raise SettingsError(
            ["epochs: the sources of a mixture have epochs of their own (SourceSpec); give steps"]
        )
    if mixture and spec.steps is None and mixture.exhausted == "repeat":
        raise SettingsError(
            [
                "steps: missing; a mixture that repeats its sources has no end of its own (exhausted='stop' has)"
            ]
        )
    sizes = {name: store.lengths.size for name, store in stores.items()}
    last = 0
    for edit in edits:
        if edit.weights is not None and mixture is None:
            raise SettingsError(
                ["weights: one store has none; start with a Mixture to change them"]
            )
        check_edit(edit, stores, last, spec.lanes, sizes)
        last = edit.step
