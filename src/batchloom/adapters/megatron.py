"""Megatron-core: loaders for its training loop, stores for its ``GPTDataset``.

parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
loader = Loader(store, seq_len=4096, global_batch_size=256, micro_batch_size=2, **get_megatron_rank())
batches = make_megatron_iterator(loader)  # on every rank; for forward_backward_func(data_iterator=batches, ...)
"""

from batchloom.adapters.requirements import MEGATRON, TORCH, require_installed

require_installed(TORCH, MEGATRON)

from collections.abc import Iterator, Sequence
from typing import Any, TypedDict

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import num_microbatches_calculator, parallel_state

from batchloom.adapters.agreement import get_collective_device, require_agreement
from batchloom.batches import Batch, Loader, check_text_only, forms, get_token_reader
from batchloom.batches.assembly import Labels
from batchloom.batches.loading import iter_step_numbers, require_plan_feed
from batchloom.core.errors import InputError, StateError, TrainError
from batchloom.core.settings import as_int, quote_value
from batchloom.plan import Edit, Mesh
from batchloom.plan.order import RankPlacement
from batchloom.store import Store
from batchloom.store.format import OBJECTIVES

MicroBatch = dict[str, Any]


class MegatronRank(TypedDict):
    """Keyword arguments for a ``Loader`` in a Megatron process."""

    rank: int
    world_size: int
    labels: Labels
    mesh: Mesh


def get_megatron_rank() -> MegatronRank:
    """Return this process's rank in ``parallel_state`` as arguments of a ``Loader``.

    Use it as ``Loader(..., **get_megatron_rank())``.

    Raises:
        TrainError: ``parallel_state`` is not initialized, or its rank order matches no mesh.
    """
    if not parallel_state.model_parallel_is_initialized():
        raise TrainError("megatron.core.parallel_state is not initialized: call initialize_model_parallel(...) first.")
    groups = {
        "tensor": parallel_state.get_tensor_model_parallel_group(),
        "context": parallel_state.get_context_parallel_group(),
        "data": parallel_state.get_data_parallel_group(),
        "pipeline": parallel_state.get_pipeline_model_parallel_group(),
    }
    ranks = {name: dist.get_process_group_ranks(group) for name, group in groups.items()}
    # Ranks of the innermost dimension are adjacent. The position of a dimension of size 1 does not matter.
    strides = {
        name: group_ranks[1] - group_ranks[0] if len(group_ranks) > 1 else 0 for name, group_ranks in ranks.items()
    }
    mesh = Mesh(
        tensor=len(ranks["tensor"]),
        context=len(ranks["context"]),
        pipeline=len(ranks["pipeline"]),
        slices="zigzag",
        order=tuple(sorted(strides, key=lambda name: strides[name])),
    )
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    placement = mesh.get_placement(rank, world_size)
    megatron_placement = RankPlacement(
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_data_parallel_world_size(),
        parallel_state.get_context_parallel_rank(),
    )
    if placement != megatron_placement:
        raise TrainError(
            f"parallel_state has process {rank} at {megatron_placement}, and a mesh of {mesh.order} at {placement}: "
            "give initialize_model_parallel an order that names each kind of parallelism once."
        )
    return {"rank": rank, "world_size": world_size, "labels": "shifted", "mesh": mesh}


def make_megatron_iterator(
    loader: Loader, *, attention_mask: bool | None = None, vp_stage: int | None = None
) -> Iterator[MicroBatch]:
    """Return a run's micro-batches in the form of Megatron's ``get_batch``.

    Every rank calls it, at the same point. It begins with the loader's ``next_step`` at the call, independent of other
    iterators of the loader.

    The first tensor-parallel rank reads and broadcasts to the others. The first and last pipeline stages read.
    Context-parallel ranks already get their slices, as ``get_batch_on_this_cp_rank`` makes them.

    Args:
        loader: loader of this process, made with ``**get_megatron_rank()``; its state advances on all ranks
            alike, also on those that do not read.
        attention_mask: whether to add a mask; see :func:`needs_attention_mask`.
        vp_stage: stage of the model chunk in an interleaved pipeline.

    Yields:
        ``tokens`` and ``labels`` int64 [R, S], labels being next tokens, 0 without a loss; ``loss_mask``
        float32 [R, S], the loss weight of each token, 1 without weights; ``position_ids`` int64 [R, S], which restart
        with each document; ``attention_mask`` bool [R, 1, S, S], True at masked positions, or None. On middle stages
        all of them are None.

    Raises:
        InputError: the loader is a stream or has another form, or rows are packed and ``attention_mask`` is not set.
        TrainError: ranks disagree, or a step's micro-batches or sequences differ from Megatron's calculator (raised at
            that step).
    """
    mask = needs_attention_mask(loader, attention_mask)
    _check_loader(loader, attention_mask=mask)
    require_agreement(loader)
    is_middle_stage = not (
        parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
        or parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    )
    feed = require_plan_feed(loader.feed, 0)
    # The start is fixed here, not at the first ``next``.
    steps = iter_step_numbers(feed, feed.iterations.next_step)
    if is_middle_stage and not mask:
        return _iter_nothing(loader, steps)
    if parallel_state.get_tensor_model_parallel_rank() == 0:
        return _name_tensors(_read_micro_batches(loader, iter(loader)), attention_mask=mask)
    return _name_tensors(_allocate_micro_batches(loader, steps), attention_mask=mask)


def needs_attention_mask(loader: Loader, attention_mask: bool | None) -> bool:  # noqa: FBT001 - passed through
    """Return whether micro-batches of a loader need an attention mask.

    Args:
        loader: loader whose rows hold one document each (``packing="none"``), or several.
        attention_mask: True to add one. False for none: packed documents then attend to each other, unless the model
            separates them by ``position_ids``, which a ``GPTModel`` does not. None only for unpacked rows.

    Raises:
        InputError: ``attention_mask`` is None, and rows are packed.
    """
    if attention_mask is None and (packing := loader.plan.spec.packing) != "none":
        raise InputError(
            f"Rows are packed ({packing!r}), and Megatron's models let the documents of a row see each other without "
            "a mask: give attention_mask=True (S x S bytes per row, no context parallelism), or pack one document "
            "per row (packing='none'); or give attention_mask=False if the model separates them by position_ids or "
            "they may see each other."
        )
    return bool(attention_mask)


def _check_loader(loader: Loader, *, attention_mask: bool) -> None:
    spec = loader.spec
    megatron_rank = get_megatron_rank()
    megatron_share = megatron_rank["mesh"], megatron_rank["rank"], megatron_rank["world_size"]
    problems = [
        f"{name} is {actual!r} and must be {expected!r}"
        for name, actual, expected in (
            ("place", _get_rank_settings(spec.mesh, spec.rank, spec.world_size), _get_rank_settings(*megatron_share)),
            ("labels", spec.labels, "shifted"),
            ("form", spec.form, "rows"),
            ("output", spec.output, "torch"),
        )
        if actual != expected
    ]
    check_text_only(loader, "the adapter of Megatron")
    if loader.streamed:
        problems.append("a stream, which has no consumed_samples: prepare the data")
    if attention_mask and spec.mesh.context > 1:
        problems.append(f"attention_mask is not supported with {spec.mesh.context} context ranks: leave it out")
    if problems:
        raise InputError(
            f"Megatron cannot be fed from this Loader: {'; '.join(problems)}. Give Loader(..., **get_megatron_rank())."
        )


def _get_rank_settings(mesh: Mesh, rank: int, world_size: int) -> tuple[RankPlacement, str]:
    """Return the settings of a process that determine its data."""
    return mesh.get_placement(rank, world_size), mesh.slices if mesh.context > 1 else "whole"


def _iter_nothing(loader: Loader, steps: Iterator[int]) -> Iterator[MicroBatch]:
    for step in steps:
        yield from [_NO_TENSORS.copy() for _ in range(_count_micro_batches(loader, step))]


_NO_TENSORS: MicroBatch = dict.fromkeys(("tokens", "labels", "loss_mask", "position_ids", "attention_mask"))
_BATCH_KEYS = ("input_ids", "labels", "position_ids")


def _name_tensors(parts: Iterator[torch.Tensor], *, attention_mask: bool) -> Iterator[MicroBatch]:
    for part in parts:
        tokens, labels, positions, *weights = _broadcast_tensor(part).unbind()
        tensors = forms.make_megatron_arrays(tokens, labels, positions, attention_mask=attention_mask)
        if weights:
            tensors["loss_mask"] = weights[0].int().view(torch.float32)
        yield {"attention_mask": None} | tensors


def _read_micro_batches(loader: Loader, batches: Iterator[Batch]) -> Iterator[torch.Tensor]:
    """Yield ids, labels and positions of each micro-batch, int64 [3, R, S].

    With loss weights they are the fourth array, as the bits of float32.
    """
    device = get_collective_device(parallel_state.get_tensor_model_parallel_group())
    for batch in batches:
        passes = _count_micro_batches(loader, batch.step)
        for part in batch.split(len(batch["input_ids"]) // passes):
            arrays = [part[key] for key in _BATCH_KEYS]
            if "loss_weights" in part:
                arrays.append(part["loss_weights"].contiguous().view(torch.int32).long())
            yield torch.stack(arrays).to(device)


def _allocate_micro_batches(loader: Loader, steps: Iterator[int]) -> Iterator[torch.Tensor]:
    """Yield empty tensors to receive micro-batches that another rank reads."""
    device = get_collective_device(parallel_state.get_tensor_model_parallel_group())
    for step in steps:
        passes = _count_micro_batches(loader, step)
        seq_len = loader.plan.spec_at(step).seq_len
        arrays = len(_BATCH_KEYS) + get_token_reader(loader.store).weighted
        shape = (arrays, loader.feed.share_at(step).rows // passes, seq_len // loader.spec.mesh.context)
        for _ in range(passes):
            yield torch.empty(shape, dtype=torch.int64, device=device)


def _broadcast_tensor(tensor: torch.Tensor) -> torch.Tensor:
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        first = parallel_state.get_tensor_model_parallel_src_rank()
        dist.broadcast(tensor, first, group=parallel_state.get_tensor_model_parallel_group())
    return tensor


def _count_micro_batches(loader: Loader, step: int) -> int:
    """Return a step's micro-batches per rank; reject another count in Megatron."""
    share = loader.feed.share_at(step)
    try:
        megatron_counts = (
            num_microbatches_calculator.get_num_microbatches(),
            num_microbatches_calculator.get_micro_batch_size(),
            num_microbatches_calculator.get_current_global_batch_size(),
        )
    except AttributeError:
        # The calculator is not set up, so the training loop counts itself.
        return share.passes
    size = loader.plan.spec_at(step).global_batch_size
    plan_counts = (share.passes, share.micro_batch_size, size)
    if plan_counts != megatron_counts:
        raise TrainError(
            f"Step {step} of the plan is {plan_counts[0]} micro-batches of {plan_counts[1]} rows per rank, "
            f"{plan_counts[2]} sequences in total; Megatron's calculator gives {megatron_counts[0]} of "
            f"{megatron_counts[1]}, {megatron_counts[2]} in total. Give both the same micro_batch_size and "
            "global_batch_size; for rampup_batch_size, edit the plan too (make_rampup_edits)."
        )
    return plan_counts[0]


def count_consumed_samples(loader: Loader, step: int) -> int:
    """Return the number of sequences before a step, over all ranks.

    Megatron stores it in its checkpoints.
    """
    return loader.plan.positions_of(step)[0]


def resume_from_samples(loader: Loader, consumed: int) -> int:
    """Resume a loader after ``consumed`` sequences and return the next step.

    The number does not identify its plan. ``loader.load_state_dict`` does, and rejects another plan.

    Raises:
        StateError: ``consumed`` is no number, is inside a step (names the nearest), or after the end of the plan.
    """
    number = as_int(consumed)
    if number is None or number < 0:
        raise StateError(f"consumed_samples {quote_value(consumed)} is not a number of sequences.")
    step, inside = loader.plan.step_at(number)
    if inside:
        before, after = loader.plan.positions_of(step)
        raise StateError(
            f"consumed_samples {number} is inside step {step}, which holds {before} to {after - 1}: resume from "
            f"{before} or {after}. Was it counted with another global_batch_size?"
        )
    if step and not loader.plan.has_step(step - 1):
        raise StateError(
            f"consumed_samples {number} is past the end of the plan, which has no step {step - 1}: was it counted "
            "with another global_batch_size, or in a longer run?"
        )
    loader.load_state_dict(loader.state_at(step))
    return step


def make_rampup_edits(rampup_batch_size: Sequence[int], global_batch_size: int) -> list[Edit]:
    """Convert ``--rampup-batch-size START INCREMENT SAMPLES`` to plan edits.

    The plan must have ``global_batch_size`` START. Apply the edits with ``loader.edit`` before the first step.
    Then each step has as many sequences as in Megatron's calculator.

    Raises:
        InputError: they are not three integers, or the increment does not lead from START to
            ``global_batch_size``.
    """
    numbers = [as_int(number) for number in rampup_batch_size]
    if len(numbers) != 3 or None in numbers:
        raise InputError(
            f"rampup_batch_size is {quote_value(rampup_batch_size)} and not three whole numbers: START INCREMENT "
            f"SAMPLES, as [int(word) for word in args.rampup_batch_size]."
        )
    start, increment, samples = (number or 0 for number in numbers)
    rise = global_batch_size - start
    if min(start, increment, samples, rise) < 1 or rise % increment:
        raise InputError(
            f"rampup_batch_size {start} {increment} {samples} does not lead to global_batch_size "
            f"{global_batch_size}: give a start below it, an increment that divides the difference, and samples."
        )
    samples_per_increment = samples / (rise // increment)
    edits = []
    size = start
    step = 0
    consumed = 0
    while size < global_batch_size:
        step += 1
        consumed = consumed + size
        increments = int(consumed / samples_per_increment) if consumed <= samples else rise // increment
        if (next_size := start + increments * increment) != size:
            edits.append(Edit(step=step, global_batch_size=next_size))
            size = next_size
    return edits


def list_megatron_prefixes(store: Store) -> list[str]:
    """Return a store's shards as ``--data-path`` and a recipe's ``paths`` take them.

    Each shard has its tokens as weight, so that Megatron reads all shards about equally often.

    Raises:
        InputError: the store has data that Megatron's readers would train on by mistake (masked or removed tokens,
            another objective), or is not on disk.
    """
    if not store.location.on_disk:
        raise InputError(
            f"{store.location.name} is generated as it is read and has no shards: write it with batchloom prepare."
        )
    if store.contents.objective:
        objective = OBJECTIVES[store.contents.objective]
        raise InputError(
            f"{store.location.name} holds {objective.contents}, which Megatron would train on as texts: read it with "
            f"{objective.reader}."
        )
    if store.reader.weighted:
        raise InputError(
            f"{store.location.name} has loss weights, which Megatron's readers ignore: feed it through "
            "make_megatron_iterator."
        )
    if store.masked:
        untrained_tokens = store.tokens - store.contents.trained_tokens
        raise InputError(
            f"{store.location.name} has {untrained_tokens:,} of {store.tokens:,} tokens that are not to be trained, "
            "and Megatron's readers ignore masks: feed it through make_megatron_iterator, or, if documents were only "
            "removed, write the store without them (batchloom export --to megatron)."
        )
    lengths = [
        int(np.sum(store.lengths.slice(first, stop), dtype=np.int64))
        for first, stop in zip(store.shards.bounds, store.shards.bounds[1:], strict=False)
    ]
    pairs: list[str] = []
    for stem, tokens in zip(store.shards.stems, lengths, strict=True):
        pairs += [str(tokens), str(stem)] if tokens else []
    return pairs
