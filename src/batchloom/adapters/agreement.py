"""Check before the first step that all ranks read the same data.

Ranks that read different data would train on it without an error.
"""

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
    """Check that all ranks read one plan, each its own share; all ranks call it once.

    Without torch.distributed there is one rank, and nothing to compare.

    Args:
        loader: loader of this process.
        group: processes that the loader's ``world_size`` counts; None for all.
        world_size: expected ``world_size`` if it is not the number of these processes: a framework gives the same
            share to several of them (tensor-parallel ranks), or has processes without torch.distributed.
        also: further plain values that have to be equal, by name.

    Raises:
        TrainError: raised on every rank: versions, stores, settings, edits or steps differ (names the first that
            differ, and both values), the loader is for another number of ranks, or two ranks read the same share.
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
    plan = loader.plan
    spec = loader.spec
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
            "augment": to_plain(loader.feed.augmentation.settings if loader.feed.augmentation else Augment()),
        },
    }


def find_disagreement(
    rank_descriptions: Sequence[dict[str, Any]],
    world_size: int | None = None,
    *,
    problem: str = "The ranks do not read the same data",
    remedy: str = "Give every rank the same store, settings, checkpoint and version of batchloom.",
) -> str | None:
    """Return the first disagreement between ranks as a message; None if all agree.

    Args:
        rank_descriptions: description of each rank, as of ``_describe_rank``.
        world_size: number of shares; None for one per rank.
        problem: opening of the message if values differ.
        remedy: its last sentence.
    """
    first_values = flatten_values(rank_descriptions[0]["equal"])
    for rank, description in enumerate(rank_descriptions):
        values = flatten_values(description["equal"])
        names = [
            name
            for name in sorted({*first_values, *values})
            if first_values.get(name, "nothing") != values.get(name, "nothing")
        ]
        # The fingerprint depends on the other values and explains least, so it comes last.
        names.sort(key=lambda name: name == "fingerprint")
        if names:
            differences = "; ".join(
                f"{name} is {first_values.get(name, 'nothing')!r} on rank 0 and {values.get(name, 'nothing')!r} on "
                f"rank {rank}"
                for name in names[:_MAX_LISTED]
            )
            omitted_note = f", and {len(names) - _MAX_LISTED} more differ" if len(names) > _MAX_LISTED else ""
            return f"{problem}: {differences}{omitted_note}. {remedy}"
    return _find_share_problem(
        [tuple(description["place"]) for description in rank_descriptions], world_size or len(rank_descriptions)
    )


def _find_share_problem(shares: Sequence[tuple[int, int]], world_size: int) -> str | None:
    """Describe why the shares do not cover the data evenly; None if they do."""
    rank, loader_world_size = shares[0]
    if loader_world_size != world_size:
        return (
            f"The Loader reads the share of rank {rank} of {loader_world_size}, and world_size is {world_size}: "
            f"parts of a step would be left out or read twice. {_REMEDY}"
        )
    ranks_per_share = len(shares) // world_size
    for rank, share in enumerate(shares):
        earlier_ranks = [earlier_rank for earlier_rank in range(rank) if shares[earlier_rank] == share]
        # A single process may have any share: the other processes cannot be compared.
        if ranks_per_share and len(earlier_ranks) >= ranks_per_share:
            return (
                f"Ranks {earlier_ranks[0]} and {rank} both read the share of rank {share[0]} of {share[1]}. {_REMEDY}"
            )
    return None


_REMEDY = (
    "Make the Loader after torch.distributed.init_process_group (or the framework's own initialization), without "
    "rank= and world_size=, or give it the right values."
)


def flatten_values(plain: Any, path: str = "") -> dict[str, Any]:
    """Return the leaves of nested plain values by their dotted paths."""
    if not isinstance(plain, dict):
        return {path: plain}
    branches = ((f"{path}.{name}" if path else name, value) for name, value in plain.items())
    return {leaf: value for name, branch in branches for leaf, value in flatten_values(branch, name).items()}


def all_gather_bytes(message: bytes, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """Return the message of every rank, in rank order, on every rank; without pickle."""
    size = dist.get_world_size(group)
    device = get_collective_device(group)
    sizes = torch.zeros(size, dtype=torch.int64, device=device)
    sizes[dist.get_rank(group)] = len(message)
    dist.all_reduce(sizes, group=group)
    send_buffer = torch.zeros(int(sizes.max()), dtype=torch.uint8)
    # torch.frombuffer refuses an empty message.
    if message:
        send_buffer[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    receive_buffers = [torch.zeros_like(send_buffer, device=device) for _ in range(size)]
    dist.all_gather(receive_buffers, send_buffer.to(device), group=group)
    return [
        buffer.cpu().numpy().tobytes()[:length] for buffer, length in zip(receive_buffers, sizes.tolist(), strict=True)
    ]


def get_collective_device(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device for tensors of a group's collectives."""
    if "nccl" in str(dist.get_backend(group)):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
