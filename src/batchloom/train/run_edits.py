"""Edits of a run: in its newest checkpoint if it is stopped, else by a request.

``edits/000001-1f3a9c02.json`` requests an edit of a running job. The run reads it between steps and replaces its
content with the answer: ``taken``, the edit in the form of the journal, or ``refused``, the reason. A checkpoint
stores the journal. Until the next checkpoint only the request file has the edit, so a resumed run applies the edits
its checkpoint lacks again, in the same order. Deleting the file before the answer withdraws the edit.
"""

import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, final

from batchloom import Edit, Loader, Mixture, Store
from batchloom.adapters.rank_group import join_ranks
from batchloom.batches.loading import require_plan_feed
from batchloom.core.errors import (
    BatchloomError,
    InputError,
    InputMissingError,
    PlanError,
    SettingsError,
    StateError,
    StoreConflictError,
    TrainError,
)
from batchloom.core.files import describe_missing_path, read_json_object, wrap_os_errors
from batchloom.core.run_files import get_run_folder, is_checkpoint
from batchloom.core.settings import as_int, raise_problems, suggest, to_plain
from batchloom.core.wording import format_count, format_list
from batchloom.plan.order import SOURCE
from batchloom.store import find_listed_documents
from batchloom.train.request import EDIT_TIMEOUT_S, NEW_SOURCE_REMEDY
from batchloom.train.run import (
    TrainRun,
    check_edited_plan,
    check_ranks_agree,
    describe_mixture,
    describe_store_location,
    make_loader,
)
from batchloom.train.run_data import get_stores, open_source
from batchloom.train.run_folder import (
    MAX_LISTED,
    PrintLine,
    RunFolder,
    read_checkpoint_state,
    write_json,
    write_state,
)

_REQUEST_NAME = re.compile(r"(\d{6,})-\w{8}\.json")
# Keys of a journal entry in addition to the fields of the edit.
_JOURNAL_KEYS = ("added", "fingerprint")
_POLL_SECONDS = 0.1


class EditRequest(NamedTuple):
    """Request file and its content: the edit or its answer."""

    path: Path
    content: dict[str, Any]

    @property
    def edit(self) -> dict[str, Any]:
        """Fields of the edit; an applied request has them in the form of the journal."""
        edit = self.content.get("taken") or self.content["edit"]
        return {name: value for name, value in edit.items() if name not in _JOURNAL_KEYS}

    @property
    def applied_fingerprint(self) -> str:
        """Fingerprint of the plan after the edit was applied, else ""."""
        return str((self.content.get("taken") or {}).get("fingerprint", ""))


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
        written: whether a checkpoint or a running job has the edit; False with ``dry_run``.
    """

    checkpoint: Path | None
    number: int
    entry: dict[str, Any]
    before: list[str]
    after: list[str]
    written: bool


def find_run(run_path: Path) -> RunFolder:
    """Return the folder of a run, or of the run of a checkpoint.

    Args:
        run_path: folder of a run or of a checkpoint.

    Returns:
        The folder of the run.

    Raises:
        InputMissingError: there is no such folder.
        TrainError: it holds no run.
        StateError: ``run.json`` is damaged.
    """
    remedy = "name the folder of a run, or of one of its checkpoints"
    if not run_path.exists():
        raise InputMissingError(describe_missing_path(str(run_path), remedy))
    folder = RunFolder(get_run_folder(run_path.resolve()) if is_checkpoint(run_path) else run_path)
    if not folder.has_run:
        raise TrainError(f"{run_path} holds no run: {remedy}.")
    folder.read()
    return folder


def find_banned_documents(
    run_path: Path,
    data: Path | str | Mixture,
    documents_file: Path,
    *,
    generation: int | None = None,
    print_line: PrintLine = lambda _: None,
) -> dict[str, list[int]]:
    """Return the documents of a run that a list names, as the ban of an edit.

    Args:
        run_path: folder of a run or of a checkpoint.
        data: data of the run.
        documents_file: list as :func:`~batchloom.store.remove_documents` takes it.
        generation: generation of the store; None for the one the run was started on.
        print_line: function that prints which lines name no document of the run.

    Raises:
        InputError: a line cannot be understood, or none names a document of the run.
    """
    with join_ranks("cpu") as ranks:
        source = open_source(data, find_run(run_path), ranks, resume=True, generation=generation, announces=False)
    documents, absent = find_listed_documents(get_stores(source), documents_file)
    if absent:
        print_line(f"not in the train subset of the run: {format_list(absent, MAX_LISTED)}")
    if not documents:
        raise InputError(f"{documents_file} names no document that the run trains.")
    print_line(f"{documents_file} names {format_count(sum(map(len, documents.values())), 'document')} of the run.")
    return {name or SOURCE: numbers.tolist() for name, numbers in documents.items()}


def edit_run(
    run_path: Path,
    data: Path | str | Mixture,
    edit: Edit,
    *,
    generation: int | None = None,
    dry_run: bool = False,
    patience: float = EDIT_TIMEOUT_S,
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
    folder = find_run(run_path)
    raise_problems(_list_source_problems(edit, data))
    with ExitStack() as lock_stack:

        def acquire_lock() -> bool:
            """Return whether the run's lock was acquired, so that no process trains it."""
            try:
                lock_stack.enter_context(folder.lock())
            except StoreConflictError:
                return False
            return True

        if dry_run:
            if folder.is_locked():
                print_line(f"{folder.path} is in use: changes since its newest checkpoint are not included.")
            else:
                _check_no_pending_edits(folder)
        elif acquire_lock():
            _check_no_pending_edits(folder)
        elif is_checkpoint(run_path):
            raise TrainError(
                f"{folder.path} is in use by {folder.read_holder()}, which writes and deletes checkpoints. Give the "
                "folder of the run: the edit is sent to it."
            )
        else:
            print_line(f"{folder.path} is in use by {folder.read_holder()}: the edit is sent to it.")
            answer = submit_edit(folder.edits, edit, patience, acquire_lock)
            if answer is not None:
                return EditResult(
                    None, answer["number"], answer["taken"], answer["before"], answer["after"], written=True
                )
            print_line("The run ended in the meantime.")
            _check_no_pending_edits(folder)
        return _edit_checkpoint(run_path, folder, data, edit, generation, print_line, write=not dry_run)


def _list_source_problems(edit: Edit, data: Path | str | Mixture) -> list[str]:
    """List the sources that an edit names and the data of the run lack."""
    names = sorted(data.stores) if isinstance(data, Mixture) else [SOURCE]
    listing = f"unknown source; the sources are {', '.join(names)}"
    weights = edit.weights if isinstance(data, Mixture) and isinstance(edit.weights, Mapping) else {}
    problems = [
        f"weights.{name}: {listing}{suggest(name, names)}; {NEW_SOURCE_REMEDY}"
        for name, weight in weights.items()
        if name not in names and not isinstance(weight, Mapping)
    ]
    for name, numbers in edit.ban.items():
        shown_numbers = ",".join(map(str, numbers[:MAX_LISTED]))
        if name in names:
            continue
        if names == [SOURCE]:
            problems.append(f"--ban: a run on one store has no source {name}: give --ban {shown_numbers}")
        elif name == SOURCE:
            problems.append(
                f"--ban: the documents of a mixture are those of its sources ({', '.join(names)}): give --ban "
                f"{names[0]}:{shown_numbers}"
            )
        else:
            problems.append(f"ban.{name}: {listing}{suggest(name, names)}")
    return problems


def _check_no_pending_edits(folder: RunFolder) -> None:
    """Refuse an edit while requests are pending that no checkpoint has."""
    # Without a request a damaged older checkpoint does not matter.
    if not list_pending_requests(folder.edits, ()):
        return
    states = [read_checkpoint_state(checkpoint)[1] for checkpoint in folder.list_checkpoints()]
    journal = {entry["fingerprint"] for state in states for entry in state.get("edits", ())}
    if pending_requests := list_pending_requests(folder.edits, journal):
        raise StateError(
            f"The run received the edit in {pending_requests[0].path} while it trained, and ended before a checkpoint "
            "stored it. That edit must be applied first: continue with batchloom train --resume and edit the run "
            "then, or delete that file."
        )


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
    checkpoint = run_path if is_checkpoint(run_path) else folder.find_newest_checkpoint()
    if checkpoint is None:
        raise StateError(
            f"{run_path} has no checkpoint yet, and edits are stored in checkpoints: let the run do its first "
            "--save-interval steps, or restart it with other settings."
        )
    step, state, checksums = read_checkpoint_state(checkpoint)
    if "lanes" in state:
        raise PlanError(
            f"{run_path} trains on a stream, which cannot be edited: its order is that of its input. Prepare the data "
            "and train on the store."
        )
    settings = folder.read_settings()
    if edit.step < step:
        raise PlanError(
            f"Step {edit.step} was done already: {checkpoint.name} was saved after {step} steps. Steps count from 0, "
            f"so the first that can change is {step}."
        )
    with join_ranks("cpu") as ranks:
        source = open_source(data, folder, ranks, resume=True, generation=generation, announces=False)
        # An edit past the end applies only if --max-iters extends the run, so the loader covers its step.
        loader = make_loader(source, settings, ranks, max(settings.steps, edit.step))
    loader.load_state_dict(state)
    if edit.step > settings.steps:
        print_line(
            f"The run has {format_count(settings.steps, 'step')} so far: the edit applies once --max-iters extends "
            "it, and no earlier edit is possible after it."
        )
    before, after = _edit_loader(loader, edit, settings.steps)
    if write:
        write_state(checkpoint, step, loader.state_dict(), checksums)
        _record_places(folder, source)
    journal = loader.plan.journal
    return EditResult(checkpoint, len(journal), journal[-1], before, after, written=write)


def _record_places(folder: RunFolder, source: Store | Mixture) -> None:
    """Record where the stores are that an edit adds to a mixture."""
    description = folder.read()
    places = description["data"].get("places")
    if isinstance(source, Mixture) and places is not None:
        new = {name: store for name, store in get_stores(source).items() if name not in places}
        places |= {name: describe_store_location(store) for name, store in new.items()}
        folder.begin(description)


def _edit_loader(loader: Loader, edit: Edit, steps: int) -> tuple[list[str], list[str]]:
    """Apply an edit; return the shares and exhaustion before and after it."""
    steps = max(steps, edit.step + 1)
    before = describe_mixture(loader.plan, steps)
    loader.edit(edit)
    return before, describe_mixture(loader.plan, steps)


def submit_edit(folder: Path, edit: Edit, patience: float, ended: Callable[[], bool]) -> dict[str, Any] | None:
    """Submit an edit to a running job, and wait for its answer.

    Args:
        folder: folder of the requests.
        edit: the edit.
        patience: maximum seconds to wait.
        ended: function that returns whether no process trains the run, and none can start before this call ends.

    Returns:
        content of the request file after the edit was applied. None if the run ended without an answer: then the
            request is withdrawn, and the caller can edit the checkpoint.

    Raises:
        PlanError: the run refused the edit, with the reason.
        StateError: the same edit is pending already, was withdrawn, or its answer cannot be read.
        TrainError: the time is up; the request stays.
        OutputError: the folder cannot be written.
    """
    path = _write_request(folder, edit)
    deadline = time.monotonic() + patience
    while True:
        is_ended = ended()
        request = _read_request(path)
        if request is None:
            raise StateError(f"{path} was deleted before the run answered: the edit is withdrawn.")
        answer = request.content
        if "taken" in answer:
            return answer
        if "refused" in answer:
            raise PlanError(f"The run refused the edit and continues without it. {answer['refused']}")
        if is_ended:
            path.unlink()
            return None
        if time.monotonic() > deadline:
            raise TrainError(
                f"The run gave no answer within {patience:g} s; it reads edits between steps. The request stays in "
                f"{path}, and the answer will be written there. Delete that file to withdraw the edit; otherwise it "
                "is applied later."
            )
        time.sleep(_POLL_SECONDS)


def _write_request(folder: Path, edit: Edit) -> Path:
    plain = to_plain(edit)
    for request in list_pending_requests(folder, ()):
        if request.content.get("edit") == plain:
            raise StateError(
                f"The same edit is already pending in {request.path}. Wait for the answer there, or delete the file."
            )
    paths = _list_request_files(folder)
    number = 1 + (int(paths[-1].name.split("-")[0]) if paths else 0)
    # Two processes that submit at once may take the same number, so the name has the time, too.
    path = folder / f"{number:06d}-{time.time_ns() % (1 << 32):08x}.json"
    with wrap_os_errors("write", folder):
        folder.mkdir(exist_ok=True)
    write_json(path, {"edit": plain})
    return path


@final
class EditInbox:
    """Edit requests of a run, read by its first rank."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read_paths = set[Path]()
        self._has_started = False

    def take(self, run: TrainRun) -> list[EditRequest]:
        """Return the requests that arrived since the last call.

        At the first call an invalid file raises StateError, because it may have held an applied edit. Later ones are
        ignored, so that they do not stop a training run.
        """
        has_started = self._has_started
        self._has_started = True
        new_paths = [path for path in _list_request_files(self._folder) if path not in self._read_paths]
        if not new_paths:
            return []
        self._read_paths.update(new_paths)
        journal = set() if run.loader.streamed else {entry["fingerprint"] for entry in run.loader.plan.journal}
        requests = []
        for path in new_paths:
            try:
                request = _read_request(path)
            except StateError as error:
                if not has_started:
                    raise
                run.log.print_line(f"edit   {error}")
            else:
                if request is not None:
                    requests.append(request)
        return _select_pending_requests(requests, journal)


def apply_pending_edits(run: TrainRun, inbox: EditInbox, step: int) -> bool:
    """Apply the requests of the first rank on all ranks; return whether any applied.

    All ranks must call this between the same steps. Differing orders, and an edit that was applied before but no
    longer can be, raise TrainError.
    """
    requests = inbox.take(run) if run.ranks.first else []
    if not run.ranks.total(float(len(requests)))[0]:
        return False
    is_applied = False
    messages = [(str(request.path), request.edit, request.applied_fingerprint) for request in requests]
    for name, plain, applied_fingerprint in run.ranks.all_gather(messages)[0]:
        path = Path(name)
        refusal = _find_refusal(run, plain)
        if applied_fingerprint and refusal is not None:
            raise TrainError(
                f"The run applied the edit in {path} before it was stopped, and cannot apply it again: {refusal} "
                "Resume with the data and settings it was stopped with, or delete that file to continue without the "
                "edit."
            )
        if not run.ranks.total(float(run.ranks.first and path.exists()))[0]:
            run.log.print_line(f"edit   {path.name} was deleted, so the edit is withdrawn")
        elif refusal is None:
            _apply_edit(run, path, plain, step)
            is_applied = True
        else:
            if run.ranks.first:
                write_json(path, {"edit": plain, "refused": refusal})
            run.log.print_line(f"edit   {path.name} is refused: {refusal}")
    return is_applied


def _find_refusal(run: TrainRun, plain: dict[str, Any]) -> str | None:
    """Return the reason why an edit cannot be applied on some rank; None if it can."""
    refusal = None
    try:
        check_edited_plan(run, require_plan_feed(run.loader.feed, 0).edited(_parse_edit(plain)))
    except BatchloomError as error:
        refusal = str(error)
    return next((reason for reason in run.ranks.all_gather(refusal) if reason is not None), None)


def _parse_edit(plain: dict[str, Any]) -> Edit:
    try:
        return Edit(**plain)
    except TypeError as error:
        raise SettingsError([f"edit: {error}; batchloom edit writes one"]) from error


def _apply_edit(run: TrainRun, path: Path, plain: dict[str, Any], step: int) -> None:
    """Apply an edit that all ranks accept, answer its request, and log it."""
    loader = run.loader
    edit = _parse_edit(plain)
    before, after = _edit_loader(loader, edit, run.settings.steps)
    check_ranks_agree(run)
    journal = loader.plan.journal
    if run.ranks.first:
        # No step has used the edit yet, so a run that dies before the answer is complete has not applied it.
        write_json(path, {"taken": journal[-1], "number": len(journal), "before": before, "after": after})
    run.log.write({"kind": "edit", "step": step, "edit": journal[-1]})
    run.log.print_line(f"edit   {path.name} is accepted, and applies after {format_count(edit.step, 'step')}")
    for line in after:
        if line not in before:
            run.log.print_line(line)


def _list_request_files(folder: Path) -> list[Path]:
    """Return the request files in a folder, in the order of their creation."""
    return sorted(path for path in folder.glob("*.json") if _REQUEST_NAME.fullmatch(path.name))


def _read_request(path: Path) -> EditRequest | None:
    """Read a request file; return None if it was deleted.

    Raises:
        StateError: it holds no edit.
    """
    try:
        content = read_json_object(path, None)
    except ValueError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        fault = str(error)
    else:
        edit = content.get("taken") or content.get("edit")
        if isinstance(edit, dict) and as_int(content.get("number", 0)) is not None:
            return EditRequest(path, content)
        fault = "holds no edit"
    raise StateError(
        f"{path} {fault}, and it may be the only record of an edit that the run applied. Fix the file, or delete it to "
        "continue without the edit."
    )


def list_pending_requests(folder: Path, journal: Collection[str]) -> list[EditRequest]:
    """Return the requests that a run must answer or apply again, in that order.

    ``journal`` holds the fingerprints of the run's edits: requests with these are done.

    Raises:
        StateError: a file holds no edit.
    """
    requests = [request for path in _list_request_files(folder) if (request := _read_request(path)) is not None]
    return _select_pending_requests(requests, journal)


def _select_pending_requests(requests: Sequence[EditRequest], journal: Collection[str]) -> list[EditRequest]:
    pending_requests = [
        request
        for request in requests
        if "refused" not in request.content and request.applied_fingerprint not in journal
    ]
    # Requests that were applied before come first, in their original order.
    return sorted(
        pending_requests, key=lambda request: (not request.applied_fingerprint, request.content.get("number", 0))
    )
