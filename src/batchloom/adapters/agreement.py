"""Ranks that read different data train on it without a word; here they are found out before the first step."""

from batchloom.adapters.requirements import TORCH, get_installed_version, require_installed

require_installed(TORCH)

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from batchloom.batches import Augment, Loader
from batchloom.core.errors import TrainError
from batchloom.core.settings import to_plain
from batchloom.plan import ORDER_VERSION

_MAX_LISTED = 4


def require_agreement(
    loader: Loader,
    group: dist.ProcessGroup | None = None,
    *,
    world_size: int | None = None,
    also: Mapping[str, Any] | None = None,
) -> None:
    """Make sure that all ranks read the same plan, each its own share of all there are; every rank calls it, and once.

    Without torch.distributed there is one rank, and nothing to compare.

    Args:
        loader: of this process.
        group: the processes that the loader's ``world_size`` counts; None for all.
        world_size: what it is to be where it is not the number of these processes: that of a framework which gives
            the same share to several of them (its tensor-parallel ranks), or has processes without torch.distributed.
        also: what else has to be equal, by name: plain values.

    Raises:
        TrainError: on every rank: versions, stores, settings, edits or steps differ (names the first that differs, and
            both values), the loader is of another number of ranks, or one share is read in place of another.
    """
    description = _describe_rank(loader)
    description["equal"] |= also or {}
    rank_descriptions = [description]
    if dist.is_available() and dist.is_initialized():
        rank_descriptions = [
            json.loads(encoded_description)
            for encoded_description in all_gather_bytes(json.dumps(description).encode(), group)
        ]
    if (problem := find_disagreement(rank_descriptions, world_size)) is not None:
        raise TrainError(problem)


def _describe_rank(loader: Loader) -> dict[str, Any]:
    """What a rank says of itself: all that has to be equal, and its place."""
    plan, spec = loader.plan, loader.spec
    return {
        "place": [spec.rank, spec.world_size],
        "equal": {
            "batchloom": get_installed_version("batchloom"),
            "order_version": ORDER_VERSION,
            "identity": plan.identity,
            "edits": [] if loader.streamed else plan.journal,
            "fingerprint": plan.fingerprint,
            "next_step": loader.next_step,
            "steps": plan.spec.steps,
            "epochs": plan.spec.epochs,
            "world_size": spec.world_size,
            "labels": spec.labels,
            "form": spec.form,
            "uneven": spec.uneven,
            "micro_batch_size": spec.micro_batch_size,
            "balance": spec.balance,
            "augment": to_plain(loader.augmentation.settings if loader.augmentation else Augment()),
        },
    }


def find_disagreement(rank_descriptions: Sequence[dict[str, Any]], world_size: int | None = None) -> str | None:
    """Which of the ranks says something else than the first, and what; None where all fit together.

    Args:
        rank_descriptions: what each says.
        world_size: how many shares they read; None for one each.
    """
    first_values = flatten_values(rank_descriptions[0]["equal"])
    for rank, description in enumerate(rank_descriptions):
        values = flatten_values(description["equal"])
        names = [
            name
            for name in sorted({*first_values, *values})
            if first_values.get(name, "nothing") != values.get(name, "nothing")
        ]
        # The fingerprint follows from the others, and says least.
        names.sort(key=lambda name: name == "fingerprint")
        if names:
            differences = "; ".join(
                f"{name} is {first_values.get(name, 'nothing')!r} on rank 0 and {values.get(name, 'nothing')!r} on "
                f"rank {rank}"
                for name in names[:_MAX_LISTED]
            )
            omitted_note = f", and {len(names) - _MAX_LISTED} more differ" if len(names) > _MAX_LISTED else ""
            return (
                f"The ranks do not read the same: {differences}{omitted_note}. Give every rank the same store, "
                "settings, "
                "checkpoint and version of batchloom."
            )
    return _find_share_problem(
        [tuple(description["place"]) for description in rank_descriptions], world_size or len(rank_descriptions)
    )


def _find_share_problem(shares: Sequence[tuple[int, int]], world_size: int) -> str | None:
    """Why ranks in these places, which are of one world, do not read all of it, each share as often as any other."""
    rank, loader_world_size = shares[0]
    if loader_world_size != world_size:
        return (
            f"The Loader reads the share of rank {rank} of {loader_world_size}, and world_size is {world_size}: of "
            "a step "
            f"the rest would be left out, or read twice. {_REMEDY}"
        )
    ranks_per_share = len(shares) // world_size
    for rank, share in enumerate(shares):
        earlier_ranks = [earlier_rank for earlier_rank in range(rank) if shares[earlier_rank] == share]
        # One process alone may be any of those that nobody can ask.
        if ranks_per_share and len(earlier_ranks) >= ranks_per_share:
            return (
                f"Ranks {earlier_ranks[0]} and {rank} both read the share of rank {share[0]} of {share[1]}. {_REMEDY}"
            )
    return None


_REMEDY = (
    "Make the Loader after torch.distributed.init_process_group (a framework's own start), without rank= and "
    "world_size=, or give it the right ones."
)


def flatten_values(plain: Any, path: str = "") -> dict[str, Any]:
    """The leaves of plain values by their paths."""
    if not isinstance(plain, dict):
        return {path: plain}
    branches = ((f"{path}.{name}" if path else name, value) for name, value in plain.items())
    return {leaf: value for name, branch in branches for leaf, value in flatten_values(branch, name).items()}


def all_gather_bytes(message: bytes, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """What every rank of a group said, in the order of the ranks, the same on every rank; no pickle is read."""
    size, device = dist.get_world_size(group), get_collective_device(group)
    sizes = torch.zeros(size, dtype=torch.int64, device=device)
    sizes[dist.get_rank(group)] = len(message)
    dist.all_reduce(sizes, group=group)
    send_buffer = torch.zeros(int(sizes.max()), dtype=torch.uint8)
    send_buffer[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    receive_buffers = [torch.zeros_like(send_buffer, device=device) for _ in range(size)]
    dist.all_gather(receive_buffers, send_buffer.to(device), group=group)
    return [
        buffer.cpu().numpy().tobytes()[:length] for buffer, length in zip(receive_buffers, sizes.tolist(), strict=True)
    ]


def get_collective_device(group: dist.ProcessGroup | None) -> torch.device:
    """Where tensors of a group's collectives lie."""
    if "nccl" in str(dist.get_backend(group)):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
