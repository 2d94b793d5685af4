"""Folders of checkpoints that many processes write: each is whole, or its name does not say that it is one."""

import contextlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from batchloom.adapters.agreement import gathered
from batchloom.core.aside import ASIDE, refused
from batchloom.core.errors import StateError
from batchloom.store.writer import sync_folder

_NAME = re.compile(r"checkpoint-(\d+)")


def step_of(checkpoint: Path) -> int:
    """Steps done before a checkpoint was taken: the number in its name.

    Raises:
        StateError: it has no such name.
    """
    found = _NAME.fullmatch(checkpoint.name)
    if found is None:
        raise StateError(
            f"{checkpoint} is no checkpoint: one is a folder named checkpoint-N, after N steps."
        )
    return int(found[1])


def all_of(folder: Path) -> list[Path]:
    """The whole checkpoints in a folder, the oldest first; what a killed run left unfinished is none."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of)


def newest(folder: Path) -> Path | None:
    """The newest whole checkpoint in a folder as rank 0 sees it; every rank calls it."""
    found = [path.name for path in all_of(folder)[-1:]]
    if dist.is_initialized():
        found = json.loads(gathered(json.dumps(found).encode())[0])
    return folder / found[0] if found else None


@contextlib.contextmanager
def written_aside(folder: Path, step: int) -> Iterator[Path]:
    """An empty folder to write a checkpoint into, which gets its name when all ranks are done; every rank calls it.

    Raises:
        OutputError: the folder cannot be made, or cannot get its name.
    """
    aside = begin(folder, step)
    yield aside
    commit(aside)


def begin(folder: Path, step: int) -> Path:
    """The empty folder that :func:`commit` gives its name; every rank calls it."""
    path = folder / f"checkpoint-{step}"
    aside = path.with_name(path.name + ASIDE)
    if _first():
        with refused("write", aside):
            for left in (aside, _former(path)):
                shutil.rmtree(left, ignore_errors=True)
            aside.mkdir(parents=True)
    meet()
    return aside


def commit(aside: Path) -> Path:
    """Give a checkpoint its name, when all ranks have written their part; every rank calls it."""
    meet()
    path = aside.with_name(aside.name.removesuffix(ASIDE))
    if _first():
        with refused("write", path):
            # What a folder of names needs, a file of bytes does.
            for one in (*aside.rglob("*"), aside):
                sync_folder(one)
            # Of the same step, from a run that went on from an earlier one: it goes when the new one is there.
            if path.exists():
                path.rename(_former(path))
            aside.rename(path)
        sync_folder(path.parent)
        shutil.rmtree(_former(path), ignore_errors=True)
    meet()
    return path


def _former(path: Path) -> Path:
    """What the checkpoint that another takes the place of is called meanwhile."""
    return path.with_name(f"{path.name}.former{ASIDE}")


def keep(folder: Path, most: int) -> None:
    """Remove all checkpoints but the newest ``most``."""
    if _first():
        for path in all_of(folder)[:-most]:
            shutil.rmtree(path, ignore_errors=True)


def meet() -> None:
    """Wait for all ranks."""
    if dist.is_initialized():
        dist.barrier()


def _first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
