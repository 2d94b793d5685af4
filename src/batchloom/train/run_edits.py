"""An edit of a run: in the journal of its newest checkpoint where it stands still, else handed to it."""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from batchloom import Edit, Mixture, open_store
from batchloom.core.errors import (
    InputMissingError,
    OutputError,
    PlanError,
    StateError,
    StoreConflictError,
    TrainError,
)
from batchloom.core.files import describe_missing
from batchloom.core.wording import counted
from batchloom.train.checkpoint import check_journal, read_state, step_of, write_state
from batchloom.train.data import mixture_begun_on, mixture_lines
from batchloom.train.distributed import joined_ranks
from batchloom.train.edit_requests import hand_over, settle, waiting
from batchloom.train.run import make_loader
from batchloom.train.run_folder import RunFolder, is_checkpoint
from batchloom.train.run_generation import begun_on
from batchloom.train.start_checks import PATIENCE
from batchloom.train.train_log import Say
from batchloom.train.train_settings import accumulation, settings_from


@dataclass(frozen=True, slots=True)
class Edited:
    """What an edit came to.

    Attributes:
        checkpoint: the folder whose journal has it, or with ``dry_run`` would have; None where the run trains, and
            has taken it.
        number: how many edits the journal has with it.
        entry: the edit as the journal has it, with the fingerprint of the plan after it.
        before: shares and exhaustion as they were, a line each.
        after: as they are now.
    """

    checkpoint: Path | None
    number: int
    entry: dict[str, Any]
    before: list[str]
    after: list[str]


def edit_run(
    place: Path,
    data: Path | str | Mixture,
    edit: Edit,
    *,
    generation: int | None = None,
    dry_run: bool = False,
    patience: float = PATIENCE,
    say: Say = lambda _: None,
) -> Edited:
    """Append an edit to the journal of a run: that of its newest checkpoint, by which it goes on with ``--resume``.

    A run that trains is asked instead, and takes the edit between two steps or refuses it.

    Args:
        place: a run's folder, for its newest checkpoint, or the folder of a checkpoint.
        data: what the run was started on; of a mixture stores may have been added.
        edit: what changes.
        generation: of the store; None for the one that the run was begun on.
        dry_run: look only, at the newest checkpoint.
        patience: seconds to wait for the answer of a run that trains.
        say: is told that the run trains.

    Raises:
        InputMissingError: there is no such folder.
        TrainError: it holds no run; or one that trains gave no answer, and still has the request.
        StateError: the run has no checkpoint, or is of other data; names each field that differs.
        PlanError: the step was done already, lies before an earlier edit, or the edit cannot be.
        SettingsError: what the edit says is wrong; every problem.
        OutputError: the checkpoint cannot be written.
    """
    remedy = "name the folder of a run, or of one of its checkpoints"
    if not place.exists():
        raise InputMissingError(describe_missing(str(place), remedy))
    alone = is_checkpoint(place)
    folder = RunFolder(place.resolve().parent.parent if alone else place)
    if not folder.begun:
        raise TrainError(f"{place} holds no run: {remedy}.")
    folder.read()
    if dry_run:
        if folder.is_held():
            say(f"{folder.path} is in use: what its newest checkpoint has not yet is left out.")
        else:
            _refuse_waiting(folder, place)
        return _edited(place, folder, data, edit, generation, say, write=False)
    with ExitStack() as held:

        def stands() -> bool:
            """Whether nobody trains the run, which from here on nobody can before this ends."""
            try:
                held.enter_context(folder.held())
            except StoreConflictError:
                return False
            return True

        if not stands():
            if alone:
                raise TrainError(
                    f"{folder.path} is in use by {folder.holder()}, which writes and deletes checkpoints. Give the "
                    "folder of the run: it is asked to take the edit."
                )
            say(f"{folder.path} is in use by {folder.holder()}: the edit is handed to it.")
            answer = hand_over(folder.edits, edit, patience, stands)
            if answer is not None:
                told, now = answer["before"], answer["after"]
                return Edited(None, answer["number"], answer["taken"], told, now)
            say("The run ended meanwhile.")
        settle(folder.edits)
        _refuse_waiting(folder, place)
        return _edited(place, folder, data, edit, generation, say, write=True)


def _edited(
    place: Path,
    folder: RunFolder,
    data: Path | str | Mixture,
    edit: Edit,
    generation: int | None,
    say: Say,
    *,
    write: bool,
) -> Edited:
    """Edit a checkpoint of a run that stands still."""
    before = folder.read()
    checkpoint = place if is_checkpoint(place) else folder.newest()
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
        # An edit beyond the end is of a run that --max-iters makes longer.
        loader = make_loader(opened, settings, ranks, max(settings.steps, edit.step))
    loader.load_state_dict(state)
    if edit.step > settings.steps:
        say(
            f"The run has {counted(settings.steps, 'step')} so far: the edit holds when --max-iters makes it longer, "
            "and no other can come before it."
        )
    steps = max(settings.steps, edit.step + 1)
    told = mixture_lines(loader.plan, steps)
    loader.edit(edit)
    if edit.global_batch_size is not None:
        accumulation(replace(settings, global_batch_size=edit.global_batch_size), 1)
    journal, after = loader.plan.journal, mixture_lines(loader.plan, steps)
    check_journal(journal)
    if write:
        try:
            write_state(checkpoint, step_of(checkpoint), loader.state_dict(), checksums)
        except OSError as error:
            raise OutputError(
                f"{checkpoint} cannot be written: {error.strerror}. Nothing was changed; make room, or mend the folder."
            ) from error
    return Edited(checkpoint, len(journal), journal[-1], told, after)


def _refuse_waiting(folder: RunFolder, place: Path) -> None:
    """Refuse to go before edits that the run took, or has to answer, and no checkpoint knows of.

    Raises:
        StateError: names the first.
    """
    if not waiting(folder.edits, ()):
        return
    # Whoever goes back to an older checkpoint goes before what later ones know of, and means it.
    states = [read_state(one)[1] for one in (folder.newest(), place) if one and is_checkpoint(one)]
    journal = {one["fingerprint"] for state in states for one in state.get("edits", ())}
    left = waiting(folder.edits, journal)
    if left:
        raise StateError(
            f"The run was asked for the edit in {left[0][0]} while it trained, and ended before a checkpoint had it. "
            "It is taken up first: go on with batchloom train --resume and edit the run then, or delete that file."
        )
