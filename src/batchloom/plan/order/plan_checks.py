"""Checks for contradictions in the settings of a run, before it is planned."""

from collections.abc import Mapping, Sequence

from batchloom.core.errors import PlanError, SettingsError
from batchloom.plan.mixture.mixture_spec import Mixture, PlanStore, Weights, uses_size_weights
from batchloom.plan.order.edits import Edit, check_edit
from batchloom.plan.packing.plan_spec import PlanSpec

_CAPPED_HINT = (
    "are limited by most_epochs for the run's original number of tokens; an edit of batch size, seq_len or skip "
    "must also give weights as numbers"
)


def check_run(
    data: PlanStore | Mixture,
    stores: Mapping[str, PlanStore],
    spec: PlanSpec,
    edits: Sequence[Edit],
) -> None:
    """Refuse data, settings and edits that contradict each other.

    Empty sources and edits that precede earlier ones raise PlanError, everything else SettingsError.
    """
    mixture = data if isinstance(data, Mixture) else None
    for name, store in stores.items():
        if not store.lengths.size:
            subject = f"Source {name!r}" if mixture else "The store"
            raise PlanError(f"{subject} has no documents in this subset; there is nothing to plan.")
    if mixture and spec.epochs is not None:
        raise SettingsError(["epochs: a mixture has no common epochs, only epochs per source (SourceSpec); give steps"])
    if mixture and spec.steps is None and mixture.exhausted == "repeat":
        raise SettingsError(
            ["steps: missing; a mixture that repeats its sources has no end; give steps, or exhausted='stop'"]
        )
    sizes = {name: store.lengths.size for name, store in stores.items()}
    last = 0
    weights: Weights = mixture.weights if mixture else {}
    for edit in edits:
        if edit.weights is not None and mixture is None:
            raise SettingsError(["weights: a single store has no weights; start with a Mixture to change them"])
        check_edit(edit, stores, last, spec, sizes)
        if edit.weights is not None:
            weights = edit.weights
        if mixture and mixture.most_epochs and uses_size_weights(weights) and _changes_sizes(edit):
            raise SettingsError([f"weights: missing; weights by size {_CAPPED_HINT}"])
        last = edit.step


def _changes_sizes(edit: Edit) -> bool:
    return bool(edit.global_batch_size or edit.seq_len or edit.skip)


def refuse_past_end(edit: Edit, steps: int | None) -> None:
    """Refuse an edit past the end of a run; no later edit could precede it.

    Raises:
        PlanError: the edit is past the end.
    """
    if steps is not None and edit.step > steps:
        raise PlanError(
            f"The run has {steps:,} steps, and after an edit at step {edit.step:,} no earlier edit would be "
            f"possible. Give a step of at most {steps:,}, or extend the run first."
        )
