"""Folders of checkpoints that many processes write: each is whole, or its name does not say that it is one."""

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
from batchloom.core.partial_files import PARTIAL_SUFFIX, wrap_os_errors
from batchloom.store.write import sync_folder

_CHECKPOINT_NAME = re.compile(r"checkpoint-(\d+)")


def parse_checkpoint_step(checkpoint: Path) -> int:
    """Steps done before a checkpoint was taken: the number in its name.

    Raises:
        StateError: it has no such name.
    """
    match = _CHECKPOINT_NAME.fullmatch(checkpoint.name)
    if match is None:
        raise StateError(f"{checkpoint} is no checkpoint: one is a folder named checkpoint-N, after N steps.")
    return int(match[1])


def list_checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints in a folder, the oldest first; what a killed run left unfinished is none."""
    if not folder.is_dir():
        return []
    checkpoints = [path for path in folder.iterdir() if _CHECKPOINT_NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(checkpoints, key=parse_checkpoint_step)


def find_newest_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint in a folder as rank 0 sees it; every rank calls it."""
    names = [path.name for path in list_checkpoints(folder)[-1:]]
    if dist.is_initialized():
        names = json.loads(all_gather_bytes(json.dumps(names).encode())[0])
    return folder / names[0] if names else None


def resume_loader(loader: Loader, state: dict[str, Any], name: str, step: int) -> int:
    """Have a loader go on with the state that a checkpoint holds; the steps done.

    They are one less than the checkpoint's where its run ended inside a step, which a longer run fills up.

    Args:
        loader: of this process.
        state: what the checkpoint has of a loader.
        name: of the checkpoint.
        step: the steps done by it.

    Raises:
        StateError: it is of another plan or store (names each field that differs), or stands before another step.
    """
    loader.load_state_dict(state)
    state_step = loader.next_step
    if not loader.streamed:
        state_step = loader.plan.orders.course.step_at(state["position"])[0]
    if state_step != step:
        raise StateError(
            f"{name} holds the loader's place before step {state_step}: it was renamed, or saved with another "
            "number of "
            "steps than were trained. Go on from another checkpoint."
        )
    return loader.next_step


def unusable_checkpoint_error(checkpoint: Path, fault: BaseException) -> StateError:
    """What is raised where a checkpoint's files cannot be read, or do not fit."""
    message = " ".join(str(fault).split())[:300]
    return StateError(
        f"{checkpoint} cannot be loaded: {type(fault).__name__}: {message}. It was saved of another model or "
        "optimizer, "
        "or is damaged: give those it was saved of, or delete the folder to go on from the one before."
    )


@contextlib.contextmanager
def writing_checkpoint(folder: Path, step: int) -> Iterator[Path]:
    """An empty folder to write a checkpoint into, which gets its name when all ranks are done; every rank calls it.

    Raises:
        OutputError: the folder cannot be made, or cannot get its name.
    """
    partial_folder = begin_checkpoint(folder, step)
    yield partial_folder
    commit_checkpoint(partial_folder)


def begin_checkpoint(folder: Path, step: int) -> Path:
    """The empty folder that :func:`commit_checkpoint` gives its name; every rank calls it."""
    path = folder / f"checkpoint-{step}"
    partial_folder = path.with_name(path.name + PARTIAL_SUFFIX)
    if _is_first_rank():
        with wrap_os_errors("write", partial_folder):
            for stale_folder in (partial_folder, _make_replaced_path(path)):
                shutil.rmtree(stale_folder, ignore_errors=True)
            partial_folder.mkdir(parents=True)
    barrier()
    return partial_folder


def commit_checkpoint(partial_folder: Path) -> Path:
    """Give a checkpoint its name, when all ranks have written their part; every rank calls it."""
    barrier()
    path = partial_folder.with_name(partial_folder.name.removesuffix(PARTIAL_SUFFIX))
    if _is_first_rank():
        with wrap_os_errors("write", path):
            # What a folder of names needs, a file of bytes does.
            for entry in (*partial_folder.rglob("*"), partial_folder):
                sync_folder(entry)
            # Of the same step, from a run that went on from an earlier one: it goes when the new one is there.
            if path.exists():
                path.rename(_make_replaced_path(path))
            partial_folder.rename(path)
        sync_folder(path.parent)
        shutil.rmtree(_make_replaced_path(path), ignore_errors=True)
    barrier()
    return path


def _make_replaced_path(path: Path) -> Path:
    """What the checkpoint that another takes the place of is called meanwhile."""
    return path.with_name(f"{path.name}.former{PARTIAL_SUFFIX}")


def remove_old_checkpoints(folder: Path, max_checkpoints: int) -> None:
    """Remove all checkpoints but the newest ``max_checkpoints``."""
    if _is_first_rank():
        for path in list_checkpoints(folder)[:-max_checkpoints]:
            shutil.rmtree(path, ignore_errors=True)


def discard_later_checkpoints(folder: Path, step: int) -> None:
    """Take the names of checkpoints after a step that a run goes back to, so that none passes for its newest.

    They stay as ``checkpoint-N.abandoned``; every rank calls it.

    Raises:
        OutputError: one cannot be renamed.
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
