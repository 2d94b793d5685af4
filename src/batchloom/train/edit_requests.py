"""Edits of a running job: request files in its folder, read between steps.

``edits/000001-k2x9_q4m.json`` holds an edit. The run replaces its content with the answer: ``taken``, the edit in
the form of the journal, or ``refused``, the reason. A checkpoint stores the journal. Until the next checkpoint
only the request file has the edit, so a resumed run applies the edits its checkpoint lacks again, in the same
order. While the answer is written the file has another name. Before that, deleting the file withdraws the edit;
afterwards it cannot be withdrawn.
"""

import json
import re
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

from batchloom import Edit
from batchloom.core.errors import (
    BatchloomError,
    OutputError,
    PlanError,
    SettingsError,
    StateError,
    TrainError,
)
from batchloom.core.settings import as_int, to_plain
from batchloom.core.wording import format_count
from batchloom.train.checkpoint import check_journal, fsync_path, write_json
from batchloom.train.data.mixture_report import describe_mixture
from batchloom.train.distributed import find_differing_rank
from batchloom.train.json_files import MAX_RUN_FILE_BYTES, read_json_object
from batchloom.train.run import TrainRun, check_edited_plan

_REQUEST_NAME = re.compile(r"(\d{6,})-\w{8}\.json")
# Suffix of a request whose answer is being written.
_CLAIMED_SUFFIX = ".claimed"
# Keys of a journal entry in addition to the fields of the edit.
_JOURNAL_KEYS = ("added", "fingerprint")
_POLL_SECONDS = 0.1

# (path of the request file, its content)
EditRequest = tuple[Path, dict[str, Any]]


def _list_request_names(folder: Path) -> list[str]:
    """Return the names of the requests in a folder, in the order of their creation."""
    try:
        return sorted(path.name for path in folder.iterdir() if _REQUEST_NAME.fullmatch(path.name))
    except FileNotFoundError:
        return []


def _read_request(path: Path) -> dict[str, Any]:
    """Return the content of a request file.

    An invalid file gives a dictionary with ``fault``, a missing one also with ``gone``.
    """
    fault, is_missing = "", False
    # The run may claim and answer the request between two attempts, so the plain name is tried again.
    for candidate_path in (path, _get_claimed_path(path), path):
        try:
            request = read_json_object(candidate_path, MAX_RUN_FILE_BYTES)
        except ValueError as error:
            fault, is_missing = (
                f"{candidate_path} {error}",
                isinstance(error.__cause__, FileNotFoundError),
            )
            if is_missing:
                continue
            break
        return request if _is_request(request) else {"fault": f"{candidate_path} holds no edit"}
    return {"fault": fault, "gone": True} if is_missing else {"fault": fault}


def _is_request(content: dict[str, Any]) -> bool:
    applied_edit = content.get("taken", {})
    edit = content.get("edit", applied_edit or None)
    has_number = as_int(content.get("number", 0)) is not None
    return isinstance(edit, dict) and isinstance(applied_edit, dict) and has_number


def _get_claimed_path(path: Path) -> Path:
    """Return the path of a request while it is answered."""
    return path.with_name(path.name + _CLAIMED_SUFFIX)


def restore_claimed_requests(folder: Path) -> None:
    """Restore the names of requests that a run was answering when it died.

    The caller must hold the lock of the run.
    """
    with _wrap_write_errors(folder):
        for claimed in folder.glob(f"*{_CLAIMED_SUFFIX}"):
            claimed.rename(claimed.with_suffix(""))


@contextmanager
def _wrap_write_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"{path} cannot be written: {error.strerror}. Make room, then continue with --resume, which applies the "
            "edit."
        ) from error


def list_pending_requests(
    folder: Path, journal: Collection[str], read_names: Collection[str] = ()
) -> list[EditRequest]:
    """Return the requests that a run must answer or apply again, in that order.

    ``journal`` holds the fingerprints of the run's edits: requests with these are done. Names in ``read_names``
    are skipped.
    """
    requests = [
        (folder / name, _read_request(folder / name)) for name in _list_request_names(folder) if name not in read_names
    ]
    pending_requests = [
        (path, request)
        for path, request in requests
        if not request.keys() & {"refused", "gone"} and _get_applied_fingerprint(request) not in journal
    ]
    # Requests that were applied before come first, in their original order.
    return sorted(
        pending_requests,
        key=lambda path_and_request: (
            _get_applied_fingerprint(path_and_request[1]) == "",
            path_and_request[1].get("number", 0),
        ),
    )


def _get_applied_fingerprint(request: dict[str, Any]) -> str:
    """Return the plan's fingerprint after a request was applied, else ""."""
    return str(request["taken"].get("fingerprint")) if "taken" in request else ""


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
        PlanError: the run refused the edit, with the reason; or no checkpoint could store it.
        StateError: the same edit is pending already, was withdrawn, or its answer cannot be read.
        TrainError: the time is up; the request stays.
        OutputError: the folder cannot be written.
    """
    path = _write_request(folder, edit)
    deadline = time.monotonic() + patience
    while True:
        is_ended = ended()
        if is_ended:
            restore_claimed_requests(folder)
        request = _read_request(path)
        if "taken" in request:
            return request
        if "gone" in request:
            raise StateError(f"{path} was deleted before the run answered: the edit is withdrawn.")
        if "fault" in request:
            raise StateError(
                f"{request['fault']}, so the answer cannot be read. The output of the run and its log.jsonl show "
                "whether it applied the edit."
            )
        if "refused" in request:
            raise PlanError(f"The run refused the edit and continues without it. {request['refused']}")
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
    check_journal([plain])
    for path, request in list_pending_requests(folder, ()):
        if request.get("edit") == plain and "taken" not in request:
            raise StateError(
                f"The same edit is already pending in {path}. Wait for the answer there, or delete the file."
            )
    names = _list_request_names(folder)
    number = 1 + (int(names[-1].split("-")[0]) if names else 0)
    try:
        folder.mkdir(exist_ok=True)
        # The temporary file reserves a unique name, even if two processes submit at once or one request is
        # deleted.
        with tempfile.NamedTemporaryFile(prefix=f"{number:06d}-", dir=folder) as name:
            path = Path(f"{name.name}.json")
            write_json(path, {"edit": plain})
        fsync_path(folder)
    except OSError as error:
        raise OutputError(
            f"{folder} cannot be written: {error.strerror}. The run did not receive the edit. Make room, or fix the "
            "folder."
        ) from error
    return path


@final
class EditInbox:
    """Edit requests of a run, read by its first rank."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._read_names = folder, set[str]()
        self._has_started = False

    def take(self, run: TrainRun) -> list[EditRequest]:
        """Return the requests that arrived since the last call.

        At the first call an invalid file raises StateError, because it may have held an applied edit.
        """
        first, self._has_started = not self._has_started, True
        if first:
            restore_claimed_requests(self._folder)
        new_names = [name for name in _list_request_names(self._folder) if name not in self._read_names]
        if not new_names:
            return []
        plan = run.loader.plan
        journal = set() if run.loader.streamed else {entry["fingerprint"] for entry in plan.journal}
        requests = list_pending_requests(self._folder, journal, self._read_names)
        self._read_names.update(new_names)
        for fault in (request["fault"] for _, request in requests if "fault" in request):
            if first:
                raise StateError(
                    f"{fault}, and it may be the only record of an edit that this run applied. Fix the file, or "
                    "delete it to continue without the edit."
                )
            run.log.print_line(f"edit   {fault}: not applied")
        return [path_and_request for path_and_request in requests if "fault" not in path_and_request[1]]


def apply_pending_edits(run: TrainRun, inbox: EditInbox, step: int) -> bool:
    """Apply the requests of the first rank on all ranks; return whether any applied.

    All ranks must call this between the same steps. Differing orders, and an edit that was applied before but no
    longer can be, raise TrainError.
    """
    requests = inbox.take(run) if run.ranks.first else []
    if not run.ranks.total(float(len(requests)))[0]:
        return False
    edit_messages, is_applied = (
        [(str(path), _get_edit_fields(request), _get_applied_fingerprint(request)) for path, request in requests],
        False,
    )
    for name, plain, applied_fingerprint in json.loads(run.ranks.broadcast_bytes(json.dumps(edit_messages).encode())):
        path = Path(name)
        refusal = _find_refusal(run, plain, path.name)
        if applied_fingerprint and refusal is not None:
            raise TrainError(
                f"The run applied the edit in {path} before it was stopped, and cannot apply it again: {refusal} "
                "Resume with the data and settings it was stopped with, or delete that file to continue without the "
                "edit."
            )
        if not run.ranks.total(float(run.ranks.first and _claim_request(path)))[0]:
            run.log.print_line(f"edit   {path.name} was deleted, so the edit is withdrawn")
        elif refusal is None:
            _apply_edit(run, path, plain, step)
            is_applied = True
        else:
            if run.ranks.first:
                _answer_request(path, {"edit": plain, "refused": refusal})
            run.log.print_line(f"edit   {path.name} is refused: {refusal}")
    return is_applied


def _get_edit_fields(request: dict[str, Any]) -> Any:
    """Return the fields of a request's edit.

    An applied request has them in the form of the journal.
    """
    if "edit" in request:
        return request["edit"]
    return {name: value for name, value in request["taken"].items() if name not in _JOURNAL_KEYS}


def _claim_request(path: Path) -> bool:
    """Rename a request so that it cannot be withdrawn; False if it is missing."""
    with _wrap_write_errors(path):
        try:
            path.rename(_get_claimed_path(path))
        except FileNotFoundError:
            return False
    return True


def _find_refusal(run: TrainRun, plain: dict[str, Any], name: str) -> str | None:
    """Return the reason why an edit cannot be applied on some rank; None if it can.

    Raise TrainError if the ranks would have different orders.
    """
    try:
        plan = run.loader.edited(_parse_edit(plain))
        check_edited_plan(run, plan)
        check_journal(plan.journal)
        own_verdict = {"fingerprint": plan.fingerprint}
    except BatchloomError as error:
        own_verdict = {"refused": str(error)}
    verdicts = [json.loads(message) for message in run.ranks.all_gather_bytes(json.dumps(own_verdict).encode())]
    for rank, verdict in enumerate(verdicts):
        if "refused" in verdict:
            is_unanimous = all(other_verdict == verdict for other_verdict in verdicts)
            return str(verdict["refused"]) if is_unanimous else f"Rank {rank}: {verdict['refused']}"
    difference = find_differing_rank([verdict["fingerprint"] for verdict in verdicts])
    if difference is not None:
        raise TrainError(
            f"With the edit in {name} the ranks would have different orders: {difference}. It was not applied. Give "
            "every rank the same stores, and continue with --resume."
        )
    return None


def _parse_edit(plain: dict[str, Any]) -> Edit:
    try:
        return Edit(**plain)
    except TypeError as error:
        raise SettingsError([f"edit: {error}; batchloom edit writes one"]) from error


def _apply_edit(run: TrainRun, path: Path, plain: dict[str, Any], step: int) -> None:
    """Apply an edit that all ranks accept, answer its request, and log it."""
    loader, edit = run.loader, _parse_edit(plain)
    if not run.ranks.first:
        loader.edit(edit)
        return
    steps = max(run.settings.steps, edit.step + 1)
    before = describe_mixture(loader.plan, steps)
    loader.edit(edit)
    journal, after = loader.plan.journal, describe_mixture(loader.plan, steps)
    # No step has used the edit yet, so a run that dies before the answer is complete has not applied it.
    answer = {"taken": journal[-1], "number": len(journal), "before": before, "after": after}
    _answer_request(path, answer)
    run.log.write({"kind": "edit", "step": step, "edit": journal[-1]})
    run.log.print_line(f"edit   {path.name} is accepted, and applies after {format_count(edit.step, 'step')}")
    for line in after:
        if line not in before:
            run.log.print_line(line)


def _answer_request(path: Path, answer: dict[str, Any]) -> None:
    """Write the answer of a claimed request, and restore its name."""
    claimed = _get_claimed_path(path)
    with _wrap_write_errors(path):
        write_json(claimed, answer)
        claimed.rename(path)
        fsync_path(path.parent)
