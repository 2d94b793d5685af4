"""Edit of a run: in its newest checkpoint if it is stopped, else by a request."""

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
from batchloom.core.files import describe_missing_path
from batchloom.core.wording import format_count
from batchloom.train.checkpoint import (
    check_journal,
    read_checkpoint_state,
    read_checkpoint_step,
    write_state,
)
from batchloom.train.data.mixture_report import describe_mixture, open_mixture_generations
from batchloom.train.distributed import join_ranks
from batchloom.train.edit_requests import (
    list_pending_requests,
    restore_claimed_requests,
    submit_edit,
)
from batchloom.train.run import make_loader
from batchloom.train.run_folder import RunFolder, is_checkpoint
from batchloom.train.run_generation import find_initial_generation
from batchloom.train.start_checks import STARTUP_TIMEOUT_S
from batchloom.train.train_log import PrintLine
from batchloom.train.train_settings import compute_accumulation_steps, make_settings


@dataclass(frozen=True, slots=True)
class EditResult:
    """Result of an edit.

    Attributes:
        checkpoint: checkpoint whose journal has the edit, or would have it with ``dry_run``; None if a running
            job applied it.
        number: number of edits in the journal, including this one.
        entry: the edit in the form of the journal, with the new fingerprint of the plan.
        before: shares and exhaustion before the edit, one line each.
        after: shares and exhaustion after the edit.
    """

    checkpoint: Path | None
    number: int
    entry: dict[str, Any]
    before: list[str]
    after: list[str]


def edit_run(
    run_path: Path,
    data: Path | str | Mixture,
    edit: Edit,
    *,
    generation: int | None = None,
    dry_run: bool = False,
    patience: float = STARTUP_TIMEOUT_S,
    print_line: PrintLine = lambda _: None,
) -> EditResult:
    """Append an edit to the journal of a run's newest checkpoint.

    The run applies it when it resumes. A running job receives a request instead, and applies or refuses the edit
    between two steps.

    Args:
        run_path: folder of a run, for its newest checkpoint, or of a checkpoint.
        data: data of the run; for a mixture, stores may have been added.
        edit: the edit.
        generation: generation of the store; None for the one the run was started on.
        dry_run: whether to only compute the result, for the newest checkpoint.
        patience: maximum seconds to wait for the answer of a running job.
        print_line: function that prints notes, for example that the job is running.

    Raises:
        InputMissingError: there is no such folder.
        TrainError: it holds no run, or the running job did not answer in time and keeps the request.
        StateError: the run has no checkpoint, or is of other data; names each field that differs.
        PlanError: the step is done already or precedes an earlier edit, or the edit cannot be applied.
        SettingsError: fields of the edit are invalid; lists each problem.
        OutputError: the checkpoint cannot be written.
    """
    remedy = "name the folder of a run, or of one of its checkpoints"
    if not run_path.exists():
        raise InputMissingError(describe_missing_path(str(run_path), remedy))
    is_single_checkpoint = is_checkpoint(run_path)
    folder = RunFolder(run_path.resolve().parent.parent if is_single_checkpoint else run_path)
    if not folder.has_run:
        raise TrainError(f"{run_path} holds no run: {remedy}.")
    folder.read()
    if dry_run:
        if folder.is_locked():
            print_line(f"{folder.path} is in use: changes since its newest checkpoint are not included.")
        else:
            _check_no_pending_edits(folder, run_path)
        return _edit_checkpoint(run_path, folder, data, edit, generation, print_line, write=False)
    with ExitStack() as lock_stack:

        def acquire_lock() -> bool:
            """Return whether the run's lock was acquired, so that no process trains it."""
            try:
                lock_stack.enter_context(folder.lock())
            except StoreConflictError:
                return False
            return True

        if not acquire_lock():
            if is_single_checkpoint:
                raise TrainError(
                    f"{folder.path} is in use by {folder.read_holder()}, which writes and deletes checkpoints. Give "
                    "the folder of the run: the edit is sent to it."
                )
            print_line(f"{folder.path} is in use by {folder.read_holder()}: the edit is sent to it.")
            answer = submit_edit(folder.edits, edit, patience, acquire_lock)
            if answer is not None:
                mixture_before, mixture_after = answer["before"], answer["after"]
                return EditResult(None, answer["number"], answer["taken"], mixture_before, mixture_after)
            print_line("The run ended in the meantime.")
        restore_claimed_requests(folder.edits)
        _check_no_pending_edits(folder, run_path)
        return _edit_checkpoint(run_path, folder, data, edit, generation, print_line, write=True)


def _edit_checkpoint(
    run_path: Path,
    folder: RunFolder,
    data: Path | str | Mixture,
    edit: Edit,
    generation: int | None,
    print_line: PrintLine,
    *,
    write: bool,
) -> EditResult:
    """Edit a checkpoint of a run that is not running."""
    run_description = folder.read()
    checkpoint = run_path if is_checkpoint(run_path) else folder.find_newest_checkpoint()
    if checkpoint is None:
        raise StateError(
            f"{run_path} has no checkpoint yet, and edits are stored in checkpoints: let the run do its first "
            "--save-interval steps, or restart it with other settings."
        )
    step, state, checksums = read_checkpoint_state(checkpoint)
    settings = make_settings(
        {name: value for name, value in run_description.items() if name not in ("data", "init")}, {}
    )
    if edit.step < step:
        raise PlanError(
            f"Step {edit.step} was done already: {checkpoint.name} was saved after {step} steps. Steps count from 0, "
            f"so the first that can change is {step}."
        )
    with join_ranks("cpu") as ranks:
        if isinstance(data, Mixture):
            source: Any = open_mixture_generations(data, folder, ranks)
        else:
            number = find_initial_generation(data, folder, ranks, {}) if generation is None else generation
            source = open_store(data, generation=number)
        # An edit past the end applies only if --max-iters extends the run, so the loader covers its step.
        loader = make_loader(source, settings, ranks, max(settings.steps, edit.step))
    loader.load_state_dict(state)
    if edit.step > settings.steps:
        print_line(
            f"The run has {format_count(settings.steps, 'step')} so far: the edit applies once --max-iters extends "
            "it, and no earlier edit is possible after it."
        )
    steps = max(settings.steps, edit.step + 1)
    mixture_before = describe_mixture(loader.plan, steps)
    loader.edit(edit)
    if edit.global_batch_size is not None:
        compute_accumulation_steps(replace(settings, global_batch_size=edit.global_batch_size), 1)
    journal, mixture_after = loader.plan.journal, describe_mixture(loader.plan, steps)
    check_journal(journal)
    if write:
        try:
            write_state(checkpoint, read_checkpoint_step(checkpoint), loader.state_dict(), checksums)
        except OSError as error:
            raise OutputError(
                f"{checkpoint} cannot be written: {error.strerror}. Nothing was changed. Make room, or fix the folder."
            ) from error
    return EditResult(checkpoint, len(journal), journal[-1], mixture_before, mixture_after)


def _check_no_pending_edits(folder: RunFolder, run_path: Path) -> None:
    """Refuse an edit while requests are pending that no checkpoint has."""
    if not list_pending_requests(folder.edits, ()):
        return
    # Edits that only a newer checkpoint has do not count as pending: editing an older checkpoint discards them on
    # purpose.
    states = [
        read_checkpoint_state(checkpoint_path)[1]
        for checkpoint_path in (folder.find_newest_checkpoint(), run_path)
        if checkpoint_path and is_checkpoint(checkpoint_path)
    ]
    journal = {entry["fingerprint"] for state in states for entry in state.get("edits", ())}
    pending_requests = list_pending_requests(folder.edits, journal)
    if pending_requests:
        raise StateError(
            f"The run received the edit in {pending_requests[0][0]} while it trained, and ended before a checkpoint "
            "stored it. That edit must be applied first: continue with batchloom train --resume and edit the run "
            "then, or delete that file."
        )
