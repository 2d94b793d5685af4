"""An edit of a run that stands still: appended to the journal in its newest checkpoint."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from batchloom import Edit, Mixture, open_store
from batchloom.core.errors import OutputError, PlanError, StateError
from batchloom.train.checkpoint import read_state, step_of, write_state
from batchloom.train.folder import RunFolder, is_checkpoint
from batchloom.train.generation import begun_on
from batchloom.train.mixture import mixture_begun_on, mixture_lines
from batchloom.train.ranks import joined_ranks
from batchloom.train.run import make_loader
from batchloom.train.settings import accumulation, settings_from


@dataclass(frozen=True, slots=True)
class Edited:
    """What an edit came to.

    Attributes:
        checkpoint: the folder whose journal has it, or with ``dry_run`` would have.
        done: steps done at the checkpoint.
        journal: all edits, the new one last, as plain values.
        before: shares and exhaustion as they were, a line each.
        after: as they are now.
    """

    checkpoint: Path
    done: int
    journal: list[dict[str, Any]]
    before: list[str]
    after: list[str]


def edit_run(
    place: Path,
    data: Path | str | Mixture,
    edit: Edit,
    *,
    generation: int | None = None,
    dry_run: bool = False,
) -> Edited:
    """Append an edit to the journal of a checkpoint; the run goes on by it with ``--resume``.

    Args:
        place: a run's folder, for its newest checkpoint, or the folder of a checkpoint.
        data: what the run was started on; of a mixture stores may have been added.
        edit: what changes.
        generation: of the store; None for the one that the run was begun on.
        dry_run: look only.

    Raises:
        TrainError: there is no run.
        StateError: the run has no checkpoint, or is of other data; names each field that differs.
        PlanError: the step was done already, lies before an earlier edit, or the edit cannot be.
        SettingsError: what the edit says is wrong; every problem.
        OutputError: the checkpoint cannot be written.
    """
    alone = is_checkpoint(place)
    folder = RunFolder(place.resolve().parent.parent if alone else place)
    before = folder.read()
    checkpoint = place if alone else folder.newest()
    if checkpoint is None:
        raise StateError(
            f"{place} has no checkpoint yet, and edits are kept in one: let the run do its first --save-interval "
            "steps, or start it anew with other settings."
        )
    step, state, checksums = read_state(checkpoint)
    settings = settings_from(
        {name: value for name, value in before.items() if name not in ("data", "init")}, {}
    )
    if edit.step < step:
        raise PlanError(
            f"Step {edit.step} was done already: {checkpoint.name} is taken after {step} steps, numbered from 0, so "
            f"the first that can change is {step}."
        )
    with joined_ranks("cpu") as ranks:
        if isinstance(data, Mixture):
            opened: Any = mixture_begun_on(data, folder, ranks)
        else:
            number = begun_on(data, folder, ranks, {}) if generation is None else generation
            opened = open_store(data, generation=number)
        loader = make_loader(opened, settings, ranks, settings.steps)
    loader.load_state_dict(state)
    # An edit beyond the end is of a run that --max-iters makes longer.
    steps = max(settings.steps, edit.step + 1)
    told = mixture_lines(loader.plan, steps)
    loader.edit(edit)
    if edit.global_batch_size is not None:
        accumulation(replace(settings, global_batch_size=edit.global_batch_size), 1)
    if not dry_run:
        try:
            write_state(checkpoint, step_of(checkpoint), loader.state_dict(), checksums)
        except OSError as error:
            raise OutputError(
                f"{checkpoint} cannot be written: {error.strerror}. Nothing was changed; make room, or mend the folder."
            ) from error
    after = mixture_lines(loader.plan, steps)
    return Edited(checkpoint, step, loader.plan.journal, told, after)
