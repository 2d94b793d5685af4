"""Checkpoint folders written by several processes and renamed when complete."""

import contextlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from batchloom.adapters.agreement import all_gather_bytes
from batchloom.batches import Loader
from batchloom.core.errors import StateError
from batchloom.core.files import PARTIAL_SUFFIX, wrap_os_errors
from batchloom.store.write import sync_folder

_CHECKPOINT_NAME = re.compile(r"checkpoint-(\d+)")


def parse_checkpoint_step(checkpoint: Path) -> int:
    """Return the steps done before a checkpoint: the number in its name.

    Raises:
        StateError: the name is not ``checkpoint-N``.
    """
    match = _CHECKPOINT_NAME.fullmatch(checkpoint.name)
    if match is None:
        raise StateError(
            f"{checkpoint} is not a checkpoint: a checkpoint is a folder named checkpoint-N, after N steps."
        )
    return int(match[1])


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, oldest first."""
    if not folder.is_dir():
        return []
    checkpoints = [path for path in folder.iterdir() if _CHECKPOINT_NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(checkpoints, key=parse_checkpoint_step)


def find_newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest complete checkpoint that rank 0 sees; every rank calls it."""
    names = [path.name for path in list_checkpoints(folder)[-1:]]
    if dist.is_initialized():
        names = json.loads(all_gather_bytes(json.dumps(names).encode())[0])
    return folder / names[0] if names else None


def resume_loader(loader: Loader, state: dict[str, Any], name: str, step: int) -> int:
    """Load a checkpoint's state into a loader and return the steps done.

    That is one less than the checkpoint's if its run ended inside a step, which a longer run completes.

    Raises:
        StateError: the state belongs to another plan or store (names each field that differs), or to another step.
    """
    loader.load_state_dict(state)
    state_step = loader.next_step
    if not loader.streamed:
        state_step = loader.plan.step_at(state["position"])[0]
    if state_step != step:
        raise StateError(
            f"{name} holds the loader state before step {state_step}: it was renamed, or saved with a wrong number "
            "of trained steps. Resume from another checkpoint."
        )
    return loader.next_step


def unusable_checkpoint_error(checkpoint: Path, fault: BaseException) -> StateError:
    message = " ".join(str(fault).split())[:300]
    return StateError(
        f"{checkpoint} cannot be loaded: {type(fault).__name__}: {message}. It was saved from another model or "
        "optimizer, or is damaged: give the ones it was saved from, or delete the folder to resume from the previous "
        "checkpoint."
    )


@contextlib.contextmanager
def writing_checkpoint(folder: Path, step: int) -> Iterator[Path]:
    """Yield an empty checkpoint folder and rename it at the end; all ranks call it.

    Raises:
        OutputError: the folder cannot be created or renamed.
    """
    partial_folder = begin_checkpoint(folder, step)
    yield partial_folder
    commit_checkpoint(partial_folder)


def begin_checkpoint(folder: Path, step: int) -> Path:
    """Create the folder that :func:`commit_checkpoint` renames; every rank calls it."""
    path = folder / f"checkpoint-{step}"
    if _is_first_rank():
        with wrap_os_errors("write", path):
            _create_partial_folder(path)
    barrier()
    return path.with_name(path.name + PARTIAL_SUFFIX)


def commit_checkpoint(partial_folder: Path) -> Path:
    """Rename a checkpoint when all ranks have written their part; every rank calls it."""
    barrier()
    path = partial_folder.with_name(partial_folder.name.removesuffix(PARTIAL_SUFFIX))
    if _is_first_rank():
        with wrap_os_errors("write", path):
            _rename_partial_folder(path)
    barrier()
    return path


@contextlib.contextmanager
def replace_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder that takes the place of ``path`` at the end."""
    partial_folder = _create_partial_folder(path)
    try:
        yield partial_folder
        _rename_partial_folder(path)
    finally:
        shutil.rmtree(partial_folder, ignore_errors=True)


def _create_partial_folder(path: Path) -> Path:
    partial_folder = path.with_name(path.name + PARTIAL_SUFFIX)
    for stale_folder in (partial_folder, _make_replaced_path(path)):
        shutil.rmtree(stale_folder, ignore_errors=True)
    partial_folder.mkdir(parents=True)
    return partial_folder


def _rename_partial_folder(path: Path) -> None:
    """Sync the partial folder of a path to disk, and give it the name of the path."""
    partial_folder = path.with_name(path.name + PARTIAL_SUFFIX)
    # fsync works for files as it does for folders.
    for entry in (*partial_folder.rglob("*"), partial_folder):
        sync_folder(entry)
    # The former folder, for example of a step before an earlier resume, is deleted after the new one exists.
    if path.exists():
        path.rename(_make_replaced_path(path))
    partial_folder.rename(path)
    sync_folder(path.parent)
    shutil.rmtree(_make_replaced_path(path), ignore_errors=True)


def _make_replaced_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.former{PARTIAL_SUFFIX}")


def remove_old_checkpoints(folder: Path, max_checkpoints: int) -> None:
    if _is_first_rank():
        for path in list_checkpoints(folder)[:-max_checkpoints]:
            shutil.rmtree(path, ignore_errors=True)


def discard_later_checkpoints(folder: Path, step: int) -> None:
    """Rename checkpoints after a step that a run returns to, so none counts as newest.

    Their new names are ``checkpoint-N.abandoned``; every rank calls it.

    Raises:
        OutputError: a checkpoint cannot be renamed.
    """
    if _is_first_rank():
        for path in list_checkpoints(folder):
            if parse_checkpoint_step(path) > step:
                abandoned_path = path.with_name(f"{path.name}.abandoned")
                with wrap_os_errors("rename", path):
                    shutil.rmtree(abandoned_path, ignore_errors=True)
                    path.rename(abandoned_path)
    barrier()


def barrier() -> None:
    """Wait for all ranks."""
    if dist.is_initialized():
        dist.barrier()


def _is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
