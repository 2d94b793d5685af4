"""Megatron-core: its training loop fed from our plan, and our stores as its ``GPTDataset`` reads them.

parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
loader = Loader(store, seq_len=4096, global_batch_size=256, micro_batch_size=2, **megatron_place())
batches = megatron_iterator(loader)  # on every rank; for forward_backward_func(data_iterator=batches, ...)
"""

from collections.abc import Iterator, Sequence
from typing import Any, TypedDict

import numpy as np
import torch
import torch.distributed as dist

from batchloom.adapters.agreement import device_of, require_agreement
from batchloom.adapters.requirements import MEGATRON, require
from batchloom.batches.assemble import IGNORE
from batchloom.batches.loader import Loader
from batchloom.batches.share import share_of
from batchloom.batches.spec import BatchSpec, Labels
from batchloom.core.errors import InputError, StateError, TrainError
from batchloom.core.spec import shown, whole
from batchloom.plan.edits import Edit
from batchloom.plan.ranks import Mesh, Place
from batchloom.store.reader import Store

require(MEGATRON)

from megatron.core import num_microbatches_calculator, parallel_state  # noqa: E402

Micro = dict[str, Any]


class MegatronPlace(TypedDict):
    """What a ``Loader`` is given of Megatron's processes."""

    rank: int
    world_size: int
    mesh: Mesh
    labels: Labels


def megatron_place() -> MegatronPlace:
    """Where this process stands, by ``parallel_state``: ``Loader(..., **megatron_place())``.

    Raises:
        TrainError: ``parallel_state`` is not initialised, or numbers its processes as no mesh does.
    """
    if not parallel_state.model_parallel_is_initialized():
        raise TrainError(
            "megatron.core.parallel_state does not know its processes yet: call initialize_model_parallel(...) first."
        )
    groups = {
        "tensor": parallel_state.get_tensor_model_parallel_group(),
        "context": parallel_state.get_context_parallel_group(),
        "data": parallel_state.get_data_parallel_group(),
        "pipeline": parallel_state.get_pipeline_model_parallel_group(),
    }
    ranks = {name: dist.get_process_group_ranks(group) for name, group in groups.items()}
    # Peers of the fastest kind are neighbours; of one that has none it does not matter.
    steps = {name: found[1] - found[0] if len(found) > 1 else 0 for name, found in ranks.items()}
    mesh = Mesh(
        tensor=len(ranks["tensor"]),
        context=len(ranks["context"]),
        pipeline=len(ranks["pipeline"]),
        slices="zigzag",
        order=tuple(sorted(steps, key=lambda name: steps[name])),
    )
    rank, world_size = dist.get_rank(), dist.get_world_size()
    place = mesh.place(rank, world_size)
    theirs = Place(
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_data_parallel_world_size(),
        parallel_state.get_context_parallel_rank(),
    )
    if place != theirs:
        raise TrainError(
            f"parallel_state has process {rank} at {theirs}, and a mesh of {mesh.order} at {place}: give "
            "initialize_model_parallel an order that names each kind of parallelism once."
        )
    return {"rank": rank, "world_size": world_size, "mesh": mesh, "labels": "shifted"}


def megatron_iterator(
    loader: Loader, *, attention_mask: bool = False, vp_stage: int | None = None
) -> Iterator[Micro]:
    """The micro-batches of a run, as Megatron's ``get_batch`` gives them; every rank calls it, and at the same time.

    Of the tensor-parallel ranks the first reads and the others are sent what it read; of the pipeline stages the first
    and the last read. Context-parallel ranks have their slices already, as ``get_batch_on_this_cp_rank`` takes them.

    Args:
        loader: of this process, with ``**megatron_place()``. Its own ``state_dict`` stands still on ranks that do not
            read: keep :func:`consumed_samples`, or ``loader.state_at(step)``.
        attention_mask: whether to give one; packed documents see each other without, unless the model looks at
            ``position_ids`` for that.
        vp_stage: of an interleaved pipeline the stage of the model chunk this is for.

    Yields:
        ``tokens`` and ``labels`` int64 [R, S], labels being next tokens, 0 where there is no loss; ``loss_mask``
        float32 [R, S]; ``position_ids`` int64 [R, S], which restart with each document; ``attention_mask`` bool
        [R, 1, S, S], True where a token must not be seen, or None. On stages between, all of them None.

    Raises:
        InputError: a stream, or a loader of another form.
        TrainError: ranks that do not read the same, or as many micro-batches or sequences a step as Megatron's
            calculator says (the latter when the step comes).
    """
    _check_loader(loader, attention_mask=attention_mask)
    require_agreement(loader)
    return _micro_batches(loader, attention_mask, vp_stage)


def _check_loader(loader: Loader, *, attention_mask: bool) -> None:
    spec, theirs = loader.spec, BatchSpec(**megatron_place())
    problems = [
        f"{name} {got!r}, and {wanted!r} is needed"
        for name, got, wanted in (
            ("place", _place(spec), _place(theirs)),
            ("labels", spec.labels, "shifted"),
            ("form", spec.form, "rows"),
            ("output", spec.output, "torch"),
        )
        if got != wanted
    ]
    if loader.streamed:
        problems.append("a stream, which has no consumed_samples: prepare the data")
    if attention_mask and spec.mesh.context > 1:
        problems.append(
            f"slices of {spec.mesh.context} context ranks, of which no attention_mask is made: leave it away"
        )
    if problems:
        raise InputError(
            f"Megatron cannot be fed from this Loader: {'; '.join(problems)}. Give Loader(..., **megatron_place())."
        )


def _place(spec: BatchSpec) -> tuple[Place, str]:
    """What of a process's place decides what it is given."""
    mesh = spec.mesh
    return mesh.place(spec.rank, spec.world_size), mesh.slices if mesh.context > 1 else "whole"


def _micro_batches(loader: Loader, attention_mask: bool, vp_stage: int | None) -> Iterator[Micro]:  # noqa: FBT001
    between = not (
        parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
        or parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    )
    if between and not attention_mask:
        for step in _steps(loader):
            yield from [_NOTHING.copy() for _ in range(_passes(loader, step))]
        return
    for read in _read(loader):
        yield megatron_micro(_sent(read), attention_mask=attention_mask)


_NOTHING: Micro = dict.fromkeys(("tokens", "labels", "loss_mask", "position_ids", "attention_mask"))


def _read(loader: Loader) -> Iterator[torch.Tensor]:
    """Ids, labels and positions of each micro-batch, int64 [3, R, S]; room for them where another rank reads."""
    device = device_of(parallel_state.get_tensor_model_parallel_group())
    if parallel_state.get_tensor_model_parallel_rank() == 0:
        for batch in loader:
            passes = _passes(loader, batch.step)
            for part in batch.split(len(batch["input_ids"]) // passes):
                keys = ("input_ids", "labels", "position_ids")
                yield torch.stack([part[key] for key in keys]).to(device)
        return
    for step in _steps(loader):
        passes, plan = _passes(loader, step), loader.plan.spec_at(step)
        rows = share_of(plan, loader.spec).rows // passes
        for _ in range(passes):
            shape = (3, rows, plan.seq_len // loader.spec.mesh.context)
            yield torch.empty(shape, dtype=torch.int64, device=device)


def _sent(read: torch.Tensor) -> torch.Tensor:
    """What the first tensor-parallel rank read, on all of them."""
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        first = parallel_state.get_tensor_model_parallel_src_rank()
        dist.broadcast(read, first, group=parallel_state.get_tensor_model_parallel_group())
    return read


def megatron_micro(read: torch.Tensor, *, attention_mask: bool) -> Micro:
    """A micro-batch under Megatron's names."""
    tokens, labels, positions = read.unbind()
    trained = labels != IGNORE
    return {
        "tokens": tokens,
        # Megatron looks scores up by them before it masks.
        "labels": labels * trained,
        "loss_mask": trained.float(),
        "position_ids": positions,
        "attention_mask": _unseen(positions) if attention_mask else None,
    }


def _unseen(positions: torch.Tensor) -> torch.Tensor:
    """Which tokens must not be seen, bool [R, 1, S, S]: those behind, and those of other documents."""
    documents = (positions == 0).cumsum(1)
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return ~same.tril()


def _steps(loader: Loader) -> Iterator[int]:
    """The numbers of the steps still to come."""
    step = loader.next_step
    while loader.plan.has_step(step):
        yield step
        step += 1


def _passes(loader: Loader, step: int) -> int:
    """Micro-batches of a step on each rank; refuses those that Megatron does not mean to do."""
    share = loader.share_at(step)
    try:
        theirs = (
            num_microbatches_calculator.get_num_microbatches(),
            num_microbatches_calculator.get_micro_batch_size(),
            num_microbatches_calculator.get_current_global_batch_size(),
        )
    except AttributeError:
        # Nobody has set the calculator up: the loop counts by itself.
        return share.passes
    size = loader.plan.spec_at(step).global_batch_size
    ours = (share.passes, share.micro_batch_size, size)
    if ours != theirs:
        raise TrainError(
            f"Step {step} of the plan is {ours[0]} micro-batches of {ours[1]} rows a rank, {ours[2]} sequences in all; "
            f"Megatron's calculator says {theirs[0]} of {theirs[1]}, {theirs[2]} in all. Give both the same "
            "micro_batch_size and global_batch_size; a rampup_batch_size is the plan's, too (rampup_edits)."
        )
    return ours[0]


def consumed_samples(loader: Loader, step: int) -> int:
    """Sequences before a step, over all ranks: what Megatron's checkpoints keep."""
    return loader.plan.positions_of(step)[0]


def go_on_from(loader: Loader, consumed: int) -> int:
    """Have a loader go on after so many sequences, as Megatron resumes; the step that comes next.

    The number says nothing of the plan it was counted in: ``loader.load_state_dict`` does, and refuses another.

    Raises:
        StateError: no number, or one inside a step; names the nearest.
    """
    number = whole(consumed)
    if number is None or number < 0:
        raise StateError(f"consumed_samples {shown(consumed)} is no number of sequences.")
    step, inside = loader.plan.course.step_at(number)
    if inside:
        before, after = loader.plan.positions_of(step)
        raise StateError(
            f"consumed_samples {number} lies inside step {step}, which holds {before} to {after - 1}: resume from "
            f"{before} or {after}. Was it counted with another global_batch_size?"
        )
    loader.load_state_dict(loader.state_at(step))
    return step


def rampup_edits(rampup_batch_size: Sequence[int], global_batch_size: int) -> list[Edit]:
    """Megatron's ``--rampup-batch-size START INCREMENT SAMPLES`` as edits of a plan of ``global_batch_size`` START.

    Apply them with ``loader.edit`` before the first step; then each step has as many sequences as Megatron's
    calculator says.

    Raises:
        InputError: the increment does not lead from START to ``global_batch_size``.
    """
    start, increment, samples = rampup_batch_size
    rise = global_batch_size - start
    if min(start, increment, samples, rise) < 1 or rise % increment:
        raise InputError(
            f"rampup_batch_size {start} {increment} {samples} does not lead to global_batch_size "
            f"{global_batch_size}: give a start below it, an increment that divides what lies between, and samples."
        )
    each = samples / (rise // increment)
    edits, size, step, consumed = [], start, 0, 0
    while size < global_batch_size:
        step, consumed = step + 1, consumed + size
        raised = int(consumed / each) if consumed <= samples else rise // increment
        if (due := start + raised * increment) != size:
            edits.append(Edit(step=step, global_batch_size=due))
            size = due
    return edits


def megatron_prefixes(store: Store) -> list[str]:
    """Weights and prefixes of a store's shards, as ``--data-path`` and a recipe's ``paths`` take them.

    Weighted by tokens, so that Megatron goes through all shards about equally often.

    Raises:
        InputError: what Megatron's readers would train on and should not (masked or removed tokens, preferences), or
            a store that has no files here.
    """
    if not store.on_disk:
        raise InputError(
            f"{store.place} is made up as it is read, and has no shards: batchloom prepare writes it."
        )
    if store.preferences:
        raise InputError(
            f"{store.place} holds preferences, whose rejected answers Megatron would learn to give."
        )
    if store.masked:
        kept = store.tokens - store.trained_tokens
        raise InputError(
            f"{store.place} has {kept:,} of {store.tokens:,} tokens that are not to be trained, and Megatron's readers "
            "see no masks: feed it through megatron_iterator, or, where documents were only removed, write the store "
            "without them (batchloom export --to megatron)."
        )
    lengths = [
        int(np.sum(store.lengths.slice(first, stop), dtype=np.int64))
        for first, stop in zip(store.bounds, store.bounds[1:], strict=False)
    ]
    pairs: list[str] = []
    for stem, tokens in zip(store.stems, lengths, strict=True):
        pairs += [str(tokens), str(stem)] if tokens else []
    return pairs
