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
    found = _CHECKPOINT_NAME.fullmatch(checkpoint.name)
    if found is None:
        raise StateError(
            f"{checkpoint} is no checkpoint: one is a folder named checkpoint-N, after N steps."
        )
    return int(found[1])


def list_checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints in a folder, the oldest first; what a killed run left unfinished is none."""
    if not folder.is_dir():
        return []
    found = [
        path for path in folder.iterdir() if _CHECKPOINT_NAME.fullmatch(path.name) and path.is_dir()
    ]
    return sorted(found, key=parse_checkpoint_step)


def find_newest_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint in a folder as rank 0 sees it; every rank calls it."""
    found = [path.name for path in list_checkpoints(folder)[-1:]]
    if dist.is_initialized():
        found = json.loads(all_gather_bytes(json.dumps(found).encode())[0])
    return folder / found[0] if found else None


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
    there = loader.next_step
    if not loader.streamed:
        there = loader.plan.orders.course.step_at(state["position"])[0]
    if there != step:
        raise StateError(
            f"{name} holds the loader's place before step {there}: it was renamed, or saved with another number of "
            "steps than were trained. Go on from another checkpoint."
        )
    return loader.next_step


def unusable_checkpoint_error(checkpoint: Path, fault: BaseException) -> StateError:
    """What is raised where a checkpoint's files cannot be read, or do not fit."""
    said = " ".join(str(fault).split())[:300]
    return StateError(
        f"{checkpoint} cannot be loaded: {type(fault).__name__}: {said}. It was saved of another model or optimizer, "
        "or is damaged: give those it was saved of, or delete the folder to go on from the one before."
    )


@contextlib.contextmanager
def writing_checkpoint(folder: Path, step: int) -> Iterator[Path]:
    """An empty folder to write a checkpoint into, which gets its name when all ranks are done; every rank calls it.

    Raises:
        OutputError: the folder cannot be made, or cannot get its name.
    """
    aside = begin_checkpoint(folder, step)
    yield aside
    commit_checkpoint(aside)


def begin_checkpoint(folder: Path, step: int) -> Path:
    """The empty folder that :func:`commit_checkpoint` gives its name; every rank calls it."""
    path = folder / f"checkpoint-{step}"
    aside = path.with_name(path.name + PARTIAL_SUFFIX)
    if _is_first_rank():
        with wrap_os_errors("write", aside):
            for left in (aside, _replaced_path(path)):
                shutil.rmtree(left, ignore_errors=True)
            aside.mkdir(parents=True)
    barrier()
    return aside


def commit_checkpoint(aside: Path) -> Path:
    """Give a checkpoint its name, when all ranks have written their part; every rank calls it."""
    barrier()
    path = aside.with_name(aside.name.removesuffix(PARTIAL_SUFFIX))
    if _is_first_rank():
        with wrap_os_errors("write", path):
            # What a folder of names needs, a file of bytes does.
            for one in (*aside.rglob("*"), aside):
                sync_folder(one)
            # Of the same step, from a run that went on from an earlier one: it goes when the new one is there.
            if path.exists():
                path.rename(_replaced_path(path))
            aside.rename(path)
        sync_folder(path.parent)
        shutil.rmtree(_replaced_path(path), ignore_errors=True)
    barrier()
    return path


def _replaced_path(path: Path) -> Path:
    """What the checkpoint that another takes the place of is called meanwhile."""
    return path.with_name(f"{path.name}.former{PARTIAL_SUFFIX}")


def remove_old_checkpoints(folder: Path, most: int) -> None:
    """Remove all checkpoints but the newest ``most``."""
    if _is_first_rank():
        for path in list_checkpoints(folder)[:-most]:
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
                aside = path.with_name(f"{path.name}.abandoned")
                with wrap_os_errors("rename", path):
                    shutil.rmtree(aside, ignore_errors=True)
                    path.rename(aside)
    barrier()


def barrier() -> None:
    """Wait for all ranks."""
    if dist.is_initialized():
        dist.barrier()


def _is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
